"""Block shapes that were measured, kept in a file for each device and version of Triton.

The fixed table in ``blocks`` needs no measuring and is where every search begins.  Inside
:class:`sketchgp.settings.tune_kernels` the first large product of each kind tries several shapes, and shares of
polynomial exponentials, and keeps the fastest: in this process, and in ``blocks.json`` in the folder that
``SKETCHGP_CACHE`` names, else in ``sketchgp`` under ``XDG_CACHE_HOME`` or ``~/.cache``.  Later products take what is
kept.  Another shape adds up in another order: the last digits are those of another rounding.

A file that is missing, broken or of another version counts as empty, and one that cannot be written is not.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from .blocks import Blocks
from .layout import PADDING
from .plan import Plan

T = TypeVar("T")

_FORMAT = 1
_PAIRS = 2**24  # a product of fewer is not measured: it is over before that would pay
_REPEATS = 3
_SHARES = (1, 2)  # quarters of polynomial exponentials that are tried with the best shape
logger = logging.getLogger("sketchgp")
_known: dict[tuple[Path, str], dict[str, Blocks]] = {}  # by file and device: what was read or measured


def cache_file() -> Path:
    """Where shapes are kept."""
    named = os.environ.get("SKETCHGP_CACHE")
    if named:
        return Path(named) / "blocks.json"
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(os.path.expanduser("~")) / ".cache") / "sketchgp" / "blocks.json"


def kept(plan: Plan, gradient: bool, device: torch.device) -> Blocks | None:
    """The shape that was found for a kernel on a device; None while none was."""
    found = _table(device).get(_key(plan, gradient))
    whole = found is None or not plan.halves or found.columns % found.rows == 0
    return found if whole else None  # else of a file that was not written here


def forget(plan: Plan, gradient: bool, device: torch.device) -> None:
    """In this process: what was kept does not fit."""
    _table(device).pop(_key(plan, gradient), None)


def measured(
    run: Callable[[Blocks], T],
    plan: Plan,
    gradient: bool,
    device: torch.device,
    choices: list[Blocks],
    fits: Callable[[BaseException], bool],
) -> T:
    """The result of ``run`` with the shape that is the fastest, which is kept.

    :param choices: the shapes to try, best guess first.
    :param fits: whether an error says that a shape does not fit the device: such shapes are left out.
    :raises BaseException: the last of these errors, where no shape fits.
    """
    seconds: dict[Blocks, float] = {}
    results: dict[Blocks, T] = {}
    error: BaseException | None = None
    for blocks in _candidates(choices, seconds):
        try:
            results = {blocks: run(blocks)}  # compiled now
            seconds[blocks] = min(_timed(run, blocks, device) for _ in range(_REPEATS))
        except Exception as found:
            if not fits(found):
                raise
            error = found
    if not seconds:
        assert error is not None
        raise error
    best = min(seconds, key=seconds.__getitem__)
    _keep(plan, gradient, device, best)
    return results[best] if best in results else run(best)


def worth_measuring(rows: int, columns: int) -> bool:
    """Whether a product is so large that its seconds say something."""
    return rows * columns >= _PAIRS


def _candidates(choices: list[Blocks], seconds: dict[Blocks, float]) -> Iterator[Blocks]:
    """The shapes, and then the best of them with polynomial exponentials."""
    yield from choices
    if seconds:
        best = min(seconds, key=seconds.__getitem__)
        yield from (best._replace(quarters=share) for share in _SHARES)


def _timed(run: Callable[[Blocks], Any], blocks: Blocks, device: torch.device) -> float:
    _wait(device)
    begun = time.perf_counter()
    run(blocks)
    _wait(device)
    return time.perf_counter() - begun


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _key(plan: Plan, gradient: bool) -> str:
    kind = "gradient" if gradient else "product"
    return f"{kind} {hashlib.sha256(repr(plan).encode()).hexdigest()[:16]}"


def _device(device: torch.device) -> str:
    """Of what the shapes are good for."""
    import triton

    if device.type != "cuda":
        return f"{device.type}, triton {triton.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} {major}.{minor}, triton {triton.__version__}"


def _table(device: torch.device) -> dict[str, Blocks]:
    path, name = cache_file(), _device(device)
    if (path, name) not in _known:
        found = _read(path).get(name, {})
        shapes = {key: _shape(value) for key, value in found.items()} if isinstance(found, dict) else {}
        _known[path, name] = {key: shape for key, shape in shapes.items() if shape is not None}
    return _known[path, name]


def _shape(value: Any) -> Blocks | None:
    """A shape as it is in a file; None for anything that is none."""
    sizes = isinstance(value, list) and len(value) == 5 and all(type(part) is int and part >= 0 for part in value)
    if not sizes:
        return None
    blocks = Blocks(*value)
    powers = all(16 <= size <= PADDING and size & (size - 1) == 0 for size in blocks[:2])
    usual = blocks.warps in (1, 2, 4, 8, 16) and 1 <= blocks.stages <= 8 and blocks.quarters in (0, 1, 2, 4)
    return blocks if powers and usual else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("devices"), dict):
        return {}
    return found["devices"]


def _keep(plan: Plan, gradient: bool, device: torch.device, blocks: Blocks) -> None:
    """In this process, and in the file, whole or not at all."""
    table, path, name = _table(device), cache_file(), _device(device)
    table[_key(plan, gradient)] = blocks
    devices = _read(path)  # again: other processes write too
    before = devices.get(name)
    devices[name] = {
        **(before if isinstance(before, dict) else {}),
        **{key: list(shape) for key, shape in table.items()},
    }
    text = json.dumps({"format": _FORMAT, "devices": devices}, indent=1, sort_keys=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        logger.warning(
            "Block shapes were measured and cannot be kept in %s (%s); they last for this process", path, error
        )
