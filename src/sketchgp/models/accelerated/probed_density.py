"""The quadratic form and the log determinant of a Gaussian's log density by conjugate gradients and probes.

``log det A = log det P + tr log(R^-1 A R^-T)`` for a preconditioner ``P = R R^T``; the trace is estimated by stochastic
Lanczos quadrature with probes ``z = R u``, u normal (Wenger et al., arXiv:2107.00243): for each, with
``nu = z^T P^-1 z`` and the Lanczos vectors W and matrix T of its solve,

    n z^T P^-1 log(A P^-1) z / nu = n e1^T log(T) e1.

The gradient is the derivative of this very estimate, so that a line search which follows it finds what it promises.
(Hutchinson's ``z^T P^-1 dA A^-1 z``, GPyTorch's choice, has the same mean over z but is not the derivative of the value
for any z.)  From ``log x = int 1 / (1 + t) - 1 / (x + t) dt`` over t > 0 follows, with the eigenvalues a and
eigenvectors Q of T, ``q = Q^T e1`` and the quadratic form ``<S> = W Q (S q q^T) Q^T W^T`` (products by entries),

    gradient in A  = n <f>, f_ij = (log a_i - log a_j) / (a_i - a_j),
    gradient in P  = n <g> + value W e1 e1^T W^T, g_ij = -(a_i log a_i - a_j log a_j) / (a_i - a_j),
    gradient in z  = 2 (n W Q (log(a) q) - value W e1) / nu^1/2,

of which the last reaches P's factor and diagonal through ``z = F u1 + D^1/2 u2``.  The matrix f q q^T is positive
semidefinite with eigenvalues that fall fast: a few columns for each probe are enough.

Where float32 products make another matrix of A (lengthscales far longer than the data, a scale a million times the
noise), the logarithms are of that other matrix, whatever the residuals say.  T shows it: where P is below A no
eigenvalue of ``P^-1 A`` is less than 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator import settings
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...operators import LowRankPlusDiagonal
from ...operators.first_order import in_callers_context
from ...solvers.full.another_matrix import LEAST, LostToRoundingError
from .mean_solve import held

_NEGLIGIBLE = 1e-6  # of a matrix's eigenvalues, over the sum of their sizes
_EQUAL = 1e-6  # relative difference below which a divided difference is a derivative

_watched: ContextVar[list[Tensor] | None] = ContextVar("sketchgp_probed_values", default=None)


@contextmanager
def probed_values() -> Iterator[list[Tensor]]:
    """Collects what each probe says of a loss, ``(s,)`` for every log determinant whose gradient is taken inside: the
    values of its probes times the derivative of the loss with respect to the log determinant, batches added up."""
    values: list[Tensor] = []
    with held(_watched, values):
        yield values


def standard_error(values: Sequence[Tensor]) -> float:
    """Of a loss that such estimates enter, from the spread of their probes; 0 without estimates.

    Infinite where a single probe tells nothing.
    """
    total = 0.0
    for each in values:
        total += float(each.var() / len(each)) if len(each) > 1 else float("inf")
    return total**0.5


@dataclass
class Probes:
    """Standard normal numbers that probes are made of, of the preconditioner's factor ``(..., r, s)`` and its diagonal
    ``(..., n, s)``, float64; what they are preconditioned with, without gradients, or None; and whether that is below
    the matrix."""

    low_rank: Tensor
    full: Tensor
    built: LowRankPlusDiagonal | None
    below: bool = False


def probed_inv_quad_logdet(
    operator: Any, built: Any, probes: Probes, columns: Tensor | None, judged: bool = True
) -> tuple[Tensor, Tensor]:
    """``(r^T A^-1 r for each column, log det A - log det P)``, differentiable in A, r and P once.

    :param operator: A, an accelerated operator, evaluated; :param built: P, differentiable, or None for 1.
    :param columns: r, ``(..., n, t)`` or ``(n,)``, or None.
    :param judged: whether to look at what rounding has made of A.
    :raises LostToRoundingError: where the probes have met another matrix than A.
    """
    parts = () if built is None else built.representation()
    right = () if columns is None else (columns.unsqueeze(-1) if columns.dim() == 1 else columns,)
    return _ProbedInvQuadLogdet.apply(
        operator.representation_tree(),
        probes,
        judged,
        len(parts),
        len(right),
        *right,
        *operator.representation(),
        *parts,
    )


class _ProbedInvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tree: Any, probes: Probes, judged: bool, of_built: int, given: int, *args: Tensor
    ) -> tuple[Tensor, Tensor]:
        operator, built = tree(*args[given : len(args) - of_built]), probes.built
        z = probes.full if built is None else built.sample(probes.low_rank, probes.full)
        unit = (z / z.norm(dim=-2, keepdim=True)).to(operator.dtype)
        columns = [c.to(operator.dtype).expand(*unit.shape[:-1], c.shape[-1]) for c in args[:given]]
        count = unit.shape[-1]
        solved, matrices, vectors = operator.probed_solve(torch.cat([unit, *columns], dim=-1), built, count, judged)
        solved = solved[..., count:]
        each = (solved * columns[0]).sum(dim=-2) if given else z.new_zeros(z.shape[:-2], dtype=operator.dtype)
        values, vectors = _Quadrature(matrices), vectors.movedim(0, -3)
        if judged and not values.least > _least(operator, probes):
            raise LostToRoundingError(f"An eigenvalue of {values.least:.2g} of a matrix that has none so small.")
        estimates = operator.shape[-1] * values.values
        if any(ctx.needs_input_grad):
            weighted = z if built is None else built.apply_inverse(z)
            ctx.tree, ctx.probes, ctx.of_built, ctx.given = tree, probes, of_built, given
            ctx.quadrature, ctx.estimates, ctx.caller = values, estimates, copy_context()
            ctx.save_for_backward(solved, vectors, (z * weighted).sum(dim=-2), *args)
        if settings.skip_logdet_forward.on():
            estimates = torch.zeros_like(estimates)
        return each, estimates.mean(dim=-1).to(operator.dtype)

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        solved, vectors, square, *args = ctx.saved_tensors
        parts = args[len(args) - ctx.of_built :]
        operator = ctx.tree(*args[ctx.given : len(args) - ctx.of_built])
        n, count = vectors.shape[-2], vectors.shape[-3]
        watched = _watched.get()
        if watched is not None:
            each = ctx.estimates * of_determinant.to(torch.float64).unsqueeze(-1)
            watched.append(each.reshape(-1, count).sum(dim=0))
        weight = (n / count) * of_determinant.to(vectors.dtype)[..., None, None]
        quadrature = ctx.quadrature
        left = right = _columns(vectors, quadrature.of_matrix())[0]
        left = left * weight
        if ctx.given:
            scaled = solved * of_each.unsqueeze(-2)
            left, right = torch.cat([left, -scaled], dim=-1), torch.cat([right, solved], dim=-1)
        found = operator._bilinear_derivative(left, right)
        of_parts: tuple[Tensor | None, ...] = ()
        if ctx.of_built:
            right, signs = _columns(vectors, quadrature.of_preconditioner())
            logs = quadrature.of_samples().to(vectors.dtype)
            of_samples = (vectors @ logs.unsqueeze(-1)).squeeze(-1).mT / square.sqrt().to(vectors.dtype).unsqueeze(-2)
            of_parts = ctx.probes.built.sampled_derivative(
                tuple(parts), right * signs * weight, right, of_samples * weight, ctx.probes.low_rank, ctx.probes.full
            )
        of_columns = (2 * scaled,) if ctx.given else ()
        return (None,) * 5 + (*of_columns, *found, *of_parts)


def _least(operator: Any, probes: Probes) -> float:
    """Below it an eigenvalue tells of another matrix: 1 is the least where P lies below A, the noise without P."""
    if probes.below:
        return LEAST
    return 0.0 if probes.built is not None else LEAST * float(operator._noise_vector().min())


class _Quadrature:
    """``e1^T log(T) e1`` of Lanczos matrices ``(s, ..., k, k)``, and its derivative in the basis of the vectors.

    :ivar values: ``(..., s)``; :ivar least: the smallest eigenvalue of all of them.
    """

    def __init__(self, matrices: Tensor) -> None:
        values, self.vectors = torch.linalg.eigh(matrices.movedim(0, -3))
        self.least = float(values.min())
        self.nodes = values.clamp(min=torch.finfo(torch.float64).tiny)
        self.first = self.vectors[..., 0, :]
        self.values = (self.first.square() * self.nodes.log()).sum(dim=-1)

    def of_matrix(self) -> Tensor:
        """Of A, ``(..., s, k, k)``."""
        return self._quadratic(_divided(self.nodes, self.nodes.log(), 1 / self.nodes))

    def of_preconditioner(self) -> Tensor:
        """Of P, with that of nu, ``(..., s, k, k)``."""
        logs = self.nodes.log()
        return self._quadratic(self.values[..., None, None] - _divided(self.nodes, self.nodes * logs, logs + 1))

    def of_samples(self) -> Tensor:
        """Of z, times the square root of nu, ``(..., s, k)``."""
        logs = (self.vectors @ (self.nodes.log() * self.first).unsqueeze(-1)).squeeze(-1)
        logs[..., 0] -= self.values
        return 2 * logs

    def _quadratic(self, entries: Tensor) -> Tensor:
        inner = self.first.unsqueeze(-1) * entries * self.first.unsqueeze(-2)
        return self.vectors @ inner @ self.vectors.mT


def _divided(nodes: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """``(f(a_i) - f(a_j)) / (a_i - a_j)``, ``(..., k, k)``; the mean derivative where a_i and a_j are equal."""
    apart = nodes.unsqueeze(-1) - nodes.unsqueeze(-2)
    equal = apart.abs() <= _EQUAL * torch.maximum(nodes.unsqueeze(-1), nodes.unsqueeze(-2))
    differences = (values.unsqueeze(-1) - values.unsqueeze(-2)) / torch.where(equal, 1, apart)
    return torch.where(equal, (slopes.unsqueeze(-1) + slopes.unsqueeze(-2)) / 2, differences)


def _columns(vectors: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """Y ``(..., n, t)`` and signs ``(..., 1, t)`` with ``sum_s W_s M_s W_s^T = Y diag(signs) Y^T``.

    :param vectors: W, ``(..., s, n, k)``; :param middle: M, ``(..., s, k, k)``, symmetric, of which what is negligible
        is left out.
    """
    values, basis = torch.linalg.eigh(middle)
    sizes = values.abs()
    order = sizes.argsort(dim=-1, descending=True)
    sizes, values = sizes.gather(-1, order), values.gather(-1, order)
    kept = max(1, int((sizes > _NEGLIGIBLE * sizes.sum(dim=-1, keepdim=True)).sum(dim=-1).max()))
    basis = basis.gather(-1, order.unsqueeze(-2).expand_as(basis))[..., :kept] * sizes[..., :kept].sqrt().unsqueeze(-2)
    found = (vectors @ basis.to(vectors.dtype)).movedim(-3, -2).flatten(-2)  # (..., n, s * kept)
    return found, values[..., :kept].sign().to(vectors.dtype).flatten(-2).unsqueeze(-2)
