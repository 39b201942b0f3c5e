"""The base class of iterative methods, which the loop runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ...report import Reason
from ...space import Space


class Method:
    """A method at work on one problem.

    Everything that the next step depends on is in the attributes that ``saved`` names, and in ``generator``, so that
    saving them saves the solve: tensors, lists and dictionaries of tensors, and plain values.  What the set-up makes
    again from the problem, the choices and their seed is not among them.

    :cvar saved: names of attributes, or of those of a part: ``"part.attribute"``.
    :cvar vectors: of those the vectors of ``space``, ``"attribute"`` or ``"attribute/key"`` of a dictionary: a
        checkpoint has all their rows, so that it does not depend on the number of ranks.
    :cvar unit: of work, that the budget counts: ``"iterations"``, ``"passes"`` or ``"epochs"``.
    :cvar judges_held_out: whether the held-out error decides anything, so that each window needs it.
    :cvar letter: of ``size``: ``"n"`` where the unknowns are those of the full problem, ``"m"`` of inducing points,
        ``"features"`` of random features.
    :cvar measure: what the held-out error is, in words.
    :ivar name: as reports print it; ``size`` of what is solved for.
    :ivar data_rows: rows of the data; None of a stream that has not been counted.
    :ivar matrix_entries: kernel entries that make a pass.
    :ivar device: where the tensors live.
    :ivar generator: every random choice of a step comes from it; None where there is none.
    :ivar notes: what a report should say.
    :ivar iterations: steps so far.
    :ivar time_used: the share of the time budget that is used, from 0; 0 where there is no limit.  The loop sets it.
    """

    saved: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    space = Space(0)
    unit = "iterations"
    judges_held_out = False
    letter = "n"
    measure = "held-out RMSE"
    name = ""
    size = 0
    data_rows: int | None = None
    matrix_entries = 1.0
    device = torch.device("cpu")
    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.iterations = 0
        self.time_used: Callable[[], float] = lambda: 0.0

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the plain values and the tensors of ``saved``, as :meth:`restore` takes them."""
        plain: dict[str, Any] = {"kinds": {}}
        tensors: dict[str, Tensor] = {}
        for name in ("notes", "iterations", *self.saved):
            value = attrgetter(name)(self)
            parts = {"": value} if torch.is_tensor(value) else value
            parts = dict(enumerate(parts)) if isinstance(parts, list | tuple) else parts
            if not isinstance(parts, dict) or not parts or not all(map(torch.is_tensor, parts.values())):
                plain[name] = value
                continue
            plain["kinds"][name] = (type(value).__name__, [(key, part.device.type) for key, part in parts.items()])
            tensors |= {f"{name}/{key}": part for key, part in parts.items()}
        for key in filter(tensors.__contains__, self._vector_keys()):
            tensors[key] = self.space.to_write(tensors[key])
        if self.generator is not None:
            tensors["generator"] = self.generator.get_state()
        return plain, tensors

    def _vector_keys(self) -> list[str]:
        return [name if "/" in name else f"{name}/" for name in self.vectors]

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Set the attributes to what :meth:`state` returned."""
        tensors = tensors | {key: self.space.own(tensors[key]) for key in self._vector_keys() if key in tensors}
        if self.generator is not None:
            self.generator.set_state(tensors["generator"].cpu())
        for name, value in plain.items():
            if name != "kinds":
                self._set(name, value)
        for name, (kind, keys) in plain["kinds"].items():
            parts = {key: tensors[f"{name}/{key}"] for key, _ in keys}
            parts = {key: parts[key].cpu() if device == "cpu" else parts[key] for key, device in keys}
            full = {"dict": parts, "list": list(parts.values()), "tuple": tuple(parts.values())}
            self._set(name, full[kind] if kind in full else parts[""])

    def _set(self, name: str, value: Any) -> None:
        *owners, last = name.split(".")
        owner = attrgetter(".".join(owners))(self) if owners else self
        if owner is not None:  # a part that only other choices have
            setattr(owner, last, value)

    def begin(self, initial: Tensor | None) -> Tensor:
        """Set the iterate to a starting point ``(size, columns)``, or to 0; returns the relative residual ``(t,)``."""
        raise NotImplementedError

    def step(self) -> bool:
        """Take a step; return whether it closes a window, at whose end the residual is estimated and judged."""
        raise NotImplementedError

    def estimate(self) -> Tensor:
        """The relative residual ``(t,)`` of the window that was closed, on the CPU."""
        raise NotImplementedError

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Verify what is due after a window, and return why the solve is to end now, or None.

        :raises NumericalError: where the method fails.
        """
        raise NotImplementedError

    def close(self) -> bool:
        """End a window that is open when the last step was taken, and return whether there was one.

        No checkpoint holds what this changes, so that a solve that goes on later has no window cut short.
        """
        return False

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        """Return the outcome, once nothing more is to be done.

        :param quick: somebody waits.
        """
        raise NotImplementedError

    def give_up(self, reason: Reason) -> Outcome:
        """Return the outcome where :meth:`finish` was interrupted, at once if that is possible."""
        return self.finish(reason, True)

    def resume(self, ended: Reason | None) -> Reason | None:
        """Return why a solve that had ended ends with the present tolerance, too, or None; after :meth:`restore`."""
        return self.judge(None) if ended is not None and ended.final else None

    def moved(self) -> None:
        """Begin anew from the iterate what builds on the bits of the set-up, as conjugate directions do.

        It is called after :meth:`restore` of what another number of ranks saved, which rounds otherwise.
        """

    def weights(self) -> Tensor:
        """The present iterate ``(size, columns)``, float64."""
        raise NotImplementedError

    @property
    def work(self) -> float:
        """Done so far, in the method's unit."""
        return {"iterations": float(self.iterations), "passes": self.passes, "epochs": self.epochs}[self.unit]

    @property
    def passes(self) -> float:
        """Kernel entries evaluated, over those of the matrix."""
        return self.entries / self.matrix_entries

    @property
    def epochs(self) -> float:
        """Rows of the data seen, over n."""
        return float(self.iterations)

    @property
    def tally(self) -> dict[str, float]:
        """Done so far, by the names of :attr:`sketchgp.SolveReport.work`, beside iterations and passes."""
        return {}

    @property
    def entries(self) -> float:
        """Kernel entries evaluated so far."""
        raise NotImplementedError


def largest_of(residual: Tensor) -> float:
    """The largest over the columns; 0 where there are none."""
    return float(residual.max()) if residual.numel() else 0.0


@dataclass
class Outcome:
    """The value ``(size, columns)`` that a solve ended with, and facts for its report.

    :ivar reason: why it ended, where that is another reason now that all is known.
    :ivar facts: fields of :class:`sketchgp.SolveReport`, details among them.
    """

    value: Tensor
    residual: Tensor
    converged: bool
    reason: Reason
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """Work done, estimated residual, held-out error and iterate of a solve under way.

    :ivar iteration: steps so far.
    :ivar passes: kernel entries evaluated, over those of the matrix.
    :ivar epochs: rows of the data seen, over n.
    :ivar seconds: since the start, set-up and earlier runs of a resumed solve included.
    :ivar residual: relative residual of each column ``(t,)``, as the solver estimates it while it runs.
    :ivar held_out: root mean square error of each column on the held-out points; None where there are none.
    :ivar weights: function that returns the present W, ``(n, t)`` or ``(m, t)``, float64; inside ``sharded()`` it is
        called on all ranks.
    """

    iteration: int
    passes: float
    epochs: float
    seconds: float
    residual: Tensor
    held_out: Tensor | None
    weights: Callable[[], Tensor] = field(repr=False)
