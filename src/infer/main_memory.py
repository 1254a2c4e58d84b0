"""The main memory of this machine: how much of it is free for this process, and what processes hold

Torch-free, because the API process reads it, too.
"""

from __future__ import annotations

import os
from pathlib import Path


def available_bytes() -> int:
    """Bytes that are available without swapping and within the limit of the process's control
    group."""
    free = proc_bytes("/proc/meminfo", "MemAvailable:")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            used = int((group / "memory.current").read_text())
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


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
