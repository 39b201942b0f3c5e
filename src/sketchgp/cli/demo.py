"""``python -m sketchgp demo``: an exact GP on all of a real data set, beside GPyTorch's defaults."""

from __future__ import annotations

import argparse
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import gpytorch
import linear_operator
import torch
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor

from ..accelerate import accelerate
from ..datasets import load_diamonds
from ..devices import one_thread
from ..errors import ConvergenceWarning, InputError
from ..plotting import convergence
from ..random_streams import generator
from ..report import SolveReport
from ..settings import memory_budget
from ..solvers import ConjugateGradients, FullProblem
from ..style import COLORS, RING, new_figure
from .options import Output, claim
from .regression import (
    Regression,
    Row,
    Scaling,
    copy_hyperparameters,
    evaluate,
    format_table,
    scored,
    split_rows,
    true_residual,
    tune,
)

KERNEL = "matern52"
STORED_MATRIX = 2 * 2**30  # bytes one stored matrix may take: keeps the demo within 8 GB on any machine
PLAN = """An exact Gaussian process of the price of diamonds: {takes} on two idle cores.
  1. tune its hyperparameters on {tuning:,} rows
  2. predict from {comparison:,} rows by sketchgp{beside}
  3. predict from {train:,} rows by sketchgp, and draw how the solves converge"""
BESIDE = ", and by GPyTorch's defaults (a quarter of the time; --skip-gpytorch leaves them out)"
FOOTNOTES = """true residual: ||(K + noise I) w - (y - mean)|| / ||y - mean|| in float64, recomputed from the weights w.
mean s: seconds to the mean of all test rows. var. s: seconds for their variances on top
(sketchgp: low-rank, all {tests:,}; GPyTorch: exact, the first {variances} only).
RMSE: of the standardised target, where predicting the mean scores 1.
NLL: negative log predictive density a row, in nats, over the first {variances} test rows."""


Steps = list[tuple[float, float]]  # seconds and relative residual before the first iteration and after each


@dataclass(frozen=True)
class Sizes:
    """Sizes of a demo: rows of the data, of the tuning subset and of the comparison; steps of tuning."""

    takes: str
    rows: int
    tuning: int
    steps: int
    comparison: int
    variances: int
    plain_iterations: int


FULL = Sizes("five minutes or more", 53_940, 4_000, 200, 10_000, 100, 400)
DEFAULT = Sizes("under a minute", 16_000, 1_000, 60, 5_000, 50, 300)
QUICK = Sizes("some ten seconds", 2_000, 500, 20, 1_000, 20, 100)


def run(options: argparse.Namespace) -> None:
    """Run the command; see the module's docstring."""
    if not options.output.is_dir():
        raise InputError(f"--output {options.output}: no such folder")
    names = itertools.chain(["sketchgp-demo.png"], (f"sketchgp-demo-{number}.png" for number in itertools.count(2)))
    unused = next(path for name in names if not (path := options.output / name).exists())
    picture = claim(argparse.Namespace(output=unused, force=False), "output")
    assert picture is not None
    start = time.perf_counter()
    sizes = FULL if options.full else QUICK if options.quick else DEFAULT
    print(PLAN.format(**vars(sizes), train=sizes.rows * 9 // 10, beside="" if options.skip_gpytorch else BESIDE) + "\n")
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > (os.cpu_count() or 1) / 2
    with memory_budget(STORED_MATRIX), one_thread(busy):  # of two threads, each would wait for its core
        results = _run(sizes, options.seed, picture, options.skip_gpytorch)
    print(f"{time.perf_counter() - start:.0f} s in all\n\n{results}")


def _run(sizes: Sizes, seed: int, picture: Output, alone: bool) -> str:
    """Run the demo of some size, and return its results in a few lines.

    :param alone: whether GPyTorch's side is left out.
    """
    data = load_diamonds()
    rows = torch.randperm(len(data.y), generator=generator(seed, "rows of the demo"))[: sizes.rows]
    x, y = data.x[rows], data.y[rows].log()
    train, test = split_rows(len(y), 0.1, seed)
    scaling = Scaling.of(x[train], y[train], data.target_name)
    x, y = scaling.scale_x(x, torch.float32), scaling.scale_y(y, torch.float32)
    test_x, test_y = x[test], y[test]
    print(
        f"diamonds (bundled, {data.licence.split(',')[0]}): log(price) by {x.shape[1]} features, "
        f"{len(train):,} training and {len(test):,} test rows, standardised\n"
        "model: gpytorch.models.ExactGP, constant mean, Matern-5/2 with one lengthscale a feature, "
        f"float32, {torch.get_num_threads()} thread(s)"
    )
    model = tune(x[train], y[train], KERNEL, sizes.tuning, sizes.steps, seed)
    lengthscales = ", ".join(f"{value:.2g}" for value in model.covar_module.base_kernel.lengthscale.flatten().tolist())
    noise, scale = model.likelihood.noise.item(), model.covar_module.outputscale.item()
    print(f"  noise {noise:.2e}, output scale {scale:.2f}, lengthscales {lengthscales}")

    few = train[torch.randperm(len(train), generator=generator(seed, "fewer rows of the demo"))[: sizes.comparison]]
    print(f"sketchgp, on a random {len(few):,} of the training rows ...")
    faster = accelerate(copy_hyperparameters(model, x[few], y[few], KERNEL))
    part = evaluate(faster, test_x, test_y, "sketchgp", "low_rank", sizes.variances)
    residual = true_residual(faster, faster.prediction_strategy.mean_cache)
    part = replace(part, row=replace(part.row, residual=residual))
    print(part)
    default: Row | None = None
    steps: Steps = []
    if not alone:
        print("GPyTorch with its defaults, on the same rows ...")
        untouched = copy_hyperparameters(model, x[few], y[few], KERNEL)
        default, steps = evaluate_defaults(untouched, test_x, test_y, sizes.variances)
        print(f"  {default.iterations} iterations, {default.mean_seconds or 0:.1f} s to the mean")

    print(f"sketchgp, on all {len(train):,} training rows ...")
    full = evaluate(model, test_x, test_y, "sketchgp, all rows", "low_rank", sizes.variances)
    print(full)
    rows = torch.randperm(len(train), generator=generator(seed, "rows of the demo's check"))[:500]
    residual = true_residual(model, model.prediction_strategy.mean_cache, rows)
    print(
        f"  checked with GPyTorch's kernel in float64 on {len(rows)} random rows (a sample: a few rows can carry much "
        f"of it): residual {residual:.1e}\n\n"
        + format_table([part.row, *([] if default is None else [default]), full.row])
        + "\n"
        + FOOTNOTES.format(tests=len(test), variances=sizes.variances)
    )
    solves = [one.solve for one in (part, full) if one.solve is not None]
    drawn = _draw(picture, solves, default, steps, faster, sizes)
    return f"{_verdict([*([] if default is None else [default]), part.row], len(test), scaling.y_std)}\n{drawn}"


def _verdict(rows: Sequence[Row], tests: int, unit: float) -> str:
    """Return what to tell a colleague: a line for each library, below one that says what was done.

    :param tests: number of rows predicted; :param unit: deviation of the logarithms of the prices.
    """
    lines = [f"The same model from the same {rows[0].n:,} diamonds, for the prices of {tests:,} others:"]
    for row in rows:
        work = f"{row.iterations or 0:>3} iterations, {row.mean_seconds:.1f} s, true residual {row.residual:.1e}"
        lines.append(f"  {row.what:<19}  {work}, prices {(row.rmse or 0) * unit:.1%} off, NLL {row.nll:.1f}")
    return "\n".join(lines)


def _draw(
    picture: Output, solves: list[SolveReport], default: Row | None, steps: Steps, model: Regression, sizes: Sizes
) -> str:
    """Draw how the solves converge, and one without a preconditioner; return where that is.

    :param default: the row of GPyTorch's defaults, with the steps of their solve.
    :param model: the model on the rows of the comparison.
    """
    if find_spec("matplotlib") is None:
        return "no picture without matplotlib; with it: python -m pip install 'sketchgp[plot]'"
    print("drawing how the solves converge, and one without a preconditioner ...")
    solves = [*solves, _solve_plainly(model, gpytorch.settings.eval_cg_tolerance.value(), sizes)]
    figure = new_figure((11.5, 5.8), 150)
    axes = figure.subplots(1, 2, sharey=True)
    seconds, values = zip(*steps, strict=True) if steps else ((), ())
    for ax, x in ((axes[0], range(len(seconds))), (axes[1], seconds)):
        convergence(solves, ax, "iterations" if ax is axes[0] else "seconds").get_legend().remove()
        if default is not None:
            ax.plot(x, values, color=COLORS[-1], linewidth=1.8, label="GPyTorch")
            ax.plot(x[-1:], [default.residual][: len(x)], color=COLORS[-1], zorder=100, **RING)
        ax.set_xscale("log")
        ax.set_title("", loc="left")
    axes[1].set_ylabel("")
    names = [*(f"sketchgp, n = {one.n:,}" for one in solves[:-1]), f"without a preconditioner, n = {solves[-1].n:,}"]
    names += [] if default is None else [f"GPyTorch's defaults, n = {default.n:,}"]
    figure.legend(
        axes[0].get_legend_handles_labels()[0], names, loc="outside lower left", ncols=2, frameon=False, fontsize=9.5
    )
    title = f"diamonds, log(price), Matern-5/2 ARD, noise {model.likelihood.noise.item():.1e}: solves for the mean"
    figure.suptitle(f"{title}; ring: true residual at the end", fontsize=12, x=0.012, ha="left")
    with picture.open("wb") as file:
        figure.savefig(file, format="png")
    return f"picture: {picture.path.resolve()}"


def _solve_plainly(model: Regression, tol: float, sizes: Sizes) -> SolveReport:
    """Return the report of conjugate gradients without a preconditioner."""
    x, y = model.train_inputs[0], model.train_targets
    solver = ConjugateGradients(tol=tol, max_iterations=sizes.plain_iterations)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # expected, and shown in the picture
        problem = FullProblem(model.covar_module, x, y - model.mean_module(x), model.likelihood.noise.item())
        return solver.solve(problem, preconditioner=None).report


@contextmanager
def watch_linear_cg() -> Iterator[list[Steps]]:
    """Collect every solve by conjugate gradients that GPyTorch does in the block.

    Its seconds are those since the watch began, its residuals the means over the columns of those of the recurrence,
    the numbers that GPyTorch stops on.
    ``linear_cg`` applies its preconditioner to the residual once before the first and once in every
    iteration, so a wrapper around that preconditioner sees all residuals and changes nothing.
    """
    solves: list[Steps] = []
    start = time.perf_counter()
    original = linear_operator.utils.linear_cg

    def watched(*arguments: Any, **options: Any) -> Any:
        steps: Steps = []
        solves.append(steps)
        inner: Callable[[Tensor], Tensor] = options.pop("preconditioner", None) or torch.clone

        def preconditioner(residual: Tensor) -> Tensor:
            steps.append((time.perf_counter() - start, residual.norm(dim=-2).mean().item()))
            return inner(residual)

        return original(*arguments, preconditioner=preconditioner, **options)

    linear_operator.utils.linear_cg = watched
    try:
        yield solves
    finally:
        linear_operator.utils.linear_cg = original


@torch.no_grad()
def evaluate_defaults(model: Regression, x: Tensor, y: Tensor, rows_for_nll: int) -> tuple[Row, Steps]:
    """Return the row of the table for GPyTorch's defaults, and the steps of the solve of its mean.

    :param model: in eval mode, not accelerated, without cached predictions.
    :param x: test features ``(m, d)``; the mean is of all of them.
    :param y: test targets ``(m,)``.
    :param rows_for_nll: the variance is of the first so many, because each costs GPyTorch a column of its
        solve.
    """
    with watch_linear_cg() as solves, warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        times = [time.perf_counter()]
        with gpytorch.settings.skip_posterior_variances():  # spares one solve for each test row
            mean = model(x).mean
        times.append(time.perf_counter())
        variance = model.likelihood(model(x[:rows_for_nll])).variance
        times.append(time.perf_counter())
    row = scored("GPyTorch's defaults", model.train_targets.shape[0], y, mean, variance, times)
    residual = true_residual(model, model.prediction_strategy.mean_cache)
    steps = solves[0] if solves else []
    return replace(row, residual=residual, iterations=max(0, len(steps) - 1)), steps
