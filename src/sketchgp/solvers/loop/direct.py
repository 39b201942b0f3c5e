"""Time and report a direct solve, which has no loop."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...memory import peak_memory
from ...report import Reason, SolveReport, conclude
from .run import clock


class Direct:
    """A direct solve, which begins here; :meth:`factorized` is where it has its factor, :meth:`report` its end."""

    def __init__(self) -> None:
        self.began = clock()
        self.setup_seconds = 0.0

    def factorized(self) -> None:
        """Note the end of the set-up; the rest is work for these right-hand sides alone."""
        self.setup_seconds = clock() - self.began

    def report(self, residual: Tensor, tol: float, remedy: str, singular: bool = False, **facts: Any) -> SolveReport:
        """The report, once the solution and its residual are there; recorded, with a warning where that is too large.

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
            seconds=clock() - self.began - self.setup_seconds,
            setup_seconds=self.setup_seconds,
            device=str(device),
            peak_memory=peak_memory(device),
            remedies={Reason.DIRECT: remedy},
            **facts,
        )
        conclude(report)
        return report
