"""Constants and weights of a prior mean that it is linear in, found by generalised least squares.

With ``r - H b`` the residuals for coefficients b of the mean, a Gaussian loss has its minimum over b at
``b = (H^T A^-1 H)^-1 H^T A^-1 r``, whatever the other hyperparameters are.  So a density minimises over b while it
computes the loss (:meth:`.LogDensity.regressed`), and L-BFGS moves the others alone, which takes fewer losses.  Where
no density does that, coordinates of an orthonormal basis of H are variables of the optimiser: weights of inputs far
from zero, or of very different units, would point nearly the same way.

Reference: Rasmussen and Williams, "Gaussian processes for machine learning" (2006), section 2.7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..density import LogDensity
from ..models.accelerated.trend import NARROW, coefficients, design_of, set_coefficients

_MOST = 100  # coefficients: each takes a column of every solve
_ROWS = 4  # rows for each coefficient, at least


class Trend:
    """Coefficients b of a prior mean, and what the mean makes of them.

    :param parameters: of the mean, with p numbers in all.
    :param design: H, ``(n, p)``, derivatives of the prior means of the observed rows.
    :param residual: ``(n,)`` targets less means for the present parameters, which are moved to least squares.

    :ivar basis: U, ``(n, k)`` float64, an orthonormal basis of H's range, but for directions that rounding has made.
    :ivar latest: the coordinates that were put last.
    """

    def __init__(self, parameters: list[Tensor], design: Tensor, residual: Tensor) -> None:
        self.parameters = parameters
        scale = torch.where((norms := design.norm(dim=0)) > 0, norms, 1)
        left, values, right = torch.linalg.svd(design.double() / scale, full_matrices=False)
        kept = values > NARROW * torch.finfo(design.dtype).eps * values[0]
        self.basis = left[:, kept].contiguous()
        self._back = right[kept].mT / values[kept] / scale.unsqueeze(1)  # from coordinates in U to b
        self._forth = self.basis.mT @ design.double()
        self._start = self._flat() + self._back @ (self.basis.mT @ residual.double())
        self.put(torch.zeros_like(self._start[: self.basis.shape[1]]))

    def _flat(self) -> Tensor:
        return torch.cat([p.detach().double().reshape(-1) for p in self.parameters])

    def _at(self, coordinates: Tensor) -> Tensor:
        return self._start + self._back @ coordinates.to(self._start)

    @property
    def coordinates(self) -> Tensor:
        """Coordinates ``(k,)`` in U of the present means less those of least squares."""
        return self._forth @ (self._flat() - self._start)

    def values(self, coordinates: Tensor) -> list[Tensor]:
        """Return the parameters, float64, whose means differ by ``U c`` from those of least squares."""
        pieces = self._at(coordinates).split([p.numel() for p in self.parameters])
        return [piece.reshape(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]

    def put(self, coordinates: Tensor) -> None:
        """Give the mean the parameters of :meth:`values`."""
        self.latest = coordinates
        set_coefficients(self.parameters, self._at(coordinates))


class _Residuals(LogDensity):
    """Keeps the residuals that a loss takes the density of, which is 1 then, and the tensors of their covariance."""

    regresses = False

    def __init__(self) -> None:
        self.found = list[tuple[Tensor, tuple[Tensor, ...]]]()

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        self.found.append((columns, operator.representation()))
        return columns.new_zeros(columns.shape[-1]), columns.new_zeros(())


def trend_of(objective: Any) -> Trend | None:
    """Return the trend of a model, whose coefficients are moved to least squares; None where its mean has none.

    They are free parameters of constant and linear means, at most a hundred, in which the prior mean is linear.
    Nothing else may depend on them, such as a prior, and the prior mean on no other parameter.
    """
    parameters = coefficients(objective.model)
    count = sum(p.numel() for p in parameters)
    several = objective.acceleration is not None and objective.model.train_targets.dim() != 1
    if not 0 < count <= _MOST or several:
        return None
    before, noted = objective.state(), [p.requires_grad for p in parameters]
    try:
        for p in parameters:
            p.requires_grad_(False)
        with torch.inference_mode(False), torch.enable_grad():  # what else the mean depends on shows as a gradient
            found = _design(objective, parameters, count)
    finally:
        for p, required in zip(parameters, noted, strict=True):
            p.requires_grad_(required)
        objective.restore(before)
    return None if found is None else Trend(parameters, *found)


def _design(objective: Any, parameters: list[Tensor], count: int) -> tuple[Tensor, Tensor] | None:
    """Return H ``(n, p)`` and the present residuals ``(n,)``; None where the mean is not linear, or not alone so."""
    now = torch.cat([p.detach().reshape(-1) for p in parameters])

    def at(values: Tensor, targets: Tensor) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Return the residuals for these parameters, and what else the loss is made of; none of a batch."""
        set_coefficients(parameters, values)
        if objective.acceleration is None:
            residual = targets - objective.model(*objective.model.train_inputs).mean
            return [(residual.reshape(len(residual), -1).mean(dim=1), ())]  # its outputs have one mean
        recorder = _Residuals()
        loss = objective.by(recorder).loss(targets)
        one = len(recorder.found) == 1 and recorder.found[0][0].dim() == 2
        return [(columns.squeeze(-1), (loss.detach(), *rest)) for columns, rest in recorder.found if one]

    targets = objective.model.train_targets
    found = at(now, targets)
    if not found or found[0][0].requires_grad or len(residual := found[0][0]) < _ROWS * count:
        return None
    if not bool(torch.isfinite(residual).all()):
        return None
    rests = list[tuple[Tensor, ...]]()

    def mean(values: Tensor) -> Tensor:
        ((none, rest),) = at(values, targets * 0)  # NaN where there is none
        rests.append(rest)
        return -none

    design = design_of(mean, now, residual)
    alone = all(torch.equal(a, b) for rest in rests for a, b in zip(rest, rests[0], strict=True))
    return None if design is None or not alone else (design, residual)
