"""From the columns of a table to the inputs of a model: numbers, yes or no, and categories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import InputError
from .cells import is_missing
from .tables import Table

__all__ = ["KINDS", "UNKNOWN", "Feature", "encode", "learn", "summary"]

KINDS = ("number", "boolean", "category")
UNKNOWN = ("error", "missing")
_MOST = 50  # categories of a column that was not said to be one of categories
_FEW = 10  # rows up to which all values of such a column may differ
_WORDS = ({"false", "true"}, {"no", "yes"}, {"f", "t"}, {"n", "y"})  # false first
_TRUTH = {word: float(value) for words in _WORDS for value, word in enumerate(sorted(words))}


@dataclass(frozen=True)
class Feature:
    """A column and what becomes of it: a number, standardised; yes or no, 1 or 0, standardised, too; or categories.

    Of k categories become k inputs, one of them 1 and all others 0, and these are left as they are: two categories are
    then sqrt(2) apart, as two numbers are in the root mean square, and a rare one is no outlier.

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

    @property
    def standardised(self) -> bool:
        return self.kind != "category"

    def encode(self, table: Table, unknown: str, way: str) -> tuple[np.ndarray, int]:
        """The inputs ``(rows, width)`` in float64, NaN where the value is missing, and how many rows are of no known
        category.

        :param unknown: ``"error"`` to refuse a category that the model does not know, ``"missing"`` to take it for a
            missing value.
        :raises InputError: for a value that the feature cannot have; the message names its row.
        """
        column = table.columns[self.name]
        if self.kind == "number":
            return table.numbers(self.name)[:, None], 0
        if self.kind == "boolean":
            return self._truth(table)[:, None], 0
        index = {category: position for position, category in enumerate(self.categories)}
        encoded = np.zeros((table.rows, self.width))
        strangers = 0
        for row, value in enumerate(column.values):
            if value in index:
                encoded[row, index[value]] = 1.0
            elif value is None or is_missing(value):
                encoded[row] = np.nan
            elif unknown == "missing":
                encoded[row] = np.nan
                strangers += 1
            else:
                raise InputError(
                    f"{table.where(row, self.name)} {value!r} is a category that the model has not seen; it knows "
                    f"{_some(self.categories)}. Mend the cell, fit with such rows, or take it for a missing value with "
                    + way
                )
        return encoded, strangers

    def _truth(self, table: Table) -> np.ndarray:
        column = table.columns[self.name]
        values = column.values
        if column.is_text:
            values = np.array([_TRUTH.get(str(v).lower(), 2.0) if v is not None else np.nan for v in values])
        wrong = ~np.isnan(values) & ~np.isin(values, (0.0, 1.0))
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise InputError(
                f"{table.where(row, self.name)} {column.values[row]!r} is neither yes nor no, which is all that this "
                "column had when the model was fitted"
            )
        return values


def learn(table: Table, names: Sequence[str], categorical: Sequence[str]) -> list[Feature]:
    """What each of some columns is.

    :param table: with categories as text.
    :param categorical: columns that were said to hold categories, however many.
    :raises InputError: for a column of text that can be no categories.
    """
    return [_learn(table, name, name in categorical) for name in names]


def _learn(table: Table, name: str, told: bool) -> Feature:
    column = table.columns[name]
    if not column.is_text:
        return Feature(name)
    present = column.values[~column.missing()]
    found = sorted(set(present))
    if not told and {word.lower() for word in found} in _WORDS:
        return Feature(name, "boolean")
    many = len(found) > _MOST or (len(found) == len(present) > _FEW)
    if many and not told:
        raise InputError(
            f"{table.path}: column {name!r} is text with {len(found):,} different values in {len(present):,} rows, "
            f"such as {_some(found, 3)}: too many to be categories. Leave it out with --drop {name}, keep it as the "
            f"name of each row with --id {name}, or insist with --categorical {name}"
        )
    return Feature(name, "category", tuple(found))


def encode(
    features: Sequence[Feature], table: Table, unknown: str = "error", way: str = "--unknown missing"
) -> tuple[np.ndarray, dict[str, int]]:
    """The inputs of all features beside each other, ``(rows, d)``, and the rows of unknown category of each column.

    :param unknown: as for :meth:`Feature.encode`.
    """
    parts, strangers = [], {}
    for feature in features:
        part, count = feature.encode(table, unknown, way)
        parts.append(part)
        if count:
            strangers[feature.name] = count
    return np.concatenate(parts, axis=1), strangers


def summary(features: Sequence[Feature]) -> list[str]:
    """What becomes of the features, a line for each kind."""
    numbers = [feature.name for feature in features if feature.kind == "number"]
    booleans = [feature.name for feature in features if feature.kind == "boolean"]
    categories = [f"{f.name} ({len(f.categories)})" for f in features if f.kind == "category"]
    lines = []
    if numbers:
        lines.append(f"numbers, standardised to mean 0 and deviation 1: {', '.join(numbers)}")
    if booleans:
        lines.append(f"yes or no, as 1 or 0, standardised: {', '.join(booleans)}")
    if categories:
        lines.append(f"categories, one 0/1 input for each: {', '.join(categories)}")
    return lines


def _some(values: Sequence[str], most: int = 8) -> str:
    return ", ".join(map(repr, values[:most])) + (", ..." if len(values) > most else "")
