"""``python -m sketchgp predict FILE DATA``: mean and standard deviation for the rows of a table."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from ..accelerate import accelerate
from ..models.accelerated.posterior import use_weights
from ..plotting.models import negative_log_density, rmse
from ..saved_model import SavedModel, expected, predict_rows, read_model
from .columns import some
from .options import Output, claim, notation, opened
from .regression import calibration

_SHOWN = 10


def run(options: argparse.Namespace) -> None:
    """Run the command; see the module's docstring."""
    output = claim(options, "output", "model", "data")
    saved = read_model(options.model)
    missing = options.missing or saved.missing
    source = opened(options)
    target = [saved.target] if saved.target in source.columns else []  # rows to predict are those without it
    rules = expected(saved, missing, target, **notation(options))
    features = [feature.name for feature in saved.features]
    source.require(features, "columns of the model", rules)
    table = source.read([*features, *target], rules)
    use_weights(accelerate(saved.model), saved.weights)
    print(
        f"{options.model}: {saved.kernel} model of {saved.target!r} on {saved.weights.shape[0]:,} training "
        f"rows; predicting {table.rows:,} rows"
    )
    result = predict_rows(saved, table, missing, options.unknown)
    for name, count in result.strangers.items():
        print(f"note: column {name!r} has categories that the model has not seen in {count:,} row(s); these are "
              "taken for missing values")  # fmt: skip
    if result.lacking:
        marked = f" ({some(table.marks)} among them)" if table.marks else ""
        what = "get no prediction" if missing == "drop" else "are filled with the mean of the training rows"
        print(f"note: {result.lacking:,} row(s) lack a value{marked}, and {what}")
    mean, variance = result.prediction.mean, result.prediction.observation_variance
    assert variance is not None
    std = variance.clamp_min(0).sqrt()
    if output is not None:
        _write(output, mean, std)
        print(f"written: {options.output}")
    else:
        _show(mean, std)
    if target:
        print(_against(torch.from_numpy(table.columns[saved.target]), mean, std, saved))


def _against(y: Tensor, mean: Tensor, std: Tensor, saved: SavedModel) -> str:
    """Return how well the rows are predicted whose target ``(rows,)`` is known; NaN where there is none."""
    predicted = int((~mean.isnan()).sum())
    known = ~y.isnan() & ~mean.isnan()
    y, mean, std = y[known], mean[known], std[known]
    if not len(y):
        return f"column {saved.target!r} is empty: nothing to compare with"
    unit, shift = saved.scaling.y_std, saved.scaling.y_mean
    density = negative_log_density((mean - shift) / unit, (std / unit).square(), (y - shift) / unit)
    where = "" if len(y) == predicted else f", known in {len(y):,} of {predicted:,} rows"
    return (
        f"against column {saved.target!r}{where}: RMSE {rmse(mean, y):.4g} (standardised {rmse(mean, y) / unit:.4f}), "
        f"NLL {density:.3f} nats a row (standardised)\n{calibration(mean, std, y)}"
    )


def _show(mean: Tensor, std: Tensor) -> None:
    print(f"{'row':>8}  {'mean':>14}  {'std':>12}")
    for row in range(min(_SHOWN, len(mean))):
        numbers = ("-", "-") if mean[row].isnan() else (f"{mean[row].item():.6g}", f"{std[row].item():.4g}")
        print(f"{row + 1:>8}  {numbers[0]:>14}  {numbers[1]:>12}")
    if len(mean) > _SHOWN:
        print(f"... {len(mean) - _SHOWN:,} more rows; --output predictions.csv writes them all")


def _write(output: Output, mean: Tensor, std: Tensor) -> None:
    """Write the columns mean and std; empty where there is no prediction."""
    with output.open("w") as file:
        file.write("mean,std\n")
        for pair in zip(mean.tolist(), std.tolist(), strict=True):
            file.write(",".join("" if value != value else f"{value:.9g}" for value in pair) + "\n")
