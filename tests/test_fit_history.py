"""What a fit tells: standard errors, residuals, iterations, products, and a picture."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import sketchgp
from gp_models import SOLVED, TORCH_WARNINGS, iterative
from sketchgp.fitting.history import SETTLED
from sketchgp.fitting.minimise import InverseHessian, _Search
from sketchgp.fitting.objective import Objective
from sketchgp.fitting.record import Evaluation, flat
from sketchgp.fitting.steps import Steps

pytestmark = TORCH_WARNINGS


def fitted(**options: Any) -> Any:
    model = sketchgp.accelerate(SOLVED["scale-rbf-ard"].build()[0], preconditioner=sketchgp.RPCholesky(rank=10))
    return sketchgp.fit(
        model, **{"optimizer": "lbfgs", "objective": "probes", "iterations": 6, "num_probes": 5, **options}
    )


def test_steps_know_their_solves() -> None:
    with iterative(tol=1e-3), sketchgp.record_solves() as solves:
        history = fitted()
    assert history.evaluations == len(solves) - 2
    del solves[-2:]  # by other probes, and of the bracket
    assert sum(history.iterations) == sum(report.iterations for report in solves)
    assert sum(history.products) == sum(report.work["products"] for report in solves)
    assert max(history.residuals) == max(report.max_residual for report in solves)
    assert all(0 < residual <= 1e-3 for residual in history.residuals)
    assert all(0 < error < 0.1 for error in history.standard_errors)


def test_other_probes_say_what_the_loss_is() -> None:
    with iterative(tol=1e-4):
        least = fitted(objective="exact", iterations=40).best_loss
        history = fitted(num_probes=16, iterations=20)
    value, error = history.by_other_probes
    assert abs(value - least) < 5 * error < 0.02
    assert value != history.best_loss
    assert f"by other probes {value:.4f} +- {error:.4f}" in str(history)


def test_nothing_is_estimated_of_an_exact_loss() -> None:
    history = fitted(objective="exact")
    assert history.by_other_probes is None
    assert history.objective == "exact"
    assert history.standard_errors == history.residuals == [0.0] * len(history.losses)
    assert history.iterations == [0] * len(history.losses)


def test_standard_errors_fall_with_the_probes() -> None:
    with iterative(tol=1e-3):
        few, many = (fitted(num_probes=count, iterations=1).standard_errors[0] for count in (10, 1000))
        assert fitted(num_probes=1, iterations=1).standard_errors == [math.inf]
    assert 6 < few / many < 16


def test_an_improvement_below_its_error_is_none() -> None:
    """The loss goes on falling, by less than the probes can tell; unless it is to go on until the very end."""
    with iterative(tol=1e-6):
        ended = fitted(num_probes=3, iterations=20, tol=1e-12)
        to_the_end = fitted(num_probes=3, iterations=20, tol=0)
    assert ended.reason == "the loss has settled"
    assert len(ended.losses) < len(to_the_end.losses)
    assert ended.best_loss - to_the_end.best_loss < ended.standard_errors[-1]


@pytest.mark.parametrize(("objective", "size"), [("exact", 0.4), ("probes", 0.04)])
def test_a_search_in_what_solves_leave_of_a_loss_ends(
    objective: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that are rough below the tolerance: nothing is gained by looking for a lower one between them.

    :param size: of what is added to them, times the tolerance.
    """
    exactly = Objective.evaluate

    def rough(self: Objective, gradient: bool = True) -> Evaluation:
        found = exactly(self, gradient)
        place = float(flat(self.parameters).sum())
        return dataclasses.replace(found, value=found.value + size * 1e-4 * math.sin(1e7 * place))

    monkeypatch.setattr(Objective, "evaluate", rough)
    with iterative(tol=1e-6):
        history = fitted(objective=objective, iterations=100, tol=1e-4)
    assert history.converged
    assert history.evaluations < len(history.losses) + 15


def test_a_step_that_promises_little_settles_a_loss() -> None:
    """By how the loss bends: the same gradient promises more where it bends less; nothing is promised without.  A third
    variable is at its limit, beyond which the loss would fall."""
    for inverse, settled in ((InverseHessian(1.0, []), True), (InverseHessian(100.0, []), False), (None, False)):
        search = object.__new__(_Search)
        search.point = SimpleNamespace(vector=np.zeros(3), gradient=np.array([3e-3, 4e-3, 7.0]))
        search.variables = SimpleNamespace(lower=np.array([-1.0, -1.0, 0.0]), upper=np.ones(3))
        search.steps = SimpleNamespace(tol=1e-4, history=SimpleNamespace(reason=""), ahead=math.inf)
        assert search.settled(inverse) == settled
        assert search.steps.history.reason == (SETTLED if settled else "")


@pytest.mark.parametrize(
    ("gains", "settled"),
    [([30, 3, 0.3], True), ([30, 3, 1.2], False), ([3, 2, 0.9], False), ([1, 30, 0.3], False), ([8, 4, 0.4], True)],
)
def test_steps_that_shrink_fast_settle_a_loss(gains: list[float], settled: bool) -> None:
    """After a subset: all steps to come, as a geometric series, bring less than the tolerance.  Where the curvature
    promises many times as much, it is believed, as it is where losses cost little; a first step tells nothing."""
    search, steps = object.__new__(_Search), object.__new__(Steps)
    search.point = SimpleNamespace(vector=np.zeros(1), gradient=np.array([0.05]))
    search.variables, search.steps = SimpleNamespace(lower=-np.ones(1), upper=np.ones(1)), steps
    steps.history = SimpleNamespace(losses=[9.0, *(9.0 - 1e-4 * np.cumsum(gains))], reason="")
    steps.first, steps.tol, steps.thorough = 0, 1e-4, False
    assert search.settled(InverseHessian(1.0, [])) == settled
    assert not search.settled(InverseHessian(2.0, []))
    steps.thorough = True
    assert not search.settled(InverseHessian(1.0, []))
    steps.thorough = False
    steps.first = 1
    assert not search.settled(InverseHessian(1.0, []))


@pytest.mark.parametrize(
    ("exact", "trials", "in_vain"),
    [
        (True, [1, 4, 16, 64], False),
        (True, [1, 4, 16, 15], True),
        (True, [-1, 1, -1, -2], True),
        (False, [1, 4], True),
    ],
)
def test_a_search_that_leaves_a_plateau_goes_on(exact: bool, trials: list[float], in_vain: bool) -> None:
    """Each trial is lower than those before, if by less than the tolerance; errors of solves look alike."""
    steps = object.__new__(Steps)
    steps.history, steps.objective = SimpleNamespace(losses=[9.0, 5.0]), SimpleNamespace(exact=exact)
    steps.first, steps.tol, steps._since = 0, 1e-4, [SimpleNamespace(value=5 - 1e-7 * trial) for trial in trials]
    assert steps.in_vain == in_vain


@pytest.mark.parametrize("phase", range(2))
def test_rough_losses_do_not_end_a_fit_where_a_subset_left_it(phase: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solves leave more of a loss than a step that is far too short would change it by."""
    monkeypatch.setattr("sketchgp.fitting.plan._SUBSET", 160)
    expected = fitted(objective="exact", start="subset", iterations=100, tol=1e-5).best_loss
    exactly = Objective.evaluate

    def rough(self: Objective, gradient: bool = True) -> Evaluation:
        found = exactly(self, gradient)
        place = float(flat(self.parameters).sum())
        return dataclasses.replace(found, value=found.value + 1e-5 * math.sin(1e7 * place + phase))

    monkeypatch.setattr(Objective, "evaluate", rough)
    history = fitted(objective="exact", start="subset", iterations=100, tol=1e-5)
    assert history.subset is not None
    assert history.best_loss < expected + 4e-4 < history.losses[0]


def test_a_picture() -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    with iterative(tol=1e-3):
        history = fitted()
    axes = history.plot()
    loss, best = axes.get_lines()
    assert list(loss.get_ydata()) == history.losses
    assert list(best.get_ydata()) == [history.best_loss]
    (norms,) = axes.figure.axes[1].get_lines()
    assert list(norms.get_ydata()) == history.gradients
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    highest = max(v + e for v, e in zip(history.losses, history.standard_errors, strict=True))
    assert float(heights.max()) == pytest.approx(highest)
    mine = matplotlib.Figure().subplots()
    assert history.plot(mine, by="seconds") is mine
    assert list(mine.get_lines()[0].get_xdata()) == history.seconds
    with pytest.raises(sketchgp.InputError, match="by"):
        history.plot(by="hours")
    with pytest.raises(sketchgp.InputError, match="at least one step"):
        sketchgp.FitHistory().plot()


def test_a_fit_does_not_depend_on_what_was_computed_before() -> None:
    """Pivots that another computation chose are not those of a fit."""
    losses = []
    for before in (False, True):
        model = sketchgp.accelerate(SOLVED["scale-rbf-ard"].build()[0], preconditioner=sketchgp.RPCholesky(rank=10))
        with iterative(tol=1e-3):
            if before:
                kept = model.state_dict()
                kept = {name: value.clone() for name, value in kept.items()}
                model.covar_module.base_kernel.lengthscale = torch.tensor([[0.1, 5.0]])
                model.eval()
                _ = model(model.train_inputs[0][:3] + 0.1).mean
                model.load_state_dict(kept)
            losses.append(sketchgp.fit(model, objective="probes", iterations=3).losses)
    assert losses[0] == losses[1]
