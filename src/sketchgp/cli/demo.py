"""``python -m sketchgp demo``: an exact GP on all of a real data set, beside GPyTorch's defaults."""

from __future__ import annotations

import argparse
import itertools
import time
import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
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
from .gpytorch_defaults import WatchedSolve, evaluate_defaults
from .outputs import Output, claim
from .regression import Regression, Scaling, copy_hyperparameters, negative_log_density
from .results import Row, format_table, true_residual
from .steps import Outcome, describe, evaluate, split_rows, tune, working

KERNEL = "matern52"
EVERY = 4.0  # seconds without a line
STORED_MATRIX = 2 * 2**30  # bytes one stored matrix may take: keeps the demo within 8 GB on any machine
BLUE, LIGHT_BLUE, ORANGE, GREY = "#1a5a99", "#62aee3", "#d95f02", "#8a8a8a"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a demo: rows of the data, of the tuning subset and of the comparison; steps of tuning."""

    rows: int
    tuning: int
    steps: int
    comparison: int
    variances: int
    plain_iterations: int


FULL = Sizes(rows=53_940, tuning=4_000, steps=200, comparison=10_000, variances=100, plain_iterations=400)
DEFAULT = Sizes(rows=16_000, tuning=1_000, steps=60, comparison=5_000, variances=50, plain_iterations=300)
QUICK = Sizes(rows=2_000, tuning=500, steps=20, comparison=1_000, variances=20, plain_iterations=100)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="an exact GP on diamonds' prices, beside GPyTorch's defaults: iterations, seconds, errors, and a picture",
        description=(
            "Tunes an ordinary GPyTorch ExactGP (Matern-5/2, one lengthscale a feature) on a random subset "
            "of the bundled diamonds data, conditions it on all training rows with sketchgp, and compares "
            "it with GPyTorch's defaults at a size at which those finish. Takes 16,000 of the rows, and about a minute."
        ),
    )
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR", help="folder of the picture (here)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the subsets and the sketches (0)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="all 53,940 rows: five minutes or more")
    size.add_argument(
        "--quick", action="store_true", help="2,000 rows, too few for sketchgp to matter: to see whether it runs"
    )
    parser.add_argument(
        "--skip-gpytorch", action="store_true", help="leave GPyTorch's side out, about a quarter of the time"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; see the module's docstring."""
    if not options.output.is_dir():
        raise InputError(f"--output {options.output}: no such folder")
    picture = claim(_unused(options.output), "--output", [], force=False)
    start = time.perf_counter()
    sizes = FULL if options.full else QUICK if options.quick else DEFAULT
    print(
        {FULL: "five minutes or more", DEFAULT: "about a minute", QUICK: "some ten seconds"}[sizes]
        + " in all on two idle cores"
        + ("" if options.skip_gpytorch else ", about a quarter of it for GPyTorch's side (see --skip-gpytorch)")
    )
    with memory_budget(STORED_MATRIX):
        _run(sizes, options.seed, picture, options.skip_gpytorch)
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


def _unused(folder: Path) -> Path:
    """Return the file of the picture, numbered from the second demo on."""
    names = itertools.chain(["sketchgp-demo.png"], (f"sketchgp-demo-{number}.png" for number in itertools.count(2)))
    return next(path for name in names if not (path := folder / name).exists())


def _run(sizes: Sizes, seed: int, picture: Output, alone: bool) -> None:
    """Run the demo of some size.

    :param alone: whether GPyTorch's side is left out.
    """
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

    model = tune(train_x, train_y, KERNEL, sizes.tuning, sizes.steps, seed, every=EVERY)
    print(f"  {_hyperparameters(model)}")

    small = torch.randperm(len(train), generator=generator(seed, "fewer rows of the demo"))[: sizes.comparison]
    small_x, small_y = train_x[small], train_y[small]
    print(f"sketchgp, on a random {len(small):,} of the training rows ...")
    faster = accelerate(copy_hyperparameters(model, small_x, small_y, KERNEL))
    part = evaluate(faster, test_x, test_y, "sketchgp", "low_rank", sizes.variances, EVERY)
    weights = faster.prediction_strategy.mean_cache
    with working("checking the residual", EVERY):
        part = replace(part, row=replace(part.row, residual=true_residual(faster, weights)))
    print(describe(part))
    default_row, default_solve = None, None
    if not alone:
        print("GPyTorch with its defaults, on the same rows ...")
        untouched = copy_hyperparameters(model, small_x, small_y, KERNEL)
        with working("GPyTorch", EVERY):
            default_row, default_solve = evaluate_defaults(untouched, test_x, test_y, sizes.variances)
        print(f"  {default_row.iterations} iterations, {_seconds(default_row):.1f} s")

    print(f"sketchgp, on all {len(train):,} training rows ...")
    all_rows = evaluate(model, test_x, test_y, "sketchgp, all rows", "low_rank", sizes.variances, EVERY)
    print(describe(all_rows))
    with working("checking the residual", EVERY):
        print(_check_residual(model, seed))
    nll = negative_log_density(all_rows.mean, all_rows.variance, test_y)
    print(f"  on all {len(test):,} test rows: RMSE {all_rows.row.rmse:.4f}, NLL {nll:.3f} (standardised log(price))")

    print()
    print(format_table([part.row, *([] if default_row is None else [default_row]), all_rows.row]))
    print(_footnotes(sizes, len(test)))

    if find_spec("matplotlib") is None:
        print("no picture without matplotlib; with it: python -m pip install 'sketchgp[plot]'")
    else:
        _draw(sizes, faster, all_rows, part, default_row, default_solve, picture)
    print(_verdict(all_rows, part, default_row, scaling))


def _draw(
    sizes: Sizes,
    model: Regression,
    all_rows: Outcome,
    part: Outcome,
    default_row: Row | None,
    default_solve: WatchedSolve | None,
    picture: Output,
) -> None:
    """Draw how the solves converge, and one without a preconditioner.

    :param model: the model on the rows of the comparison.
    """
    print("drawing how the solves converge, and one without a preconditioner ...")
    tolerance = gpytorch.settings.eval_cg_tolerance.value()
    with working("conjugate gradients without a preconditioner", EVERY):
        plain = _without_preconditioner(model, tolerance, sizes.plain_iterations)
    curves = _curves(all_rows, part, plain, default_row, default_solve)
    noise = model.likelihood.noise.item()
    title = f"diamonds, log(price), Matern-5/2 ARD, noise {noise:.1e}: solving for the posterior mean"
    names = {} if default_row is None else {f"GPyTorch's\ntolerance {tolerance:g}": tolerance}
    with picture.errors():
        plot_convergence(picture.path, curves, title, names, picture.overwrite)
    print(f"picture: {picture.path}")


def _seconds(row: Row) -> float:
    return (row.mean_seconds or 0.0) + (row.variance_seconds or 0.0)


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
    all_rows: Outcome, part: Outcome, plain: SolveReport, default_row: Row | None, default_solve: WatchedSolve | None
) -> list[Curve]:
    curves = []  # those of one n first; all rows are another problem, drawn apart
    if part.solve is not None:
        curves.append(_curve(part.solve, _named(part.solve), BLUE))
    if default_row is not None and default_solve is not None:
        curves.append(
            Curve(
                f"GPyTorch, its defaults, n = {part.row.n:,}",
                default_solve.residuals,
                default_solve.seconds,
                ORANGE,
                true_residual=default_row.residual,
            )
        )
    curves.append(_curve(plain, f"no preconditioner, n = {plain.n:,}", GREY))
    if all_rows.solve is not None:
        curve = _curve(all_rows.solve, _named(all_rows.solve), LIGHT_BLUE)
        curves.append(replace(curve, style=":", caption=f"all {all_rows.solve.n:,} rows,\nsketchgp only"))
    return curves


def _named(report: SolveReport) -> str:
    return f"sketchgp, {report.preconditioner} of rank {report.rank:,}, n = {report.n:,}"


def _curve(report: SolveReport, label: str, color: str) -> Curve:
    """Return the curve of a solve; times are interpolated, since all iterations cost the same."""
    residuals = report.history.max(dim=-1).values.tolist()
    steps = max(len(residuals) - 1, 1)
    seconds = [report.setup_seconds + report.seconds * k / steps for k in range(len(residuals))]
    return Curve(label, residuals, seconds, color, true_residual=report.max_residual)


def _verdict(all_rows: Outcome, part: Outcome, default: Row | None, scaling: Scaling) -> str:
    """Return the result of this run in one sentence, whichever way it falls."""
    row = all_rows.row
    error = 100 * (row.rmse or 0.0) * scaling.y_std
    solved = "solved" if all_rows.solve is None or all_rows.solve.converged else "not solved to its tolerance"
    sentence = (
        f"Result: the exact GP on all {row.n:,} rows was {solved} in {row.mean_seconds:.0f} s"
        + (f" ({row.iterations} iterations, true residual {row.residual:.1e})" if row.iterations is not None else "")
        + f" and predicts a diamond's price to about {error:.1f}% (RMSE {row.rmse:.4f}, against "
        f"{part.row.rmse:.4f} with {part.row.n:,} rows)"
    )
    if default is not None and part.row.iterations is not None and default.iterations is not None:
        sentence += (
            f"; on those {default.n:,} rows GPyTorch's defaults took {default.iterations} iterations and "
            f"{default.mean_seconds:.1f} s to residual {default.residual:.1e}, sketchgp "
            f"{part.row.iterations} iterations and {part.row.mean_seconds:.1f} s to {part.row.residual:.1e}"
        )
        if (part.row.mean_seconds or 0.0) > (default.mean_seconds or 0.0):
            sentence += (
                ". On so few rows a product with K takes milliseconds, and most of sketchgp's time goes into its "
                "preconditioner, and into a residual checked in float64; both pay from several thousand rows on"
            )
    return sentence + "."
