"""Tables of the papers' figures, from the JSON."""

from __future__ import annotations

from typing import Any

from common import describe, number, table

TITLES = {
    "homo": "HOMO energies by iterations: RPCholesky paper, Figures 6 and 7",
    "higgs": "HIGGS with a tiny noise: KRILL, Figure 8",
    "synthetic": "Synthetic problem, all rows: ASkotch paper, Figure 7",
    "synthetic_points": "Synthetic problem, 1,000 inducing points, SketchySAGA: ASkotch paper, Figure 8",
    "epochs": "MNIST by epochs, a projection once in T batches, as in the papers: EigenPro 4, Figures 3 and 5",
}  # fmt: skip
VALUES = ("smape", "error", "suboptimality", "accuracy")
DIGITS = {"smape": 3, "error": 4, "accuracy": 4}


def courses(runs: dict[str, Any]) -> str:
    """A row a run and quantity, a column a look."""
    first = next(iter(runs.values()))["course"]
    unit = next(name for name in ("iteration", "passes", "epochs") if name in first)
    looks = sorted({round(look) for run in runs.values() for look in run["course"][unit]})
    rows = []
    for label, run in runs.items():
        course = run["course"]
        at = {round(look): index for index, look in enumerate(course[unit])}
        for name in ("residual", *VALUES):
            if name in course and not (name == "residual" and "accuracy" in course):
                cells = [number(course[name][at[look]], DIGITS.get(name, 2)) if look in at else None
                         for look in looks]  # fmt: skip
                rows.append([label, name, *cells, run["iterations"], number(run["seconds"])])
    return table(["run", unit, *looks, "iterations in all", "seconds"], rows)


def report(results: dict[str, Any]) -> str:
    figures, size = results["figures"], results["problem"]
    lines = ["# Figures of the papers, small", "", describe(results["machine"]), "",
             f"HOMO: {size['homo']:,} molecules, and as many to test; HIGGS: {size['higgs']:,} rows, "
             f"{size['points']:,} points, mu / N = 2e-10, bandwidth 4; synthetic: {size['synthetic']:,} rows, at most "
             f"{size['seconds_synthetic']:g} s a run; MNIST: all rows unless told otherwise. [Beside the "
             "papers](../../docs/papers.md).", ""]  # fmt: skip
    for name, title in TITLES.items():
        if figures.get(name):
            lines += [f"## {title}", "", courses(figures[name]), ""]
        if name == "homo" and figures.get("homo_size"):
            lines += ["## HOMO energies by size, exact solutions: RPCholesky paper, Figure 5", "",
                      table(["solved on", "SMAPE"], [[key, number(run["smape"], 4)]
                                                     for key, run in figures["homo_size"].items()]), ""]  # fmt: skip
        if name == "epochs" and figures.get("projections"):
            for label, run in figures["projections"].items():
                pairs = run["accuracies"]
                fell = sum(after < before for before, after in pairs)
                lines += [f"{label}, first epoch, 2,000 test images: accuracy before → after each projection, lower at "
                          f"{fell} of {len(pairs)}: " + ", ".join(f"{a:.2f} → {b:.2f}" for a, b in pairs) + ".",
                          ""]  # fmt: skip
    if figures.get("growth"):
        rows = [[f"{run['m']:,}", f"{run['rows']:,}" if run["rows"] else "EigenPro 2 on the points",
                 f"{run['accuracy']:.2f}", number(run["seconds"])] for run in figures["growth"].values()]  # fmt: skip
        lines += ["## MNIST by rows and points, test accuracy: EigenPro 3, Figures 1, 2 and 5", "",
                  table(["points", "rows", "accuracy", "seconds"], rows), ""]  # fmt: skip
    if figures.get("greedy"):
        rows = []
        for name, runs in figures["greedy"].items():
            cells = [f"{run['iterations']}" if run["residual"] <= 1.05e-3 else f"({run['residual']:.1g})"
                     for run in runs.values()]  # fmt: skip
            rows.append([name, *cells])
        solved = [sum(run["residual"] <= 1.05e-3 for runs in figures["greedy"].values()
                      for key, run in runs.items() if key == rank) for rank in ("500", "1000")]  # fmt: skip
        lines += ["## Greedy pivots on the testbed: RPCholesky paper, Figures 1 and 2", "",
                  "Iterations, in brackets the residual after 250; beside `testbed.md`.", "",
                  table(["set", "rank 500", "rank 1000"], rows), "",
                  f"Solved: {solved[0]} and {solved[1]} of {len(rows)}.", ""]  # fmt: skip
    return "\n".join(lines)
