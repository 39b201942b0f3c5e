"""The memory that is free under the limits of a container."""

from __future__ import annotations

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
