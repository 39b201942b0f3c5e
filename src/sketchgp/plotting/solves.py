"""Pictures of linear solves: how residuals fall, what solvers take, and the spectrum behind a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from ..style import COLORS, RING, axes_for, finish, level, new_figure, residuals
from ..tensor_file import replacing

_LEAST_SHARE = 1e-16  # of the largest eigenvalue, below which rounding is all that is seen
_LINE = 0.05  # of the height of the axes, that a line of text takes


def convergence(reports: Any, ax: Any = None) -> Any:
    """Draw the largest relative residual of each solve, with a ring at the true residual of its result.

    :param reports: a :class:`sketchgp.SolveReport` or several, such as ``record_solves`` collects; or solutions.
        Direct solvers have a ring only.
    :param ax: matplotlib axes; None makes a figure.
    :returns: the axes.
    :raises InputError: if these are no reports.
    """
    found, ax = _reports("convergence", reports), axes_for("convergence", ax)
    for number, report in enumerate(found):
        color = COLORS[number % len(COLORS)]
        worst = [float(row.max()) if row.numel() else 0.0 for row in report.history]
        steps = report.iterations if report.iterations else len(worst) - 1
        x = [steps * place / max(1, len(worst) - 1) for place in range(len(worst))]
        residuals(ax, x, worst, color, _name(report), report.max_residual)
    tolerances = {report.tol for report in found if report.judged == "residual" and len(report.history) > 1}
    for tol in sorted(tolerances - {float("inf")}):
        level(ax, tol, f"tolerance {tol:.0e}")
    if any(report.max_residual > 0 for report in found):
        ax.set_yscale("log")
    title = found[0].sizes if len({report.sizes for report in found}) == 1 else ""
    ring = "ring: true residual at the end, in float64"
    return finish(ax, ", ".join(filter(None, (title, ring))), "iterations", "largest relative residual")


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


@dataclass(frozen=True)
class Curve:
    """Residuals of one solve.

    :param label: what it is, with its n.
    :param residuals: relative residual after 0, 1, ... iterations.
    :param seconds: time at each of them, from the start, set-up included; same length.
    :param color: any matplotlib colour.
    :param style: line style, ``"-"`` or ``"--"``.
    :param true_residual: the residual measured at the end, drawn as a ring.
    :param caption: a short text above the curve in the panel of seconds, for one that is not to be compared
        with the others.
    """

    label: str
    residuals: Sequence[float]
    seconds: Sequence[float]
    color: str
    style: str = "-"
    true_residual: float | None = None
    caption: str | None = None

    def __post_init__(self) -> None:
        checks.settle(self, checks.instance, "label", "style", classes=str, kind="a text")
        checks.settle(self, checks.numbers, "residuals", "seconds")
        checks.settle(self, checks.number, "true_residual", optional=True)
        if self.caption is not None:
            checks.settle(self, checks.instance, "caption", classes=str, kind="a text")
        if len(self.residuals) != len(self.seconds):
            raise InputError(
                f"Curve: residuals and seconds expect one length, got {len(self.residuals)} and {len(self.seconds)}."
            )


def plot_convergence(
    path: str | Path, curves: Sequence[Curve], title: str, tolerances: dict[str, float], overwrite: bool = True
) -> Path:
    """Draw relative residuals against iterations and against seconds, and write a PNG.

    :param path: the PNG to write.
    :param curves: the solves, in the order of the legend.
    :param title: says which data and which model.
    :param tolerances: name -> residual, drawn as horizontal lines.
    :returns: ``path``.
    :raises InputError: arguments that do not fit, or a folder that cannot be written.
    """
    owner = "plot_convergence"
    checks.path(owner, "path", path)
    checks.instance(owner, "title", title, str, "a text")
    checks.flag(owner, "overwrite", overwrite)
    right = isinstance(curves, Sequence) and all(isinstance(curve, Curve) for curve in curves)
    if not right or not any(len(curve.residuals) for curve in curves):
        raise checks.refusal(owner, "curves", "a sequence of Curve, at least one with residuals", curves)
    checks.instance(owner, "tolerances", tolerances, dict, "a dictionary of names and residuals")
    for name, tolerance in tolerances.items():
        checks.number(owner, f"tolerances[{name!r}]", tolerance, above=0, finite=True)
    figure = new_figure((11.5, 5.4), 150)
    axes = figure.subplots(1, 2, sharey=True)
    for ax, label in zip(axes, ("iterations", "seconds, building the preconditioner included"), strict=True):
        for tolerance in tolerances.values():
            ax.axhline(tolerance, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=1)
        for order, curve in enumerate(reversed(curves)):  # the first curve ends up on top
            _draw(ax, curve, ax is axes[1], order + 2)
        ax.set_xscale("log")
        ax.set_yscale("log")
        finish(ax, x=label, legend=False)
    axes[0].set_ylabel("relative residual  ||(K + noise I) w - y|| / ||y||")
    _name_tolerances(axes[1], tolerances)
    figure.suptitle(title, fontsize=12, x=0.012, ha="left")
    handles, labels = axes[0].get_legend_handles_labels()
    if any(curve.true_residual is not None for curve in curves):
        handles = [*axes[0].plot([], [], color="0.25", **RING), *handles]
        labels = ["true residual at the end, in float64", *labels]
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", ncols=2, frameon=False, fontsize=9.5)
    try:
        with replacing(path, "wb", overwrite) as file:
            figure.savefig(file, format="png")
    except FileExistsError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror or error})") from error
    return Path(path)


def _name_tolerances(ax: Any, tolerances: dict[str, float]) -> None:
    """Write the names of the tolerances on the right; those of like tolerances lie above one another."""
    low, high = (math.log(end) for end in ax.get_ylim())
    free = -math.inf
    for name, tolerance in sorted(tolerances.items(), key=lambda item: item[1]):
        half = _LINE * (name.count("\n") + 1) / 2
        middle = max(free + half, (math.log(tolerance) - low) / (high - low))
        ax.text(1.01, middle, name, transform=ax.transAxes, va="center", color="0.35", fontsize=9)
        free = middle + half


def _draw(ax: Any, curve: Curve, by_time: bool, order: int) -> None:
    """Draw one curve, from the first point that the logarithmic axis can show."""
    x = list(curve.seconds) if by_time else [float(step) for step in range(len(curve.residuals))]
    first = 1 if x and (x[0] <= 0 or (len(x) > 1 and x[0] < x[1] / 10)) else 0
    x, y = x[first:], list(curve.residuals[first:])
    residuals(ax, x, y, curve.color, curve.label, curve.true_residual, linestyle=curve.style, zorder=order)
    if x and curve.caption is not None and by_time:  # above the axes, where no curve is
        above = {"xycoords": ("data", "axes fraction"), "annotation_clip": False, "ha": "center", "va": "bottom"}
        ax.annotate(curve.caption, (x[0], 1.01), color=curve.color, fontsize=8.5, **above)
