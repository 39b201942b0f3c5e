"""The evaluations of a fit, kept so that one that was killed goes on from where it was.

Neither SciPy's L-BFGS nor Adam has to be looked into: given the same losses and gradients they take the same steps.
So every evaluation is kept, parameters, loss and gradient, and a fit that is called again runs through them at no cost
until it comes to one that is not there.  What an evaluation leaves in a cache, the pivots of a preconditioner, is had
again by computing those evaluations anew that chose them.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from gpytorch.likelihoods import FixedNoiseGaussianLikelihood
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from ..fingerprint import add_tensors, structure_mark, tensor_mark, text_mark
from ..preconditioners import PreconditionerCache
from ..solvers.loop import Checkpoint


@dataclass(frozen=True)
class Evaluation:
    """One loss and the work that it took.

    :ivar value: NaN where the linear algebra broke down.
    :ivar probes: the loss by each probe, ``(s,)`` float64 for every log determinant that was estimated.
    :ivar clock: time at its end, by ``time.perf_counter``.
    :ivar residual: the largest true relative residual of its solves, 0 where there were none.
    :ivar iterations: number of iterations of conjugate gradients.
    :ivar products: number of products with the kernel matrix.
    :ivar doubled: whether log determinants are by float64 products from here on, 0 or 1.
    """

    value: float
    probes: tuple[Tensor, ...]
    clock: float
    residual: float = 0.0
    iterations: int = 0
    products: float = 0.0
    doubled: float = 0.0


_NUMBERS = [field.name for field in fields(Evaluation) if field.name not in ("probes", "clock")]


class Evaluations:
    """The evaluations of one objective of a fit.

    :param record: the record of the fit.
    :param cache: of the preconditioners of its evaluations, or None.
    """

    def __init__(self, record: Record, cache: PreconditionerCache | None) -> None:
        self.record, self.cache = record, cache
        self.kept = list[tuple[Tensor, Tensor, Evaluation]]()  # each with its point and its gradient
        self.chosen, self.next = -1, 0  # the evaluation that chose pivots last, and the one to come

    def find(self, point: Tensor) -> tuple[Evaluation, Tensor, bool] | None:
        """Return the evaluation at a point ``(p,)`` float64, its gradient, and whether caches need it computed again.

        It is None where the earlier run has not come to this point.
        """
        index = self.next
        if index >= len(self.kept):
            return None
        there, gradient, evaluation = self.kept[index]
        if not torch.equal(there, point):  # with another SciPy, say, the steps differ from here on
            del self.kept[index:]
            return None
        self.next += 1
        return evaluation, gradient, index == self.chosen

    def selections(self) -> int:
        """Return the number of times that the cache has chosen pivots."""
        return 0 if self.cache is None else self.cache.selections

    def add(self, point: Tensor, evaluation: Evaluation, gradient: Tensor, selections: int) -> None:
        """Keep an evaluation; ``selections`` is their number before it."""
        if self.selections() != selections:
            self.chosen = len(self.kept)
        self.kept.append((point, gradient, evaluation))
        self.next = len(self.kept)
        self.record.save(rarely=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a file keeps; none before there is an evaluation."""
        if not self.kept:
            return {}
        points, gradients, evaluations = zip(*self.kept, strict=True)
        numbers = []
        for one in evaluations:
            numbers.append([one.clock - self.record.began, *(getattr(one, name) for name in _NUMBERS)])
        return {
            "points": torch.stack(points),
            "gradients": torch.stack(gradients),
            "numbers": torch.tensor(numbers, dtype=torch.float64),
            "chosen": torch.tensor(self.chosen),
            **{f"probes of {index}": torch.stack(one.probes) for index, one in enumerate(evaluations) if one.probes},
        }

    def restore(self, kept: dict[str, Tensor]) -> None:
        """Take over the evaluations of an earlier run."""
        self.chosen = int(kept["chosen"])
        rows = zip(kept["points"], kept["gradients"], kept["numbers"].tolist(), strict=True)
        for index, (point, gradient, (clock, *row)) in enumerate(rows):
            numbers = dict(zip(_NUMBERS, row, strict=True))
            numbers["iterations"] = int(numbers["iterations"])
            numbers["clock"] = self.record.began + clock
            probes = tuple(kept.get(f"probes of {index}", ()))
            self.kept.append((point, gradient, Evaluation(probes=probes, **numbers)))


class Record:
    """The stages of one fit, in one file.

    :param objective: the losses whose parameters, and running means, are restored to those of the first run.
    :param path: the file, or None to keep nothing.
    :param every: seconds between two writes.
    :param marks: makes the marks of the fit for a file.

    :ivar began: time at which the fit began, by ``time.perf_counter``, the time between runs left out.
    """

    def __init__(
        self, objective: Any, path: str | os.PathLike[str] | None, every: float, marks: Callable[[], dict[str, str]]
    ) -> None:
        self.model, self.parameters = objective.model, objective.parameters
        self.checkpoint = None if path is None else Checkpoint(path, every, marks())
        self.began = self._saved_at = time.perf_counter()
        self.start = flat(self.parameters)
        self._stages: dict[str, Evaluations] = {}
        self._kept: dict[str, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """Take over the contents of the file.

        :raises InputError: where the file is of another fit.
        """
        if self.checkpoint is not None and self.checkpoint.exists():
            self._load(self.checkpoint)

    def evaluations(self, cache: PreconditionerCache | None) -> Evaluations | None:
        """Return the evaluations of the next objective, in their order; None without a file."""
        if self.checkpoint is None:
            return None
        name = str(len(self._stages))
        self._stages[name] = stage = Evaluations(self, cache)
        if name in self._kept:
            stage.restore(self._kept[name])
        return stage

    def save(self, rarely: bool = False) -> None:
        """Write all evaluations; where ``rarely``, only if that is due."""
        checkpoint = self.checkpoint
        if checkpoint is None or not checkpoint.ours or not self._stages:
            return
        if rarely and checkpoint.written and time.perf_counter() - self._saved_at < checkpoint.every:
            return
        contents = {"start": self.start, **{f"buffer.{name}": b for name, b in self._learned().items()}}
        stages = {**self._kept, **{name: stage.tensors() for name, stage in self._stages.items()}}
        for name, tensors in stages.items():
            contents.update({f"stage.{name}.{key}": tensor for key, tensor in tensors.items()})
        checkpoint.save({"seconds": time.perf_counter() - self.began}, contents)
        self._saved_at = time.perf_counter()

    @torch.no_grad()
    def _load(self, checkpoint: Checkpoint) -> None:
        plain, tensors = checkpoint.load(torch.device("cpu"))
        self.began -= plain["seconds"]
        self.start = tensors.pop("start")
        for parameter, part in zip(self.parameters, parts(self.start, self.parameters), strict=True):
            parameter.copy_(part)
        buffers = self._learned()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "buffer":
                buffers[rest].copy_(tensor)
            else:
                stage, _, key = rest.partition(".")
                self._kept.setdefault(stage, {})[key] = tensor

    def _learned(self) -> dict[str, Tensor]:
        """Return the running means and the like of normalisations."""
        norms = [(name, part) for name, part in self.model.named_modules() if isinstance(part, _NormBase)]
        return {f"{name}.{key}": tensor for name, part in norms for key, tensor in part.named_buffers()}


def flat(tensors: list[Tensor]) -> Tensor:
    """Return all tensors as one vector ``(p,)``, float64 on the CPU; a copy."""
    return torch.cat([t.detach().to("cpu", torch.float64).reshape(-1) for t in tensors])


def parts(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """Split a vector from :func:`flat` into tensors like the given ones."""
    pieces = vector.split([t.numel() for t in like])
    return [piece.reshape(t.shape).to(t) for piece, t in zip(pieces, like, strict=True)]


def fit_marks(model: Any, mll: Any, choices: str) -> dict[str, str]:
    """Return marks of what a fit depends on beside the parameters that it moves: equal marks, equal fits.

    :param choices: arguments of the fit and choices of the acceleration, in words.
    """
    digest = hashlib.sha256(structure_mark(model).encode())
    fixed = [p for p in model.parameters() if not p.requires_grad]
    norms = {id(b) for part in model.modules() if isinstance(part, _NormBase) for b in part.buffers()}
    add_tensors(digest, *fixed, *(b for b in model.buffers() if id(b) not in norms))
    moved = ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters() if p.requires_grad)
    noise = model.likelihood.noise_covar.noise if isinstance(model.likelihood, FixedNoiseGaussianLikelihood) else None
    return {
        "the training inputs": tensor_mark(*model.train_inputs),
        "the targets": tensor_mark(model.train_targets),
        "the noise": "" if noise is None else tensor_mark(noise),
        "the model": text_mark(f"{digest.hexdigest()} {moved}"),
        "the marginal likelihood": getattr(mll, "__qualname__", type(mll).__qualname__),
        "the choices of the fit": text_mark(choices),
        "the device": model.train_targets.device.type,
    }
