"""Stopping a process, so that it answers nothing until it goes on or is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def stop(pid: int) -> None:
    """Stop a process and wait until all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    while any(_state(task) not in "TXZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def go_on(pid: int) -> None:
    """Let a stopped process go on."""
    os.kill(pid, signal.SIGCONT)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "X"
