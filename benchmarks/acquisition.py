"""Seconds of one evaluation of an acquisition function, with its gradient: what keeping the solution is worth.

BoTorch's ``SingleTaskGP`` on random points of the unit cube in six dimensions, float64, one thread.
``LogExpectedImprovement`` at 10 points and its gradient there, 16 times at other points: processor seconds of the
first evaluation, of the first four together, and the median of the last ten.  The model is plain; accelerated; and
accelerated with its solution forgotten before each evaluation, as ``model.to(X)``, which such functions call, once did.

    python benchmarks/acquisition.py            # about three minutes on one core
    python benchmarks/acquisition.py --quick    # 1,000 points alone
    python benchmarks/acquisition.py --report   # the table again, nothing measured
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import sketchgp
from common import describe, number, table
from runner import Benchmark, Group

SIZES, EVALUATIONS, POINTS, DIMENSIONS = (1000, 2500, 4000), 16, 10, 6
WAYS = ("plain", "forgotten", "kept")


def build(n: int) -> Any:
    """A model in eval mode, its hyperparameters given."""
    from botorch.models import SingleTaskGP

    stream = torch.Generator().manual_seed(0)
    x = torch.rand(n, DIMENSIONS, generator=stream, dtype=torch.float64)
    y = torch.sin(3 * x).sum(-1, keepdim=True) + 0.05 * torch.randn(n, 1, generator=stream, dtype=torch.float64)
    model = SingleTaskGP(x, y)
    model.covar_module.lengthscale, model.likelihood.noise = 0.6, 2e-3
    return model.eval()


def perform(loaded: None, task: tuple[int, str]) -> dict[str, Any]:
    from botorch.acquisition import LogExpectedImprovement

    n, way = task
    model = build(n)
    if way != "plain":
        sketchgp.accelerate(model)
    acquisition = LogExpectedImprovement(model, best_f=model.train_targets.max())
    stream, seconds = torch.Generator().manual_seed(1), []
    for _ in range(EVALUATIONS):
        x = torch.rand(POINTS, 1, DIMENSIONS, generator=stream, dtype=torch.float64).requires_grad_()
        if way == "forgotten":
            model._clear_cache()
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            acquisition(x).sum().backward()
        seconds.append(time.process_time() - start)
    last = sorted(seconds[-10:])
    return {"first": seconds[0], "four": sum(seconds[:4]), "later": (last[4] + last[5]) / 2}


def groups(options: Any, directory: Path, results: dict[str, Any]) -> Iterator[Group]:
    for n in SIZES[:1] if options.quick else SIZES:
        yield Group(("runs",), [(f"{n}, {way}", (n, way)) for way in WAYS])


def report(results: dict[str, Any]) -> str:
    rows = [
        [*key.split(", "), *(number(entry[name]) for name in ("first", "four", "later"))]
        for key, entry in results["runs"].items()
    ]
    header = ["n", "model", "first evaluation", "first four", "a later one"]
    return "\n".join(
        [
            "# Acquisition functions",
            "",
            describe(results["machine"]),
            "",
            "Processor seconds.",
            "",
            table(header, rows),
            "",
        ]
    )


BENCHMARK = Benchmark(
    doc=__doc__,
    name="acquisition",
    quick="1,000 points alone",
    problem=lambda options: {"seed": 0, "evaluations": EVALUATIONS, "points": POINTS, "dimensions": DIMENSIONS},
    groups=groups,
    perform=perform,
    report=report,
)


if __name__ == "__main__":
    torch.set_num_threads(1)
    BENCHMARK.main()
