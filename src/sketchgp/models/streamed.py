"""The base of models of random features: a function that is learned from tensors, streams or single batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..fingerprint import module_mark, row_numbers, tensor_mark
from ..operators.feature_map import RandomFeatures
from ..operators.tiles import spans
from ..report import SolveReport
from ..solvers.loop import Progress, compare_ranks
from ..solvers.streams.doubly_stochastic import DoublyStochastic
from ..solvers.streams.learner import Learner
from ..solvers.streams.problem import LOSSES, Batch, Labels, RandomFeatureProblem, Targets

_ROWS = 2048  # points at once


class Streamed:
    """A mixin of modules with ``learn``, ``partial_fit``, and the function that they learn.

    :ivar loss: a name; :ivar solver: how it is learned; :ivar report: of the last ``learn``.
    """

    covar_module: Any
    loss: Any = "squared"
    solver: DoublyStochastic
    report: SolveReport | None
    _learner: Learner | None
    _learned: str  # marks of what it was learned with
    _loaded: dict[str, Any] | None

    def _begin(self, solver: DoublyStochastic | None) -> None:
        owner = type(self).__name__
        self.solver = DoublyStochastic() if solver is None else solver
        checks.instance(owner, "solver", self.solver, DoublyStochastic, "a DoublyStochastic(...), or None")
        self.forget()

    # --- what differs between models ------------------------------------------------------------------------

    def _new_targets(self) -> Targets | Labels:
        """Return how targets are read, before any was seen."""
        raise NotImplementedError

    def _ridge(self) -> float:
        """Return the noise of the problem."""
        raise NotImplementedError

    def _parts(self) -> tuple[Any, ...]:
        """Return the modules that the function depends on."""
        return (self.covar_module,)

    def _attach(self, learner: Learner, new: bool) -> None:
        """Prepare the model for a learner that was just made, or loaded."""

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _set_own_state(self, own: dict[str, Any]) -> None:
        pass

    # --- learning -------------------------------------------------------------------------------------------

    def learn(
        self,
        x: Tensor | Iterable[Batch],
        y: Any = None,
        *,
        rows: int | None = None,
        held_out: tuple[Tensor, Any] | None = None,
        callback: Callable[[Progress], Any] | None = None,
        progress: bool | None = None,
    ) -> SolveReport:
        """Learn from tensors, or from a stream of batches, continuing from what was learned before.

        A batch with NaN or infinity, or one that does not fit those before, raises an error that names it: what the
        batches before it taught is kept.  So it is when Ctrl-C ends the learning.

        :param x: ``(n, d)``; or an iterable of batches ``(x, y)`` of any sizes.
        :param y: targets, or labels: a tensor of integers, or a list, numpy array or pandas column of integers or
            texts; None for a stream.
        :param rows: n, where the data are a stream and it is known: the ridge is noise / n, and no more rows than these
            are taken for different ones.  Else n are the rows that were seen so far, and all are different, but for
            later epochs.  Tensors that come again are known.
        :param held_out: points and targets, or labels, whose error is computed as the solve goes on: the root mean
            square of each column, or the share of wrong labels.
        :param callback: called with a :class:`~sketchgp.solvers.Progress` once an epoch or 32 batches; True ends it.
        :param progress: show a progress bar (default: in a terminal or notebook).
        :returns: what happened.
        :raises InputError: for data that do not fit; :raises NumericalError: where it diverges.
        """
        owner = f"{type(self).__name__}.learn"
        with torch.no_grad():
            problem = self._problem(owner, x, y, rows)
            self.solver.validate(problem)
            learner = self._learner_for(problem, problem.n)
            _, self.report = self.solver.learn(learner, problem, callback, held_out, progress, owner)
        return self.report

    def partial_fit(self, x: Tensor, y: Any, rows: int | None = None) -> Any:
        """Take one step on one batch, ``(b, d)`` and its targets or labels.

        :param rows: n, if it is known; else all rows that were seen are taken for different ones.  Give it where the
            same rows come again.
        :returns: the model.
        :raises InputError: for a batch that does not fit, or holds NaN; nothing has changed then.
        """
        owner = f"{type(self).__name__}.partial_fit"
        with torch.no_grad():
            problem = self._problem(owner, x, y, None)
            points, y = problem.x, problem.y
            assert torch.is_tensor(points) and y is not None
            learner = self._learner_for(problem, rows)
            checks.same_points(owner, points, learner.features.origin)
            own = problem.targets.encode(owner, y)
            compare_ranks(owner, lambda: {"the batch": tensor_mark(points, y)})
            places = learner.rows + torch.arange(len(own), device=own.device)
            numbers = (lambda: places) if rows is None else (lambda: row_numbers(points, own))
            targets = learner.all_columns(own, points, numbers)
            ridge = problem.noise / (rows or learner.rows + len(targets))
            learner.step(points, targets, ridge, new=learner.room(len(targets), rows))
        return self

    def forget(self) -> Any:
        """Forget everything that was learned, so that another kernel or solver may follow, and return the model."""
        self._learner, self._loaded, self._learned, self.report = None, None, "", None
        self._targets = self._new_targets()
        return self

    def _problem(self, owner: str, x: Any, y: Any, rows: int | None) -> RandomFeatureProblem:
        self._known()
        self._targets.owner = owner
        return RandomFeatureProblem(self.covar_module, x, y, self._ridge(), self.loss, rows, self._targets)

    def _learner_for(self, problem: RandomFeatureProblem, rows: int | None) -> Learner:
        """Return the present learner, or a new one.

        :param rows: of all batches to come, where that is known.
        """
        learner = self._known()
        if learner is None:
            learner = self.solver.learner_for(problem, rows)
            self._attach(learner, new=True)
            self._learner, self._learned = learner, self._mark()
        return learner

    def _known(self) -> Learner | None:
        """Return the learner, from what was learned or loaded.

        :raises InputError: where the model has changed since.
        """
        if self._loaded is not None and self._learner is None:
            try:
                self._learner = self._restored(self._loaded)
            except (AttributeError, IndexError, KeyError, TypeError) as error:
                raise refuse(self, self._loaded) from error
            self._loaded = None
        if self._learner is not None and self._learned != self._mark():
            raise InputError(
                f"{type(self).__name__}: its kernel, mean, noise or solver changed since it learned, and what it "
                "learned does not fit them; change them back, or call model.forget() and learn anew."
            )
        return self._learner

    def _mark(self) -> str:
        solver = self.solver
        choices = (solver.num_features, solver.preconditioned, solver.seed, solver.block_size)
        return " ".join([*(module_mark(part) for part in self._parts()), repr(choices)])

    # --- the function ---------------------------------------------------------------------------------------

    @property
    def num_features(self) -> int:
        """Number of features that have coefficients; 0 before anything was learned."""
        learner = self._known()
        return 0 if learner is None else 2 * len(learner.coefficients)

    def _points(self, owner: str, x: Any) -> tuple[Learner, Tensor]:
        learner = self._known()
        if learner is None:
            raise InputError(f"{owner} expects a model that has learned; call learn or partial_fit first.")
        return learner, checks.points_among(owner, x, learner.features.origin)

    def _values(self, learner: Learner, x: Tensor, columns: slice = slice(None)) -> Tensor:
        """Return the function at x ``(..., p, d)``: ``(..., p, c)`` float64, differentiable in x."""
        flat, a = x.reshape(-1, x.shape[-1]), learner.average[..., columns]
        parts = [learner.evaluate(learner.features.prepare(flat[span]), a) for span in spans(len(flat), _ROWS)]
        return torch.cat(parts).reshape(*x.shape[:-1], a.shape[2])

    # --- moving and saving --------------------------------------------------------------------------------------------

    def _apply(self, *arguments: Any, **options: Any) -> Any:
        """Move what was learned along with the modules to another device (``to``, ``cuda``, ``double`` and so on)."""
        state = self._state() if self._learner is not None else None
        found = super()._apply(*arguments, **options)  # type: ignore[misc]
        if state is not None:
            self._learner, self._loaded = None, state
        return found

    def get_extra_state(self) -> dict[str, Any]:
        """Return what was learned, as tensors, numbers and text, which is part of ``state_dict()``."""
        if self._known() is None:
            return {"learned": ""}
        state = self._state()
        return {**state, "tensors": {name: t.detach().clone() for name, t in state["tensors"].items()}}

    def _state(self) -> dict[str, Any]:
        learner = self._learner
        assert learner is not None
        tensors = {"origin": learner.features.origin, "coefficients": learner.coefficients, "average": learner.average}
        numbers = {name: getattr(learner, name) for name in Learner.counters}
        steps = {"pairs": learner.pairs, "total": learner.total}
        return {"learned": self._learned, "tensors": tensors, "numbers": numbers, **steps, "own": self._own_state()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """:raises InputError: for what :meth:`get_extra_state` cannot have returned."""
        if not isinstance(state, dict) or not isinstance(state.get("learned"), str):
            raise refuse(self, state)
        self.forget()
        if state["learned"]:
            self._loaded, self._learned = state, state["learned"]

    def _restored(self, state: dict[str, Any]) -> Learner:
        """Return the learner of a state, once kernel and everything else exist.

        :raises InputError: where the model is another one.
        """
        tensors, numbers = state["tensors"], state["numbers"]
        own = next((t for part in self._parts() for t in (*part.parameters(), *part.buffers())), tensors["origin"])
        tensors = {name: tensor.to(own.device) for name, tensor in tensors.items()}
        self._set_own_state(state["own"])
        if self._learned != self._mark():
            raise InputError(
                f"{type(self).__name__}: what was loaded was learned with another kernel, mean, likelihood or solver "
                "(num_features, features, preconditioned, block_size, seed), or in another dtype; make the model with "
                "those."
            )
        features = RandomFeatures(self.covar_module, tensors["origin"], self.solver.seed)
        columns = tensors["average"].shape[2]
        learner = Learner(features, LOSSES[self.loss], self.solver, state["pairs"], state["total"], columns)
        learner.coefficients = tensors["coefficients"] * numbers.get("decay", 1.0)  # which version 0.2 saved
        learner.average = tensors["average"]
        for name, value in numbers.items():
            setattr(learner, name, value)
        self._attach(learner, new=False)
        return learner


def refuse(model: Any, state: Any) -> InputError:
    """Return the error for a state that a model cannot have made."""
    return checks.refusal(type(model).__name__, "the extra state", "what get_extra_state() returned", state)
