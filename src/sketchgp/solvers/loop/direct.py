"""Time and report a direct solve, which has no loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...memory import peak_memory
from ...report import Reason, SolveReport, conclude
from .run import clock


def concluded(
    began: float, factorized: float, residual: Tensor, tol: float, remedy: str, singular: bool = False, **facts: Any
) -> SolveReport:
    """The report of a direct solve that ends here; recorded, with a warning where the residual is too large.

    :param began: :func:`clock` when it began, :param factorized: and when it had its factor; the rest is work for these
        right-hand sides alone.
    :param residual: true relative residual of the columns, ``(...,)``, with ``tol`` that it should be at most.
    :param remedy: what to try where it is not.
    :param singular: whether rounding of the matrix moves the solution too far.
    :param facts: other fields of :class:`sketchgp.SolveReport`.
    """
    device = residual.device
    residual = residual.reshape(-1).cpu()
    report = SolveReport(
        residual=residual,
        history=residual.unsqueeze(0),
        tol=tol,
        converged=bool((residual <= tol).all()) and not singular,
        reason=Reason.SINGULAR if singular else Reason.DIRECT,
        seconds=clock() - factorized,
        setup_seconds=factorized - began,
        device=str(device),
        peak_memory=peak_memory(device),
        remedies={Reason.DIRECT: remedy},
        **facts,
    )
    conclude(report)
    return report
