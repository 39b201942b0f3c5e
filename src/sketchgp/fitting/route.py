"""How the losses of a fit are computed: exactly, by a bound, or with probes; and what the last one is worth."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from linear_operator import settings

from ..density import Bound, Probes, Samples, standard_error
from ..errors import InputError
from ..models.accelerated.acceleration import Acceleration
from ..models.accelerated.added_diag import left_to_us
from ..models.accelerated.missing import marginal_of_all
from ..models.accelerated.threshold import cholesky_points, threshold_untouched
from ..preconditioners.tightened import Tightened
from ..report import shortfall_counted
from ..settings import memory_budget
from ..solvers import Cholesky
from .before import Before
from .history import SETTLED, FitHistory
from .lbfgs import STEEP, STUCK
from .objective import Objective
from .start import exact_objective
from .steps import Steps

EXACT = {"cpu": 5000, "cuda": 20000}  # rows up to which losses are by factorization
# An evaluation by factorization takes the time of so many rows a product with K (and its share of all else) in one with
# probes: 45 at 9,600 rows and 68 at 6,000 of uci_pol, on one core.
_ROWS_A_PRODUCT = 60
_ROOM = 1.5  # the memory budget, a quarter of what is free, is to hold such a part more than one matrix
# Nats a row that a bound may leave open to be taken for the loss.  A fit loses at most that, and lost a tenth of it to
# all of it where it was measured; one with probes lost 0.0001 to 0.0007 (benchmarks/bounds.py).
WIDTH = 0.002
_TIGHT = 1e-7  # of the rows, that r^T P^-1 r of the last solve is to come to
_OTHERS = 2**40  # from the seed of a fit to that of probes that it has not seen
_AT_LAST = "where that ended a bound had become tight: went on with it"


def route(own: Objective, acceleration: Acceleration | None, asked: str, optimizer: str) -> tuple[str, str]:
    """``"exact"``, ``"bound"``, ``"probes"``, ``"samples"`` or ``"given"``; and why, where there is something to say.

    :param own: the model's own losses.
    :param asked: one of the first four, or ``"auto"``: a bound is then to be tried first.
    :param optimizer: as asked for; samples are of no use to L-BFGS.
    :raises InputError: where it cannot be had.
    """
    if acceleration is None:
        if asked in ("exact", "probes", "samples"):
            raise InputError(f'fit: objective="{asked}" is of accelerated models; an InducingPointGP has a bound.')
        return "bound", ""
    if isinstance(own.mll, gpytorch.mlls.LeaveOneOutPseudoLikelihood) or not isinstance(
        own.mll, gpytorch.mlls.ExactMarginalLogLikelihood
    ):
        if asked != "auto":
            raise InputError(
                f'fit: objective="{asked}" is of marginal likelihoods; {type(own.mll).__name__} is its own.'
            )
        return "given", ""
    rows, systems, device = own.rows, _systems(own), own.model.train_targets.device
    no_bound = why_no_bound(acceleration)
    if asked == "bound" and no_bound:
        raise InputError(f'fit: objective="bound" expects a preconditioner with pivots below K: {no_bound}.')
    if asked in ("auto", "samples"):
        if optimizer != "lbfgs" and rows > cholesky_points() and _sampled(own.model, acceleration):
            return "samples", ""
        if asked == "samples":
            raise InputError(
                'fit: objective="samples" expects Adam, a solver such as accelerate(model, solver=ASkotch()), one '
                f"plain kernel with random features, and more than {cholesky_points()} rows."
            )
    if asked != "auto":
        return asked, ""
    if isinstance(acceleration.solver, Cholesky):
        return "exact", ""
    fits = 8 * rows * rows * systems <= memory_budget.value(device)
    if _free(acceleration) and fits and rows <= EXACT.get(device.type, EXACT["cpu"]):
        return "exact", ""
    if rows <= cholesky_points() or not left_to_us(settings.fast_computations.log_prob):
        return "probes", "GPyTorch factorizes the matrix, by its settings in force"
    return ("probes", f"no bound: {no_bound}") if no_bound else ("bound", "")


def _free(acceleration: Acceleration) -> bool:
    """Whether the user left it to us how to solve."""
    return isinstance(acceleration.solver, str) and threshold_untouched()


def dearest(own: Objective, acceleration: Acceleration | None, asked: str) -> float:
    """Products with K of an evaluation with probes, above which a factorization is sooner done; infinite where that
    does not fit into memory, or is not to be.

    :param own: the model's own losses; :param asked: of how they are computed.
    """
    if acceleration is None or asked != "auto" or own.model.train_targets.device.type != "cpu":
        return math.inf
    fits = _ROOM * 8 * own.rows**2 <= memory_budget.value()
    return own.rows / _ROWS_A_PRODUCT if fits and _systems(own) == 1 and _free(acceleration) else math.inf


def factorized(own: Objective, steps: Steps, acceleration: Acceleration) -> Objective:
    """What a fit goes on with where its solves take longer than a factorization.

    :param own: the model's own losses; they get the best parameters.
    """
    history = steps.history
    own.restore(steps.best)
    history.objective = "exact"
    history.restarts.append(len(history.losses))
    history.notes.append(
        f"after {len(history.losses)} steps the solves of a loss took longer than a factorization: went on with those"
    )
    if acceleration.cache is not None:
        acceleration.cache.release()
    return exact_objective(own.model, own.mll)


def _sampled(model: Any, acceleration: Acceleration) -> bool:
    """Whether losses are by samples that the solver of the user's choice solves for."""
    if isinstance(acceleration.solver, str):
        return False
    before = Before(model)
    try:
        with torch.inference_mode(False), torch.no_grad():
            prior = model.train()(*model.train_inputs)
            marginal = marginal_of_all(model.likelihood, prior)
            return Samples.serves(acceleration.solver, marginal.lazy_covariance_matrix.evaluate_kernel())
    finally:
        before.put_back()


def _systems(objective: Objective) -> int:
    """How many systems its model is: 1, or those of a batch."""
    return int(objective.model.train_targets.numel()) // max(objective.rows, 1)


def why_no_bound(acceleration: Acceleration) -> str:
    """Why the preconditioner of a model gives no bounds; "" where it does."""
    choice = acceleration.preconditioner
    if choice is None or not acceleration.preconditions():
        return "there is no preconditioner"
    return "" if Bound.serves(choice) else f"{choice.name} has no pivots, or need not lie below the matrix"


def new_bound(
    objective: Objective, acceleration: Acceleration, asked: str = "auto", limited: bool = True, held: bool = True
) -> Bound:
    """One whose pivots are chosen at its first loss.

    :param objective: of the model; :param asked: ``"bound"`` for all the columns there may be, and no limit.
    :param limited: whether a first loss wider than :data:`WIDTH` is refused.
    :param held: whether pivots are held; they are chosen anew where losses become wider than that otherwise.
    """
    assert acceleration.preconditioner is not None
    choice = Tightened(base=acceleration.preconditioner, slack=WIDTH / 2, hopeful=asked == "bound")
    nats = WIDTH * objective.rows * _systems(objective)
    return Bound(choice, limit=nats if limited and asked != "bound" else None, redrawn=None if held else nats)


def next_objective(
    before: Objective, steps: Steps, own: Objective, acceleration: Acceleration | None, asked: str
) -> Objective:
    """What a fit goes on with where a bound has become too wide: new pivots, or probes where a bound with these would
    be too wide as well.  L-BFGS goes on from its best parameters.

    :param before: what was minimised; :param own: the model's own losses; :param asked: with ``"bound"`` never probes.
    """
    history, bound = steps.history, before.density
    assert isinstance(bound, Bound) and acceleration is not None and before.width is not None
    if history.optimizer == "lbfgs":
        own.restore(steps.best)
    done = len(history.losses)
    if done and history.restarts[-1:] != [done]:
        history.restarts.append(done)
    said = f"{before.width:.2g} a row open with {bound.rank} columns"
    if history.optimizer == "adam" or (done == steps.first and asked != "bound"):
        history.objective = "probes"
        history.notes.append(f"a bound would leave {said}: log determinants were estimated with probes")
        return own
    history.notes.append(f"after {done} steps the bound left {said}: its pivots were chosen anew")
    return Objective(own.model, own.mll, new_bound(own, acceleration, asked))


def bound_at_last(own: Objective, acceleration: Acceleration | None, history: FitHistory) -> Objective | None:
    """A bound to go on with where a fit has ended with probes after a bound was too wide, and is not any more; None
    where it is, or this was done before.

    :param own: the model's own losses, at the best parameters.
    """
    ends = history.bracket
    if history.optimizer != "lbfgs" or history.reason not in (SETTLED, STUCK, STEEP):
        return None
    if ends is None or not ends[1] - ends[0] <= WIDTH:
        return None
    if acceleration is None or history.objective != "probes" or _AT_LAST in history.notes:
        return None
    history.objective = "bound"
    history.restarts.append(len(history.losses))
    history.notes.append(_AT_LAST)
    return Objective(own.model, own.mll, new_bound(own, acceleration))


def judge_end(
    objective: Objective, own: Objective, acceleration: Acceleration | None, history: FitHistory, seed: int, count: int
) -> None:
    """What the loss at the hyperparameters that the model has is worth: ``by_other_probes`` and ``bracket`` of the
    history.

    :param objective: that the fit ended with; :param own: the model's own losses, in training mode.
    :param seed: of the fit, whose probes are ``count``.
    """
    history.by_other_probes = _by_other_probes(own, acceleration, history, seed, count)
    history.bracket = _bracket(objective, own, acceleration, history)


def _by_other_probes(
    own: Objective, acceleration: Acceleration | None, history: FitHistory, seed: int, count: int
) -> tuple[float, float] | None:
    """The loss by probes which no step has seen, and its standard error; None where log determinants are not estimated.

    A fit of many parameters is led by what its own probes say too much or too little: its losses are too low.
    """
    if acceleration is None or history.objective != "probes":
        return None
    if acceleration.cache is not None:
        acceleration.cache.clear()  # pivots of these parameters, whatever the fit was begun with
    with acceleration.fixed_probes(seed + _OTHERS, count):
        found = Objective(own.model, own.mll, Probes(watched=True)).evaluate()
    return (found.value, standard_error(found.probes)) if found.probes and math.isfinite(found.value) else None


def _bracket(
    objective: Objective, own: Objective, acceleration: Acceleration | None, history: FitHistory
) -> tuple[float, float] | None:
    """The two ends of the exact loss, as the model makes it in its dtype; None where they are not known."""
    bound = objective.density if isinstance(objective.density, Bound) else None
    if bound is not None and history.widths[-1] is None:
        history.objective = "given"
        history.notes.append("GPyTorch inverts the covariance by its structure: there is nothing to bound")
    if objective.exact:
        value = history.best_loss
        if objective is not own and objective.model is not own.model:  # parameters were rounded
            objective.restore(own.state())
            value = objective.evaluate(gradient=False).value
        return (value, value) if math.isfinite(value) else None
    if acceleration is None or history.objective in ("given", "samples") or why_no_bound(acceleration):
        return None
    if acceleration.cache is not None:  # F is the largest array there is, and another one is to come
        acceleration.cache.release()
    for candidate in (own, exact_objective(own.model, own.mll)):
        if bound is None or candidate is not own:
            bound = new_bound(own, acceleration, limited=False)
        bound.certain, bound.share, bound.limit, bound.redrawn = True, _TIGHT, None, None
        bounded = Objective(candidate.model, candidate.mll, bound)
        with shortfall_counted():
            value = bounded.evaluate(gradient=False).value
        if bounded.width is not None and math.isfinite(value - bounded.width):
            return value - bounded.width, value
    return None
