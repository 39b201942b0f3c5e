"""``python -m sketchgp fit DATA --target COLUMN``: a GP regression on a table of your own."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import replace
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

from ..accelerate import accelerate
from ..errors import InputError
from ..plotting.models import draw_calibration, rmse
from ..preconditioners import RPCholesky
from ..saved_model import SavedModel, save_model
from ..style import COLORS, finish, new_figure
from .columns import Rules, Table
from .features import Feature, learn, summary, training_inputs, without_missing
from .options import SOLVERS, Output, claim, notation, opened
from .regression import Outcome, Regression, Row, Scaling, calibration, evaluate, format_table, split_rows, tune
from .tables import Source

_POINTS, _INTERVALS = 4000, 300  # points of the picture, and those that have their interval drawn


def run(options: argparse.Namespace) -> None:
    """Run the command; see the module's docstring."""
    saving, picture = (claim(options, name, "data") for name in ("save", "picture"))
    if picture is not None and options.test_fraction == 0:
        raise InputError("--picture: it shows held-out rows, and --test-fraction 0 leaves none")
    if picture is not None:
        new_figure((1, 1))  # fails before the work where matplotlib is missing
    if options.rank is not None and options.solver not in ("auto", "cg"):
        raise InputError(f"--rank is of conjugate gradients' preconditioner; --solver {options.solver} has none")
    table, chosen, marks = _read(options)
    train, test = split_rows(table.rows, options.test_fraction, options.seed)
    if len(train) < 2:
        raise InputError(f"--test-fraction: {len(train)} training row(s) are left of {table.rows}; lower it")
    if picture is not None and not len(test):
        raise InputError(f"--picture: no row is held out of {table.rows}; raise --test-fraction")
    inputs = training_inputs(table, chosen, options.target, train)
    scaling, dtype = inputs.scaling, torch.float64 if options.float64 else torch.float32
    x, y = scaling.scale_x(inputs.x, dtype), scaling.scale_y(inputs.y, dtype)
    features = inputs.features
    print(
        f"{options.data}: {options.target} by {len(features)} feature(s) ({', '.join(f.name for f in features)}); "
        f"{len(train):,} training and {len(test):,} held-out rows, {str(dtype).removeprefix('torch.')}"
    )
    for line in summary(features):
        print(f"  {line}")
    print(f"  the target, standardised to mean 0 and deviation 1: its mean is {scaling.y_mean:.6g}, its deviation "
          f"{scaling.y_std:.6g}")  # fmt: skip

    start = math.sqrt(len(features))
    data = x[train], y[train]
    model = tune(*data, options.kernel, options.subset, options.iterations, options.seed, start, options.mean)
    outcome = _condition(model, options, x, y, train, test)
    if len(test):
        _print_results(outcome, y[test], inputs.y[test], scaling, options.target)
    if saving is not None:
        saved = SavedModel(
            model=model,
            weights=model.prediction_strategy.weights.to(torch.float64),
            kernel=options.kernel,
            mean=options.mean,
            features=tuple(features),
            target=options.target,
            scaling=scaling,
            fill=inputs.fill,
            missing=options.missing,
            marks=marks,
        )
        save_model(saving.path, saved, saving.overwrite)
        print(f"saved: {options.save} ({options.save.stat().st_size / 1e6:.1f} MB)")
    if picture is not None:
        mean, std = scaling.unscale_mean(outcome.mean), scaling.unscale_std(outcome.variance)
        _draw(picture, mean, std, inputs.y[test], options.target, options.data.name)
        print(f"picture: {options.picture}")


def _condition(
    model: Regression, options: argparse.Namespace, x: Tensor, y: Tensor, train: Tensor, test: Tensor
) -> Outcome:
    """Condition the model on all training rows, by the solver that was asked for, and predict the held-out rows."""
    asked = options.solver != "auto" or options.rank is not None
    if asked:
        rank = options.rank
        if rank is not None and rank > len(train):
            print(f"note: --rank {rank:,} is more than there are training rows; {len(train):,} is used")
            rank = len(train)
        solver: Any = SOLVERS["cg" if rank is not None else options.solver]
        most = gpytorch.settings.max_cholesky_size.value()
        if len(train) <= most:
            print(f"note: up to {most:,} rows GPyTorch factorizes the matrix itself, whatever solver is asked for")
        accelerate(model, solver=solver, preconditioner="auto" if rank is None else RPCholesky(rank=rank))
    held_out = test if len(test) else train[:1]  # without held-out rows, one row to solve for the weights with
    print(
        f"conditioning on all {len(train):,} training rows"
        + (f", predicting {len(test):,} held-out rows" if len(test) else "")
        + f" ({_about(len(train))}) ..."
    )
    outcome = evaluate(model, x[held_out], y[held_out], f"sketchgp, {options.kernel}")
    print(outcome)
    return outcome


def _about(n: int) -> str:
    """Return the expected time in words: an iteration takes n^2 kernel entries."""
    return "seconds" if n < 10_000 else "seconds to minutes" if n < 50_000 else "minutes" if n < 150_000 else "hours"


def _read(options: argparse.Namespace) -> tuple[Table, list[Feature], tuple[str, ...]]:
    """Return the rows that are used, the features among the columns, and the marks of missing values."""
    began = time.perf_counter()
    source = opened(options)
    print(f"reading {options.data} ({options.data.stat().st_size / 1e6:.1f} MB) ...")
    text = dict.fromkeys(options.categorical, ())
    rules = Rules((options.target, *options.numeric), text, **notation(options))
    columns = _choose_features(source, options, rules)
    if doubt := source.suspicion(rules):
        print(f"note: {doubt}")
    wanted = [*columns, options.target]
    table = source.read(wanted, replace(rules, may_lack=() if options.missing == "error" else wanted))
    rows = table.rows
    table = without_missing(table, options.missing, columns, options.target)
    if table.rows < 2:
        raise InputError(f"{options.data}: {table.rows} row(s) of data; at least 2 are needed")
    features = learn(table, columns, options.categorical)
    for name in (feature.name for feature in features if feature.kind == "number"):
        if rows > 2 and (np.diff(table.columns[name]) == 1).all():
            print(f"note: column {name!r} counts the rows; if it is no feature, leave it out with --drop {name}")
    print(f"  {rows:,} rows and {len(wanted)} columns in {time.perf_counter() - began:.1f} s")
    return table, features, rules.marks


def _choose_features(source: Source, options: argparse.Namespace, rules: Rules) -> list[str]:
    target, features, drop = options.target, options.features, options.drop
    declared = {"--numeric": options.numeric, "--categorical": options.categorical}
    others = {"--features": features or [], "--drop": drop}
    for option, named in {"--target": [target], **others, **declared}.items():
        source.require(named, option, rules)
        if target in named and option in others:
            raise InputError(f"{option}: {target!r} is the target")
        if len(set(named)) < len(named):
            raise InputError(f"{option}: a column is named twice")
    if target in options.categorical:
        raise InputError(
            f"--categorical: {target!r} is the target, and the command fits numbers; for classes there are "
            "sketchgp.OneHot and sketchgp.RandomFeatureClassifier in Python"
        )
    for name in source.columns:
        if features is None and name not in source.default_features and name not in (target, *drop):
            print(f"note: column {name!r} is left out; name it in --features to use it")
    chosen = [name for name in (features or source.default_features) if name not in (target, *drop)]
    if not chosen:
        raise InputError(f"{source.path}: no columns are left to predict {target!r} from")
    for option, named in declared.items():
        unused = [name for name in named if name not in (*chosen, target)]
        if unused:
            raise InputError(f"{option}: {unused[0]!r} is not among the features")
    if both := set(options.numeric) & set(options.categorical):
        raise InputError(f"--numeric: {min(both)!r} is in --categorical, too")
    return chosen


def _print_results(outcome: Outcome, scaled_y: Tensor, y: Tensor, scaling: Scaling, target: str) -> None:
    row = outcome.row
    baseline = Row("the training mean", row.n, rmse=rmse(torch.zeros_like(scaled_y), scaled_y))
    print()
    print(format_table([row, baseline]))
    print("RMSE and NLL (negative log predictive density a row, in nats) are of the standardised target.")
    mean, std = scaling.unscale_mean(outcome.mean), scaling.unscale_std(outcome.variance)
    print(calibration(mean, std, y))
    mean_error = rmse(torch.full_like(y, scaling.y_mean), y)
    print(f"Result: RMSE {rmse(mean, y):.4g} in units of {target!r} on {len(y):,} held-out rows "
          f"(its mean: {mean_error:.4g}).")  # fmt: skip


def _draw(output: Output, mean: Tensor, std: Tensor, y: Tensor, target: str, data: str) -> None:
    """Write a PNG: predictions against the truth with their 95 % intervals, and the calibration of all intervals.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: the truth, ``(m,)``, in its units.
    :param target: name of the column; :param data: name of the file.
    """
    figure = new_figure((11, 5.2), 150)
    left, right = figure.subplots(1, 2)
    predicted, half, true = mean.numpy(), 1.96 * std.numpy(), y.numpy()
    some = np.random.default_rng(0).permutation(len(y))[:_POINTS]
    few = some[:_INTERVALS]
    bars: dict[str, Any] = {"fmt": "none", "ecolor": COLORS[0], "alpha": 0.3, "linewidth": 0.8, "zorder": 2}
    left.errorbar(predicted[few], true[few], xerr=half[few], **bars)
    faint = min(max(30 / math.sqrt(len(some)), 0.25), 0.7)
    left.scatter(predicted[some], true[some], s=9, color=COLORS[0], alpha=faint, linewidths=0, zorder=3)
    ends = [min(true.min(), predicted.min()), max(true.max(), predicted.max())]
    left.plot(ends, ends, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=4)
    finish(left, f"{len(some):,} predictions, {len(few):,} of them with their 95 % intervals", legend=False)
    left.set_xlabel(f"{target}, predicted", parse_math=False)
    left.set_ylabel(f"{target}, true", parse_math=False)
    draw_calibration(right, mean, std.square(), y)
    figure.suptitle(f"{data}: {target} of {len(y):,} held-out rows", fontsize=12, x=0.012, ha="left", parse_math=False)
    with output.open("wb") as file:
        figure.savefig(file, format="png")
