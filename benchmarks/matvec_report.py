"""Tables and picture of the matvec benchmark, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import describe, median, number, table

Run = dict[str, Any]
KEOPS = "keops-lazy product rectangular"
TORCH = "torch-dense product rectangular"
MAIN = ("rbf", "matern52")
NOT_ENGINES = ("dense", "keops-lazy", "torch-dense")


def _run(cell: Run, key: str) -> Run:
    """A run that gave a time, or an empty one."""
    run = cell["runs"].get(key, {})
    return run if run.get("pairs_per_second") and "failed" not in run else {}


def _giga(run: Run, key: str = "pairs_per_second") -> str:
    return number(run[key] / 1e9) if run.get(key) else "-"


def _speed(run: Run) -> str:
    if not run:
        return "-"
    low, high = (run["n"] ** 2 / run[key] / 1e9 for key in ("largest_seconds", "smallest_seconds"))
    return f"{_giga(run)} ({number(low)} to {number(high)})"


def _fraction(run: Run, key: str) -> str:
    return f"{run[key]:.2f}" if run.get(key) is not None else "-"


def _ratio(run: Run, other: Run) -> float | None:
    """How many times as many pairs a second as ``other``."""
    return run["pairs_per_second"] / other["pairs_per_second"] if run and other else None


def engines_of(results: Run) -> list[str]:
    """Our engines that gave at least one product without storing the matrix, in order of appearance."""
    found = [run["engine"] for cell in results["cells"].values() for run in cell["runs"].values()
             if run.get("pairs_per_second") and run["measure"] == "product"]  # fmt: skip
    return [engine for engine in dict.fromkeys(found) if engine not in NOT_ENGINES]


def _about(results: Run, cell: Run) -> list[object]:
    return [results["problem"]["labels"][cell["kernel"]], cell["dtype"], cell["d"], cell["t"]]


ABOUT = ["kernel", "dtype", "d", "t"]


def rates_table(results: Run) -> str:
    header = [
        "run",
        "dtype",
        "threads",
        "matrix product, Gflop/s",
        "exponentials, G/s",
        "roots, G/s",
        "logarithms, G/s",
    ]
    rows: list[list[object]] = []
    for number_of_run, limits in enumerate(results["limits"]):
        for dtype in ("float32", "float64"):
            if dtype not in limits:
                continue
            found = limits[dtype]
            rows.append([number_of_run, dtype, found["threads"],
                         f"{number(found['product'] / 1e9, 4)} ({found['product_by']})",
                         *(f"{_giga(found, key)} ({found[f'{key}_by']})"
                           for key in ("exponential", "root", "logarithm"))])  # fmt: skip
    return table(header, rows)


def products_table(results: Run, engine: str) -> str:
    header = [*ABOUT, "limit, G pairs/s", "square n", "square: G pairs/s", "fraction of limit",
              "fraction of limit incl. root", "fraction of symmetric limit", "rectangular n",
              "rectangular: G pairs/s", "fraction of limit", "fraction of limit incl. root",
              "relative error"]  # fmt: skip
    rows: list[list[object]] = []
    for cell in results["cells"].values():
        square, rectangular = (_run(cell, f"{engine} product {case}") for case in ("square", "rectangular"))
        if not (square or rectangular):
            continue
        limit = (square or rectangular)["limit_pairs_per_second"]["plain"]
        errors = [run["error"] for run in (square, rectangular) if run.get("error") is not None]
        rows.append([
            *_about(results, cell), number(limit / 1e9), square.get("n"), _speed(square),
            *(_fraction(square, f"fraction_of_{key}") for key in ("limit", "limit_with_root", "symmetric_limit")),
            rectangular.get("n"), _speed(rectangular),
            *(_fraction(rectangular, f"fraction_of_{key}") for key in ("limit", "limit_with_root")),
            number(max(errors), 2) if errors else None,
        ])  # fmt: skip
    return table(header, rows)


def rivals_table(results: Run, engines: list[str]) -> str:
    header = [*ABOUT, "KeOps n", "KeOps: G pairs/s", "fraction of limit", "torch dense n", "torch dense: G pairs/s",
              "fraction of limit"]  # fmt: skip
    for engine in engines:
        header += [f"{engine} / KeOps, rectangular", f"{engine} / KeOps, square",
                   f"{engine} / torch dense, rectangular"]  # fmt: skip
    rows: list[list[object]] = []
    for cell in results["cells"].values():
        keops, dense = _run(cell, KEOPS), _run(cell, TORCH)
        if not keops and not dense:
            continue
        row = [*_about(results, cell)]
        for run in (keops, dense):
            row += [run.get("n"), _speed(run), _fraction(run, "fraction_of_limit")]
        for engine in engines:
            square, rectangular = (_run(cell, f"{engine} product {case}") for case in ("square", "rectangular"))
            row += [number(_ratio(rectangular, keops)), number(_ratio(square, keops)),
                    number(_ratio(rectangular, dense))]  # fmt: skip
        rows.append(row)
    return table(header, rows)


def stored_table(results: Run) -> str:
    header = [*ABOUT, "n", "first product, which builds it: s", "G pairs/s", "fraction of limit",
              "product with the stored matrix: s"]  # fmt: skip
    rows: list[list[object]] = []
    for cell in results["cells"].values():
        first, again = (_run(cell, f"dense {kind} product square") for kind in ("first", "stored"))
        if first:
            rows.append([*_about(results, cell), first["n"], number(first["median_seconds"]), _giga(first),
                         _fraction(first, "fraction_of_limit"), number(again.get("median_seconds"))])  # fmt: skip
    return table(header, rows)


def gradients_table(results: Run, engine: str) -> str:
    header = [*ABOUT, "n", "square product: s", "parameters: s", "ratio", "inputs and parameters: s", "ratio",
              "rectangular, parameters: s", "ratio", "KeOps, rectangular, parameters: ratio",
              "speed against KeOps' gradient", "relative error"]  # fmt: skip
    rows: list[list[object]] = []
    for cell in results["cells"].values():
        square, rectangular = (_run(cell, f"{engine} product {case}") for case in ("square", "rectangular"))
        parameters, inputs = (_run(cell, f"{engine} gradient square {wrt}") for wrt in ("parameters", "inputs"))
        oblong = _run(cell, f"{engine} gradient rectangular parameters")
        if not (parameters or inputs or oblong):
            continue
        rival = _run(cell, "keops-lazy gradient rectangular parameters")
        errors = [run["error"] for run in (parameters, inputs, oblong) if run.get("error") is not None]
        rows.append([
            *_about(results, cell), (parameters or inputs or oblong)["n"], number(square.get("median_seconds")),
            number(parameters.get("median_seconds")), number(_ratio(square, parameters)),
            number(inputs.get("median_seconds")), number(_ratio(square, inputs)),
            number(oblong.get("median_seconds")), number(_ratio(rectangular, oblong)),
            number(_ratio(_run(cell, KEOPS), rival)), number(_ratio(oblong, rival)),
            number(max(errors), 2) if errors else None,
        ])  # fmt: skip
    return table(header, rows)


def summary_table(results: Run, engines: list[str]) -> str:
    """Median and range over the cells of RBF and Matern-5/2, float32."""
    cells = [cell for cell in results["cells"].values() if cell["kernel"] in MAIN and cell["dtype"] == "float32"]

    def line(label: str, values: Iterable[float | None]) -> list[object]:
        known = [value for value in values if value is not None]
        if not known:
            return [label, "-", "-", "-", 0]
        return [label, number(median(known)), number(min(known)), number(max(known)), len(known)]

    rows = []
    for engine in engines:
        square, oblong = (f"{engine} product {case}" for case in ("square", "rectangular"))
        for label, key, kind in (
            (f"{engine}, square: fraction of limit", square, "fraction_of_limit"),
            (f"{engine}, square: fraction of symmetric limit", square, "fraction_of_symmetric_limit"),
            (f"{engine}, rectangular: fraction of limit", oblong, "fraction_of_limit"),
            (f"{engine}, rectangular: fraction of limit incl. root", oblong, "fraction_of_limit_with_root"),
        ):
            rows.append(line(label, [_run(cell, key).get(kind) for cell in cells]))
        for label, rival in (("KeOps", KEOPS), ("torch dense", TORCH)):
            rows.append(line(f"{engine} / {label}, rectangular: speed",
                             [_ratio(_run(cell, oblong), _run(cell, rival)) for cell in cells]))  # fmt: skip
        for wrt, label in (("parameters", "parameters"), ("inputs", "inputs and parameters")):
            rows.append(line(f"{engine}, square: gradient by {label} / product",
                             [_ratio(_run(cell, square), _run(cell, f"{engine} gradient square {wrt}"))
                              for cell in cells]))  # fmt: skip
    return table(["RBF and Matern-5/2, float32", "median", "smallest", "largest", "cells"], rows)


def missing_table(results: Run) -> str | None:
    """Which contestants gave no time, why, and in how many cells."""
    counts: dict[tuple[str, str, str], int] = {}
    for cell in results["cells"].values():
        for run in cell["runs"].values():
            for kind in ("unavailable", "failed"):
                if kind in run:
                    place = (run["engine"], kind, run[kind])
                    counts[place] = counts.get(place, 0) + 1
    rows = [[*place, count] for place, count in counts.items()]
    return table(["engine", "", "reason", "runs"], rows) if rows else None


def installed_table(results: Run) -> str | None:
    found = (results.get("keops_as_installed") or {}).get("by_dimension")
    if not found:
        return None
    rows: list[list[object]] = []
    for d, run in found.items():
        tuned = [_run(cell, KEOPS) for cell in results["cells"].values()
                 if (cell["kernel"], cell["d"], cell["t"], cell["dtype"]) == ("rbf", int(d), 1, "float32")]  # fmt: skip
        here = tuned[0] if tuned else {}
        rows.append([d, run["n"], _giga(run), _giga(here), number(_ratio(here, run))])
    return table(["d", "n", "as installed: G pairs/s", "with the flags: G pairs/s", "ratio"], rows)


def _holds(value: float | None, bound: float | None) -> str | None:
    return None if value is None or bound is None else ("yes" if value <= bound else "no")


def memory_table(results: Run) -> str:
    header = ["call", "rows", "d", "peak added, MB", "limit, MB", "holds", "seconds", "iterations", "residual",
              "limit", "holds"]  # fmt: skip
    rows: list[list[object]] = []
    for label, run in results["memory"].items():
        if "failed" in run:
            rows.append([label, run["failed"], *[None] * 9])
            continue
        added, limit, residual = run["added_mb"], run["limit_mb"], run.get("true_residual")
        allowed = run.get("limit_residual")
        rows.append([
            label, run["rows"], run["d"], number(added, 4), limit, _holds(added, limit), number(run["seconds"]),
            run["iterations"],
            number(run.get("reported_residual") if residual is None else residual, 2)
            + (" (reported)" if residual is None else " (true)"),
            allowed, _holds(residual, allowed),
        ])  # fmt: skip
    return table(header, rows)


INTRODUCTION = """\
Speeds are pairs of points a second, n^2 / median seconds of one product K V of t columns (in brackets the slowest
and the fastest repetition); the contestants of a row took turns. **square** is k(X, X), where each pair may be
evaluated once, **rectangular** k(X, Z) with as many rows, where no symmetry helps. KeOps and dense torch make no use
of symmetry, so they are measured on the rectangular case only. A contestant whose single call would have been too
long, or too large for the memory, has fewer rows, which its n says.

The limit is made of rates that torch reaches here (first table), for every entry of the matrix:

- **fraction of limit**: of 1 / ((2 d + 2 t) / matrix-product rate + 1 / exponential rate); other kernels than RBF and
  Matern count their own distances and exponentials (last section). A square product can exceed 1, since it is
  charged for both halves of the matrix.
- **fraction of limit incl. root**: the same with the root of Matern (the logarithm of rational quadratic) added.
- **fraction of symmetric limit**: of 1 / ((d + 2 t) / matrix-product rate + 0.5 / exponential rate), each pair once.

Relative errors are 2-norms against dense float64: of sampled rows of the products, the larger of both cases; of the
gradients, at fewer rows, the largest of all in the row."""


def report(results: Run) -> str:
    info, problem = results["machine"], results["problem"]
    device = f" Device: {info['device']}." if "device" in info else ""
    lines = ["# Products with a kernel matrix", "", describe(info) + device]
    if results.get("cells"):
        lines += _cells_report(results, engines_of(results))
    if results.get("memory"):
        lines += ["", "## Peak memory", "", "Each call in a fresh process; what it added to the memory in use before.",
                  "", memory_table(results)]  # fmt: skip
    if results.get("cells"):
        lines += ["", "## What the limit counts for an entry", "", table(["kernel", "work"], [
            [problem["labels"][name], how] for name, how in problem["work"].items()])]  # fmt: skip
    return "\n".join(lines) + "\n"


def _busy(results: Run) -> list[str]:
    """The loads; and how many rectangular products exceed the limit, which cannot be on a quiet machine."""
    cells = results["cells"].values()
    loads = [cell["load_before"] for cell in cells if cell["load_before"] is not None] or [0]
    over = [run for cell in cells for run in cell["runs"].values()
            if run["case"] == "rectangular" and (run.get("fraction_of_limit") or 0) > 1.05]  # fmt: skip
    lines = [f"Load of the minute before a cell: {min(loads)} to {max(loads)}."]
    if over:
        lines.append(f"{len(over)} rectangular products exceed the limit by more than 5 percent: the rates were not "
                     "measured under the same conditions, and the fractions say little.")  # fmt: skip
    return [*lines, ""]


def _cells_report(results: Run, engines: list[str]) -> list[str]:
    problem, cells = results["problem"], results["cells"].values()
    lines = [f"Seed {problem['seed']}, {problem['inputs']} inputs, at least {problem['repetitions']} repetitions.", "",
             INTRODUCTION, "", "## Rates of the machine", "", rates_table(results), ""]  # fmt: skip
    again = {key: [cell["rates_again"][key] for cell in cells] for key in ("product", "exponential")}
    lines += [
        "Measured again in each round of each cell, their medians were "
        + " and ".join(f"{number(min(r))} to {number(max(r))} ({key})" for key, r in again.items())
        + " times those above. A cell's limit is raised where the ratio is above 1, and never lowered.", "",
        *_busy(results),
        "## Summary", "", summary_table(results, engines),
    ]  # fmt: skip
    for engine in engines:
        lines += ["", f"## Products, `{engine}`", "", products_table(results, engine)]
    lines += ["", "## Beside KeOps and dense torch", "", rivals_table(results, engines), ""]
    if problem.get("keops_flags"):
        lines.append(f"KeOps was compiled with `{problem['keops_flags']}`, which it does not set by itself.")
    installed = installed_table(results)
    if installed:
        lines += [
            "As installed, without them (RBF, t = 1, float32; a process of its own, after the rest):",
            "",
            installed,
        ]
    lines += ["", "## The stored matrix", "", stored_table(results)]
    for engine in [one for one in engines if one != "fused"]:
        lines += ["", f"## Gradients, `{engine}`", "",
                  "Seconds of the bilinear derivative alone; ratio to the product of the same case.", "",
                  gradients_table(results, engine)]  # fmt: skip
    missing = missing_table(results)
    return [*lines, "", "## Not measured", "", missing] if missing else lines


# ---------------------------------------------------------------------------------------------------- picture
# Okabe and Ito's colours; square products dashed, since they do half the work.
CURVES: dict[str, tuple[str, str, str, str]] = {
    "triton product rectangular": ("triton, k(X, Z)", "#CC79A7", "-", "s"),
    "triton product square": ("triton, k(X, X)", "#CC79A7", "--", "s"),
    "fused product rectangular": ("fused, k(X, Z)", "#009E73", "-", "v"),
    "fused product square": ("fused, k(X, X)", "#009E73", "--", "v"),
    "tiled product rectangular": ("tiled, k(X, Z)", "#0072B2", "-", "o"),
    "tiled product square": ("tiled, k(X, X)", "#0072B2", "--", "o"),
    KEOPS: ("KeOps LazyTensor", "#D55E00", "-", "^"),
    TORCH: ("dense torch", "#777777", "-", "D"),
}


def _curve(cells: list[Run], value: Callable[[Run], float | None]) -> tuple[list[int], list[float]]:
    points = {cell["d"]: found for cell in sorted(cells, key=lambda c: c["d"]) if (found := value(cell)) is not None}
    return list(points), list(points.values())


def picture(results: Run, path: Path) -> None:
    """Draw speed (log scale, with the limits) and fraction of the limit by d, float32, for the least and the most t."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells = [c for c in results["cells"].values() if c["kernel"] in MAIN and c["dtype"] == "float32" and c["n"] < 1e6]
    shown = {bound(c["t"] for c in cells) for bound in (min, max) if cells}
    cells = [c for c in cells if c["t"] in shown]
    columns = sorted({(c["kernel"], c["t"]) for c in cells}, key=lambda place: (MAIN.index(place[0]), place[1]))
    if not columns:
        return
    dims = sorted({c["d"] for c in cells})
    figure, axes = plt.subplots(2, len(columns), figsize=(1 + 2.2 * len(columns), 6.4), sharex=True, sharey="row",
                                squeeze=False)  # fmt: skip
    for j, (kernel, t) in enumerate(columns):
        speed, fraction = axes[:, j]
        chosen = [c for c in cells if (c["kernel"], c["t"]) == (kernel, t)]
        for kind, label, style in (("plain", "limit", "-"), ("symmetric", "symmetric limit", "--")):
            limit = _curve(chosen, lambda c, k=kind: next(
                (r["limit_pairs_per_second"][k] / 1e9 for r in c["runs"].values() if "limit_pairs_per_second" in r),
                None))  # fmt: skip
            speed.plot(*limit, color="black", linestyle=style, linewidth=1.1, label=label)
        for key, (label, color, style, marker) in CURVES.items():
            look = {"color": color, "linestyle": style, "marker": marker, "markersize": 5, "linewidth": 1.7,
                    "markerfacecolor": color if style == "-" else "white"}  # fmt: skip
            xs, ys = _curve(chosen, lambda c, k=key: _run(c, k).get("pairs_per_second"))
            if not xs:
                continue
            speed.plot(xs, [y / 1e9 for y in ys], label=label, **look)
            fraction.plot(*_curve(chosen, lambda c, k=key: _run(c, k).get("fraction_of_limit")), **look)
        fraction.axhline(1, color="black", linewidth=1.1)
        speed.set(xscale="log", yscale="log", title=f"{results['problem']['labels'][kernel]}, t = {t}")
        fraction.set(ylim=(0, None), xlabel="dimension d")
        fraction.set_xticks(dims, [str(d) for d in dims], fontsize=8, rotation=45)
        fraction.minorticks_off()
        for axis in (speed, fraction):
            axis.grid(color="#dddddd", linewidth=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("G pairs a second")
    axes[1, 0].set_ylabel("fraction of the limit\n(dashed: each pair once)")
    labels = {label: line for axis in axes[0] for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    where = results["machine"].get("device") or results["machine"]["processor"]
    count = results["machine"]["torch_threads"]
    threads = "" if "device" in results["machine"] else f", {count} thread{'s' * (count != 1)}"
    figure.suptitle(f"Products with k(X, Z) in float32 on {where}{threads}", fontsize=12, y=0.985)
    figure.legend(labels.values(), labels.keys(), loc="upper center", ncols=(len(labels) + 1) // 2, frameon=False,
                  bbox_to_anchor=(0.5, 0.955), fontsize=9.5)  # fmt: skip
    figure.subplots_adjust(left=0.95 / figure.get_figwidth(), right=0.985, top=0.83, bottom=0.1, hspace=0.1,
                           wspace=0.07)  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)
