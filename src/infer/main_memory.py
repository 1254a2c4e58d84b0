"""The main memory of this machine: how much of it is free for this process, and what processes hold

Torch-free, because the API process reads it, too.
"""

from __future__ import annotations

import os
from pathlib import Path

from infer.control_groups import memory_left


def available_bytes() -> int:
    """Bytes that are available without swapping and within the limits of the process's control
    groups."""
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
