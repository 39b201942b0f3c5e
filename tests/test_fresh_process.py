"""What holds in a process that has just begun: one is started for all tests of this file."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel

import sketchgp
from gp_models import SOLVED, iterative, marginal, posterior, relative
from sketchgp.fingerprint import module_mark

START = """
import sys
import sketchgp
imported = set(sys.modules)  # before what the tests need
sys.path.insert(0, sys.argv[1])
from test_fresh_process import look
look(imported, sys.argv[2])
"""
RBF = SOLVED["scale-rbf-ard"]
MARKED = ScaleKernel(MaternKernel(nu=1.5))


def without_targets(model: Any, every: int) -> None:
    """Let each so many of the targets be missing from now on."""
    targets = model.train_targets.clone()
    targets[::every] = torch.nan
    model.set_train_data(targets=targets)


def of_missing_targets(model: Any, test: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return mean, variance, marginal likelihood and its gradients by GPyTorch alone."""
    model.train()
    torch.manual_seed(0)
    with (
        gpytorch.settings.max_cholesky_size(20),
        gpytorch.settings.observation_nan_policy("mask"),
        sketchgp.record_solves() as solves,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        value, gradient = marginal(model)
        found = [*posterior(model, test), value, *gradient.values()]
    assert not solves
    return found


def untouched() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Return a model of GPyTorch's that some targets are missing of, and its test inputs."""
    model, test = RBF.build()
    without_targets(model, 6)
    return model, test


def look(imported: set[str], directory: str) -> None:
    """Write what this process finds.

    :param imported: the modules that come with the package.
    """
    warnings.simplefilter("ignore")
    without_hook = of_missing_targets(*untouched())
    model, test, mean = torch.load(f"{directory}/model.pt", weights_only=False)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"), sketchgp.record_solves() as solves:
        off = relative(posterior(model, test)[0], mean)
    by = {report.preconditioner for report in solves}
    found = {"modules": imported, "mark": module_mark(MARKED), "without": without_hook, "off": off, "by": by}
    torch.save(found, f"{directory}/found.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("fresh")
    model, test = RBF.build()
    sketchgp.accelerate(model)
    without_targets(model, 5)
    with iterative(), gpytorch.settings.observation_nan_policy("mask"):
        mean, _ = posterior(model, test)
    model.train()
    torch.save((model, test, mean), directory / "model.pt")
    command = [sys.executable, "-c", START, str(Path(__file__).parent), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {**torch.load(directory / "found.pt", weights_only=False), "printed": done.stdout + done.stderr}


def test_importing_it_imports_no_extra_and_prints_nothing(found: dict[str, Any]) -> None:
    assert not {"botorch", "matplotlib", "pyarrow", "sklearn", "triton"} & found["modules"]
    assert found["printed"] == ""


def test_a_mark_is_the_same_in_every_process(found: dict[str, Any]) -> None:
    assert found["mark"] == module_mark(MARKED)


def test_an_untouched_model_where_nothing_was_accelerated(found: dict[str, Any]) -> None:
    """The hook for masked operators is the one thing that is not per instance: an untouched model gives the same bits
    with it, and what it gives in a process that has none."""
    plain, test = untouched()
    hooked = of_missing_targets(plain, test)
    sketchgp.accelerate(RBF.build()[0])
    for a, b, c in zip(hooked, found["without"], of_missing_targets(plain, test), strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_unpickling_alone_brings_everything(found: dict[str, Any]) -> None:
    """The hook for masked operators included."""
    assert found["off"] < 1e-6
    assert found["by"] == {"RPCholesky"}
