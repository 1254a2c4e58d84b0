"""`MemoryRoom`: how much more main memory a process may take before others are short of it"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infer.control_groups import ROOT, MemoryGroup, memory_groups, text_of_file
from infer.main_memory import proc_bytes

MARGIN_SHARE, MARGIN_BYTES, MAX_MARGIN_BYTES = 0.05, 64 << 20, 1 << 30
"""What is left to others of a machine's or a control group's memory: a fraction, at least and at
most so many bytes."""
WAITING_SHARE = 0.1
"""Fraction of the time in which some process waited for memory, from which on there is no room."""
PRESSED_BYTES = 256 << 20
"""Bytes to give back at each look while others wait for memory."""


def margin(size: int) -> int:
    """Bytes that are left to others of `size` bytes of memory."""
    return int(min(MAX_MARGIN_BYTES, max(MARGIN_BYTES, MARGIN_SHARE * size)))


class MemoryRoom:
    """It is what the machine and the limits of the process's control groups leave, less a margin.
    Where processes wait for memory (PSI, on Linux), or a control group has reached its limit since
    the last look, there is none, and some is to be given back."""

    def __init__(self, root: Path = ROOT, clock: Callable[[], float] = time.monotonic) -> None:
        """`root`: folder below which the operating system's files are read."""
        self._root, self._clock = root, clock
        self._waited_us: dict[Path, int] = {}
        self._events: dict[Path, int] = {}
        self._looked_s = clock()
        self._is_pressed(memory_groups(root))

    def __call__(self) -> int:
        """Bytes that may still be taken; negative: that many are to be given back."""
        groups = memory_groups(self._root)
        room = min(self._rooms(groups), default=MAX_MARGIN_BYTES)
        return min(room, -PRESSED_BYTES) if self._is_pressed(groups) else room

    def _rooms(self, groups: Sequence[MemoryGroup]) -> Iterator[int]:
        total = proc_bytes(self._root / "proc/meminfo", "MemTotal:")
        available = proc_bytes(self._root / "proc/meminfo", "MemAvailable:")
        if total is not None and available is not None:
            yield available - margin(total)
        for group in groups:
            yield group.limit - group.used - margin(group.limit)

    def _is_pressed(self, groups: Sequence[MemoryGroup]) -> bool:
        """Whether processes have waited for memory since the last call, or a limit was reached."""
        now_s = self._clock()
        elapsed_us = max(1.0, 1e6 * (now_s - self._looked_s))
        self._looked_s = now_s
        folders = [group.folder for group in groups]
        is_pressed = False
        for file in (
            self._root / "proc/pressure/memory",
            *(f / "memory.pressure" for f in folders),
        ):
            waited = _waited_us(text_of_file(file))
            before = self._waited_us.get(file, waited)
            self._waited_us[file] = waited
            is_pressed |= waited - before > WAITING_SHARE * elapsed_us
        for folder in folders:
            count = _num_reached(text_of_file(folder / "memory.events"))
            is_pressed |= count > self._events.get(folder, count)
            self._events[folder] = count
        return is_pressed


def _waited_us(text: str) -> int:
    """Microseconds in which some process waited, of a PSI file; 0 where it does not say."""
    for line in text.splitlines():
        kind, *fields = line.split()
        for field in fields:
            name, _, value = field.partition("=")
            if kind == "some" and name == "total" and value.isdigit():
                return int(value)
    return 0


def _num_reached(text: str) -> int:
    """How often a control group has reached a limit, of `memory.events`."""
    lines = [line.split() for line in text.splitlines()]
    return sum(
        int(words[1])
        for words in lines
        if len(words) == 2 and words[0] in ("high", "max") and words[1].isdigit()
    )
