"""Starts where the loss is flat in the lengthscales: mended, or told; never "settled"."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch import kernels

import sketchgp
from cases import each
from gp_models import SOLVED, TORCH_WARNINGS, Plain, data, iterative, small_subsets
from sketchgp.fitting.starts import flatness, rescale, revive, set_noise

pytestmark = TORCH_WARNINGS


def build(unit: Any = 1.0, ard: int | None = 2, kernel: Any = kernels.MaternKernel, dtype: Any = torch.float64) -> Any:
    """Inputs in other units than lengthscales of about 1."""
    x, y, _ = data(120)
    parts = gpytorch.likelihoods.GaussianLikelihood(), kernels.ScaleKernel(kernel(ard_num_dims=ard))
    return sketchgp.accelerate(Plain((x * torch.as_tensor(unit)).to(dtype), y.to(dtype), *parts).to(dtype))


@functools.cache
def best_loss(ard: int | None, optimizer: str) -> float:
    """Of a fit of inputs in a unit that suits them."""
    return sketchgp.fit(build(ard=ard), **OPTIONS[optimizer]).best_loss


OPTIONS: dict[str, dict[str, Any]] = {"lbfgs": {"tol": 1e-6}, "adam": {"optimizer": "adam", "iterations": 30}}


@pytest.mark.parametrize(
    ("ard", "unit", "optimizer"),
    [
        (None, 1e6, "lbfgs"),
        (2, (1.0, 1e-7), "adam"),
    ],
    ids=str,
)
def test_the_unit_of_the_inputs_changes_nothing(ard: int | None, unit: Any, optimizer: str) -> None:
    model = build(torch.tensor(unit, dtype=torch.float64), ard)
    with pytest.warns(UserWarning, match="size of the inputs"):
        history = sketchgp.fit(model, **OPTIONS[optimizer])
    assert history.best_loss == pytest.approx(best_loss(ard, optimizer), abs=1e-3 if optimizer == "lbfgs" else 0.3)
    assert ["started from lengthscales of the size of the inputs" in note for note in history.notes][:1] == [True]
    assert all(" starts" in note for note in history.notes[1:])
    if optimizer == "lbfgs":
        assert history.reason == "the loss has settled"
        assert history.notes[1].startswith("the best of 5 starts"), "the model's own start told nothing"


def test_float32() -> None:
    with pytest.warns(UserWarning, match="all points are alike"):
        history = sketchgp.fit(build(1e-6, dtype=torch.float32))
    assert history.best_loss < 0


@pytest.mark.parametrize("unit", [1e6, 1e-6])
def test_what_the_user_wants_is_heard_and_not_called_settled(unit: float) -> None:
    model = build(unit)
    before = model.covar_module.base_kernel.lengthscale.detach().clone()
    with pytest.warns(UserWarning, match="does not change with them"):
        history = sketchgp.fit(model, start="model")
    assert torch.allclose(model.covar_module.base_kernel.lengthscale.detach(), before, rtol=1e-3)
    assert history.reason.startswith("the loss is flat")
    assert not history.converged
    assert history.notes == []
    fixed = build(unit)
    fixed.covar_module.base_kernel.raw_lengthscale.requires_grad_(False)
    with pytest.warns(UserWarning, match="does not change with them"):
        assert not sketchgp.fit(fixed).converged
    assert torch.equal(fixed.covar_module.base_kernel.lengthscale, before)


def test_lengthscales_in_bounds() -> None:
    model = build(1e6)
    kernel = model.covar_module.base_kernel
    kernel.register_constraint("raw_lengthscale", gpytorch.constraints.Interval(1e-3, 1e5))
    kernel.lengthscale = 1.0
    with pytest.warns(UserWarning, match="size of the inputs"):
        sketchgp.fit(model)
    assert 1e3 < float(kernel.lengthscale.detach().max()) <= 1e5


@each("name", SOLVED)
def test_usual_starts_are_left_alone(name: str) -> None:
    """Of every form of model; and one pass more leaves no trace."""
    model = sketchgp.accelerate(SOLVED[name].build()[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = sketchgp.fit(model, iterations=1)
    assert not [w for w in caught if "lengthscales" in str(w.message)]
    assert history.notes == []


def test_what_a_fit_switched_off_stays_off() -> None:
    """An input that was found not to matter has a long lengthscale of its own: no reason to begin anew."""
    model = build()
    model.covar_module.base_kernel.lengthscale = torch.tensor([[0.3, 4e3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sketchgp.fit(model, iterations=1)
    assert float(model.covar_module.base_kernel.lengthscale.detach()[0, 1]) == pytest.approx(4e3)


def test_short_lengthscales_that_neighbours_feel_are_left_alone() -> None:
    """A long series: neighbours are a lengthscale apart, the whole is a thousand times as long."""
    x = torch.arange(3000.0, dtype=torch.float64).unsqueeze(-1)
    kernel = kernels.ScaleKernel(kernels.MaternKernel(ard_num_dims=1))
    model = Plain(x, torch.sin(x.squeeze(-1)), gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    before = kernel.base_kernel.lengthscale.detach().clone()
    assert rescale(model, 0) == flatness(model, 0) == ""
    assert torch.equal(kernel.base_kernel.lengthscale, before)


def test_repeated_points_do_not_hide_that_all_are_alone() -> None:
    model = build(1e6)
    x = model.train_inputs[0]
    model.set_train_data(torch.cat([x[:60], x[:60]]), strict=False)
    with pytest.warns(UserWarning, match="every point is alone"):
        sketchgp.fit(model, iterations=1)


def test_a_few_neighbours_do_not_hide_that_the_others_are_alone() -> None:
    """One input is far larger than its lengthscale, and by chance a few points hardly differ in it."""
    x, y, _ = data(200)
    x = torch.cat([x, (x[:, :1] * 7919.0).frac()], dim=1) * torch.tensor([1.0, 1.0, 3e5], dtype=torch.float64)
    x[:4, 2] = x[4:8, 2]
    x[:4, :2] = x[4:8, :2] + 0.1
    kernel = kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=3))
    model = sketchgp.accelerate(Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double())
    with pytest.warns(UserWarning, match="every point is alone"):
        history = sketchgp.fit(model)
    assert history.best_loss < 0.5


def test_a_single_point_warns_of_nothing() -> None:
    parts = gpytorch.likelihoods.GaussianLikelihood(), kernels.ScaleKernel(kernels.RBFKernel(ard_num_dims=2))
    x = torch.zeros(1, 2, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sketchgp.fit(sketchgp.accelerate(Plain(x, x[:, 0] + 1, *parts).double()))


def test_inputs_that_few_rows_took_for_none_or_for_labels_matter_again() -> None:
    """Their lengthscales tell more rows nothing: one is huge, one far below the distance of two values."""
    x, y, _ = data(120, d=3)
    x[:, 1] = (3 * x[:, 1]).round()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Plain(x, y, likelihood, kernels.ScaleKernel(kernels.MaternKernel(ard_num_dims=3))).double()
    base = model.covar_module.base_kernel
    base.lengthscale = torch.tensor([0.3, 1e-3, 1e4])
    (revived,) = revive(model)
    size = x.std(dim=0) * 3**0.5
    expected = [0.3, float(size[1]), 10 * float(size[2])]
    assert base.lengthscale.flatten().tolist() == pytest.approx(expected, rel=1e-6)
    assert revive(model) == []
    for sign in (1.0, -1.0):  # of the gradient: to a shorter one, and back to the huge one
        base.raw_lengthscale.grad = torch.full_like(base.raw_lengthscale, sign)
        revived.judge()
        expected[2] = 10 * float(size[2]) if sign > 0 else 1e4
        assert base.lengthscale.flatten().tolist() == pytest.approx(expected, rel=1e-6)


def test_inputs_that_are_labels_stay_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of ten patients, who are told by a number, has a curve of his own: with a lengthscale of the size of those
    numbers the loss of more rows is hundreds of nats a row."""
    generator = torch.Generator().manual_seed(2)
    x = torch.rand(200, 2, generator=generator, dtype=torch.float64)
    patient = torch.randint(0, 10, (200,), generator=generator)
    x[:, 1] = torch.rand(10, generator=generator, dtype=torch.float64)[patient]
    size = torch.randn(10, generator=generator, dtype=torch.float64)[patient]
    kernel = kernels.ScaleKernel(kernels.MaternKernel(nu=2.5, ard_num_dims=2))
    y = size * torch.sin(4 * x[:, 0] + 3 * size)
    model = sketchgp.accelerate(Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double())
    monkeypatch.setattr("sketchgp.fitting.run._FEW", 80)
    history = sketchgp.fit(model)
    assert history.subset is not None
    found = history.subset.hyperparameters["covar_module.base_kernel.lengthscale"][history.subset.best_step]
    assert found[1] < 1e-3, "the data must make the test meaningful"
    assert history.losses[0] < history.subset.best_loss
    assert float(kernel.base_kernel.lengthscale[0, 1].detach()) < 1e-3


def test_starts_of_a_subset_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    small_subsets(monkeypatch)
    revived: list[int] = []

    def reviving(model: Any) -> list[Any]:
        revived.append(len(model.train_targets))
        return revive(model)

    monkeypatch.setattr("sketchgp.fitting.starts.revive", reviving)
    sketchgp.fit(build(), start="subset", iterations=1)
    assert revived[-1] == 120 and len(revived) == 3


@pytest.mark.parametrize(("count", "rows", "fewest", "inputs", "seed"), [(80, 60, 40, 8, 9)])
def test_the_best_of_three_starts(
    count: int, rows: int, fewest: int, inputs: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many inputs of which few matter: the model's own lengthscales lead to a worse minimum.

    :param count: all rows; :param rows: that a fit to more begins with; :param fewest: of which three starts are tried,
        for that.
    """
    monkeypatch.setattr("sketchgp.fitting.run._FEW", rows)
    monkeypatch.setattr("sketchgp.fitting.run._FEWEST", fewest)
    monkeypatch.setattr("sketchgp.fitting.run._FOR_EACH", 1)
    generator = torch.Generator().manual_seed(seed)
    x, noise = (torch.randn(count, d, generator=generator, dtype=torch.float64) for d in (inputs, 1))
    y = x[:, 0] + 0.5 * x[:, 1] + 0.3 * torch.sin(3 * x[:, 2]) + 0.1 * noise[:, 0]
    found = {}
    for start in ("model", "auto"):
        found[start] = sketchgp.fit(_of(x, y), start=start, tol=1e-3)
    assert found["model"].subset is None and not found["model"].restarts
    told = found["auto"]
    if rows < count:
        for expected in sorted({rows, fewest}, reverse=True):
            assert told.subset is not None and told.subset.rows == expected
            told = told.subset
    else:
        assert told.subset is None
        (again,) = told.restarts
        assert told.losses[again - 1] == pytest.approx(found["model"].best_loss, abs=1e-3)
        assert all(later <= before for before, later in zip(told.losses, told.losses[1:], strict=False))
    (said,) = [note for note in told.notes if " starts: " in note]
    losses = [float(word.rpartition(" ")[2]) for word in said.partition(": ")[2].split(", ")]
    assert len(losses) >= 3 and min(losses) == pytest.approx(told.best_loss, abs=1e-3)
    assert max(losses) > min(losses) + 0.1, "the data must make the test meaningful"
    assert found["auto"].best_loss < found["model"].best_loss - 0.1
    assert found["auto"].converged


@pytest.mark.parametrize(("rows", "expected"), [(39, [10, 8, 5]), (79, [20, 10, 8])])
def test_three_starts_of_large_fits_take_more_rows(
    rows: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 rows and more there is a level between all rows and the 10; one row for each of five hyperparameters."""
    small_subsets(monkeypatch)
    for name, value in {"_FEW": 8, "_FEWEST": 4, "_FOR_EACH": 1}.items():
        monkeypatch.setattr(f"sketchgp.fitting.run.{name}", value)
    x, y, _ = data(rows)
    with iterative(tol=1e-3):
        history = sketchgp.fit(_of(x, y), start="subset", iterations=1).subset
    told = []
    while history is not None:
        told.append(history.rows)
        history = history.subset
    assert told == expected


def test_a_noise_starts_away_from_its_limit() -> None:
    """Next to it no gradient leads away; small targets keep a start of little noise all the same."""
    x, y, _ = data(40)
    for unit in (1.0, 0.03):
        model = _of(x, unit * y / y.std())
        limit, variance = 1e-4, unit**2
        set_noise(model, 1e-3)
        expected = limit + 0.1 * variance if unit < 1 else 1e-3 * variance
        assert float(model.likelihood.noise.detach()) == pytest.approx(expected, rel=0.05)


def _rough(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Five inputs, of which three matter, one by a jump; standardised."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(240, 5, generator=generator).double()
    x = (x - x.mean(dim=0)) / x.std(dim=0)
    errors = torch.randn(240, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, 0]) + torch.sign(x[:, 1] + 0.3) * x[:, 2] + noise * errors
    return x, (y - y.mean()) / y.std()


def _of(x: torch.Tensor, y: torch.Tensor, noise: float | None = None) -> Plain:
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5, ard_num_dims=x.shape[1]))
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    if noise is not None:
        model.likelihood.noise = noise
    return sketchgp.accelerate(model)


def test_a_noise_that_few_rows_do_without_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 rows of 240 can be passed through; from there, with hardly any noise, a fit would stay in that valley."""
    x, y = _rough(noise=0.2)
    reference = sketchgp.fit(_of(x, y, noise=0.05), start="model").best_loss
    monkeypatch.setattr("sketchgp.fitting.run._FEW", 60)
    history = sketchgp.fit(_of(x, y))
    assert history.subset is not None and history.subset.rows == 60
    ended = history.subset.hyperparameters["likelihood.noise_covar.noise"][history.subset.best_step]
    assert ended[0] < 5e-4, "the data must make the test meaningful"
    said = history.subset.notes[-1]
    assert said.startswith("the noise was raised to 0.01 of the targets' variance: with 240 rows the loss was ")
    assert history.best_loss == pytest.approx(reference, abs=0.005)
    assert history.converged


@pytest.mark.parametrize("case", ["none", "fixed"])
def test_a_noise_that_more_rows_do_without_stays(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets without noise; and a noise that the user has fixed."""
    monkeypatch.setattr("sketchgp.fitting.run._FEW", 60)
    x, y = _rough(noise=0.2)
    model = _of(x, torch.sin(x[:, 0]) + x[:, 1]) if case == "none" else _of(x, y, noise=2e-4)
    model.likelihood.raw_noise.requires_grad_(case == "none")
    history = sketchgp.fit(model)
    assert history.subset is not None
    assert not [note for note in history.subset.notes if "noise" in note]
    assert float(model.likelihood.noise.detach()) < 2.1e-4


def test_a_worse_end_of_another_start_is_left_whatever_is_settled_for() -> None:
    """A tolerance below zero ends a fit early, and does not make more of less."""
    x = torch.linspace(0, 1, 100, dtype=torch.float64).unsqueeze(1)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=1))
    model = Plain(x, torch.sin(12 * x[:, 0]), gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    kernel.base_kernel.lengthscale = 0.15
    history = sketchgp.fit(sketchgp.accelerate(model), tol=-1.0)
    assert history.best_loss == min(history.losses)


def test_another_start_leaves_what_modules_learn_alone() -> None:
    """Running means are those of the inputs that the parameters kept make."""

    class Deep(Plain):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.BatchNorm1d(1))

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(self.net(x))

    x, y, _ = data(n=60, d=2)
    kept = {}
    for start in ("model", "auto"):
        torch.manual_seed(0)
        kernel = gpytorch.kernels.RBFKernel()
        model = Deep(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
        kernel.lengthscale = 0.1
        history = sketchgp.fit(sketchgp.accelerate(model), start=start)
        kept[start] = model.net[1].running_var.item()
    if not history.restarts:
        assert kept["auto"] == kept["model"]
    assert len(history.notes) == 1


def test_another_start_keeps_to_the_iterations() -> None:
    x, y, _ = data(n=120, d=2)
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
    steps = len(sketchgp.fit(sketchgp.accelerate(model), start="model").losses)
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), copy.deepcopy(kernel)).double()
    again = sketchgp.fit(sketchgp.accelerate(model), iterations=steps)
    assert len(again.losses) <= steps


def test_a_start_that_leads_nowhere_lower_leaves_a_fit_alone() -> None:
    x, y, _ = data(n=120, d=2)
    found = {}
    for start in ("model", "auto"):
        kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(ard_num_dims=2))
        model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), kernel).double()
        history = sketchgp.fit(sketchgp.accelerate(model), start=start)
        found[start] = history.losses, [p.tolist() for p in model.parameters()]
    assert found["model"] == found["auto"]
    assert len(history.notes) == 1 and not history.restarts
