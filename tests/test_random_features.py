"""Random numbers by their place, the sampler of spectral densities, and feature maps that are made anew."""

from __future__ import annotations

import math

import pytest
import torch
from gpytorch.kernels import RBFKernel

from cases import each
from problems import points, relative, set_scales
from sketchgp import ArcCosineKernel, InputError
from sketchgp.operators import KernelMatrix
from sketchgp.operators.feature_map import RandomFeatures
from sketchgp.operators.spectrum import Philox, philox
from test_pathwise_variance import KERNELS as STATIONARY
from test_pathwise_variance import _kernel

X = points(6, seed=1)


def kernel_of(name):
    return _kernel(name).requires_grad_(False)


def features_of(name, seed=3):
    return RandomFeatures(kernel_of(name), points(1, seed=2), seed)


# --- numbers by their place ---------------------------------------------------------------------------------------


def test_philox_is_the_published_one():
    """Known answers of Philox4x32-10 (Random123)."""
    zero, most = torch.zeros(1, dtype=torch.int64), torch.full((1,), 0xFFFFFFFF)
    for counter, key, wanted in (
        (zero, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (most, 0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ):
        assert tuple(int(word) for word in philox(*[counter] * 4, key, key)) == wanted


def test_numbers_hang_on_their_place_alone(monkeypatch):
    numbers = Philox(1, "a")(torch.arange(3000), 7)
    assert numbers.dtype == torch.float64 and bool(((numbers > 0) & (numbers < 1)).all())
    assert abs(float(numbers.mean()) - 0.5) < 0.01 and abs(float(numbers.var()) * 12 - 1) < 0.03
    rows = torch.tensor([2999, 5, 5])
    assert torch.equal(Philox(1, "a")(rows, 3), numbers[rows, :3])
    monkeypatch.setattr("sketchgp.operators.spectrum._NUMBERS", 16)
    assert torch.equal(Philox(1, "a")(torch.arange(3000), 7), numbers)
    for other in (Philox(2, "a"), Philox(1, "b")):
        assert not torch.equal(other(rows, 3), numbers[rows, :3])
    assert not torch.equal(Philox(1, "a")(rows + 2**32, 3), numbers[rows, :3])
    assert Philox(1, "a")(rows[:0], 3).shape == (0, 3)


# --- features -----------------------------------------------------------------------------------------------------


@each("name", STATIONARY)
def test_features_make_the_kernel(name):
    """Mean over 12 seeds of 512 features, within five of its standard errors."""
    kernel, count = kernel_of(name), 512
    wanted, found = kernel(X).to_dense(), []
    for seed in range(12):
        phi = features_of(name, seed)(X, 0, count // 2)
        assert phi.shape == (6, count) and phi.dtype == torch.float64
        found.append(phi @ phi.mT / count)
    found = torch.stack(found)
    error = (found.mean(dim=0) - wanted).abs()
    assert bool((error <= 5 * found.std(dim=0) / math.sqrt(12) + 2e-3 * wanted.abs().max()).all())
    assert float(found.std(dim=0).max() / wanted.abs().max()) < 0.35


@each("name", ["matern12", "sum", "product", "periodic"])
def test_features_are_the_same_for_any_split(name):
    """Also where frequencies were kept, and where they were not."""
    whole = features_of(name)
    first, second = whole.pairs(whole.prepare(X), 0, 700)
    for cuts in ((0, 1, 2, 255, 256, 257, 700), (0, 300, 700)):
        parts = features_of(name)
        parts._kept_bytes = 2**40  # nothing more is kept
        made = parts.prepare(X)
        found = [parts.pairs(made, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
        for members, wanted in zip(zip(*found, strict=True), (first, second), strict=True):
            assert relative(torch.cat(members, dim=1), wanted) < 1e-12
    assert relative(whole(X[2:4], 100, 130), torch.cat([first[2:4, 100:130], second[2:4, 100:130]], dim=1)) < 1e-12


def test_memory_of_features_does_not_grow():
    made = RandomFeatures(kernel_of("rbf-ard"), points(1), 0)
    made._kept_bytes = 2**26 - 256 * 3 * 8
    made(X, 0, 2000)
    assert sum(w.nbytes for kept in made._kept.values() for w in kept) <= 256 * 3 * 8


def test_features_in_float32_keep_their_digits():
    """Of heavy tails and many turns."""
    for name in ("laplace", "matern12", "rbf"):
        kernel = set_scales(STATIONARY[name](), 1.0, 0.01).requires_grad_(False)
        x, origin = (points(20) * 64).round() / 64, torch.full((1, 3), 0.5, dtype=torch.float64)
        exact = RandomFeatures(kernel.double(), origin, 0)(x, 0, 200)
        found = RandomFeatures(kernel.float(), origin.float(), 0)(x.float(), 0, 200)
        assert found.dtype == torch.float32
        assert relative(found.double(), exact) < 1e-4, name


def test_gradients_of_features():
    x = X.clone().requires_grad_()
    f = RandomFeatures(kernel_of("product"), points(1), 0)
    assert torch.autograd.gradcheck(lambda x: f(x, 0, 4), (x,))


def test_what_has_no_features_is_refused():
    with pytest.raises(InputError, match="has no random features here"):
        RandomFeatures(RBFKernel() + MyKernel(), points(1).float(), 0)


class MyKernel(RBFKernel):
    """It may compute anything."""


# --- the arc-cosine kernel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arc_cosine_kernel(order):
    """Against units of a layer; its diagonal; gradients at equal and opposite points."""
    kernel, generator = ArcCosineKernel(order).double(), torch.Generator().manual_seed(0)
    w = torch.randn(400_000, 3, dtype=torch.float64, generator=generator)
    units = (X @ w.mT).clamp_min(0) ** order if order else (X @ w.mT > 0).double()
    wanted = 2 * units @ units.mT / len(w)
    assert relative(kernel(X).to_dense(), wanted) < 0.02
    torch.testing.assert_close(kernel(X, diag=True), kernel(X).to_dense().diagonal())
    x = torch.cat([X[:2], -X[:1]]).requires_grad_()
    (slope,) = torch.autograd.grad(kernel(x).to_dense().sum(), x)
    assert bool(torch.isfinite(slope).all())
    assert KernelMatrix.of(kernel, X).to_dense().shape == (6, 6)
    with pytest.raises(InputError, match="order expects an integer from 0 to 2"):
        ArcCosineKernel(3)
