"""`ProcessMetrics`: what the server's processes use, with the names of Prometheus' own clients"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from infer.engine.build.server_memory import ENGINE_NAME, FRONT_NAME

_PROC = Path("/proc")


class _Numbers(NamedTuple):
    """Of one process."""

    cpu_s: float
    virtual_bytes: int
    resident_bytes: int
    started_at: float
    num_fds: int
    max_fds: float


_GAUGES = {
    "virtual_memory_bytes": ("Virtual memory size in bytes.", "virtual_bytes"),
    "resident_memory_bytes": ("Resident memory size in bytes.", "resident_bytes"),
    "start_time_seconds": (
        "Start time of the process since unix epoch in seconds.",
        "started_at",
    ),
    "open_fds": ("Number of open file descriptors.", "num_fds"),
    "max_fds": ("Maximum number of open file descriptors.", "max_fds"),
}
"""Name of a metric → (help, field of `_Numbers`)."""


class ProcessMetrics:
    """The label `process` tells them apart: `api`, and `engine-0` and so on by age; with several
    that answer HTTP each is `api`, and what has started them `keeper`. They are read from /proc for
    each scrape, in a thread; where there is none, as on macOS, nothing is shown. A collector for
    the prometheus client."""

    def collect(self) -> Iterator[Metric]:
        """All families; called by the prometheus client."""
        processes = {
            name: numbers for name, pid in _processes() if (numbers := _numbers(pid)) is not None
        }
        if not processes:
            return
        text = "Total user and system CPU time spent in seconds."
        cpu = CounterMetricFamily("process_cpu_seconds", text, labels=["process"])
        for process, used in processes.items():
            cpu.add_metric([process], used.cpu_s)
        yield cpu
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"process_{name}", text, labels=["process"])
            for process, used in processes.items():
                gauge.add_metric([process], getattr(used, field))
            yield gauge


def _processes() -> Iterator[tuple[str, int]]:
    """This process, and the engines that it has started, or that were started beside it."""
    own_pid = os.getpid()
    yield "api", own_pid
    is_front = _text(_PROC / "self/comm").strip() == FRONT_NAME
    parent = os.getppid() if is_front else own_pid
    if is_front:
        yield "keeper", parent
    pids = [
        int(pid)
        for path in _PROC.glob(f"{parent}/task/*/children")
        for pid in _text(path).split()
        if _text(_PROC / pid / "comm").strip() == ENGINE_NAME
    ]
    yield from ((f"engine-{number}", pid) for number, pid in enumerate(sorted(pids)))


def _numbers(pid: int) -> _Numbers | None:
    """None where the process has ended, or nothing can be read."""
    try:
        fields = _text(_PROC / str(pid) / "stat").rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        boot_at = next(
            float(line.split()[1])
            for line in _text(_PROC / "stat").splitlines()
            if line.startswith("btime ")
        )
        limit = next(
            line.split()[3]
            for line in _text(_PROC / str(pid) / "limits").splitlines()
            if line.startswith("Max open files")
        )
        return _Numbers(
            cpu_s=(int(fields[11]) + int(fields[12])) / ticks,
            virtual_bytes=int(fields[20]),
            resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
            started_at=boot_at + int(fields[19]) / ticks,
            num_fds=len(os.listdir(_PROC / str(pid) / "fd")),
            max_fds=float("inf") if limit == "unlimited" else float(limit),
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
