"""Preconditioned conjugate gradients for blocks of right-hand sides, with true residuals.

References: Hestenes and Stiefel (1952); preconditioned form as Algorithm 3 of arXiv:2304.12465; Lanczos coefficients
for log determinants as in Gardner et al. (arXiv:1809.11165); iterative refinement as in Higham, "Accuracy and
Stability of Numerical Algorithms", chapter 12.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...checks import count, flag, found, function, like, pair, settle, tolerance, word
from ...errors import InputError, NumericalError
from ...fingerprint import hash_tensors
from ...operators import LowRankPlusDiagonal
from ...preconditioners import Preconditioner, RPCholesky
from ...report import Reason, SolveReport, conclude
from ..choices import Budgeted
from ..energy import Explaining, RemainingEnergy
from ..lanczos import tridiagonal
from ..loop import Budget, Checkpoint, HeldOut, Method, Outcome, Progress, Run, clock, fingerprint
from ..problem import FullProblem, Solution, System, check_problem
from .held_out import full_held_out

_CHECK_EVERY = 100  # float32 iterations between two looks at the true residual
_CYCLE_REDUCTION = 1e-4  # a float32 recurrence is not trusted to reduce the residual further than this
_GROWTH = 0.1  # a recurrence residual that grew above its least by this over the unit roundoff is diverging
_EXACT = 1e-10  # relative residual beyond which float64 has nothing more to say about a variance
_LOST = 4.0  # of the true residual over that of the recurrence
_WIDE = 64  # columns up to which the rounded and the unrounded solution are checked by one product


@dataclass(frozen=True)
class ConjugateGradients(Budgeted):
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

    The other parameters are those of all iterative solvers: ``max_seconds``, ``checkpoint``, ``every``
    (:class:`sketchgp.solvers.Budgeted`); in a model they are those of the posterior mean's solve.
    """

    _budget: ClassVar[tuple[str, ...]] = (*Budgeted._budget, "max_iterations")

    tol: float | None = None
    max_iterations: int | None = None
    precision: str = "auto"

    def __post_init__(self) -> None:
        settle(self, tolerance, "tol", optional=True)
        settle(self, count, "max_iterations", optional=True)
        settle(self, word, "precision", allowed=("auto", "float64"))
        self._check_budget()

    def solve(
        self,
        problem: FullProblem,
        preconditioner: Preconditioner | str | None = "auto",
        matmul: str = "auto",
        initial: Tensor | None = None,
        callback: Callable[[Progress], Any] | None = None,
        held_out: tuple[Tensor, Tensor] | None = None,
        progress: bool | None = None,
    ) -> Solution:
        """Solve a :class:`FullProblem`.

        :param preconditioner: a choice object, None, or ``"auto"`` (``RPCholesky()``).
        :param matmul: ``"auto"``, ``"dense"``, ``"tiled"``, ``"keops"`` or ``"triton"``.
        :param initial: starting point in y's shape.
        :param callback: called with a :class:`Progress` once an iteration, whose residual is that of the recurrence;
            returning True ends the solve.
        :param held_out: points ``(m, d)`` and targets ``(m,)`` or ``(m, t)`` whose root mean square error is computed
            as the solve goes on (in at most a tenth of the work) and kept in the report.
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
        held_out = pair(owner, held_out, problem.x, problem.y.shape[1:])
        began, system, built = clock(), problem.system(matmul), None
        if choice is not None:
            choice.validate(system.n)
            built = choice.build(system.operator, system.noise)
        columns = problem.y.reshape(system.n, -1)
        value, report, _ = self.run(
            system,
            columns,
            built,
            name=choice.name if choice is not None else "none",
            setup_seconds=clock() - began,
            initial=None if initial is None else initial.reshape(columns.shape),
            callback=callback,
            held_out=None if held_out is None else full_held_out(problem, matmul, *held_out),
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
        callback: Callable[[Progress], Any] | None = None,
        held_out: HeldOut | None = None,
        progress: bool | None = None,
        keep_interrupted: bool = False,
        goal: Explaining | None = None,
    ) -> tuple[Tensor, SolveReport, Tensor | None]:
        """Solve one system (or a batch) and record its report.

        :param rhs: ``(..., n, t)``.
        :param goal: what every column is to come to in place of the tolerance.
        :param setup_seconds: what making the preconditioner took.
        :param lanczos_columns: return the Lanczos matrices of the first so many columns as well,
            ``(columns, ..., k, k)``; columns that ended before iteration k are padded with ones.
        :param keep_interrupted: on Ctrl-C, return the best iterate with a warning instead of raising.
        :returns: the solution in rhs's dtype, its report, and the Lanczos matrices or None.
        """
        with torch.no_grad():
            method = _Gradients(self, system, rhs, preconditioner, lanczos_columns, goal)
            run = Run(
                method,
                Budget(self.max_iterations or 1000, self.max_seconds),
                began=clock() - setup_seconds,
                initial=initial,
                callback=callback,
                held_out=held_out,
                checkpoint=self._checkpoint(system, rhs, preconditioner),
                raising=not keep_interrupted,  # inside a model: a half-done solution must not reach its caches
            )
            outcome = run.loop(progress)
        remedy = "Use a preconditioner: preconditioner=sketchgp.RPCholesky()."
        if preconditioner is not None:
            remedy = f"Raise the preconditioner's rank (now {preconditioner.rank}), or max_iterations."
        report = run.report(
            preconditioner=name,
            rank=0 if preconditioner is None else preconditioner.rank,
            remedies={Reason.ITERATIONS: remedy},
        )
        conclude(report)
        return outcome.value.to(rhs.dtype), report, method.lanczos_matrices() if lanczos_columns else None

    def _checkpoint(self, system: System, rhs: Tensor, built: LowRankPlusDiagonal | None) -> Checkpoint | None:
        if self.checkpoint is None:
            return None
        if system.operator.batch_shape or rhs.dim() > 2:
            raise InputError("checkpoint expects a single system; solve the parts of a batch one by one.")
        marks = fingerprint(system.operator, system.noise, rhs, f"{self._described()} {rhs.dtype}")
        if built is not None:
            marks["the preconditioner"] = hash_tensors(built.apply_inverse(rhs[:, :1].to(torch.float64)))
        return Checkpoint(self.checkpoint, self.every, marks)


class _Gradients(Method):
    """Cycles of conjugate gradients, each from the true residual, on a system or a batch of them."""

    name = "ConjugateGradients"
    saved = (
        "value", "r", "residual", "rounded_residual", "best", "best_residual", "before", "current", "exact", "matmuls",
        "cycling", "verified", "index", "s", "d", "p", "sz", "active", "target", "least", "steps",
        "coefficients", "warm",
    )  # fmt: skip

    def __init__(
        self,
        choices: ConjugateGradients,
        system: System,
        rhs: Tensor,
        preconditioner: LowRankPlusDiagonal | None,
        lanczos_columns: int,
        goal: Explaining | None,
    ) -> None:
        super().__init__()
        self.goal, self.energy = goal, RemainingEnergy()
        self.system, self.preconditioner, self.lanczos_columns = system, preconditioner, lanczos_columns
        self.tol, self.out_dtype = choices.tol or 1e-3, rhs.dtype
        batch = torch.broadcast_shapes(rhs.shape[:-2], system.operator.batch_shape)
        self.b = rhs.to(torch.float64).expand(*batch, *rhs.shape[-2:])
        norm = self.b.norm(dim=-2)
        if not bool(torch.isfinite(norm).all()):
            raise NumericalError("The right-hand side of a linear solve holds NaN or infinity.")
        self.norm = torch.where(norm > 0, norm, torch.ones_like(norm))
        self.size, self.columns, self.device = system.n, norm.numel(), rhs.device
        self.exact = system.dtype == torch.float64 or choices.precision == "float64"
        self.coefficients: list[Tensor] = []
        self.verified = True  # whether the true residual is that of the value
        self.steps = 0  # of the cycle
        self.warm = False
        self.s = self.d = self.p = self.b[..., :0]
        self.sz = self.target = self.least = norm[..., :0]
        self.active, self.index = norm[..., :0] > 0, torch.arange(0)

    @property
    def matmuls(self) -> int:
        """Products with K so far."""
        return self.system.matmuls

    @matmuls.setter
    def matmuls(self, count: int) -> None:
        self.system.matmuls = count

    @property
    def entries(self) -> float:
        return float(self.matmuls) * self.size**2

    @property
    def matrix_entries(self) -> float:
        return float(self.size**2)

    def begin(self, initial: Tensor | None) -> Tensor:
        self.value, self.r = torch.zeros_like(self.b), self.b.clone()
        if initial is not None:
            start = initial.to(self.out_dtype).to(torch.float64)  # what is returned where no step is taken
            self.value = start.expand_as(self.b).clone()
            self.r = self.b - self.system.accurate_product(self.value)
        self.warm = initial is not None
        self.taken = (self.value * (self.b + self.r)).sum(dim=-2)
        self.residual = self.rounded_residual = self.current = self.r.norm(dim=-2) / self.norm
        self.best, self.best_residual = self.value.clone(), self.residual
        self.before, self.cycling = torch.full_like(self.residual, torch.inf), False
        self.remaining = self._at_most()
        return self.estimate()

    def estimate(self) -> Tensor:
        return self.current.reshape(-1)

    def weights(self) -> Tensor:
        if not self.cycling:
            return self.value
        value = self.value.clone()
        value[..., self.index] += self.d
        return value

    def judge(self, held_out: Tensor | None) -> Reason | None:
        """Where a cycle has ended: go on, go on with float64 products, or end."""
        if self.cycling:
            return None
        open_columns = ~self._done(self.residual)
        if not bool(open_columns.any()) and not self.exact and self.goal is not None:
            self._doubt()
            open_columns, self.before = ~self._done(self.residual), torch.full_like(self.residual, torch.inf)
        if not bool(open_columns.any()):
            return self._reached()
        if bool((self.residual > 0.5 * self.before)[open_columns].any()):
            if self.exact:
                return Reason.STAGNATED
            self._doubt()
            self.notes.append("float32 products stopped reducing the true residual; went on with float64 ones")
        self._open()
        return None

    def _done(self, residual: Tensor) -> Tensor:
        """Which columns are where they are to come to."""
        return (residual <= self.tol) & self._explained(residual)

    def _explained(self, residual: Tensor) -> Tensor:
        """Which columns have come to the goal, if there is one."""
        if self.goal is None:
            return torch.ones_like(residual, dtype=torch.bool)
        return (self.goal.error(self.taken, self.remaining) <= self.goal.share) | (residual <= _EXACT)

    def _doubt(self) -> None:
        """Go on with float64 products; what those of float32 say of the energy is not believed: they lose it in the
        directions of the least eigenvalues, which a residual hardly shows."""
        self.exact, self.energy, self.remaining = True, RemainingEnergy(), self._at_most()

    def _at_most(self) -> Tensor:
        """A bound of the energy that remains, of the true residual; infinite where none is known."""
        least = torch.zeros_like(self.norm[..., :1]) if self.goal is None else self.goal.least
        return torch.where(self.residual == 0, 0, (self.residual * self.norm).square() / least)

    @property
    def _aimed(self) -> float:
        """The recurrence's residual that a cycle aims at."""
        return (0.95 if self.exact and self.out_dtype == torch.float64 else 0.5) * self.tol

    def _reached(self) -> Reason:
        return Reason.ROUNDED if bool((self.rounded_residual > self.tol).any()) else Reason.REACHED

    def finish(self, reason: Reason, quick: bool) -> Outcome:
        if self.cycling or not self.verified:
            self._close()
        if reason in (Reason.ITERATIONS, Reason.TIME) and bool(self._done(self.residual).all()):
            reason = self._reached()
        residual = self.best_residual.reshape(-1)
        facts = {"matmuls": self.matmuls, "tol": self.tol, "dtype": str(self.system.dtype).removeprefix("torch.")}
        converged = bool((residual <= self.tol).all())
        if self.goal is not None:
            converged = converged and bool(self._explained(self.residual).all())
            facts["variance_error"] = self.goal.error(self.taken, self.remaining).reshape(-1).cpu()
        return Outcome(self.best, residual, converged, reason, facts)

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

    def _open(self) -> None:
        """Begin a cycle on ``A d = r`` from d = 0; it ends when every recurrence residual meets the cycle's target."""
        self.cycling, self.before, self.steps = True, self.residual, 0
        self.target = torch.full_like(self.residual, self._aimed)
        if not self.exact:
            self.target = torch.maximum(self.target, _CYCLE_REDUCTION * self.residual)
        self.index = torch.arange(self.b.shape[-1], device=self.b.device)
        self.s, self.d = self.r.clone(), torch.zeros_like(self.b)
        self.p = self._precondition(self.s).clone()
        self.sz = (self.s * self.p).sum(dim=-2)
        self.current = self.least = self.residual.clone()
        self.active = self.current > self.target
        if self.goal is not None:
            self.target = _CYCLE_REDUCTION * self.residual if not self.exact else torch.zeros_like(self.target)
            self.active = ~self._done(self.residual)

    def _close(self) -> None:
        """End the cycle: what it found, with its true residual; an estimate of another iterate is withdrawn."""
        self.value, self.cycling, self.verified = self.weights(), False, False
        followed = self.current
        self._verify()
        if self.goal is not None:
            lost = self.residual > _LOST * followed
            self.remaining = torch.minimum(self.remaining.masked_fill(lost, torch.inf), self._at_most())
        self.verified = True

    def _narrow(self) -> None:
        """Leave finished columns out of the products, where they are half of all."""
        keep = self.active.reshape(-1, len(self.index)).any(dim=0)
        if int(keep.sum()) > len(self.index) // 2:
            return
        self.value[..., self.index] += self.d
        self.index, self.s, self.p = self.index[keep], self.s[..., keep], self.p[..., keep]
        self.d, self.sz, self.active = torch.zeros_like(self.s), self.sz[..., keep], self.active[..., keep]

    def step(self) -> bool:
        first_cycle = len(self.coefficients) == self.iterations and not self.warm
        self._narrow()
        index, p = self.index, self.p
        product = self._product(p)
        curvature = (p * product).sum(dim=-2)
        if not bool(torch.isfinite(curvature).all()):
            raise NumericalError("A product with the kernel matrix gave NaN or infinity; check the inputs.")
        usable = self.active & (curvature > 0) & (self.sz > 0)
        if self.exact and bool((self.active & ~usable & (self.sz != 0)).any()):
            self.notes.append("met a direction of non-positive curvature: the matrix is not positive definite")
        alpha = torch.where(usable, self.sz / torch.where(usable, curvature, 1), 0)
        self.d.addcmul_(alpha.unsqueeze(-2), p)
        self.s.addcmul_(alpha.unsqueeze(-2), product, value=-1)
        self.current = self.current.clone()
        self.current[..., index] = self.s.norm(dim=-2) / self.norm[..., index]
        going_on = self.current > self.target
        if self.goal is not None:
            self._follow(alpha * self.sz, usable, index)
            going_on &= ~((self.current <= self._aimed) & self._explained(self.current))
        self.active = usable & going_on[..., index]
        z = self._precondition(self.s)
        new = (self.s * z).sum(dim=-2)
        beta = torch.where(usable & (new > 0), new / torch.where(usable, self.sz, 1), 0)
        self.p = p.mul_(beta.unsqueeze(-2)).add_(z)
        self.sz = new
        if first_cycle and self.lanczos_columns:
            self._keep_coefficients(alpha, beta, index)
        self.iterations += 1
        self.steps += 1
        self.least = torch.minimum(self.least, self.current)
        growth = _GROWTH / torch.finfo(torch.float64 if self.exact else self.system.dtype).eps
        looked_at = not self.exact and self.steps % _CHECK_EVERY == 0
        if (
            not bool(self.active.any())
            or bool((self.current > growth * self.least).any())
            or (looked_at and self._drifted())
        ):
            self._close()
        return True

    def _follow(self, taken: Tensor, usable: Tensor, index: Tensor) -> None:
        """What an iteration took off the energy of the columns it worked on, and what is still to come."""
        full = torch.zeros_like(self.norm)
        full[..., index] = taken
        self.taken = self.taken + full
        estimate = self.energy.add(full)
        self.remaining = self.remaining.clone()
        self.remaining[..., index] = torch.where(usable, estimate[..., index], self.remaining[..., index])

    def _drifted(self) -> bool:
        """Whether the recurrence residual has left the true one by more than a third of it."""
        true = (self.b - self.system.accurate_product(self.weights()))[..., self.index]
        return bool(((true - self.s).norm(dim=-2) > 0.3 * true.norm(dim=-2)).any())

    def _keep_coefficients(self, alpha: Tensor, beta: Tensor, index: Tensor) -> None:
        full = self.b.new_zeros(2, *self.residual.shape)
        full[0][..., index], full[1][..., index] = alpha, beta
        self.coefficients.append(full[..., : self.lanczos_columns])

    def lanczos_matrices(self) -> Tensor:
        """Of the first columns, ``(columns, ..., k, k)``; unit rows past a column's end."""
        shape = (*self.residual.shape[:-1], self.lanczos_columns)
        return tridiagonal(self.coefficients, self.b.new_zeros(shape)).movedim(-3, 0).to(self.out_dtype)
