"""Held-out rows: how often the truth is within the stated intervals, as a line and as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import erf, erfinv

from .outputs import Output

__all__ = ["calibration", "draw", "within"]

_LEVELS = (0.5, 0.9, 0.95)
_SHOWN, _INTERVALS = 4000, 300  # points of the picture, and those that have their interval drawn
_BLUE, _GREY = "#1a5a99", "0.45"


def within(mean: np.ndarray, std: np.ndarray, y: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The share of rows inside the central intervals of the normal predictions, ``(len(levels),)``.

    A row is inside an interval of level p where ``|y - mean| <= std sqrt(2) erfinv(p)``.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: ``(m,)``.
    :param levels: between 0 and 1.
    """
    needed = np.sort(erf(np.abs(y - mean) / (np.sqrt(2) * std)))  # the least level whose interval holds each row
    return np.searchsorted(needed, levels, side="right") / len(y)


def calibration(mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> str:
    """The shares for a few levels, as a line."""
    found = within(mean, std, y, np.array(_LEVELS))
    parts = [f"{share:.1%} in the {level:.0%} intervals" for share, level in zip(found, _LEVELS, strict=True)]
    return f"Calibration: of {len(y):,} rows, {', '.join(parts)}."


def draw(output: Output, mean: np.ndarray, std: np.ndarray, y: np.ndarray, target: str, data: str) -> None:
    """Writes a PNG: predictions against the truth with their 95 % intervals, and the calibration of all intervals.

    :param mean: ``(m,)``; :param std: of an observation, ``(m,)``; :param y: the truth, ``(m,)``, in its units.
    :param target: name of the column; :param data: name of the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), dpi=150)  # without pyplot: no window system, no state left behind
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    _draw_predictions(left, mean, std, y, target)
    _draw_calibration(right, mean, std, y)
    for axes in (left, right):
        axes.grid(True, color="0.92", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    error = np.sqrt(np.mean((mean - y) ** 2))
    title = f"{data}: {target} of {len(y):,} held-out rows, RMSE {error:.4g}"
    figure.suptitle(title, fontsize=12, x=0.012, ha="left", parse_math=False)
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    with output.open("wb") as file:
        figure.savefig(file, format="png")


def _draw_predictions(axes: Any, mean: np.ndarray, std: np.ndarray, y: np.ndarray, target: str) -> None:
    some = np.random.default_rng(0).permutation(len(y))[:_SHOWN]
    few = some[:_INTERVALS]
    of = "" if len(some) == len(y) else f", {len(some):,} of them"
    of += "" if len(few) == len(y) else f", intervals of {len(few):,}"
    bars: dict[str, Any] = {"fmt": "none", "ecolor": _BLUE, "alpha": 0.3, "linewidth": 0.8, "zorder": 2}
    axes.errorbar(mean[few], y[few], xerr=1.96 * std[few], **bars)
    faint = float(np.clip(30 / np.sqrt(len(some)), 0.25, 0.7))
    axes.scatter(mean[some], y[some], s=9, color=_BLUE, alpha=faint, linewidths=0, zorder=3)
    low, high = min(y.min(), mean.min()), max(y.max(), mean.max())
    margin = 0.04 * (high - low)
    axes.plot([low, high], [low, high], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=4)
    axes.set_xlim(low - margin, high + margin)
    axes.set_ylim(low - margin, high + margin)
    axes.set_xlabel(f"{target}, predicted, with the 95 % interval", parse_math=False)
    axes.set_ylabel(f"{target}, true", parse_math=False)
    axes.set_title(f"predictions{of}", fontsize=10, loc="left")


def _draw_calibration(axes: Any, mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> None:
    levels = np.linspace(0.005, 0.995, 199)
    found = within(mean, std, y, levels)
    spread = 1.96 * np.sqrt(levels * (1 - levels) / len(y))
    axes.fill_between(
        levels,
        levels - spread,
        levels + spread,
        color="0.85",
        linewidth=0,
        label="95 % of exact predictions would lie here",
    )
    axes.plot([0, 1], [0, 1], color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(levels, found, color=_BLUE, linewidth=2, label="found")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("level of the central interval")
    axes.set_ylabel("share of held-out rows inside")
    axes.set_title("calibration: above the line too wide, below too narrow", fontsize=10, loc="left")
    score = (y - mean) / std
    width = np.sqrt(2) * erfinv(0.95)
    note = (
        f"(y - mean) / std: mean {score.mean():.2f}, deviation {score.std():.2f}\n"
        f"beyond {width:.2f}: {np.mean(np.abs(score) > width):.1%}"
    )
    axes.text(0.97, 0.05, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color="0.25")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
