"""The size and shape of the package: counts that may fall and must not rise."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from test_floors import SOURCE, imports

LIMITS = {
    "lines of code": 23_317,
    "files": 198,
    "subclasses of LinearOperator": 6,
    "context variables": 7,
    "private names of others": 30,
    "files outside distributed/ that import it": 8,
    "functions of more than 60 lines": 0,
    "docstrings that do not begin with a verb or a noun": 0,
    "circles of imports": 0,
}
FRAGMENT = re.compile(r"(Of|What|Whether|Those|The same|As|By|In|With|How)\b")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lines_of_code(text: str, nodes: list[ast.AST]) -> int:
    """Count the lines that hold neither a comment nor a docstring alone."""
    strings = [node.body[0] for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    documentation = {line for one in strings for line in range(one.lineno, (one.end_lineno or 0) + 1)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    return len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - documentation)


def reaches(node: ast.AST) -> bool:
    """Return whether a node is a private attribute of something else than ``self``, ``cls`` or ``super()``."""
    if not isinstance(node, ast.Attribute) or not re.match(r"_(?!_)", node.attr):
        return False
    owner = node.value.func if isinstance(node.value, ast.Call) else node.value
    return not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super"))


def operators(nodes: list[ast.AST]) -> set[str]:
    """Return the names of all classes that inherit from a LinearOperator."""
    bases = {
        node.name: {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found: set[str] = set()
    while more := {
        name
        for name, parents in bases.items()
        if name not in found and any(parent in found or parent.endswith("LinearOperator") for parent in parents)
    }:
        found |= more
    return found


def circles(imported: dict[Path, list[tuple[int, str, str | None]]], source: Path) -> list[Path]:
    """Return the files that import each other, directly or through others."""
    names = {".".join(["sketchgp", *path.relative_to(source).with_suffix("").parts]): path for path in imported}
    graph = {
        path: {
            names[module]
            for _, base, name in found
            for module in (base, f"{base}.{name}")
            if module in names and names[module] != path
        }
        for path, found in imported.items()
    }
    leaves = True
    while leaves:  # a file that imports nothing, or that nothing imports, is in no circle
        targeted = set().union(*graph.values())
        leaves = {path for path, targets in graph.items() if not targets or path not in targeted}
        graph = {path: targets - leaves for path, targets in graph.items() if path not in leaves}
    return sorted(graph)


def counts(source: Path) -> Iterator[tuple[str, int]]:
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    inside = {path: list(ast.walk(ast.parse(text))) for path, text in texts.items()}
    imported = {path: imports(found, path, source) for path, found in inside.items()}
    nodes = [node for found in inside.values() for node in found]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = [node for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    sharing = [
        path
        for path, found in imported.items()
        if "distributed" not in path.relative_to(source).parts
        and any(f"{base}.{name}".startswith("sketchgp.distributed") for _, base, name in found)
    ]
    yield "lines of code", sum(lines_of_code(texts[path], found) for path, found in inside.items())
    yield "files", len(inside)
    yield "subclasses of LinearOperator", len(operators(nodes))
    yield "context variables", sum(getattr(f, "id", getattr(f, "attr", "")) == "ContextVar" for f in calls)
    yield "private names of others", sum(map(reaches, nodes))
    yield "files outside distributed/ that import it", len(sharing)
    yield "functions of more than 60 lines", sum((f.end_lineno or 0) - f.lineno > 60 for f in functions)
    fragments = sum(bool(FRAGMENT.match(ast.get_docstring(node) or "")) for node in documented)
    yield "docstrings that do not begin with a verb or a noun", fragments
    yield "circles of imports", len(circles(imported, source))


def test_counts_do_not_rise() -> None:
    found = dict(counts(SOURCE))
    risen = {what: (found[what], limit) for what, limit in LIMITS.items() if found[what] > limit}
    assert not risen, f"counted, and the limits: {risen}"


def test_everything_is_counted(tmp_path: Path) -> None:
    """A package of two files with one of each."""
    (tmp_path / "one.py").write_text(
        '"""Module."""\n\nfrom .two import made\n\n\n# a comment\nclass Made(LinearOperator):\n    """Of two."""\n\n'
        "    def long(self):\n" + "        self._own = made._theirs\n" * 61
    )
    (tmp_path / "two.py").write_text(
        "from .distributed import shards\nfrom .one import Made\n\nvariable = ContextVar('v')\n"
    )
    found = dict(counts(tmp_path))
    assert found.pop("lines of code") == 67 and found.pop("files") == 2
    assert found.pop("private names of others") == 61 and found.pop("circles of imports") == 2
    assert set(found.values()) == {1}
