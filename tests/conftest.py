"""What every test shares: seeds, GPyTorch's own defaults, the data directory, skipping without a device.

Libraries are imported by what needs them: the process that only hands tests out to others starts these at once.
"""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ and "KEOPS_CACHE_FOLDER" not in os.environ:
    # KeOps keeps what it compiled in files that another process may read half written; importing GPyTorch imports it
    _KEPT = Path(os.path.expanduser("~"), ".cache", "keops-tests", os.environ["PYTEST_XDIST_WORKER"])
    os.environ["KEOPS_CACHE_FOLDER"] = str(_KEPT)

import pytest

_MEMORY = "/dev/shm"
if (
    "PYTEST_DEBUG_TEMPROOT" not in os.environ
    and os.access(_MEMORY, os.W_OK)
    and shutil.disk_usage(_MEMORY).free > 2**30
):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = _MEMORY  # solves that save after every step would wait for the disk each time


@functools.cache
def _defaults() -> list[tuple[Any, str, Any]]:
    """Return the settings whose defaults BoTorch changes, for the whole process, when it is imported.

    GPyTorch then factorizes up to 4096 points.  Unless the defaults are put back, whether a test runs CG at all depends
    on the tests before it.
    """
    import gpytorch
    import linear_operator

    return [
        (linear_operator.settings._fast_covar_root_decomposition, "_default", True),
        (linear_operator.settings._fast_log_prob, "_default", True),
        (linear_operator.settings._fast_solves, "_default", True),
        (linear_operator.settings.cholesky_max_tries, "_global_value", 3),
        (linear_operator.settings.max_cholesky_size, "_global_value", 800),
        (gpytorch.settings.max_eager_kernel_size, "_global_value", 512),
    ]


@pytest.fixture(autouse=True)
def _same_start():
    """Seed torch, put GPyTorch's defaults back, and fail a test that leaves another default dtype behind."""
    import torch

    torch.manual_seed(0)
    for setting, attribute, value in _defaults():
        setattr(setting, attribute, value)
    before = torch.get_default_dtype()
    yield
    after = torch.get_default_dtype()
    torch.set_default_dtype(before)
    assert after == before, f"the test left torch's default dtype at {after}"


@pytest.fixture
def many_tiles(monkeypatch):
    """Tiles of at most 500 entries, 13 wide, so that small matrices have many, ragged ones at the ends."""
    for name, value in {"_CPU_WIDTH": 13, "_CPU_BYTES": 1, "_LEAST_ENTRIES": 500}.items():
        monkeypatch.setattr(f"sketchgp.operators.tiles.{name}", value)


@pytest.fixture
def interruptible():
    """SIGINT as Python handles it at a terminal, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def data_directory() -> Path:
    """The directory of larger data sets that SKETCHGP_DATA names; skips where it is not set."""
    name = os.environ.get("SKETCHGP_DATA")
    if not name:
        pytest.skip("SKETCHGP_DATA does not name a directory of data sets")
    path = Path(name)
    if not path.is_dir():
        pytest.skip(f"SKETCHGP_DATA={name} is not a directory")
    return path


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import GPyTorch where tests are run, before warnings are errors, some of which it gives."""
    if "PYTEST_XDIST_WORKER" not in os.environ and session.config.getoption("numprocesses", None):
        return
    gc.disable()  # until everything is collected: it would go through all modules while others are read
    import gpytorch  # noqa: F401
    import torch

    if not torch.cuda.is_available():  # torch's own formats the stack for every kind of device that is not there
        torch.manual_seed = torch.default_generator.manual_seed
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # the problems are small: more threads only wait for each other


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not go through them again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``cuda`` where torch sees no device."""
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("cuda") is not None:  # no keyword: a folder may be called so
            item.add_marker(skip)
