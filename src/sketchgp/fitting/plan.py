"""Ways to compute the losses of a fit, and copies of a model with some of its rows, which larger fits start from."""

from __future__ import annotations

import math
from typing import Any

import gpytorch
import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood
from linear_operator import settings

from ..density import Exact, Samples, Vecchia
from ..errors import InputError
from ..models.accelerated.acceleration import ATTRIBUTE, Acceleration
from ..models.accelerated.added_diag import AcceleratedAddedDiagLinearOperator, left_to_us
from ..models.accelerated.targets import marginal_of_all
from ..models.accelerated.threshold import cholesky_points, threshold_untouched
from ..models.copies import copied
from ..operators.access import Access
from ..preconditioners import FullScale
from ..preconditioners.automatic import is_map
from ..random_streams import generator
from ..settings import memory_budget
from ..solvers import Cholesky
from .objective import ModelState, Objective

EXACT = {"cpu": 5000, "cuda": 20000}  # rows up to which losses are by factorization
# An evaluation by factorization takes the time of so many rows a product with K (and its share of all else) in one with
# probes: 45 at 9,600 rows and 68 at 6,000 of uci_pol, on one core.
_ROWS_A_PRODUCT = 60
_ROOM = 1.5  # factor by which the memory budget must exceed one matrix for a factorization on the way
_KNOWN = (GaussianLikelihood, FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood)
_NEIGHBORS = 16  # of a start by Vecchia's approximation: with 32 it takes twice the time and ends 0.0005 a row lower
_SUBSET = 2000  # rows of a subset to start from, fitted exactly; of larger fits, (rows, those that come before):
_LEVELS = ((8_000, 5_000), (20_000, 10_000), (30_000, 16_000), (96_000, 40_000), (320_000, 128_000))


def route(base: Objective, asked: str, optimizer: str) -> tuple[str, str]:
    """Return ``"exact"``, ``"bound"``, ``"probes"``, ``"samples"`` or ``"given"``, and a note of the reason.

    :param base: the model's own losses.
    :param asked: one of them, but for the bound of inducing points and what is given, or ``"auto"``.
    :param optimizer: the optimizer asked for; samples are of no use to L-BFGS.
    :raises InputError: where the model does not have what is asked for.
    """
    acceleration = base.acceleration
    if acceleration is None:
        if asked in ("exact", "probes", "samples"):
            raise InputError(f'fit: objective="{asked}" is of accelerated models; an InducingPointGP has a bound.')
        return "bound", ""
    if isinstance(base.mll, gpytorch.mlls.LeaveOneOutPseudoLikelihood) or not isinstance(
        base.mll, gpytorch.mlls.ExactMarginalLogLikelihood
    ):
        if asked != "auto":
            raise InputError(
                f'fit: objective="{asked}" is of marginal likelihoods; {type(base.mll).__name__} is its own.'
            )
        return "given", ""
    rows, device = base.rows, base.model.train_targets.device
    if asked in ("auto", "samples"):
        told = optimizer != "lbfgs" and rows > cholesky_points() and not isinstance(acceleration.solver, str)
        if told and Samples.serves(acceleration.solver, _training_covariance(base.model)):
            return "samples", ""
        if asked == "samples":
            raise InputError(
                'fit: objective="samples" expects Adam, a solver such as accelerate(model, solver=ASkotch()), one '
                f"plain kernel with random features, and more than {cholesky_points()} rows."
            )
    if asked != "auto":
        return asked, ""
    fits = 8 * rows * base.model.train_targets.numel() <= memory_budget.value(device)  # all systems of a batch
    few = fits and rows <= EXACT.get(device.type, EXACT["cpu"])
    if isinstance(acceleration.solver, Cholesky) or (_free(acceleration) and few):
        return "exact", ""
    return "probes", "GPyTorch factorizes the matrix, by its settings in force" if factorized(base) else ""


def factorized(base: Objective) -> bool:
    """Return whether few rows, or settings, let GPyTorch factorize the matrix."""
    return base.rows <= cholesky_points() or not left_to_us(settings.fast_computations.log_prob)


def _free(acceleration: Acceleration) -> bool:
    """Return whether the user left the choice of the solver to the library."""
    return isinstance(acceleration.solver, str) and threshold_untouched()


def dearest(base: Objective) -> float:
    """Return the products with K of an evaluation with probes above which a factorization is sooner done.

    It is infinite where a factorization does not fit into memory, or was not left to the library.
    """
    targets = base.model.train_targets
    if base.acceleration is None or targets.device.type != "cpu" or targets.dim() > 1:
        return math.inf
    fits = _ROOM * 8 * base.rows**2 <= memory_budget.value()
    return base.rows / _ROWS_A_PRODUCT if fits and _free(base.acceleration) else math.inf


def by_neighbors(base: Objective) -> Vecchia | None:
    """Return the density of a fit to all rows of a map, which takes no solves; None for other models.

    With eight features, 10,000 rows of kin40k ended no lower than a fit to 2,000 of them (measured by hand).
    """
    covariance = _training_covariance(base.model)
    if not isinstance(covariance, AcceleratedAddedDiagLinearOperator):
        return None
    return Vecchia(FullScale(rank=0, neighbors=_NEIGHBORS)) if is_map(Access(covariance.latent)) else None


def _training_covariance(model: Any) -> Any:
    """Return the evaluated covariance of all targets, without gradients; the model is left as it was."""
    before = ModelState(model)
    try:
        with torch.inference_mode(False), torch.no_grad():
            marginal = marginal_of_all(model.likelihood, model.train()(*model.train_inputs))
            return marginal.lazy_covariance_matrix.evaluate_kernel()
    finally:
        before.put_back()


def exact_objective(base: Objective) -> Objective:
    """Return exact losses of a model by its losses: in float64, on a copy if need be.

    They are in the model's own dtype where it cannot be copied, or where its ``forward`` holds what no copy converts.
    """
    model, given = base.model, base.by(Exact())
    if all(t.dtype == torch.float64 for t in (*model.parameters(), *model.train_inputs, model.train_targets)):
        return given
    try:
        twin = _in_float64(base.mll)
        with torch.no_grad(), twin.model.__dict__[ATTRIBUTE].having(density=Exact()):
            _ = twin.model(*twin.model.train_inputs).variance  # fails unless all of it is in float64 now
    except (RuntimeError, TypeError):
        return given
    return Objective(twin.model, twin, Exact(), [] if base.trends != [None] else [None])


def _in_float64(mll: Any) -> Any:
    """Return a copy of a marginal log likelihood with its model, in float64 and in training mode."""
    twin = copied(mll)
    twin.train()
    return twin.double()


def rows_before(rows: int) -> int:
    """Return the number of rows of the fit that one to so many rows starts from."""
    return max([_SUBSET, *(level for least, level in _LEVELS if rows >= least)])


def on_subset(mll: Any, rows: int, seed: int, double: bool) -> Any | None:
    """Return a copy of a marginal log likelihood whose model has only so many random rows of its data.

    It is None for a model that cannot be copied or whose rows cannot be taken: one with a batch, or with noises of its
    own making.

    :param double: whether the copy is in float64.
    """
    model = mll.model
    inputs, targets = model.train_inputs, model.train_targets
    outputs = 2 if isinstance(model.likelihood, MultitaskGaussianLikelihood) else 1
    if not isinstance(model.likelihood, _KNOWN) or any(x.dim() != 2 for x in inputs) or targets.dim() != outputs:
        return None
    seen = (~torch.isnan(targets.reshape(len(targets), -1))).any(dim=1).nonzero().squeeze(-1).cpu()
    order = torch.randperm(len(seen), generator=generator(seed, "rows of a subset to start a fit from"))
    chosen = seen[order[:rows]].sort().values.to(targets.device)
    try:
        twin = _in_float64(mll) if double else copied(mll).train()
    except (RuntimeError, TypeError):  # some models hold what cannot be copied
        return None
    twin.model.set_train_data(
        tuple(x[chosen] for x in twin.model.train_inputs), twin.model.train_targets[chosen], strict=False
    )
    if isinstance(twin.model.likelihood, FixedNoiseGaussianLikelihood):
        noise = twin.model.likelihood.noise_covar
        noise.noise = noise.noise[..., chosen]
    return twin
