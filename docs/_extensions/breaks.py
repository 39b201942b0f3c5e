"""Where names in narrow tables may break: after dots, brackets and underscores, and between words in CamelCase.

``style.css`` has these breaks in tables only.
"""

import re
from typing import Any

from sphinx.application import Sphinx

_NAME = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
_PLACE = re.compile(r"(?<=[\w)])(?=\()|(?<=[_.,(=/\[])(?=[\w&])|(?<=[a-z])(?=[A-Z])")


def _break(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if "body" in context:
        context["body"] = _NAME.sub(lambda name: _PLACE.sub("<wbr>", name[0]), context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("html-page-context", _break)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
