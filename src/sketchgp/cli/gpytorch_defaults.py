"""The same model under GPyTorch's own defaults, watched: its iterations, residuals and times."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import gpytorch
import linear_operator
import torch
from torch import Tensor
from tqdm import tqdm

from .regression import Regression, negative_log_density, rmse
from .results import PeakMemory, Row, true_residual

__all__ = ["WatchedSolve", "evaluate_defaults", "solve_mean", "watch_linear_cg"]


@dataclass
class WatchedSolve:
    """One call of ``linear_operator.utils.linear_cg``.

    ``residuals[k]`` is the mean over the columns of the relative residual of GPyTorch's recurrence after k
    iterations (the number that it stops on), ``seconds[k]`` the time since the watch began.
    """

    columns: int
    residuals: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def iterations(self) -> int:
        return len(self.residuals) - 1


@contextmanager
def watch_linear_cg(name: str = "GPyTorch") -> Iterator[list[WatchedSolve]]:
    """Collect every solve by conjugate gradients that GPyTorch does in the block.

    ``linear_cg`` applies its preconditioner to the residual once before the first and once in every
    iteration, so a wrapper around that preconditioner sees all residuals and changes nothing.

    :param name: shown beside the progress bar.
    """
    solves: list[WatchedSolve] = []
    start = time.perf_counter()
    original = linear_operator.utils.linear_cg

    def watched(matmul_closure: Any, rhs: Tensor, *rest: Any, **options: Any) -> Any:
        solve = WatchedSolve(columns=rhs.shape[-1] if rhs.dim() > 1 else 1)
        solves.append(solve)
        inner: Callable[[Tensor], Tensor] | None = options.pop("preconditioner", None)
        with tqdm(desc=f"{name}, {solve.columns} column(s)", unit=" iterations", disable=None, leave=False) as bar:

            def preconditioner(residual: Tensor) -> Tensor:
                solve.residuals.append(residual.norm(dim=-2).mean().item())
                solve.seconds.append(time.perf_counter() - start)
                bar.set_postfix_str(f"residual {solve.residuals[-1]:.1e}", refresh=False)
                bar.update()
                return residual.clone() if inner is None else inner(residual)

            return original(matmul_closure, rhs, *rest, preconditioner=preconditioner, **options)

    linear_operator.utils.linear_cg = watched
    try:
        yield solves
    finally:
        linear_operator.utils.linear_cg = original


@torch.no_grad()
def solve_mean(model: Regression, x: Tensor) -> tuple[Tensor, WatchedSolve | None]:
    """The posterior mean ``(m,)`` of test rows ``x`` ``(m, d)`` by GPyTorch alone, and the solve behind it.

    ``skip_posterior_variances`` spares GPyTorch one solve for each test row, which its ``model(x)`` does
    otherwise.
    """
    with (
        watch_linear_cg() as solves,
        warnings.catch_warnings(),
        gpytorch.settings.skip_posterior_variances(),
    ):
        warnings.simplefilter("ignore", linear_operator.utils.warnings.NumericalWarning)
        mean = model(x).mean
    return mean, solves[0] if solves else None


@torch.no_grad()
def evaluate_defaults(model: Regression, x: Tensor, y: Tensor, rows_for_nll: int) -> tuple[Row, WatchedSolve | None]:
    """The row of the table for GPyTorch's defaults, and the solve of its mean.

    :param model: in eval mode, not accelerated, without cached predictions.
    :param x: test features ``(m, d)``; the mean is of all of them.
    :param y: test targets ``(m,)``.
    :param rows_for_nll: the variance is of the first so many, because each costs GPyTorch a column of its
        solve.
    """
    with PeakMemory() as memory:
        start = time.perf_counter()
        mean, solve = solve_mean(model, x)
        middle = time.perf_counter()
        with watch_linear_cg("GPyTorch, variances"), warnings.catch_warnings():
            warnings.simplefilter("ignore", linear_operator.utils.warnings.NumericalWarning)
            variance = model.likelihood(model(x[:rows_for_nll])).variance
        end = time.perf_counter()
    row = Row(
        what="GPyTorch's defaults, the same",
        n=model.train_targets.shape[0],
        iterations=None if solve is None else solve.iterations,
        residual=true_residual(model, model.prediction_strategy.mean_cache),
        mean_seconds=middle - start,
        variance_seconds=end - middle,
        memory=memory.peak,
        rmse=rmse(mean, y),
        nll=negative_log_density(mean[:rows_for_nll], variance, y[:rows_for_nll]),
    )
    return row, solve
