"""Held-out rows: how often the truth is within the stated intervals, as a line and as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import erf

from ..pictures.predictions import draw_calibration
from ..style import COLORS, finish, new_figure
from .outputs import Output

__all__ = ["calibration", "draw", "within"]

_LEVELS = (0.5, 0.9, 0.95)
_SHOWN, _INTERVALS = 4000, 300  # points of the picture, and those that have their interval drawn


def within(mean: np.ndarray, std: np.ndarray, y: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the share of rows inside the central intervals of the normal predictions, ``(len(levels),)``.

    A row is inside an interval of level p where ``|y - mean| <= std sqrt(2) erfinv(p)``.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: ``(m,)``.
    :param levels: between 0 and 1.
    """
    needed = np.sort(erf(np.abs(y - mean) / (np.sqrt(2) * std)))  # the least level whose interval holds each row
    return np.searchsorted(needed, levels, side="right") / len(y)


def calibration(mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> str:
    """Return the shares for a few levels, as a line."""
    shares = within(mean, std, y, np.array(_LEVELS))
    parts = [f"{share:.1%} in the {level:.0%} intervals" for share, level in zip(shares, _LEVELS, strict=True)]
    return f"Calibration: of {len(y):,} rows, {', '.join(parts)}."


def draw(output: Output, mean: np.ndarray, std: np.ndarray, y: np.ndarray, target: str, data: str) -> None:
    """Write a PNG: predictions against the truth with their 95 % intervals, and the calibration of all intervals.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: the truth, ``(m,)``, in its units.
    :param target: name of the column; :param data: name of the file.
    """
    figure = new_figure((11, 5.2), 150)
    left, right = figure.subplots(1, 2)
    some = np.random.default_rng(0).permutation(len(y))[:_SHOWN]
    few = some[:_INTERVALS]
    bars: dict[str, Any] = {"fmt": "none", "ecolor": COLORS[0], "alpha": 0.3, "linewidth": 0.8, "zorder": 2}
    left.errorbar(mean[few], y[few], xerr=1.96 * std[few], **bars)
    faint = float(np.clip(30 / np.sqrt(len(some)), 0.25, 0.7))
    left.scatter(mean[some], y[some], s=9, color=COLORS[0], alpha=faint, linewidths=0, zorder=3)
    ends = [min(y.min(), mean.min()), max(y.max(), mean.max())]
    left.plot(ends, ends, color="0.45", linewidth=1, linestyle=(0, (2, 2)), zorder=4)
    finish(left, f"{len(some):,} predictions, {len(few):,} of them with their 95 % intervals", legend=False)
    left.set_xlabel(f"{target}, predicted", parse_math=False)
    left.set_ylabel(f"{target}, true", parse_math=False)
    draw_calibration(right, *(torch.from_numpy(values) for values in (mean, std**2, y)))
    figure.suptitle(f"{data}: {target} of {len(y):,} held-out rows", fontsize=12, x=0.012, ha="left", parse_math=False)
    with output.open("wb") as file:
        figure.savefig(file, format="png")
