"""Where lines break: names in tables after dots, brackets and underscores; numbers never apart from their units.

``style.css`` has the breaks of names in narrow tables only, those of long names in all.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_LONG = 30  # a name of more characters squeezes the other columns of a table
_SHORT = 18  # a formula or a shape that stays on one line

_CODE = re.compile(r'<code class="([^"]*literal notranslate)">(.*?)</code>', flags=re.DOTALL)
_NAME = re.compile(r'<span class="pre">([^<]+)</span>')
_PLACE = re.compile(r"(?<=[\w)])(?=\()|(?<=[_.,(=/\[])(?=[\w&])|(?<=[a-z])(?=[A-Z])")
_PIECE = re.compile(r"<(pre|code|math)\b.*?</\1>|<[^>]+>|(?P<text>[^<]+)", flags=re.DOTALL)
_TIED = re.compile(
    r"(?<=\d) (?=(?:s|h|m|ms|min|°C|[KMG]i?B|eV)\b)|(?<=\w) (?== [\d√-])|(?<=\w =) (?=[\d√-])"
    r"|(?:(?<=±)|(?<=&lt;)|(?<=Figure)|(?<=Table)|(?<=Algorithm)|(?<=Theorem)) (?=\d)"
)
_WHOLE = re.compile(r"\b(?:\d[\d.]*e-\d+|Matérn-\d/\d|[A-Za-z]-[A-Za-z]\w*)\b")


def _code(found: re.Match[str]) -> str:
    kinds, inside = found.groups()
    text = re.sub("<[^>]+>", "", inside)
    if len(text) <= _SHORT and re.search("[ -]", text):
        kinds += " whole"
    return f'<code class="{kinds}">{_NAME.sub(_name, inside)}</code>'


def _name(found: re.Match[str]) -> str:
    name = found[1]
    if name.startswith("-") and len(name) <= _LONG:
        return f'<span class="pre whole">{name}</span>'
    mark = '<wbr class="long">' if len(name) > _LONG else "<wbr>"
    return f'<span class="pre">{_PLACE.sub(mark, name)}</span>'


def _text(text: str) -> str:
    text = _WHOLE.sub(r'<span class="whole">\g<0></span>', _TIED.sub("&nbsp;", text))
    return re.sub(r"(?<=[a-z]_)(?=[a-z])", "<wbr>", text)


def _break(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context and page != "genindex":
        body = _CODE.sub(_code, context["body"])
        context["body"] = _PIECE.sub(lambda piece: _text(piece["text"]) if piece["text"] else piece[0], body)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _break)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
