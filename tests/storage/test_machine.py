"""Cores and memory are those that the cgroups allow, in both versions and in containers."""

from __future__ import annotations

import os

import pytest

from restride.errors import ExecutionError
from restride.executors.sources import default_budget_nbytes, default_workers
from restride.storage.machine import (
    available_nbytes,
    core_count,
    free_nbytes,
    memory_limit_nbytes,
)

CORES = len(os.sched_getaffinity(0))


def machine(root, membership, **files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("--", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def version2(root, membership="0::/a/b\n", **files):
    return machine(root, membership, **files)


def test_without_cgroups_there_is_no_limit(tmp_path):
    assert core_count(tmp_path) == CORES
    assert memory_limit_nbytes(tmp_path) is None


def test_what_is_available_is_what_the_system_says_and_no_more_than_the_groups_allow(tmp_path):
    root = version2(tmp_path, **{"a/b/memory.max": "1000000\n"})
    said = [available_nbytes(root)]  # it says nothing
    for available in ("MemAvailable:     200 kB", "MemAvailable:   20000000 kB"):
        (root / "proc/meminfo").write_text(f"MemTotal:  24000000 kB\n{available}\nBuffers: 1 kB\n")
        said.append(available_nbytes(root))

    assert said == [0, 200 << 10, 1000000]
    assert 0 < available_nbytes() < 1 << 60


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 10**6), ("100000 100000", 1), ("150000 100000", 2), ("5000 100000", 1)],
)
def test_the_time_of_a_group_counts_as_cores_begun(tmp_path, monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = version2(tmp_path, **{"a/b/cpu.max": f"{quota}\n"})

    assert core_count(root) == min(64, cores)


def test_the_narrowest_group_on_the_way_up_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = version2(
        tmp_path,
        **{
            "cpu.max": "800000 100000\n",
            "a/cpu.max": "300000 100000\n",
            "a/b/cpu.max": "max 100000\n",
            "memory.max": "max\n",
            "a/memory.max": "4000000000\n",
            "a/b/memory.max": "5000000000\n",
        },
    )

    assert core_count(root) == 3
    assert memory_limit_nbytes(root) == 4_000_000_000


def test_a_path_of_the_host_is_looked_for_at_the_root_of_the_container(tmp_path):
    root = version2(tmp_path, "0::/docker/0123\n", **{"memory.max": "1000000\n"})

    assert memory_limit_nbytes(root) == 1_000_000


def test_groups_of_version_1_are_found_by_their_controllers(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    root = machine(
        tmp_path,
        "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/x\n",
        **{
            "cpu/job/cpu.cfs_quota_us": "250000\n",
            "cpu/job/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/job/memory.limit_in_bytes": "2000000000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )

    assert core_count(root) == 3
    assert memory_limit_nbytes(root) == 2_000_000_000


@pytest.mark.parametrize("content", ["", "garbage\n", "x y\n", "-5 100000\n", "10 0\n", "\u0663\n"])
def test_a_file_that_says_nothing_is_no_limit(tmp_path, content):
    root = version2(tmp_path, **{"a/b/cpu.max": content, "a/b/memory.max": content})

    assert core_count(root) == CORES
    assert memory_limit_nbytes(root) in {None, 10}


def test_defaults_follow_the_limits(monkeypatch):
    from restride.executors import sources

    for cores, workers in ((1, 1), (3, 3), (64, 4)):
        monkeypatch.setattr(sources, "core_count", lambda cores=cores: cores)
        assert default_workers() == workers
    for limit, budget in ((None, 512 << 20), (1 << 30, 256 << 20), (1 << 40, 512 << 20)):
        monkeypatch.setattr(sources, "memory_limit_nbytes", lambda limit=limit: limit)
        assert default_budget_nbytes() == budget


def test_the_room_of_a_folder_that_is_not_there_is_that_of_its_place(tmp_path, monkeypatch):
    assert free_nbytes(tmp_path / "not" / "yet") > 0

    def refuse(_):
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "statvfs", refuse)
    with pytest.raises(ExecutionError, match=r"cannot be looked at \(broken\)"):
        free_nbytes(tmp_path)
