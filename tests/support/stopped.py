"""Stopping a process, so that it answers nothing until it goes on or is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support.server_process import state_of


def stop(pid: int) -> None:
    """Stop a process and wait until all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    while any(state_of(task) not in "TXZ" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


def go_on(pid: int) -> None:
    """Let a stopped process go on."""
    os.kill(pid, signal.SIGCONT)
