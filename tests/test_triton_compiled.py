"""The Triton kernels, compiled ahead of time for devices that are not there: they compile, and spill no registers."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "compiled.py"
TRITON = importlib.util.find_spec("triton")  # not imported here: tests of the engine choose its interpreter first


@pytest.mark.slow
def test_a_kernel_compiles_for_devices_that_are_not_there(tmp_path):
    if not SCRIPT.is_file():
        pytest.skip("the benchmarks are not beside the tests")
    if TRITON is None or TRITON.origin is None:
        pytest.skip("Triton is not installed")
    tools = Path(TRITON.origin).parent / "backends" / "nvidia" / "bin"
    if not all((tools / name).is_file() for name in ("ptxas", "cuobjdump")):
        pytest.skip("this Triton comes without the tools that make binaries and read them")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    found = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--capability", "90"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    rows = [ast.literal_eval(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert [row["capability"] for row in rows] == [9.0]
    for row in rows:
        assert row["precision"] == "float32" and row["spilled"] == 0
        assert 32 < row["registers"] <= 255  # an empty kernel, of one that needs too much, has a few
