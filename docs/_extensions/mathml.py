"""Formulas as MathML, which browsers typeset by themselves: no script, nothing from another server."""

import re
from typing import Literal

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

_FUNCTION = re.compile("<mi>(log|exp|sin|cos)</mi>")  # which stand apart from what is beside them
# Browsers hang the sign of a root from its bar: over a low letter it sinks below the line. This makes room for it.
_STRUT = '<mspace width="0" height="0.75em" depth="0.2em"/>'


def _mathml(formula: str, display: Literal["inline", "block"]) -> str:
    found = convert(formula, display=display)
    if "\\" in found:
        raise ValueError(f"a formula has a command that latex2mathml does not know: {formula}")
    found = _FUNCTION.sub(r'<mo lspace="0.17em" rspace="0.17em">\1</mo>', found)
    return found.replace("<msqrt>", f"<msqrt>{_STRUT}")


def _inline(writer: HTML5Translator, node: nodes.math) -> None:
    formula, mark = _mathml(node.astext(), "inline"), node.get("mark", "")
    writer.body.append(f'<span class="with-mark">{formula}{mark}</span>' if mark else formula)
    raise nodes.SkipNode


def _block(writer: HTML5Translator, node: nodes.math_block) -> None:
    formulas = node.astext().split(r"\qquad")  # which stand below each other where the page is narrow
    inside = " ".join(_mathml(formula, "block") for formula in formulas)
    writer.body.append(f'<div class="math">{inside}</div>\n')
    raise nodes.SkipNode


def _take_marks(app: Sphinx, tree: nodes.document, page: str) -> None:
    """A formula takes the punctuation mark after it, which would begin a line otherwise."""
    for node in tree.findall(nodes.math):
        after = node.next_node(siblings=True, descend=False)
        if isinstance(after, nodes.Text) and after.astext().startswith((",", ".", ";", ":", ")")):
            node["mark"] = after.astext()[0]
            after.parent.replace(after, nodes.Text(after.astext()[1:]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.connect("doctree-resolved", _take_marks)
    app.connect("config-inited", lambda _, config: setattr(config, "html_math_renderer", "mathml"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
