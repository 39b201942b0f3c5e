"""From the rows of a table to the inputs and the target of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .columns import Table, some
from .features import Feature, encode
from .regression import Scaling

__all__ = ["Inputs", "training_inputs", "without_missing"]


@dataclass(frozen=True)
class Inputs:
    """Inputs ``(n, d)`` without a missing value, and a target ``(n,)``, float64.

    :param features: the columns that are used.
    :param fill: the values in place of missing ones, ``(d,)``.
    :param scaling: of the training rows; inputs of categories are left as they are.
    """

    features: list[Feature]
    x: Tensor
    y: Tensor
    fill: Tensor
    scaling: Scaling


def without_missing(table: Table, policy: str, columns: Sequence[str], target: str) -> Table:
    """Return the rows that are kept, and print what is done about missing values.

    :param policy: ``"drop"`` or ``"mean"``, or anything where no value is missing.
    :param columns: the features.
    :raises InputError: no row is left.
    """
    unknown = table.lacking([target])
    lacking = table.lacking([*columns, target]) if policy == "drop" else unknown
    where = ", ".join(name for name in (*columns, target) if table.lacking([name]).any())
    if not where:
        return table
    if lacking.all():
        raise InputError(
            f"{table.path}: no row is without a missing value (in {where}); use --missing mean, or leave columns out "
            "with --drop"
        )
    features = ", ".join(name for name in columns if table.lacking([name]).any())
    filled = int((table.lacking(columns) & ~lacking).sum())
    if table.marks:
        print(f"note: taken for missing values, as empty cells are: {some(table.marks)}")
    if lacking.any():
        why = f"a value is missing in them ({where})" if policy == "drop" else f"{target!r} is missing in them"
        print(f"note: {int(lacking.sum()):,} of {table.rows:,} rows are left out: {why}")
    if filled:
        print(f"note: missing values in {filled:,} rows ({features}) are taken to be the mean of the training rows")
    return table.take(~lacking)


def training_inputs(table: Table, features: list[Feature], target: str, train: Tensor) -> Inputs:
    """Return scaled inputs with missing values filled, without constant columns; print which these are.

    :param train: numbers of the training rows.
    :raises InputError: every column is constant in them, or the target is.
    """
    encoded, _ = encode(features, table)
    x, y = torch.from_numpy(encoded), torch.from_numpy(np.array(table.columns[target]))
    fill = x[train].nanmean(0).nan_to_num()  # of a column without a value, which is constant and left out
    x = torch.where(x.isnan(), fill, x)
    varies = (x[train] != x[train[0]]).any(0)
    parts = torch.arange(len(fill)).split([feature.width for feature in features])
    kept = [(f, part) for f, part in zip(features, parts, strict=True) if bool(varies[part].any())]
    constant = [feature.name for feature in features if feature not in {f for f, _ in kept}]
    if not kept:
        raise InputError(
            f"{table.path}: every feature is constant in the training rows; there is nothing to predict from"
        )
    if constant:
        print(f"note: left out, because constant in the training rows: {', '.join(constant)}")
    inputs = torch.cat([part for _, part in kept])
    x, fill = x[:, inputs], fill[inputs]
    scaling = Scaling.of(x[train], y[train], target)
    standardised = torch.tensor([feature.standardised for feature, part in kept for _ in part])
    mean, std = scaling.x_mean.where(standardised, torch.zeros(())), scaling.x_std.where(standardised, torch.ones(()))
    return Inputs([f for f, _ in kept], x, y, fill, replace(scaling, x_mean=mean.double(), x_std=std.double()))
