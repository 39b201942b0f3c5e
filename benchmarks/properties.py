"""The property test over many cases, and what came of it: right, warned, refused, or silently wrong.

Runs ``tests/test_properties.py`` in a process of its own and sums up the line that each case leaves in a log; a run
that was stopped is summed up as far as it went.

    python benchmarks/properties.py --cases 10000            # half an hour to an hour on one core
    python benchmarks/properties.py --cases 10000 --seed 1   # other cases
    python benchmarks/properties.py --quick                  # 100 cases
    python benchmarks/properties.py --report                 # the table again, nothing measured
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from common import arguments, describe, machine, publish, read_json, results_directory, table, write_json

TESTS = Path(__file__).resolve().parents[1] / "tests"
STATES = ("right", "warned", "refused", "wrong")
FAMILIES = {
    "model": "accelerated models",
    "full": "full problems",
    "inducing": "inducing points",
}


def summarise(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts by state; of everything, by what was solved and how."""
    runs: dict[str, dict[str, Counter[str]]] = {}
    refusals: Counter[str] = Counter()
    for line in lines:
        case = line["case"]
        family = case["family"]
        method = "auto" if case["solver"] == "'auto'" else case["solver"].split("(")[0]
        for kind, value in (("family", family), ("form", f"{family}: {case['form']}"), ("kernel", case["kernel"]),
                            ("solver", f"{family}: {method}"), ("dtype", case["dtype"])):  # fmt: skip
            runs.setdefault(kind, {}).setdefault(value, Counter())[line["state"]] += 1
        if line["state"] == "refused" and line.get("notes"):
            refusals[_kind(line["notes"][0])] += 1
    right = [line for line in lines if line["state"] == "right"]
    near = sorted(line["deviations"] for line in right if _expected(line["case"]))
    return {
        "seeds": sorted({line.get("seed") or "the test's own" for line in lines}),
        "cases": len(lines),
        "different": len({json.dumps(line["case"], sort_keys=True) for line in lines}),
        "states": Counter(line["state"] for line in lines),
        "seconds": sum(line["seconds"] for line in lines),
        "deviations": {
            str(q): near[min(len(near) - 1, math.ceil(q * len(near)) - 1)] for q in (0.5, 0.9, 0.99) if near
        },
        "loose": sum(line["share"] > 0.1 for line in right),
        "runs": {kind: dict(sorted(counts.items())) for kind, counts in runs.items()},
        "refusals": dict(refusals.most_common()),
        "wrong": [line["case"] for line in lines if line["state"] == "wrong"][:20],
    }


def _expected(case: dict[str, Any]) -> bool:
    """Whether the targets are of a size that the prior expects; an error relative to others is many deviations."""
    return 0.1 <= case["targets"] / case["outputscale"] ** 0.5 <= 3


def _kind(note: str) -> str:
    """A message without its numbers, so that the same refusals count as one."""
    return "".join("#" if character.isdigit() else character for character in note)[:80]


def report(results: dict[str, Any]) -> str:
    states = results["states"]
    counted = ", ".join(f"{states.get(state, 0):,} {state}" for state in STATES)
    near = ", ".join(f"{value:.2g} ({float(q):.0%} of the cases)" for q, value in results["deviations"].items())
    parts = [
        "# The property test", "", describe(results["machine"]), "",
        f"{results['cases']:,} cases ({results['different']:,} different ones), seeds: {', '.join(results['seeds'])}; "
        f"{results['seconds']:.0f} s: {counted}. Right is: no warning, and within what the report's residual allows "
        "around a dense float64 answer (inducing points: 0.1 posterior deviations of an observation). "
        "Where the targets are of a size that the prior expects, the error of the mean is at most "
        f"{near} posterior deviations of an observation; in {results['loose']:,} cases residual and rounding allow "
        "more than a tenth of the targets, and the comparison says little.", "",
    ]  # fmt: skip
    for kind, counts in results["runs"].items():
        rows = []
        for name, found in counts.items():
            label = FAMILIES.get(name, name)
            for family, words in FAMILIES.items():
                label = label.replace(f"{family}: ", f"{words}: ")
            rows.append([label, *(f"{found.get(state, 0):,}" for state in STATES)])
        parts += [table([kind, *STATES], rows), ""]
    if results["refusals"]:
        parts += [table(["refusal", "cases"], [[k, f"{v:,}"] for k, v in results["refusals"].items()]), ""]
    return "\n".join(parts)


def run(cases: int, seed: int | None, log: Path) -> None:
    """All three families, one after the other."""
    environment = {**os.environ, "SKETCHGP_PROPERTY_CASES": str(cases), "SKETCHGP_PROPERTY_LOG": str(log)}
    if seed is not None:
        environment["SKETCHGP_PROPERTY_SEED"] = str(seed)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(TESTS / "test_properties.py")]
    subprocess.run(command, env=environment, cwd=TESTS.parent, check=False)


def main() -> None:
    parser = arguments(__doc__, "100 cases")
    parser.add_argument("--cases", type=int, default=10_000, help="how many (default 10,000)")
    parser.add_argument("--seed", type=int, help="other cases than the test's own")
    parser.add_argument("--log", help="a log that runs with SKETCHGP_PROPERTY_LOG have written, to be summed up")
    options = parser.parse_args()
    path = results_directory(options.out, options.quick) / "properties.json"
    results = read_json(path)
    if not options.report:
        with tempfile.TemporaryDirectory() as directory:
            log = Path(options.log) if options.log else Path(directory) / "cases.jsonl"
            if not options.log:
                run(100 if options.quick else options.cases, options.seed, log)
            text = log.read_text(encoding="utf-8") if log.is_file() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        results = {"machine": machine("hypothesis"), **summarise(lines)}
        write_json(path, results)
    publish(path, results, report)


if __name__ == "__main__":
    main()
