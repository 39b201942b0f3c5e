"""Draws the pictures of the pages that no benchmark and no example draws: ``python docs/figures/draw.py``.

``decision.svg`` is drawn from what is written here; the others from ``benchmarks/results``.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
STYLE = {
    "svg.hashsalt": "sketchgp",
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
}
COLOURS = {
    "blue": "#4477aa",
    "cyan": "#66ccee",
    "green": "#228833",
    "yellow": "#ccbb44",
    "red": "#ee6677",
    "grey": "#bbbbbb",
}


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def decision() -> None:
    """What is wanted, by number of rows: the call, and the method behind it."""
    lanes = [
        (
            "The exact posterior of all rows: sketchgp.accelerate(model)",
            [
                (2, 2.9, "grey", "Cholesky\n(GPyTorch)"),
                (2.9, 5, "blue", "conjugate gradients:\norder n·r memory"),
                (5, 6.5, "cyan", "ASkotch:\norder n + b²"),
            ],
        ),
        (
            "A model on m points: sketchgp.InducingPointGP(...)",
            [
                (3, 8, "green", "QR up to m = 1,000; KRILL while its m × m matrices fit;\nNyström PCG beyond"),
            ],
        ),
        (
            "Data that do not fit in memory",
            [
                (
                    4,
                    8,
                    "yellow",
                    "EigenPro4 on batches; any solver on FullProblem or\nInducingPointProblem over a table on disk",
                ),
            ],
        ),
        (
            "Classes with probabilities, streams without end",
            [(3, 8, "red", "RandomFeatureClassifier, RandomFeatureGP")],
        ),
    ]
    figure, axes = plt.subplots(figsize=(7.2, 5.4))
    for number, (title, bars) in enumerate(lanes):
        y = -number
        axes.text(2.03, y + 0.33, title, fontsize=11.5, weight="bold", va="bottom")
        for start, end, colour, text in bars:
            axes.barh(y, end - start - 0.03, left=start, height=0.5, color=COLOURS[colour], alpha=0.55)
            axes.text((start + end) / 2, y, text, ha="center", va="center", fontsize=10)
    axes.set_xlim(2, 8)
    axes.set_ylim(-3.4, 0.7)
    axes.set_xticks(range(2, 9), ["100", "1,000", "10⁴", "10⁵", "10⁶", "10⁷", "10⁸"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("rows n")
    save(figure, "decision")


def lean() -> None:
    """Distances from the exact predictions after 40 passes, of solvers without m x m matrices."""
    runs = json.loads((RESULTS / "lean.json").read_text())["runs"]
    shown = {
        "NystromPCG, 300": ("Nyström PCG, rank 300", "o", COLOURS["blue"]),
        "NystromPCG, 100": ("Nyström PCG, rank 100", "s", COLOURS["cyan"]),
        "SketchySAGA": ("SketchySAGA, rank 300", "^", COLOURS["red"]),
        "EigenPro4": ("EigenPro 4", "D", COLOURS["green"]),
    }
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for method, (label, marker, colour) in shown.items():
        axes.plot(
            [run[method]["40"]["typical"] for run in runs.values()], range(len(runs)), marker, color=colour, label=label
        )
    axes.set_yticks(range(len(runs)), [name.replace("squared exponential", "RBF") for name in runs])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("distance from the exact predictions, posterior deviations")
    axes.legend(fontsize=9, loc="upper left", framealpha=0.9)
    save(figure, "lean")


def solvers() -> None:
    """Seconds to a residual of 1e-3 on twelve problems, by solver."""
    problems = json.loads((RESULTS / "automatic.json").read_text())["problems"]
    shown = {
        "ConjugateGradients": ("conjugate gradients", "o", COLOURS["blue"]),
        "ASkotch": ("ASkotch", "s", COLOURS["red"]),
        "Skotch": ("Skotch", "v", COLOURS["yellow"]),
        "EigenPro2": ("EigenPro 2", "D", COLOURS["green"]),
        "Cholesky": ("Cholesky", "x", "black"),
    }
    figure, axes = plt.subplots(figsize=(7.2, 4.6))
    for method, (label, marker, colour) in shown.items():
        done: list[tuple[float, int]] = []
        late: list[tuple[float, int]] = []
        for number, problem in enumerate(problems.values()):
            if (run := problem["runs"].get(method)) is not None and "seconds" in run:
                ended = run["reason"] in ("reached the tolerance", "solved directly", "was rounded")
                (done if ended else late).append((run["seconds"], number))
        axes.plot([s for s, _ in done], [k for _, k in done], marker, color=colour, label=label)
        axes.plot([s for s, _ in late], [k for _, k in late], marker, color=colour, fillstyle="none")
    axes.set_yticks(range(len(problems)), [name.replace(", memory 4 GiB", "") for name in problems])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds to a residual of 1e-3, one core; hollow: time was up")
    axes.legend(fontsize=9, loc="lower left", framealpha=0.9)
    save(figure, "solvers")


def eigenpro_preconditioner() -> None:
    """Iterations with EigenPro's preconditioner of 100 columns, beside RPCholesky of 200; means over the seeds."""
    runs = list(json.loads((RESULTS / "noise_pivots.json").read_text())["runs"].values())
    shown = {
        ("NystromEigenPro", "by_each"): ("EigenPro, 100 columns", "o", COLOURS["green"]),
        ("NystromEigenPro", "by_mean"): ("the same, not weighed by the noise", "o", COLOURS["green"]),
        ("RPCholesky", "by_each"): ("RPCholesky, 200 columns", "s", COLOURS["blue"]),
    }
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for (method, weighed), (label, marker, colour) in shown.items():
        means = [sum(run[method][weighed]) / len(run[method][weighed]) for run in runs]
        fill = "none" if weighed == "by_mean" else "full"
        axes.plot(means, range(len(runs)), marker, color=colour, fillstyle=fill, label=label)
    axes.set_yticks(range(len(runs)), [f"{run['set']}, noise {run['noise']:g}" for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("iterations of conjugate gradients to a residual of 1e-3, 2,000 rows")
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, frameon=False)
    save(figure, "eigenpro_preconditioner")


if __name__ == "__main__":
    with plt.rc_context(STYLE):
        decision()
        lean()
        solvers()
        eigenpro_preconditioner()
