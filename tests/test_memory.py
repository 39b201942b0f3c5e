"""The memory that is free under the limits of a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from sketchgp.memory import cgroup_memory

GIB = 2**30


def _group(folder: Path, limit, used, cache=0):
    """One control group."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\nactive_file 7\n")


def _process(tmp_path: Path, path: str, root: str = "/") -> Path:
    """The folder of a process in the group ``path``, where the groups below ``root`` are mounted."""
    top = str(tmp_path / "top of groups").replace(" ", "\\040")
    process = tmp_path / "process"
    process.mkdir()
    (process / "cgroup").write_text(f"9:name=systemd:/elsewhere\n3:cpu,cpuacct:/cpu\n0::{path}\n")
    (process / "mountinfo").write_text(
        f"30 23 0:28 / /proc rw shared:9 - proc proc rw\n33 31 0:30 / {top}/cpu rw - cgroup cgroup rw,cpu\n"
        f"35 31 0:32 {root} {top} rw,relatime shared:7 - cgroup2 cgroup rw\n"
    )
    return process


def test_limits_of_a_container(tmp_path):
    """The tightest of the group's limit and those above it, less what is used and cannot be dropped."""
    top, process = tmp_path / "top of groups", _process(tmp_path, "/job/step")
    assert cgroup_memory(process) is None  # no such group
    _group(top / "job" / "step", "max", GIB)
    assert cgroup_memory(process) is None
    _group(top / "job" / "step", 4 * GIB, 3 * GIB, GIB // 2)
    assert cgroup_memory(process) == 3 * GIB // 2
    _group(top / "job", 5 * GIB, 4 * GIB, GIB // 4)
    assert cgroup_memory(process) == 5 * GIB // 4
    _group(top / "job", 5 * GIB, 6 * GIB)
    assert cgroup_memory(process) == 0
    (top / "job" / "memory.stat").unlink()
    (top / "job" / "memory.current").write_text("nonsense")
    assert cgroup_memory(process) == 3 * GIB // 2


@pytest.mark.parametrize(("path", "root"), [("/docker/1/step", "/docker/1"), ("/docker/1/step", "/docker/2/step")])
def test_limits_where_the_groups_are_mounted_in_part(tmp_path, path, root):
    """As inside a container, with or without its own view of the groups."""
    process = _process(tmp_path, path, root)
    top = tmp_path / "top of groups"
    _group(top / "step" if path.startswith(root) else top, 2 * GIB, GIB)
    assert cgroup_memory(process) == GIB


def test_memory_high_is_a_limit_too(tmp_path):
    process = _process(tmp_path, "/")
    _group(tmp_path / "top of groups", "max", GIB)
    (tmp_path / "top of groups" / "memory.high").write_text("3221225472\n")
    assert cgroup_memory(process) == 2 * GIB


def test_without_groups(tmp_path):
    assert cgroup_memory(tmp_path / "absent") is None
