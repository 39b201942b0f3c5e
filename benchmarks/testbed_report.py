"""Tables and picture of the testbed, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import describe, median, number, table

# Okabe and Ito's colours, told apart with any colour vision; the line styles help further.
STYLES: dict[str, dict[str, Any]] = {
    "accelerated": {"color": "#0072B2", "linewidth": 2.6},
    "rpcholesky": {"color": "#56B4E9", "linewidth": 2.0, "linestyle": (0, (4, 1.5))},
    "gaussian": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": "-."},
    "uniform": {"color": "#E69F00", "linewidth": 1.8},
    "gpytorch": {"color": "#D55E00", "linewidth": 2.2, "linestyle": (0, (1, 1))},
    "none": {"color": "#555555", "linewidth": 1.6, "linestyle": (0, (5, 2))},
}
DARKER = {"rpcholesky": "#2B86BD", "uniform": "#B07800", "gaussian": "#B05088"}  # for letters
ORDER = ("accelerated", "rpcholesky", "uniform", "gaussian", "none", "gpytorch")


WITHOUT_RANK = ("none", "gpytorch", "automatic")  # run once a set; "automatic" chooses its own rank


def key_of(method: str, rank: int | None) -> str:
    """The key of a run in the JSON."""
    return method if rank is None or method in WITHOUT_RANK else f"{method} {rank}"


def _iterations(results: dict[str, Any], method: str, rank: int) -> list[int | None]:
    """Iterations to the tolerance for every set that was run; None where it was not reached."""
    runs = [item["runs"].get(key_of(method, rank)) for item in results["sets"].values()]
    return [run["iterations"] if run["solved"] else None for run in runs if run is not None]


def _cell(run: dict[str, Any] | None) -> str:
    if run is None:
        return "-"
    return str(run["iterations"]) if run["solved"] else f"({run['true_residual']:.1g})"


def iterations_table(results: dict[str, Any], rank: int) -> str:
    header = ["set", "N", "d", *(results["methods"][method] for method in ORDER)]
    rows: list[list[object]] = []
    for name, item in results["sets"].items():
        rows.append([name, item["n"], item["d"],
                     *(_cell(item["runs"].get(key_of(method, rank))) for method in ORDER)])  # fmt: skip
    limit = results["problem"]["max_iterations"]
    within: list[object] = [f"solved within {limit} iterations", "", ""]
    worst: list[object] = ["largest number of iterations", "", ""]
    for method in ORDER:
        counts = _iterations(results, method, rank)
        solved = [count for count in counts if count is not None and count <= limit]
        within.append(f"{len(solved)} of {len(counts)}")
        every = [count for count in counts if count is not None]
        worst.append(max(every) if every and len(every) == len(counts) else "not all")
    return table(header, [*rows, within, worst])


def _slowest(results: dict[str, Any], rank: int) -> str:
    """One sentence on the worst sets for accelerated RPCholesky; the paper's limit for rank 1000 is 200."""
    runs = {name: item["runs"].get(key_of("accelerated", rank)) for name, item in results["sets"].items()}
    done = {name: run for name, run in runs.items() if run is not None}
    failed = [name for name, run in done.items() if not run["solved"]]
    slow = [f"{name} ({run['iterations']})" for name, run in done.items() if run["solved"] and run["iterations"] > 200]
    text = f"{results['methods']['accelerated']}, rank {rank}: {len(done) - len(failed)} of {len(done)} sets solved"
    if failed:
        text += f", all but {', '.join(failed)}"
    return text + (
        f"; more than 200 iterations for {', '.join(slow)}." if slow else "; none took more than 200 iterations."
    )


def time_table(results: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Seconds to the tolerance beside GPyTorch's, set by set, and the median ratios."""
    rank = max(results["problem"]["ranks"], default=None)
    ours = ("automatic",) if rank is None else ("automatic", f"accelerated {rank}")
    seconds = "processor_seconds" if rank is None else "seconds"
    header = ["set", f"GPyTorch: {seconds.replace('_', ' ')}", "iterations", "true residual"]
    for key in ours:
        label = results["methods"][key.split()[0]] + (f", rank {rank}" if " " in key else "")
        header += [
            f"{label}: {seconds.replace('_', ' ')} (set-up + iterations)",
            "rank",
            "iterations",
            "GPyTorch / this",
        ]
    rows: list[list[object]] = []
    ratios: dict[str, list[float]] = {key: [] for key in ours}
    failed = 0
    for name, item in results["sets"].items():
        rival = item["runs"].get("gpytorch")
        if rival is None:
            continue
        failed += not rival["solved"]
        row: list[object] = [name, number(rival[seconds]) + ("" if rival["solved"] else ", fails"),
                             rival["iterations"], number(rival["true_residual"], 2)]  # fmt: skip
        for key in ours:
            run = item["runs"].get(key)
            if run is None or not run["solved"]:
                row += ["-" if run is None else f"fails ({number(run['true_residual'], 2)})", "-", "-", "-"]
                continue
            ratio = rival[seconds] / run[seconds]
            ratios[key].append(ratio)
            parts = f"{number(run[seconds])} ({run['setup_seconds']:.1f} + {run['solve_seconds']:.1f})"
            row += [parts, run["rank_used"], run["iterations"],
                    ("" if rival["solved"] else "> ") + number(ratio)]  # fmt: skip
        rows.append(row)
    summary = {
        "sets": len(rows),
        "gpytorch_failed": failed,
        "median_ratio": {key: median(values) for key, values in ratios.items()},
        "smallest_ratio": {key: min(values, default=None) for key, values in ratios.items()},
    }
    return table(header, rows), summary


def report(results: dict[str, Any]) -> str:
    problem, info = results["problem"], results["machine"]
    lines = [
        "# Testbed: the RPCholesky paper's Figure 1", "",
        describe(info),
        f"N = {problem['n']:,} rows or all, bandwidth {problem['bandwidth']:g}, "
        f"mu/N = {problem['mu_over_n']:g}, float64, seed {problem['seed']}. A number is the count of CG "
        f"iterations to relative residual {problem['tolerance']:g}, verified afterwards (5% slack); in "
        f"brackets the residual where that was not reached in {problem['max_iterations']} iterations "
        f"(GPyTorch's CG: in {problem['gpytorch_max_iterations']}, its default).",
        "",
    ]  # fmt: skip
    for rank in problem["ranks"]:
        lines += [f"## Iterations, rank {rank}", "", iterations_table(results, rank), ""]
        lines += [_slowest(results, rank), ""]
    times, summary = time_table(results)
    lines += [
        "## Time to the tolerance beside GPyTorch's default CG", "",
        "GPyTorch: its kernel matrix, pivoted Cholesky of rank 15 and `linear_cg` with the tolerance set to "
        f"{problem['tolerance']:g}. Both sides include forming the matrix. A ratio above 1 says that "
        "sketchgp is faster; > marks a set where GPyTorch never reached the tolerance, so that its time is "
        "that of a failure and the ratio a lower bound. In sketchgp's columns the matrix belongs to the part "
        "that uses it first, mostly the iterations.", "", times, "",
        f"GPyTorch's default did not reach the tolerance on {summary['gpytorch_failed']} of "
        f"{summary['sets']} sets.",
    ]  # fmt: skip
    for key, value in summary["median_ratio"].items():
        label = results["methods"][key.split()[0]] + (f", rank {key.split()[1]}" if " " in key else "")
        lines.append(f"Median ratio for {label}: {number(value)} (smallest {number(summary['smallest_ratio'][key])}).")
    lines += ["", "## Sets", ""]
    lines.append(table(["set", "why it is here"], [[n, s["reason"]] for n, s in results["sets"].items()]))
    return "\n".join(lines) + "\n"


def _spread(heights: Sequence[float], gap: float, top: float = 1.03) -> list[float]:
    """Positions for labels, as near as possible to ``heights`` (any order) and at least ``gap`` apart."""
    order = sorted(range(len(heights)), key=lambda i: -heights[i])
    placed = [0.0] * len(heights)
    ceiling = top
    for i in order:
        placed[i] = min(heights[i], ceiling)
        ceiling = placed[i] - gap
    floor = -0.02
    for i in reversed(order):
        placed[i] = max(placed[i], floor)
        floor = placed[i] + gap
    return placed


def picture(results: dict[str, Any], path: Path) -> None:
    """Fraction of the sets solved against iterations, one panel a rank, curves labelled at their ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problem = results["problem"]
    limit = problem["max_iterations"]
    figure, axes = plt.subplots(1, len(problem["ranks"]), figsize=(9.6, 4.4), sharey=True)
    for axis, rank in zip(axes, problem["ranks"], strict=True):
        ends: list[tuple[str, float, int]] = []
        for method in reversed(ORDER):
            counts = _iterations(results, method, rank)
            if not counts:
                continue
            solved = sorted(count for count in counts if count is not None and count <= limit)
            xs = [0, *solved, limit]
            ys = [0.0, *((i + 1) / len(counts) for i in range(len(solved))), len(solved) / len(counts)]
            axis.step(xs, ys, where="post", **STYLES[method])
            ends.append((method, ys[-1], sum(solved)))
        ends.sort(key=lambda end: (-end[1], end[2]))  # of curves that end together, the quickest first
        heights = _spread([height for _, height, _ in ends], gap=0.062)
        for (method, height, _), y in zip(ends, heights, strict=True):
            axis.plot([limit, limit * 1.035], [height, y], color=STYLES[method]["color"], linewidth=0.8,
                      clip_on=False)  # fmt: skip
            axis.text(limit * 1.045, y, results["methods"][method], va="center", fontsize=9.5,
                      color=DARKER.get(method, STYLES[method]["color"]))  # fmt: skip
        axis.set(xlim=(0, limit), ylim=(0, 1.02), xlabel="CG iterations", title=f"rank {rank}")
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    count = len(results["sets"])
    axes[0].set_ylabel(f"fraction of {count} problems solved to residual {problem['tolerance']:g}")
    figure.suptitle(
        f"Kernel ridge regression, N = {problem['n']:,} or all, bandwidth {problem['bandwidth']:g}, "
        f"mu/N = {problem['mu_over_n']:g}", fontsize=11,
    )  # fmt: skip
    figure.subplots_adjust(left=0.07, right=0.805, top=0.86, bottom=0.12, wspace=0.82)
    figure.savefig(path, dpi=150)
    plt.close(figure)
