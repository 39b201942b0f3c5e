"""How much memory passes over tiles take, and what happens where there is none left: measured, in forked processes.

Run as a script, this file forks one process for each measurement: see :func:`_measure_all`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.kernels import CosineKernel, Kernel, MaternKernel, RBFKernel, ScaleKernel

import sketchgp
from forks import ended, fork, one_thread, run_script
from sketchgp import LaplaceKernel
from sketchgp.memory import available_memory
from sketchgp.operators import KernelMatrix, tiles

resource = pytest.importorskip("resource")  # not on Windows
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and limits address space"),
]


def _runs_out(kernel: Kernel, product: bool) -> dict[str, Any]:
    """A pass in tiles that do not fit into what the process may still take, and parts of which do."""
    n, lines = 2400, []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sketchgp").addHandler(handler)
    x, v, w = (torch.rand(n, t, dtype=torch.float64) for t in (3, 1, 1))

    def compute() -> torch.Tensor:
        operator = KernelMatrix.of(kernel.double(), x, engine="tiled")
        if product:
            return operator._matmul(v)
        return torch.cat([g.flatten() for g in operator._bilinear_derivative(v, w) if g is not None])

    wanted = compute()
    tiles._CPU_WIDTH = 10_000
    tiles._CPU_BYTES = tiles._CPU_MOST = 2**31
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 40 * 2**20, resource.RLIM_INFINITY))  # a tile takes 44
    found = compute()
    error = float((found - wanted).norm() / wanted.norm())
    return {"error": error, "lines": len(lines), "height": tiles.tile_shape(n, n, x.dtype, x.device)[0]}


def _solve(solver: Any, m: int) -> sketchgp.Solution:
    x, y = torch.randn(m, 2, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
    kernel = RBFKernel().double()
    if isinstance(solver, sketchgp.Cholesky):
        return solver.solve(sketchgp.FullProblem(kernel, x, y, 0.1))
    return solver.solve(sketchgp.InducingPointProblem(kernel, x, y, 0.1, x))


def _message(solver: Any, m: int) -> str | None:
    try:
        _solve(solver, m)
    except sketchgp.InputError as error:
        return str(error)
    return None


def _limits() -> dict[str, Any]:
    """What is taken for free under the limits of the process, and what solvers of too much say."""
    solvers = (sketchgp.Cholesky(), sketchgp.KRILL(), sketchgp.QR())
    for solver in solvers:
        _solve(solver, 50)
    found: dict[str, Any] = {}
    for name, kind in {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}.items():
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        used, free, before = int(lines[name].split()[0]) * 1024, available_memory(), resource.getrlimit(kind)
        resource.setrlimit(kind, (used + 400 * 2**20, before[1]))
        found[name] = (free, available_memory())
        if name == "VmData":
            resource.setrlimit(kind, before)
    found["refused"] = {solver.name: _message(solver, 6000) for solver in solvers}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sketchgp.memory.available_memory", lambda device: 2**40)
        found["failed"] = {solver.name: _message(solver, 8000) for solver in solvers}
    found["after"] = [_solve(solver, 50).report.converged for solver in solvers]
    return found


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _grown(work: Callable[[int], Any], small: int) -> dict[str, Any]:
    """Peak of resident memory beyond what the work on ``small`` rows takes, over that of the whole matrix."""
    n = 7000
    work(small)
    before = _peak()
    work(n)
    return {"share": (_peak() - before) / (4 * n * n)}


def _a_pass(kernel: Kernel, product: bool) -> dict[str, Any]:
    def work(n: int) -> Any:
        x, v = torch.rand(n, 3), torch.rand(n, 1)
        if not product:
            x.requires_grad_(True)
        operator = KernelMatrix.of(kernel, x, engine="tiled")
        return operator._matmul(v) if product else operator._bilinear_derivative(v, v)

    return _grown(work, 100)


class _Model(gpytorch.models.ExactGP):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = ScaleKernel(MaternKernel(nu=1.5, ard_num_dims=3))

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def _a_training_step() -> dict[str, Any]:
    def work(n: int) -> None:
        x = torch.rand(n, 3)
        model = _Model(x, x.sum(dim=1).sin())
        sketchgp.accelerate(model, sketchgp.RPCholesky(rank=30), matmul="tiled")
        mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
        with gpytorch.settings.max_cg_iterations(4), gpytorch.settings.num_trace_samples(4):
            (-mll(model(x), model.train_targets)).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    return _grown(work, 1000)


def _sum() -> Kernel:
    return ScaleKernel(RBFKernel(ard_num_dims=3)) + ScaleKernel(MaternKernel(nu=0.5) * LaplaceKernel())


RUN_OUT: dict[str, Callable[[], dict[str, Any]]] = {
    "product": lambda: _runs_out(MaternKernel(nu=1.5), True),
    "derivative": lambda: _runs_out(MaternKernel(nu=1.5), False),
    "derivative of a kernel that is called": lambda: _runs_out(CosineKernel(), False),
}
GROW: dict[str, Callable[[], dict[str, Any]]] = {
    "a product": lambda: _a_pass(ScaleKernel(RBFKernel(ard_num_dims=3)), True),
    "gradients of inputs": lambda: _a_pass(_sum(), False),
    "a training step": _a_training_step,
}


def _measure_all(directory: Path) -> None:
    """Writes what each found to a file of its name."""
    one_thread()
    for name, measure in {**RUN_OUT, **GROW, "limits": _limits}.items():

        def work(name: str = name, measure: Callable[[], dict[str, Any]] = measure) -> None:
            torch.manual_seed(0)
            (directory / name).write_text(json.dumps(measure()))

        assert ended(fork(work)) == 0, name


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("memory")
    run_script(__file__, directory)
    return {file.name: json.loads(file.read_text()) for file in directory.iterdir()}


@pytest.mark.parametrize("name", RUN_OUT)
def test_memory_that_runs_out(measured, name):
    """A tile of 2400 x 2400 does not fit into what the process may still take; a part of it does."""
    found = measured[name]
    assert found["error"] < 1e-12
    assert found["lines"] >= 1
    assert 100 < found["height"] < 2400


@pytest.mark.parametrize("name", GROW)
def test_a_part_of_the_matrix_at_a_time(measured, name):
    """33 MB are few beside the 196 of the matrix, and enough for some tiles."""
    assert 0 <= measured[name]["share"] < 1 / 6


def test_limits_of_the_process(measured):
    """They are seen; what does not fit is refused before it begins, and where that was not seen, the allocator's own
    error becomes one of ours."""
    found = measured["limits"]
    for name in ("VmData", "VmSize"):
        free, limited = found[name]
        assert free > 2**30 // 2, "too little memory for this test"
        assert 300 * 2**20 < limited <= 400 * 2**20
    for kind, words in (("refused", r"needs"), ("failed", r"ran out of memory: it needs about")):
        for name, message in found[kind].items():
            assert message is not None and message.startswith(f"{name}() for "), (kind, name, message)
            assert words in message and " GiB" in message and "; use " in message
    assert all("MiB are free" in message or "GiB are free" in message for message in found["refused"].values())
    assert found["after"] == [True] * 3


if __name__ == "__main__":
    _measure_all(Path(sys.argv[1]))
