"""Tables of the benchmark of hyperparameters, from its JSON."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from common import describe, number, table

SAME = "sketchgp start=model"
METHODS = {
    "sketchgp": "sketchgp, no options",
    SAME: 'sketchgp, `start="model"`',
    "dense": "dense L-BFGS, float64",
    "GPyTorch": "GPyTorch, defaults",
    "GPyTorch 0.01": "GPyTorch, tolerance 0.01, rank 100",
    "SGPR 512": "SGPR, 512 points",
    "SGPR 1024": "SGPR, 1,024 points",
    "SVGP 512": "SVGP, 512 points",
    "SVGP 1024": "SVGP, 1,024 points",
}
# RMSE and NLL of exact models with Matern-3/2, ARD, 0.64 of the rows.  Wang et al. (2019, arXiv:1903.08114), trained
# with conjugate gradients to a tolerance of 1; and a later reproduction with residuals of 1e-10 (github
# frasertajima/gp_engine; on bike with a least noise of 1e-2).  Other splits, optimisers and noise bounds than here.
LITERATURE = {
    "uci_pol": ((0.088, -0.660), (0.076, -1.224)),
    "uci_bike": ((0.043, -0.984), (0.020, -3.104)),
    "uci_kin40k": ((0.080, -0.755), (0.079, -1.138)),
}
CLOSE = 0.01  # of the least true loss a row
LONG = 10.0  # deviations of an input; lengthscales beyond it hardly matter


def _mean(runs: list[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if run.get(key) is not None]
    return float(np.mean(values)) if values else None


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(value: tuple[float, float]) -> str:
    return f"{value[0]:.3f} / {value[1]:.3f}"


def _remarks(runs: list[dict[str, Any]]) -> str:
    words = []
    for run in runs:
        if "broke" in run:
            words.append(f"ended: {run['broke']}")
        elif not run["complete"]:
            words.append(f"stopped after {run.get('steps', run.get('evaluations'))} steps")
        if run.get("scored", run["test"]) < run["test"]:
            words.append(f"NLL of {run['scored']} test points")
    return "; ".join(dict.fromkeys(words))


def _work(runs: list[dict[str, Any]]) -> str:
    """Products with the kernel matrix; factorizations where there are none."""
    exact = [run for run in runs if run.get("objective") == "exact"]
    if exact:
        return f"{_mean(exact, 'evaluations'):,.0f} factorizations"
    found = _mean(runs, "products")
    return "-" if found is None else f"{found:,.0f}"


def _cells(results: dict[str, Any]) -> dict[tuple[str, int], dict[str, list[dict[str, Any]]]]:
    """Runs by set and training rows, and by method."""
    cells: dict[tuple[str, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for label, run in results["runs"].items():
        name, _, _, method = label.split(", ")
        cells[name, run["train"]][method].append(run)
    return cells


def _summary(cells: dict[tuple[str, int], dict[str, list[dict[str, Any]]]]) -> str:
    shown = [m for m in METHODS if any(m in methods for methods in cells.values())]
    full = {name: max(rows for other, rows in cells if other == name) for name, _ in cells}
    header = ["set", "rows", *(METHODS[m] for m in shown), "*literature: Wang et al.*", "*literature: accurate solves*"]
    rows = []
    for (name, n), methods in cells.items():
        row: list[Any] = [name, f"{n:,}"]
        for method in shown:
            runs = methods.get(method, [])
            rmse, nll = _mean(runs, "rmse"), _mean(runs, "nll")
            row.append("-" if rmse is None else f"{rmse:.3f} / {_fixed(nll, 3)}")
        known = LITERATURE.get(name) if n == full[name] and n > 8000 else None
        row += ["-", "-"] if known is None else [f"*{_pair(one)}*" for one in known]
        rows.append(row)
    return table(header, rows)


def _of_set(methods: dict[str, list[dict[str, Any]]]) -> str:
    header = ["method", "seeds", "RMSE", "NLL", "95% covers", "CPU s", "products", "loss", "NLL by `predict`", ""]
    rows = []
    for method, words in METHODS.items():
        if not (runs := methods.get(method)):
            continue
        judged = [run["by_sketchgp"] for run in runs if "by_sketchgp" in run]
        rows.append([
            words, len(runs), _fixed(_mean(runs, "rmse"), 4), _fixed(_mean(runs, "nll"), 3),
            _fixed(_mean(runs, "coverage"), 3), number(_mean(runs, "cpu_seconds")), _work(runs),
            _fixed(_mean(runs, "loss"), 4), _fixed(_mean(judged, "nll"), 3), _remarks(runs),
        ])  # fmt: skip
    return table(header, rows)


def _apart(one: dict[str, Any], other: dict[str, Any], longest: float) -> float:
    """The largest relative difference of two fits' hyperparameters, but for lengthscales that are longer in both."""
    pairs = [(one["outputscale"], other["outputscale"]), (one["noise"], other["noise"])]
    lengths = zip(one["lengthscales"], other["lengthscales"], strict=True)
    pairs += [pair for pair in lengths if min(pair) <= longest]
    return max(abs(a / b - 1) for a, b in pairs)


def _beside_dense(cells: dict[tuple[str, int], dict[str, list[dict[str, Any]]]]) -> list[str]:
    """Fits from the same start as the dense ones, that came to an end."""
    rows = []
    for (name, n), methods in cells.items():
        for one, other in zip(methods.get(SAME, []), methods.get("dense", []), strict=False):
            if not (one.get("complete") and other.get("complete")):
                continue
            differences = [f"{100 * _apart(one, other, longest):.2g}%" for longest in (LONG, float("inf"))]
            rows.append([name, f"{n:,}", f"{one['loss']:.5f}", f"{other['loss']:.5f}", *differences,
                         f"{one['nll'] - other['nll']:+.4f}", number(one["cpu_seconds"]),
                         number(other["cpu_seconds"])])  # fmt: skip
    if not rows:
        return []
    head = ["set", "rows", "loss", "dense", f"apart, lengthscales to {LONG:g}", "apart, all", "NLL less the dense one",
            "CPU s", "dense"]  # fmt: skip
    text = (
        "Both begin where GPyTorch does, and ended by themselves. The largest relative difference of lengthscales, "
        f"output scale and noise; a lengthscale of more than {LONG:g} deviations of its input hardly matters."
    )
    return ["## Beside the dense fit, from the same start", "", text, "", table(head, rows), ""]


def _ingredients(name: str, runs: dict[str, dict[str, Any]]) -> list[str]:
    done = {label: run for label, run in runs.items() if "final" in run}
    if not done:
        return []
    least = min(min(run["final"], *run["steps"]["true_loss"]) for run in done.values())
    rows = []
    for label, run in runs.items():
        if label not in done:
            rows.append([label, *["-"] * 6, f"ended: {run['broke']}"])
            continue
        steps = run["steps"]
        near = next((i for i, loss in enumerate(steps["true_loss"]) if loss <= least + CLOSE), None)
        to = ["-", "-"] if near is None else [f"{steps['products'][near]:,}", number(steps["cpu_seconds"][near])]
        rows.append([label, f"{run['final']:.4f}", *to, f"{run['products']:,}", number(run["cpu_seconds"]),
                     f"{run['evaluations']}", run["reason"]])  # fmt: skip
    head = ["fit", "true loss at the end", "products to the loss", "CPU s to it", "products", "CPU s", "evaluations",
            "the end"]  # fmt: skip
    return [f"### {name}", "", f"The loss: {least + CLOSE:.4f}.", "", table(head, rows), ""]


def report(results: dict[str, Any]) -> str:
    cells = _cells(results)
    lines = [
        "# Hyperparameters by marginal likelihood", "", describe(results["machine"]), "",
        "Matern-3/2 with ARD; 0.64 of the rows of a set train, or so many of them, all others test. A fit ends after "
        "so many processor seconds as its section says. RMSE / NLL of test targets, standardised, means over seeds. "
        "The literature's figures are of other splits, bounds of the noise and optimisers, and were not measured "
        "here.", "",
        _summary(cells), "",
        "Products are with the kernel matrix and blocks of columns; the loss is the method's own, a row; the last NLL "
        "is of the same hyperparameters and sketchgp's `predict`, of all test points.", "",
    ]  # fmt: skip
    for (name, n), methods in cells.items():
        inputs = next(iter(methods.values()))[0]["inputs"]
        limits = sorted({run["limit"] for runs in methods.values() for run in runs})
        head = f"{name}, {n:,} training rows, {inputs} inputs, {' or '.join(f'{limit:g}' for limit in limits)} seconds"
        lines += [f"## {head}", "", _of_set(methods), ""]
    lines += _beside_dense(cells)
    if results.get("ingredients"):
        lines += [
            "## What each ingredient buys", "",
            f"Processor seconds and products until the true loss is within {CLOSE:g} a row of the least one that any "
            "of these fits came to; the clock stands still while true losses are computed.", "",
        ]  # fmt: skip
        for name, beside in results["ingredients"].items():
            lines += _ingredients(name, beside["runs"])
    return "\n".join(lines)
