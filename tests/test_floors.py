"""The structure of the package: imports go down only, GPyTorch begins at floor 6, and one loop runs every
solver.

The source is read, not imported, so this also covers imports inside functions and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "sketchgp"
FLOORS = {
    "cards": 0,
    "checks": 0,
    "errors": 0,
    "memory": 0,
    "devices": 0,
    "fingerprint": 0,
    "keops_import": 0,
    "random_streams": 0,
    "report": 0,
    "row_sources": 0,
    "settings": 0,
    "style": 0,
    "tensor_file": 0,
    "distributed": 1,
    "kernels": 1,
    "operators": 1,
    "space": 1,
    "preconditioners": 2,
    "inducing_points": 4,
    "solvers": 4,
    "inference": 5,
    "density": 6,
    "models": 6,
    "accelerate": 6,
    "fit": 6,
    "fitting": 6,
    "leave_one_out": 6,
    "noise_path": 6,
    "inducing_point_gp": 6,
    "one_hot": 6,
    "random_feature_classifier": 6,
    "random_feature_gp": 6,
    "predict": 6,
    "posterior_samples": 6,
    "botorch": 6,
    "cli": 7,
    "__main__": 7,
    "plotting": 7,
    "saved_model": 7,
    "sklearn": 7,
    "datasets": 7,
    "__init__": 8,  # re-exports the rest; nothing inside the package may import from it
}
GPYTORCH = {"gpytorch", "linear_operator", "botorch"}
CLOCKS = {"perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "time"}


def imports(nodes: list[ast.AST], path: Path, source: Path) -> list[tuple[int, str, str | None]]:
    """``(line, module, name or None)`` of every import among the nodes of a file, relative ones made absolute."""
    package = ["sketchgp", *path.relative_to(source).parent.parts]
    found: list[tuple[int, str, str | None]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else package[: len(package) - node.level + 1]
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, module, alias.name) for alias in node.names]
    return found


def own_loops(nodes: list[ast.AST], path: Path, source: Path) -> list[tuple[int, str]]:
    """``(line, what)`` of all that only ``solvers/loop`` does: reports; in solvers time, progress and Ctrl-C."""
    inside = path.relative_to(source).parts
    if inside[:2] == ("solvers", "loop"):
        return []
    words = [(node.lineno, getattr(node, "attr", getattr(node, "id", ""))) for node in nodes if is_name(node)]
    called = [(node.lineno, node.func) for node in nodes if isinstance(node, ast.Call)]
    calls = [(line, getattr(function, "attr", getattr(function, "id", ""))) for line, function in called]
    found = [(line, "makes a SolveReport") for line, name in calls if name == "SolveReport"]
    if inside[0] == "solvers":
        found += [(line, f"calls {name}") for line, name in calls if name in CLOCKS]
        found += [(line, f"names {word}") for line, word in words if word == "KeyboardInterrupt"]
        imported = [(line, module) for line, module, _ in imports(nodes, path, source)]
        found += [(line, f"imports {module}") for line, module in imported if module.split(".")[0] in ("tqdm", "time")]
    return found


def is_name(node: ast.AST) -> TypeGuard[ast.Name | ast.Attribute]:
    return isinstance(node, ast.Name | ast.Attribute)


def top(parts: tuple[str, ...]) -> str:
    """The folder or file directly under the package that a path belongs to."""
    return parts[0].removesuffix(".py")


def violations(source: Path) -> list[str]:
    """Every breach of the rules under ``source``, one line each."""
    broken = []
    for path in sorted(source.rglob("*.py")):
        where = path.relative_to(source)
        part = top(where.parts)
        if part not in FLOORS:
            broken.append(f"{where}: '{part}' has no floor; give it one here and in docs/architecture.md")
            continue
        floor = FLOORS[part]
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        broken += [
            f"{where}:{line}: {what}, as only solvers/loop does" for line, what in own_loops(nodes, path, source)
        ]
        for line, module, name in imports(nodes, path, source):
            root, *inside = module.split(".")
            if root in GPYTORCH and floor < 6 and part not in ("operators", "kernels"):
                broken.append(f"{where}:{line}: imports {root} below floor 6 (only operators/ and kernels.py may)")
            if root != "sketchgp":
                continue
            if inside:
                target = inside[0]
            else:  # "from sketchgp import name": a file of ours, or something that __init__ re-exports
                target = name if name in FLOORS else "__init__"
            if target not in FLOORS:
                broken.append(f"{where}:{line}: imports {module}, which has no floor")
            elif FLOORS[target] > floor:
                broken.append(f"{where}:{line}: floor {floor} imports {target} from floor {FLOORS[target]}")
    return broken


def test_imports_go_down_only():
    assert SOURCE.is_dir()
    broken = violations(SOURCE)
    assert not broken, "\n".join(broken)


def test_no_file_for_odds_and_ends():
    names = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert not [path for path in SOURCE.rglob("*.py") if path.name in names]


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("solvers/cg.py", "from sketchgp.models import exact", "floor 4 imports models from floor 6"),
        ("solvers/cg.py", "from ..models.exact import Model", "floor 4 imports models from floor 6"),
        ("solvers/cg.py", "from .. import accelerate", "floor 4 imports accelerate from floor 6"),
        ("preconditioners/nystrom.py", "def f():\n    import sketchgp.solvers.cg", "floor 2 imports solvers"),
        ("report.py", "from sketchgp import RPCholesky", "floor 0 imports __init__ from floor 8"),
        ("report.py", "from .operators import KernelMatrix", "floor 0 imports operators from floor 1"),
        ("inference/mll.py", "from gpytorch.settings import debug", "imports gpytorch below floor 6"),
        ("preconditioners/nystrom.py", "import linear_operator.settings", "imports linear_operator below floor 6"),
        ("oddments.py", "", "'oddments' has no floor"),
        ("solvers/cg.py", "import time", "imports time, as only solvers/loop does"),
        ("solvers/full/cg.py", "from time import monotonic", "1: imports time, as only"),
        (
            "solvers/full/cg.py",
            "def f(run):\n    run.clock.perf_counter()",
            "2: calls perf_counter, as only",
        ),
        (
            "solvers/cg.py",
            "def f():\n    from tqdm.auto import tqdm",
            "2: imports tqdm.auto, as only",
        ),
        ("solvers/cg.py", "try:\n    f()\nexcept KeyboardInterrupt:\n    pass", "3: names KeyboardInterrupt"),
        ("solvers/cg.py", "from ..report import SolveReport\nSolveReport()", "2: makes a SolveReport"),
        ("models/exact.py", "from .. import report\nreport.SolveReport()", "2: makes a SolveReport"),
        ("fit.py", "import sketchgp.oddments", "imports sketchgp.oddments, which has no floor"),
    ],
)
def test_a_breach_is_found(tmp_path, file, text, complaint):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("solvers/cg.py", "from .cholesky import Cholesky\nfrom ..report import SolveReport\nimport torch"),
        ("operators/kernel.py", "import gpytorch\nfrom linear_operator import LinearOperator"),
        ("models/exact.py", "import gpytorch\nfrom sketchgp import solvers, errors"),
        (
            "solvers/loop/run.py",
            "import time\nfrom tqdm import tqdm\ntime.time()\nSolveReport()\nraise KeyboardInterrupt",
        ),
        ("fit.py", "import time\nfrom tqdm import tqdm\ntime.time()\nraise KeyboardInterrupt"),
        ("__init__.py", "from .accelerate import accelerate\nfrom sketchgp.cli import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path, file, text):
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    assert violations(tmp_path) == []
