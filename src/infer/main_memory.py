"""The main memory of this machine: what is free for this process, and giving back what it has freed

Torch-free, because the API process reads it, too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from infer.control_groups import ROOT, memory_left, text_of_file


def available_bytes(root: Path = ROOT) -> int:
    """Bytes that are available without swapping and within the limits of the process's control
    groups. `root`: folder below which the operating system's files are read."""
    free = proc_bytes(root / "proc/meminfo", "MemAvailable:")
    if free is None:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = memory_left(root)
    return free if left is None else min(free, left)


def available_on_node(node: int, root: Path = ROOT) -> int | None:
    """Bytes of a NUMA node that are available without swapping, by the rule that the system has for
    the whole machine: what is free, and half of what files and the kernel can give back. None where
    the system does not say."""
    fields: dict[str, int] = {}
    for line in text_of_file(root / f"sys/devices/system/node/node{node}/meminfo").splitlines():
        words = line.split()
        if len(words) >= 4 and words[3].isdigit():
            fields[words[2].rstrip(":")] = int(words[3]) * 1024
    if "MemFree" not in fields:
        return None
    given_back = ("Active(file)", "Inactive(file)", "SReclaimable")
    return fields["MemFree"] + sum(fields.get(name, 0) for name in given_back) // 2


def gib(num_bytes: float) -> str:
    """A number of bytes as text in GiB or MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**26 else f"{num_bytes / 2**20:.1f} MiB"


def proc_bytes(file: str | Path, key: str) -> int | None:
    """The bytes that a line of a file below /proc gives; `key` is its first word, with the colon.
    None where the operating system does not say."""
    try:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


RETURNED_FROM = 32 << 20
"""Size, in bytes, from which on glibc returns freed blocks to the system at once; no larger one can
be set."""


def keep_freed_memory() -> None:
    """Let the C library keep the memory of a step's tensors for the next step.

    By default glibc returns large blocks to the operating system at once, and the page faults of
    the next step cost a tenth of its time. Blocks of `RETURNED_FROM` (weights) are still returned.
    """
    mallopt = _of_c_library("mallopt")
    if mallopt is not None:
        trim_threshold, mmap_threshold = -1, -3
        mallopt(mmap_threshold, RETURNED_FROM)
        mallopt(trim_threshold, 512 << 20)


def return_freed_memory() -> None:
    """Give what loading a model has freed back to the operating system, where glibc can.

    `keep_freed_memory` makes glibc keep it: 110 MB after a model of 1B with 128,000 tokens.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _of_c_library(name: str) -> Callable[..., int] | None:
    """A function of the C library, if it has it: `mallopt` and `malloc_trim` are glibc's."""
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
