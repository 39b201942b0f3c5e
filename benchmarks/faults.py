"""Ranks that are killed at random moments under ``torchrun --max-restarts``: what is lost, and what comes out.

Two ranks of one thread each solve inside ``sharded()`` with a checkpoint, written ten times a second at most.  At
random moments after both have begun, one of them, by chance, is killed by SIGKILL, until each solve was hit five times;
torchrun starts both again each time.  What comes out is compared, bit by bit, with what two ranks find that nobody
kills; and with what one rank and three find that go on from a copy of the checkpoint as it was at the third kill.
Inputs are normal numbers, 4 features, Matern-3/2, float64.

    python benchmarks/faults.py            # a quarter of an hour on two cores; resumes
    python benchmarks/faults.py --quick    # one kill of each
    python benchmarks/faults.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel
from torch import Tensor

import sketchgp
from common import describe, median, table
from rank_processes import one_thread_environment
from runner import Benchmark, Group
from sketchgp import tensor_file
from sketchgp.distributed import sharded

RANKS, OTHERS, KILLS, FEATURES, EVERY, SEED = 2, (1, 3), 5, 4, 0.1, 0
# So many that set-up is short beside the steps, and most kills find a checkpoint.
ROWS = {"ConjugateGradients": 1500, "ASkotch": 3000, "EigenPro4": 40_000, "fit": 3000}
LIMIT = 1200  # seconds that one launch may take
HERE = Path(__file__).resolve()


# ------------------------------------------------------------------------------- what a rank does
def _data(name: str) -> tuple[Any, Tensor, Tensor]:
    stream, n = torch.Generator().manual_seed(0), ROWS[name]
    x = torch.randn(n, FEATURES, generator=stream, dtype=torch.float64)
    y = x.sum(dim=1).sin() + 0.1 * torch.randn(n, generator=stream, dtype=torch.float64)
    kernel = ScaleKernel(MaternKernel(nu=1.5)).double()
    kernel.base_kernel.lengthscale = 2.0
    return kernel, x, y


class _Model(gpytorch.models.ExactGP):
    def __init__(self, kernel: Any, x: Tensor, y: Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

    def forward(self, x: Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def solved(name: str, saved: dict[str, Any]) -> Tensor:
    kernel, x, y = _data(name)
    if name == "fit":
        model = sketchgp.accelerate(_Model(kernel, x, y).double())
        sketchgp.fit(model, objective="probes", start="model", progress=False, **saved)
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    if name == "EigenPro4":
        problem = sketchgp.InducingPointProblem(kernel, x, y, 1e-2, x[:300].clone())
        return sketchgp.EigenPro4(epochs=60, patience=None, **saved).solve(problem).value
    problem = sketchgp.FullProblem(kernel, x, y, 1e-3)
    if name == "ASkotch":
        return sketchgp.ASkotch(tol=1e-14, max_passes=60, block_size=150, **saved).solve(problem).value
    solver = sketchgp.ConjugateGradients(tol=1e-10, **saved)
    return solver.solve(problem, preconditioner=sketchgp.RPCholesky(rank=60), matmul="tiled").value


def work(name: str, path: str, folder: Path) -> None:
    """Of a rank: solve, say when it began, and keep what came out."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with sharded() as shards:
        began = folder / f"began-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{shards.rank}"
        began.with_suffix(".partial").write_text(str(os.getpid()))
        began.with_suffix(".partial").rename(began)
        clock = time.perf_counter()
        value = solved(name, {"checkpoint": path, "every": EVERY} if path else {})
        if shards.rank == 0:
            tensor_file.save(folder / "value", {"seconds": time.perf_counter() - clock}, {"value": value})


# ------------------------------------------------------------------------------- what starts and kills them
class Launch:
    """One ``torchrun``, in a folder of its own."""

    def __init__(self, name: str, ranks: int, path: Path | str, folder: Path, restarts: int = 0) -> None:
        folder.mkdir()
        self.folder, self.ranks = folder, ranks
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={restarts}", str(HERE), "work", name, str(path), str(folder)]  # fmt: skip
        self.log = (folder / "log").open("w")
        environment = one_thread_environment(HERE)
        self.process = subprocess.Popen(command, env=environment, stdout=self.log, stderr=subprocess.STDOUT)

    def began(self, restart: int) -> list[int] | None:
        """The process ids of all ranks, once they have begun after so many restarts; None where they never do."""
        files = [self.folder / f"began-{restart}-{rank}" for rank in range(self.ranks)]
        limit = time.perf_counter() + LIMIT
        while not all(file.exists() for file in files):
            if self.process.poll() is not None:
                return None
            if time.perf_counter() > limit:
                raise RuntimeError(f"no ranks after {LIMIT} s, see {self.folder / 'log'}")
            time.sleep(0.01)
        return [int(file.read_text()) for file in files]

    def value(self) -> tuple[Tensor, float]:
        """What came out, and seconds that the last start took."""
        status = self.process.wait(timeout=LIMIT)
        self.log.close()
        if status:
            raise RuntimeError(f"torchrun ended with {status}: {(self.folder / 'log').read_text()[-2000:]}")
        described, tensors = tensor_file.load(self.folder / "value")
        return tensors["value"], described["seconds"]


def _steps(path: Path) -> int:
    """How far a checkpoint has come: steps of a solve, evaluations of a fit."""
    if not path.exists():
        return 0
    header, tensors = tensor_file.load(path)
    if "method" in header["state"]:
        return header["state"]["method"]["iterations"]
    return sum(len(tensor) for name, tensor in tensors.items() if name.endswith(".points"))


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def perform(loaded: Any, task: tuple[str, int]) -> dict[str, Any]:
    name, kills = task
    chance, moments, values = random.Random(f"{SEED} {name}"), list[dict[str, Any]](), list[Tensor]()
    with tempfile.TemporaryDirectory() as directory:
        top = Path(directory)
        expected, seconds = Launch(name, RANKS, "", top / "expected").value()
        copy = top / "copy"
        while len(moments) < kills:  # anew where it came to its end before
            path, number = top / f"{len(values)}.pt", len(values)
            launch, restart = Launch(name, RANKS, path, top / f"launch {number}", kills), 0
            back = None
            while len(moments) < kills and (pids := launch.began(restart)) is not None:
                if back is not None:
                    moments[-1]["back_after"] = time.perf_counter() - back
                rank, wait = chance.randrange(RANKS), chance.uniform(0, 1.5 * seconds / kills)
                time.sleep(wait)
                if (launch.folder / "value").exists():
                    break
                os.kill(pids[rank], signal.SIGKILL)
                back = time.perf_counter()
                while not all(_gone(pid) for pid in pids):
                    time.sleep(0.01)
                ended = time.perf_counter() - back
                moments.append({"rank": rank, "after": wait, "steps_kept": _steps(path), "others_ended_after": ended})
                if len(moments) == (kills + 1) // 2 and path.exists():
                    shutil.copy(path, copy)
                restart += 1
            if back is not None and launch.began(restart) is not None:
                moments[-1]["back_after"] = time.perf_counter() - back
            values.append(launch.value()[0])
        if not copy.exists():
            shutil.copy(path, copy)
        others = {}
        for ranks in OTHERS:
            taken = top / f"copy of {ranks}.pt"
            shutil.copy(copy, taken)
            found = Launch(name, ranks, taken, top / f"{ranks} ranks").value()[0]
            others[str(ranks)] = float((found - expected).norm() / expected.norm())
    return {
        "rows": ROWS[name],
        "seconds": seconds,
        "kills": moments,
        "launches": len(values),
        "same_bits": all(torch.equal(value, expected) for value in values),
        "others": others,
    }


# ------------------------------------------------------------------------------- reports
def report(results: dict[str, Any]) -> str:
    rows = []
    for name, run in results["runs"].items():
        kept = ", ".join(str(one["steps_kept"]) for one in run["kills"])
        ended = max(one["others_ended_after"] for one in run["kills"])
        back = median([one.get("back_after") for one in run["kills"]])
        rows.append([name, f"{run['rows']:,}", f"{run['seconds']:.1f}", len(run["kills"]), kept, f"{ended:.1f}",
                     f"{back:.1f}", "the same" if run["same_bits"] else "OTHER",
                     *(f"{run['others'][str(ranks)]:.0e}" for ranks in OTHERS)])  # fmt: skip
    header = ["work", "rows", "seconds", "kills", "steps in the file", "all ended, s", "all back, s", "bits at the end",
              *(f"by {ranks} rank(s)" for ranks in OTHERS)]  # fmt: skip
    note = (
        "Seconds of the solve that nobody killed, by the clock; steps that the checkpoint held after each kill; "
        "seconds from a kill until no rank of that start was left, at most, and until all had begun again, in the "
        "median, most of which is Python importing torch. The last columns are relative differences from what ranks "
        "find that nobody kills, of other numbers of ranks that went on from the same checkpoint."
    )
    return "\n".join(
        ["# Ranks that are killed", "", describe(results["machine"]), "", note, "", table(header, rows), ""]
    )


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    kills = problem(options)["kills"]
    yield Group(("runs",), [(name, (name, kills)) for name in ROWS])


def problem(options: Any) -> dict[str, Any]:
    return {"ranks": RANKS, "kills": 1 if options.quick else KILLS, "rows": ROWS, "every": EVERY, "seed": SEED}


BENCHMARK = Benchmark(
    __doc__ or "",
    "faults",
    "one kill of each",
    problem,
    groups,
    perform,
    report,
    say=lambda run: f"{len(run['kills'])} kills, {'the same bits' if run['same_bits'] else 'OTHER BITS'}",
    reads_data=lambda options: False,
)  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    else:
        BENCHMARK.main()
