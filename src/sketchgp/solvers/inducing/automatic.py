"""``solver="auto"`` of inducing points: which solver a problem of a given size is given to."""

from __future__ import annotations

from ...memory import available_memory
from ...settings import agreed
from .krill import KRILL
from .nystrom_pcg import NystromPCG
from .problem import InducingPointProblem
from .qr import QR

_DIRECT = 1000  # inducing points up to which the direct solve is the fastest


def automatic_inducing_solver(problem: InducingPointProblem) -> QR | KRILL | NystromPCG:
    """QR up to 1,000 points, KRILL while its matrices fit into half of the free memory, Nystrom PCG beyond."""
    if problem.m <= _DIRECT:
        return QR()
    free = agreed(available_memory(problem.device), problem.device)
    if KRILL(sketch_size=2 * problem.m).bytes_needed(problem) <= free // 2:
        return KRILL()
    return NystromPCG()
