"""``python -m sketchgp predict FILE DATA``: mean and standard deviation for the rows of a table."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .arguments import MISSING, add_table
from .features import UNKNOWN
from .held_out import calibration
from .inputs import expected, inputs
from .model_file import SavedModel, load_model
from .outputs import Output, add_force, claim
from .regression import negative_log_density, rmse
from .steps import predict_saved
from .tables import Source, Table, open_table

_SHOWN = 10
_ADVICE = ", or say what to do with --missing drop or --missing mean"


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "predict",
        help="predict the rows of a table with a saved model",
        description=(
            "Mean and standard deviation of the target (noise included), in its own units, for every row "
            "of a table that has the model's feature columns. Where it has the target too, in some rows or "
            "all, the error is reported."
        ),
    )
    parser.add_argument("model", type=Path, metavar="FILE", help="a model saved by the command fit")
    parser.add_argument("data", type=Path, metavar="DATA", help=".csv with a header row, .parquet, or .npz")
    parser.add_argument("--output", type=Path, metavar="CSV", help="write all rows here (columns mean, std)")
    parser.add_argument("--id", metavar="COLUMN", help="write this column, too (the one that fit was told)")
    parser.add_argument(
        "--missing",
        choices=MISSING,
        help="empty cells: end with an error, predict no mean for the row, or take the column's mean (as fit was told)",
    )
    parser.add_argument(
        "--unknown",
        choices=UNKNOWN,
        default="error",
        help="categories that the model has not seen: end with an error (the default), or treat as --missing says",
    )
    add_table(parser)
    add_force(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; see the module's docstring."""
    output = None
    if options.output is not None:
        output = claim(options.output, "--output", [options.model, options.data], options.force)
    print(f"reading {options.model} and checking its weights ...")
    saved = load_model(options.model)
    missing = options.missing or saved.missing
    source = open_table(options.data, options.encoding, options.header, options.decimal_comma)
    _require_features(source, saved)
    labelled = _id_column(options.id, source, saved)
    table = _read(source, saved, labelled, missing)
    x, complete = _inputs(table, saved, missing, options.unknown)
    labels = None if labelled is None else [cell or "" for cell in table.columns[labelled].values]
    print(
        f"{options.model}: {saved.kernel} model of {saved.target!r} on {saved.weights.shape[0]:,} training "
        f"rows (residual {saved.residual:.1e}); predicting {len(x):,} rows"
    )
    scaling = saved.scaling
    mean, variance = predict_saved(saved, scaling.scale_x(x, saved.model.train_targets.dtype))
    whole_mean, whole_std = torch.full((2, table.rows), torch.nan, dtype=torch.float64)
    whole_mean[complete], whole_std[complete] = scaling.unscale_mean(mean), scaling.unscale_std(variance)
    if output is not None:
        _write(output, whole_mean, whole_std, labelled, labels)
        print(f"written: {options.output}")
    else:
        _show(whole_mean, whole_std, labels)
    if saved.target in source.names:
        print(_against(torch.from_numpy(table.numbers(saved.target)[complete.numpy()]), mean, variance, saved))
    return 0


def _require_features(source: Source, saved: SavedModel) -> None:
    missing = [feature.name for feature in saved.features if feature.name not in source.names]
    if missing:
        also = f"; {source.suspicion}" if source.suspicion else ""
        raise InputError(
            f"{source.path}: the model needs {len(missing)} column(s) that are not there: "
            f"{', '.join(missing)}; the columns are {', '.join(source.names[:30])}{also}"
        )


def _id_column(named: str | None, source: Source, saved: SavedModel) -> str | None:
    """The column that names the rows: the one that was asked for, or that the model knows and the table has."""
    if named is not None:
        source.require([named], "--id")
        used = [feature.name for feature in saved.features] + [saved.target]
        if named in used:
            raise InputError(
                f"--id: {named!r} is a column that the model {'predicts' if named == used[-1] else 'uses'}"
            )
        return named
    return saved.id if saved.id in source.names else None


def _read(source: Source, saved: SavedModel, labelled: str | None, missing: str) -> Table:
    target = [saved.target] if saved.target in source.names else []  # rows to predict are those without it
    labels = [] if labelled is None else [labelled]
    cells = expected(saved, missing, _ADVICE, target, labels)
    return source.read([*(feature.name for feature in saved.features), *target, *labels], cells)


def _inputs(table: Table, saved: SavedModel, missing: str, unknown: str) -> tuple[Tensor, Tensor]:
    """Inputs ``(m, d)`` of the rows that are predicted, and which rows of the table these are, ``(rows,)`` boolean."""
    x, complete, lacking, strangers = inputs(saved, table, missing, unknown, _ADVICE)
    for name, count in strangers.items():
        print(f"note: column {name!r} has categories that the model has not seen in {count:,} row(s); these are "
              "taken for missing values")  # fmt: skip
    if not len(x):
        raise InputError(f"{table.path}: a value is missing in every row; --missing mean predicts them nonetheless")
    if lacking and missing == "drop":
        print(f"note: a value is missing in {lacking:,} row(s), which get no prediction")
    elif lacking:
        print(f"note: missing values in {lacking:,} row(s) are taken to be the mean of the training rows")
    return x, complete


def _against(y: Tensor, mean: Tensor, variance: Tensor, saved: SavedModel) -> str:
    """How well the rows whose target is known are predicted; ``mean`` and ``variance`` standardised."""
    known = ~y.isnan()
    y, mean, variance = y[known], mean[known], variance[known]
    if not len(y):
        return f"column {saved.target!r} is empty: nothing to compare with"
    scaling, scaled_y = saved.scaling, saved.scaling.scale_y(y, torch.float64)
    some = "" if bool(known.all()) else f", known in {len(y):,} of {len(known):,} rows"
    shares = calibration(scaling.unscale_mean(mean).numpy(), scaling.unscale_std(variance).numpy(), y.numpy())
    return (
        f"against column {saved.target!r}{some}: RMSE {rmse(scaling.unscale_mean(mean), y):.4g} (standardised "
        f"{rmse(mean, scaled_y):.4f}), NLL {negative_log_density(mean, variance, scaled_y):.3f} nats a row "
        f"(standardised)\n{shares}"
    )


def _show(mean: Tensor, std: Tensor, labels: list[str] | None) -> None:
    count = min(_SHOWN, len(mean))
    names = [str(row + 1) for row in range(count)] if labels is None else labels[:count]
    width = max([8, *map(len, names)])
    print(f"{'row':>{width}}  {'mean':>14}  {'std':>12}")
    for row, name in enumerate(names):
        numbers = ("-", "-") if mean[row].isnan() else (f"{mean[row].item():.6g}", f"{std[row].item():.4g}")
        print(f"{name:>{width}}  {numbers[0]:>14}  {numbers[1]:>12}")
    if len(mean) > _SHOWN:
        print(f"... {len(mean) - _SHOWN:,} more rows; --output predictions.csv writes them all")


def _write(output: Output, mean: Tensor, std: Tensor, labelled: str | None, labels: list[str] | None) -> None:
    """Writes the columns mean, std, and before them the one that names the rows; empty where there is no prediction."""
    rows = ([] if value != value else [f"{value:.9g}", f"{deviation:.9g}"]
            for value, deviation in zip(mean.tolist(), std.tolist(), strict=True))  # fmt: skip
    with output.open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        if labels is None:
            writer.writerow(["mean", "std"])
            writer.writerows(row or ["", ""] for row in rows)
        else:
            writer.writerow([labelled, "mean", "std"])
            writer.writerows([label, *(row or ["", ""])] for label, row in zip(labels, rows, strict=True))
