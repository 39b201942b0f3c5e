"""Tables of the benchmark of hyperparameters, from its JSON."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from common import describe, number, table

SAME = "sketchgp start=model"
SHORT = {f"sketchgp iterations={steps}": steps for steps in (1, 4)}  # of fit
Runs = dict[tuple[str, int], dict[str, dict[str, Any]]]  # of one split, by set and training rows, and by method
Cells = dict[tuple[str, int], dict[str, dict[int, dict[str, Any]]]]  # of all of them: then by seed
METHODS = {
    "sketchgp": "sketchgp, no options",
    SAME: 'sketchgp, `start="model"`',
    "dense": "dense L-BFGS, float64",
    "GPyTorch": "GPyTorch, defaults",
    "GPyTorch 50": "GPyTorch, defaults, 50 steps",
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
SEEDED = ("sketchgp", "dense", "GPyTorch", "SGPR 1024")  # shown with all seeds
CLOSE = 0.01  # of the least true loss a row
LONG = 10.0  # deviations of an input; lengthscales beyond it hardly matter


def _fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _pair(value: tuple[float, float]) -> str:
    return f"{value[0]:.3f} / {value[1]:.3f}"


def _remarks(run: dict[str, Any]) -> str:
    words = []
    if "broke" in run:
        words.append(f"ended: {run['broke']}")
    elif not run["complete"]:
        words.append(f"stopped after {run.get('steps', run.get('evaluations'))} steps")
    if run.get("scored", run["test"]) < run["test"]:
        words.append(f"NLL of {run['scored']} test points")
    if "elsewhere" in run:
        words.append(f"on {run['elsewhere']}")
    return "; ".join(words)


def _work(run: dict[str, Any]) -> str:
    """Products with the kernel matrix; factorizations where there are none."""
    if run.get("objective") == "exact":
        return f"{run['evaluations']:,} factorizations"
    return f"{run['products']:,}" if run.get("products") is not None else "-"


def _cells(results: dict[str, Any]) -> Cells:
    cells: Cells = defaultdict(lambda: defaultdict(dict))
    for label, run in results["runs"].items():
        name, _, seed, method = label.split(", ")
        if (processor := run.get("processor", "")) not in ("", results["machine"]["processor"]):
            run = {**run, "elsewhere": processor}
        cells[name, run["train"]][method][int(seed.split()[1])] = run
    return dict(sorted(cells.items(), key=lambda cell: cell[0][1]))  # fewest rows first


def _of_first(cells: Cells) -> Runs:
    """Those with seed 0."""
    return {key: {method: runs[0] for method, runs in methods.items() if 0 in runs} for key, methods in cells.items()}


def _summary(cells: Runs) -> str:
    shown = [m for m in METHODS if any(m in methods for methods in cells.values())]
    full = {name: max(rows for other, rows in cells if other == name) for name, _ in cells}
    header = ["set", "rows", *(METHODS[m] for m in shown), "*literature: Wang et al.*", "*literature: accurate solves*"]
    rows = []
    for (name, n), methods in cells.items():
        row: list[Any] = [name, f"{n:,}"]
        for method in shown:
            run = methods.get(method, {})
            row.append(f"{run['rmse']:.3f} / {_fixed(run.get('nll'), 3)}" if "rmse" in run else "-")
        known = LITERATURE.get(name) if n == full[name] and n > 8000 else None
        row += ["-", "-"] if known is None else [f"*{_pair(one)}*" for one in known]
        rows.append(row)
    return table(header, rows)


def _of_set(methods: dict[str, dict[str, Any]]) -> str:
    header = ["method", "RMSE", "NLL", "95% covers", "CPU s", "products", "loss", "true loss", "NLL by `predict`", ""]
    rows = []
    for method, words in METHODS.items():
        if not (run := methods.get(method)):
            continue
        rows.append([
            words, _fixed(run.get("rmse"), 4), _fixed(run.get("nll"), 3), _fixed(run.get("coverage"), 3),
            number(run.get("cpu_seconds")), _work(run), _fixed(run.get("loss"), 4),
            _fixed(run.get("true_loss"), 4), _fixed(run.get("by_sketchgp", {}).get("nll"), 3), _remarks(run),
        ])  # fmt: skip
    return table(header, rows)


def _on_all(run: dict[str, Any]) -> dict[str, Any]:
    """Scores of all test points: those of `predict` where the method's own variances are of some only."""
    return run if run.get("scored", run["test"]) == run["test"] else {**run, **run["by_sketchgp"]}


def _spread(runs: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [run[key] for run in runs]
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _of_seeds(cells: Cells) -> list[str]:
    """Methods beside each other on other splits, too: those of which there are some, on the splits that all of them
    have."""
    rows = []
    for (name, n), methods in cells.items():
        done = {m: {s: run for s, run in methods.get(m, {}).items() if "nll" in run} for m in SEEDED}
        wanted = {method: runs for method, runs in done.items() if len(runs) > 1}
        seeds = set.intersection(*map(set, wanted.values())) if wanted else set()
        if len(seeds) < 2 or len(wanted) < 2:
            continue
        for method, runs in wanted.items():
            chosen = [_on_all(runs[seed]) for seed in sorted(seeds)]
            rows.append([name, f"{n:,}", METHODS[method], len(seeds), _spread(chosen, "rmse", 3),
                         _spread(chosen, "nll", 3), _spread(chosen, "coverage", 3),
                         number(float(np.mean([run["cpu_seconds"] for run in chosen]))),
                         ", ".join(sorted({run["elsewhere"] for run in chosen if "elsewhere" in run}))])  # fmt: skip
    if not rows:
        return []
    head = ["set", "rows", "method", "seeds", "RMSE", "NLL", "95% covers", "CPU s", "some on"]
    text = (
        "Each seed splits the set anew. Means over seeds, the least and the greatest; seconds are means. A fit that "
        "was stopped counts with what it had. Densities are of all test points: of GPyTorch's, where it had time for "
        "some, those of sketchgp's `predict` with its hyperparameters."
    )
    return ["## Other splits", "", text, "", table(head, rows), ""]


def _apart(one: dict[str, Any], other: dict[str, Any], longest: float) -> float:
    """The largest relative difference of two fits' hyperparameters, but for lengthscales that are longer in both."""
    pairs = [(one["outputscale"], other["outputscale"]), (one["noise"], other["noise"])]
    lengths = zip(one["lengthscales"], other["lengthscales"], strict=True)
    pairs += [pair for pair in lengths if min(pair) <= longest]
    return max(abs(a / b - 1) for a, b in pairs)


def _beside_dense(cells: Cells) -> list[str]:
    """Fits from the same start as the dense ones, that came to an end."""
    rows = []
    for (name, n), methods in cells.items():
        for seed, one in methods.get(SAME, {}).items():
            other = methods.get("dense", {}).get(seed, {})
            if not (one.get("complete") and other.get("complete")):
                continue
            differences = [f"{100 * _apart(one, other, longest):.2g}%" for longest in (LONG, float("inf"))]
            rows.append([name, f"{n:,}", seed, f"{one['loss']:.5f}", f"{other['loss']:.5f}", *differences,
                         f"{one['nll'] - other['nll']:+.4f}", number(one["cpu_seconds"]),
                         number(other["cpu_seconds"])])  # fmt: skip
    if not rows:
        return []
    head = ["set", "rows", "seed", "loss", "dense", f"apart, lengthscales to {LONG:g}", "apart, all",
            "NLL less the dense one", "CPU s", "dense"]  # fmt: skip
    text = (
        "Both begin where GPyTorch does, and ended by themselves. The largest relative difference of lengthscales, "
        f"output scale and noise; a lengthscale of more than {LONG:g} deviations of its input hardly matters."
    )
    return ["## Beside the dense fit, from the same start", "", text, "", table(head, rows), ""]


def _reached(runs: dict[str, dict[str, Any]], nll: float, processor: str | None) -> dict[str, Any] | None:
    """The quickest of sketchgp's fits on a processor with a density that is no worse; None where there is none."""
    found = [runs[method] for method in ("sketchgp", *SHORT) if "nll" in runs.get(method, {})]
    fits = (run for run in found if run["nll"] <= nll and run.get("elsewhere") == processor)
    return min(fits, key=lambda run: run["cpu_seconds"], default=None)


def _same_density(cells: Runs) -> list[str]:
    """How long fits of few steps take until they predict as GPyTorch's do."""
    rows = []
    for (name, n), methods in cells.items():
        if not any(method in methods for method in SHORT):
            continue
        rivals = (methods[method] for method in ("GPyTorch", "GPyTorch 50") if method in methods)
        for rival in (run for run in rivals if "by_sketchgp" in run):
            best = rival["by_sketchgp"]["nll"]
            if rival["scored"] == rival["test"]:
                best = min(best, rival["nll"])
            near, took = _reached(methods, best, rival.get("elsewhere")), ["-"] * 4
            if near is not None:
                took = [near["steps"], f"{near['nll']:.3f}", number(near["cpu_seconds"]),
                        f"{near['cpu_seconds'] / rival['cpu_seconds']:.2f}"]  # fmt: skip
            rows.append([name, f"{n:,}", rival["steps"], f"{best:.3f}", number(rival["cpu_seconds"]), *took])
    if not rows:
        return []
    head = ["set", "rows", "GPyTorch's steps", "its NLL", "its CPU s", "steps of `fit`", "NLL", "CPU s", "ratio"]
    text = (
        f"The quickest of `fit(iterations=k)`, k = {', '.join(map(str, SHORT.values()))} or not given, whose NLL is no "
        "worse than that of GPyTorch's defaults: its own one, where it is of all test points, or the one that "
        "sketchgp's `predict` gives for its hyperparameters, whichever is better. Seconds are of the whole call, which "
        "begins with fits of 1,000 rows."
    )
    return ["## Time to the same density", "", text, "", table(head, rows), ""]


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
    first = _of_first(cells)
    lines = [
        "# Hyperparameters by marginal likelihood", "", describe(results["machine"]), "",
        "Matern-3/2 with ARD; 0.64 of the rows of a set train, or so many of them, all others test. A fit ends after "
        "so many processor seconds as its section says. RMSE / NLL of test targets, standardised, of the first split. "
        "The literature's figures are of other splits, bounds of the noise and optimisers, and were not measured "
        "here.", "",
        _summary(first), "",
        "Products are with the kernel matrix and blocks of columns; the loss is the method's own, a row, the true "
        "one that of its hyperparameters by a float64 factorization; the last NLL is of the same hyperparameters and "
        "sketchgp's `predict`, of all test points.", "",
    ]  # fmt: skip
    for (name, n), methods in first.items():
        inputs = next(iter(methods.values()))["inputs"]
        limits = sorted({run["limit"] for run in methods.values()})
        head = f"{name}, {n:,} training rows, {inputs} inputs, {' or '.join(f'{limit:g}' for limit in limits)} seconds"
        lines += [f"## {head}", "", _of_set(methods), ""]
    lines += [*_of_seeds(cells), *_same_density(first), *_beside_dense(cells)]
    if results.get("ingredients"):
        lines += [
            "## What each ingredient buys", "",
            f"Processor seconds and products until the true loss is within {CLOSE:g} a row of the least one that any "
            "of these fits came to. True losses are of at most so many steps of a fit as the benchmark says.", "",
        ]  # fmt: skip
        for name, beside in results["ingredients"].items():
            lines += _ingredients(name, beside["runs"])
    return "\n".join(lines)
