"""GPyTorch's and BoTorch's own tests of exact models, with every one of these models accelerated.

``SKETCHGP_PEERS`` names a directory that holds checkouts of the installed versions, in ``gpytorch`` and ``botorch``;
what is not there is skipped.  Each file of tests is run by pytest in a process of its own, where ``accelerating.py``
accelerates every ``ExactGP`` at its first call.  A test that fails there must be in ``differences.py``, with the reason
why it may differ, or fail without sketchgp as well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from differences import DIFFERENCES, UNFINISHED

CHECKOUTS = Path(os.environ.get("SKETCHGP_PEERS") or os.devnull)
LIMIT = 1800  # seconds for a file of tests
EXACT = ("ExactGP", "SingleTaskGP", "MultiTaskGP", "MultiFidelityGP", "HigherOrderGP")  # one of them is in the file
FOLDERS = {  # of BoTorch those where models are conditioned or fitted, in place of hours of its optimisers
    "gpytorch": ("test",),
    "botorch": (
        "test/models", "test/posteriors", "test/acquisition", "test/sampling", "test/generation", "test/optim/closures",
        "test/optim/test_fit.py", "test/test_fit.py", "test/test_end_to_end.py",
    ),
}  # fmt: skip
# pytest without the checkout's own package on the path, which has no version and may not be the installed one
_PYTEST = "import os, sys; sys.path = [p for p in sys.path if p not in ('', os.getcwd())]; import gpytorch, pytest; " \
    "sys.exit(pytest.main(sys.argv[1:]))"  # fmt: skip


def files(peer: str) -> list[str]:
    """Return the files that name an exact model, relative to the checkout."""
    root = CHECKOUTS / peer
    found = [
        p for top in FOLDERS[peer] for p in ([root / top] if top.endswith(".py") else (root / top).rglob("test_*.py"))
    ]
    return sorted(
        str(path.relative_to(root))
        for path in found
        if path.exists() and any(name in path.read_text("utf-8") for name in EXACT)
    )


def run(peer: str, mode: str, names: list[str], results: Path) -> dict[str, str]:
    """Return what each test came to, by its pytest name: ``"passed"``, ``"skipped"`` or the message of its failure."""
    environment = dict(os.environ, SKETCHGP_PEER=peer, SKETCHGP_PEERS_MODE=mode)
    here = str(Path(__file__).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, environment.get("PYTHONPATH")]))
    for name in [name for name in environment if name.startswith("PYTEST_")]:
        del environment[name]
    done = subprocess.run(
        [sys.executable, "-c", _PYTEST, "-q", "-c", os.devnull, "--rootdir", ".", "-p", "accelerating",
         "-p", "no:cacheprovider", "-p", "no:xdist", "--junit-xml", str(results),
         *(f"--deselect={name}" for name in UNFINISHED.get(mode, ())), *names],
        cwd=CHECKOUTS / peer, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
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
@pytest.mark.parametrize(("peer", "file"), [(peer, file) for peer in FOLDERS for file in files(peer) or [""]])
def test_accelerated(peer: str, file: str, mode: str, tmp_path: Path) -> None:
    if not file:
        pytest.skip(f"SKETCHGP_PEERS does not name a directory with a checkout of {peer}")
    found = run(peer, mode, [file], tmp_path / "accelerated.xml")
    failed = {name: why for name, why in found.items() if why not in ("passed", "skipped")}
    known = DIFFERENCES[peer][mode]
    new = [name for name in failed if name not in known]
    if new:  # which may fail without sketchgp too
        plain = run(peer, "plain", new, tmp_path / "plain.xml")
        new = [name for name in new if plain.get(name) == "passed"]
    print(f"{file}: {len(found)} tests, {len(failed)} differ")
    assert not new, "\n".join(f"{name}: {failed[name]}" for name in new)
