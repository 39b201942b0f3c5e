"""Conjugate gradients on the normal equations of the inducing-point problem: what KRILL and Falkon share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...operators.normal_matrix import NormalMatrix
from ...preconditioners.factored import TriangularFactors
from ...settings import available_memory
from ..conjugate_gradients import ConjugateGradients, Iterate
from ..problem import Solution, System
from .problem import InducingPointProblem


class NormalSystem(System):
    """``(Kzx Kxz + noise Kzz) W = Kzx y``: products with entries in x's dtype or in float64; sums are float64."""

    def __init__(self, matrix: NormalMatrix) -> None:
        self.operator, self.matmuls = matrix, 0
        self._exact: NormalMatrix | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.operator.tall.dtype

    def product(self, vectors: Tensor) -> Tensor:
        self.matmuls += 1
        return self.operator._matmul(vectors)

    def accurate_product(self, vectors: Tensor) -> Tensor:
        self.matmuls += 1
        if self._exact is None:
            self._exact = self.operator.accurate()
        return self._exact._matmul(vectors)


@dataclass(frozen=True, kw_only=True)
class NormalEquationsSolver:
    """Preconditioned conjugate gradients on ``(Kzx Kxz + noise Kzz) W = Kzx y``, all columns at once.

    :param tol: relative residual ``||(Kzx Kxz + noise Kzz) w - Kzx y|| / ||Kzx y||`` that every column must reach.
    :param max_iterations: the most iterations.
    :param precision: of the entries of Kxz: ``"float64"``; ``"float32"``, in which the dtype of x is kept and the
        residual corrected with float64 products, until those do more good; or ``"auto"``, float64 on a CPU, where it
        costs a fifth more, and ``"float32"`` on CUDA.  Sums and factors are float64 in any case.
    """

    tol: float = 1e-4
    max_iterations: int = 200
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not 0 < self.tol < 1:
            raise InputError(f"tol expects a number between 0 and 1, got {self.tol!r}.")
        if not isinstance(self.max_iterations, int) or self.max_iterations < 1:
            raise InputError(f"max_iterations expects a positive integer, got {self.max_iterations!r}.")
        if self.precision not in ("auto", "float32", "float64"):
            raise InputError(f"precision expects 'auto', 'float32' or 'float64', got {self.precision!r}.")

    @property
    def name(self) -> str:
        return type(self).__name__

    def validate(self, problem: InducingPointProblem) -> None:
        """:raises InputError: where the choices do not fit the problem, or its matrices the memory that is free."""
        needed, free = self._bytes(problem.m), available_memory(problem.device)
        if needed > free:
            raise InputError(
                f"{self.name}() needs {needed / 2**30:.1f} GiB for m = {problem.m} and {free / 2**30:.1f} GiB are "
                "free; use fewer inducing points, or solver=EigenPro4() or SketchySAGA(), whose memory is O(m)."
            )

    def _bytes(self, m: int) -> int:
        """Of the m x m matrices that are held at once."""
        raise NotImplementedError

    def preconditioner(self, matrix: NormalMatrix) -> TriangularFactors:
        """The preconditioner of one normal matrix."""
        raise NotImplementedError

    def _describe(self, problem: InducingPointProblem) -> str:
        raise NotImplementedError

    def solve(
        self,
        problem: InducingPointProblem,
        initial: Tensor | None = None,
        callback: Callable[[Iterate], Any] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve an :class:`InducingPointProblem` of tensors.

        :param initial: starting point, of the solution's shape.
        :param callback: called with an :class:`~sketchgp.solvers.Iterate` once an iteration; True ends the solve.
        :param progress: show a progress bar (default: only in a terminal).
        :returns: W, ``(m,)`` or ``(m, t)`` as y has columns or not, float64 whatever the dtype of x: the weights of
            neighbouring points cancel, and would not do so in float32.
        :raises InputError: for arguments that do not fit, a stream, noise 0, or too little memory.
        :raises NumericalError: where NaN appears.

        Ctrl-C ends the solve with the best iterate (true residual) so far, and a warning.
        """
        start = time.perf_counter()
        x, y = problem.tensors(f"{self.name}()")
        assert problem.y is not None
        shape = (problem.m, *problem.y.shape[1:])
        if initial is not None and initial.shape != shape:
            raise InputError(f"initial expects the shape {shape} of the solution, got {tuple(initial.shape)}.")
        self.validate(problem)
        float32 = self.precision == "float32" or (self.precision == "auto" and x.device.type == "cuda")
        system = NormalSystem(problem.normal_matrix(accurate=not float32))
        rhs = problem.tall(accurate=True).t_matmul(y)
        built = self.preconditioner(system.operator)
        solver = ConjugateGradients(tol=self.tol, max_iterations=self.max_iterations)
        value, report, _ = solver.run(
            system,
            rhs,
            built,
            solver=self.name,
            name=self._describe(problem),
            setup_seconds=time.perf_counter() - start,
            initial=None if initial is None else initial.reshape(rhs.shape).to(rhs),
            callback=callback,
            progress=progress,
            keep_interrupted=True,
        )
        return Solution(value.reshape(shape), report)
