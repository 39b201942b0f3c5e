"""Preconditioned conjugate gradients for blocks of right-hand sides, with true residuals.

References: Hestenes and Stiefel (1952); preconditioned form as Algorithm 3 of arXiv:2304.12465; Lanczos coefficients
for log determinants as in Gardner et al. (arXiv:1809.11165); iterative refinement as in Higham, "Accuracy and
Stability of Numerical Algorithms", chapter 12.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..checks import count, flag, found, function, like, settle, tolerance, word
from ..errors import InputError, NumericalError
from ..operators import LowRankPlusDiagonal
from ..preconditioners import Preconditioner, RPCholesky
from ..report import Reason, SolveReport, conclude, peak_memory
from .problem import FullProblem, Solution, System, check_problem

_CHECK_EVERY = 100  # float32 iterations between two looks at the true residual
_CYCLE_REDUCTION = 1e-4  # a float32 recurrence is not trusted to reduce the residual further than this
_GROWTH = 0.1  # a recurrence residual that grew above its least by this over the unit roundoff is diverging
_WIDE = 64  # columns up to which the rounded and the unrounded solution are checked by one product
_PROGRESS_DELAY = 2.0  # seconds before a progress bar appears


@dataclass(frozen=True)
class Iterate:
    """What a callback sees once an iteration: the recurrence residual of each column, not the true one."""

    iteration: int
    residual: Tensor
    seconds: float


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients on ``(K + noise) W = Y``; all columns at once, each stopping by itself.

    Costs one product with K an iteration and six n x t float64 arrays.  Vectors and inner products are float64.
    With float32 data the products run in float32, the residual is recomputed with float64 products when the
    recurrence ends (and every 100 iterations), and the solve goes on from there (iterative refinement) until the
    *true* residual meets the tolerance; where float32 products cannot get there it changes to float64 ones.  There
    are no absolute thresholds: scaling K and noise, or y, by any factor changes nothing.

    :param tol: relative residual ``||y - (K + noise) w|| / ||y||`` that every column must reach; None is 1e-3, or
        GPyTorch's ``cg_tolerance`` (``eval_cg_tolerance``) in a model where that is smaller.
    :param max_iterations: the most iterations; None is 1000, or GPyTorch's ``max_cg_iterations`` in a model.
    :param precision: ``"auto"`` as above, or ``"float64"`` for float64 products throughout.
    """

    tol: float | None = None
    max_iterations: int | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol", optional=True)
        settle(self, count, "max_iterations", optional=True)
        settle(self, word, "precision", allowed=("auto", "float64"))

    def solve(
        self,
        problem: FullProblem,
        preconditioner: Preconditioner | str | None = "auto",
        matmul: str = "auto",
        initial: Tensor | None = None,
        callback: Callable[[Iterate], Any] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`FullProblem`.

        :param preconditioner: a choice object, None, or ``"auto"`` (``RPCholesky()``).
        :param matmul: ``"auto"``, ``"dense"``, ``"tiled"``, ``"keops"`` or ``"triton"``.
        :param initial: starting point in y's shape.
        :param callback: called with an :class:`Iterate` once an iteration; returning True ends the solve.
        :param progress: show a progress bar (default: only in a terminal).
        :raises InputError: for arguments that do not fit; :raises NumericalError: where NaN appears.

        Ctrl-C ends the solve with the best iterate (true residual) so far, and a warning.
        """
        owner = "ConjugateGradients.solve"
        check_problem(owner, problem)
        choice = RPCholesky() if isinstance(preconditioner, str) and preconditioner == "auto" else preconditioner
        if choice is not None and not isinstance(choice, Preconditioner):
            raise InputError(
                f"{owner}: preconditioner expects a choice such as RPCholesky(), None or 'auto', got {found(choice)}."
            )
        if initial is not None:
            like(owner, "initial", initial, problem.y.shape, problem.y.device, whose="y's")
        function(owner, "callback", callback)
        flag(owner, "progress", progress, optional=True)
        system = problem.system(matmul)
        start, built = time.perf_counter(), None
        if choice is not None:
            choice.validate(system.n)
            built = choice.build(system.operator, system.noise)
        setup = time.perf_counter() - start
        columns = problem.y.reshape(system.n, -1)
        value, report, _ = self.run(
            system,
            columns,
            built,
            name=choice.name if choice is not None else "none",
            setup_seconds=setup,
            initial=None if initial is None else initial.reshape(columns.shape),
            callback=callback,
            progress=progress,
            keep_interrupted=True,
        )
        return Solution(value.reshape(problem.y.shape), report)

    def run(
        self,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        *,
        name: str = "none",
        setup_seconds: float = 0.0,
        initial: Tensor | None = None,
        lanczos_columns: int = 0,
        callback: Callable[[Iterate], Any] | None = None,
        progress: bool | None = None,
        keep_interrupted: bool = False,
    ) -> tuple[Tensor, SolveReport, Tensor | None]:
        """Solve one system (or a batch) and record its report.

        :param rhs: ``(..., n, t)``.
        :param lanczos_columns: return the Lanczos matrices of the first so many columns as well,
            ``(columns, ..., k, k)``; columns that ended before iteration k are padded with ones.
        :param keep_interrupted: on Ctrl-C, return the best iterate with a warning instead of raising.
        :returns: the solution in rhs's dtype, its report, and the Lanczos matrices or None.
        """
        with torch.no_grad():
            state = _Run(
                self, system, rhs, preconditioner, initial, lanczos_columns, callback, progress, keep_interrupted
            )
            state.loop()
        report = state.report(name, setup_seconds)
        conclude(report)
        return state.best.to(rhs.dtype), report, state.lanczos_matrices() if lanczos_columns else None


@dataclass
class _Run:
    """The state of one solve."""

    choices: ConjugateGradients
    system: System
    rhs: Tensor
    preconditioner: LowRankPlusDiagonal | None
    initial: Tensor | None
    lanczos_columns: int
    callback: Callable[[Iterate], Any] | None
    progress: bool | None
    keep_interrupted: bool = False
    iterations: int = 0
    reason: Reason | None = None
    history: list[Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = time.perf_counter()
        self.tol = self.choices.tol or 1e-3
        self.limit = self.choices.max_iterations or 1000
        self.out_dtype = self.rhs.dtype
        batch = torch.broadcast_shapes(self.rhs.shape[:-2], self.system.operator.batch_shape)
        self.b = self.rhs.to(torch.float64).expand(*batch, *self.rhs.shape[-2:])
        norm = self.b.norm(dim=-2)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError("The right-hand side of a linear solve holds NaN or infinity.")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.exact = self.system.dtype == torch.float64 or self.choices.precision == "float64"
        self.coefficients: list[tuple[Tensor, Tensor]] = []
        self.value = torch.zeros_like(self.b)
        self.r = self.b.clone()
        if self.initial is not None:
            start = self.initial.to(self.out_dtype).to(torch.float64)  # what is returned where no step is taken
            self.value = start.expand_as(self.b).clone()
            self.r = self.b - self.system.accurate_product(self.value)
        self.residual = self.rounded_residual = self.r.norm(dim=-2) / self.norm
        self.best, self.best_residual = self.value.clone(), self.residual
        self.history.append(self.residual)

    def loop(self) -> None:
        if self.progress is None:
            self.progress = sys.stderr.isatty()
        with tqdm(desc="conjugate gradients", unit="it", disable=not self.progress, delay=_PROGRESS_DELAY,
                  leave=False) as bar:  # fmt: skip
            while not self._done():
                before = self.residual
                try:
                    self._cycle(bar)
                    self._verify()
                except KeyboardInterrupt:
                    if not self.keep_interrupted:  # inside a model: a half-done solution must not reach its caches
                        raise
                    self.reason = Reason.INTERRUPTED
                    self._verify()
                self._judge(before)

    def _done(self) -> bool:
        if not self.reason and bool((self.residual <= self.tol).all()):
            rounded = bool((self.rounded_residual > self.tol).any())
            self.reason = Reason.ROUNDED if rounded else Reason.REACHED
        return bool(self.reason)

    def _judge(self, before: Tensor) -> None:
        """After a cycle: go on, go on with float64 products, or give up."""
        if self.reason or bool((self.residual <= self.tol).all()):
            return
        if self.iterations >= self.limit:
            self.reason = Reason.ITERATIONS
            return
        open_columns = self.residual > self.tol
        if bool((self.residual > 0.5 * before)[open_columns].any()):
            if self.exact:
                self.reason = Reason.STAGNATED
            else:
                self.exact = True
                self.notes.append("float32 products stopped reducing the true residual; went on with float64 ones")

    def _product(self, vectors: Tensor) -> Tensor:
        return self.system.accurate_product(vectors) if self.exact else self.system.product(vectors)

    def _precondition(self, vectors: Tensor) -> Tensor:
        return vectors if self.preconditioner is None else self.preconditioner.apply_inverse(vectors)

    def _verify(self) -> None:
        """The residual of the float64 iterate, and of the value rounded as it will be returned, in float64 products.

        One product serves both; blocks too wide for that go on from the rounded value instead.
        """
        rounded = self.value.to(self.out_dtype).to(torch.float64)
        width = self.b.shape[-1]
        both = self.out_dtype != torch.float64 and width <= _WIDE
        if not both:
            self.value = rounded
        stacked = torch.cat([rounded, self.value], dim=-1) if both else rounded
        r = self.b.repeat(*(1 for _ in self.b.shape[:-1]), 2 if both else 1) - self.system.accurate_product(stacked)
        residual = r.norm(dim=-2) / self.norm.repeat(*(1 for _ in self.norm.shape[:-1]), 2 if both else 1)
        if not bool(torch.isfinite(residual).all()):
            raise NumericalError("A product with the kernel matrix gave NaN or infinity; check inputs and kernel.")
        self.rounded_residual = residual[..., :width]
        better = self.rounded_residual <= self.best_residual
        self.best = torch.where(better.unsqueeze(-2), rounded, self.best)
        self.best_residual = torch.where(better, self.rounded_residual, self.best_residual)
        self.residual, self.r = residual[..., -width:], r[..., -width:].contiguous()

    def _cycle(self, bar: Any) -> None:
        """Conjugate gradients on ``A d = r`` from d = 0, until every recurrence residual meets the cycle's target."""
        share = 0.95 if self.exact and self.out_dtype == torch.float64 else 0.5
        target = torch.full_like(self.residual, share * self.tol)
        if not self.exact:
            target = torch.maximum(target, _CYCLE_REDUCTION * self.residual)
        width = self.b.shape[-1]
        index = torch.arange(width, device=self.b.device)
        first_cycle = not self.coefficients and self.initial is None and self.iterations == 0
        r, d = self.r.clone(), torch.zeros_like(self.b)
        z = self._precondition(r)
        p = z.clone()
        rz = (r * z).sum(dim=-2)
        current = self.residual.clone()
        active = current > target
        least, steps = current.clone(), 0
        growth = _GROWTH / torch.finfo(torch.float64 if self.exact else self.system.dtype).eps
        try:
            while bool(active.any()) and self.iterations < self.limit:
                keep = active.reshape(-1, len(index)).any(dim=0)
                if int(keep.sum()) <= len(index) // 2:  # leave finished columns out of the products
                    self.value[..., index] += d
                    index, r, p, z = index[keep], r[..., keep], p[..., keep], z[..., keep]
                    d, rz, active = torch.zeros_like(r), rz[..., keep], active[..., keep]
                product = self._product(p)
                curvature = (p * product).sum(dim=-2)
                if not bool(torch.isfinite(curvature).all()):
                    raise NumericalError("A product with the kernel matrix gave NaN or infinity; check the inputs.")
                usable = active & (curvature > 0) & (rz > 0)
                if bool((active & ~usable & (rz != 0)).any()) and self.exact:
                    self.notes.append("met a direction of non-positive curvature: the matrix is not positive definite")
                alpha = torch.where(usable, rz / torch.where(usable, curvature, 1), 0)
                d.addcmul_(alpha.unsqueeze(-2), p)
                r.addcmul_(alpha.unsqueeze(-2), product, value=-1)
                current = current.clone()
                current[..., index] = r.norm(dim=-2) / self.norm[..., index]
                active = usable & (current > target)[..., index]
                z = self._precondition(r)
                new_rz = (r * z).sum(dim=-2)
                beta = torch.where(usable & (new_rz > 0), new_rz / torch.where(usable, rz, 1), 0)
                p.mul_(beta.unsqueeze(-2)).add_(z)
                rz = new_rz
                if first_cycle and self.lanczos_columns:
                    self._keep_coefficients(alpha, beta, index)
                self.iterations += 1
                steps += 1
                self.history.append(current)
                bar.update()
                bar.set_postfix_str(f"residual {float(current.max()):.1e}", refresh=False)
                state = Iterate(self.iterations, current, time.perf_counter() - self.start)
                if self.callback is not None and self.callback(state):
                    self.reason = Reason.CALLBACK
                    return
                least = torch.minimum(least, current)
                if bool((current > growth * least).any()):
                    return
                if not self.exact and steps % _CHECK_EVERY == 0 and self._drifted(d, r, index):
                    return
        finally:
            self.value[..., index] += d

    def _drifted(self, d: Tensor, r: Tensor, index: Tensor) -> bool:
        """Whether the recurrence residual r has left the true one by more than a third of it."""
        value = self.value.clone()
        value[..., index] += d
        true = (self.b - self.system.accurate_product(value))[..., index]
        return bool(((true - r).norm(dim=-2) > 0.3 * true.norm(dim=-2)).any())

    def _keep_coefficients(self, alpha: Tensor, beta: Tensor, index: Tensor) -> None:
        full = self.b.new_zeros(2, *self.residual.shape)
        full[0][..., index], full[1][..., index] = alpha, beta
        kept = full[..., : self.lanczos_columns]
        self.coefficients.append((kept[0], kept[1]))

    def lanczos_matrices(self) -> Tensor:
        """Tridiagonal matrices of the first columns, from CG's alpha and beta; unit rows past a column's end."""
        count = max(len(self.coefficients), 1)
        shape = (*self.residual.shape[:-1], self.lanczos_columns)
        matrix = self.b.new_zeros(*shape, count, count)
        matrix.diagonal(dim1=-2, dim2=-1).fill_(1)
        for k, (alpha, _) in enumerate(self.coefficients):
            active = alpha > 0
            entry = 1 / torch.where(active, alpha, 1)
            if k:
                before, ratio = self.coefficients[k - 1]
                safe = torch.where(before > 0, before, 1)
                entry = entry + torch.where(before > 0, ratio / safe, 0)
                side = torch.where(active & (before > 0), ratio.sqrt() / safe, 0)
                matrix[..., k, k - 1] = matrix[..., k - 1, k] = side
            matrix[..., k, k] = torch.where(active, entry, 1)
        return matrix.movedim(-3, 0).to(self.out_dtype)

    def report(self, name: str, setup_seconds: float) -> SolveReport:
        residual = self.best_residual.reshape(-1).cpu()
        assert self.reason is not None
        device = self.b.device
        return SolveReport(
            solver="ConjugateGradients",
            preconditioner=name,
            n=self.system.n,
            columns=residual.numel(),
            iterations=self.iterations,
            matmuls=self.system.matmuls,
            residual=residual,
            history=torch.stack([h.reshape(-1) for h in self.history]).cpu(),
            tol=self.tol,
            converged=bool((residual <= self.tol).all()),
            reason=self.reason,
            seconds=time.perf_counter() - self.start,
            setup_seconds=setup_seconds,
            rank=0 if self.preconditioner is None else self.preconditioner.rank,
            dtype=str(self.system.dtype).removeprefix("torch."),
            device=str(device),
            peak_memory=peak_memory(device),
            notes=self.notes,
            remedies={Reason.ITERATIONS: self._remedy(name)},
        )

    def _remedy(self, name: str) -> str:
        if name == "none" or self.preconditioner is None:
            return "Use a preconditioner: preconditioner=sketchgp.RPCholesky()."
        return f"Raise the preconditioner's rank (now {self.preconditioner.rank}), or max_iterations."
