"""Every script in examples/ runs to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = {  # arguments for a run of seconds
    "botorch_single_task.py": ["--points", "900"],
    "inducing_points.py": ["--rows", "2000"],
    "memmap_posterior_mean.py": ["--rows", "3000"],
    "random_feature_stream.py": ["--batches", "6"],
    "thompson_sampling.py": ["--points", "900", "--rounds", "1"],
}
EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def test_there_are_examples():
    assert EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(script, tmp_path):
    if "import botorch" in (text := script.read_text(encoding="utf-8")) or "from botorch" in text:
        pytest.importorskip("botorch", reason="BoTorch is not installed")
    # The examples are small: one thread is as fast as two, and much faster on a busy machine.
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *SMALL.get(script.name, [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    assert "ConvergenceWarning" not in done.stderr
