"""The routes of ``fit``: what rows, solver, optimizer, start and objective lead to.

Each line of the table is one fit of a single step, and the chain of fits that its history tells of, smallest first:
the rows of each, how its losses were computed, and by which optimiser.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from gp_models import SOLVED, Plain, data, iterative
from sketchgp.density import Probes
from sketchgp.fitting.objective import Objective
from sketchgp.fitting.plan import by_neighbors
from sketchgp.fitting.run import Choices, Fit
from sketchgp.solvers.recurrence import LostToRoundingError

CG = sketchgp.ConjugateGradients(tol=1e-2)
SKOTCH = sketchgp.Skotch(tol=1e-1, block_size=50)


def build(rows: int, solver: Any) -> Any:
    x, y, _ = data(n=rows, d=2)
    if solver == "inducing":
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        mean, kernel = gpytorch.means.ZeroMean(), ScaleKernel(MaternKernel(nu=1.5))
        return sketchgp.InducingPointGP(x, y, likelihood.double(), mean, kernel.double(), inducing_points=x[:20])
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5))).double()
    return sketchgp.accelerate(model, solver=solver)


def route(history: sketchgp.FitHistory | None) -> list[str]:
    """The fits that a history tells of, smallest first."""
    if history is None:
        return []
    return [*route(history.subset), f"{history.rows} {history.objective} {history.optimizer}"]


EXACT_FEW = ["500 exact lbfgs", "1000 exact lbfgs"]
# rows, solver, arguments of fit, and the route with GPyTorch's settings as they are
ROUTES: list[tuple[int, Any, dict[str, Any], list[str]]] = [
    (180, "auto", {}, ["180 exact lbfgs"]),
    (180, "auto", {"start": "model"}, ["180 exact lbfgs"]),
    (180, "auto", {"start": "subset"}, ["180 exact lbfgs"] * 2),
    (180, "auto", {"optimizer": "adam"}, ["180 exact adam"]),
    (180, "auto", {"learning_rate": 0.1}, ["180 exact adam"]),
    (180, "auto", {"objective": "probes"}, ["180 probes lbfgs"]),
    (180, CG, {}, ["180 probes lbfgs"]),
    (180, sketchgp.Cholesky(), {}, ["180 exact lbfgs"]),
    (180, SKOTCH, {}, ["180 probes lbfgs"]),
    (180, "inducing", {}, ["180 bound lbfgs"]),
    (180, "inducing", {"optimizer": "adam"}, ["180 bound adam"]),
    (1010, "auto", {}, [*EXACT_FEW, "1010 exact lbfgs"]),
    (1010, "auto", {"start": "model"}, ["1010 exact lbfgs"]),
    (1010, "auto", {"optimizer": "adam"}, ["1010 exact adam"]),
    (1010, "auto", {"start": "subset"}, [*EXACT_FEW, "1010 exact lbfgs", "1010 exact lbfgs"]),
    (1010, CG, {}, ["1010 probes lbfgs"]),
    (1010, SKOTCH, {}, ["1010 samples adam"]),
    (1010, SKOTCH, {"optimizer": "lbfgs"}, ["1010 probes lbfgs"]),
    (1010, "inducing", {}, ["500 bound lbfgs", "1000 bound lbfgs", "1010 bound lbfgs"]),
]
# the routes of many rows, where all limits are lower
LOWER = {
    "run._FEWEST": 150,
    "run._FEW": 300,
    "plan._SUBSET": 600,
    "run._MANY": 840,
    "plan._LEVELS": ((900, 850),),
}
TO_600 = ["150 exact lbfgs", "300 exact lbfgs", "600 exact lbfgs"]
OF_MANY: list[tuple[int, Any, dict[str, Any], list[str]]] = [
    (850, "auto", {}, [*TO_600, "850 exact lbfgs"]),
    (850, "auto", {"optimizer": "adam"}, ["850 exact adam"]),
    (850, CG, {}, [*TO_600, "850 probes lbfgs"]),
    (850, SKOTCH, {}, [*TO_600, "850 samples adam"]),
    (910, CG, {}, ["300 exact lbfgs", "600 exact lbfgs", "850 probes lbfgs", "910 probes lbfgs"]),
]


def case(rows: int, solver: Any, arguments: dict[str, Any], expected: list[str]) -> Any:
    name = solver if isinstance(solver, str) else type(solver).__name__
    words = "-".join(f"{value}" for value in arguments.values())
    return pytest.param(rows, solver, arguments, expected, id=f"{rows}-{name}-{words}")


@pytest.mark.parametrize(("rows", "solver", "arguments", "expected"), [case(*line) for line in ROUTES])
def test_route(rows: int, solver: Any, arguments: dict[str, Any], expected: list[str]) -> None:
    history = sketchgp.fit(build(rows, solver), iterations=1, num_probes=2, **arguments)
    assert route(history) == expected


@pytest.mark.parametrize(("rows", "solver", "arguments", "expected"), [case(*line) for line in OF_MANY])
def test_route_of_many_rows(rows, solver, arguments, expected, monkeypatch):
    for name, limit in LOWER.items():
        monkeypatch.setattr(f"sketchgp.fitting.{name}", limit)
    history = sketchgp.fit(build(rows, solver), iterations=1, num_probes=2, **arguments)
    assert route(history) == expected


def test_route_of_a_map(monkeypatch):
    """Many rows of few features start from Vecchia's approximation on all of them."""
    for name, limit in LOWER.items():
        monkeypatch.setattr(f"sketchgp.fitting.{name}", limit)
    monkeypatch.setattr("sketchgp.preconditioners.automatic._ROWS", 900)
    history = sketchgp.fit(build(910, CG), iterations=1, num_probes=2)
    assert route(history) == ["300 exact lbfgs", "600 exact lbfgs", "910 vecchia lbfgs", "910 probes lbfgs"]


def test_where_neighbours_are_needed_there_is_no_bracket(monkeypatch):
    monkeypatch.setattr("sketchgp.preconditioners.automatic._ROWS", 900)
    model = build(910, CG)
    model.covar_module.base_kernel.lengthscale, model.likelihood.noise = 0.02, 1e-3
    history = sketchgp.fit(model, start="model", iterations=1, num_probes=2)
    assert (history.objective, history.bracket) == ("probes", None)
    assert history.by_other_probes is not None


@pytest.mark.slow
def test_the_page_has_the_stages():
    """The table of docs/tuning.md, at the ends of its ranges of rows."""
    page = (Path(__file__).parents[1] / "docs" / "tuning.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| ((?:up to )?\d[^|]*) \| ([^|]+) \|([^|]*)\| ([^|]+) \|$", page, flags=re.MULTILINE)
    assert len(lines) == 10
    kinds = {"exact": ["exact"], "probes": ["probes"], "Vecchia's approximation, then probes": ["vecchia", "probes"]}
    for ends, features, subsets, losses in lines:
        before = [(int(rows), "exact" if int(rows) <= 5000 else "probes") for rows in subsets.replace(",", "").split()]
        for rows in map(int, re.findall(r"\d+", ends.replace(",", ""))):
            x, y, _ = data(rows, d=int(features[0]) if features != "any" else 4, dtype=torch.float32)
            model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5)))
            mll = sketchgp.ExactMarginalLogLikelihood(model.likelihood, sketchgp.accelerate(model))
            with sketchgp.settings.memory_budget(2**30):
                fit = Fit(model, mll, Choices("auto", "auto", "auto", None, None, 10, 0, 1e-4), False, None, None, 60.0)
                planned = [(stage.history.rows, stage.kind) for stage in fit._plan()]
            assert planned == [*before, *((rows, kind) for kind in kinds[losses])]


@pytest.mark.parametrize(
    ("name", "choices", "arguments", "expected"),
    [
        ("scale-rbf-ard", {}, {}, "probes"),
        ("scale-rbf-ard", {"preconditioner": None}, {}, "probes"),
        ("scale-rbf-ard", {"preconditioner": sketchgp.Nystrom(rank=20)}, {}, "probes"),
        ("scale-rbf-ard", {}, {"mll": sketchgp.LeaveOneOutPseudoLikelihood}, "given"),
        ("batch", {}, {}, "probes"),
    ],
)
def test_objective_of_a_model_that_is_solved_by_iterations(
    name: str, choices: dict[str, Any], arguments: dict[str, Any], expected: str
) -> None:
    model = sketchgp.accelerate(SOLVED[name].build()[0], **choices)
    options = dict(arguments)
    mll = options.pop("mll", None)
    with iterative(tol=1e-3):
        history = sketchgp.fit(model, None if mll is None else mll(model.likelihood, model), iterations=1, **options)
    assert (history.objective, history.optimizer, history.subset) == (expected, "lbfgs", None)


@pytest.mark.parametrize(
    ("solver", "arguments"),
    [
        ("inducing", {"objective": "exact"}),
        ("auto", {"objective": "samples"}),
        (SKOTCH, {"objective": "samples", "optimizer": "lbfgs"}),
        (SKOTCH, {"objective": "samples"}),  # few rows, which GPyTorch factorizes
        ("auto", {"optimizer": "lbfgs", "learning_rate": 0.1}),
    ],
)
def test_refused(solver: Any, arguments: dict[str, Any]) -> None:
    model = build(100, solver)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(sketchgp.InputError):
        sketchgp.fit(model, iterations=1, **arguments)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


def test_the_look_at_a_model_leaves_its_running_means(monkeypatch):
    """Whether a model is a map is seen by a forward pass in training mode, from which a normalisation would learn."""
    model = build(910, CG)
    model.norm = torch.nn.BatchNorm1d(2).double()
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, x: forward(self, self.norm(x)))
    by_neighbors(Objective(model, None))
    assert not model.norm.running_mean.any() and int(model.norm.num_batches_tracked) == 0


def test_neighbours_are_not_renewed_after_the_last_step(monkeypatch):
    for name, limit in LOWER.items():
        monkeypatch.setattr(f"sketchgp.fitting.{name}", limit)
    monkeypatch.setattr("sketchgp.preconditioners.automatic._ROWS", 900)
    history = sketchgp.fit(build(910, CG), iterations=4, num_probes=2, tol=0).subset
    assert history is not None and history.objective == "vecchia"
    assert (len(history.losses), history.restarts) == (4, [])


def test_neighbours_follow_the_lengthscales(monkeypatch):
    """Those chosen at the end of a fit to few rows are not those of its own end."""
    for name, limit in LOWER.items():
        monkeypatch.setattr(f"sketchgp.fitting.{name}", limit)
    monkeypatch.setattr("sketchgp.preconditioners.automatic._ROWS", 900)
    monkeypatch.setattr("sketchgp.fitting.plan._NEIGHBORS", 3)
    x, noise, _ = data(n=910, d=2)
    y = torch.sin(40 * x[:, 0]) + 0.1 * noise
    model = Plain(x, y, gpytorch.likelihoods.GaussianLikelihood(), ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=2)))
    sketchgp.accelerate(model.double(), solver=CG)
    with sketchgp.record_solves() as solves:  # of the last stage, which is not looked at
        history = sketchgp.fit(model, num_probes=2, iterations=60, tol=1e-3, callback=lambda *_: bool(solves)).subset
    assert history is not None and (history.objective, history.rows) == ("vecchia", 910)
    assert history.restarts
    objective = Objective(model.train(), gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model))
    with torch.no_grad():
        for name, values in history.hyperparameters.items():
            part, _, leaf = name.rpartition(".")
            model.get_submodule(part).initialize(**{leaf: torch.tensor(values[history.best_step]).double()})
    density = by_neighbors(objective)
    assert objective.by(density).evaluate(gradient=False).value == pytest.approx(history.best_loss, abs=4e-3)


@pytest.mark.parametrize("optimizer", ["lbfgs", "adam"])
def test_a_run_begins_anew_where_float32_has_lost_the_matrix(monkeypatch, optimizer):
    """Its losses are not compared with those before, which may be far too low."""
    estimate, calls = Probes._estimate, [0]

    def lost(self, operator, *others, judged=True):
        calls[0] += operator.dtype == torch.float32
        if operator.dtype == torch.float32 and calls[0] > 3:
            raise LostToRoundingError("lost")
        each, determinant = estimate(self, operator, *others, judged=judged)
        return each, determinant - 1000 * (operator.dtype == torch.float32)

    monkeypatch.setattr(Probes, "_estimate", lost)
    model = build(180, CG).float()
    with iterative(tol=1e-3):
        history = sketchgp.fit(model, objective="probes", start="model", optimizer=optimizer, iterations=30)
    (start,) = history.restarts
    assert 0 < start <= history.best_step and history.best_loss > min(history.losses[:start])
    assert any("float64 products" in note for note in history.notes)
