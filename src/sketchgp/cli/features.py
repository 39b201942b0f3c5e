"""From the columns of a table to the inputs of a model: numbers, yes or no, and categories."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from .columns import Table, refuse, some
from .regression import Scaling

MISSING = ("error", "drop", "mean")
KINDS = {
    "number": "numbers, standardised to mean 0 and deviation 1",
    "boolean": "yes or no, as 1 or 0, standardised",
    "category": "categories, one 0/1 input for each",
}
UNKNOWN = ("error", "missing")
_MOST = 50  # categories of a column that was not said to be one of categories
_FEW = 10  # rows up to which all values of such a column may differ
_WORDS = ({"false", "true"}, {"no", "yes"}, {"f", "t"}, {"n", "y"})  # false first
_TRUTH = {word: float(value) for words in (*_WORDS, {"0", "1"}) for value, word in enumerate(sorted(words))}


@dataclass(frozen=True)
class Feature:
    """A column as inputs: a standardised number, a standardised 1 or 0 for yes or no, or categories.

    A column of k categories gives k inputs, one of them 1 and all others 0, which are not standardised. Two categories
    are then sqrt(2) apart, as two numbers are in the root mean square, and a rare one is no outlier.

    :param name: of the column.
    :param kind: one of :data:`KINDS`.
    :param categories: of the kind ``"category"``, sorted; all that the table had, held-out rows included.
    """

    name: str
    kind: str = "number"
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Number of inputs."""
        return len(self.categories) if self.kind == "category" else 1

    def encode(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs ``(rows, width)`` in float64, NaN where the value is missing, and which rows have a value that
        the feature does not know, ``(rows,)`` boolean; their inputs are NaN, too.
        """
        values = table.columns[self.name]
        if self.kind == "number":
            return values[:, None], np.zeros(table.rows, dtype=bool)
        codes = _TRUTH if self.kind == "boolean" else {one: float(code) for code, one in enumerate(self.categories)}
        folded = [one.lower() if self.kind == "boolean" and isinstance(one, str) else one for one in values]
        encoded = np.array([codes.get(one, np.nan) for one in folded])
        unknown = np.isnan(encoded) & ~table.lacking([self.name])
        if self.kind == "category":
            encoded = np.where(np.isnan(encoded)[:, None], np.nan, encoded[:, None] == np.arange(self.width))
        return encoded.reshape(table.rows, self.width), unknown


def learn(table: Table, names: Sequence[str], categorical: Sequence[str]) -> list[Feature]:
    """Return the feature of each of some columns.

    :param table: with categories as text.
    :param categorical: columns that were said to hold categories, however many.
    :raises InputError: for a column of text that can be no categories.
    """
    features, faults = [], []
    for name in names:
        present = [value for value in table.columns[name] if value is not None]
        different = sorted(set(present)) if table.columns[name].dtype == object else []
        if table.columns[name].dtype != object:
            features.append(Feature(name))
        elif name not in categorical and {word.lower() for word in different} in _WORDS:
            features.append(Feature(name, "boolean"))
        elif name not in categorical and (len(different) > _MOST or len(different) == len(present) > _FEW):
            quoted = shlex.quote(name)
            faults.append(
                f"column {name!r} is text with {len(different):,} different values in {len(present):,} rows, such as "
                f"{some(different, 3)}: too many to be categories. Leave it out with --drop {quoted}, or insist with "
                f"--categorical {quoted}"
            )
        else:
            features.append(Feature(name, "category", tuple(different)))
    if faults:
        raise refuse(table.path, faults)
    return features


def encode(features: Sequence[Feature], table: Table, unknown: str = "error") -> tuple[np.ndarray, dict[str, int]]:
    """Return the inputs of all features beside each other, ``(rows, d)``, and for each column with categories that the
    model does not know, in how many rows.

    :param unknown: ``"error"`` to refuse a category that the model does not know, ``"missing"`` to take it for a
        missing value.
    :raises InputError: for values that features cannot have; the message names them all.
    """
    parts, strangers, faults = [], {}, []
    for feature in features:
        part, rows = feature.encode(table)
        parts.append(part)
        if not rows.any():
            continue
        values = table.columns[feature.name]
        first = {value: row for row, value in reversed([*enumerate(values)]) if rows[row]}
        where = ", ".join(f"{value!r} in row {table.numbers[row]}" for value, row in [*first.items()][::-1][:4])
        if feature.kind == "boolean":
            faults.append(f"column {feature.name!r} holds {where}: neither yes nor no, which is all that it had when "
                          "the model was fitted")  # fmt: skip
        elif unknown == "error":
            faults.append(
                f"column {feature.name!r} holds {where}: categories that the model has not seen; it knows "
                f"{some(feature.categories)}. Mend the cells, fit with such rows, or take them for missing values: set "
                "the option unknown to missing, and missing to drop or mean"
            )
        else:
            strangers[feature.name] = int(rows.sum())
    if faults:
        raise refuse(table.path, faults)
    return np.concatenate(parts, axis=1), strangers


def summary(features: Sequence[Feature]) -> list[str]:
    """Return a line for each kind of feature, with what becomes of it."""
    names: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for feature in features:
        names[feature.kind].append(feature.name + (f" ({feature.width})" if feature.kind == "category" else ""))
    return [f"{words}: {', '.join(names[kind])}" for kind, words in KINDS.items() if names[kind]]


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
    standardised = torch.tensor([feature.kind != "category" for feature, part in kept for _ in part])
    mean, std = scaling.x_mean.where(standardised, torch.zeros(())), scaling.x_std.where(standardised, torch.ones(()))
    return Inputs([f for f, _ in kept], x, y, fill, replace(scaling, x_mean=mean.double(), x_std=std.double()))
