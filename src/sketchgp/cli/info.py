"""``python -m sketchgp info``: versions, devices, engines, threads and memory, for a report of a fault."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

import torch

from ..errors import InputError
from ..memory import available_memory
from ..operators.engines import ENGINES, check_present

_NEEDED = ("torch", "gpytorch", "linear_operator", "numpy", "scipy", "tqdm")
_OPTIONAL = ("matplotlib", "botorch", "pykeops", "triton", "scikit-learn", "pyarrow", "pandas")
_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "ATEN_CPU_CAPABILITY",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def run(options: argparse.Namespace) -> int:
    """Run the command; see the module's docstring."""
    sections = [*_versions(), *_machine(), *_devices()]
    width = max(len(name) for name, _ in sections) + 2
    for name, value in sections:
        print(f"{name:<{width}}{value}")
    return 0


def version() -> str:
    """Return the version of sketchgp."""
    return str(vars(sys.modules["sketchgp"])["__version__"])


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[tuple[str, str]]:
    yield "sketchgp", version()
    yield "python", f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})"
    for name in (*_NEEDED, *_OPTIONAL):
        yield name, torch.__version__ if name == "torch" else _version(name)


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    cores = f"{os.cpu_count()} cores"
    if hasattr(os, "sched_getaffinity"):
        cores += f", {len(os.sched_getaffinity(0))} for this process"
    yield "processor", f"{platform.machine()}, {cores}, {torch.backends.cpu.get_cpu_capability()} instructions"
    yield "threads", f"{torch.get_num_threads()} of torch, {torch.get_num_interop_threads()} between operations"
    yield "memory", f"{available_memory() / 2**30:.1f} GiB free for this process"
    for name in _VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]


def _devices() -> Iterator[tuple[str, str]]:
    yield from _engines(torch.device("cpu"))
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        yield "cuda", f"no device (torch is built with {built})"
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        found = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        yield (
            str(device),
            (
                f"{found.name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free, "
                f"capability {found.major}.{found.minor}, CUDA {torch.version.cuda}"
            ),
        )
        yield from _engines(device)


def _engines(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield which engines a device has, with the reason where one is missing."""
    for engine in ENGINES[1:]:
        try:
            check_present(engine, device, torch.float32)
            found = "yes"
        except InputError as error:
            found = str(error).partition(": ")[2].removesuffix(". Use matmul='auto'.") or str(error)
            found = f"no: {found}"
        yield f"matmul={engine!r} on {device}", found
