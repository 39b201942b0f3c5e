"""``python -m sketchgp fit DATA --target COLUMN``: a GP regression on a table of your own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .model_file import SavedModel, save_model, weights_residual
from .outputs import add_force, claim
from .regression import KERNELS, Scaling, rmse
from .results import Row, format_table
from .steps import describe, evaluate, split_rows, tune
from .tables import Source, open_table


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "fit",
        help="fit a GP to a CSV, Parquet or NPZ file and report its held-out error",
        description=(
            "Standardises the columns, tunes a GPyTorch ExactGP (one lengthscale a feature) by marginal "
            "likelihood on a random subset, conditions it on all training rows with sketchgp and reports "
            "the error on held-out rows."
        ),
    )
    parser.add_argument("data", type=Path, metavar="DATA", help=".csv with a header row, .parquet, or .npz")
    parser.add_argument("--target", required=True, metavar="COLUMN", help="the column to predict")
    parser.add_argument("--features", type=_names, metavar="A,B,C", help="columns to predict from (all others)")
    parser.add_argument("--drop", type=_names, default=[], metavar="A,B,C", help="columns to leave out")
    parser.add_argument("--kernel", choices=list(KERNELS), default="matern52", help="(%(default)s)")
    parser.add_argument("--iterations", type=_positive, default=500, help="most steps of tuning (%(default)s)")
    parser.add_argument("--subset", type=_positive, default=2000, help="most rows to tune on (%(default)s)")
    parser.add_argument("--test-fraction", type=_fraction, default=0.1, help="share of rows held out (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, the subset and the sketches (0)")
    parser.add_argument("--float64", action="store_true", help="compute in float64: slower, more digits")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the model, for the command predict")
    add_force(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; see the module's docstring."""
    output = None if options.save is None else claim(options.save, "--save", [options.data], options.force)
    source = open_table(options.data)
    features = _choose_features(source, options.target, options.features, options.drop)
    table = source.read([*features, options.target])
    if len(table.values) < 2:
        raise InputError(f"{options.data}: {len(table.values)} row(s) of data; at least 2 are needed")
    x, y = torch.from_numpy(table.columns(features)), torch.from_numpy(table.columns([options.target])[:, 0])
    train, test = split_rows(len(y), options.test_fraction, options.seed)
    if len(train) < 2:
        raise InputError(f"{options.data}: {len(train)} training row(s) are left of {len(y)}; lower --test-fraction")
    features, x = _drop_constant(features, x, train, options.data)
    scaling = Scaling.of(x[train], y[train], options.target)
    dtype = torch.float64 if options.float64 else torch.float32
    scaled_x, scaled_y = scaling.scale_x(x, dtype), scaling.scale_y(y, dtype)
    print(
        f"{options.data}: {options.target} by {len(features)} feature(s) ({', '.join(features)}); "
        f"{len(train):,} training and {len(test):,} held-out rows, standardised, "
        f"{str(dtype).removeprefix('torch.')}"
    )

    model = tune(scaled_x[train], scaled_y[train], options.kernel, options.subset, options.iterations, options.seed)
    print(f"conditioning on all {len(train):,} training rows ...")
    held_out = test if len(test) else train[:1]  # without held-out rows, one row to solve for the weights with
    outcome = evaluate(model, scaled_x[held_out], scaled_y[held_out], f"sketchgp, {options.kernel}")
    print(describe(outcome))
    if len(test):
        _print_results(outcome.row, outcome.mean, scaled_y[test], y[test], scaling, options.target)
    if output is not None:
        weights = model.prediction_strategy.weights.to(torch.float64)
        residual = weights_residual(model, weights)
        saved = SavedModel(model, weights, options.kernel, tuple(features), options.target, scaling, residual)
        save_model(output.path, saved, output.overwrite)
        print(f"saved: {options.save} ({options.save.stat().st_size / 1e6:.1f} MB)")
    return 0


def _choose_features(source: Source, target: str, features: Sequence[str] | None, drop: Sequence[str]) -> list[str]:
    source.require([target], "--target")
    source.require(features or [], "--features")
    source.require(drop, "--drop")
    if features is not None and target in features:
        raise InputError(f"--features: {target!r} is the target")
    if target in drop:
        raise InputError(f"--drop: {target!r} is the target")
    if features is not None and len(set(features)) < len(features):
        raise InputError("--features: a column is named twice")
    for name in source.names:
        if features is None and name not in source.default_features and name not in (target, *drop):
            print(f"note: column {name!r} is left out; name it in --features to use it")
    chosen = [name for name in (features or source.default_features) if name not in (target, *drop)]
    if not chosen:
        raise InputError(f"{source.path}: no columns are left to predict {target!r} from")
    return chosen


def _drop_constant(features: list[str], x: Tensor, train: Tensor, path: Path) -> tuple[list[str], Tensor]:
    varies = (x[train] != x[train[0]]).any(0)
    constant = [name for name, keep in zip(features, varies.tolist(), strict=True) if not keep]
    if len(constant) == len(features):
        raise InputError(f"{path}: every feature is constant in the training rows; there is nothing to predict from")
    if constant:
        print(f"note: left out, because constant in the training rows: {', '.join(constant)}")
    return [name for name in features if name not in constant], x[:, varies]


def _print_results(row: Row, mean: Tensor, scaled_y: Tensor, y: Tensor, scaling: Scaling, target: str) -> None:
    n = row.n
    baseline = Row("the training mean", n, rmse=rmse(torch.zeros_like(scaled_y), scaled_y))
    print()
    print(format_table([row, baseline]))
    print("RMSE and NLL (negative log predictive density a row, in nats) are of the standardised target.")
    error = rmse(scaling.unscale_mean(mean), y)
    mean_error = rmse(torch.full_like(y, scaling.y_mean), y)
    print(f"Result: RMSE {error:.4g} in units of {target!r} on {len(y):,} held-out rows (its mean: {mean_error:.4g}).")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a share from 0 up to, but not including, 1, not {text}")
    return value
