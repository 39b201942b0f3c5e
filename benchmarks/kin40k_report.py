"""The table and the claims of the kin40k benchmark, from its JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import describe, median, number, table


def _name(label: str, noise: str) -> str:
    return f"{label} | noise {noise}"


def _median(results: dict[str, Any], label: str, noise: str, key: str) -> float | None:
    return median([run.get(key) for run in results["runs"].get(_name(label, noise), [])])


def _largest(results: dict[str, Any], label: str, noise: str, key: str) -> float | None:
    values = [run.get(key) for run in results["runs"].get(_name(label, noise), [])]
    present = [value for value in values if value is not None]
    return max(present) if present else None


def _spread(runs: list[dict[str, Any]], key: str) -> str:
    values = [run[key] for run in runs if run.get(key) is not None]
    if not values:
        return "-"
    middle = number(median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))} to {number(max(values))})"


def rows(results: dict[str, Any], noise: str) -> list[list[object]]:
    exact = (results.get("exact") or {}).get(noise, {}).get("rmse")
    lines: list[list[object]] = []
    for setting in results["settings"]:
        if f"{setting['noise']:g}" != noise:
            continue
        runs = results["runs"].get(_name(setting["label"], noise), [])
        if not runs:
            continue
        rmse = median([run["rmse"] for run in runs])
        rank = runs[0].get("rank_used", setting.get("rank", 15))
        lines.append([
            setting["label"], rank, number(median([run["iterations"] for run in runs]), 4),
            number(median([run["products"] for run in runs]), 4),
            number(max(run["true_residual"] for run in runs), 2), f"{rmse:.5f}",
            "-" if exact is None else f"{100 * (rmse / exact - 1):+.2f}%",
            _spread(runs, "seconds"), _spread(runs, "cpu_seconds"),
            number(median([run.get("added_memory_mb") for run in runs]), 4), len(runs),
        ])  # fmt: skip
    return lines


def claims(results: dict[str, Any]) -> list[list[object]]:
    """What the benchmark is to establish, each with its measured numbers; holds: yes, no or not measured."""
    exact = {noise: (results.get("exact") or {}).get(noise, {}).get("rmse") for noise in ("0.01", "0.0001")}
    ours, theirs = "sketchgp default", "GPyTorch default"

    def line(text: str, value: float | None, bound: float | None) -> list[object]:
        if value is None or bound is None:
            return [text, "-", "-", "not measured"]
        return [text, number(value, 4), number(bound, 4), "yes" if value <= bound else "no"]

    def third(label: str) -> float | None:
        iterations = _median(results, label, "0.01", "iterations")
        return None if iterations is None else iterations / 3

    rmse = _median(results, ours, "0.01", "rmse")
    error = None if rmse is None or exact["0.01"] is None else abs(rmse / exact["0.01"] - 1)
    return [
        line("noise 1e-2: true residual", _largest(results, ours, "0.01", "true_residual"), 1e-3),
        line("noise 1e-2: RMSE, relative difference from exact", error, 0.01),
        line("noise 1e-2: iterations, against a third of GPyTorch's default (tolerance 1e-2)",
             _median(results, ours, "0.01", "iterations"), third(theirs)),
        line("noise 1e-2: iterations, against a third of GPyTorch's at tolerance 1e-3",
             _median(results, ours, "0.01", "iterations"), third("GPyTorch, tolerance 1e-3")),
        line("noise 1e-2: iterations at tolerance 1e-4, against a third of GPyTorch's at tolerance 1e-4",
             _median(results, "sketchgp, tolerance 1e-4", "0.01", "iterations"),
             third("GPyTorch, tolerance 1e-4")),
        line("noise 1e-2: seconds, against GPyTorch's default",
             _median(results, ours, "0.01", "seconds"), _median(results, theirs, "0.01", "seconds")),
        line("noise 1e-4: true residual", _largest(results, ours, "0.0001", "true_residual"), 1e-3),
        line("noise 1e-4: RMSE", _median(results, ours, "0.0001", "rmse"),
             0.107 if results["problem"]["training_rows"] == 20_000 else None),
        line("noise 1e-4: seconds, against GPyTorch's default",
             _median(results, ours, "0.0001", "seconds"), _median(results, theirs, "0.0001", "seconds")),
        line("noise 1e-4: CPU seconds, against GPyTorch's default",
             _median(results, ours, "0.0001", "cpu_seconds"),
             _median(results, theirs, "0.0001", "cpu_seconds")),
    ]  # fmt: skip


def report(results: dict[str, Any]) -> str:
    header = ["system", "rank", "iterations", "products", "true residual (worst)", "RMSE", "against exact",
              "seconds", "CPU seconds", "memory added, MB", "runs"]  # fmt: skip
    info = results["machine"]
    problem = results["problem"]
    lines = [
        f"# uci_kin40k, {problem['training_rows']:,} training rows, float32", "",
        describe(info),
        "Medians over the runs, in brackets the smallest and largest. One `model(test_x).mean`, variances "
        "skipped; the true residual is computed afterwards in float64.", "",
    ]  # fmt: skip
    for noise in ("0.01", "0.0001"):
        exact = (results.get("exact") or {}).get(noise)
        lines += [f"## Noise {float(noise):.0e}", ""]
        if exact:
            lines += [
                f"Exact (float64 Cholesky, factorization {exact['factorization_seconds']:.0f} s, "
                f"{results['exact']['date']}): RMSE {exact['rmse']:.5f}.", "",
            ]  # fmt: skip
        lines += [table(header, rows(results, noise)), ""]
    lines += ["## Claims", "", table(["claim", "measured", "bound", "holds"], claims(results)), ""]
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Residual against seconds for both defaults, one panel a noise; the dots are the true residuals at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves = {"GPyTorch default": ("#D55E00", "-"), "sketchgp default": ("#0072B2", "-")}
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 4.2), sharey=True)
    for axis, noise in zip(axes, ("0.01", "0.0001"), strict=True):
        for label, (color, style) in curves.items():
            runs = results["runs"].get(_name(label, noise), [])
            if not runs or "history" not in runs[0]:
                continue
            run, steps = runs[0], runs[0]["history"]["iteration"]
            setup = run["setup_seconds"]
            seconds = [setup + (run["seconds"] - setup) * step / max(steps[-1], 1) for step in steps]
            axis.plot(seconds, run["history"]["residual"], color=color, linestyle=style, linewidth=2)
            axis.plot(seconds[-1:], [run["true_residual"]], "o", color=color, markersize=7)
            axis.annotate(
                f"{label}: {run['iterations']} iterations,\ntrue residual {run['true_residual']:.1g}, "
                f"RMSE {run['rmse']:.3f}",
                (seconds[-1], run["true_residual"]), xytext=(8, 0), textcoords="offset points",
                color=color, fontsize=9, va="center",
            )  # fmt: skip
        exact = (results.get("exact") or {}).get(noise)
        axis.set(yscale="log", xlabel="seconds, set-up included",
                 title=f"noise {noise}" + (f" (exact RMSE {exact['rmse']:.3f})" if exact else ""))  # fmt: skip
        axis.set_ylim(bottom=axis.get_ylim()[0] / 1.5)
        axis.axhline(1e-3, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)))
        axis.set_xlim(left=0, right=axis.get_xlim()[1] * 1.75)
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("relative residual (recurrence; dot: true)")
    figure.suptitle(f"uci_kin40k, {results['problem']['training_rows']:,} training rows, float32", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
