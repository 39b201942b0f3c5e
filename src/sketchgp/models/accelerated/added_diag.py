"""``K + noise`` as GPyTorch's operator, with sketchgp's solver and preconditioner behind the single door to CG.

GPyTorch reaches every iterative solve through ``_solve`` of the operator that ``likelihood(prior)`` holds, usually
after rebuilding that operator several times.  This subclass carries its choices through every rebuild.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

import torch
from gpytorch.lazy import LazyEvaluatedKernelTensor
from linear_operator import settings, to_dense
from linear_operator.operators import (
    AddedDiagLinearOperator,
    BatchRepeatLinearOperator,
    BlockInterleavedLinearOperator,
    ConstantMulLinearOperator,
    DenseLinearOperator,
    DiagLinearOperator,
    LinearOperator,
    MaskedLinearOperator,
    MulLinearOperator,
    SumLinearOperator,
)
from torch import Tensor

from ...density import Probes
from ...density.base import bilinear_derivative
from ...operators import KernelMatrix
from ...operators.access import float64
from ...operators.first_order import in_callers_context
from ...operators.lazies import parts_of
from ...operators.tiles import logger
from ...report import SolveReport, require_answer, shortfall_counted, warn_of
from ...settings import memory_budget
from ...solvers import ConjugateGradients, System
from ...solvers.full.prediction_tolerance import FollowedPoints
from ..lazy_covariance import NoisyCovariance
from .acceleration import Acceleration, Purpose
from .threshold import cholesky_points, why_iterative

_ARRAYS = 3  # n x n float64 arrays that a factorization of few points takes
Points = Callable[[], tuple[Tensor, Tensor] | None]


def left_to_us(flag: Any) -> bool:
    """Return True if a fast computation is on, or off only because a library changed GPyTorch's default.

    ``import botorch`` turns iterative solves and log densities off for the whole process, by their defaults.  An
    accelerated model is solved by sketchgp all the same, unless the user opened a ``fast_computations`` block.

    :param flag: ``settings.fast_computations.solves`` or ``.log_prob``.
    """
    return flag.is_default() or flag.on()


class _Solve(torch.autograd.Function):
    """Solution ``(K + noise)^-1 rhs``, whose gradient takes one more solve and one bilinear derivative by tiles."""

    @staticmethod
    def forward(ctx: Any, tree: Any, purpose: Purpose, points: Points | None, rhs: Tensor, *args: Tensor) -> Tensor:
        value = tree(*args).solved(rhs, purpose, points)
        ctx.tree, ctx.caller = tree, copy_context()
        ctx.save_for_backward(value, *args)
        ctx.rhs_shape = rhs.shape
        return value

    @staticmethod
    @in_callers_context
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        value, *args = ctx.saved_tensors
        back = _Solve.apply(ctx.tree, "columns", None, grad, *args)
        of_args: tuple[Tensor | None, ...] = (None,) * len(args)
        if any(ctx.needs_input_grad[4:]):  # symmetrized, as the matrix is symmetric
            operator = ctx.tree(*args)
            left, right = torch.cat([back, value], dim=-1), torch.cat([value, back], dim=-1) * -0.5
            of_args = bilinear_derivative(operator, left, right)
        return (None, None, None, back.sum_to_size(ctx.rhs_shape), *of_args)


class AcceleratedAddedDiagLinearOperator(NoisyCovariance):
    """An ``AddedDiagLinearOperator`` whose solves, preconditioner and probe vectors are sketchgp's.

    :param acceleration: the choices.
    :param evaluation: whether columns are solved for to GPyTorch's ``eval_cg_tolerance`` instead of ``cg_tolerance``.
    :ivar source: the operator that this one was evaluated from, whose kernel can still be called in float64; or itself.
    """

    def __init__(
        self,
        *linear_ops: Any,
        preconditioner_override: Any = None,
        acceleration: Acceleration,
        evaluation: bool = False,
    ) -> None:
        # a repeated matrix is expanded along its batch, which a KernelMatrix does without copies
        linear_ops = tuple(
            op.base_linear_op.expand(*op.shape) if type(op) is BatchRepeatLinearOperator else op for op in linear_ops
        )
        super().__init__(*linear_ops, preconditioner_override=preconditioner_override)
        self.acceleration, self.evaluation = acceleration, evaluation
        self.source: AcceleratedAddedDiagLinearOperator = self
        self._nondifferentiable_kwargs.update(acceleration=acceleration, evaluation=evaluation)

    def rebuilt(self, kernel_matrix: Any, diagonal: Any) -> LinearOperator:
        """Return an operator with the same choices for another kernel matrix and diagonal."""
        return self.__class__(kernel_matrix, diagonal, acceleration=self.acceleration, evaluation=self.evaluation)

    def system(self) -> System:
        """Return ``K + noise`` without gradients, for a solver."""
        return System(self._linear_op, self.noise)

    # --- solves and preconditioner --------------------------------------------------------------------------

    def _factorized(self, flag: Any) -> bool:
        """Tell whether GPyTorch's Cholesky factorization is wanted; :param flag: of the fast computation."""
        return self.shape[-1] <= cholesky_points() or not left_to_us(flag)

    @property
    def factorizes_solves(self) -> bool:
        """True where GPyTorch solves by its Cholesky factorization."""
        return self._factorized(settings.fast_computations.solves)

    def accurate_root(self, flag: Any, observed: Tensor | None = None) -> Tensor | None:
        """Return the Cholesky factor ``(..., n, n)`` of few points in float64, differentiable twice.

        A factor in float32 loses the noise where it lies seven digits below the kernel's scale.  None is returned where
        GPyTorch has another way: for an operator whose structure it inverts, for more points than are to be factorized
        or than fit the memory, and where the matrix is not positive definite.

        :param flag: of the fast computation.
        :param observed: ``(n,)`` bool, which rows and columns are meant; None for all.
        """
        n = self.shape[-1] if observed is None else int(observed.sum())
        if n > cholesky_points() and left_to_us(flag):
            return None
        structured = observed is None and self.dtype == torch.float64
        if structured and not isinstance(self.evaluate_kernel(), AcceleratedAddedDiagLinearOperator):
            return None
        if _ARRAYS * 8 * self.shape.numel() > memory_budget.value(self.device):
            return None
        matrix = float64(self)  # the kernel is not evaluated yet
        matrix = matrix if observed is None else matrix[..., observed, :][..., observed]
        root, failed = torch.linalg.cholesky_ex(matrix)
        return None if bool(failed.any()) or not bool(torch.isfinite(root).all()) else root

    def solve(self, right_tensor: Tensor, left_tensor: Tensor | None = None) -> Tensor:
        if self.factorizes_solves:
            return super().solve(right_tensor, left_tensor)
        evaluated = self.evaluate_kernel()
        if not isinstance(evaluated, AcceleratedAddedDiagLinearOperator):
            return evaluated.solve(right_tensor, left_tensor)
        rhs = right_tensor.unsqueeze(-1) if right_tensor.dim() == 1 else right_tensor
        value = self.solve_for("columns", rhs)
        value = value.squeeze(-1) if right_tensor.dim() == 1 else value
        return value if left_tensor is None else left_tensor @ value

    def solve_for(self, purpose: Purpose, rhs: Tensor, points: Points | None = None) -> Tensor:
        """Solve ``(K + noise) value = rhs`` for rhs ``(..., n, t)`` by sketchgp's solvers; differentiable.

        :param purpose: what the solution is for, which selects the solver.
        :param points: of a mean, gives k(X, x) ``(n, p)`` and k(x, x) ``(p,)`` of some points x where it is wanted, in
            float64, or None where they are not available.
        """
        return _Solve.apply(self.representation_tree(), purpose, points, rhs, *self.representation())

    def inv_quad_logdet(
        self, inv_quad_rhs: Tensor | None = None, logdet: bool | None = False, reduce_inv_quad: bool | None = True
    ) -> tuple[Tensor, Tensor]:
        """Return ``(r^T A^-1 r, log det A)`` of ``A = K + noise``, for r ``(..., n, t)`` or ``(n,)``; differentiable.

        The density that the model carries computes both; GPyTorch factorizes few rows.
        """
        evaluated = self.evaluate_kernel()
        if not isinstance(evaluated, AcceleratedAddedDiagLinearOperator):
            return evaluated.inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)
        density, columns = self.acceleration.density, inv_quad_rhs
        if density.always and (columns is None or not logdet):
            density = Probes()  # other densities compute both terms together
        flag, root = settings.fast_computations.log_prob, None
        few = self._factorized(flag) and not density.always and density.basis is None
        both = columns is not None and logdet
        if few and both and self.dtype != torch.float64:
            root = self.source.accurate_root(flag)
        if few and root is None:
            return super().inv_quad_logdet(inv_quad_rhs, logdet, reduce_inv_quad)
        columns = self.noise.new_zeros(*self.shape[:-1], 0) if columns is None else columns
        columns = columns.unsqueeze(-1) if columns.dim() == 1 else columns
        if root is not None:
            half = torch.linalg.solve_triangular(root, columns.to(root.dtype), upper=False)
            each = half.square().sum(dim=-2).to(self.dtype)
            determinant = 2 * root.diagonal(dim1=-1, dim2=-2).log().sum(dim=-1).to(self.dtype)
        elif logdet:
            each, determinant = density.inv_quad_logdet(evaluated, columns)
        else:
            each = (columns * self.solve(columns)).sum(dim=-2)
            determinant = each.new_zeros(())
        return each.sum(dim=-1) if reduce_inv_quad or inv_quad_rhs is None else each, determinant

    def _solve(self, rhs: Tensor, preconditioner: Any = None, num_tridiag: int | None = 0) -> Any:
        if num_tridiag:
            return super()._solve(rhs, preconditioner, num_tridiag)
        return self.solved(rhs)

    def solved(self, rhs: Tensor, purpose: Purpose = "columns", points: Points | None = None) -> Tensor:
        """Return what :meth:`solve_for` does, without gradients.

        :raises NumericalError: where there is no mean to speak of, and the user did not limit the work.
        """
        acceleration = self.acceleration
        system = self.system()
        solver, why = acceleration.solver_for(purpose, system, self.evaluation)
        with shortfall_counted():
            start, followed = acceleration.solutions if purpose == "mean" else None, None
            if isinstance(solver, ConjugateGradients) and solver.tol == "posterior":
                known = None if points is None or system.batch_shape else points()
                known = known if known is None or len(known[0]) == system.n else None
                followed = FollowedPoints.choose(system, known)
            before = None if start is None else start.targets
            value, report = acceleration.solve(solver, system, rhs, before, followed=followed)
            asked = acceleration.preconditioner if report.rank else None
            self.tell(report, why, "" if asked is None else asked.note(self.shape[-1]))
        if purpose != "columns":
            require_answer(report, solver)
        warn_of(report)
        return value

    def tell(self, report: SolveReport, *why: str) -> None:
        """Add notes to the report of a solve, and log it where GPyTorch's settings ask for that."""
        for note in filter(None, (*why, why_iterative(self.shape[-1]))):
            report.notes.append(note)
            logger.info(note)
        if settings.verbose_linalg.on():
            settings.verbose_linalg.logger.debug(str(report))

    def _preconditioner(self) -> tuple[Any, Any, Any]:
        return None, None, None  # solved() builds the one that it needs

    # --- rebuilding -----------------------------------------------------------------------------------------

    def evaluate_kernel(self) -> LinearOperator:
        linear_op = self._linear_op.evaluate_kernel()
        total = linear_op + self._diag_tensor
        if type(total) is AddedDiagLinearOperator:
            evaluated: Any = self.rebuilt(linear_op, self._diag_tensor)
            evaluated.source = self.source
            return evaluated
        return total  # a structure that GPyTorch inverts directly, such as low rank plus diagonal

    def add_diagonal(self, diag: Tensor) -> LinearOperator:
        return self.rebuilt(self._linear_op, self._diag_tensor.add_diagonal(diag))

    def __add__(self, other: Any) -> Any:
        if isinstance(other, DiagLinearOperator):
            return self.rebuilt(self._linear_op, self._diag_tensor + other)
        return self.rebuilt(self._linear_op + other, self._diag_tensor)

    def _mul_constant(self, other: Any) -> LinearOperator:
        return self.rebuilt(self._linear_op._mul_constant(other), self._diag_tensor._mul_constant(other))

    def _expand_batch(self, batch_shape: Any) -> LinearOperator:
        shape = (*batch_shape, *self.shape[-2:])
        return self.rebuilt(self._linear_op.expand(*shape), self._diag_tensor.expand(*shape))

    def _sum_batch(self, dim: int) -> LinearOperator:
        return self.rebuilt(self._linear_op.sum(dim), self._diag_tensor.sum(dim))

    def _transpose_nonbatch(self) -> LinearOperator:
        return self.rebuilt(self._linear_op.mT, self._diag_tensor.mT)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> LinearOperator:
        parts = [op._getitem(row_index, col_index, *batch_indices) for op in (self._linear_op, self._diag_tensor)]
        if isinstance(parts[1], DiagLinearOperator) and not isinstance(parts[0], DiagLinearOperator):
            return self.rebuilt(*parts)
        return SumLinearOperator(*parts)

    def masked(self, mask: Tensor) -> LinearOperator:
        """Return the rows and columns where ``mask`` (n,) is true, as an operator of this class."""
        diagonal = DiagLinearOperator(self.noise[..., mask])
        linear_op = self._linear_op.evaluate_kernel()
        if isinstance(linear_op, KernelMatrix):
            kept = linear_op.at(linear_op.x1[..., mask, :], linear_op.x2[..., mask, :], linear_op.same)
            return self.rebuilt(kept, diagonal)
        if isinstance(linear_op, DenseLinearOperator):
            return self.rebuilt(DenseLinearOperator(linear_op.tensor[..., mask, :][..., mask]), diagonal)
        return self.rebuilt(MaskedLinearOperator(linear_op, mask, mask), diagonal)


def summands(operator: Any) -> tuple[Any, Any] | None:
    """Return the covariance and the diagonal operator of GPyTorch's sum of the two, and None for other operators."""
    if not isinstance(operator, AddedDiagLinearOperator):
        return None
    first, second = operator.linear_ops
    return (second, first) if isinstance(first, DiagLinearOperator) else (first, second)


def solved_by_us(covariance: Any) -> bool:
    """Return True if solving with an evaluated covariance takes sketchgp's solvers."""
    return isinstance(covariance, AcceleratedAddedDiagLinearOperator) and not covariance.factorizes_solves


def as_kernel_matrix(operator: Any, acceleration: Acceleration) -> Any:
    """Return GPyTorch's unevaluated covariance with its plain kernel matrices replaced by :class:`KernelMatrix`.

    They are multiplied as the user chose.  Elementwise products of two roots are stored where they fit the memory
    budget.  Everything else is returned as it is.
    """
    if isinstance(operator, LazyEvaluatedKernelTensor):
        matmul = "auto" if acceleration.matmul == "gpytorch" else acceleration.matmul
        matrix = KernelMatrix.from_lazy(operator, matmul, acceleration.matmul_precision)
        return operator if matrix is None else matrix
    if type(operator) is SumLinearOperator:
        return SumLinearOperator(*(as_kernel_matrix(part, acceleration) for part in operator.linear_ops))
    if type(operator) is ConstantMulLinearOperator:
        base, constant = parts_of(operator)
        return ConstantMulLinearOperator(as_kernel_matrix(base, acceleration), constant)
    if type(operator) is BlockInterleavedLinearOperator:
        return BlockInterleavedLinearOperator(as_kernel_matrix(operator.base_linear_op, acceleration))
    fits = operator.shape.numel() * operator.dtype.itemsize <= memory_budget.value(operator.device)
    if type(operator) is MulLinearOperator and fits:
        return DenseLinearOperator(to_dense(operator.left_linear_op) * to_dense(operator.right_linear_op))
    return operator
