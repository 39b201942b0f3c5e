"""The protocol of solvers, which those of sketchgp keep and a solver of the user's own may keep."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from ..checks import found, refusal
from ..errors import InputError
from ..operators import KernelMatrix
from ..operators.generic_tiles import of_all_dims
from ..operators.lazies import parameters_of
from ..report import SolveReport, conclude, own_solves
from .problem import FullProblem, Solution
from .system import System

Problem = TypeVar("Problem", contravariant=True)


class Solver(Protocol[Problem]):
    """A choice of method that solves one kind of problem.

    What keeps it can be given to :func:`sketchgp.accelerate` and :class:`sketchgp.ExactGP` (``problem_type``
    :class:`FullProblem`), or to :class:`sketchgp.InducingPointGP` (:class:`InducingPointProblem`).  An accelerated
    model hands its posterior mean to a solver of the user's own where its covariance is one plain kernel without
    batch, so that it is a :class:`FullProblem`; for other covariances a solver has to be a :class:`SystemSolver` too.

    :cvar problem_type: the class of the problems that it is for: :class:`FullProblem` or :class:`InducingPointProblem`.
    :ivar name: as reports print it.
    """

    problem_type: ClassVar[type[Any]]

    @property
    def name(self) -> str: ...

    def validate(self, problem: Problem) -> None:
        """Check that the choices fit a problem, before any work; ``solve`` does it first.

        :raises InputError: where they do not, or the problem is of another kind.
        """

    def solve(self, problem: Problem) -> Solution:
        """Solve a problem; there may be further arguments, all of them optional.

        :returns: the value, of y's shape ``(n,)`` or ``(n, t)`` for a full problem, ``(m,)`` or ``(m, t)`` in float64
            for one of inducing points; and the report.
        """
        ...


@runtime_checkable
class SystemSolver(Protocol):
    """A solver of linear systems that are no :class:`FullProblem`: sums of covariances, batches, several tasks."""

    def run(self, system: System, rhs: Tensor) -> tuple[Tensor, SolveReport]:
        """Solve one system (or each of a batch) with rhs ``(..., n, t)`` and record its report.

        :returns: the value in rhs's shape and dtype, and the report.
        """
        ...


def check_solver(owner: str, solver: Any, known: tuple[type[Any], ...]) -> None:
    """``"auto"``, one of the known solvers, or another that is for the same problem.

    :raises InputError: for anything else; it says what is missing from :class:`Solver`.
    """
    if isinstance(solver, str) and solver == "auto":
        return
    wanted = known[0].problem_type
    names = ", ".join(f"{one.__name__}()" for one in known)
    kind = f"'auto', one of {names}, or a solver of your own (sketchgp.solvers.Solver) of a {wanted.__name__}"
    missing = [name for name in ("problem_type", "name", "validate", "solve") if not hasattr(solver, name)]
    if isinstance(solver, type) or "solve" in missing:
        raise refusal(owner, "solver", kind, solver)
    if missing:
        raise InputError(f"{owner}: solver expects {kind}; {found(solver)} has no {' and no '.join(missing)}.")
    if solver.problem_type is not wanted:
        raise InputError(f"{owner}: solver expects {kind}; got {found(solver)}, which is for another problem.")


def solve_checked(
    solver: Solver[Problem], problem: Problem, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> Solution:
    """Solve by any solver; check what a solver of the user's own returns, and record its report.

    :param shape: that the value must have; :param dtype: that it is converted to; :param device: that it must be on.
    :raises InputError: where it is not a :class:`Solution` of that shape and device, of finite numbers.
    """
    with own_solves() as solves:
        solution = solver.solve(problem)
    if not isinstance(solution, Solution) or not isinstance(solution.report, SolveReport):
        raise InputError(f"{solver.name}.solve expects to return a Solution with a SolveReport, got {found(solution)}.")
    value = solution.value
    if not torch.is_tensor(value) or value.shape != shape or value.device != device or not value.is_floating_point():
        raise InputError(f"{solver.name}.solve expects to return a value of shape {tuple(shape)} on {device}, got "
                         f"{found(value)}.")  # fmt: skip
    if not bool(torch.isfinite(value).all()):
        raise InputError(f"{solver.name}.solve returned NaN or infinity.")
    if not any(report is solution.report for report in solves):
        conclude(solution.report)
    return Solution(value.to(dtype), solution.report)  # without the problem, whose targets a model need not keep


@torch.no_grad()
def solve_system(solver: Solver[FullProblem], system: System, rhs: Tensor) -> tuple[Tensor, SolveReport]:
    """Solve one system of a model by any solver of full problems.

    :param rhs: ``(..., n, t)``; a solver that is no :class:`SystemSolver` takes ``(n, t)``.
    :returns: the value in rhs's shape and dtype, and the report.
    :raises InputError: where the system is no full problem, and the solver solves nothing else.
    """
    if isinstance(solver, SystemSolver):
        return solver.run(system, rhs)
    matrix = system.operator
    plain = isinstance(matrix, KernelMatrix) and matrix.same and not matrix.batch_shape and rhs.dim() == 2
    if not plain or system.noise.dim() > 1:
        raise InputError(
            f"{solver.name} solves problems of one plain kernel without batch, and this model's covariance is a "
            f"{type(matrix).__name__} of shape {tuple(matrix.shape)} with a right-hand side {tuple(rhs.shape)}; use "
            "solver='auto', or give yours a method run(system, rhs) (sketchgp.solvers.SystemSolver)."
        )
    problem = FullProblem(kernel_of(matrix), matrix.x1.detach(), rhs.to(matrix.dtype), system.noise)
    solution = solve_checked(solver, problem, rhs.shape, matrix.dtype, rhs.device)
    return solution.value.to(rhs.dtype), solution.report


def kernel_of(matrix: KernelMatrix) -> Any:
    """Return the kernel of a kernel matrix, for inputs that hold the active dimensions alone, as the matrix's do.

    :raises InputError: where the kernel's parameters are not the matrix's any more.
    """
    kernel, own, names = matrix.kernel, parameters_of(matrix.kernel), matrix.pairs.names
    if any(not torch.equal(own[name], value) for name, value in zip(names, matrix.parameters, strict=True)):
        raise InputError(
            "The kernel's parameters changed since its matrix was made; call model.train() and model.eval(), then "
            "the model again."
        )
    return of_all_dims(kernel)
