"""``python -m sketchgp predict FILE DATA``: mean and standard deviation for the rows of a table."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .cells import Cells
from .model_file import SavedModel, load_model
from .outputs import Output, add_force, claim
from .regression import negative_log_density, rmse
from .steps import predict_saved
from .tables import Source, open_table

_SHOWN = 10


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
    add_force(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command; see the module's docstring."""
    output = None
    if options.output is not None:
        output = claim(options.output, "--output", [options.model, options.data], options.force)
    saved = load_model(options.model)
    source = open_table(options.data)
    _require_features(source, saved)
    with_target = saved.target in source.names
    cells = Cells(may_lack=(saved.target,), drop=False)  # rows to predict are those without it
    table = source.read([*saved.features, *([saved.target] if with_target else [])], cells)
    x = torch.from_numpy(table.columns(saved.features))
    print(
        f"{options.model}: {saved.kernel} model of {saved.target!r} on {saved.weights.shape[0]:,} training "
        f"rows (residual {saved.residual:.1e}); predicting {len(x):,} rows"
    )
    scaling = saved.scaling
    mean, variance = predict_saved(saved, scaling.scale_x(x, saved.model.train_targets.dtype))
    original_mean, std = scaling.unscale_mean(mean), scaling.unscale_std(variance)
    if output is not None:
        _write(output, original_mean, std)
        print(f"written: {options.output}")
    else:
        _show(original_mean, std)
    if with_target:
        print(_against(torch.from_numpy(table.columns([saved.target])[:, 0]), mean, variance, saved))
    return 0


def _against(y: Tensor, mean: Tensor, variance: Tensor, saved: SavedModel) -> str:
    """How well the rows whose target is known are predicted, as a line; ``mean`` and ``variance`` standardised."""
    known = ~y.isnan()
    y, mean, variance = y[known], mean[known], variance[known]
    if not len(y):
        return f"column {saved.target!r} is empty: nothing to compare with"
    scaled_y = saved.scaling.scale_y(y, torch.float64)
    some = "" if bool(known.all()) else f", known in {len(y):,} of {len(known):,} rows"
    return (
        f"against column {saved.target!r}{some}: RMSE {rmse(saved.scaling.unscale_mean(mean), y):.4g} (standardised "
        f"{rmse(mean, scaled_y):.4f}), NLL {negative_log_density(mean, variance, scaled_y):.3f} nats a row "
        "(standardised)"
    )


def _require_features(source: Source, saved: SavedModel) -> None:
    missing = [name for name in saved.features if name not in source.names]
    if missing:
        raise InputError(
            f"{source.path}: the model needs {len(missing)} column(s) that are not there: "
            f"{', '.join(missing)}; the columns are {', '.join(source.names[:30])}"
        )


def _show(mean: Tensor, std: Tensor) -> None:
    print(f"{'row':>8}  {'mean':>14}  {'std':>12}")
    for row in range(min(_SHOWN, len(mean))):
        print(f"{row + 1:>8}  {mean[row].item():>14.6g}  {std[row].item():>12.4g}")
    if len(mean) > _SHOWN:
        print(f"... {len(mean) - _SHOWN:,} more rows; --output predictions.csv writes them all")


def _write(output: Output, mean: Tensor, std: Tensor) -> None:
    """Writes the columns mean, std."""
    columns = torch.stack([mean, std], 1).numpy()
    with output.open("w") as file:
        np.savetxt(file, columns, fmt="%.9g", delimiter=",", header="mean,std", comments="")
