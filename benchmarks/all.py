"""Run the benchmarks one after the other, on one core each, those behind the claims of the README first.

What fails is told at the end and does not stop the others.  The output of each lies in ``results/logs``.

    python benchmarks/all.py --list           # how old the results are
    python benchmarks/all.py                  # all anew: tens of hours
    python benchmarks/all.py --resume         # only what is of an earlier version, or missing
    python benchmarks/all.py --only maps fused
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from common import RESULTS, measured_of, read_json, sources, table

# Names of the JSON files, in order of importance: first what README.md, the front page and docs/deciding.md claim.
ORDER = [
    "kin40k", "maps", "tables", "fused", "testbed_defaults", "hyperparameters", "automatic", "lattice", "near_and_far",
    "full_scale", "testbed", "few_rows", "variances", "matvec", "certificates", "variance_errors", "leave_one_out",
    "command_line", "threshold", "mll_gradient", "taxi", "taxi_million", "eigenpro", "inducing",
    "doubly_stochastic", "sketchysaga", "acquisition", "fit_units", "lean", "acceleration", "ablation", "optimum",
    "centers", "augmentation", "noise_pivots", "sketchysaga_rho", "paper_figures", "scaling", "shares", "faults",
    "projection", "properties", "compiled",
]  # fmt: skip
# Scripts with their options, where one of the same name is not all that fills a JSON.
RUNS = {name: [name] for name in ORDER} | {
    "testbed_defaults": ["testbed --defaults"],
    "hyperparameters": ["hyperparameters --rows 3000", "hyperparameters"],
    "variances": ["variances --large"],
    "taxi_million": ["taxi --million"],
    "matvec": [
        "matvec",
        "matvec --dims 1 2 3 8 20 90 --columns 1 4 11 16 --dtypes float32 --no-gradients --kernels rbf matern52",
        "matvec --memory",
    ],
}
CORES = {"scaling": 2, "faults": 2}  # they measure several processes; all others get one core
WHOLE = ("properties", "compiled")  # written at the end, so that there is nothing to resume


def state(name: str, folder: Path) -> str:
    """Return "current", "other code" of this version, "old" where a result is of an earlier one, or "missing"."""
    marks = measured_of(read_json(folder / f"{name}.json"))
    if not marks:
        return "missing"
    if {mark.split("+")[0] for mark in marks} != {sources().split("+")[0]}:
        return "old"
    return "current" if marks == {sources()} else "other code"


def run(name: str, fresh: bool, more: list[str]) -> str:
    """Run what fills one JSON; return "made" or what failed."""
    log = RESULTS / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        for number, command in enumerate(RUNS[name]):
            script, *options = command.split()
            whole = script in WHOLE  # has no results that could stay
            anew = [] if whole or (fresh and number) else ["--fresh" if fresh else "--renew"]  # later runs add
            arguments = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), *options, *anew]
            ended = subprocess.run([*arguments, *more], stdout=output, stderr=subprocess.STDOUT, check=False)
            if ended.returncode:
                return f"failed ({ended.returncode}), see {log}"
    return "made"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="tell how old the results are, and measure nothing")
    parser.add_argument("--resume", action="store_true", help="keep results of this version; measure what is missing")
    parser.add_argument("--only", nargs="+", choices=ORDER, default=ORDER, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="each small, into results/quick")
    options = parser.parse_args()
    folder = RESULTS / ("quick" * options.quick)
    if options.list:
        print(table(["result", "state"], [(name, state(name, folder)) for name in options.only]))
        return
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    done: list[tuple[str, str, str]] = []
    with contextlib.suppress(KeyboardInterrupt):
        for name in options.only:
            if name in WHOLE and options.resume and state(name, folder) in ("current", "other code"):
                continue
            if cores:
                os.sched_setaffinity(0, cores[-CORES.get(name, 1) :])  # inherited by the script
            print(f"{name} ...", flush=True)
            begun = time.perf_counter()
            outcome = run(name, not options.resume, ["--quick"] * options.quick)
            done.append((name, outcome, f"{time.perf_counter() - begun:,.0f}"))
            print(f"  {outcome}, {done[-1][2]} s", flush=True)
    print(table(["result", "outcome", "seconds"], done))
    sys.exit(any(outcome != "made" for _, outcome, _ in done))


if __name__ == "__main__":
    main()
