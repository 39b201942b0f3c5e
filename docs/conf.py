"""How Sphinx makes the pages: ``python -m sphinx -W -b html docs site``."""

import re
import sys
from pathlib import Path

from sphinx.addnodes import pending_xref

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
python_maximum_signature_line_length = 72
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
    """Short parameters and attributes stand on one line in the source, ``:param a: ...; :param b: ...``.

    A name such as ``model_`` would be a reference without the backslash.
    """
    ends = re.compile(r"(?<=\S)[;,.]? +(?:and )?(?=:(?:param|ivar|raises) )")
    lines[:] = [part for line in lines for part in ends.sub(".\n", line).split("\n")]
    lines[:] = [re.sub(r"^(:ivar \w+)_:", r"\1\_:", line) for line in lines]


def readable_signature(app, what, name, thing, options, signature, returns):
    """What dataclasses print of a ``default_factory`` is no Python: Sphinx would not see where arguments end.

    A protocol shows arguments that nobody gives.
    """
    if what == "class" and signature == "(*args, **kwargs)":
        return "", returns
    signature = (signature or "").replace("<factory>", "...").replace("os.PathLike", "PathLike")
    return re.sub(r"dataclasses\.InitVar\[(\w+)\]", r"\1", signature) or None, returns


def find_names_in_all_modules(app, tree):
    """A docstring names classes as its own file imports them; the reference has them elsewhere."""
    for node in tree.findall(pending_xref):
        node["refspecific"] = node.get("refdomain") == "py"


def pictures_lead_to_their_files(app, page, template, context, tree):
    """The letters of a picture are small on a narrow page, and not in the file itself."""
    if "body" in context:
        context["body"] = re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', context["body"])


def tables_of_benchmarks(app, name, source):
    """MyST takes a link to Markdown for one to a page; what benchmarks write is a file, outside docs/."""
    source[0] = re.sub(r"\]\((?=[./]+/benchmarks/\S+\.md\))", "](path:", source[0])


def setup(app):
    app.connect("html-page-context", pictures_lead_to_their_files)
    app.connect("source-read", tables_of_benchmarks)
    app.connect("autodoc-process-docstring", one_field_a_line)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("doctree-read", find_names_in_all_modules)
