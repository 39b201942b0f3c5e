"""``python -m sketchgp demo``: an exact GP on all of a real data set, beside GPyTorch's defaults."""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import gpytorch
import torch

from ..accelerate import accelerate
from ..datasets import load_diamonds
from ..errors import ConvergenceWarning, InputError
from ..plotting import Curve, plot_convergence
from ..random_streams import generator
from ..report import SolveReport
from ..settings import memory_budget
from ..solvers import ConjugateGradients, FullProblem
from .gpytorch_defaults import WatchedSolve, evaluate_defaults, solve_mean
from .outputs import Output, claim
from .regression import Regression, Scaling, copy_hyperparameters, negative_log_density
from .results import Row, format_table, true_residual
from .steps import Outcome, describe, evaluate, split_rows, tune

KERNEL = "matern52"
STORED_MATRIX = 2 * 2**30  # bytes one stored matrix may take: keeps the demo within 8 GB on any machine
BLUE, LIGHT_BLUE, ORANGE, GREY = "#1a5a99", "#62aee3", "#d95f02", "#8a8a8a"


@dataclass(frozen=True)
class Sizes:
    """How large a demo: rows of the data, of the tuning subset, of the comparison; steps of tuning."""

    rows: int
    tuning: int
    steps: int
    comparison: int
    variances: int
    plain_iterations: int


FULL = Sizes(rows=53_940, tuning=4_000, steps=200, comparison=10_000, variances=100, plain_iterations=400)
QUICK = Sizes(rows=2_000, tuning=500, steps=100, comparison=1_000, variances=50, plain_iterations=200)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="an exact GP on 48,546 diamonds: mean, variance, true residuals, and a picture",
        description=(
            "Tunes an ordinary GPyTorch ExactGP (Matern-5/2, one lengthscale a feature) on a random subset "
            "of the bundled diamonds data, conditions it on all training rows with sketchgp, and compares "
            "it with GPyTorch's defaults at a size at which those finish."
        ),
    )
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR", help="folder of the picture (here)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the subsets and the sketches (0)")
    parser.add_argument("--quick", action="store_true", help="2,000 rows only: a few seconds, nothing to conclude from")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the demo; see the module's docstring."""
    if not options.output.is_dir():
        raise InputError(f"--output {options.output}: no such folder")
    picture = claim(_unused(options.output), "--output", [], force=False)
    start = time.perf_counter()
    print(
        "a few seconds in all"
        if options.quick
        else "three to five minutes in all on two idle cores; each step says more"
    )
    with memory_budget(STORED_MATRIX):
        _run(QUICK if options.quick else FULL, options.seed, picture)
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


def _unused(folder: Path) -> Path:
    """The picture's file, numbered from the second demo on."""
    names = itertools.chain(["sketchgp-demo.png"], (f"sketchgp-demo-{number}.png" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / name).exists())


def _run(sizes: Sizes, seed: int, picture: Output) -> None:
    data = load_diamonds()
    rows = torch.randperm(len(data.y), generator=generator(seed, "rows of the demo"))[: sizes.rows]
    x, y = data.x[rows], data.y[rows].log()
    train, test = split_rows(len(y), 0.1, seed)
    scaling = Scaling.of(x[train], y[train], data.target_name)
    x, y = scaling.scale_x(x, torch.float32), scaling.scale_y(y, torch.float32)
    train_x, train_y, test_x, test_y = x[train], y[train], x[test], y[test]
    print(
        f"diamonds (bundled, {data.licence.split(',')[0]}): log(price) by {x.shape[1]} features, "
        f"{len(train):,} training and {len(test):,} test rows, standardised\n"
        "model: gpytorch.models.ExactGP, constant mean, Matern-5/2 with one lengthscale a feature, "
        f"float32, {torch.get_num_threads()} thread(s)"
    )

    model = tune(train_x, train_y, KERNEL, sizes.tuning, sizes.steps, seed)
    print(f"  {_hyperparameters(model)}")

    small = torch.randperm(len(train), generator=generator(seed, "fewer rows of the demo"))[: sizes.comparison]
    small_x, small_y = train_x[small], train_y[small]
    print(f"first, on a random {len(small):,} of the training rows, sketchgp and GPyTorch's defaults side by side")
    print("sketchgp ... (seconds)")
    faster = accelerate(copy_hyperparameters(model, small_x, small_y, KERNEL))
    part = evaluate(faster, test_x, test_y, "sketchgp", "low_rank", sizes.variances)
    part = replace(part, row=replace(part.row, residual=true_residual(faster, faster.prediction_strategy.mean_cache)))
    print(describe(part))
    print(f"GPyTorch with its defaults ... ({_at_most(part)})")
    untouched = copy_hyperparameters(model, small_x, small_y, KERNEL)
    default_row, default_solve = evaluate_defaults(untouched, test_x, test_y, sizes.variances)
    print(f"  {default_row.iterations} iterations, {_seconds(default_row):.1f} s")

    growth = (len(train) / len(small)) ** 2  # of everything: entries of K, and n r^2 with r a multiple of sqrt(n)
    estimate = _duration(growth * _seconds(part.row))
    print(f"sketchgp: conditioning on all {len(train):,} training rows ... (about {estimate})")
    whole = evaluate(model, test_x, test_y, "sketchgp, all rows", "low_rank", sizes.variances)
    print(describe(whole))
    print(_check_residual(model, seed))
    nll = negative_log_density(whole.mean, whole.variance, test_y)
    print(f"  on all {len(test):,} test rows: RMSE {whole.row.rmse:.4f}, NLL {nll:.3f} (standardised log(price))")

    print()
    print(format_table([part.row, default_row, whole.row]))
    print(_footnotes(sizes, len(test)))

    estimate = _duration(4 * (default_row.mean_seconds or 0.0))
    print(f"drawing how the solves converge, GPyTorch's to the same tolerance ... (about {estimate})")
    longer = copy_hyperparameters(model, small_x, small_y, KERNEL)
    tolerance = whole.solve.tol if whole.solve else 1e-3
    with gpytorch.settings.eval_cg_tolerance(tolerance):
        _, longer_solve = solve_mean(longer, test_x[:1])
    plain = _without_preconditioner(untouched, tolerance, sizes.plain_iterations)
    curves = _curves(whole, part, plain, default_row, default_solve, longer_solve)
    noise = model.likelihood.noise.item()
    title = f"diamonds, log(price), Matern-5/2 ARD, noise {noise:.1e}: solving for the posterior mean"
    default_tolerance = gpytorch.settings.eval_cg_tolerance.value()
    names = {
        f"sketchgp's\ntolerance {tolerance:g}": tolerance,
        f"GPyTorch's\ntolerance {default_tolerance:g}": default_tolerance,
    }
    with picture.errors():
        plot_convergence(picture.path, curves, title, names, picture.overwrite)
    print(f"picture: {picture.path}")
    print(_verdict(whole, part, default_row, scaling))


def _seconds(row: Row) -> float:
    return (row.mean_seconds or 0.0) + (row.variance_seconds or 0.0)


def _duration(seconds: float) -> str:
    """A rough time in words; an estimate that may be off by a factor of two on a busy machine."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _at_most(part: Outcome) -> str:
    """How long GPyTorch's solve of the same system may take: its limit of iterations, each as long as one of ours."""
    if part.solve is None or not part.solve.iterations:
        return "seconds"
    limit = gpytorch.settings.max_cg_iterations.value()
    return f"at most {_duration(limit * part.solve.seconds / part.solve.iterations)}, and as much again for variances"


def _hyperparameters(model: Regression) -> str:
    kernel = model.covar_module
    lengthscales = ", ".join(f"{value:.2g}" for value in kernel.base_kernel.lengthscale.flatten().tolist())
    return (
        f"noise {model.likelihood.noise.item():.2e}, output scale {kernel.outputscale.item():.2f}, "
        f"lengthscales {lengthscales}"
    )


def _check_residual(model: Regression, seed: int) -> str:
    rows = torch.randperm(model.train_targets.shape[0], generator=generator(seed, "rows of the demo's check"))[:500]
    residual = true_residual(model, model.prediction_strategy.mean_cache, rows)
    return (
        f"  checked with GPyTorch's kernel in float64 on {len(rows)} random rows "
        f"(a sample: a few rows can carry much of it): residual {residual:.1e}"
    )


def _footnotes(sizes: Sizes, tests: int) -> str:
    return (
        "true residual: ||(K + noise I) w - (y - mean)|| / ||y - mean|| in float64, recomputed from the "
        "weights w. mean s: seconds to the mean of all test rows.\n"
        f"var. s: seconds for their variances on top (sketchgp: low-rank, all {tests:,}; GPyTorch: exact, "
        f"the first {sizes.variances} only). peak memory: of the process, in that row's phase.\n"
        "RMSE: of the standardised target, where predicting the mean scores 1. NLL: negative log "
        f"predictive density a row, in nats, over the first {sizes.variances} test rows."
    )


def _without_preconditioner(model: Regression, tol: float, max_iterations: int) -> SolveReport:
    train_x, train_y = model.train_inputs[0], model.train_targets
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # expected, and shown in the picture
        problem = FullProblem(
            model.covar_module, train_x, train_y - model.mean_module(train_x), model.likelihood.noise.item()
        )
        return ConjugateGradients(tol=tol, max_iterations=max_iterations).solve(problem, preconditioner=None).report


def _curves(
    whole: Outcome,
    part: Outcome,
    plain: SolveReport,
    default_row: Row,
    default_solve: WatchedSolve | None,
    longer: WatchedSolve | None,
) -> list[Curve]:
    curves = []  # those of one n first; all rows are another problem, drawn apart
    if part.solve is not None:
        curves.append(_curve(part.solve, _named(part.solve), BLUE))
    if default_solve is not None:
        curves.append(
            Curve(
                f"GPyTorch, its defaults, n = {part.row.n:,}",
                default_solve.residuals,
                default_solve.seconds,
                ORANGE,
                true_residual=default_row.residual,
            )
        )
    if default_solve is not None and longer is not None and longer.iterations > default_solve.iterations:
        stop = default_solve.iterations  # the longer solve repeats the default's and goes on: draw what it adds
        shift = default_solve.seconds[stop] - longer.seconds[stop]
        curves.append(
            Curve(
                f"GPyTorch, going on to sketchgp's tolerance, n = {part.row.n:,}",
                longer.residuals[stop:],
                [seconds + shift for seconds in longer.seconds[stop:]],
                ORANGE,
                "--",
                start=stop,
            )
        )
    curves.append(_curve(plain, f"no preconditioner, n = {plain.n:,}", GREY))
    if whole.solve is not None:
        curve = _curve(whole.solve, _named(whole.solve), LIGHT_BLUE)
        curves.append(replace(curve, style=":", caption=f"all {whole.solve.n:,} rows,\nsketchgp only"))
    return curves


def _named(report: SolveReport) -> str:
    return f"sketchgp, {report.preconditioner} of rank {report.rank:,}, n = {report.n:,}"


def _curve(report: SolveReport, label: str, color: str) -> Curve:
    """A solve's residuals against time, which is interpolated: all iterations cost the same."""
    residuals = report.history.max(dim=-1).values.tolist()
    steps = max(len(residuals) - 1, 1)
    seconds = [report.setup_seconds + report.seconds * k / steps for k in range(len(residuals))]
    # A step up from below the tolerance: the recurrence's residual was checked in float64 and found too small.
    corrected = [k for k in range(1, len(residuals)) if residuals[k - 1] <= report.tol < residuals[k]]
    note = (corrected[0], "checked in float64:\nwent on") if corrected and report.rank > 0 else None
    return Curve(label, residuals, seconds, color, true_residual=report.max_residual, note=note)


def _verdict(whole: Outcome, part: Outcome, default: Row, scaling: Scaling) -> str:
    """One sentence of result, from the numbers of this run, whichever way they fall."""
    row = whole.row
    error = 100 * (row.rmse or 0.0) * scaling.y_std
    solved = "solved" if whole.solve is None or whole.solve.converged else "not solved to its tolerance"
    sentence = (
        f"Result: the exact GP on all {row.n:,} rows was {solved} in {row.mean_seconds:.0f} s"
        + (f" ({row.iterations} iterations, true residual {row.residual:.1e})" if row.iterations is not None else "")
        + f" and predicts a diamond's price to about {error:.1f}% (RMSE {row.rmse:.4f}, against "
        f"{part.row.rmse:.4f} with {part.row.n:,} rows)"
    )
    if part.row.iterations is not None and default.iterations is not None:
        sentence += (
            f"; on those {default.n:,} rows GPyTorch's defaults took {default.iterations} iterations and "
            f"{default.mean_seconds:.1f} s to residual {default.residual:.1e}, sketchgp "
            f"{part.row.iterations} iterations and {part.row.mean_seconds:.1f} s to {part.row.residual:.1e}"
        )
    return sentence + "."
