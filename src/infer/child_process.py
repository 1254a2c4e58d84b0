"""What a process of the server does that another one has started: end with it, and have a name"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def end_with(parent: int) -> None:
    """Have the system end this process when `parent`, which has started it, ends. Where it cannot
    (macOS), the thread that reads from the parent ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def be_known_as(name: str, oom_score: int) -> None:
    """Set the name of this process (15 letters) and how early the system ends it without memory:
    `oom_score_adj` in proc(5)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(oom_score), encoding="utf-8")
