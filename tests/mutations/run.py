"""Break the package one line at a time, in a copy, and see whether the tests notice.

    python tests/mutations/run.py [--only WORD] [--jobs 2] [--limit SECONDS_EACH]
    python tests/mutations/run.py --check

For every break of ``breaks.py`` the tests that it names are run; pytest has to fail. At the end come the counts and the
breaks that survived. The exit status is 1 if less than 95% were caught. ``--check`` runs nothing: it only looks whether
every break still fits its file. The tests must pass without a break: else all breaks look caught.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from breaks import BREAKS, SOURCE, Break, faults

ROOT = SOURCE.parents[1]
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "CONTRIBUTING.md")
WANTED = 0.95
CAUGHT, SURVIVED, SLOW, FAULTY = "caught", "SURVIVED", "OUT OF TIME", "ERROR"
STATUSES = {0: SURVIVED, 1: CAUGHT}  # of pytest; 2 to 5 are interrupted, internal, usage, nothing collected


def copy(to: Path) -> None:
    """The repository, as far as tests read it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).is_file():
            shutil.copy(ROOT / name, to / name)


def tried(one: Break, place: Path, limit: float) -> tuple[str, str]:
    """Return the outcome of a break made in the copy at ``place`` and the test that saw it, and restore the file."""
    (path,) = one.places(place / "src" / "sketchgp")
    whole = path.read_text(encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header"]
    command += [f"tests/{test}" for test in one.tests]
    environment = {**os.environ, "PYTHONPATH": str(place / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    try:
        path.write_text(whole.replace(one.old, one.new), encoding="utf-8")
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # with what the tests have started
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return SLOW, f"after {limit:.0f} s"
            raise
    finally:
        path.write_text(whole, encoding="utf-8")
    verdict = STATUSES.get(process.returncode, FAULTY)
    seen = re.search(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    if verdict == FAULTY:
        return verdict, f"status {process.returncode}: {text.strip()[-500:]}"
    return verdict, seen.group(1) if seen else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the package one line at a time; the tests have to notice.")
    parser.add_argument("--only", default="", metavar="WORD", help="breaks with this in their file, text or reason")
    parser.add_argument("--jobs", type=int, default=2, help="breaks tried at once, each in a copy of its own")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS_EACH", help="time for one break")
    parser.add_argument("--check", action="store_true", help="look whether every break fits its file; run nothing")
    options = parser.parse_args()
    wrong = faults(BREAKS)
    print("\n".join(wrong) or f"{len(BREAKS)} breaks fit their files")
    if wrong or options.check:
        return bool(wrong)
    chosen = [one for one in BREAKS if options.only in f"{one.places()} {one.old} {one.tests} {one.why}"]
    outcomes: list[tuple[Break, str, str]] = []
    with tempfile.TemporaryDirectory(prefix="breaks-") as directory:
        places: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(max(1, options.jobs)):
            place = Path(directory) / str(number)
            place.mkdir()
            copy(place)
            places.put(place)
        stopped = threading.Event()

        def attempt(one: Break) -> tuple[Break, str, str, float]:
            if stopped.is_set():
                return one, "", "", 0.0
            place, start = places.get(), time.perf_counter()
            try:
                return one, *tried(one, place, options.limit), time.perf_counter() - start
            finally:
                places.put(place)

        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            running = [pool.submit(attempt, one) for one in chosen]
            try:
                for future in as_completed(running):
                    one, verdict, detail, seconds = future.result()
                    outcomes.append((one, verdict, detail))
                    count = f"{len(outcomes):3}/{len(chosen)}"
                    print(f"{count} {verdict} in {seconds:.0f} s: {one.why} {detail}", flush=True)
            except KeyboardInterrupt:
                stopped.set()
                print("stopping; what was tried so far:")
    return summary(outcomes)


def summary(outcomes: list[tuple[Break, str, str]]) -> int:
    """Print the counts and what was not caught; the exit status."""
    counts = {kind: [o for o in outcomes if o[1] == kind] for kind in (CAUGHT, SURVIVED, SLOW, FAULTY)}
    share = len(counts[CAUGHT]) / max(1, len(outcomes))
    print(f"\n{len(outcomes)} tried: " + ", ".join(f"{len(found)} {kind}" for kind, found in counts.items()))
    print(f"{share:.1%} caught, at least {WANTED:.0%} expected")
    for kind in (SURVIVED, SLOW, FAULTY):
        for one, _, detail in counts[kind]:
            print(f"\n{kind}: {one.why}\n  - {one.old}\n  + {one.new}")
            print(f"  tests: {', '.join(one.tests)} {detail}")
    return share < WANTED


if __name__ == "__main__":
    sys.exit(main())
