"""``fit`` by bounds: they hold, their gradient is right, and L-BFGS on them is monotone and the same each time.

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
from gp_models import LEFT_ALONE, SOLVED, TORCH_WARNINGS, N, Plain, data, dense, iterative, marginal, relative
from sketchgp.density import Bound, Exact
from sketchgp.density.bound import Tightened, log_slack
from sketchgp.fitting.plan import WIDTH
from sketchgp.operators import KernelMatrix

pytestmark = TORCH_WARNINGS
RANK = 15
SINGLE = ["scale-rbf-ard", "fixed-noise", "additive-kernel", "product-forward", "hadamard", "deep"]
PRODUCTS = ("product-forward", "hadamard")  # stored in the model's dtype


def by_bound(model: Any, rank: int = RANK, **choices: Any) -> tuple[Tensor, dict[str, Tensor], Bound]:
    """The marginal log likelihood from below, its gradient, and the bound."""
    bound = Bound(sketchgp.RPCholesky(rank=rank), **choices)
    bound.begin()
    with sketchgp.accelerate(model)._sketchgp.by(bound):
        value, gradient = marginal(model)
    return value, gradient, bound


def formula(model: Any, pivots: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper ends of the marginal log likelihood a row, densely, of a model in training mode."""
    output = model.likelihood(model(*model.train_inputs), *model.train_inputs)
    prior = model(*model.train_inputs).lazy_covariance_matrix.to_dense()
    a, y = output.covariance_matrix, (model.train_targets.reshape(-1) - output.mean.reshape(-1)).unsqueeze(-1)
    noise = (a - prior).diagonal()
    columns = prior[:, pivots]
    below = columns @ torch.linalg.solve(columns[pivots], columns.mT)
    p = below + torch.diag(noise)
    r = y - a @ w
    low = (2 * y.mT @ w - w.mT @ a @ w).squeeze()
    high = low + (r.mT @ torch.linalg.solve(p, r)).squeeze()
    excess = torch.log1p((prior - below).diagonal() / noise).sum()
    n = len(y)
    ends = (-0.5 * (form + torch.logdet(p) + n * math.log(2 * math.pi)) for form in (high + excess, low))
    lower, upper = ends
    return lower / n, upper / n


# --- the formula ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float64) for name in SINGLE] + [(name, torch.float32) for name in SINGLE if name not in PRODUCTS],
)
def test_value_width_and_gradient_are_those_of_the_dense_formula(name: str, dtype: torch.dtype) -> None:
    """With a poor w, so that every term of the gradient is seen; by central differences."""
    model, _ = SOLVED[name].build(dtype)
    value, gradient, bound = by_bound(model, share=0.1)
    assert bound.gap is not None and bound._weights is not None and bound.cache._selection is not None
    pivots, w = bound.cache._selection.pivots, bound._weights
    assert pivots is not None
    reference, _ = SOLVED[name].build()
    reference.load_state_dict({key: part.double() for key, part in model.state_dict().items()})
    data = [x.double() if x.is_floating_point() else x for x in model.train_inputs]
    reference.set_train_data(tuple(data), model.train_targets.double(), strict=False)
    reference.train()
    loose = 1 if dtype == torch.float64 else 1e3
    with torch.no_grad(), dense():
        lower, upper = formula(reference, pivots, w)
        assert float((value - lower).abs()) < loose * 1e-9
        assert float((upper - lower).abs()) == pytest.approx(bound.gap / len(w), rel=loose * 1e-6)
        step, found = 1e-5, {}
        for key, parameter in reference.named_parameters():
            parts = []
            for index in range(parameter.numel()):
                ends = []
                for sign in (1, -1):
                    parameter.view(-1)[index] += sign * step
                    ends.append(float(formula(reference, pivots, w)[0]))
                    parameter.view(-1)[index] -= sign * step
                parts.append((ends[0] - ends[1]) / (2 * step))
            found[key] = torch.tensor(parts, dtype=torch.float64).reshape(parameter.shape)
    size = max(float(part.abs().max()) for part in found.values())
    for key, part in found.items():
        wanted = gradient.get(key, torch.zeros_like(part)).double()
        assert float((part - wanted).abs().max()) < loose * 1e-7 * size, key


@pytest.mark.parametrize("name", [name for name in SOLVED if name != "ski"])  # an interpolated K is not semidefinite
def test_the_exact_value_is_between_the_ends(name: str) -> None:
    """Of every form of model, batches included, by GPyTorch's own factorization."""
    model, _ = SOLVED[name].build()
    with dense():
        exact = float(marginal(model)[0].sum())
    model, _ = SOLVED[name].build()
    value, _, bound = by_bound(model)
    assert bound.gap is not None
    lower = float(value.sum())
    n = model.train_targets.numel() / value.numel()
    assert lower - 1e-10 <= exact <= lower + bound.gap / n + 1e-10
    assert bound.gap > 1e-12, "the test must not be about nothing"


@pytest.mark.parametrize("name", ["batch", "batch-targets", "fixed-noise", "lcm"])
def test_gradients_of_tight_bounds_are_those_of_the_exact_value(name: str) -> None:
    model, _ = SOLVED[name].build()
    with dense():
        _, expected = marginal(model)
    model, _ = SOLVED[name].build()
    _, gradient, bound = by_bound(model, rank=N - 10 if name != "lcm" else 2 * 120 - 10, share=1e-14)
    assert bound.gap is not None
    for key, part in expected.items():
        assert relative(gradient[key], part) < 1e-3, key


def test_missing_targets_are_left_out_of_the_bound() -> None:
    model, _ = SOLVED["scale-rbf-ard"].build()
    model.train_targets[::7] = torch.nan
    mll = sketchgp.ExactMarginalLogLikelihood
    with gpytorch.settings.observation_nan_policy("mask"):
        with dense():
            exact = float(marginal(sketchgp.accelerate(model), mll)[0])
        bound = Bound(sketchgp.RPCholesky(rank=RANK))
        with model._sketchgp.by(bound):
            lower = float(marginal(model, mll)[0])
    assert bound.gap is not None
    assert lower <= exact <= lower + bound.gap / N


def test_the_sum_is_below_the_bound_by_the_trace() -> None:
    """log det (K + D) <= log det P + sum log(1 + e/d) <= log det P + n log(1 + tr(D^-1 E) / n)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=generator, dtype=torch.float64)
    matrix = torch.exp(-torch.cdist(x, x) / 0.3)
    noise = 0.01 + 0.1 * torch.rand(60, generator=generator, dtype=torch.float64)
    factor = torch.linalg.solve_triangular(torch.linalg.cholesky(matrix[:9, :9]), matrix[:9], upper=False).mT
    slack = float(log_slack(matrix.diagonal(), factor, noise))
    left = torch.logdet(matrix + noise.diag()) - torch.logdet(factor @ factor.mT + noise.diag())
    by_trace = 60 * math.log1p(float(((matrix - factor @ factor.mT).diagonal() / noise).sum()) / 60)
    assert 0 < float(left) < slack < by_trace


@pytest.mark.parametrize(("slack", "rank"), [(0.1, None), (0.01, None), (1e-9, None), (0.01, 12)])
def test_columns_are_added_until_the_bound_is_tight(slack: float, rank: int | None) -> None:
    x, _, _ = data(400)
    kernel = kernels.RBFKernel()
    kernel.lengthscale = 0.4
    matrix = KernelMatrix.of(kernel, x)
    noise = torch.full((400,), 1e-2, dtype=torch.float64)
    base = sketchgp.RPCholesky(rank=rank)
    plain, built = base.build(matrix, noise), Tightened(base=base, slack=slack).build(matrix, noise)
    left = float(log_slack(torch.ones_like(noise), built.factor, noise)) / 800
    if rank is not None:
        assert built.rank == rank
    else:
        assert left <= slack or built.rank >= 400
        assert plain.rank <= built.rank <= 400
    assert (built.rank > plain.rank) == (rank is None and slack == 1e-9)


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
    with torch.no_grad(), model._sketchgp.by(Exact()):
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        return mll(model(*model.train_inputs), model.train_targets)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_fit_by_bounds_ends_where_an_exact_one_does(dtype: torch.dtype) -> None:
    exact, model = smooth(dtype), smooth(dtype)
    expected = sketchgp.fit(exact, objective="exact", start="model")
    history = sketchgp.fit(model, objective="bound", start="model")
    assert (expected.objective, history.objective) == ("exact", "bound")
    assert history.converged
    assert len(history.widths) == len(history.losses)
    assert all(width is not None and width > 0 for width in history.widths)
    assert history.best_loss == pytest.approx(expected.best_loss, abs=1e-3)
    for (name, part), (_, wanted) in zip(model.named_parameters(), exact.named_parameters(), strict=True):
        assert relative(part, wanted) < (0.1 if "constant" in name else 0.01), name
    assert history.bracket is not None and expected.bracket is not None
    loss = exact_loss(model)
    rounded = 0.0 if dtype == torch.float64 else 1e-6  # of hyperparameters, which the model makes in its own dtype
    assert history.bracket[0] - rounded <= loss <= history.bracket[1] + rounded
    assert history.bracket[1] - history.bracket[0] < WIDTH
    lower, upper = (f"{end:.4f}" for end in history.bracket)
    assert (f"exactly {upper} " if lower == upper else f"exactly between {lower} and {upper}") in str(history)
    assert expected.bracket == (pytest.approx(exact_loss(exact), abs=1e-10),) * 2


@pytest.mark.parametrize("name", ["additive-kernel", "batch"])
def test_losses_by_bounds_never_rise_and_are_the_same_each_time(name: str) -> None:
    runs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = sketchgp.accelerate(SOLVED[name].build()[0])
        history = sketchgp.fit(model, objective="bound", iterations=5, seed=seed)
        ends = [0, *history.restarts, len(history.losses)]
        for first, last in zip(ends, ends[1:], strict=False):
            part = history.losses[first:last]
            assert all(b <= a for a, b in zip(part, part[1:], strict=False))
        runs.append((history.losses, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_pivots_are_chosen_anew_where_bounds_become_wide(optimizer: str) -> None:
    """From lengthscales so long that a handful of columns are enough for them."""
    model = smooth(lengthscale=20.0)
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, optimizer=optimizer, iterations=40 if optimizer == "lbfgs" else 20)
    assert history.objective == "bound"
    assert bool(history.restarts) == (optimizer == "lbfgs")
    assert all("chosen anew" in note for note in history.notes)
    assert len(history.notes) == len(history.restarts)
    final = history.widths[history.best_step]
    assert final is not None and final <= WIDTH
    assert abs(history.best_loss - exact_loss(model)) <= final
    first = smooth(lengthscale=20.0)._sketchgp.preconditioner
    assert first.rank is None, "the rank must be free"


def test_a_wide_bound_is_left_for_probes() -> None:
    model = smooth(preconditioner=sketchgp.RPCholesky(rank=3))
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, iterations=3)
    assert history.objective == "probes"
    assert history.widths == [None] * 3
    assert history.restarts == []
    (note,) = history.notes
    assert "with 3 columns" in note and "probes" in note
    assert history.bracket is not None
    assert history.bracket[0] <= exact_loss(model) <= history.bracket[1]
    assert history.bracket[1] - history.bracket[0] > WIDTH
    with iterative(tol=1e-6):
        asked = sketchgp.fit(model, iterations=3, objective="bound")
    assert asked.objective == "bound"
    assert all(width is not None and width > WIDTH for width in asked.widths)


def test_a_bracket_that_is_wide_anyway_takes_few_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its solve leaves open hardly counts beside what the log determinant does."""
    found = []
    for share in (None, 0.0):
        if share is not None:
            monkeypatch.setattr("sketchgp.density.bound._NEGLIGIBLE", share)
        model = smooth(preconditioner=sketchgp.RPCholesky(rank=3))
        model.likelihood.noise = 1e-3
        bound = Bound(sketchgp.RPCholesky(rank=3), share=1e-7, certain=True)
        bound.begin()
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        with torch.no_grad(), iterative(), model._sketchgp.by(bound), sketchgp.record_solves() as solves:
            value = float(mll(model(*model.train_inputs), model.train_targets))
        assert bound.gap is not None and bound.gap < 1.01 * bound._open
        assert value <= -exact_loss(model) <= value + bound.gap / len(model.train_targets)
        found.append(sum(report.iterations for report in solves))
    assert found[0] < 0.7 * found[1]


def test_bounds_left_for_probes_on_the_way() -> None:
    """Of columns that are enough at the start alone."""
    model = smooth(lengthscale=20.0, preconditioner=sketchgp.RPCholesky(rank=6))
    with iterative(tol=1e-6):
        history = sketchgp.fit(model, iterations=30)
    assert history.objective == "probes"
    (start,) = history.restarts
    assert 0 < start < len(history.losses)
    assert all(width is not None for width in history.widths[:start])
    assert all(width is None for width in history.widths[start:])
    assert history.best_step >= start
    assert len(history.notes) == 2


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_covariances_that_gpytorch_inverts_have_no_bound(name: str) -> None:
    model, _ = LEFT_ALONE[name].build()
    history = sketchgp.fit(sketchgp.accelerate(model), objective="bound", iterations=2)
    assert history.objective == "given"
    assert history.bracket is None
    assert "structure" in history.notes[0]


def test_what_has_no_bound_is_refused() -> None:
    for choice in (None, sketchgp.NystromEigenPro(rank=10), sketchgp.Nystrom(rank=10)):
        with pytest.raises(sketchgp.InputError, match="fit: objective"):
            sketchgp.fit(smooth(preconditioner=choice), objective="bound")
        with iterative(tol=1e-6):
            history = sketchgp.fit(smooth(preconditioner=choice), iterations=2)
        assert history.objective == "probes"
        assert "no bound" in history.notes[0]
        assert history.bracket is None
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
    assert sketchgp.fit(inducing, objective="bound", iterations=2).bracket is None


@pytest.mark.parametrize("objective", ["exact", "probes"])
def test_an_objective_is_taken_as_asked(objective: str) -> None:
    with iterative(tol=1e-6):
        history = sketchgp.fit(smooth(), objective=objective, iterations=2)
    assert history.objective == objective
    assert history.bracket is not None
