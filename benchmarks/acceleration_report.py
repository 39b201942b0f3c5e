"""Tables and picture of the acceleration benchmark, from its JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common import describe, number, table

RIVALS = ("mu = noise, uniform", "version 1", "Skotch, uniform")  # what the default is promised to keep up with
PROMISE = 1.2
OWN = ("automatic", "authors' defaults", "EigenPro2")
# Okabe and Ito's colours; markers and sizes help where points coincide
STYLES: dict[str, dict[str, Any]] = {
    "default": {"color": "#0072B2", "marker": "o", "s": 95, "zorder": 5},
    "default rule, uniform": {"color": "#56B4E9", "marker": "o", "s": 40, "zorder": 6},
    "mu = noise, uniform": {"color": "#D55E00", "marker": "s", "s": 46, "zorder": 4},
    "version 1": {"color": "#009E73", "marker": "^", "s": 60, "zorder": 4},
    "Skotch, uniform": {"color": "#555555", "marker": "x", "s": 50, "zorder": 3},
    "Skotch, shuffled": {"color": "#999999", "marker": "+", "s": 70, "zorder": 3},
    "Skotch, version 1": {"color": "#CC79A7", "marker": "v", "s": 46, "zorder": 2},
}
WORDS = {"default": "ASkotch, default", "default rule, uniform": "ASkotch, default rule, uniform blocks",
         "mu = noise, uniform": "ASkotch, mu = noise, uniform blocks (the authors' rule)",
         "version 1": "ASkotch, version 1", "Skotch, uniform": "Skotch, uniform blocks (no acceleration)",
         "Skotch, shuffled": "Skotch, shuffled blocks", "Skotch, version 1": "Skotch, version 1"}  # fmt: skip


def middle(item: dict[str, Any], key: str, kind: str, target: float) -> float | None:
    """Median over seeds of the passes to ``target``: infinity where most runs did not get there, None without runs.

    :param kind: ``passes`` of the steps' rows, or ``total_passes`` of all entries evaluated.
    """
    runs = item["runs"].get(key, [])
    reached = [run[kind][f"{target:g}"] for run in runs]
    ordered = sorted(math.inf if value is None else value for value in reached)
    if not ordered:
        return None
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio(item: dict[str, Any], setting: str, kind: str, target: float, cap: float) -> tuple[float, str] | None:
    """Passes of the default over those of the best rival, and ``<`` or ``>`` where one of them hit the cap.

    None where neither got there.
    """
    ours = middle(item, f"default | {setting}", kind, target)
    theirs = [middle(item, f"{rival} | {setting}", kind, target) for rival in RIVALS]
    present = [value for value in theirs if value is not None]
    if ours is None or not present:
        return None
    best = min(present)
    if math.isinf(ours) and math.isinf(best):
        return None
    if math.isinf(best):
        return ours / cap, "<"
    if math.isinf(ours):
        return cap / best, ">"
    return ours / best, ""


def _passes(value: float | None, cap: float) -> str:
    if value is None:
        return "-"
    return f">{cap:g}" if math.isinf(value) else f"{value:.1f}"


def _ratio(found: tuple[float, str] | None) -> str:
    return "-" if found is None else f"{found[1]}{found[0]:.2f}"


def setting_table(results: dict[str, Any], setting: str, target: float) -> str:
    cap, targets = results["problem"]["cap"], results["problem"]["targets"]
    header = ["problem", *WORDS.values(), *(f"default / best rival, to {t:g}" for t in targets)]
    rows = []
    for name, item in results["problems"].items():
        cells = [_passes(middle(item, f"{variant} | {setting}", "passes", target), cap) for variant in WORDS]
        rows.append([name, *cells, *(_ratio(ratio(item, setting, "passes", t, cap)) for t in targets)])
    return table(header, rows)


def summary_table(results: dict[str, Any]) -> str:
    """One row a setting, a target and a way to count."""
    problem = results["problem"]
    kinds = {"passes": "rows of the steps", "total_passes": "all entries evaluated"}
    rows: list[list[object]] = []
    for setting in problem["settings"]:
        for target in problem["targets"]:
            for kind, words in kinds.items():
                found = {
                    name: ratio(item, setting, kind, target, problem["cap"])
                    for name, item in results["problems"].items()
                }
                known = {name: value for name, value in found.items() if value is not None}
                if not known:
                    rows.append([setting, f"{target:g}", words, 0, "-", "-", "-", "-"])
                    continue
                worst = max(known, key=lambda name: known[name][0])
                ordered = sorted(value for value, _ in known.values())
                above = sum(value > PROMISE for value, _ in known.values())
                rows.append([setting, f"{target:g}", words, len(known), number(ordered[len(ordered) // 2]),
                             _ratio(known[worst]), worst, above])  # fmt: skip
    header = ["setting", "residual", "counted", "problems", "median ratio", "largest ratio", "on", "above 1.2"]
    return table(header, rows)


def own_table(results: dict[str, Any]) -> str:
    """All entries evaluated, over n^2, at each solver's own block size and rank."""
    cap, targets = results["problem"]["cap"], results["problem"]["targets"]
    header = ["problem", *(f"{own}, to {t:g}" for own in OWN for t in targets)]
    rows = []
    for name, item in results["problems"].items():
        rows.append([name, *(_passes(middle(item, own, "total_passes", t), cap) for own in OWN for t in targets)])
    return table(header, rows)


def report(results: dict[str, Any]) -> str:
    problem = results["problem"]
    target = problem["targets"][len(problem["targets"]) // 2]
    seeds = sorted({run["seed"] for item in results["problems"].values() for r in item["runs"].values() for run in r})
    loads = [run["load_before"] for item in results["problems"].values() for r in item["runs"].values() for run in r]
    known = [load for load in loads if load is not None]
    lines = [
        "# Does the default acceleration need tuning?", "",
        describe(results["machine"]), "",
        f"{problem['rows']:,} rows of each set or all (row seed {problem['row_seed']}), inputs and targets "
        f"standardised, {problem['dtype']} matrix; median over seeds {', '.join(map(str, seeds))}. A number is the "
        f"count of passes (rows of the kernel matrix that steps multiplied, over n) until the true relative residual "
        f"first is at most the target; it is looked at every {problem['checked_every_passes']:g} passes and "
        f"interpolated in between; >{problem['cap']:g}: not within {problem['cap']:g} passes. A ratio is that of the "
        f"default over the best of {', '.join(WORDS[rival] for rival in RIVALS)}, at the same block size and rank; < "
        f"and > mark bounds, where one side was cut off; - where neither arrived. The promise is at most {PROMISE:g}.",
        "",
    ]  # fmt: skip
    if known:
        lines += [f"Load of the minute before a run: {min(known):g} to {max(known):g}.", ""]
    lines += ["## Summary", "", summary_table(results), ""]
    for setting, choice in problem["settings"].items():
        rank = "solved exactly" if choice["rank"] is None else f"by Nystrom approximations of rank {choice['rank']}"
        lines += [f"## Passes to {target:g}, blocks of n/{choice['share']} {rank}", "",
                  setting_table(results, setting, target), ""]  # fmt: skip
    lines += [
        "## At their own settings", "",
        "Here all entries of K count that were evaluated, over n^2: steps, blocks, checks, set-up. The authors' "
        "defaults are version 2 with mu = noise, uniform blocks of n/100 and rank 100; where n/100 is at most 100 "
        "such blocks are solved exactly.", "",
        own_table(results), "",
    ]  # fmt: skip
    failed = [
        f"{name}, {key}, seed {run['seed']}: {run['error']}"
        for name, item in results["problems"].items()
        for key, runs in item["runs"].items()
        for run in runs
        if "error" in run
    ]
    if failed:
        lines += ["## Diverged", "", *(f"- {text}" for text in failed), ""]
    return "\n".join(lines)


def picture(results: dict[str, Any], path: Path) -> None:
    """Passes to the middle target, a row a problem, a panel a setting; runs that never arrive stand at the right."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problem = results["problem"]
    target, cap = problem["targets"][len(problem["targets"]) // 2], problem["cap"]
    names, settings = list(results["problems"]), list(problem["settings"])
    figure, axes = plt.subplots(
        1, len(settings), figsize=(9.6, 2.2 + 0.3 * len(names)), sharey=True, sharex=True, squeeze=False
    )
    beyond = cap * 1.3 * 2**0.5
    for axis, setting in zip(axes[0], settings, strict=True):
        for row, name in enumerate(names):
            for variant, style in STYLES.items():
                value = middle(results["problems"][name], f"{variant} | {setting}", "passes", target)
                if value is None:
                    continue
                arrived = not math.isinf(value)
                slot = list(STYLES).index(variant) / (len(STYLES) - 1)  # those beyond the cap stand side by side
                axis.scatter(
                    value if arrived else cap * 1.3 * 2**slot, row, **style,
                    linewidths=1.5 if style["marker"] in "x+" else 0, label=WORDS[variant] if row == 0 else None,
                )  # fmt: skip
        axis.axvspan(cap * 1.15, cap * 3, color="#eeeeee", zorder=0)
        choice = problem["settings"][setting]
        how = "exact" if choice["rank"] is None else f"Nystrom, rank {choice['rank']}"
        axis.set(xscale="log", title=f"blocks of n/{choice['share']}, {how}",
                 xlabel=f"passes over the rows to residual {target:g}")  # fmt: skip
        axis.set_xlim(right=cap * 3)
        ticks = [tick for tick in (0.5, 1, 2, 5, 10, 20, 40) if tick < cap]
        axis.set_xticks([*ticks, beyond], [*(f"{tick:g}" for tick in ticks), f">{cap:g}"])
        axis.minorticks_off()
        axis.grid(color="#dddddd", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0, 0].set_yticks(range(len(names)), names, fontsize=9)
    axes[0, 0].set_ylim(len(names) - 0.5, -0.5)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=2, fontsize=9, frameon=False)
    figure.tight_layout(rect=(0, 1.1 / figure.get_figheight(), 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
