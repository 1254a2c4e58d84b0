"""Which cores an engine uses, on machines described by files."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.control_groups import cpu_quota, memory_left
from infer.engine.build.processors import (
    Core,
    Processors,
    cpus_of,
    read_cores,
    read_processors,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", encoding="utf-8")
    return root


def cpu(number: int, core: int, package: int = 0) -> dict[str, str]:
    folder = f"sys/devices/system/cpu/cpu{number}/topology"
    return {f"{folder}/core_id": str(core), f"{folder}/physical_package_id": str(package)}


def laptop(root: Path) -> Path:
    """Two performance cores with two hyper-threads each, four efficiency cores."""
    files = {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"}
    for number in range(8):
        files |= cpu(number, number // 2 if number < 4 else number)
    return write(root, files)


def two_nodes(root: Path) -> Path:
    """Two sockets with four cores and eight hyper-threads each."""
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15",
    }
    for number in range(16):
        files |= cpu(number, number % 4, package=number % 8 // 4)
    return write(root, files)


def test_hyper_threads_count_once_and_efficiency_cores_not(tmp_path: Path) -> None:
    found = Processors(read_cores(frozenset(range(8)), laptop(tmp_path)))
    assert len(found.cores) == 6
    assert found.chosen() == (Core((0, 1)), Core((2, 3)))
    assert found.num_threads() == 2
    assert cpus_of(found.chosen()) == {0, 1, 2, 3}
    assert cpus_of(found.slow_beside(found.chosen())) == {4, 5, 6, 7}
    assert found.slow_beside(found.cores) == ()


def test_a_cpu_with_one_kind_of_cores_has_no_efficiency_cores(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/devices/cpu_atom/cpus": "0-1", **cpu(0, 0), **cpu(1, 1)})
    assert Processors(read_cores(frozenset({0, 1}), root)).num_threads() == 2


def test_efficiency_cores_where_a_process_has_no_others(tmp_path: Path) -> None:
    found = Processors(read_cores(frozenset({4, 6, 7}), laptop(tmp_path)))
    assert found.num_threads() == 3
    assert cpus_of(found.chosen()) == cpus_of(found.chosen("all")) == {4, 6, 7}
    some = Processors(read_cores(frozenset({2, 6, 7}), tmp_path))
    assert cpus_of(some.chosen()) == {2}


def test_one_socket_by_default(tmp_path: Path) -> None:
    found = Processors(read_cores(frozenset(range(16)), two_nodes(tmp_path)))
    assert found.nodes == (0, 1)
    assert (found.num_threads(), found.num_threads(numa="all")) == (4, 8)
    assert cpus_of(found.chosen()) == {0, 1, 2, 3, 8, 9, 10, 11}
    # The node with most of the cores that this process may use.
    fewer = Processors(read_cores(frozenset({3, 4, 5, 12}), tmp_path))
    assert cpus_of(fewer.chosen()) == {4, 5, 12}
    assert (fewer.num_threads(), fewer.num_threads(spare=9)) == (2, 1)


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "150000 100000"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"},
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/a\n0::/",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "75000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
        {
            "proc/self/cgroup": "0::/a/../../b",
            "sys/fs/cgroup/a/cpu.max": "400000 100000",
            "sys/fs/cgroup/cpu.max": "150000 100000",
        },
    ],
)
def test_a_quota_limits_the_threads(tmp_path: Path, files: dict[str, str]) -> None:
    assert cpu_quota(write(tmp_path, files)) == 1.5
    cores = tuple(Core((number,)) for number in range(8))
    assert Processors(cores, quota=1.5).num_threads() == 2
    assert Processors(cores, quota=0.2).num_threads() == 1
    assert Processors(cores, quota=7.9).num_threads() == 7, "one would be stopped"
    assert Processors(cores, quota=2.5).num_threads() == 2
    assert Processors(cores, quota=64).num_threads() == 8
    assert Processors((), 3, quota=64).num_threads() == 3


@pytest.mark.parametrize("text", ["max 100000", "", "150000", "150000 0", "a b", "\0"])
def test_no_quota(tmp_path: Path, text: str) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text})
    assert cpu_quota(root) is None
    assert cpu_quota(tmp_path / "nothing") is None


def test_what_control_groups_leave_of_memory(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/a/b",
        "sys/fs/cgroup/a/memory.max": "1000",
        "sys/fs/cgroup/a/memory.current": "700",
        "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 100\nactive_file 9",
        "sys/fs/cgroup/a/b/memory.max": "max",
        "sys/fs/cgroup/a/b/memory.current": "600",
    }
    assert memory_left(write(tmp_path / "2", files)) == 400
    files = {
        "proc/self/cgroup": "4:memory:/c",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5",
        "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "1200",
    }
    assert memory_left(write(tmp_path / "1", files)) == 0
    assert memory_left(tmp_path / "nothing") is None


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    found = read_processors(tmp_path)
    assert found.cores == ()
    assert found.num_threads() >= 1
    assert found.chosen() == ()
