"""What results show of themselves: a few aligned lines in a console, a table of two columns in a notebook."""

from __future__ import annotations

import dataclasses
import html
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
    """A title, and rows of a label and what there is to say; rows without a text are left out."""

    title: str
    rows: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, title: str, **rows: str | None) -> Card:
        """:param rows: label, with ``_`` for spaces, and text."""
        kept = ((label.replace("_", " "), _cut(text)) for label, text in rows.items() if text)
        return cls(title, tuple(kept))

    def text(self) -> str:
        """Aligned lines."""
        width = max((len(label) for label, _ in self.rows), default=0)
        lines = [self.title]
        for label, value in self.rows:
            parts = textwrap.wrap(value, _WIDTH - width - 4, break_long_words=True) or [""]
            lines += [
                f"  {name:<{width}}  {part}" for name, part in zip([label, *[""] * len(parts)], parts, strict=False)
            ]
        return "\n".join(lines)

    def html(self) -> str:
        """A table, without colours of its own: it takes those of the notebook."""
        left = 'style="text-align: left"'
        rows = "".join(
            f"<tr><th {left}>{html.escape(label)}</th><td {left}>{html.escape(value)}</td></tr>"
            for label, value in self.rows
        )
        caption = f'<caption style="text-align: left; caption-side: top"><b>{html.escape(self.title)}</b></caption>'
        return f"<table>{caption}<tbody>{rows}</tbody></table>"


class Shown:
    """Base class of what shows itself by a card."""

    def _card(self) -> Card:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._card().text()

    def _repr_html_(self) -> str:
        return self._card().html()


def seconds(value: float) -> str:
    """``0.13 s``, ``12.3 s``, ``4 min 10 s``, ``2 h 05 min``."""
    if value < 60:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def several(count: int, thing: str) -> str:
    """``1 column``, ``1,234 columns``."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def span(values: Tensor) -> str:
    """From the least to the largest of some numbers."""
    finite = values.detach()[torch.isfinite(values)]
    if not finite.numel():
        return "no finite number"
    least, largest = (f"{float(value):.4g}" for value in (finite.min(), finite.max()))
    return least if least == largest else f"{least} to {largest}"


def tensor_kind(values: Tensor) -> str:
    """``float64 on cpu``."""
    return f"{str(values.dtype).removeprefix('torch.')} on {values.device}"


def shape(values: Tensor) -> str:
    """``10,000 x 8``."""
    return " x ".join(f"{size:,}" for size in values.shape)


def choice(value: Any) -> str:
    """A choice as one types it: what differs from the defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value if isinstance(value, str) else "none" if value is None else type(value).__name__
    fields = (f for f in dataclasses.fields(value) if f.init and getattr(value, f.name) != f.default)
    return f"{type(value).__name__}({', '.join(f'{f.name}={getattr(value, f.name)!r}' for f in fields)})"


def report_card(report: Any) -> Card:
    """Of a :class:`sketchgp.SolveReport`."""
    endless = report.tol == float("inf")
    state = (
        "converged" if report.converged else "ended as planned" if endless and report.reason.final else "NOT converged"
    )
    aim = "" if endless else f" (tolerance {report.tol:.0e})"
    work = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" if isinstance(count, int) else f"{count:,.1f} {name.replace('_', ' ')}"
        for name, count in report.work.items()
    )
    about = [] if report.max_deviations == float("inf") else [f"{report.max_deviations:.2g} (estimated)"]
    about += [] if report.certainty == float("inf") else [f"{report.certainty:.2g} (certain)"]
    off = f"off by at most {', '.join(about)} posterior deviations" if about else ""
    if not off and report.judged == "predictions":
        off = "off by an unknown number of posterior deviations"
    held_out = report.held_out[-1].error if report.held_out else None
    label, text = report.fit_in_words
    return Card.of(
        f"SolveReport: {report.solver}, {state}",
        outcome=None if report.reason is None else str(report.reason),
        system=f"{report.sizes}, {several(report.columns, 'column')}, {report.dtype} on {report.device}",
        preconditioner=None if report.preconditioner == "none" else report.preconditioner_and_rank,
        work=work,
        **{label: f"{text}{aim if report.judged == 'residual' else ''}"},
        predictions=off and off + ("" if report.judged == "residual" else aim),
        held_out=None if held_out is None else f"root mean square error {span(held_out)}",
        time=f"{seconds(report.seconds)} + {seconds(report.setup_seconds)} set-up",
        peak_memory=in_words(report.peak_memory) if report.peak_memory else None,
        notes="; ".join(report.notes),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
