"""The bracket of a loss: both ends hold, whatever the model, and ``fit`` says where there is none.

The reference is the formula with dense float64 matrices: the factor by an eigendecomposition-free route, ``K(:, S)
K(S, S)^-1 K(S, :)`` by a solve, and w and the pivots taken from the bound.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels
from torch import Tensor

import sketchgp
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, N, Plain, data, dense, iterative, marginal
from sketchgp.density import Bound, Exact
from sketchgp.operators import LowRankPlusDiagonal

pytestmark = TORCH_WARNINGS
RANK = 15
SINGLE = ["scale-rbf-ard", "fixed-noise", "additive-kernel", "product-forward", "hadamard", "deep"]
PRODUCTS = ("product-forward", "hadamard")  # stored in the dtype of the model
UNCERTAIN = ("lcm", "spectral-mixture")  # whose entries are not known to float64


def by_bound(model: Any, rank: int = RANK) -> tuple[Tensor, Bound]:
    """The marginal log likelihood from below, and the bound."""
    bound = Bound()
    sketchgp.accelerate(model, sketchgp.RPCholesky(rank=rank)).train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    with torch.no_grad(), model._sketchgp.having(density=bound):
        value = mll(model(*model.train_inputs), model.train_targets, *model.train_inputs)
    return value, bound


def formula(model: Any, pivots: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper ends of the marginal log likelihood a row, densely, of a model in training mode."""
    output = model.likelihood(model(*model.train_inputs), *model.train_inputs)
    prior = model(*model.train_inputs).lazy_covariance_matrix.to_dense()
    a, y = output.covariance_matrix, (model.train_targets.reshape(-1) - output.mean.reshape(-1)).unsqueeze(-1)
    noise = (a - prior).diagonal()
    columns = prior[:, pivots]
    below = columns @ torch.linalg.solve(columns[pivots], columns.mT)
    form = (y.mT @ torch.linalg.solve(a, y)).squeeze()
    determinant = torch.logdet(below + torch.diag(noise))
    excess = torch.log1p((prior - below).diagonal() / noise).sum()
    n = len(y)
    lower, upper = (-0.5 * (form + end + n * math.log(2 * math.pi)) / n for end in (determinant + excess, determinant))
    return lower, upper


# --- the formula ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in SINGLE] + [(name, torch.float32) for name in SINGLE if name not in PRODUCTS],
)
def test_both_ends_are_those_of_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    model, _ = SOLVED[name].build(dtype)
    value, bound = by_bound(model)
    assert bound.gap is not None
    pivots = model._sketchgp.cache._selection.pivots
    assert pivots is not None
    reference, _ = SOLVED[name].build()
    reference.load_state_dict({key: part.double() for key, part in model.state_dict().items()})
    data = [x.double() if x.is_floating_point() else x for x in model.train_inputs]
    reference.set_train_data(tuple(data), model.train_targets.double(), strict=False)
    reference.train()
    with torch.no_grad(), dense():
        lower, upper = formula(reference, pivots)
    loose, n = 0.02 * float(upper - lower), model.train_targets.numel()
    rounded = 1e-5  # what both ends count of it
    assert float(lower) - loose - rounded < float(value) < float(lower) + 1e-6
    assert float(upper) - 1e-6 < float(value) + bound.gap / n < float(upper) + loose + rounded


@pytest.mark.parametrize("name", [name for name in SOLVED if name != "ski"])  # an interpolated K is not semidefinite
def test_the_exact_value_is_between_the_ends(name: str) -> None:
    """Of every form of model, batches included, by GPyTorch's own factorization."""
    model, _ = SOLVED[name].build()
    with dense():
        exact = float(marginal(model)[0].sum())
    model, _ = SOLVED[name].build()
    value, bound = by_bound(model)
    assert bound.gap is not None
    if name in UNCERTAIN:
        assert math.isnan(bound.gap)
        return
    lower = float(value.sum())
    n = model.train_targets.numel() / value.numel()
    assert lower <= exact <= lower + bound.gap / n
    assert bound.gap > 1e-12, "the test must not be about nothing"


def test_missing_targets_are_left_out_of_the_bound() -> None:
    model, _ = SOLVED["scale-rbf-ard"].build()
    model.train_targets[::7] = torch.nan
    mll = sketchgp.ExactMarginalLogLikelihood
    with gpytorch.settings.observation_nan_policy("mask"):
        with dense():
            exact = float(marginal(sketchgp.accelerate(model), mll)[0])
        sketchgp.accelerate(model, sketchgp.RPCholesky(rank=RANK))
        bound = Bound()
        with torch.no_grad(), model._sketchgp.having(density=bound):
            lower = float(mll(model.likelihood, model)(model(*model.train_inputs), model.train_targets))
    assert bound.gap is not None
    assert lower <= exact <= lower + bound.gap / N


def test_the_sum_is_below_the_bound_by_the_trace() -> None:
    """log det (K + D) <= log det P + sum log(1 + e/d) <= log det P + n log(1 + tr(D^-1 E) / n)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    matrix = torch.exp(-torch.cdist(x, x) / 0.3)
    noise = 0.01 + 0.1 * torch.rand(60, generator=generator, dtype=torch.float64)
    factor = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix[:9, :9]), matrix[:9], upper=False).mT
    slack = float((LowRankPlusDiagonal(factor, noise).unexplained(matrix.diagonal()) / noise).log1p().sum())
    left = torch.logdet(matrix + noise.diag()) - torch.logdet(factor @ factor.mT + noise.diag())
    by_trace = 60 * math.log1p(float(((matrix - factor @ factor.mT).diagonal() / noise).sum()) / 60)
    assert 0 < float(left) < slack < by_trace


# --- fits -------------------------------------------------------------------------------------------------------


def regression(n: int = 150, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    x, y, _ = data(n=n, d=2)
    return x, (y - y.mean()) / y.std()


def smooth(dtype: torch.dtype = torch.float64, lengthscale: float = 0.5, **choices: Any) -> Any:
    x, y = (part.to(dtype) for part in regression())
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))
    kernel.base_kernel.lengthscale = lengthscale
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).to(dtype)
    model.likelihood.noise = 0.05
    return sketchgp.accelerate(model, **choices)


def exact_loss(model: Any) -> float:
    """At the parameters that a model has, in float64, by a factorization."""
    twin = copy.deepcopy(model).double().train()
    return -float(marginal_exactly(twin))


def marginal_exactly(model: Any) -> Tensor:
    with torch.no_grad(), model._sketchgp.having(density=Exact()):
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        return mll(model(*model.train_inputs), model.train_targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bracket_of_a_fit_holds_the_exact_loss(dtype: torch.dtype) -> None:
    exact, model = smooth(dtype), smooth(dtype)
    expected = sketchgp.fit(exact, objective="exact", start="model")
    with iterative(tol=1e-4):
        history = sketchgp.fit(model, objective="probes", start="model")
    assert (expected.objective, history.objective) == ("exact", "probes")
    assert history.converged
    assert history.best_loss == pytest.approx(expected.best_loss, abs=0.02)
    assert history.bracket is not None and expected.bracket is not None
    loss = exact_loss(model)
    rounded = 0.0 if dtype == torch.float64 else 1e-6  # of hyperparameters, which the model makes in its own dtype
    assert history.bracket[0] - rounded <= loss <= history.bracket[1] + rounded
    assert history.bracket[1] - history.bracket[0] < 0.01
    lower, upper = (f"{end:.4f}" for end in history.bracket)
    assert (f"exactly {upper};" if lower == upper else f"exactly between {lower} and {upper}") in str(history)
    assert expected.bracket == (pytest.approx(exact_loss(exact), abs=1e-10),) * 2


def test_what_is_too_wide_is_no_bracket() -> None:
    """No solve is made for it."""
    model = smooth(preconditioner=sketchgp.RPCholesky(rank=2))
    with iterative(tol=1e-6), sketchgp.record_solves() as solves:
        history = sketchgp.fit(model, iterations=1, start="model")
    assert (history.objective, history.bracket) == ("probes", None)
    assert all(report.tol > 1e-7 for report in solves)


def test_a_bracket_that_is_wide_anyway_takes_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its solve leaves open hardly counts beside what the log determinant does."""
    found = []
    for share in (None, 0.0):
        if share is not None:
            monkeypatch.setattr("sketchgp.density.bound._NEGLIGIBLE", share)
        model = smooth(preconditioner=sketchgp.RPCholesky(rank=3))
        model.likelihood.noise = 1e-3
        with iterative(), sketchgp.record_solves() as solves:
            value, bound = by_bound(model, rank=3)
        assert bound.gap is not None
        assert float(value) <= -exact_loss(model) <= float(value) + bound.gap / len(model.train_targets)
        found.append(sum(report.iterations for report in solves))
    assert found[0] < 0.7 * found[1]


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_covariances_that_gpytorch_inverts_have_no_bracket(name: str) -> None:
    model, _ = LEFT_ALONE[name].build()
    history = sketchgp.fit(sketchgp.accelerate(model), objective="probes", iterations=2)
    assert history.objective == "given"
    assert history.bracket is None
    assert "structure" in history.notes[0]


def test_what_has_no_bracket() -> None:
    for choice in (None, sketchgp.NystromEigenPro(rank=10), sketchgp.Nystrom(rank=10)):
        with iterative(tol=1e-6):
            history = sketchgp.fit(smooth(preconditioner=choice), iterations=2)
        assert (history.objective, history.bracket) == ("probes", None)


def test_objectives_that_a_model_does_not_have_are_refused() -> None:
    model = smooth()
    mll = gpytorch.mlls.LeaveOneOutPseudoLikelihood(model.likelihood, model)
    with pytest.raises(sketchgp.InputError, match="fit: objective"):
        sketchgp.fit(model, mll, objective="exact")
    x, y = regression()
    parts = (
        gpytorch.likelihoods.GaussianLikelihood(),
        gpytorch.means.ZeroMean(),
        kernels.ScaleKernel(kernels.RBFKernel()),
    )
    inducing = sketchgp.InducingPointGP(x, y, *parts, x[::5]).double()
    with pytest.raises(sketchgp.InputError, match="fit: objective"):
        sketchgp.fit(inducing, objective="probes")
    assert sketchgp.fit(inducing, iterations=2).bracket is None


@pytest.mark.parametrize("objective", ["exact", "probes"])
def test_an_objective_is_taken_as_asked(objective: str) -> None:
    with iterative(tol=1e-6):
        history = sketchgp.fit(smooth(), objective=objective, iterations=2)
    assert history.objective == objective
    assert history.bracket is not None
