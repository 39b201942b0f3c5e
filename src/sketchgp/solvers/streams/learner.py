"""A function in random features that is learned step by step: its coefficients, and a doubly stochastic step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...devices import fetched
from ...errors import NumericalError
from ...fingerprint import tensor_mark
from ...operators.feature_map import Made, RandomFeatures
from ...space import Space
from .problem import Squared

_ENTRIES = 2**21  # of features at points at once
_RECENT = 3  # an average of k iterates gives the last one the weight (r + 1) / (k + r)
_FIRST = 0.5  # preconditioned step, of a whole one
_SETTLED_AFTER = 10.0  # sweeps over the features after which it has halved
_DAMPED = 0.05  # of N / b times the mean diagonal of a block's matrix: the least ridge that a batch of b rows is met by
_SETTLED = 2.0  # theta lambda of the paper's theorems, in (1, 2] or an integer

Extra = Callable[[Tensor, Tensor], Tensor]  # points, their numbers -> more columns of targets


class Learner:
    """``f(x) = sum_l phi_l(x)^T a_l``, the features made anew where they are needed.

    Where ranks work together (:func:`sketchgp.distributed.sharded`), each evaluates features at its own rows of a
    batch.  Values of f, the slope and the matrix of a step are added up, ``(b + 2 |j|) c`` numbers and ``|j|^2``
    (``|j| b`` where b < |j|), the step is then taken by all alike.

    :param features: pairs ``phi_l``; :param columns: c of f.
    :param choices: the solver; :param pairs: of features of a step, at most; :param total: pairs in all, None for new
        ones at every step.

    :ivar more: gives further columns of targets, or None.
    :ivar coefficients: ``(pairs, 2, c)`` float64; :ivar average: of the iterates.
    :ivar place: the next pair; :ivar steps: so far; :ivar visited: pairs that steps have changed so far, each time;
        :ivar taken: rows of all batches so far; :ivar rows: different ones, those of tensors all at once.
    :ivar mark: of the tensors that it learns from, or last did; :ivar first: the number of their first row.
    """

    counters = ("place", "steps", "visited", "taken", "rows", "mark", "first", "first_step", "settles")
    arrays = ("coefficients", "average")

    def __init__(
        self, features: RandomFeatures, loss: Squared, choices: Any, pairs: int, total: int | None, columns: int
    ) -> None:
        self.features, self.loss, self.choices, self.pairs, self.total = features, loss, choices, pairs, total
        self.more: Extra | None = None
        device = features.origin.device
        self.coefficients = torch.zeros(0, 2, columns, dtype=torch.float64, device=device)
        self.average = self.coefficients.clone()
        self.place = self.steps = self.visited = self.taken = self.rows = self.first = 0
        self.mark = ""
        self.first_step, self.settles = float("nan"), float("nan")  # of steps without preconditioner
        self.entries = 0  # features at points, so far

    @property
    def columns(self) -> int:
        return self.coefficients.shape[2]

    def grow(self, pairs: int = 0, columns: int = 0) -> None:
        """Take in more pairs or columns, 0 so far, where there are fewer."""
        size = max(pairs, len(self.coefficients)), 2, max(columns, self.columns)
        missing = (0, size[2] - self.columns, 0, 0, 0, size[0] - len(self.coefficients))
        if any(missing):  # early versions of torch do not pad what has no columns
            old = self.coefficients, self.average
            self.coefficients, self.average = (pad(t, missing) if t.numel() else t.new_zeros(size) for t in old)

    def all_columns(self, targets: Tensor, x: Tensor, numbers: Callable[[], Tensor]) -> Tensor:
        """Append further columns to targets ``(b, t)``, and make f as wide; each rank has those of its rows, and zeros.

        :param numbers: gives numbers that the rows are known by.
        """
        if self.more is not None:
            own = Space.of(len(x)).span
            made = self.more(x[own], numbers()[own])
            more = made.new_zeros(len(x), made.shape[1])
            more[own] = made
            targets = torch.cat([targets, more], dim=1)
        self.grow(columns=targets.shape[1])
        return targets

    def begin(self, *data: Tensor) -> None:
        """Begin or go on with learning from tensors x and y, or from a stream where there are none."""
        mark = tensor_mark(*data) if data else ""
        if mark == "" or mark != self.mark:
            self.mark, self.first = mark, self.rows
            self.rows += len(data[0]) if data else 0

    def room(self, rows: int, most: int | None) -> int:
        """Return how many of ``rows`` may be new, where there are no more than ``most`` in all."""
        return rows if most is None else min(rows, max(0, most - self.rows))

    def step(self, x: Tensor, y: Tensor, ridge: float, whole: bool = False, new: int = 0) -> list[Tensor]:
        """Take one doubly stochastic step on a batch; return the losses of f before it and of 0, on the CPU.

        :param x: ``(b, d)``; :param y: targets of the loss, ``(b, c)`` float64.
        :param ridge: lambda of ``mean l + lambda / 2 ||f||^2``; :param whole: whether the batch is all there is.
        :param new: how many rows of a stream were not seen before.
        :raises NumericalError: where numbers are no longer finite; nothing has changed then.
        """
        space = Space.of(len(x))
        own = space.span
        made = self.features.prepare(x[own])
        f = self.evaluate(made, self.coefficients)
        which = self._pairs()
        phi = torch.cat(self.features.pairs(made, which.start, which.stop), dim=1)
        self.entries += phi.numel() + 2 * (len(x) - made.points) * (len(self.coefficients) + which.stop - which.start)
        weights = self.loss.weights(f)
        slope, f = self._slope(space, phi, f, y[own])
        losses = [self.loss.value(values, y) for values in (f, torch.zeros_like(f))]
        newton = None
        if self.choices.preconditioned:
            assert self.total is not None
            newton = _Newton(phi, weights, ridge, 2 * self.total, len(x), whole)
        losses = self._look(f, newton, losses)
        self.grow(which.stop)
        steady = self.loss.steady if whole and self.choices.preconditioned else None
        if newton is not None:
            change = self._preconditioned(which, newton, slope, steady)
        else:
            change = self._plain(phi, slope, ridge, len(x))
        self.coefficients[which] -= change.unflatten(0, (2, -1)).transpose(0, 1)
        self.steps += 1
        self.taken += len(x)
        self.rows += new
        self.visited += which.stop - which.start
        self.place = which.stop % self.total if self.total else which.stop
        weight = (_RECENT + 1) / (self.steps + _RECENT) if steady is None else 1.0
        self.average.lerp_(self.coefficients, weight)
        return losses

    def _slope(self, space: Space, phi: Tensor, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean slope of the loss in the features of a step, and f at all rows of the batch.

        :param phi: features of the rows of this rank, as f and y are of these rows.
        """
        slope = (phi.mT @ self.loss.gradient(f, y).to(phi.dtype)).to(torch.float64)
        if space.shared:
            values = f.new_zeros(space.n, f.shape[1])
            values[space.span] = f
            slope, f = space.total(torch.cat([slope, values])).split([len(slope), space.n])
        return slope / space.n, f

    def _look(self, f: Tensor, newton: _Newton | None, losses: list[Tensor]) -> list[Tensor]:
        """Fetch from the device at once the losses, which are returned, and whether the step can be taken.

        :raises NumericalError: where f is no longer finite.
        """
        info = f.new_zeros(()) if newton is None else newton.info
        fine, failed, *losses = fetched(torch.isfinite(f).all(), info, *losses)
        if not bool(fine):
            raise NumericalError(
                "The function that is learned is not finite any more. Choose a smaller step_scale.", see="diverges"
            )
        if newton is not None and bool(failed):
            torch.linalg.cholesky(newton.matrix)  # which says what is wrong
        return losses

    def _preconditioned(self, which: slice, newton: _Newton, slope: Tensor, steady: float | None) -> Tensor:
        """Return a step of Newton's kind, to be subtracted from the coefficients of some pairs."""
        pairs = self.total or 1
        passes = min(self.visited / pairs, self.taken / (2 * pairs))
        step = self.choices.step_scale * (steady or _FIRST / (1 + passes / _SETTLED_AFTER))
        return newton.change(slope, self.coefficients[which].transpose(0, 1).reshape(len(slope), -1), step)

    def _pairs(self) -> slice:
        """Return the pairs that the step changes."""
        stop = self.place + self.pairs
        return slice(self.place, min(stop, self.total) if self.total else stop)

    def _plain(self, phi: Tensor, slope: Tensor, ridge: float, rows: int) -> Tensor:
        """``f <- (1 - step lambda) f - step l'(f(x), y) k_j(x, .)`` with ``k_j`` the kernel of the features of the
        step: Algorithm 1 of the paper.  The last term is returned, to be subtracted."""
        if math.isnan(self.first_step):
            self._choose_step(Space.of(rows).whole(phi), ridge)
        step = self.first_step / (1 + self.steps / self.settles)
        self.coefficients *= 1 - step * ridge
        return slope * (step / len(slope))

    def _choose_step(self, phi: Tensor, ridge: float) -> None:
        """``step_i = theta / (i + i_0)``: at first as long as the largest eigenvalue of a first batch allows for the
        loss's curvature; theta as in the theorems, less where that many steps would heap up more of the features' noise
        than there was of error."""
        gram = phi.mT @ phi if len(phi) > phi.shape[1] else phi @ phi.mT
        largest = float(torch.linalg.eigvalsh(gram.to(torch.float64))[-1]) / phi.numel()
        mean = float(phi.square().mean())
        self.first_step = self.choices.step_scale / max(self.loss.curvature * largest + ridge, 1e-300)
        calm = max(1.0, phi.shape[1] * (largest / max(mean, 1e-300)) ** 2)
        self.settles = min(_SETTLED / (self.first_step * ridge), calm) if ridge > 0 else calm

    def evaluate(self, made: Made, coefficients: Tensor) -> Tensor:
        """f at points ``(p, c)`` float64, by tiles of features; :param made: of the points."""
        p = made.points
        total = torch.zeros(p, coefficients.shape[2], dtype=torch.float64, device=coefficients.device)
        size = max(64, _ENTRIES // max(1, p) // 256 * 256)
        for start in range(0, len(coefficients), size):
            stop = min(start + size, len(coefficients))
            a = coefficients[start:stop].to(made.coefficients.dtype)
            first, second = self.features.pairs(made, start, stop)
            total += torch.addmm(first @ a[:, 0], second, a[:, 1])
            self.entries += 2 * first.numel()
        return total


class _Newton:
    """``a_j -= step (C_j + N max(lambda, 0.05 c / b))^-1 (Phi^T l' / b + N lambda a_j)``, ``C_j = Phi^T D Phi / b``
    and c its mean diagonal.  The fixed point is that of the ridge regression on all N features, whatever the matrix
    is: it is damped where batches are small, as what b rows say of other points is then mostly noise.

    :param phi: of this rank's rows of the batch, of ``rows`` in all; :param features: N.
    :ivar info: not 0 where the matrix is not positive definite.
    """

    def __init__(
        self, phi: Tensor, weights: Tensor | None, ridge: float, features: int, rows: int, whole: bool
    ) -> None:
        space, self.rows = Space.of(rows), rows
        self.level = features * ridge
        weighed = phi if weights is None else phi * weights.to(phi.dtype).sqrt().unsqueeze(1)
        size = weighed.shape[1]
        if space.shared and size > rows:
            weighed, space = space.whole(weighed), Space(rows)
        gram = space.total(weighed.mT @ weighed) if size <= rows else None
        squares = weighed.square() if gram is None else gram.diagonal()
        mean = squares.sum(dtype=torch.float64) / (rows * size)
        damped = torch.zeros_like(mean) + self.level
        if not whole:
            damped = torch.maximum(damped, _DAMPED * features * mean / rows)
        self.damped = damped + torch.finfo(phi.dtype).eps * size * mean.clamp(min=1e-300)
        self.wide = weighed.to(torch.float64) if gram is None else None
        matrix = self.wide @ self.wide.mT if self.wide is not None else gram.to(torch.float64)  # type: ignore[union-attr]
        matrix.div_(rows).diagonal().add_(self.damped)
        self.matrix = matrix
        self.factor, self.info = torch.linalg.cholesky_ex(matrix)

    def change(self, slope: Tensor, a: Tensor, step: float) -> Tensor:
        """Return the step, to be subtracted from a ``(2 |j|, c)``."""
        right = slope + self.level * a
        if self.wide is None:
            return torch.cholesky_solve(right, self.factor) * step
        inner = self.wide.mT @ torch.cholesky_solve(self.wide @ right, self.factor) / self.rows  # Woodbury's identity
        return (right - inner) * torch.div(torch.tensor(step, dtype=torch.float64), self.damped)
