"""What an accelerated model carries: its choices, and the caches that outlive GPyTorch's short-lived operators."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from linear_operator import settings
from torch import Tensor

from ..operators import LowRankPlusDiagonal
from ..preconditioners import Preconditioner, PreconditionerCache
from ..solvers import Cholesky, ConjugateGradients


@dataclass
class Acceleration:
    """The choices of one ``accelerate`` call, shared by the model and its likelihood.

    Deep copies and pickles keep the choices and start with empty caches.

    :ivar solution_key: what the model's cached solution was computed from, where ``predict`` has seen it.
    :ivar probe_seed: seed of fixed probe vectors for the log determinant, or None for fresh ones each time.
    """

    preconditioner: Preconditioner | None
    solver: ConjugateGradients | Cholesky
    matmul: str
    matmul_precision: str = "float32"
    probe_seed: int | None = None
    solution_key: Any = field(default=None, repr=False, compare=False)
    cache: PreconditionerCache | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.cache = None if self.preconditioner is None else PreconditionerCache(self.preconditioner)

    @property
    def preconditioner_name(self) -> str:
        return "none" if self.preconditioner is None else self.preconditioner.name

    def effective_solver(self) -> ConjugateGradients | Cholesky:
        """The solver with what the user left open taken from GPyTorch's settings in force."""
        if isinstance(self.solver, Cholesky):
            return self.solver
        tol = self.solver.tol or min(1e-3, settings.cg_tolerance.value())
        limit = self.solver.max_iterations or settings.max_cg_iterations.value()
        return dataclasses.replace(self.solver, tol=tol, max_iterations=limit)

    def build(self, operator: Any, noise: Tensor, differentiable: bool) -> LowRankPlusDiagonal | None:
        """The preconditioner of ``operator + diag(noise)``, or None where there is to be none."""
        if self.cache is None or settings.max_preconditioner_size.value() == 0:
            return None
        return self.cache.get(operator, noise, differentiable)


class Inverse:
    """``v -> P^-1 v``: the callable that linear_operator passes around as a preconditioner."""

    def __init__(self, built: LowRankPlusDiagonal) -> None:
        self.built = built.detached(built.out_dtype)

    def __call__(self, vectors: Tensor) -> Tensor:
        with torch.no_grad():
            return self.built.apply_inverse(vectors)
