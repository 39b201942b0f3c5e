"""Tables and picture of the EigenPro benchmark, from its JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common import describe, number, table

STYLES = {
    "EigenPro4": {"color": "#0072B2", "linewidth": 2.4, "marker": "o"},
    "EigenPro3": {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--", "marker": "s"},
    "EigenPro3, exact": {"color": "#CC79A7", "linewidth": 1.8, "linestyle": "-.", "marker": "^"},
    "Falkon": {"color": "#009E73", "linewidth": 1.8, "linestyle": ":", "marker": "v"},
}
WORDS = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "uci_kin40k": "kin40k"}


def slope(runs: list[dict[str, Any]], key: str) -> float | None:
    """The exponent of ``key`` in m, between the smallest and the largest m."""
    found = sorted((run["m"], run[key]) for run in runs if run.get(key))
    if len(found) < 2:
        return None
    return math.log(found[-1][1] / found[0][1]) / math.log(found[-1][0] / found[0][0])


def of(results: dict[str, Any], name: str, method: str) -> list[dict[str, Any]]:
    runs = results["runs"].values()
    return sorted((r for r in runs if r["set"] == name and r["method"] == method), key=lambda r: r["m"])


def report(results: dict[str, Any]) -> str:
    problem = results["problem"]
    lines = [
        "# EigenPro 4, EigenPro 3 and Falkon against the number of inducing points", "",
        describe(results["machine"]), "",
        f"{problem['dtype']}, Matern-1/2, uniform inducing points (seed {problem['seed']}), {problem['epochs']} "
        f"epochs; Falkon {problem['iterations_falkon']} iterations with noise {problem['noise_falkon']:g}, an epoch "
        f"being an iteration. No run where matrices would exceed {problem['budget_gb']:g} GB; no error where the "
        "time given did not suffice for an epoch.", "",
    ]  # fmt: skip
    for name, title in WORDS.items():
        methods = [method for method in STYLES if of(results, name, method)]
        if not methods:
            continue
        sizes = sorted({run["m"] for method in methods for run in of(results, name, method)})
        score = "rmse" if name == "uci_kin40k" else "accuracy"
        tables = {"Seconds an epoch": "epoch_seconds", "Seconds in all": "seconds",
                  f"Test {'RMSE' if score == 'rmse' else 'accuracy, per cent'}": score,
                  "Peak memory of the process, MB": "peak_memory_mb",
                  "Memory above that of the data, MB": "grown_mb"}  # fmt: skip
        lines += [f"## {title}", ""]
        for heading, key in tables.items():
            rows = []
            for m in sizes:
                runs = [next((r for r in of(results, name, method) if r["m"] == m), {}) for method in methods]
                cells = [
                    f"{r[key]:.2f}" if score == key == "accuracy" and key in r else number(r.get(key)) for r in runs
                ]
                rows.append([f"{m:,}", *cells])
            lines += [f"{heading}:", "", table(["m", *methods], rows), ""]
        exponents = {method: slope(of(results, name, method), "epoch_seconds") for method in methods}
        words = ", ".join(f"{method} {number(value, 2)}" for method, value in exponents.items())
        lines += [f"Seconds an epoch grow as m to the power of: {words}.", ""]
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Seconds an epoch and the test error against m, a column for each set."""
    import matplotlib.pyplot as plt

    names = [name for name in WORDS if any(of(results, name, method) for method in STYLES)]
    figure, axes = plt.subplots(2, len(names), figsize=(3.2 * len(names), 5.6), layout="constrained", squeeze=False)
    for column, name in enumerate(names):
        score = "rmse" if name == "uci_kin40k" else "accuracy"
        for method, style in STYLES.items():
            runs = of(results, name, method)
            for axis, key in ((axes[0][column], "epoch_seconds"), (axes[1][column], score)):
                points = [(run["m"], run[key]) for run in runs if run.get(key)]
                if points:
                    axis.plot(*zip(*points, strict=True), label=method, **style)
        sizes = sorted({run["m"] for method in STYLES for run in of(results, name, method)})
        for axis in (axes[0][column], axes[1][column]):
            axis.set_xscale("log")
            axis.set_xticks(sizes, [f"{m:,}" for m in sizes], fontsize=8)
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3, which="both")
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][column].set(yscale="log", title=WORDS[name], ylabel="seconds an epoch")
        axes[1][column].set(xlabel="inducing points", ylabel="test RMSE" if score == "rmse" else "test accuracy, %")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(STYLES), frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
