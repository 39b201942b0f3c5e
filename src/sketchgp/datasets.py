"""Real data bundled with the package, for the demo, the examples and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import numpy as np
import torch
from torch import Tensor

from .checks import dtype as floating

__all__ = ["Dataset", "load_diamonds"]

# Stored column -> divisor: the file keeps decimals as whole tenths or hundredths, which loses nothing.
_DIAMONDS_DIVISORS = {
    "carat": 100.0,
    "cut": 1.0,
    "color": 1.0,
    "clarity": 1.0,
    "depth": 10.0,
    "table": 10.0,
    "x": 100.0,
    "y": 100.0,
    "z": 100.0,
}


@dataclass(frozen=True)
class Dataset:
    """A regression data set, not standardised.

    :param x: features, ``(n, d)``.
    :param y: targets, ``(n,)``.
    :param feature_names: ``d`` names.
    :param target_name: name of the target, with its unit.
    :param source: where the data come from.
    :param licence: the licence they are under.
    """

    x: Tensor
    y: Tensor
    feature_names: tuple[str, ...]
    target_name: str
    source: str
    licence: str


def load_diamonds(dtype: torch.dtype = torch.float64) -> Dataset:
    """Prices of 53,940 diamonds by nine attributes (n = 53,940, d = 9).

    - Features: ``carat`` (weight, carat), ``cut`` (0 Fair to 4 Ideal), ``color`` (0 for D, the best, to 6),
      ``clarity`` (0 for I1 to 7 for IF), ``depth`` (total depth, per cent), ``table`` (width of the top, per
      cent), and ``x``, ``y``, ``z`` (length, width and depth, mm).
    - Target: ``price``, in US dollars, from 326 to 18,823.

    A few rows carry recording errors of the original (lengths of 0 mm, a width of 58.9 mm); they are kept.

    :param dtype: floating-point type of the returned tensors.
    :returns: the whole table in its original order (which is partly sorted by price: split it at random).
    :raises InputError: for a dtype that is not one of floating point.
    """
    floating("load_diamonds", "dtype", dtype)
    table = resources.files("sketchgp") / "data" / "diamonds.npz"
    with resources.as_file(table) as path, np.load(path, allow_pickle=False) as arrays:
        columns = [arrays[name].astype(np.float64) / divisor for name, divisor in _DIAMONDS_DIVISORS.items()]
        price = arrays["price"].astype(np.float64)
    return Dataset(
        x=torch.from_numpy(np.stack(columns, axis=1)).to(dtype),
        y=torch.from_numpy(price).to(dtype),
        feature_names=tuple(_DIAMONDS_DIVISORS),
        target_name="price (USD)",
        source="ggplot2, table 'diamonds' (https://ggplot2.tidyverse.org/reference/diamonds.html)",
        licence="MIT, copyright (c) 2024 ggplot2 core developer team; see data/LICENSE-diamonds.txt",
    )
