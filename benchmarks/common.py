"""What every benchmark shares: data, a model, the record of the machine, JSON and tables."""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

DATA_VARIABLE = "SKETCHGP_DATA"
COVERED = 1.959964  # deviations around a mean that hold 95%
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
RESULTS = Path(__file__).resolve().parent / "results"


# ---------------------------------------------------------------------------------------------- data
def data_directory(given: str | None) -> Path:
    """The directory with the NAME.npz files: ``--data`` if given, else the environment variable.

    Raises:
        SystemExit: when neither is given or the directory does not exist, with what to do.
    """
    chosen = given or os.environ.get(DATA_VARIABLE)
    if not chosen:
        raise SystemExit(
            f"No data directory: pass --data DIRECTORY or set the environment variable {DATA_VARIABLE}. "
            "It must hold NAME.npz files with arrays X (n, d) and y (n,); see benchmarks/README.md."
        )
    directory = Path(chosen)
    if not directory.is_dir():
        raise SystemExit(f"The data directory {chosen!r} does not exist or is not a directory.")
    return directory


def load_arrays(directory: Path, name: str) -> dict[str, np.ndarray]:
    """All arrays of NAME.npz. Raises SystemExit when the file or one of X, y is missing."""
    path = directory / f"{name}.npz"
    if not path.is_file():
        raise SystemExit(f"There is no {name}.npz in the data directory; see benchmarks/README.md.")
    with np.load(path, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    for key in ("X", "y"):
        if key not in arrays:
            raise SystemExit(f"{name}.npz has no array {key!r} (it holds: {', '.join(sorted(arrays))}).")
    return arrays


def arguments(doc: str, quick: str, report: bool = True) -> argparse.ArgumentParser:
    """The options that a benchmark has: ``--data``, ``--out``, ``--fresh``, ``--quick``, and ``--report``.

    Args:
        doc: the docstring of the script.
        quick: what it does then.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    parser.add_argument("--data", help="directory with the NAME.npz files")
    parser.add_argument("--out", help="directory for the results")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--quick", action="store_true", help=quick)
    if report:
        parser.add_argument("--report", action="store_true", help="measure nothing")
    return parser


def has_data(directory: Path, name: str) -> bool:
    return (directory / f"{name}.npz").is_file()


def standardise(train: np.ndarray, *others: np.ndarray) -> tuple[np.ndarray, ...]:
    """Subtract the mean and divide by the deviation of ``train``, column by column, in float64.

    A constant column becomes zeros. Returns ``train`` and each of ``others``, standardised alike.
    """
    train = np.asarray(train, dtype=np.float64)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    # Rounding leaves a constant column a deviation of about 1e-16 of its size, not exactly 0.
    constant = deviation <= 1e-12 * np.maximum(np.abs(mean), 1e-300)
    scale = np.where(constant, 1.0, deviation)
    results = []
    for part in (train, *others):
        moved = (np.asarray(part, dtype=np.float64) - mean) / scale
        results.append(np.where(constant, 0.0, moved))
    return tuple(results)


def subsample(arrays: dict[str, np.ndarray], n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """X and y of ``n`` rows drawn without replacement (all rows, in order, when there are fewer)."""
    x, y = arrays["X"], arrays["y"]
    if len(x) > n:
        rows = np.sort(np.random.RandomState(seed).choice(len(x), n, replace=False))
        x, y = x[rows], y[rows]
    return x, y


def targets(y: np.ndarray, positive: int | None) -> np.ndarray:
    """Regression targets as they are; for classification (``positive`` given) that class +1, the rest -1."""
    if positive is None:
        return np.asarray(y, dtype=np.float64)
    return np.where(np.asarray(y) == positive, 1.0, -1.0)


class Model(gpytorch.models.ExactGP):
    """Zero mean, one kernel."""

    def __init__(self, x: Tensor, y: Tensor, likelihood: Any, kernel: Any) -> None:
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def scores(mean: Tensor, variance: Tensor, y: Tensor) -> dict[str, float]:
    """Of predicted observations ``(m,)``: root mean square error, negative log density, and how many lie within the
    interval of 95%."""
    mean, variance, y = (part.detach().double().reshape(-1) for part in (mean, variance, y))
    error, variance = mean - y, variance.clamp_min(1e-12)
    return {
        "rmse": float(error.square().mean().sqrt()),
        "nll": float((0.5 * (error.square() / variance + (2 * math.pi * variance).log())).mean()),
        "coverage": float((error.abs() <= COVERED * variance.sqrt()).double().mean()),
    }


# ------------------------------------------------------------------------------------------- machine
def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    with contextlib.suppress(ImportError):  # found on the path, not installed
        return getattr(importlib.import_module(package), "__version__", None)
    return None


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def now() -> str:
    """Date and time of a measurement, UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def mark_of(folder: Path) -> str:
    """Eight digits of a digest of the Python code in a folder, which comments, docstrings and layout do not change."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        digest.update(f"{path.relative_to(folder).as_posix()}\n{ast.unparse(tree)}\n".encode())
    return digest.hexdigest()[:8]


@functools.cache
def sources() -> str:
    """Version of sketchgp and mark of its code, such as ``0.3.0+1a2b3c4d``: what a result was measured of."""
    spec = importlib.util.find_spec("sketchgp")
    assert spec is not None and spec.origin is not None
    version = importlib.import_module("sketchgp").__version__  # that of the code, where an older one is installed
    return f"{version}+{mark_of(Path(spec.origin).parent)}"


def version(result: dict[str, Any]) -> str:
    """The version of sketchgp that a result is of; "unknown" where it does not say."""
    return result.get("sources", "unknown").split("+")[0]


def measured_of(results: dict[str, Any]) -> set[str]:
    """The ``sources`` of all results of a JSON but rivals'; "unknown" stands for those of before there were such."""

    def dated(value: Any) -> Iterator[str]:
        if isinstance(value, dict) and "date" in value:
            if "rival" not in value:
                yield value.get("sources", "unknown")
        elif isinstance(value, (dict, list)):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from dated(inner)

    found = set(dated({key: value for key, value in results.items() if key != "machine"}))
    return found or set(dated(results.get("machine")))  # that of a file which is written as a whole


def describe(info: dict[str, Any]) -> str:
    """The machine's record in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return (
        f"{info['processor']}, {info['cores']} cores, {info['torch_threads']} torch threads; {versions}; "
        f"{info['date']}."
    )


def machine(*more: str) -> dict[str, Any]:
    """What a reader must know to compare times: processor, cores, threads, versions, sources, date.

    Args:
        more: packages whose versions matter beside those that every benchmark names.
    """
    packages = ("torch", "gpytorch", "linear_operator", "sketchgp", "numpy", *more)
    return {
        "processor": _processor(),
        "cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": {name: _version(name) for name in packages} | {"sketchgp": sources().split("+")[0]},
        "sources": sources(),
        "date": now(),
    }


def load_average() -> float | None:
    """Load of the last minute: far above 1 before a run means that times were taken on a busy machine."""
    with contextlib.suppress(OSError, AttributeError):
        return round(os.getloadavg()[0], 2)
    return None


# ---------------------------------------------------------------------------------------------- JSON
def results_directory(given: str | None, quick: bool) -> Path:
    """Where results go: ``--out``, or ``results``, or ``results/quick`` for a smoke test."""
    directory = Path(given) if given else (RESULTS / "quick" if quick else RESULTS)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def plain(value: Any) -> Any:
    """As JSON has it, six digits."""
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, (np.floating, float)):
        number = float(value)
        return float(f"{number:.6g}") if math.isfinite(number) else None
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write atomically (a killed run leaves the older file); six digits; not-a-number becomes null."""
    text = json.dumps(plain(content), indent=1, allow_nan=False)
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(_one_line_lists(text) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _one_line_lists(text: str) -> str:
    """Put every list of plain values on one line; the structure around them keeps its indentation."""
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", text)


def publish(path: Path, results: dict[str, Any], report: Callable[[dict[str, Any]], str], what: str = "runs") -> None:
    """Write the report beside the JSON at ``path`` as Markdown, and print it.

    Raises:
        SystemExit: where ``results[what]`` is empty.
    """
    if not results.get(what):
        raise SystemExit(f"There is nothing in {path.name} to report on.")
    text = report(results)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


def read_json(path: Path) -> dict[str, Any]:
    """The earlier content, or an empty dictionary."""
    if not path.is_file():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def thinned(history: Sequence[float]) -> dict[str, list[Any]]:
    """The residual after iterations 0 to 10, every fifth, and the last; three digits."""
    last = len(history) - 1
    kept = [i for i in range(len(history)) if i <= 10 or i % 5 == 0 or i == last]
    return {"iteration": kept, "residual": [float(f"{history[i]:.3g}") for i in kept]}


def median(values: Sequence[float | None]) -> float | None:
    """Median of the numbers present; None when there is none."""
    present = [value for value in values if value is not None and math.isfinite(value)]
    return float(np.median(present)) if present else None


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table; every cell as given, None as a dash."""
    cells = [[("-" if cell is None else str(cell)) for cell in row] for row in [header, *rows]]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("---" for _ in header) + "|")
    return "\n".join(lines)


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table: ``digits`` significant digits, a dash for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}g}" if not 1e3 <= abs(value) < 1e6 else f"{value:,.0f}"
