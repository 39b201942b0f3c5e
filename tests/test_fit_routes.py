"""The routes of ``fit``: what rows, solver, optimizer, start and objective lead to.

Each line of the table is one fit of a single step, and the chain of fits that its history tells of, smallest first:
the rows of each, how its losses were computed, and by which optimiser.
"""

from __future__ import annotations

from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from gp_models import SOLVED, Plain, data, iterative

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
TO_2000 = [*EXACT_FEW, "2000 exact lbfgs"]
# rows, solver, arguments of fit, and the route with GPyTorch's settings as they are
ROUTES: list[tuple[int, Any, dict[str, Any], list[str]]] = [
    (180, "auto", {}, ["180 exact lbfgs"]),
    (180, "auto", {"start": "model"}, ["180 exact lbfgs"]),
    (180, "auto", {"start": "subset"}, ["180 exact lbfgs"] * 2),
    (180, "auto", {"optimizer": "adam"}, ["180 exact adam"]),
    (180, "auto", {"learning_rate": 0.1}, ["180 exact adam"]),
    (180, "auto", {"objective": "bound"}, ["180 bound lbfgs"]),
    (180, "auto", {"objective": "probes"}, ["180 probes lbfgs"]),
    (180, CG, {}, ["180 probes lbfgs"]),
    (180, sketchgp.Cholesky(), {}, ["180 exact lbfgs"]),
    (180, SKOTCH, {}, ["180 probes lbfgs"]),
    (180, "inducing", {}, ["180 bound lbfgs"]),
    (180, "inducing", {"optimizer": "adam"}, ["180 bound adam"]),
    (1100, "auto", {}, [*EXACT_FEW, "1100 exact lbfgs"]),
    (1100, "auto", {"start": "model"}, ["1100 exact lbfgs"]),
    (1100, "auto", {"optimizer": "adam"}, ["1100 exact adam"]),
    (1100, "auto", {"objective": "bound"}, ["1100 bound lbfgs"]),
    (1100, "auto", {"start": "subset"}, [*EXACT_FEW, "1100 exact lbfgs", "1100 exact lbfgs"]),
    (1100, CG, {}, ["1100 bound lbfgs"]),
    (1100, SKOTCH, {}, ["1100 samples adam"]),
    (1100, SKOTCH, {"optimizer": "lbfgs"}, ["1100 bound lbfgs"]),
    (1100, "inducing", {}, ["500 bound lbfgs", "1000 bound lbfgs", "1100 bound lbfgs"]),
    (3100, "auto", {}, [*TO_2000, "3100 exact lbfgs"]),
    (3100, "auto", {"optimizer": "adam"}, ["3100 exact adam"]),
    (3100, CG, {}, [*TO_2000, "3100 bound lbfgs"]),
    (3100, SKOTCH, {}, [*TO_2000, "3100 samples adam"]),
    (8100, CG, {}, ["1000 exact lbfgs", "2000 exact lbfgs", "5000 bound lbfgs", "8100 bound lbfgs"]),
]


def case(rows: int, solver: Any, arguments: dict[str, Any], expected: list[str]) -> Any:
    name = solver if isinstance(solver, str) else type(solver).__name__
    words = "-".join(f"{value}" for value in arguments.values())
    marks = [pytest.mark.slow] if rows > 1100 else []
    return pytest.param(rows, solver, arguments, expected, id=f"{rows}-{name}-{words}", marks=marks)


@pytest.mark.parametrize(("rows", "solver", "arguments", "expected"), [case(*line) for line in ROUTES])
def test_route(rows: int, solver: Any, arguments: dict[str, Any], expected: list[str]) -> None:
    history = sketchgp.fit(build(rows, solver), iterations=1, num_probes=2, **arguments)
    assert route(history) == expected


@pytest.mark.parametrize(
    ("name", "choices", "arguments", "expected"),
    [
        ("scale-rbf-ard", {}, {}, "bound"),
        ("scale-rbf-ard", {"preconditioner": None}, {}, "probes"),
        ("scale-rbf-ard", {"preconditioner": sketchgp.Nystrom(rank=20)}, {}, "probes"),
        ("scale-rbf-ard", {"preconditioner": sketchgp.RPCholesky(rank=3)}, {}, "probes"),
        ("scale-rbf-ard", {"preconditioner": sketchgp.RPCholesky(rank=3)}, {"objective": "bound"}, "bound"),
        ("scale-rbf-ard", {}, {"mll": sketchgp.LeaveOneOutPseudoLikelihood}, "given"),
        ("batch", {}, {}, "bound"),
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
