"""``python -m sketchgp info``: versions, devices, engines, threads and memory, for a report of a fault."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib import metadata

import torch

from ..memory import available_memory
from ..operators.engines import NAMED

_PACKAGES = (
    *("torch", "gpytorch", "linear_operator", "numpy", "scipy", "tqdm"),
    *("matplotlib", "botorch", "finufft", "pykeops", "triton", "numba", "scikit-learn", "pyarrow", "pandas"),
)
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "ATEN_CPU_CAPABILITY"),
    *("CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
)


def run(options: argparse.Namespace) -> None:
    """Run the command; see the module's docstring."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    facts = {
        "sketchgp": str(vars(sys.modules["sketchgp"])["__version__"]),
        "python": f"{platform.python_version()} ({platform.python_implementation()}, {sys.platform})",
        **{name: _version(name) for name in _PACKAGES},
        "torch": torch.__version__,
        "system": platform.platform(),
        "processor": f"{platform.machine()}, {os.cpu_count()} cores, {len(allowed)} for this process, "
        f"{torch.backends.cpu.get_cpu_capability()} instructions",
        "threads": f"{torch.get_num_threads()} of torch, {torch.get_num_interop_threads()} between operations",
        "memory": f"{available_memory() / 2**30:.1f} GiB free for this process",
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **_engines(torch.device("cpu")),
    }
    if not torch.cuda.is_available():
        facts["cuda"] = f"no device (torch is built with CUDA: {torch.version.cuda})"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        card = torch.cuda.get_device_properties(device)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(device))
        facts[str(device)] = (
            f"{card.name}, {total:.1f} GiB, {free:.1f} GiB free, capability {card.major}.{card.minor}, "
            f"CUDA {torch.version.cuda}"
        )
        facts |= _engines(device)
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        print(f"{name:<{width}}{value}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _engines(device: torch.device) -> dict[str, str]:
    """Return which engines a device has, with the reason where one is missing."""
    reasons = {name: engine.absent(device, torch.float32) for name, engine in NAMED.items()}
    return {f"matmul={name!r} on {device}": f"no: {why}" if why else "yes" for name, why in reasons.items()}
