"""Tables and pictures of the ablations, from their JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockwise import first_below
from common import describe, number, table

METRICS = {
    "smape": "SMAPE",
    "mae": "mean absolute error, eV",
    "error": "misclassification rate",
    "rmse": "RMSE, standardised",
}
NEAR = 1.01

# one picture a group: a title and its lines
GROUPS: dict[str, dict[str, Any]] = {
    "methods": {
        "title": "Solvers",
        "lines": ["ASkotch", "Skotch", "CG, RPCholesky", "EigenPro2", "ASkotch, version 1",
                  "ASkotch, authors' defaults"],
    },
    "preconditioning": {
        "title": "Preconditioned blocks and acceleration",
        "lines": ["ASkotch", "Skotch", "ASkotch, no preconditioner", "Skotch, no preconditioner"],
    },
    "acceleration": {
        "title": "Acceleration by rank, blocks of n/20",
        "lines": ["ASkotch, b = n/20, rank 10", "Skotch, b = n/20, rank 10", "ASkotch, b = n/20, rank 100",
                  "Skotch, b = n/20, rank 100", "ASkotch, b = n/20, exact", "Skotch, b = n/20, exact"],
    },
    "blocks": {
        "title": "Block size of ASkotch, blocks solved exactly",
        "lines": ["ASkotch, blocks / 4", "ASkotch", "ASkotch, blocks x 4"],
    },
    "ranks": {
        "title": "Rank of ASkotch, blocks of n/20",
        "lines": ["ASkotch, b = n/20, rank 10", "ASkotch, b = n/20, rank 50", "ASkotch, b = n/20, rank 100",
                  "ASkotch, b = n/20, rank 200", "ASkotch, b = n/20, rank 500", "ASkotch, b = n/20, exact"],
    },
}  # fmt: skip

# Okabe and Ito's colours
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#555555"
_DASHED: Any = (0, (4, 1.5))
STYLES: dict[str, dict[str, dict[str, Any]]] = {
    "methods": {
        "ASkotch": {"color": _BLUE, "linewidth": 2.6},
        "Skotch": {"color": "#56B4E9", "linewidth": 2.0, "linestyle": _DASHED},
        "CG, RPCholesky": {"color": _GREEN, "linewidth": 2.0},
        "EigenPro2": {"color": _ORANGE, "linewidth": 1.8},
        "ASkotch, version 1": {"color": _PINK, "linewidth": 1.8, "linestyle": "-."},
        "ASkotch, authors' defaults": {"color": _RED, "linewidth": 2.0, "linestyle": (0, (1, 1))},
    },
    "preconditioning": {
        "ASkotch": {"color": _BLUE, "linewidth": 2.6},
        "Skotch": {"color": _BLUE, "linewidth": 1.8, "linestyle": _DASHED},
        "ASkotch, no preconditioner": {"color": _RED, "linewidth": 2.2},
        "Skotch, no preconditioner": {"color": _RED, "linewidth": 1.8, "linestyle": _DASHED},
    },
    "acceleration": {
        f"{method}, b = n/20, {rank}": {"color": color, **style}
        for rank, color in (("rank 10", _RED), ("rank 100", _GREEN), ("exact", _BLUE))
        for method, style in (("ASkotch", {"linewidth": 2.2}), ("Skotch", {"linewidth": 1.8, "linestyle": _DASHED}))
    },
    "blocks": {
        "ASkotch, blocks / 4": {"color": _ORANGE, "linewidth": 2.0, "linestyle": _DASHED},
        "ASkotch": {"color": _BLUE, "linewidth": 2.6},
        "ASkotch, blocks x 4": {"color": _PINK, "linewidth": 2.0, "linestyle": "-."},
    },
    "ranks": {
        f"ASkotch, b = n/20, {rank}": {"color": color, "linewidth": 2.0}
        for rank, color in (("rank 10", "#fdae61"), ("rank 50", "#e0653a"), ("rank 100", "#b5257d"),
                            ("rank 200", "#6a3d9a"), ("rank 500", "#2b6cb0"), ("exact", "#000000"))
    },
}  # fmt: skip
WORDS = {"ASkotch": "ASkotch, automatic", "Skotch": "Skotch, automatic (no acceleration)"}


def best_of(item: dict[str, Any]) -> float:
    """The least error that any run reached on the way."""
    return min(min(run["course"][item["metric"]]) for run in item["runs"].values())


def closest(item: dict[str, Any]) -> tuple[str, float, float]:
    """The run that ended with the least residual: its label, the residual, the error there: that of the solution."""
    label = min(item["runs"], key=lambda name: item["runs"][name]["course"]["residual"][-1])
    course = item["runs"][label]["course"]
    return label, course["residual"][-1], course[item["metric"]][-1]


def reach(item: dict[str, Any], run: dict[str, Any], error: float) -> list[object]:
    """Seconds, and entries over n^2, until the error first was within 1% of ``error``; dashes if never."""
    course = run["course"]
    index = first_below(course[item["metric"]], NEAR * error)
    if index is None:
        return ["-", "-"]
    return [number(course["seconds"][index]), number(course["entries"][index] / item["n_train"] ** 2)]


def problem_table(item: dict[str, Any]) -> str:
    metric = item["metric"]
    header = [
        "method", f"least {METRICS[metric]}", "at the end", "within 1% of the best: seconds", "entries / n^2",
        "within 1% of the solution: seconds", "entries / n^2", "estimated residual at the end", "entries / n^2",
        "seconds", "blocks, rank",
    ]  # fmt: skip
    rows: list[list[object]] = []
    for label, run in item["runs"].items():
        course = run["course"]
        rows.append([
            label, number(min(course[metric]), 4), number(course[metric][-1], 4),
            *reach(item, run, best_of(item)), *reach(item, run, closest(item)[2]),
            number(course["residual"][-1], 2), number(course["entries"][-1] / item["n_train"] ** 2),
            number(course["seconds"][-1]), run.get("described", "").split(": ", 1)[-1] or run["reason"],
        ])  # fmt: skip
    return table(header, rows)


def report(results: dict[str, Any]) -> str:
    problem = results["problem"]
    lines = [
        "# Ablations: acceleration, preconditioned blocks, block size, rank", "",
        describe(results["machine"]), "",
        f"{problem['dtype']}, matmul=\"{problem['matmul']}\", at most {problem['memory_budget'] / 2**30:g} GiB for a "
        f"stored matrix, rows by seed {problem['row_seed']}, solvers' seed {problem['solver_seed']}; every run from "
        f"zero, until its time is up or the residual is {problem['tolerance']:g}. Seconds do not count the held-out "
        "predictions, and do count everything that a method does first, with the stored matrix where there is one. "
        "Entries are those of the kernel matrix that a method evaluated or read, over n^2 (conjugate gradients: 1 a "
        "product, though it evaluates each pair once, and rank / n for the preconditioner). \"Within 1% of the best\" "
        "is the first time at which the error was at most 1.01 times the least that any of the runs reached, \"of the "
        "solution\" 1.01 times that of the run that ended with the least residual: where stopping early is better "
        "than solving, the best is not the solution's. The error is looked at a few times a pass, and a run may have "
        "left again. Blocks: \"/ 4\" and \"x 4\" are those of the automatic block size. The authors' defaults are "
        "version 2 with mu = noise, uniform blocks of n/100 and rank 100.", "",
    ]  # fmt: skip
    for item in results["problems"].values():
        if not item["runs"]:
            continue
        label, residual, error = closest(item)
        loads = [run["load_before"] for run in item["runs"].values() if run["load_before"] is not None]
        lines += [
            f"## {item['words']}", "",
            f"{item['n_train']:,} training points, {item['n_test']:,} test points, noise {item['noise']:g}, "
            f"{item['seconds']:g} s a run, automatic block size of tiles {item['automatic_block_size']:,}; load of "
            f"the minute before a run {min(loads, default=0):g} to {max(loads, default=0):g}.", "",
            f"Least error of all: {number(best_of(item), 4)}; of the run nearest to the solution ({label}, residual "
            f"{number(residual, 2)}): {number(error, 4)}.", "",
            problem_table(item), "",
        ]  # fmt: skip
        if item["metric"] == "smape":
            ends = {label: min(run["course"]["mae"]) for label, run in item["runs"].items() if "mae" in run["course"]}
            label = min(ends, key=lambda name: ends[name])
            lines += [f"Least {METRICS['mae']}: {number(ends[label], 4)} ({label}).", ""]
    failed = [
        f"{item['words']}, {label}: {run['error']}"
        for item in results["problems"].values()
        for label, run in item["runs"].items()
        if "error" in run
    ]
    if failed:
        lines += ["## Diverged", "", *(f"- {text}" for text in failed), ""]
    lines += [f"Picture: ablation_{group}.png: {content['title']}." for group, content in results["groups"].items()]
    return "\n".join(lines) + "\n"


def pictures(results: dict[str, Any], path: Path) -> None:
    """One picture a group, beside the JSON; a row a problem, error against seconds and against entries."""
    for group in results["groups"]:
        _picture(results, group, path.with_name(f"{path.stem}_{group}.png"))


def _picture(results: dict[str, Any], group: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    items = [item for item in results["problems"].values() if item["runs"]]
    figure, axes = plt.subplots(len(items), 2, figsize=(9.4, 1.1 + 2.3 * len(items)), squeeze=False)
    handles: dict[str, Any] = {}
    for row, item in zip(axes, items, strict=True):
        metric, n = item["metric"], item["n_train"]
        shown = [item["runs"][label] for label in STYLES[group] if label in item["runs"]]
        if not shown:
            continue
        ends = [run["course"][metric][-1] for run in shown]
        solution = closest(item)[2]
        least = min(solution, *(min(run["course"][metric]) for run in shown))
        high = min(max(run["course"][metric][0] for run in shown), max(least * 1.2, max(ends) * 1.05))  # cuts the start
        for label, style in STYLES[group].items():
            run = item["runs"].get(label)
            if run is None:
                continue
            course = run["course"]
            for axis, xs in ((row[0], course["seconds"]), (row[1], [e / n**2 for e in course["entries"]])):
                (line,) = axis.plot(xs[1:], course[metric][1:], **style)
                axis.plot(xs[-1], course[metric][-1], marker=".", color=style["color"], clip_on=True)
                handles.setdefault(WORDS.get(label, label), line)
        for axis in row:
            axis.axhline(solution, color="#aaaaaa", linewidth=0.8, zorder=0)
            axis.set_ylim(least - 0.05 * (high - least), high)
            axis.set_xscale("log")
            axis.yaxis.set_major_locator(MaxNLocator(5))
            axis.grid(color="#e5e5e5", linewidth=0.6)
            axis.set_axisbelow(True)
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.xaxis.set_minor_locator(NullLocator())
        row[0].set_xlim(right=item["seconds"] * 1.1)
        row[0].set_ylabel(METRICS[metric])
        row[0].set_title(f"{item['words']}; n = {n:,}, noise {item['noise']:g}", fontsize=10, loc="left")
        row[1].set_yticklabels([])
    axes[-1][0].set_xlabel("seconds")
    axes[-1][1].set_xlabel("entries of the kernel matrix / n^2")
    height = figure.get_figheight()
    lines = -(-len(handles) // 3)
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncol=3, fontsize=9.5, frameon=False)
    figure.suptitle(results["groups"][group]["title"], fontsize=12, y=1 - 0.12 / height)
    figure.tight_layout(rect=(0, (0.15 + 0.24 * lines) / height, 1, 1), h_pad=0.6)
    figure.savefig(path, dpi=150)
    plt.close(figure)
