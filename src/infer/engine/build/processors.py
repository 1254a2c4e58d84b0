"""`Processors`: the cores that an engine may use, and which of them it takes

Hyper-threads are not counted, because two of them share one arithmetic unit. On a CPU with two
kinds of cores a step ends when its slowest thread does, so the performance cores compute it; the
others take part in prompts, whose many rows are divided finely. A socket may have several NUMA
nodes (sub-NUMA clustering, NPS): their cores work together, because they share the way to the
memory of all of them. Another socket's memory is read at about half the speed, so its cores are for
another engine (`--replicas`), or for `numa="all"`. A container's CPU quota limits the number of
threads: more of them would be stopped for the rest of each period.

Standard library only. Everything is read from the operating system below `root`, so that tests can
describe other machines.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infer.control_groups import ROOT, cpu_quota, text_of_file

Numa = Literal["auto", "one", "all"]
"""Which NUMA nodes an engine uses: those of one socket, one, all."""


@dataclass(frozen=True, slots=True)
class Core:
    """A physical core."""

    cpus: tuple[int, ...]
    """Numbers of its hyper-threads that this process may use."""
    node: int = 0
    """Number of its NUMA node."""
    socket: int = 0
    """Number of its package."""
    is_efficient: bool = False
    """Whether it is an efficiency core of a CPU that has performance cores, too."""


@dataclass(frozen=True, slots=True)
class Processors:
    """What a process may use of the machine's processors."""

    cores: tuple[Core, ...]
    """Physical cores; empty if the operating system does not say which there are."""
    num_others: int = 0
    """Number of cores where `cores` is empty: an estimate."""
    quota: float | None = None
    """CPU time per second that the control groups allow, in seconds; None if unlimited."""

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes that have cores for this process."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def sockets(self) -> tuple[int, ...]:
        """Packages that have cores for this process."""
        return tuple(sorted({core.socket for core in self.cores}))

    def chosen(self, numa: Numa = "auto", taken: Collection[int] = ()) -> tuple[Core, ...]:
        """The cores that an engine uses by default: the performance cores of one socket (auto), of
        one NUMA node (one), or all. A process that may use efficiency cores only uses these.

        `taken`: processors that other engines have. Of the sockets, or nodes, that one is chosen
        which has most cores that nobody has taken, then most cores, then the lowest number."""
        fast = [core for core in self.cores if not core.is_efficient] or list(self.cores)
        if numa == "all" or not fast:
            return tuple(fast)
        counts, free = Counter[int](), Counter[int]()
        for core in fast:
            counts[_place(core, numa)] += 1
            free[_place(core, numa)] += not is_taken(core, taken)
        best = min(counts, key=lambda node: (-free[node], -counts[node], node))
        return tuple(core for core in fast if _place(core, numa) == best)

    def slow_beside(self, cores: Collection[Core]) -> tuple[Core, ...]:
        """The efficiency cores of the sockets of `cores`, if these are performance cores."""
        if any(core.is_efficient for core in cores):
            return ()
        sockets = {core.socket for core in cores}
        return tuple(core for core in self.cores if core.is_efficient and core.socket in sockets)

    def num_threads(self, spare: int = 0, numa: Numa = "auto") -> int:
        """Default number of threads of an engine that leaves `spare` cores free; at least 1.

        A quota is rounded down, so that its threads are not stopped and the rest of the server has
        the remainder; below 2 it is rounded up, because one thread would leave most of it unused.
        """
        count = len(self.chosen(numa)) or self.num_others
        if self.quota is not None:
            whole = math.floor(self.quota) if self.quota >= 2 else math.ceil(self.quota)
            count = min(count, whole)
        return max(1, count - spare)


def cpus_of(cores: Collection[Core]) -> frozenset[int]:
    """Numbers of the hyper-threads of cores."""
    return frozenset(cpu for core in cores for cpu in core.cpus)


def is_taken(core: Core, taken: Collection[int]) -> bool:
    """Whether a hyper-thread of a core is among the processors that others have."""
    return not set(core.cpus).isdisjoint(taken)


def _place(core: Core, numa: Numa) -> int:
    return core.node if numa == "one" else core.socket


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
    cores: dict[tuple[str, str], list[int]] = {}
    for cpu in sorted(allowed):
        topology = devices / f"system/cpu/cpu{cpu}/topology"
        package, core = (
            text_of_file(topology / "physical_package_id"),
            text_of_file(topology / "core_id"),
        )
        if not package or not core:
            return ()
        cores.setdefault((package, core), []).append(cpu)
    return tuple(
        Core(
            tuple(cpus),
            nodes.get(cpus[0], 0),
            int(package) if package.isdigit() else 0,
            cpus[0] in slow,
        )
        for (package, _), cpus in cores.items()
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
