"""Table and picture of the taxi benchmark, from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from blockwise import first_below
from common import describe, number, table

STYLES: dict[str, dict[str, Any]] = {
    "askotch": {"color": "#0072B2", "linewidth": 2.8},
    "subset": {"color": "#56B4E9", "linewidth": 2.0, "linestyle": (0, (4, 1.5))},
    "cg": {"color": "#009E73", "linewidth": 2.0, "linestyle": "-.", "marker": "."},
}
SELECTIONS = {"uniform": ("o", "#E69F00"), "k-means": ("^", "#CC79A7")}


def words_of(results: dict[str, Any], name: str) -> str:
    run = results["runs"][name]
    if name == "askotch":
        return f"ASkotch, all {run['rows']:,} rows"
    if name == "subset":
        return f"ASkotch, {run['rows']:,} rows"
    return f"CG (RPCholesky, rank {run['rank']}), all {run['rows']:,} rows"


def staircase(points: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds and the least error until then, a step a model."""
    seconds: list[float] = []
    least: list[float] = []
    for point in points:
        seconds.append(point["seconds"])
        least.append(min(point["rmse"], least[-1] if least else point["rmse"]))
    return seconds, least


def _row(words: str, least: float, seconds: float, deviation: float, run: dict[str, Any], rest: list[str]) -> list[Any]:
    return [words, f"{least:.4f}", number(least * deviation), number(seconds), *rest, number(run["peak_memory_mb"])]


def results_table(results: dict[str, Any]) -> str:
    """One row a method; of the inducing points one a selection, as given and at its best."""
    deviation = results["hyperparameters"]["deviation"]
    header = ["method", "least test RMSE, standardised", "in seconds of a trip", "reached after, s", "RMSE at the end",
              "entries / n^2", "estimated residual", "true residual", "peak memory, MB"]  # fmt: skip
    rows: list[list[Any]] = []
    for name, run in results["runs"].items():
        if name == "inducing":
            continue
        course = run["course"]
        index = min(range(len(course["rmse"])), key=lambda i: course["rmse"][i])
        rest = [f"{course['rmse'][-1]:.4f}", number(course["entries"][-1] / run["rows"] ** 2),
                number(course["residual"][-1], 2), number(run.get("true_residual"), 2)]  # fmt: skip
        rows.append(
            _row(words_of(results, name), course["rmse"][index], course["seconds"][index], deviation, run, rest)
        )
    run = results["runs"].get("inducing")
    if run is not None:
        for selection in SELECTIONS:
            own = [point for point in run["points"] if point["selection"] == selection]
            given = [p for p in own if p["lengthscale_factor"] == p["noise_factor"] == 1.0 and p["seed"] == 0]
            for points, words in ((given, "hyperparameters as given"), (own, "best on the test rows of {} models")):
                if points:
                    best = min(points, key=lambda point: point["rmse"])
                    label = f"{run['inducing_points']:,} inducing points, {selection}: {words.format(len(own))}"
                    rest = ["-"] * 4
                    rows.append(_row(label, best["rmse"], best["seconds"], deviation, run, rest))
    return table(header, rows)


def report(results: dict[str, Any]) -> str:
    if "inputs" in results["problem"]:
        return report_million(results)
    sizes, found = results["problem"], results["hyperparameters"]
    loads = [run["load_before"] for run in results["runs"].values() if run["load_before"] is not None]
    lines = [
        "# All taxi trips against inducing points", "",
        describe(results["machine"]), "",
        f"nyc_green_taxi, {sizes['train']:,} training rows and {sizes['test']:,} test rows (row seed "
        f"{sizes['row_seed']}), {found['inputs']} inputs; target: trip duration, standardised by the training part "
        f"(deviation {number(found['deviation'])} s). {sizes['seconds']:g} s for each method, in a process of its own; "
        "predicting the test rows is not counted. Full models in float32, inducing points in float64. Load of the "
        f"minute before a run {min(loads, default=0):g} to {max(loads, default=0):g}.", "",
        f"Hyperparameters, shared: {sizes['kernel']}, from `sketchgp.fit` on {sizes['fit_rows']:,} rows in "
        f"{number(found['seconds'])} s ({found['steps']} steps): noise {number(found['noise'])}, output scale "
        f"{number(found['outputscale'])}, lengthscales {', '.join(number(v) for v in found['lengthscale'])}.", "",
        results_table(results), "",
    ]  # fmt: skip
    run, rival = results["runs"].get("askotch"), results["runs"].get("inducing")
    if run is not None and rival is not None and rival["points"]:
        best = min(rival["points"], key=lambda point: point["rmse"])
        course = run["course"]
        index = first_below(course["rmse"], best["rmse"])
        when = "never" if index is None else f"after {number(course['seconds'][index])} s"
        lines += [
            f"The best inducing-point model, chosen on the test rows ({best['selection']} points, lengthscales x "
            f"{best['lengthscale_factor']:g}, noise x {best['noise_factor']:g}; RMSE {best['rmse']:.4f} after "
            f"{number(best['seconds'])} s), is overtaken by ASkotch on all rows {when}.", "",
        ]  # fmt: skip
    for name, run in results["runs"].items():
        if run.get("notes"):
            lines += [f"{words_of(results, name)}: {'; '.join(run['notes'])}.", ""]
    return "\n".join(lines)


def report_million(results: dict[str, Any]) -> str:
    """Return the table of what ``--million`` measures."""
    sizes, rows = results["problem"], []
    for label, run in results["runs"].items():
        last = run["course"][-1]
        rows.append([label, run["described"], number(last["processor_seconds"]), number(last["passes"]),
                     number(last["residual"], 2), number(last.get("rmse"), 4), number(run["with_true_residual"]),
                     number(run["true_residual"], 2), number(run["peak_memory_mb"])])  # fmt: skip
    header = ["rows", "solver", "processor s", "passes", "estimated residual", "test RMSE", "with true residual, s",
              "true residual", "peak memory, MB"]  # fmt: skip
    return "\n".join([
        "# ASkotch by processor seconds", "", describe(results["machine"]), "",
        f"One thread, float32. Trips: the problem of `taxi.json`, until the test RMSE is {sizes['rmse']:g}. Uniform: "
        f"{sizes['inputs']} inputs in the unit cube, {sizes['kernel']}, lengthscale {sizes['lengthscale']:g}, noise "
        f"{sizes['noise']:g}, until the estimated residual is {sizes['residual']:g}; at most {sizes['seconds']:,.0f} "
        "s.", "", table(header, rows), "",
    ])  # fmt: skip


def picture(results: dict[str, Any], path: Path) -> None:
    """Test error against seconds: a curve a solver, a staircase and a mark a model for the inducing points."""
    if "inputs" in results["problem"]:
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    limit = results["problem"]["seconds"]
    figure, axis = plt.subplots(figsize=(9, 5.2))
    ends: list[float] = []
    for name, style in STYLES.items():
        run = results["runs"].get(name)
        if run is None:
            continue
        course = run["course"]
        axis.plot(course["seconds"][1:], course["rmse"][1:], label=words_of(results, name), **style)
        ends.append(course["rmse"][-1])
    run = results["runs"].get("inducing")
    if run is not None and run["points"]:
        count = f"{run['inducing_points']:,} inducing points"
        seconds, least = staircase(run["points"])
        axis.step([*seconds, limit], [*least, least[-1]], where="post", color="#D55E00", linewidth=2.2,
                  label=f"{count}: best so far on the test rows")  # fmt: skip
        for selection, (marker, color) in SELECTIONS.items():
            own = [point for point in run["points"] if point["selection"] == selection]
            if own:
                axis.scatter([p["seconds"] for p in own], [p["rmse"] for p in own], marker=marker, color=color, s=26,
                             label=f"{count}, {selection}: each model tried", zorder=3)  # fmt: skip
        ends += [least[0], least[-1]]
    low, high = min(ends), max(ends)
    axis.set_ylim(low - 0.12 * (high - low), high + 0.6 * (high - low))
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(right=limit * 1.1)
    axis.set(xlabel="seconds", ylabel="test RMSE, standardised trip duration")
    axis.grid(color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
