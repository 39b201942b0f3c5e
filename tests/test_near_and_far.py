"""The engine of scattered points in few dimensions: entries are within the stated error, gradients those of tiles."""

from __future__ import annotations

import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, RBFKernel, RQKernel, ScaleKernel
from torch import Tensor

import sketchgp
from cases import pairwise
from gp_models import TORCH_WARNINGS, Plain, dense, gradient_error, iterative, marginal, relative
from sketchgp import InputError
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import AccurateProduct
from sketchgp.operators.engines import NEAR_AND_FAR, TILED, choose
from sketchgp.operators.engines.base import say_missing
from sketchgp.operators.engines.near_and_far import Split

pytest.importorskip("finufft")
pytestmark = TORCH_WARNINGS

FILE = "sketchgp.operators.engines.near_and_far"
SMOOTHNESS = (0.5, 1.5, 2.5, math.inf)
# nanoseconds of a pair of near points, which decide how the kernel is split
PRICES = {"balanced": (0.6, (120, 400)), "far": (1e3, (1e5, 1)), "near": (1e-6, (1e-6, 1e6))}
CLOUDS = {
    "uniform": lambda x: x,
    "clusters, copies": lambda x: torch.cat([x[:200], 0.5 + 1e-3 * x[200:], x[:20]]),
    "a far point": lambda x: torch.cat([x, x[:1] + 30]),
    "a constant": lambda x: torch.cat([x, torch.full_like(x[:, :1], 7.0)], dim=1),
    "a gap": lambda x: x + 5 * (x[:, :1] > 0.5).to(x),
}
ROUNDING = {torch.float32: 3e-7, torch.float64: 1e-14}


def cloud(d: int, n: int = 300, name: str = "uniform", dtype: torch.dtype = torch.float64, seed: int = 3) -> Tensor:
    x = torch.rand(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return CLOUDS[name](x).to(dtype)


def kernel_of(nu: float, x: Tensor, lengthscale: float = 0.2) -> Any:
    d = x.shape[-1]
    base = RBFKernel(ard_num_dims=d) if nu == math.inf else MaternKernel(nu=nu, ard_num_dims=d)
    base.lengthscale = lengthscale * torch.linspace(1, 2, d)
    kernel = ScaleKernel(base)
    kernel.outputscale = 1.7
    return kernel.to(x.dtype)


def entries(kernel: Any, nu: float, x1: Tensor, x2: Tensor) -> Tensor:
    """Return the kernel over k(0) in float64, from distances that are differences."""
    z1, z2 = (x.double() / kernel.base_kernel.lengthscale.detach().double() for x in (x1, x2))
    r = (z1.unsqueeze(1) - z2).square().sum(dim=-1).sqrt() * (1 if nu == math.inf else math.sqrt(2 * nu))
    if nu == math.inf:
        return torch.exp(-r.square() / 2)
    return {0.5: 1, 1.5: 1 + r, 2.5: 1 + r + r.square() / 3}[nu] * torch.exp(-r)


@pytest.mark.parametrize(
    ("d", "nu", "dtype", "name", "price"), pairwise((1, 2, 3), SMOOTHNESS, ROUNDING, CLOUDS, PRICES)
)
def test_every_entry_is_within_the_stated_error(
    d: int, nu: float, dtype: torch.dtype, name: str, price: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a square matrix and of one of two sets of points, whatever delta is; gradients are those of tiles."""
    for constant, value in zip(("_NEAR", "_MADE"), PRICES[price], strict=True):
        monkeypatch.setattr(f"{FILE}.{constant}", value)
    x, others = cloud(d, name=name, dtype=dtype), cloud(d, 50, name, dtype, seed=4)[:40]
    kernel = kernel_of(nu, x)
    scale, tolerance = float(kernel.outputscale.detach()), 1e-6 if dtype == torch.float32 else 1e-10
    columns = torch.arange(0, len(x), 8)
    square, other = KernelMatrix.of(kernel, x, engine="near_and_far"), KernelMatrix.of(kernel, others, x)
    for matrix in (square, other.by("near_and_far")):
        assert choose(matrix.pairs) is NEAR_AND_FAR
        parts = NEAR_AND_FAR.parts(matrix.pairs)
        assert 0 < parts.error < tolerance
        if name == "uniform" and price != "balanced":
            assert (parts.near is None or parts.far is not None) if price == "far" else parts.far is None
        found = matrix.product(torch.eye(len(x), dtype=dtype)[:, columns]).double() / scale
        assert float((found - entries(kernel, nu, matrix.x1, x[columns])).abs().max()) < parts.error + ROUNDING[dtype]
        generator = torch.Generator().manual_seed(5)
        left, right = (torch.randn(size, 3, dtype=dtype, generator=generator) for size in matrix.shape)
        slopes = matrix.derivative(left, right)[2:]
        exact = matrix.double().by("tiled").derivative(left.double(), right.double())[2:]
        size = max(float(g.abs().max()) for g in exact)
        limit = 1e-3 if dtype == torch.float32 else 1e-7
        assert all(float((f - e).abs().max()) < limit * size for f, e in zip(slopes, exact, strict=True))


@pytest.mark.parametrize("nu", SMOOTHNESS)
def test_both_parts_add_up_to_the_kernel(nu: float) -> None:
    """Their slopes are derivatives, and each is as small as is said beyond its radius."""
    q = torch.logspace(-6, 2, 200, dtype=torch.float64).requires_grad_()
    kernel = {0.5: 1, 1.5: 1 + q.sqrt(), 2.5: 1 + q.sqrt() + q / 3}.get(nu, 0) * torch.exp(-q.sqrt())
    kernel = torch.exp(-q / 2) if nu == math.inf else kernel
    for t in (0.0, math.inf) if nu == math.inf else (1e-4, 0.3, 5.0, math.inf):
        split, total = Split(nu, t), torch.zeros_like(q)
        for near in (True, False):
            value, slope = split.at(q, near)
            total = total + value
            if value.requires_grad:
                (expected,) = torch.autograd.grad(value.sum(), q, retain_graph=True)
                torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)
            radius, rest = split.radius(near, 1e-8)
            assert rest <= 1e-8 and bool((split.at(radius**2 + q, near)[0] <= rest).all())
        torch.testing.assert_close(total, kernel, rtol=1e-12, atol=1e-14)


def test_it_is_taken_for_float32_where_it_is_faster() -> None:
    x = cloud(2, 8000, dtype=torch.float32)
    kernel = kernel_of(1.5, x)
    assert choose(KernelMatrix.of(kernel, x).pairs) is NEAR_AND_FAR
    assert choose(KernelMatrix.of(kernel, x[:1000]).pairs) is not NEAR_AND_FAR
    assert choose(KernelMatrix.of(kernel, x[:50], x).pairs) is TILED  # once: making the parts takes longer
    others = [x.double(), cloud(4, 8000, dtype=torch.float32), torch.cat([x, x[:1] * torch.nan])]
    assert all(choose(KernelMatrix.of(kernel_of(1.5, z), z).pairs) is not NEAR_AND_FAR for z in others)
    assert choose(KernelMatrix.of(RQKernel(), x).pairs) is not NEAR_AND_FAR
    matrix, v = KernelMatrix.of(kernel, x), torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1)).double()
    exact = matrix.double().by("tiled").product(v)
    assert relative(AccurateProduct(matrix)(v), exact) < 1e-8  # residuals of float32 matrices


def test_what_it_cannot_take_is_refused() -> None:
    x = cloud(2)
    kernel = kernel_of(1.5, x)
    refused: list[tuple[Any, Tensor, str]] = [
        (kernel, torch.cat([x, x[:1] + torch.inf]), "finite points"),
        (kernel_of(1.5, cloud(4)), cloud(4), "at most 3 coordinates"),
        (kernel, x.clone().requires_grad_(), "inputs have gradients"),
        (kernel, x.expand(2, *x.shape), "one matrix"),
        (kernel + kernel, x, "alone or scaled"),
        (RQKernel().double(), x, "alone or scaled"),
    ]
    for one, points, message in refused:
        with pytest.raises(InputError, match=message):
            KernelMatrix.of(one, points, engine="near_and_far")
    with sketchgp.settings.memory_budget(2**10), pytest.raises(InputError, match="memory budget"):
        KernelMatrix.of(kernel, x, engine="near_and_far")


def test_without_the_package_tiles_take_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(f"{FILE}.installed", lambda package: False)
    say_missing.cache_clear()
    x = cloud(2, 8000, dtype=torch.float32)
    with caplog.at_level(logging.INFO, "sketchgp"):
        assert choose(KernelMatrix.of(kernel_of(1.5, x), x).pairs) is not NEAR_AND_FAR
    assert "sketchgp[maps]" in caplog.text
    with pytest.raises(InputError, match="finufft is missing"):
        KernelMatrix.of(kernel_of(1.5, x), x, engine="near_and_far")


@pytest.mark.parametrize("n", [1, 2, 5])
def test_few_points(n: int) -> None:
    """Different ones, and copies of one."""
    for x in (cloud(2, n), cloud(2, n)[:1].expand(n, 2).contiguous()):
        matrix = KernelMatrix.of(kernel_of(0.5, x), x, engine="near_and_far")
        torch.testing.assert_close(
            matrix.product(torch.eye(n).double()), matrix.to_dense().detach(), rtol=0, atol=2e-10
        )


def test_one_thread_at_a_time_transforms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of older versions of the package hold the work of a transform, which threads would share."""
    for constant, value in zip(("_NEAR", "_MADE"), PRICES["far"], strict=True):
        monkeypatch.setattr(f"{FILE}.{constant}", value)
    x = cloud(2)
    matrix = KernelMatrix.of(kernel_of(1.5, x), x, engine="near_and_far")
    vector, far, inside, most = torch.eye(len(x), 2).double(), NEAR_AND_FAR.parts(matrix.pairs).far, [0], [0]
    expected = matrix.product(vector)
    assert far is not None

    class Slow:
        def __init__(self, plan: Any) -> None:
            self.plan = plan

        def execute(self, numbers: Any) -> Any:
            inside[0] += 1
            time.sleep(0.01)
            most[0] = max(most[0], inside[0])
            inside[0] -= 1
            return self.plan.execute(numbers)

    monkeypatch.setattr(far, "plans", {key: Slow(plan) for key, plan in far.plans.items()})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(matrix.product, [vector] * 8))
    assert most == [1] and all(torch.equal(one, expected) for one in found)


def test_a_model() -> None:
    """Mean and gradient of the marginal likelihood are the dense ones; the report tells the error of entries."""
    x, others = cloud(2, 700), cloud(2, 20, seed=9)
    y = torch.sin(9 * x[:, 0]) + x[:, 1] + 0.1 * torch.randn(len(x), generator=torch.Generator().manual_seed(7))
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5))).double()
    model.covar_module.base_kernel.lengthscale, model.likelihood.noise = 0.2, 0.01
    with dense():
        expected, gradient = model.eval()(others).mean.detach(), marginal(model)[1]
    sketchgp.accelerate(model, matmul="near_and_far", solver=sketchgp.ConjugateGradients(tol=1e-8))
    with iterative(probes=60), sketchgp.record_solves() as solves:
        assert relative(model.eval()(others).mean.detach(), expected) < 1e-6
        assert gradient_error(marginal(model)[1], gradient) < 3e-2
    assert any("of k(0)" in note for note in solves[0].notes)
