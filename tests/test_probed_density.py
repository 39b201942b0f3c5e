"""Estimated log densities: their gradient is the derivative of their value, and they know how sure they are."""

from __future__ import annotations

import math
import warnings
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import PolynomialKernel, RBFKernel
from torch import Tensor

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, Plain, dense, iterative, marginal, nearly_constant, scaled
from property_cases import Case, model_of
from sketchgp.density import Probes, standard_error
from sketchgp.operators import KernelMatrix
from sketchgp.operators.access import Access, Remainder
from sketchgp.solvers import ConjugateGradients, System

pytestmark = TORCH_WARNINGS


def vector(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def put(model: Any, values: Tensor) -> None:
    for parameter, part in zip(model.parameters(), values.split([p.numel() for p in model.parameters()]), strict=True):
        parameter.data.copy_(part.reshape(parameter.shape))


def loss(model: Any) -> Tensor:
    mll = sketchgp.ExactMarginalLogLikelihood(model.likelihood, model)
    return -mll(model(*model.train_inputs), model.train_targets).sum()


def accelerated(name: str, preconditioner: Any, **choices: Any) -> Any:
    model = sketchgp.accelerate(SOLVED[name].build()[0], preconditioner=preconditioner, **choices)
    return model.train()


@pytest.mark.parametrize("preconditioner", [sketchgp.RPCholesky(rank=15), sketchgp.Nystrom(rank=15), None], ids=repr)
@pytest.mark.parametrize("name", ["scale-rbf-ard", "fixed-noise", "batch", "hadamard"])
def test_the_gradient_is_the_derivative_of_the_value(name: str, preconditioner: Any) -> None:
    """By differences of values with the same probes and pivots, along a random direction."""
    model = accelerated(name, preconditioner)
    acceleration = model._sketchgp
    with iterative(tol=1e-8), acceleration.having(probe_seed=0, probe_count=7), acceleration.cache.holding():
        loss(model).backward()
        gradient = torch.cat(
            [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
        )
        start = vector(model)
        direction = torch.randn(len(start), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        values = []
        for step in (1e-4, -1e-4):
            put(model, start + step * direction)
            values.append(float(loss(model).detach()))
    expected = (values[0] - values[1]) / 2e-4
    assert float(gradient @ direction) == pytest.approx(expected, rel=1e-3 if preconditioner is None else 2e-5)


def test_a_gradient_that_is_lost_to_rounding_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """LAPACK fails where Ritz values differ by forty orders of magnitude."""

    def fails(*arguments: Any) -> Any:
        raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")

    model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=15))
    with iterative():
        value = loss(model)
    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(sketchgp.NumericalError, match="lost to rounding"):
        value.backward()


def test_the_gradient_where_a_preconditioner_leaves_eigenvalues_of_very_different_sizes() -> None:
    """Large eigenvalues of ``P^-1 A`` contribute as much to the gradient as those near one."""
    x = torch.rand(25, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(4 * x[:, 0])
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), scaled(gpytorch.kernels.MaternKernel(nu=0.5)))
    model.double().likelihood.noise_covar.register_constraint("raw_noise", gpytorch.constraints.GreaterThan(1e-10))
    model.likelihood.noise = 1e-9
    model = sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=4)).train()
    raw = model.covar_module.raw_outputscale
    with iterative(tol=1e-8), model._sketchgp.cache.holding():
        loss(model).backward()
        values = []
        for step in (1e-3, -2e-3):
            raw.data.add_(step)
            values.append(float(loss(model).detach()))
    assert float(raw.grad) == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-2)


def test_of_few_points_every_seed_says_the_same() -> None:
    """Ten columns of a factor cost nothing and leave next to nothing of a smooth kernel to the probes.

    Where a gradient is small, probes that leave more than that to chance send the fits of some seeds the wrong way.
    """
    x = torch.linspace(0, 2, 11).unsqueeze(-1)
    model = Plain(x, torch.sin(2 * math.pi * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood(), scaled(RBFKernel()))
    model.covar_module.base_kernel.lengthscale = model.covar_module.outputscale = model.likelihood.noise = math.log(2)

    def gradient() -> float:
        model.zero_grad()
        loss(model.train()).backward()
        return float(model.covar_module.base_kernel.raw_lengthscale.grad)

    with dense():
        expected = gradient()
    for seed in (0, 1, 10):
        sketchgp.accelerate(model, probe_seed=seed)
        with iterative(probes=10, tol=1e-4), gpytorch.settings.max_cholesky_size(0):
            assert gradient() == pytest.approx(expected, abs=1e-3)


def test_lanczos_vectors() -> None:
    """``W^T P W = 1`` and ``W^T A W = T`` for the matrices by which they are known."""
    x = torch.rand(60, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kernel = gpytorch.kernels.RBFKernel().double()
    kernel.lengthscale = 0.3
    system = System(KernelMatrix.of(kernel, x), torch.full((60,), 0.05, dtype=torch.float64))
    built = sketchgp.RPCholesky(rank=12).build(system.operator, system.noise)
    rhs = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    solver = ConjugateGradients(tol=1e-6)
    value, _, report, matrices, vectors = solver.tridiagonalize(system, rhs, built, 3)  # the last column is no probe
    matrix = kernel(x).to_dense().detach() + 0.05 * torch.eye(60, dtype=torch.float64)
    assert report.converged
    assert float((matrix @ value - rhs).norm(dim=0).max()) < 1e-5
    for t, w, column in zip(matrices, vectors, rhs.mT, strict=False):
        k = int((w.norm(dim=0) > 0).sum())
        assert k > 4
        assert torch.allclose(w[:, :k].mT @ built.to_dense() @ w[:, :k], torch.eye(k, dtype=torch.float64), atol=1e-4)
        assert torch.allclose(w[:, :k].mT @ matrix @ w[:, :k], t[:k, :k], atol=1e-4)
        first = torch.linalg.solve(built.to_dense(), column)
        assert torch.allclose(w[:, 0], first / (first @ column).sqrt(), atol=1e-9)


def test_lanczos_vectors_stay_within_the_memory_budget() -> None:
    """The first 20 are kept in any case: those of the same solve with all memory, and the value hardly changes."""
    model = accelerated("scale-rbf-ard", None)
    found = []
    for budget in (10**9, 1):
        with (
            iterative(tol=1e-6),
            sketchgp.settings.memory_budget(budget),
            model._sketchgp.having(probe_seed=0, probe_count=5),
            sketchgp.record_solves() as solves,
        ):
            model.zero_grad()
            value = loss(model)
            value.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        found.append((float(value.detach()), solves[0], gradient))
    assert found[0][1].iterations == found[1][1].iterations > 20
    assert found[0][1].notes == []
    assert found[1][1].notes == ["the memory budget allows 20 Lanczos vectors of a probe and no more"]
    assert found[0][1].converged
    assert found[1][1].converged
    assert found[1][0] == pytest.approx(found[0][0], abs=5e-3)
    assert abs(found[1][0] - found[0][0]) > 1e-9, "the data must make the test meaningful"
    assert float((found[1][2] - found[0][2]).norm() / found[0][2].norm()) < 0.05


def test_the_standard_error_is_that_of_the_probes() -> None:
    """Of many losses with other probes: their deviations from the exact one are as large as each of them says."""
    model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=4))
    with dense():
        exact = -float(marginal(model)[0])
    deviations, errors = [], []
    with iterative(tol=1e-3):
        for seed in range(20):
            probes = Probes(watched=True)
            with model._sketchgp.having(probe_seed=seed, probe_count=5, density=probes):
                value = loss(model)
                value.backward()
            deviations.append(float(value.detach()) - exact)
            errors.append(standard_error(probes.values))
    assert 0.7 < math.sqrt(sum(d**2 for d in deviations) / sum(e**2 for e in errors)) < 1.4


def test_a_single_probe_knows_nothing_of_its_error() -> None:
    model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=4))
    probes = Probes(watched=True)
    with iterative(tol=1e-4), model._sketchgp.having(probe_seed=0, probe_count=1, density=probes):
        loss(model).backward()
    assert standard_error(probes.values) == math.inf
    assert standard_error([]) == 0


def test_float32() -> None:
    model = sketchgp.accelerate(SOLVED["scale-rbf-ard"].build(torch.float32)[0]).train()
    twin = accelerated("scale-rbf-ard", "auto")
    found = []
    for one in (model, twin):
        with gpytorch.settings.max_cholesky_size(20), one._sketchgp.having(probe_seed=0, probe_count=20):
            loss(one).backward()
        found.append(torch.cat([p.grad.double().flatten() for p in one.parameters()]))
    assert float((found[0] - found[1]).norm() / found[1].norm()) < 2e-3


@pytest.mark.parametrize("preconditioner", [sketchgp.RPCholesky(rank=20), None], ids=repr)
def test_float32_that_has_lost_the_matrix(preconditioner: Any) -> None:
    """Its eigenvalues say so, and products are in float64 from there on; float64 models never need it."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = nearly_constant(dtype, preconditioner=preconditioner, matmul="tiled")
        with warnings.catch_warnings(), iterative(tol=1e-3):
            if preconditioner is None:  # nothing ends the first try, and it does not converge
                warnings.simplefilter("ignore", sketchgp.ConvergenceWarning)
            value = loss(model)
            value.backward()
        gradient = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        found[dtype] = float(value.detach()), gradient, model._sketchgp.doubled
    with dense():
        exact = -float(marginal(model)[0])
    (value, gradient, doubled), (double, expected, never) = found[torch.float32], found[torch.float64]
    assert (doubled, never) == (True, False)
    assert value == pytest.approx(exact, abs=0.02)
    assert double == pytest.approx(exact, abs=0.02)
    assert float((gradient - expected).norm() / expected.norm()) < 0.2


def test_a_stored_remainder_loses_nothing() -> None:
    """Of the matrix that float32 products lose, the loss is the exact one without float64 products."""
    model = nearly_constant(torch.float32)
    with dense():
        exact = -float(marginal(nearly_constant(torch.float64))[0])
    with iterative(tol=1e-3):
        assert float(loss(model).detach()) == pytest.approx(exact, abs=0.02)
    assert not model._sketchgp.doubled


def test_products_with_a_stored_remainder() -> None:
    """Of several tiles, to less than float32 can say of an entry of K."""
    x = torch.rand(700, 2, generator=torch.Generator().manual_seed(1))
    kernel = gpytorch.kernels.ScaleKernel(RBFKernel()) + gpytorch.kernels.MaternKernel(nu=1.5)
    kernel.kernels[0].outputscale, kernel.kernels[1].lengthscale = 1e4, 3.0
    vectors = torch.randn(700, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for matrix, budget, better in (
        (KernelMatrix.of(kernel, x), 10**8, 1e-6),
        (KernelMatrix.of(kernel, x) + KernelMatrix.of(RBFKernel(), x), 10**8, 1.0),  # entries are not had in float64
        (KernelMatrix.of(kernel, x, engine="tiled"), 10**8, 1.0),  # as the user chose
        (KernelMatrix.of(kernel, x), 2 * 700**2 - 1, 1.0),
    ):
        system = System(matrix, torch.full((700,), 0.1))
        with sketchgp.settings.memory_budget(budget), torch.no_grad():
            expected, before = system.accurate_product(vectors), system.product(vectors)
            system.store_remainder()
            error = (system.product(vectors) - expected).norm() / (before - expected).norm()
        assert float(error) == 1.0 or better < 1.0
        assert float(error) < better or better == 1.0


def test_a_lattice_is_multiplied_and_not_stored() -> None:
    """Products with Fourier transforms take a small part of the time of a stored matrix."""
    cells = torch.cartesian_prod(torch.arange(70.0), torch.arange(70.0))
    kernel = gpytorch.kernels.RQKernel()  # no other engine has fast products with it
    kernel.lengthscale = 200.0
    for x, stored in ((cells, False), (cells + 0.3 * torch.rand(cells.shape), True)):
        assert Remainder.serves(Access(KernelMatrix.of(kernel, x)), 10**9) == stored


def test_the_quadratic_form_errs_by_the_square_of_the_residual() -> None:
    """And is a lower bound, also where rounding has ended a recurrence and begun another."""
    model = nearly_constant(torch.float32, matmul="tiled")
    matrix = KernelMatrix.of(model.covar_module, model.train_inputs[0], engine="tiled")
    system = System(matrix, torch.full((300,), 1.0))
    b = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    dense_matrix = system.access.block(torch.arange(300), torch.arange(300)) + torch.eye(300, dtype=torch.float64)
    exact = (b.double() * torch.linalg.solve(dense_matrix, b.double())).sum(dim=0)
    _, forms, *_ = ConjugateGradients(tol=1e-2).tridiagonalize(system, b, None, 1)
    error = exact - forms
    assert bool((error > -1e-9 * exact).all())
    assert float((error / exact).max()) < 1e-4


def test_a_gradient_for_which_the_preconditioner_stands_still() -> None:
    """Its mean over many probes is the exact one, and the value is the same as with the other gradient."""
    found = []
    for still in (False, True):
        model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=4))
        density = Probes(still=still)
        with iterative(tol=1e-6), model._sketchgp.having(probe_seed=0, probe_count=1500, density=density):
            value = loss(model)
            value.backward()
        found.append((float(value.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])))
    with dense():
        twin = SOLVED["scale-rbf-ard"].build()[0].train()
        loss(twin).backward()
    exact = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert found[0][0] == found[1][0]
    assert float((found[1][1] - exact).norm() / exact.norm()) < 0.05
    assert float((found[1][1] - found[0][1]).norm()) > 0


@pytest.mark.parametrize("seed", [0, 7, None])
def test_probes_of_two_losses(seed: int | None) -> None:
    model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=15), probe_seed=seed)
    with iterative(tol=1e-8), torch.no_grad():
        first, second = float(loss(model)), float(loss(model))
        other = float(loss(accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=15), probe_seed=1)))
    assert (first == second) == (seed is not None)
    assert first != other


def test_losses_with_deterministic_probes_are_one_function() -> None:
    """A step far away and back, for which pivots are chosen anew otherwise."""
    found = {}
    for fixed in (True, False):
        model = accelerated("scale-rbf-ard", sketchgp.RPCholesky(rank=15))
        start = vector(model)
        with iterative(tol=1e-6), gpytorch.settings.deterministic_probes(fixed):
            torch.manual_seed(0)
            first = loss(model)
            first.backward()
            model.covar_module.base_kernel.lengthscale = 0.02
            loss(model).backward()
            put(model, start)
            torch.manual_seed(0)
            found[fixed] = float(loss(model).detach() - first.detach())
    assert abs(found[True]) < 1e-12
    assert abs(found[False]) > 1e-6, "the data must make the test meaningful"


def test_a_preconditioner_that_rounding_makes_indefinite() -> None:
    """A row so far off that nothing of the others is left beside it: a warning, and a gradient that is a number."""
    case = Case(
        family="model", form="sum in forward", kernel="polynomial + polynomial", n=5, d=6, columns=1, dtype="float64",
        noise=0.0019, differing=False, outputscale=1.2e-6, targets=1e6, lengthscale=1.0, spread=1.0, shift=10.0,
        repeated=0.5, far=-1e5, solver="ASkotch(max_passes=40)", preconditioner="RPCholesky(rank=5)", matmul="tiled",
        limit=0, seed=507,
    )  # fmt: skip
    model = model_of(case)[0]
    sketchgp.accelerate(model, preconditioner=sketchgp.RPCholesky(rank=5), matmul="tiled").train()
    with iterative(probes=100), gpytorch.settings.max_cholesky_size(0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(model).backward()
    assert any("lost to rounding" in str(one.message) for one in caught)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_ritz_values_that_rounding_makes_negative() -> None:
    """One far row of a polynomial kernel, without a preconditioner: a warning, and a gradient that is a number."""
    x = 10 + 0.01 * torch.randn(80, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[0] = -100
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 1.0
    model = Plain(x, torch.sin(x[:, 0]), likelihood, PolynomialKernel(2) * PolynomialKernel(2)).double()
    sketchgp.accelerate(model, preconditioner=None).train()
    with iterative(), gpytorch.settings.max_cholesky_size(0), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss(model).backward()
    assert any("lost to rounding" in str(one.message) for one in caught)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
