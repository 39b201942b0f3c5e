"""Every script in examples/ runs to its end, and draws what it says it can draw."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import gpytorch
import pytest

import sketchgp

SMALL = {  # arguments for a run of seconds
    "accelerate_existing_model.py": ["--rows", "300", "--iterations", "3"],
    "botorch_single_task.py": ["--points", "300", "--steps", "1"],
    "classification.py": ["--rows", "400", "--features", "256"],
    "compare_solvers.py": ["--rows", "300", "--seconds", "0.2"],
    "huge_mean.py": ["--rows", "1500", "--seconds", "0.1"],
    "inducing_points.py": ["--rows", "1050"],
    "memmap_posterior_mean.py": ["--rows", "1000"],
    "molecules.py": ["--rows", "300"],
    "random_feature_stream.py": ["--batches", "4"],
    "series_with_gaps.py": ["--hours", "300"],
    "sharded_training.py": ["--rows", "300", "--iterations", "2"],
    "spatial_map.py": ["--every", "8"],
    "stream_with_augmentation.py": ["--points", "150", "--batches", "2", "--epochs", "2"],
    "thompson_sampling.py": ["--points", "300", "--rounds", "1"],
    "tune_on_all_rows.py": ["--rows", "400", "--iterations", "4"],
}
EXAMPLES = sorted((Path(__file__).resolve().parents[1] / "examples").glob("*.py"))


def test_there_are_examples():
    assert {script.name for script in EXAMPLES} == set(SMALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("default", "error::sketchgp.ConvergenceWarning")
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(script, tmp_path, monkeypatch, capsys):
    """In this process, which has imported all that is needed: starting one takes longer than most of them."""
    text = script.read_text(encoding="utf-8")
    if re.search(r"^ *(from|import) botorch", text, flags=re.MULTILINE):
        pytest.importorskip("botorch", reason="BoTorch is not installed")  # before its defaults are overwritten
    arguments = list(SMALL[script.name])
    if picture := "--picture" in text:
        arguments += ["--picture", "picture.png"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    monkeypatch.setattr(gpytorch.settings.max_cholesky_size, "_global_value", 200)
    fit = sketchgp.fit
    monkeypatch.setattr(sketchgp, "fit", lambda *args, **options: fit(*args, **{**options, "iterations": 3}))
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert not picture or (tmp_path / "picture.png").stat().st_size > 3000
