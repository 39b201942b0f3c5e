"""The table of results, with peak memory and an independently measured residual."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import gpytorch
import torch
from torch import Tensor

from ..memory import peak_memory

__all__ = ["PeakMemory", "Row", "format_table", "true_residual"]

_ROWS = 256  # of K formed at a time


@dataclass(frozen=True)
class Row:
    """One line of the table; None is shown as ``-``.

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


def format_table(rows: Sequence[Row]) -> str:
    """Return the rows as aligned text under a header."""

    def show(value: float | None, pattern: str) -> str:
        return "-" if value is None else format(value, pattern)

    header = ("what", "n", "iterations", "true residual", "mean s", "var. s", "peak memory", "RMSE", "NLL")
    cells = [
        (
            row.what,
            f"{row.n:,}",
            show(row.iterations, "d"),
            show(row.residual, ".1e"),
            show(row.mean_seconds, ".1f"),
            show(row.variance_seconds, ".1f"),
            "-" if row.memory is None else f"{row.memory / 1e9:.2f} GB",
            show(row.rmse, ".4f"),
            show(row.nll, ".3f"),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]

    def align(line: Sequence[str]) -> str:
        first, rest = line[0].ljust(widths[0]), zip(line[1:], widths[1:], strict=True)
        return "  ".join([first, *(cell.rjust(width) for cell, width in rest)])

    return "\n".join([align(header), "  ".join("-" * width for width in widths), *map(align, cells)])


class PeakMemory:
    """Peak resident memory of this process within a ``with`` block: ``peak``, in bytes (None where unknown).

    On Linux a thread samples the resident set every 10 ms, so each phase gets its own peak. Elsewhere the
    process's high-water mark since its start is all there is.
    """

    def __init__(self) -> None:
        self.peak: int | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self.peak = _resident()
        if self.peak is not None:
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        else:
            self.peak = peak_memory(torch.device("cpu")) or None

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak or 0, _resident() or 0)
            if self._stop.wait(0.01):
                return


def _resident() -> int | None:
    try:
        import resource

        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ImportError):
        return None


@torch.no_grad()
def true_residual(model: gpytorch.models.ExactGP, weights: Tensor, rows: Tensor | None = None) -> float:
    """``||(K + noise I) weights - (y - mean)|| / ||y - mean||`` in float64, from GPyTorch's kernel alone.

    :param model: a GP with constant noise, one output and training data ``(n, d)``.
    :param weights: ``(n,)``.
    :param rows: if given, both norms are over these rows only (a check by sample, for large n).
    """
    kernel = copy.deepcopy(model.covar_module).double()
    x = model.train_inputs[0].double()
    target = (model.train_targets - model.mean_module(model.train_inputs[0])).double()
    solution = weights.double()
    rows = torch.arange(x.shape[0]) if rows is None else rows
    noise = model.likelihood.noise.item()
    error = torch.zeros((), dtype=torch.float64)
    for part in rows.split(_ROWS):
        product = kernel(x[part], x).to_dense() @ solution + noise * solution[part]
        error += (product - target[part]).square().sum()
    return float(error.sqrt() / target[rows].norm())
