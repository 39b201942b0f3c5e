"""Free memory, errors where it does not suffice, and the most that was used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .errors import InputError

_FALLBACK = 4 * 2**30  # bytes assumed to be free where the system does not say
_SELF = Path("/proc/self")
_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc", "_ALLOC_FAILED", "Cannot allocate memory")


def available_memory(device: torch.device | str = "cpu") -> int:
    """Return the memory that is free now on ``device``, in bytes.

    On the CPU the smallest of what the machine has free, what the container's limits leave (cgroups of version 2) and
    what the limits of the process leave (``ulimit -v`` and ``-d``).  4 GiB is assumed where the system does not say.
    """
    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    limits = [limit for limit in (cgroup_memory(), _process_memory()) if limit is not None]
    return max(0, min([_machine_memory(), *limits]))


def _machine_memory() -> int:
    available = _fields(Path("/proc/meminfo")).get("MemAvailable:")
    if available is not None:
        return available * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, OSError, ValueError):
        return _FALLBACK


def _process_memory() -> int | None:
    """Return the bytes left by the limits of this process on address space and data; None without limits."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    left = []
    for limit, used in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            left.append(most - _fields(_SELF / "status").get(used, 0) * 1024)
    return min(left, default=None)


def cgroup_memory(process: Path = _SELF) -> int | None:
    """Return the bytes left by the memory limits of a process's control groups; None without a limit.

    Counts the limits of the group and of those above it.  File pages that the kernel can drop count as free.

    :param process: the folder under ``/proc`` whose files ``cgroup`` and ``mountinfo`` say where the groups are.
    """
    left = []
    for folder in _cgroups(process):
        used = _number(folder / "memory.current")
        limits = [limit for name in ("max", "high") if (limit := _number(folder / f"memory.{name}")) is not None]
        if used is not None and limits:
            left.append(min(limits) - used + _fields(folder / "memory.stat").get("inactive_file", 0))
    return max(0, min(left)) if left else None


def _cgroups(process: Path) -> Iterator[Path]:
    """Yield the folders of the control groups (version 2) that limit a process."""
    paths = [line.removeprefix("0::") for line in _lines(process / "cgroup") if line.startswith("0::")]
    for line in _lines(process / "mountinfo"):
        before, _, after = line.partition(" - ")
        if not paths or not after.startswith("cgroup2 "):
            continue
        root, top = (Path(part.replace("\\040", " ")) for part in before.split()[3:5])
        group = Path(paths[0])
        inside = group.relative_to(root) if group.is_relative_to(root) else Path()  # else: of another namespace
        folder = top / inside
        for part in (folder, *folder.parents):
            yield part
            if part == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _fields(path: Path) -> dict[str, int]:
    """Return numbers by name, from the lines of the form ``name number``."""
    pairs = (line.split()[:2] for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None  # "max" is no limit


def require_memory(needed: int, device: torch.device, what: str, advice: str) -> int:
    """Return the bytes that are free.

    :raises InputError: where they are less than ``needed``; it says both, and what to try.
    """
    free = available_memory(device)
    if needed > free:
        raise InputError(f"{what} needs {in_words(needed)} and {in_words(free)} are free; {advice}")
    return free


@contextmanager
def enough_memory(needed: int, device: torch.device, what: str, advice: str) -> Iterator[None]:
    """Refuse a block that allocates about ``needed`` bytes where they are not free.

    Where they seemed to be, and an allocation fails nevertheless (memory in pieces, another process), the allocator's
    error becomes one that says the same.

    :param what: who needs them, such as ``"Cholesky() for n = 3"``.
    :param advice: what to try, a sentence without its capital.
    :raises InputError: in both cases.
    """
    free = require_memory(needed, device, what, advice)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise InputError(
            f"{what} ran out of memory: it needs about {in_words(needed)}, and of the {in_words(free)} that were free "
            f"at its start not enough could be had; {advice}"
        ) from error


def in_words(size: int) -> str:
    """Return a size such as ``12.3 GiB`` or ``4.5 MiB``."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a CUDA device or in the machine."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NO_MEMORY)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes in use so far: allocated on CUDA; on the CPU, by the process since it started."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
