"""The steps of the commands: split the rows, tune on a subset, condition on all rows, predict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..accelerate import accelerate
from ..fit import fit
from ..interactive import shows_progress
from ..predict import predict
from ..random_streams import generator
from ..report import SolveReport, record_solves
from ..settings import Variance
from .regression import Regression, negative_log_density, rmse
from .results import PeakMemory, Row

__all__ = ["Outcome", "describe", "evaluate", "split_rows", "tune", "working"]


def split_rows(n: int, test_fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return random disjoint row numbers ``(train, test)``; the test part has ``round(n * test_fraction)`` rows."""
    order = torch.randperm(n, generator=generator(seed, "training and test rows"))
    size = round(n * test_fraction)
    return order[size:], order[:size]


def tune(
    x: Tensor,
    y: Tensor,
    kernel: str,
    subset: int,
    iterations: int,
    seed: int,
    lengthscale: float | None = None,
    every: float = 30.0,
) -> Regression:
    """Return a regression on all rows, its hyperparameters tuned on a random subset of them.

    :param x: ``(n, d)``, standardised.
    :param y: ``(n,)``, standardised.
    :param kernel: a key of ``regression.KERNELS``.
    :param subset: number of rows to tune on; all when n is not larger.
    :param iterations: the most steps of L-BFGS.
    :param seed: of the subset and of the probes.
    :param lengthscale: to start from, as of :class:`Regression`.
    :param every: seconds between two lines of progress.
    :returns: the model, accelerated, in eval mode and conditioned on all rows.
    """
    n = x.shape[0]
    rows = torch.randperm(n, generator=generator(seed, "rows to tune on"))[:subset]
    model = Regression(x[rows], y[rows], kernel, lengthscale)
    accelerate(model)
    which = f"a random subset of {len(rows):,} of the {n:,} training rows" if n > subset else f"all {n:,} training rows"
    print(f"tuning the hyperparameters by marginal likelihood on {which} ...")
    start = time.perf_counter()
    with working("fits to fewer rows, from several starts", every) as say:
        history = fit(
            model,
            iterations=iterations,
            seed=seed,
            callback=lambda step, loss: say(f"step {step} done, loss {loss:.3f} per row"),
        )
    print(
        f"  tuned on {which}: {len(history.losses)} steps ({history.reason}), loss {history.losses[0]:.3f} -> "
        f"{history.best_loss:.3f} per row, {time.perf_counter() - start:.0f} s"
    )
    for limit in (value for name, value in history.at_limits.items() if name.endswith("noise")):
        print(f"  the noise ended at its limit, {limit:g} of the target's variance: error bars may be too wide")
    model.set_train_data(x, y, strict=False)
    return model.eval()


@contextmanager
def working(what: str, every: float) -> Iterator[Callable[[str], None]]:
    """Print a line every so many seconds of the block, where no progress bar is seen: in a log, or through a pipe.

    :param what: the text of the line.
    :param every: seconds.
    :returns: what replaces the text.
    """
    if shows_progress(None):
        yield lambda text: None
        return
    texts, done, start = [what], threading.Event(), time.perf_counter()

    def report() -> None:
        while not done.wait(every):
            print(f"  ... {texts[-1]}, {time.perf_counter() - start:.0f} s")

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield lambda text: texts.__setitem__(0, text)
    finally:
        done.set()
        thread.join()


@dataclass(frozen=True)
class Outcome:
    """Predictions of test rows, ``mean`` and ``variance`` (noise included), both ``(m,)``, and their row.

    ``solve`` is the report of the mean's solve, None where GPyTorch factorised a small matrix;
    ``variance_check`` is ``(points, smallest, median, largest)`` ratio of low-rank to exact ``variance``, None
    where all are exact.
    """

    mean: Tensor
    variance: Tensor
    row: Row
    solve: SolveReport | None
    variance_check: tuple[int, float, float, float] | None


def evaluate(
    model: Regression,
    x: Tensor,
    y: Tensor,
    what: str,
    variance: Variance = "auto",
    rows_for_nll: int | None = None,
    every: float = 30.0,
) -> Outcome:
    """Predict test rows by an accelerated model, and return the row of the table with the predictions.

    :param model: accelerated, in eval mode.
    :param x: test features ``(m, d)``.
    :param y: test targets ``(m,)``.
    :param what: name of the row.
    :param variance: as in ``sketchgp.predict``; low-rank variances are compared with exact ones at a few
        rows.
    :param rows_for_nll: use only the first so many test rows for the NLL (for a comparison on the same rows).
    :param every: seconds between two lines of progress.
    """
    with PeakMemory() as memory, record_solves() as solves, working("the mean", every) as say:
        start = time.perf_counter()
        predict(model, x, variance=None)
        middle = time.perf_counter()
        say("variances")
        prediction = predict(model, x, variance=variance)
        end = time.perf_counter()
    solve = solves[0] if solves else None
    part = slice(rows_for_nll)
    assert prediction.observation_variance is not None
    row = Row(
        what=what,
        n=model.train_targets.shape[0],
        iterations=None if solve is None else solve.iterations,
        residual=None if solve is None else solve.max_residual,
        mean_seconds=middle - start,
        variance_seconds=end - middle,
        memory=memory.peak,
        rmse=rmse(prediction.mean, y),
        nll=negative_log_density(prediction.mean[part], prediction.observation_variance[part], y[part]),
    )
    check = None
    if prediction.variance_check is not None:
        compared = prediction.variance_check
        ratios = (compared[f"observation_{name}_ratio"] for name in ("min", "median", "max"))
        check = (compared["points"], *ratios)
    return Outcome(prediction.mean, prediction.observation_variance, row, solve, check)


def describe(outcome: Outcome) -> str:
    """Return indented lines on the solve and on the variances."""
    lines = []
    if outcome.solve is None:
        lines.append("  solved by GPyTorch's Cholesky factorisation, as it does for few rows")
    else:
        lines.append(f"  {outcome.solve}")
    if outcome.variance_check is not None:
        points, smallest, median, largest = outcome.variance_check
        lines.append(
            f"  variances: low-rank; predictive variance over that of exact solves at {points} test rows: "
            f"median {median:.2f}, from {smallest:.2f} to {largest:.2f}"
        )
    return "\n".join(lines)
