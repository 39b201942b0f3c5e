"""Where a fit starts: from a random subset of the rows."""

from __future__ import annotations

from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood, GaussianLikelihood, MultitaskGaussianLikelihood

from ..density import Exact
from ..models.accelerated.acceleration import ATTRIBUTE
from ..models.copies import copied
from ..random_streams import generator
from .objective import Objective

_KNOWN = (GaussianLikelihood, FixedNoiseGaussianLikelihood, MultitaskGaussianLikelihood)
_SUBSET = 2000  # rows of a subset to start from, fitted exactly; of larger fits, those that larger ones start from:
_LEVELS = ((8_000, 5_000), (40_000, 16_000), (96_000, 40_000), (320_000, 128_000))  # (rows, those that come before)


def rows_before(rows: int) -> int:
    """How many rows a fit to so many rows starts from the optimum of."""
    return max([_SUBSET, *(level for least, level in _LEVELS if rows >= least)])


def exact_objective(model: Any, mll: Any) -> Objective:
    """Exact losses of a model: in float64, on a copy if need be; in its own dtype where it cannot be copied, or where
    its ``forward`` holds what no copy converts."""
    if all(t.dtype == torch.float64 for t in (*model.parameters(), *model.train_inputs, model.train_targets)):
        return Objective(model, mll, Exact())
    try:
        twin = _in_float64(mll)
        with torch.no_grad(), twin.model.__dict__[ATTRIBUTE].by(Exact()):
            _ = twin.model(*twin.model.train_inputs).variance  # whether all of it is in float64 now
    except (RuntimeError, TypeError):
        return Objective(model, mll, Exact())
    return Objective(twin.model, twin, Exact())


def _in_float64(mll: Any) -> Any:
    """A copy of a marginal log likelihood with its model, in float64 and in training mode."""
    twin = copied(mll)
    twin.train()
    return twin.double()


def on_subset(mll: Any, rows: int, seed: int, double: bool) -> Any | None:
    """A copy of a marginal log likelihood whose model has only so many random rows of its data.

    :param double: whether the copy is in float64.

    None for a model that it is not known how to take rows of (one with a batch, or with noises of its own making), or
    that cannot be copied.
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
    except (RuntimeError, TypeError):  # what a model holds may be no one's to copy
        return None
    twin.model.set_train_data(
        tuple(x[chosen] for x in twin.model.train_inputs), twin.model.train_targets[chosen], strict=False
    )
    if isinstance(twin.model.likelihood, FixedNoiseGaussianLikelihood):
        noise = twin.model.likelihood.noise_covar
        noise.noise = noise.noise[..., chosen]
    return twin
