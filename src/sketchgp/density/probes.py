"""The quadratic form and the log determinant of a Gaussian log density by conjugate gradients and probes.

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

import contextlib
import math
from collections.abc import Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import torch
from linear_operator import settings
from linear_operator.operators import DiagLinearOperator
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import InputError, NumericalError, warn
from ..operators import LowRankPlusDiagonal
from ..operators.access import evaluated_accurately
from ..operators.first_order import in_callers_context
from ..random_streams import generator
from ..solvers.recurrence import LEAST, LostToRoundingError
from .base import LogDensity, bilinear_derivative

_NEGLIGIBLE = 1e-6  # eigenvalues below this share of the sum of their sizes are left out
_EQUAL = 1e-6  # relative difference below which a divided difference is a derivative
_NOTHING = 1e-20  # of the largest Ritz value: less than rounding leaves, and no overflow where it is divided by


class Probes(LogDensity):
    """Log densities by conjugate gradients, their log determinants estimated with probes.

    Seed and number of the probes are those of the model's acceleration.  Few rows are left to GPyTorch's factorization.

    :param watched: whether to keep ``values``, each probe's value times the derivative of the loss with respect to the
        log determinant, batches added up.
    :param still: whether the gradient leaves P as it is.  That saves five products of n r^2 operations, and the
        gradient has the same mean over the probes; its covariance is Fisher's information over s n for s probes.
        The minimum of p parameters that it leads to is ``p / (2 s n)`` a row too high in the mean.
    """

    always = False

    def __init__(self, watched: bool = False, still: bool = False) -> None:
        self.watched, self.still = watched, still

    def inv_quad_logdet(self, operator: Any, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``r^T A^-1 r`` of each column and an estimate of ``log det A``; see :class:`LogDensity`.

        Products are in float64 where those in the dtype of A have lost the matrix.

        :raises InputError: where columns do not fit the matrix.
        """
        if columns.shape[:-1] != operator.shape[:-1]:
            raise InputError(
                f"A matrix of shape {tuple(operator.shape)} expects columns of shape {tuple(operator.shape[:-1])} and "
                f"one more dimension, got {tuple(columns.shape)}."
            )
        acceleration, noise = operator.acceleration, operator.noise
        built = acceleration.build(operator.latent, noise, torch.is_grad_enabled())
        normals = _normals(operator, built)
        if not acceleration.doubled:
            with contextlib.suppress(LostToRoundingError):
                return self._estimate(operator, built, normals, columns)
        accurate = evaluated_accurately(operator.latent, engine="auto")
        acceleration.doubled = accurate.dtype != operator.dtype
        if acceleration.doubled:
            doubled = operator.rebuilt(accurate, DiagLinearOperator(noise.to(accurate.dtype)))
            with contextlib.suppress(LostToRoundingError):
                each, determinant = self._estimate(doubled, built, normals, columns)
                return each.to(operator.dtype), determinant.to(operator.dtype)
        warn(
            f"The log determinant of a matrix with n = {operator.shape[-1]} was lost to rounding: the loss and its "
            "gradient are those of another matrix. Raise the noise, or take shorter lengthscales or a smaller scale.",
            see="log-determinant",
        )
        return self._estimate(operator, built, normals, columns, judged=False)

    def _estimate(
        self, operator: Any, built: Any, normals: _Normals, columns: Tensor, judged: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return ``r^T A^-1 r`` of each column and ``log det A``.

        :param built: P, differentiable, or None for the identity.
        :param judged: whether to look at what rounding has made of A.
        :raises LostToRoundingError: where the probes have met another matrix than A.
        """
        tree, of_operator = operator.representation_tree(), operator.representation()
        parts = () if built is None or self.still else built.tensors
        return _ProbedInvQuadLogdet.apply(self, tree, normals, judged, len(parts), columns, *of_operator, *parts)


def standard_error(values: Sequence[Tensor]) -> float:
    """Return the standard error of a loss from the spread of its probes; zero without estimates.

    It is infinite where there is a single probe.
    """
    return math.sqrt(sum(float(each.var()) / len(each) if len(each) > 1 else math.inf for each in values))


@dataclass
class _Normals:
    """Standard normal numbers that probes are made of, float64.

    :ivar low_rank: those for the preconditioner's factor, ``(..., r, s)``.
    :ivar full: those for its diagonal, ``(..., n, s)``.
    :ivar built: the preconditioner without gradients, or None.
    :ivar below: whether it lies below the matrix.
    """

    low_rank: Tensor
    full: Tensor
    built: LowRankPlusDiagonal | None
    below: bool = False


def _normals(operator: Any, built: LowRankPlusDiagonal | None) -> _Normals:
    """Return the normal numbers of the model's probes: the same at every call where their seed is fixed."""
    acceleration = operator.acceleration
    seed, count = acceleration.probe_choice()
    stream = None if seed is None else generator(seed, "probe vectors of log determinants")

    def normal(rows: int) -> Tensor:
        if stream is None:
            return torch.randn(*operator.batch_shape, rows, count, dtype=torch.float64, device=operator.device)
        values = torch.randn(rows, count, dtype=torch.float64, generator=stream)
        return values.to(operator.device).expand(*operator.batch_shape, rows, count)

    full = normal(operator.shape[-1])
    if built is None:
        return _Normals(full[..., :0, :], full, None)
    below = acceleration.cache.chosen.below
    return _Normals(normal(built.rank), full, built.detached(torch.float64), below)


class _ProbedInvQuadLogdet(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        density: Probes,
        tree: Any,
        normals: _Normals,
        judged: bool,
        of_built: int,
        given: Tensor,
        *args: Tensor,
    ) -> tuple[Tensor, Tensor]:
        operator, built = tree(*args[: len(args) - of_built]), normals.built
        z = normals.full if built is None else built.sample(normals.low_rank, normals.full)
        unit = (z / z.norm(dim=-2, keepdim=True)).to(operator.dtype)
        columns = density.with_basis(given.to(operator.dtype).expand(*unit.shape[:-1], given.shape[-1]))
        count = unit.shape[-1]
        acceleration, solver = operator.acceleration, operator.acceleration.conjugate_gradients(operator.evaluation)
        options = {**acceleration.preconditioned(built), "setup_seconds": acceleration.cache.take_seconds()}
        solved, forms, report, matrices, vectors = solver.tridiagonalize(
            operator.system(), torch.cat([unit, columns], dim=-1), columns=count, judged=judged, **options
        )
        operator.tell(report)
        each, solved = density.regressed(forms[..., count:], solved[..., count:])
        values, vectors = _Quadrature(matrices), vectors.movedim(0, -3)
        square = (z * (z if built is None else built.apply_inverse(z))).sum(dim=-2)
        # what rounding alone explains: below A there is none less than 1, and without P none less than the noise
        least = LEAST if normals.below else 0.0 if built is not None else LEAST * float(operator.noise.min())
        if judged and not (values.least > least and bool((square > 0).all())):
            raise LostToRoundingError("An eigenvalue, or a square in the metric of P, that is less than there can be.")
        square = torch.where(square > 0, square, z.shape[-2])  # the mean, where rounding has made P indefinite
        estimates = operator.shape[-1] * values.values
        if any(ctx.needs_input_grad):
            ctx.density, ctx.tree, ctx.normals, ctx.of_built = density, tree, normals, of_built
            ctx.quadrature, ctx.estimates, ctx.caller = values, estimates, copy_context()
            ctx.save_for_backward(solved, vectors, square, *args)
        if settings.skip_logdet_forward.on():
            estimates = torch.zeros_like(estimates)
        determinant = estimates.mean(dim=-1)
        return each.to(operator.dtype), (determinant if built is None else determinant + built.log_determinant()).to(
            operator.dtype
        )

    @staticmethod
    @once_differentiable
    @in_callers_context
    def backward(ctx: Any, of_each: Tensor, of_determinant: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        solved, vectors, square, *args = ctx.saved_tensors
        parts = args[len(args) - ctx.of_built :]
        operator = ctx.tree(*args[: len(args) - ctx.of_built])
        n, count = vectors.shape[-2], vectors.shape[-3]
        if ctx.density.watched:
            each = ctx.estimates * of_determinant.to(torch.float64).unsqueeze(-1)
            ctx.density.values += (each.reshape(-1, count).sum(dim=0),)
        weight = (n / count) * of_determinant.to(vectors.dtype)[..., None, None]
        quadrature = ctx.quadrature
        left = right = _columns(vectors, *quadrature.of_matrix())[0]
        scaled = solved * of_each.unsqueeze(-2)
        left, right = torch.cat([left * weight, -scaled], dim=-1), torch.cat([right, solved], dim=-1)
        of_matrix = bilinear_derivative(operator, left, right)
        of_parts: tuple[Tensor | None, ...] = ()
        if ctx.of_built:
            right, signs = _columns(vectors, *quadrature.of_preconditioner())
            logs = quadrature.of_samples().to(vectors.dtype)
            of_samples = (vectors @ logs.unsqueeze(-1)).squeeze(-1).mT / square.sqrt().to(vectors.dtype).unsqueeze(-2)
            of_parts = ctx.normals.built.sampled_derivative(
                tuple(parts), right, signs * weight, of_samples * weight, ctx.normals.low_rank, ctx.normals.full,
                of_determinant,
            )  # fmt: skip
        return (*(None,) * 5, 2 * scaled, *of_matrix, *of_parts)


class _Quadrature:
    """``e1^T log(T) e1`` of Lanczos matrices ``(s, ..., k, k)``, and its derivatives.

    A derivative is a pair ``(B, M)``, both ``(..., s, k, k)``, that stands for ``B M B^T`` in the coordinates of the
    Lanczos vectors.  In the basis B the matrix that moves is about the identity, so that the size of an entry of M says
    how much it contributes.

    :ivar values: ``(..., s)``; :ivar least: the smallest eigenvalue of all of them.
    """

    def __init__(self, matrices: Tensor) -> None:
        values, self.vectors = torch.linalg.eigh(matrices.movedim(0, -3))
        self.least = float(values.min())
        self.nodes = values.clamp(min=_NOTHING * values.amax(dim=-1, keepdim=True).clamp(min=1e-280))
        self.first = self.vectors[..., 0, :]
        self.values = (self.first.square() * self.nodes.log()).sum(dim=-1)

    def of_matrix(self) -> tuple[Tensor, Tensor]:
        """Return the derivative for A, which the Ritz vectors over the roots of their values make the identity."""
        roots = self.nodes.clamp(min=_EQUAL**2 * self.nodes.amax(dim=-1, keepdim=True)).sqrt()
        inner = self._quadratic(_divided(self.nodes, self.nodes.log(), 1 / self.nodes))
        return self.vectors / roots.unsqueeze(-2), roots.unsqueeze(-1) * inner * roots.unsqueeze(-2)

    def of_preconditioner(self) -> tuple[Tensor, Tensor]:
        """Return the derivative for P, that of nu included; the Ritz vectors make P the identity."""
        logs = self.nodes.log()
        inner = self._quadratic(self.values[..., None, None] - _divided(self.nodes, self.nodes * logs, logs + 1))
        return self.vectors, inner

    def of_samples(self) -> Tensor:
        """Return the derivative for z times the square root of nu, ``(..., s, k)``."""
        logs = (self.vectors @ (self.nodes.log() * self.first).unsqueeze(-1)).squeeze(-1)
        logs[..., 0] -= self.values
        return 2 * logs

    def _quadratic(self, entries: Tensor) -> Tensor:
        return self.first.unsqueeze(-1) * entries * self.first.unsqueeze(-2)


def _divided(nodes: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
    """Return ``(f(a_i) - f(a_j)) / (a_i - a_j)``, ``(..., k, k)``; the mean derivative where a_i and a_j are equal."""
    apart = nodes.unsqueeze(-1) - nodes.unsqueeze(-2)
    equal = apart.abs() <= _EQUAL * torch.maximum(nodes.unsqueeze(-1), nodes.unsqueeze(-2))
    differences = (values.unsqueeze(-1) - values.unsqueeze(-2)) / torch.where(equal, 1, apart)
    return torch.where(equal, (slopes.unsqueeze(-1) + slopes.unsqueeze(-2)) / 2, differences)


def _columns(vectors: Tensor, frame: Tensor, middle: Tensor) -> tuple[Tensor, Tensor]:
    """Return Y ``(..., n, t)`` and signs ``(..., 1, t)`` with ``sum_s W_s B_s M_s B_s^T W_s^T = Y diag(signs) Y^T``.

    :param vectors: W, ``(..., s, n, k)``; :param frame: B, ``(..., s, k, k)``.
    :param middle: M, ``(..., s, k, k)``, symmetric; its negligible eigenvalues are left out.
    :raises NumericalError: where rounding has left no eigenvalues.
    """
    try:
        values, basis = torch.linalg.eigh(middle)
    except torch.linalg.LinAlgError as error:
        raise NumericalError(
            "The gradient of the log determinant is lost to rounding: K + noise is not positive definite to its dtype; "
            "raise the noise.",
            see="not-definite",
        ) from error
    sizes, order = values.abs().sort(dim=-1, descending=True)
    values = values.gather(-1, order)
    kept = max(1, int((sizes > _NEGLIGIBLE * sizes.sum(dim=-1, keepdim=True)).sum(dim=-1).max()))
    basis = basis.gather(-1, order.unsqueeze(-2).expand_as(basis))[..., :kept] * sizes[..., :kept].sqrt().unsqueeze(-2)
    basis = frame @ basis
    columns = (vectors @ basis.to(vectors.dtype)).movedim(-3, -2).flatten(-2)  # (..., n, s * kept)
    return columns, values[..., :kept].sign().to(vectors.dtype).flatten(-2).unsqueeze(-2)
