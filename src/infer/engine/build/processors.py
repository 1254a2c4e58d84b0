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

from infer.control_groups import ROOT, cpu_quota, text_of_file


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
        most of them, or those of all nodes. A process that may use efficiency cores only uses
        these."""
        fast = [core for core in self.cores if not core.is_efficient] or self.cores
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
        package, core = (
            text_of_file(topology / "physical_package_id"),
            text_of_file(topology / "core_id"),
        )
        if not package or not core:
            return ()
        found.setdefault((package, core), []).append(cpu)
    return tuple(
        Core(tuple(cpus), nodes.get(cpus[0], 0), cpus[0] in slow) for cpus in found.values()
    )


def _cpu_list(file: Path) -> list[int]:
    """The numbers of a list such as "0-3,8"."""
    numbers: list[int] = []
    for part in text_of_file(file).split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _performance_cores_of_macos() -> int:
    number, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    read = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    for name in (b"hw.perflevel0.physicalcpu", b"hw.physicalcpu"):
        if read and not read(name, ctypes.byref(number), ctypes.byref(size), None, 0):
            return max(1, number.value)
    return max(1, (os.cpu_count() or 2) // 2)


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU as a device, for a plan that imports no torch."""

    type: str = "cpu"


def may_have_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether device=auto may become a GPU here, as far as can be told without torch: whether the
    system has a device of its driver. Where that cannot be told it may."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return False
    if sys.platform != "linux":
        return sys.platform != "darwin"
    return any(next(devices.glob(name), None) for name in ("nvidia[0-9]*", "dxg"))
