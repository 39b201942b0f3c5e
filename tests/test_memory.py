"""The memory that is free under the limits of a container and of the process, and errors where it is not enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sketchgp.memory import cgroup_memory

GIB = 2**30

V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def _group(folder: Path, names, limit, used, cache=0):
    """One control group; version 1 and 2 differ in names only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nactive_file 7\n")


def _process(tmp_path: Path, version: int, path: str, root: str = "/") -> Path:
    """The folder of a process in the group ``path``, where the groups below ``root`` are mounted."""
    top = str(tmp_path / "top of groups").replace(" ", "\\040")
    process = tmp_path / "process"
    process.mkdir()
    kind, options, line = ("cgroup", "rw,memory", "7:memory") if version == 1 else ("cgroup2", "rw", "0:")
    (process / "cgroup").write_text(f"9:name=systemd:/elsewhere\n3:cpu,cpuacct:/cpu\n{line}:{path}\n")
    (process / "mountinfo").write_text(
        f"30 23 0:28 / /proc rw shared:9 - proc proc rw\n33 31 0:30 / {top}/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 31 0:32 {root} {top} rw,relatime shared:7 - {kind} cgroup {options}\n"
    )
    return process


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_a_container(tmp_path, version):
    """The tightest of the group's limit and those above it, less what is used and cannot be dropped."""
    names, top = V1 if version == 1 else V2, tmp_path / "top of groups"
    unlimited = 2**63 - 4096 if version == 1 else "max"
    process = _process(tmp_path, version, "/job/step")
    assert cgroup_memory(process) is None  # no such group
    _group(top / "job" / "step", names, unlimited, GIB)
    assert cgroup_memory(process) is None
    _group(top / "job" / "step", names, 4 * GIB, 3 * GIB, GIB // 2)
    assert cgroup_memory(process) == 3 * GIB // 2
    _group(top / "job", names, 5 * GIB, 4 * GIB, GIB // 4)
    assert cgroup_memory(process) == 5 * GIB // 4
    _group(top / "job", names, 5 * GIB, 6 * GIB)
    assert cgroup_memory(process) == 0
    (top / "job" / "memory.stat").unlink()
    (top / "job" / names[1]).write_text("nonsense")
    assert cgroup_memory(process) == 3 * GIB // 2


@pytest.mark.parametrize(("path", "root"), [("/docker/1/step", "/docker/1"), ("/docker/1/step", "/docker/2/step")])
def test_limits_where_the_groups_are_mounted_in_part(tmp_path, path, root):
    """As inside a container, with or without its own view of the groups."""
    process = _process(tmp_path, 1, path, root)
    top = tmp_path / "top of groups"
    _group(top / "step" if path.startswith(root) else top, V1, 2 * GIB, GIB)
    assert cgroup_memory(process) == GIB


def test_memory_high_is_a_limit_too(tmp_path):
    process = _process(tmp_path, 2, "/")
    _group(tmp_path / "top of groups", V2, "max", GIB)
    (tmp_path / "top of groups" / "memory.high").write_text("3221225472\n")
    assert cgroup_memory(process) == 2 * GIB


def test_without_groups(tmp_path):
    assert cgroup_memory(tmp_path / "absent") is None


LIMITED = """
import json, re, resource, unittest.mock
import torch
from gpytorch.kernels import RBFKernel
from sketchgp import KRILL, QR, Cholesky, FullProblem, InducingPointProblem, InputError
from sketchgp.memory import available_memory

MIB, found = 2**20, {}


def used(name):
    return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024


def error(solve):
    try:
        solve()
    except InputError as caught:
        return str(caught)


def solve(solver, m):
    x, y = torch.randn(m, 2, dtype=torch.float64), torch.randn(m, dtype=torch.float64)
    kernel = RBFKernel().double()
    if isinstance(solver, Cholesky):
        return solver.solve(FullProblem(kernel, x, y, 0.1))
    return solver.solve(InducingPointProblem(kernel, x, y, 0.1, x))


solvers = {"Cholesky": Cholesky(), "KRILL": KRILL(), "QR": QR()}
for solver in solvers.values():
    solve(solver, 50)
kinds = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}
for name, kind in kinds.items():
    free = available_memory()
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (used(name) + 400 * MIB, before[1]))
    found[name] = (free, available_memory())
    if name == "VmData":
        resource.setrlimit(kind, before)
found["refused"] = {name: error(lambda s=solver: solve(s, 6000)) for name, solver in solvers.items()}
with unittest.mock.patch("sketchgp.memory.available_memory", lambda device: 2**40), unittest.mock.patch(
        "sketchgp.solvers.inducing.problem.available_memory", lambda device: 2**40):
    found["failed"] = {name: error(lambda s=solver: solve(s, 8000)) for name, solver in solvers.items()}
found["after"] = [solve(solver, 50).report.converged for solver in solvers.values()]
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits of a process are those of Linux")
def test_limits_of_the_process():
    """They are seen; what does not fit is refused before it begins, and where that was not seen, the allocator's own
    error becomes one of ours."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("VmData", "VmSize"):
        free, limited = found[name]
        assert free > 2**30 // 2, "too little memory for this test"
        assert 300 * 2**20 < limited <= 400 * 2**20
    for kind, words in (("refused", r"needs"), ("failed", r"ran out of memory: it needs about")):
        for name, message in found[kind].items():
            assert message is not None and message.startswith(f"{name}() for "), (kind, name, message)
            assert words in message and " GiB" in message and "; use " in message
    assert all("MiB are free" in message or "GiB are free" in message for message in found["refused"].values())
    assert found["after"] == [True] * 3
