"""Independent measurements: true residuals, the work of GPyTorch's own CG, peak memory."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpytorch
import linear_operator
import torch
from torch import Tensor

from common import read_json


def true_residual(kernel: gpytorch.kernels.Kernel, x: Tensor, y: Tensor, noise: float, solution: Tensor) -> float:
    """``||y - (K + noise I) w|| / ||y||`` in float64, independently of any solver.

    K is formed from GPyTorch's kernel a few rows at a time (at most about 128 MB), never whole.

    Args:
        kernel: any GPyTorch kernel; used in a float64 copy.
        x: (n, d). y, solution: (n,).
    """
    exact = copy.deepcopy(kernel).double()
    x, y, w = x.detach().double(), y.detach().double().reshape(-1), solution.detach().double().reshape(-1)
    rows = max(1, int(1.6e7 // len(x)))
    squared = 0.0
    with torch.no_grad():
        for start in range(0, len(x), rows):
            part = slice(start, start + rows)
            product = exact(x[part], x).to_dense() @ w
            squared += float((y[part] - product - noise * w[part]).square().sum())
    return math.sqrt(squared) / float(y.norm())


@dataclass
class CountedSolve:
    """One call of GPyTorch's ``linear_cg``."""

    n: int
    columns: int
    products: int = 0  # matrix products, the one for the starting residual included
    history: list[float] = field(default_factory=list)  # recurrence residual, mean over columns; needs P
    seconds: float = 0.0

    @property
    def iterations(self) -> int:
        return max(0, self.products - 1)


@contextlib.contextmanager
def counted_gpytorch_cg() -> Iterator[list[CountedSolve]]:
    """Collect what every ``linear_cg`` run inside the block did; the arithmetic is left untouched.

    GPyTorch reports nothing about its solves, so the function's name in ``linear_operator.utils`` is
    replaced, for the time of the block, by one that counts the products and notes the norm of the
    residual each time the preconditioner is applied to it (once before the first iteration, then once
    at the end of each).
    """
    original = linear_operator.utils.linear_cg
    solves: list[CountedSolve] = []

    @functools.wraps(original)
    def counted(matmul_closure: Callable | Tensor, rhs: Tensor, *args: Any, **kwargs: Any) -> Any:
        product = matmul_closure.matmul if torch.is_tensor(matmul_closure) else matmul_closure
        record = CountedSolve(n=rhs.shape[-2] if rhs.dim() > 1 else len(rhs), columns=rhs[0].numel())
        preconditioner: Callable[[Tensor], Tensor] | None = kwargs.get("preconditioner")

        def multiply(vectors: Tensor) -> Tensor:
            record.products += 1
            return product(vectors)

        def precondition(residual: Tensor) -> Tensor:
            record.history.append(float(residual.norm(dim=-2).mean()))
            assert preconditioner is not None
            return preconditioner(residual)

        if preconditioner is not None:
            kwargs["preconditioner"] = precondition
        started = time.perf_counter()
        try:
            return original(multiply, rhs, *args, **kwargs)
        finally:
            record.seconds = time.perf_counter() - started
            solves.append(record)

    linear_operator.utils.linear_cg = counted
    try:
        yield solves
    finally:
        linear_operator.utils.linear_cg = original


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far, in MB (None where the system does not tell)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if platform.system() == "Darwin" else 2**10), 1)


def _status_mb(name: str) -> float | None:
    """An entry of Linux' account of this process, in MB."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(f"{name}:"):
                return round(float(line.split()[1]) / 2**10, 1)
    return None


def current_memory_mb() -> float | None:
    """Resident memory of this process now, in MB (None where the system does not tell)."""
    return _status_mb("VmRSS")


def high_water_mb() -> float | None:
    """Largest resident memory so far of this process alone, in MB.

    ``getrusage`` may count what the parent held when it started this one; Linux' own account does not.
    """
    return _status_mb("VmHWM") or peak_memory_mb()


def limit_process(seconds: int, gigabytes: int) -> None:
    """End this process after so many processor seconds, saying so; it cannot allocate more than so many gigabytes."""
    import resource

    def too_long(number: int, frame: Any) -> None:
        raise SystemExit(f"more than {seconds:,} processor seconds")

    signal.signal(signal.SIGXCPU, too_long)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, 2 * seconds))  # the second where a compiled loop hears no signal
    resource.setrlimit(resource.RLIMIT_DATA, (gigabytes * 2**30,) * 2)


def in_new_process(script: Path, task: dict[str, Any], data: Path, limit: float | None = None) -> dict[str, Any]:
    """What ``script --data DATA --task TASK ANSWER`` writes, in a process of its own, whose memory is its own too.

    ``{"failed": reason}`` where it did not end well, or not within ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, str(script), "--data", str(data), "--task", json.dumps(task), str(answer)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {limit:.0f} s"}
        if done.returncode:
            return {"failed": (done.stderr.strip() or f"ended with {done.returncode}").split("\n")[-1][:500]}
        return read_json(answer)
