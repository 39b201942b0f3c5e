"""Show results as cards (aligned lines, or a table in a notebook), and progress where someone is watching."""

from __future__ import annotations

import dataclasses
import html
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .memory import in_words

_WIDTH = 110  # characters of a line
_LONGEST = 400  # characters of a value


@dataclass(frozen=True)
class Card:
    """A title, and rows of a label and a text; rows without a text are left out."""

    title: str
    rows: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, title: str, **rows: str | None) -> Card:
        """:param rows: label, with ``_`` for spaces, and text."""
        return cls(title, tuple((label.replace("_", " "), _cut(text)) for label, text in rows.items() if text))

    def text(self) -> str:
        """Return the card as aligned lines."""
        width = max((len(label) for label, _ in self.rows), default=0)
        lines = [self.title]
        for label, value in self.rows:
            first, later = f"  {label:<{width}}  ", " " * (width + 4)
            lines.append(textwrap.fill(value, _WIDTH, initial_indent=first, subsequent_indent=later))
        return "\n".join(lines)

    def html(self) -> str:
        """Return the card as a table without colours, which takes those of the notebook."""
        left = 'style="text-align: left"'
        rows = "".join(
            f"<tr><th {left}>{html.escape(label)}</th><td {left}>{html.escape(value)}</td></tr>"
            for label, value in self.rows
        )
        caption = f'<caption style="text-align: left; caption-side: top"><b>{html.escape(self.title)}</b></caption>'
        return f"<table>{caption}<tbody>{rows}</tbody></table>"


class Shown:
    """Base class of objects that show themselves by a card."""

    def _card(self) -> Card:
        raise NotImplementedError

    def table(self) -> str:
        """Return all that is known, one row a line, each with its unit."""
        return self._card().text()

    __repr__ = table

    def _repr_html_(self) -> str:
        return self._card().html()


def seconds(value: float) -> str:
    """Return a time such as ``0.13 s``, ``12.3 s``, ``4 min 10 s`` or ``2 h 05 min``."""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def several(count: int, thing: str) -> str:
    """Return a count such as ``1 column`` or ``1,234 columns``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def span(values: Tensor) -> str:
    """Return the least and the largest of some numbers, as text."""
    finite = values.detach()[torch.isfinite(values)]
    if not finite.numel():
        return "no finite number"
    least, largest = (f"{float(value):.4g}" for value in (finite.min(), finite.max()))
    return least if least == largest else f"{least} to {largest}"


def tensor_kind(values: Tensor) -> str:
    """Return dtype and device, such as ``float64 on cpu``."""
    return f"{str(values.dtype).removeprefix('torch.')} on {values.device}"


def shape(values: Tensor) -> str:
    """Return a shape such as ``10,000 x 8``."""
    return " x ".join(f"{size:,}" for size in values.shape)


def choice(value: Any) -> str:
    """Return a choice as one types it, without the parameters that have their defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value if isinstance(value, str) else "none" if value is None else type(value).__name__
    fields = (f for f in dataclasses.fields(value) if f.init and getattr(value, f.name) != f.default)
    return f"{type(value).__name__}({', '.join(f'{f.name}={getattr(value, f.name)!r}' for f in fields)})"


def report_card(report: Any) -> Card:
    """Return the card of a :class:`sketchgp.SolveReport`."""
    tolerance = "" if report.tol == float("inf") else f" (tolerance {report.tol:.0e})"
    work = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" if isinstance(count, int) else f"{count:,.1f} {name.replace('_', ' ')}"
        for name, count in report.work.items()
    )
    off = []
    if report.max_deviations < float("inf"):
        off.append(f"within about {report.max_deviations:.2g} posterior deviations")
    elif report.judged == "predictions":
        off.append("within an unknown number of posterior deviations")
    if report.certainty < float("inf"):
        off.append(f"certainly within {report.certainty:.2g}" + ("" if off else " posterior deviations"))
    held_out = report.held_out[-1].error if report.held_out else None
    label, text = report.fit_in_words
    return Card.of(
        f"SolveReport: {report.solver}, {report.state}",
        outcome=str(report.reason),
        system=f"{report.sizes}, {several(report.columns, 'column')}, {report.dtype} on {report.device}",
        preconditioner=None if report.preconditioner == "none" else report.preconditioner_and_rank,
        work=work,
        **{label: text + tolerance * (report.judged == "residual")},
        predictions=", ".join(off) + tolerance * (report.judged != "residual") if off else None,
        held_out=None if held_out is None else f"root mean square error {span(held_out)}",
        time=f"{seconds(report.seconds)} + {seconds(report.setup_seconds)} set-up",
        peak_memory=in_words(report.peak_memory) if report.peak_memory else None,
        notes="; ".join(report.notes),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def shows_progress(asked: bool | None) -> bool:
    """Return ``asked``; where it is None, return whether this is a terminal or a Jupyter notebook."""
    return asked if asked is not None else sys.stderr.isatty() or in_notebook()


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None or "ipykernel" not in sys.modules else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")
