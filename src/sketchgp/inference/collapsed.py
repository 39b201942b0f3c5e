"""The statistics that an inducing-point model is tuned and judged by, in one sweep over the data, differentiable.

With ``L L^T = Kzz``, ``A = L^-1 Kzx``, ``D = diag(noise)`` and residuals R of the prior mean:
``S = A D^-1 A^T`` (m, m) and ``C = A D^-1 R`` (m, t).  The log density of the data under ``Q + D``, Q = A^T A, follows
by Woodbury's identity from ``B = I + S``; so do posterior variances.  Titsias, "Variational learning of inducing
variables in sparse Gaussian processes" (AISTATS 2009), equation 9; Matthews (2016), Appendix B for this stable order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..distributed import in_force
from ..errors import InputError, NumericalError
from ..operators import KernelMatrix
from ..operators.centre import Centre
from ..operators.products import summed
from ..operators.tall import TallMatrix, constant
from ..operators.tiles import spans
from ..preconditioners import shifted_cholesky

_ENTRIES = 2**21  # entries of a tile in the backward pass
_ROWS = 2**16  # rows whose diagonal is computed at once
_HIDDEN = 1e13  # a sum of prior variances over noises, over what its rounding is about a hundredth of
_LOST = "Statistics of the inducing points are lost to rounding: drop far rows and NaN, or raise the noise."


class _Statistics(torch.autograd.Function):
    """``(S, C)`` from L, the precisions, R, z and the kernel's parameters: two sweeps by tiles, nothing n x m kept.

    Where ranks work together, each goes through its own rows of x.

    :param tall: ``k(x, z)`` with float64 entries.
    :param x: ``(n, d)``, with the kernel's active dimensions selected.
    :param matrix: an operator of the same kernel, whose ``x2`` and parameters are the last arguments, in float64.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tall: TallMatrix, x: Tensor, matrix: KernelMatrix, root: Tensor, precision: Tensor, residual: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        m = len(root)
        s, c = root.new_zeros(m, m), root.new_zeros(m, residual.shape[1])
        for span, tile in tall.own_tiles():
            half = torch.linalg.solve_triangular(root, tile.mT, upper=False)
            weighted = half * precision[span]
            s.addmm_(weighted, half.mT)
            c.addmm_(weighted, residual[span])
        s, c = tall.space.total(s), tall.space.total(c)
        ctx.matrix, ctx.shards = matrix.detach(), in_force()
        ctx.save_for_backward(x, root, precision, residual, s, c, *inputs)
        return s, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_s: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, root, precision, residual, s, c, *inputs = ctx.saved_tensors
        both = grad_s + grad_s.mT
        # dL/dA = (both A + grad_c R^T) D^-1, and L^-T of it times A^T is what reaches L
        grad_root = -torch.linalg.solve_triangular(root.mT, both @ s + grad_c @ c.mT, upper=True).tril()
        grad_precision, grad_residual = torch.zeros_like(precision), torch.zeros_like(residual)
        needed = ctx.needs_input_grad[-len(inputs) :]
        wanted = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=True)]
        z, *parameters = wanted
        centre = Centre(z)
        grads = {t: torch.zeros_like(t) for t in wanted if t.requires_grad}
        shards = ctx.shards if ctx.shards is not None and ctx.shards.open else None
        held = slice(0, len(x)) if shards is None else shards.span(len(x))
        for span in spans(held.stop, max(16, _ENTRIES // len(root)), held.start):
            with torch.enable_grad():
                tensors = [x[span].to(z.dtype), z, *parameters]
                tile = KernelMatrix.on(ctx.matrix.pairs.of(tensors, same=False, centre=centre)).to_dense()
            half = torch.linalg.solve_triangular(root, tile.detach().mT, upper=False)
            grad_precision[span] = (half * (grad_s @ half)).sum(dim=0)
            projected = half.mT @ grad_c
            grad_precision[span] += (residual[span] * projected).sum(dim=1)
            grad_residual[span] = projected * precision[span, None]
            grad_half = (both @ half + grad_c @ residual[span].mT) * precision[span]
            grad_tile = torch.linalg.solve_triangular(root.mT, grad_half, upper=True).mT
            if tile.requires_grad:
                of_tile = torch.autograd.grad(tile, list(grads), grad_tile, materialize_grads=True)
                for total, grad in zip(grads.values(), of_tile, strict=True):
                    total += grad
        of_inputs = tuple(map(grads.get, wanted))
        if shards is not None:
            grad_precision = shards.gather(grad_precision[held], len(x), dim=-1)
            grad_residual, of_inputs = shards.gather(grad_residual[held], len(x)), summed(shards, of_inputs)
        return (None, None, None, grad_root, grad_precision, grad_residual, *of_inputs)


class Collapsed:
    """The sparse model's sufficient statistics for one kernel, data and noise; float64, differentiable.

    ``n m^2`` operations and ``O(m^2)`` memory beside tiles, forward and backward.

    :param kernel: a GPyTorch kernel without batch.
    :param x: ``(n, d)``; :param z: ``(m, d)`` inducing points.
    :param noise: ``(n,)`` variances.
    :param residual: ``(n, t)``, targets less prior means.

    :ivar shift: what the diagonal of Kzz was raised by to be factorized; variances are raised by as much at the most.
    """

    def __init__(self, kernel: Any, x: Tensor, z: Tensor, noise: Tensor, residual: Tensor) -> None:
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError("The bound has no gradient with respect to the training inputs; pass them detached.")
        self.kernel, self.z = kernel, z
        self.noise, self.residual = noise.to(torch.float64), residual.to(torch.float64)
        given = KernelMatrix.of(kernel, x, z, engine="tiled")
        # The terms of the bound cancel: float32 parameters are converted once, so that gradients are summed in float64.
        matrix = given.at(given.x1[:1], given.x2, False).double()
        core = matrix.at(matrix.x2, matrix.x2, True).to_dense()
        self.root = shifted_cholesky(core, torch.finfo(torch.float64).eps)
        self.shift = float((self.root.detach().square().sum() - core.detach().trace()) / len(z))
        tall, precision = TallMatrix(kernel, x, z, accurate=True), 1 / self.noise
        self.s, c = _Statistics.apply(
            tall, given.x1, matrix, self.root, precision, self.residual, matrix.x2, *matrix.parameters
        )
        inner = self.s + torch.eye(len(z), dtype=torch.float64, device=z.device)
        self.inner_root, failed = torch.linalg.cholesky_ex(inner)
        if int(failed) or not bool(torch.isfinite(self.inner_root.diagonal()).all()):
            raise NumericalError(_LOST, see="not-definite")
        self.projected = torch.linalg.solve_triangular(self.inner_root, c, upper=False)
        parts = (given.x1[rows].to(torch.float64) for rows in spans(len(x), _ROWS))
        self._diagonal = torch.cat([matrix.at(part, part, True).diagonal(dim1=-1, dim2=-2) for part in parts])

    def inv_quad(self) -> Tensor:
        """Return ``residual^T (Q + diag(noise))^-1 residual``, the sum over columns."""
        return (self.residual.square() / self.noise.unsqueeze(1)).sum() - self.projected.square().sum()

    def logdet(self) -> Tensor:
        """Return ``log det(Q + diag(noise))``."""
        return 2 * self.inner_root.diagonal().log().sum() + self.noise.log().sum()

    def trace_gap(self) -> Tensor:
        """Return ``sum_i (k(x_i, x_i) - q(x_i, x_i)) / noise_i``, which the inducing points leave unexplained.

        :raises NumericalError: where terms cancel, and rounding is about a hundredth a row and a hundredth of the gap.
        """
        total, explained = (self._diagonal / self.noise).sum(), self.s.diagonal().sum()
        if bool(total > _HIDDEN * (total - explained).abs().clamp(min=len(self.noise))):
            raise NumericalError(_LOST, see="not-definite")
        return total - explained

    def half(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``L^-1 k(z, x)`` and ``LB^-1`` of it, ``(m, p)``, differentiable in x: the posterior covariance is
        ``k(x, x) - half^T half + inner^T inner``."""
        block = constant(KernelMatrix.of(self.kernel, self.z.detach(), x, engine="tiled")).double().to_dense()
        half = torch.linalg.solve_triangular(self.root.detach(), block, upper=False)
        return half, torch.linalg.solve_triangular(self.inner_root.detach(), half, upper=False)
