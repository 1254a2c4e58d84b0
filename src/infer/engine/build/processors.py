"""`Processors`: the cores that an engine may use, and how much of them

The default number of threads follows from them. Hyper-threads are not counted, because two of them
share one arithmetic unit. On a CPU with two kinds of cores only the performance cores are used: a
step ends when its slowest thread does. On a machine with several NUMA nodes the cores of one node
are used, because memory of another node is read at about half the speed. A container's CPU quota
limits the number of threads: more of them would be stopped for the rest of each period.

Standard library only. Everything is read from the operating system below `root`, so that tests can
describe other machines.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""a limit of a control group (version 1) from this number on means that there is none"""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]
    """numbers of its hyper-threads that this process may use"""
    node: int = 0
    """number of its NUMA node"""
    is_efficient: bool = False
    """whether it is an efficiency core of a CPU that has performance cores, too"""


@dataclass(frozen=True, slots=True)
class Processors:
    """What a process may use of the machine's processors."""

    cores: tuple[Core, ...]
    """physical cores; empty if the operating system does not say which there are"""
    num_others: int = 0
    """number of cores where `cores` is empty: an estimate"""
    quota: float | None = None
    """CPU time per second that the control groups allow, in seconds; None if unlimited"""

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have cores for this process."""
        return tuple(sorted({core.node for core in self.cores}))

    def chosen(self, *, all_nodes: bool = False) -> tuple[Core, ...]:
        """The cores that an engine uses by default: the performance cores of the NUMA node that has
        most of them, or those of all nodes."""
        fast = [core for core in self.cores if not core.is_efficient]
        counts = Counter(core.node for core in fast)
        if all_nodes or not counts:
            return tuple(fast)
        best = min(counts, key=lambda node: (-counts[node], node))
        return tuple(core for core in fast if core.node == best)

    def num_threads(self, spare: int = 0, *, all_nodes: bool = False) -> int:
        """Default number of threads of an engine that leaves `spare` cores free; at least 1."""
        count = len(self.chosen(all_nodes=all_nodes)) or self.num_others
        if self.quota is not None:
            count = min(count, math.ceil(self.quota))
        return max(1, count - spare)

    def cpus(self, *, all_nodes: bool = False) -> frozenset[int]:
        """Numbers of the hyper-threads of the chosen cores."""
        return frozenset(cpu for core in self.chosen(all_nodes=all_nodes) for cpu in core.cpus)


def read_processors(root: Path = ROOT) -> Processors:
    """What this process may use, as the operating system says it."""
    quota = cpu_quota(root)
    if sys.platform == "darwin":
        return Processors((), _performance_cores_of_macos(), quota)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if cores := read_cores(frozenset(allowed), root):
        return Processors(cores, quota=quota)
    return Processors((), len(allowed) or max(1, (os.cpu_count() or 2) // 2), quota)


def read_cores(allowed: frozenset[int], root: Path = ROOT) -> tuple[Core, ...]:
    """The physical cores of the processors `allowed` (Linux's sysfs); () if it does not say."""
    devices = root / "sys/devices"
    slow = frozenset(_cpu_list(devices / "cpu_atom/cpus"))
    if not _cpu_list(devices / "cpu_core/cpus"):
        slow = frozenset()
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((devices / "system/node").glob("node[0-9]*"))
        for cpu in _cpu_list(folder / "cpulist")
    }
    found: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(allowed):
        topology = devices / f"system/cpu/cpu{cpu}/topology"
        package, core = _text(topology / "physical_package_id"), _text(topology / "core_id")
        if not package or not core:
            return ()
        found.setdefault((package, core), []).append(cpu)
    return tuple(
        Core(tuple(cpus), nodes.get(cpus[0], 0), cpus[0] in slow) for cpus in found.values()
    )


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU seconds per second that the control groups of this process allow; None if unlimited."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _text(folder / "cpu.max").split()  # version 2
        if not words:  # version 1
            words = [_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        numbers = [int(word) for word in words if word.isdigit()]
        if len(numbers) == 2 and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes of memory that the control groups of this process still allow; None if unlimited.

    Files that have not been used lately are not counted as used: the system gives them up first."""
    left = []
    for folder in _groups(root, "memory"):
        for limit, used, unused in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            most, now = _text(folder / limit), _text(folder / used)
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                lines = map(str.split, _text(folder / "memory.stat").splitlines())
                idle = next((int(words[1]) for words in lines if words[0] == unused), 0)
                left.append(max(0, int(most) - max(0, int(now) - idle)))
    return min(left, default=None)


def available_bytes() -> int:
    """Bytes of main memory that are available without swapping and within the limits of the
    process's control groups."""
    free = proc_bytes("/proc/meminfo", "MemAvailable:")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = memory_left()
    return free if left is None else min(free, left)


def proc_bytes(file: str, key: str) -> int | None:
    """The bytes that a line of a file below /proc gives; `key` is its first word, with the colon.
    None where the operating system does not say."""
    try:
        for line in Path(file).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the control groups of this process, and of the groups around them."""
    mount = root / "sys/fs/cgroup"
    folders = [mount, mount / controller]
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        is_second = number == "0" and not names
        if not is_second and controller not in names.split(","):
            continue
        folder = mount if is_second else mount / controller
        for part in Path(path.lstrip("/")).parts:
            if part == "..":  # outside of what this process can see
                break
            folders.append(folder := folder / part)
    return folders


def _cpu_list(file: Path) -> list[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: list[int] = []
    for part in _text(file).split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _performance_cores_of_macos() -> int:
    number, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if read and not read(name, ctypes.byref(number), ctypes.byref(size), None, 0):
            return max(1, number.value)
    return max(1, (os.cpu_count() or 2) // 2)
