"""Doubly stochastic functional gradients: random points and random features at every step.

Reference: Dai, Xie, He, Liang, Raj, Balcan, Song, "Scalable kernel methods via doubly stochastic gradients" (NeurIPS
2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ... import checks
from ...checks import count, flag, number, settle
from ...errors import InputError
from ...fingerprint import tensor_mark
from ...operators.feature_map import RandomFeatures
from ...operators.marks import kernel_mark
from ...report import Reason, SolveReport, conclude
from ...settings import free_memory
from ...space import Space
from ..choices import Budgeted, require_repeating
from ..loop import HeldOut, Progress, clock, compare_ranks, solve_marks
from ..problem import Solution
from .learner import Learner
from .learning import Learning
from .problem import LOSSES, Labels, RandomFeatureProblem, Targets

_LEAST, _MOST = 2048, 16384  # automatic features
_OF_ROWS = 32  # times n^1/2
_OF_STREAM = 8192  # of a stream of unknown length
_STEP, _CUDA_STEP = 1024, 2048  # features of a step
_PLAIN_STEP = 256  # of a step without preconditioner
_ROWS = 4  # of a batch, for each feature of a step,
_FEWEST = 64  # however little memory there is
_EPOCHS, _WHOLE_EPOCHS = 10, 40  # the latter of losses other than the squared one, where all data are in a batch
_LEARNED = "what had been learned"
_CENTRE = 1024  # rows of a first batch that phases are counted from the mean of


@dataclass(frozen=True, kw_only=True)
class DoublyStochastic(Budgeted):
    """Minimises ``mean_i l(f(x_i), y_i) + lambda / 2 ||f||^2`` by steps on a random batch of points and a random block
    of features, which are made anew from their numbers wherever they are needed and never stored.

    With ``k(u, v) ~ 1/N sum phi(u) phi(v)`` and ``f = sum_l phi_l a_l`` a step evaluates f on a batch of b points with
    all features so far and changes the block j:

    - ``preconditioned``: ``a_j -= step (C_j + N max(lambda, 0.05 c / b))^-1 (1/b Phi_j^T l' + N lambda a_j)``, ``C_j =
      1/b Phi_j^T D Phi_j`` the covariance of the block's features on the batch (section 4 of the paper; D the curvature
      of the loss), c its mean diagonal, blocks in turn.  Its fixed point is that of the problem on the N features, with
      lambda as it is; the second ridge calms the noise of small batches.  The step is ``0.5 step_scale / (1 + sweeps /
      10)``, a sweep being one over all blocks, and no less than N rows; where all the data are in a batch it does not
      fall, is step_scale for the squared loss and half of it for logistic ones, and there is no second ridge.
    - else Algorithm 1 of the paper: ``f <- (1 - step lambda) f - step / |j| phi_j^T 1/b Phi_j^T l'`` with
      ``step = theta / (i + i_0)``: i_0 such that the first step is as long as the largest eigenvalue of a batch allows
      (16 times as long for losses of labels, whose slope is never more than 1), theta = 2 / lambda as its theorems have
      it, or less where lambda is so small that this would heap up noise.  With
      ``num_features=None`` the features of every step are new, and f converges to the exact function, its mean squared
      error like 1 / i.

    A step costs ``b N d`` operations and ``b N`` cosines, however many outputs there are, and ``|j| b min(|j|, b)``
    operations for the covariance; memory is O(N c) for c columns, whatever n and d, beside tiles, a block's covariance
    and 64 MiB of frequencies.  Choose it for streams, for losses other than the squared one, for augmented data and
    many outputs.

    There is no tolerance: ``residual`` and ``history`` are of batches before their own steps, the root of the loss over
    that of f = 0.  The learner of tensors goes over them ``epochs`` times; a stream is gone through once, unless
    ``epochs`` says more; an endless one ends by ``max_iterations``, ``max_seconds``, the callback or Ctrl-C.

    :param num_features: N; None for new features at every step, without end.  ``"auto"`` is ``32 n^1/2`` as a power of
        2, from 2,048 to 16,384 and as memory allows, 8,192 for a stream of unknown length.
    :param block_size: features of a step, at most; None is 1,024 (on CUDA 2,048; 256 without preconditioner).
    :param batch_size: the most rows of a batch of tensors, which are made of even size; None is four times
        ``block_size``.  A stream comes in its own.
    :param preconditioned: as above.
    :param epochs: the most epochs; None is 10 for tensors, 40 for labels that fit into one batch, 1 for a stream.
    :param max_iterations: the most steps; None for no limit.
    :param step_scale: a factor of the computed step.
    :param seed: of features and orders of rows.
    """

    problem_type: ClassVar[type[RandomFeatureProblem]] = RandomFeatureProblem
    adjustable: ClassVar[tuple[str, ...]] = (*Budgeted.adjustable, "epochs", "max_iterations")

    num_features: int | Literal["auto"] | None = "auto"
    block_size: int | None = None
    batch_size: int | None = None
    preconditioned: bool = True
    epochs: int | None = None
    max_iterations: int | None = None
    step_scale: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_features != "auto":
            settle(self, count, "num_features", optional=True, least=2)
        settle(self, count, "block_size", optional=True, least=2)
        settle(self, count, "batch_size", "epochs", "max_iterations", optional=True)
        settle(self, flag, "preconditioned")
        settle(self, number, "step_scale", above=0, finite=True)
        settle(self, checks.seed, "seed")
        self._check_budget()
        if isinstance(self.num_features, int) and self.num_features % 2:
            raise InputError(
                f"num_features expects an even number, as features come in pairs; got {self.num_features}."
            )
        if self.num_features is None and self.preconditioned:
            raise InputError(
                "num_features=None (new features at every step) expects preconditioned=False: the ridge of a "
                "preconditioned step is that of all features, which therefore have to be a number."
            )

    def validate(self, problem: RandomFeatureProblem) -> None:
        """:raises InputError: for anything but a :class:`RandomFeatureProblem`, or where the choices do not fit it."""
        checks.instance(f"{self.name}.solve", "problem", problem, RandomFeatureProblem, "a RandomFeatureProblem")
        if problem.streamed and self.batch_size is not None:
            raise InputError("batch_size expects None for a stream, which comes in its own batches; set theirs.")

    # --- solving --------------------------------------------------------------------------------------------

    def solve(
        self,
        problem: RandomFeatureProblem,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`RandomFeatureProblem`.

        :returns: coefficients ``(N, t)``, float64, of the features ``learner(problem).features``.
        :raises InputError: for arguments that do not fit; :raises NumericalError: where it diverges.
        """
        self.validate(problem)
        return Solution(*self.learn(self.learner(problem), problem, callback, held_out, progress))

    def learner(self, problem: RandomFeatureProblem) -> Learner:
        """Return the zero function, of features about the data's mean.

        :raises InputError: for a stream without a batch.
        """
        return self.learner_for(problem, problem.n)

    def learner_for(self, problem: RandomFeatureProblem, rows: int | None) -> Learner:
        """Return the zero function, where the problem may be one batch of many.

        :param rows: of all batches, where that is known.
        """
        x, y = problem.first()
        if isinstance(problem.targets, Targets):
            problem.targets.columns = y.reshape(len(y), -1).shape[1]
        columns = problem.targets.columns or 0
        origin = x[:_CENTRE].mean(dim=0, keepdim=True)
        total = self.num_features
        if total == "auto":
            total = _OF_STREAM if rows is None else 2 ** math.ceil(math.log2(max(1, _OF_ROWS * math.sqrt(rows))))
            fits = free_memory(origin.device) // (8 * 4 * 8 * max(1, columns))
            total = max(_LEAST, min(total, _MOST, fits // 2 * 2))
        block = self._block(origin.device)
        pairs = max(1, (block if total is None else min(block, total)) // 2)
        features = RandomFeatures(problem.kernel, origin, self.seed)
        return Learner(features, LOSSES[problem.loss], self, pairs, total and total // 2, columns)

    def _block(self, device: torch.device) -> int:
        """Return the most features of a step."""
        if self.block_size or not self.preconditioned:
            return self.block_size or _PLAIN_STEP
        return _CUDA_STEP if device.type == "cuda" else _STEP

    def _batch(self, origin: Tensor) -> int:
        """Rows of a batch: as many as a step can use, fewer where points have so many inputs that those do not fit."""
        block = self._block(origin.device)
        free = free_memory(origin.device)
        return max(_FEWEST, min(_ROWS * block, free // (4 * 8 * (origin.shape[-1] + block))))  # four arrays of each

    @torch.no_grad()
    def learn(
        self,
        learner: Learner,
        problem: RandomFeatureProblem,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
        owner: str = "DoublyStochastic.solve",
    ) -> tuple[Tensor, SolveReport]:
        """Go on with a learner, which is changed; return the coefficients ``(N, c)`` and the report."""
        began = clock()
        checks.function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        error = self._held_out(owner, learner, problem, held_out)
        compare_ranks(self.name, lambda: self._marks(problem, learner))
        batch = self.batch_size or self._batch(learner.features.origin)
        epochs = self.epochs or self._epochs(problem, batch)
        if problem.streamed and problem.once and epochs > 1:
            raise InputError(
                f"{owner}: epochs={epochs} expects a stream that starts anew at each, as a DataLoader or a list does "
                "and a generator does not; got one that can be gone through once."
            )
        method = Learning(self, problem, learner, batch, epochs)
        value, report = self._execute(
            method, epochs, lambda: self._checkpoint_marks(problem, learner), lambda: self._facts(learner, method),
            progress, began=began, callback=callback, held_out=error, keep_interrupted=True,
        )  # fmt: skip
        conclude(report)
        return value, report

    @staticmethod
    def _epochs(problem: RandomFeatureProblem, batch: int) -> int:
        if problem.streamed:
            return 1
        assert torch.is_tensor(problem.x)
        return _WHOLE_EPOCHS if problem.loss != "squared" and len(problem.x) <= batch else _EPOCHS

    def _held_out(self, owner: str, learner: Learner, problem: RandomFeatureProblem, held_out: Any) -> HeldOut | None:
        if held_out is None:
            return None
        if not isinstance(held_out, tuple | list) or len(held_out) != 2:
            raise checks.refusal(owner, "held_out", "a pair of points and targets", held_out, True)
        x, y = problem.checked(f"{owner}: held_out", *held_out)
        checks.same_points(f"{owner}: held_out", x, learner.features.origin)
        targets, space = problem.targets, Space.of(len(x))  # each rank evaluates its own rows
        made = learner.features.prepare(x[space.span])

        def predict(weights: Tensor) -> Tensor:
            before = learner.entries
            f = learner.evaluate(made, weights.unflatten(0, (-1, 2)))
            learner.entries = before
            return space.whole(f)

        if isinstance(targets, Labels):
            return HeldOut(predict, x, y, lambda f: targets.wrong(f, y))
        y = targets.encode(f"{owner}: held_out", y)
        return HeldOut(lambda weights: predict(weights)[:, : y.shape[1]], x, y)

    def _checkpoint_marks(
        self, problem: RandomFeatureProblem, learner: Learner
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Return marks of a problem that can be gone on with, and rough ones of what ranks round otherwise."""
        if problem.streamed:
            require_repeating(problem.first, problem.once)
        return self._marks(problem, learner), {_LEARNED: f"{learner.steps}"}

    def _marks(self, problem: RandomFeatureProblem, learner: Learner) -> dict[str, str]:
        """Return marks that tell one solve from another."""
        x, y = problem.first()
        return {
            "the training inputs": tensor_mark(x),
            "the kernel": kernel_mark(problem.kernel, learner.features.origin),
            _LEARNED: tensor_mark(learner.coefficients, learner.average) + f" {learner.steps}",
            **solve_marks(problem.noise, y, f"{self._described()} {problem.loss} {learner.pairs}"),
        }

    def _facts(self, learner: Learner, method: Learning) -> dict[str, Any]:
        size = 2 * learner.pairs
        details: dict[str, float | str] = {"features": method.size, "block_size": size}
        if not self.preconditioned:
            details |= {"first_step": learner.first_step, "theta": learner.first_step * learner.settles}
        again = "Call learn again to go on; solve goes on from a checkpoint."
        return {
            "preconditioner": f"covariance of {size} features" if self.preconditioned else "none",
            "dtype": str(learner.features.origin.dtype).removeprefix("torch."),
            "details": details,
            "notes": ["the loss is that of batches before their own steps", *method.notes],
            "remedies": dict.fromkeys(
                (Reason.ITERATIONS, Reason.TIME, Reason.CALLBACK, Reason.INTERRUPTED, Reason.EPOCHS), again
            ),
        }
