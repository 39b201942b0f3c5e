"""Pictures of linear solves: how residuals fall, what solvers take, and the spectrum behind a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from gpytorch.models import ExactGP
from torch import Tensor

from .. import checks
from ..errors import InputError
from ..operators import KernelMatrix
from ..random_streams import generator
from ..report import SolveReport
from ..row_sources import RowSource
from ..solvers import FullProblem, Solution
from ..style import COLORS, RING, axes_for, finish, level

_SHORT = 40  # points up to which each has a dot
_LEAST_SHARE = 1e-16  # of the largest eigenvalue, below which rounding is all that is seen


def convergence(reports: Any, ax: Any = None, by: Literal["iterations", "seconds"] = "iterations") -> Any:
    """Draw the largest relative residual of each solve, with a ring at the true residual of its result.

    :param reports: a :class:`sketchgp.SolveReport` or several, such as ``record_solves`` collects; or solutions.
        Direct solvers have a ring only.
    :param ax: matplotlib axes; None makes a figure.
    :param by: ``"iterations"``, or ``"seconds"`` from the start, set-up included.
    :returns: the axes.
    :raises InputError: if these are no reports.
    """
    found, ax = _reports("convergence", reports), axes_for("convergence", ax)
    checks.word("convergence", "by", by, ("iterations", "seconds"))
    alike = len({report.sizes for report in found}) == 1
    for number, report in enumerate(found):
        color = COLORS[number % len(COLORS)]
        worst = [float(row.max()) if row.numel() else 0.0 for row in report.history]
        last = len(worst) - 1
        start, span = (0, report.iterations or last) if by == "iterations" else (report.setup_seconds, report.seconds)
        x = [start + span * place / max(1, last) for place in range(len(worst))]
        label = _name(report) if alike else f"{_name(report)}, {report.sizes}"
        if last > 0:
            dots = "." if last < _SHORT else ""
            ax.plot(x, worst, color=color, label=label, linewidth=1.8, marker=dots, markersize=6)
        if x:
            alone = label if last == 0 else None
            ax.plot(x[-1:], [report.max_residual], color=color, zorder=100, label=alone, **RING)
    tolerances = {report.tol for report in found if report.judged == "residual" and len(report.history) > 1}
    for tol in sorted(tolerances - {float("inf")}):
        level(ax, tol, f"tolerance {tol:.0e}")
    if any(report.max_residual > 0 for report in found):
        ax.set_yscale("log")
    title = found[0].sizes if alike else ""
    ring = "ring: true residual at the end, in float64"
    unit = "iterations" if by == "iterations" else "seconds, set-up included"
    return finish(ax, ", ".join(filter(None, (title, ring))), unit, "largest relative residual")


def solvers(reports: Any, ax: Any = None) -> Any:
    """Draw the seconds of set-up and of solving of each solve as bars, with iterations and residual beside them.

    :param reports: as :func:`convergence` has them.
    :param ax: matplotlib axes; None makes a figure.
    :returns: the axes.
    :raises InputError: if these are no reports.
    """
    found = _reports("solvers", reports)
    ax = axes_for("solvers", ax, (8.5, 1.4 + 0.5 * len(found)))
    places = range(len(found))
    setup = [report.setup_seconds for report in found]
    ax.barh(places, setup, color="0.75", height=0.6, label="set-up")
    ax.barh(places, [report.seconds for report in found], left=setup, color=COLORS[0], height=0.6, label="solving")
    longest = max(report.setup_seconds + report.seconds for report in found)
    for place, report in enumerate(found):
        done = f"{report.iterations:,} iterations, " if report.iterations else ""
        short = "" if report.converged or report.tol == float("inf") else ", NOT converged"
        text = f"{done}residual {report.max_residual:.1e}{short}"
        end = report.setup_seconds + report.seconds
        ax.annotate(text, (end, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.set_yticks(list(places), [_name(report) for report in found])
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 2.1)  # room for what is written
    finish(
        ax, found[0].sizes if len({report.sizes for report in found}) == 1 else "", "seconds", grid="x", legend=False
    )
    ax.legend(frameon=False, fontsize=9, loc="upper right", ncols=2, bbox_to_anchor=(1.0, 1.0 + 0.5 / len(found)))
    return ax


def spectrum(source: Any, rank: int | None = None, ax: Any = None, rows: int = 1000, seed: int = 0) -> Any:
    """Draw the eigenvalues of the kernel matrix, estimated from random rows, the noise and the preconditioner's rank.

    Eigenvalues right of the rank and above the noise are left to conjugate gradients.

    The eigenvalues of the matrix of s rows, times n / s, are near those of all n (Williams and Seeger, NIPS 2000); with
    ``rows`` at least n they are exact.

    :param source: a :class:`sketchgp.Solution`, whose report has the rank; a :class:`sketchgp.FullProblem`; or a
        GPyTorch model with a ``covar_module`` and a Gaussian likelihood.
    :param rank: the rank to mark; None is that of the solution, or none.
    :param ax: matplotlib axes; None makes a figure.
    :param rows: the most rows to look at: ``rows^2`` kernel entries, ``rows^3`` operations.
    :param seed: of the rows.
    :returns: the axes.
    :raises InputError: if it is something else.
    """
    owner = "spectrum"
    rank, rows = checks.count(owner, "rank", rank, optional=True), checks.count(owner, "rows", rows)
    kernel, x, noise, known = _of(owner, source)
    rank = known if rank is None else rank
    some = torch.randperm(len(x), generator=generator(checks.seed(owner, "seed", seed), "rows of a spectrum"))[:rows]
    with torch.no_grad():
        part = x[some.to(x.device)]
        matrix = KernelMatrix.of(kernel, part, engine="tiled").detach().double().to_dense()
        values = torch.linalg.eigvalsh(matrix).flip(0).cpu() * (len(x) / len(part))
    values = values[values > _LEAST_SHARE * values[0]]
    ax = axes_for(owner, ax)
    color = COLORS[0]
    whose = "eigenvalues" if len(part) == len(x) else f"eigenvalues, as {len(part):,} rows show them"
    ax.plot(range(1, len(values) + 1), values.tolist(), color=color, linewidth=2, label=whose)
    ax.set_xscale("log")
    ax.set_yscale("log")
    level(ax, noise, f"noise {noise:.2g}")
    if rank:
        ax.axvline(rank, color=COLORS[1], linewidth=1.5, label=f"rank {rank:,} of the preconditioner")
    return finish(ax, f"n = {len(x):,}", "number", "eigenvalue of the kernel matrix")


def _of(owner: str, source: Any) -> tuple[Any, Tensor | RowSource, float, int | None]:
    """Return kernel, inputs, the geometric mean of the noises, and the rank if it is known."""
    rank = None
    if isinstance(source, Solution):
        rank, source = source.report.rank or None, source.problem
    if isinstance(source, ExactGP) and source.train_inputs is not None and hasattr(source, "covar_module"):
        noise = getattr(source.likelihood, "noise", None)
        if noise is None or len(source.train_inputs) != 1 or source.train_inputs[0].dim() != 2:
            raise checks.refusal(owner, "source", "a model of one tensor of inputs and with one noise", source)
        return source.covar_module, source.train_inputs[0], _mean(noise), rank
    if not isinstance(source, FullProblem):
        raise checks.refusal(owner, "source", "a Solution of a FullProblem, a FullProblem or a model", source)
    return source.kernel, source.x, _mean(source.noise_vector), rank


def _mean(noise: Tensor) -> float:
    return float(noise.detach().double().log().mean().exp())


def _reports(owner: str, reports: Any) -> list[SolveReport]:
    several = reports if isinstance(reports, Sequence) else [reports]
    found = [one.report if isinstance(one, Solution) else one for one in several]
    if not found or not all(isinstance(one, SolveReport) for one in found):
        raise InputError(
            f"{owner}: reports expects a SolveReport or several, at least one, got {checks.found(reports)}."
        )
    return found


def _name(report: SolveReport) -> str:
    return report.solver if report.preconditioner == "none" else f"{report.solver} ({report.preconditioner_and_rank})"
