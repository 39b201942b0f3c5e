"""``solver="auto"``: the solver that a system or a problem of a given size is given to."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..operators.access import has_fast_products
from ..preconditioners import Preconditioner
from ..settings import free_memory, memory_budget
from .full.askotch import ASkotch
from .full.conjugate_gradients import ConjugateGradients
from .inducing.krill import KRILL
from .inducing.nystrom_pcg import NystromPCG
from .inducing.problem import InducingPointProblem
from .inducing.qr import QR

_SHARE = 0.5  # of the rank 10 sqrt(n) that a preconditioner must be allowed for conjugate gradients to be worth it
_DIRECT = 1000  # inducing points up to which the direct solve is the fastest
_BYTES = 16  # a factor and one more array of its shape, float64


def automatic_solver(
    n: int, device: torch.device, preconditioner: Preconditioner | None, operator: Any = None
) -> tuple[ConjugateGradients | ASkotch, str]:
    """Return conjugate gradients while a good preconditioner fits in memory, ASkotch beyond; and why, as a sentence.

    A good preconditioner has the rank that was asked for, or half of the ``10 sqrt(n)`` of arXiv:2304.12465; its
    n x rank factor, or this rank's rows of it, has to fit the memory budget
    (:class:`sketchgp.settings.memory_budget`).  Without a preconditioner nothing has to fit.

    :param operator: K, where it is there already: its products may take less time than good preconditioners.
    """
    if preconditioner is None:
        return ConjugateGradients(), "solver='auto' chose ConjugateGradients: no preconditioner was asked for"
    if operator is not None and has_fast_products(operator):
        return ConjugateGradients(), "solver='auto' chose ConjugateGradients: products with the kernel matrix are fast"
    rank = min(n, preconditioner.rank or math.ceil(_SHARE * 10 * math.sqrt(n)))
    needed, budget = _BYTES * preconditioner.rows_stored(n) * rank, memory_budget.value(device)
    room = f"the budget of {budget / 2**30:.2g} GiB"
    if needed <= budget:
        most = preconditioner.rank_for(n, device)
        return (
            ConjugateGradients(),
            f"solver='auto' chose ConjugateGradients: {room} holds a preconditioner of a rank of up to {most}",
        )
    least = "" if preconditioner.rank else ", the least that pays,"
    taken = f"a preconditioner of rank {rank}{least} takes {needed / 2**30:.2g} GiB"
    return ASkotch(), f"solver='auto' chose ASkotch: {taken}, more than {room}"


def automatic_inducing_solver(problem: InducingPointProblem) -> QR | KRILL | NystromPCG:
    """Return QR up to 1,000 points, KRILL while its matrices fit into half of the free memory, Nystrom PCG beyond."""
    if problem.m <= _DIRECT:
        return QR()
    free = free_memory(problem.device)
    if KRILL(sketch_size=2 * problem.m).bytes_needed(problem) <= free // 2:
        return KRILL()
    return NystromPCG()
