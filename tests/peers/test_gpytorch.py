"""GPyTorch's own tests of exact models, with every one of these models accelerated.

The directory of a checkout of GPyTorch, of the version that is installed, is named by ``SKETCHGP_PEERS``; without it
nothing is run.  Each file of tests is run by pytest in a process of its own, where ``accelerating.py`` accelerates
every ``ExactGP`` at its first call.  What fails there must be in ``differences.py``, with the reason why it may differ,
or fail without sketchgp as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from differences import DIFFERENCES

CHECKOUT = os.environ.get("SKETCHGP_PEERS")
LIMIT = 900  # seconds for a file of tests
# pytest without the checkout's own gpytorch on the path, which has no version and may not be the installed one
_PYTEST = "import os, sys; sys.path = [p for p in sys.path if p not in ('', os.getcwd())]; import gpytorch, pytest; " \
    "sys.exit(pytest.main(sys.argv[1:]))"  # fmt: skip


def files() -> list[str]:
    """Those that name an exact model, relative to the checkout."""
    if not CHECKOUT:
        return ["test"]  # to be skipped
    root = Path(CHECKOUT)
    return sorted(
        str(path.relative_to(root)) for path in root.glob("test/**/test_*.py") if "ExactGP" in path.read_text("utf-8")
    )


def run(mode: str, names: list[str], results: Path) -> dict[str, str]:
    """What each test came to, by its pytest name: ``"passed"``, ``"skipped"`` or the message of its failure."""
    assert CHECKOUT is not None
    environment = dict(os.environ, SKETCHGP_PEERS_MODE=mode)
    here = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, "-c", _PYTEST, "-q", "-c", os.devnull, "--rootdir", ".", "-p", "accelerating",
         "-p", "no:cacheprovider", "-p", "no:xdist", "--junit-xml", str(results), *names],
        cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1, 5), done.stdout[-3000:] + done.stderr[-3000:]
    print(next((line for line in done.stdout.splitlines() if line.startswith("peers:")), ""))
    found = {}
    for case in ElementTree.parse(results).iter("testcase"):
        *folders, kind = case.get("classname", "").split(".")
        name = f"{'/'.join(folders)}.py::{kind}::{case.get('name')}"
        failure = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
        skipped = "skipped" if case.find("skipped") is not None else "passed"
        found[name] = skipped if failure is None else failure.get("message", "failed")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "iterative"])
@pytest.mark.parametrize("file", files())
def test_accelerated(file: str, mode: str, tmp_path: Path) -> None:
    if not CHECKOUT:
        pytest.skip("SKETCHGP_PEERS does not name a checkout of GPyTorch")
    found = run(mode, [file], tmp_path / "accelerated.xml")
    failed = {name: why for name, why in found.items() if why not in ("passed", "skipped")}
    known = DIFFERENCES[mode]
    new = [name for name in failed if name not in known]
    if new:  # which may fail without sketchgp too
        plain = run("plain", new, tmp_path / "plain.xml")
        new = [name for name in new if plain.get(name) == "passed"]
    print(f"{file}: {len(found)} tests, {len(failed)} differ")
    assert not new, "\n".join(f"{name}: {failed[name]}" for name in new)
