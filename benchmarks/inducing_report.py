"""Tables and pictures of the inducing-point benchmark, from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import describe, number, table

METHODS = {
    "KRILL": {"color": "#0072B2", "linewidth": 2.4},
    "Falkon": {"color": "#D55E00", "linewidth": 1.8, "linestyle": "--"},
    "none": {"color": "#999999", "linewidth": 1.4, "linestyle": ":"},
    "QR": {"color": "#009E73", "linewidth": 1.8, "linestyle": "-."},
}
WORDS = {"sqrt": "k = sqrt(N)", "tenth": "k = N / 10", "tiny": "k = sqrt(N), mu / N = 2e-10",
         "tiny tenth": "k = N / 10, mu / N = 2e-10"}  # fmt: skip
BOUNDS = {"sqrt": 25, "tenth": 30, "tiny": 25, "tiny tenth": 10}


def cell(run: dict[str, Any] | None) -> str | None:
    """Iterations to the tolerance, or the residual that was left."""
    if run is None:
        return None
    return str(run["iterations"]) if run["converged"] else f"- ({number(run['true_residual'], 2)})"


def report(results: dict[str, Any]) -> str:
    problem = results["problem"]
    lines = [
        "# KRILL, Falkon and plain conjugate gradients on inducing points", "",
        describe(results["machine"]), "",
        f"{problem['dtype']}, N = {problem['rows']:,} rows or all (seed {problem['row_seed']}), squared exponential "
        f"kernel with bandwidth {problem['bandwidth']:g} on standardised inputs, mu / N = {problem['mu_over_n']:g}, "
        f"inducing points drawn uniformly (seed {problem['point_seed']}). A number is the iterations to a relative "
        f"residual of {problem['tolerance']:g} of the normal equations, computed again at the end; in brackets the "
        f"residual after {problem['max_iterations']} iterations where that did not suffice.", "",
    ]  # fmt: skip
    for label, words in WORDS.items():
        sets = {name: item for name, item in results["sets"].items() if f"KRILL, {label}" in item["runs"]}
        if not sets:
            continue
        rows = [[name, f"{item['n']:,}", item["inputs"], f"{item['runs'][f'KRILL, {label}']['k']:,}",
                 *(cell(item["runs"].get(f"{method}, {label}")) for method in ("KRILL", "Falkon", "none"))]
                for name, item in sets.items()]  # fmt: skip
        runs = {method: [item["runs"].get(f"{method}, {label}") for item in sets.values()] for method in METHODS}
        solved = {method: sum(run is not None and run["converged"] for run in found) for method, found in runs.items()}
        most = max(item["runs"][f"KRILL, {label}"]["iterations"] for item in sets.values())
        over = [name for name, item in sets.items() if item["runs"][f"KRILL, {label}"]["iterations"] > BOUNDS[label]]
        lines += [
            f"## {words}", "",
            table(["set", "N", "inputs", "k", "KRILL", "Falkon", "no preconditioner"], rows), "",
            f"Solved: KRILL {solved['KRILL']}, Falkon {solved['Falkon']}, none {solved['none']} of {len(sets)}. KRILL: "
            f"at most {most} iterations; above {BOUNDS[label]}: {', '.join(over) or 'none'}.", "",
        ]  # fmt: skip
    if results.get("times"):
        rows = []
        for k, runs in results["times"].items():
            cells = [f"{number(runs[m]['seconds'])} ({runs[m]['iterations']})" if m in runs else None
                     for m in ("KRILL", "Falkon")]  # fmt: skip
            rows.append([k, *cells, number(runs["QR"]["seconds"]) if "QR" in runs else None])
        lines += ["## Seconds against k", "", "kin40k, N = 20,000; in brackets the iterations.", "",
                  table(["k", "KRILL", "Falkon", "QR"], rows), ""]  # fmt: skip
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Share of the sets solved against iterations, and the residual of every set, for both sizes."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for axis, label in zip(axes, ("sqrt", "tenth"), strict=True):
        sets = [item for item in results["sets"].values() if f"KRILL, {label}" in item["runs"]]
        for method in ("KRILL", "Falkon", "none"):
            runs = [item["runs"].get(f"{method}, {label}") for item in sets]
            ends = sorted(run["iterations"] for run in runs if run is not None and run["converged"])
            steps = [0, *ends, results["problem"]["max_iterations"]]
            shares = [0.0, *((i + 1) / len(sets) for i in range(len(ends))), len(ends) / max(1, len(sets))]
            words = "no preconditioner" if method == "none" else method
            axis.step(steps, shares, where="post", label=words, **METHODS[method])
        axis.set(title=f"{WORDS[label]}, {len(sets)} data sets", xlabel="iterations", xlim=(0, 100), ylim=(0, 1.03))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("share solved to 1e-4")
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def time_picture(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 4), layout="constrained")
    for method in ("KRILL", "Falkon", "QR"):
        points = [(int(k), runs[method]["seconds"]) for k, runs in results["times"].items() if method in runs]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o", label=method, **METHODS[method])
    sizes = [int(k) for k in results["times"]]
    axis.set(xscale="log", yscale="log", xlabel="inducing points", ylabel="seconds to 1e-4", title="kin40k, N = 20,000")
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3, which="both")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
