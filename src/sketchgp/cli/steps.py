"""The steps of the commands: split the rows, tune on a subset, condition on all rows, predict, tabulate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..accelerate import accelerate
from ..fit import fit
from ..interactive import shows_progress
from ..memory import peak_memory
from ..predict import Prediction, predict
from ..random_streams import generator
from ..report import SolveReport, record_solves
from ..settings import Variance
from .regression import Regression, negative_log_density, rmse


@dataclass(frozen=True)
class Row:
    """One line of the table of results; None is shown as ``-``.

    ``mean_seconds`` is the time to the mean of all test rows (with the preconditioner's set-up),
    ``variance_seconds`` the time their variances take on top; ``memory`` is in bytes.
    """

    what: str
    n: int
    iterations: int | None = None
    residual: float | None = None
    mean_seconds: float | None = None
    variance_seconds: float | None = None
    memory: int | None = None
    rmse: float | None = None
    nll: float | None = None


_HEADINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "what": ("what", str),
    "n": ("n", "{:,}".format),
    "iterations": ("iterations", str),
    "residual": ("true residual", "{:.1e}".format),
    "mean_seconds": ("mean s", "{:.1f}".format),
    "variance_seconds": ("var. s", "{:.1f}".format),
    "memory": ("peak memory", lambda size: f"{size / 1e9:.2f} GB"),
    "rmse": ("RMSE", "{:.4f}".format),
    "nll": ("NLL", "{:.3f}".format),
}


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text under a header."""
    lines = [[heading for heading, _ in _HEADINGS.values()]]
    for row in rows:
        values = [(getattr(row, name), show) for name, (_, show) in _HEADINGS.items()]
        lines.append(["-" if value is None else show(value) for value, show in values])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines)


class PeakMemory:
    """Peak resident memory of this process within a ``with`` block: ``peak``, in bytes (None where unknown).

    On Linux a thread samples the resident set every 10 ms, so each phase gets its own peak. Elsewhere the
    process's high-water mark since its start is all there is.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.peak = _resident()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.peak is None:
            self.peak = peak_memory(torch.device("cpu")) or None

    def _sample(self) -> None:
        while self.peak is not None and not self._stop.wait(0.01):
            self.peak = max(self.peak, _resident() or 0)


def _resident() -> int | None:
    try:
        import resource

        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ImportError):
        return None


def measure(
    what: str,
    model: Regression,
    y: Tensor,
    predict_mean: Callable[[], Tensor],
    predict_variance: Callable[[], Tensor],
    rows_for_nll: int | None = None,
) -> Row:
    """Return the row of the table for two predictions of test rows, without the iterations and the residual.

    :param y: test targets ``(m,)``; :param predict_mean: of all of them.
    :param predict_variance: with the noise, of the first ``rows_for_nll`` rows at least.
    """
    with PeakMemory() as memory:
        start = time.perf_counter()
        mean = predict_mean()
        middle = time.perf_counter()
        variance = predict_variance()
        end = time.perf_counter()
    part = slice(rows_for_nll)
    return Row(
        what,
        model.train_targets.shape[0],
        mean_seconds=middle - start,
        variance_seconds=end - middle,
        memory=memory.peak,
        rmse=rmse(mean, y),
        nll=negative_log_density(mean[part], variance[part], y[part]),
    )


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

    ``solve`` is the report of the mean's solve, None where GPyTorch factorised a small matrix; ``variance_check``
    compares low-rank variances with exact ones, as :class:`~sketchgp.Prediction` does.
    """

    mean: Tensor
    variance: Tensor
    row: Row
    solve: SolveReport | None
    variance_check: dict[str, Any] | None

    def __str__(self) -> str:
        """Return indented lines on the solve and on the variances."""
        lines = [f"  {self.solve or 'solved by a Cholesky factorisation of GPyTorch, as it does for few rows'}"]
        if (check := self.variance_check) is not None:
            smallest, median, largest = (check[f"observation_{name}_ratio"] for name in ("min", "median", "max"))
            lines.append(
                "  variances: low-rank; predictive variance over that of exact solves at "
                f"{check['points']} test rows: median {median:.2f}, from {smallest:.2f} to {largest:.2f}"
            )
        return "\n".join(lines)


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
    :param variance: as in ``sketchgp.predict``; low-rank variances are compared with exact ones at a few rows.
    :param rows_for_nll: use only the first so many test rows for the NLL (for a comparison on the same rows).
    :param every: seconds between two lines of progress.
    """
    predictions: list[Prediction] = []

    def predict_with(variance: Variance | None) -> Tensor:
        say("the mean" if variance is None else "variances")
        predictions.append(predict(model, x, variance=variance))
        result = predictions[-1].mean if variance is None else predictions[-1].observation_variance
        assert result is not None
        return result

    with record_solves() as solves, working("the mean", every) as say:
        row = measure(what, model, y, lambda: predict_with(None), lambda: predict_with(variance), rows_for_nll)
    solve = solves[0] if solves else None
    if solve is not None:
        row = replace(row, iterations=solve.iterations, residual=solve.max_residual)
    final = predictions[-1]
    assert final.observation_variance is not None
    return Outcome(final.mean, final.observation_variance, row, solve, final.variance_check)
