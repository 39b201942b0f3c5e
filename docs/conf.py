"""How Sphinx makes the pages: ``python -m sphinx -W -b html docs site``."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent / "src")]

import sketchgp  # noqa: E402

project = "sketchgp"
author = "The sketchgp authors"
copyright = author
release = version = sketchgp.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "breaks", "mathml"]
exclude_patterns = ["_*"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autoclass_content = "class"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "sketchgp"
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}


def one_field_a_line(app, what, name, thing, options, lines):
    """Short parameters and attributes stand on one line in the source, ``:param a: ...; :param b: ...``."""
    lines[:] = [part for line in lines for part in re.split(r"[;,]? +(?:and )?(?=:(?:param|ivar|raises) )", line)]


def readable_defaults(app, what, name, thing, options, signature, returns):
    """What dataclasses print of a ``default_factory`` is no Python: Sphinx would not see where arguments end."""
    return (signature or "").replace("<factory>", "...") or None, returns


def tables_of_benchmarks(app, name, source):
    """MyST takes a link to Markdown for one to a page; what benchmarks write is a file, outside docs/."""
    source[0] = re.sub(r"\]\((?=[./]+/benchmarks/\S+\.md\))", "](path:", source[0])


def setup(app):
    app.connect("source-read", tables_of_benchmarks)
    app.connect("autodoc-process-docstring", one_field_a_line)
    app.connect("autodoc-process-signature", readable_defaults)
