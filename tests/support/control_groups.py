"""A control group of a test's own, of either version, and a program that joins one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

JOIN = """
import os, sys
with open(sys.argv[1] + "/cgroup.procs", "w", encoding="ascii") as group:
    group.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""`python -c JOIN FOLDER ARGUMENTS`: `python ARGUMENTS` in a group."""
ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(controller: str) -> Iterator[Path]:
    """The folder of a group that is empty again at the end; skips the test where none can be made.

    `controller`: `memory` or `cpu`."""
    parent = ROOT / controller if (ROOT / controller).is_dir() else ROOT
    folder = parent / f"infer-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield folder
    finally:
        ends_s = time.monotonic() + 20
        while (folder / "cgroup.procs").read_text(encoding="ascii"):
            assert time.monotonic() < ends_s, "a process is left in the control group"
            time.sleep(0.1)
        folder.rmdir()


def set_quota(folder: Path, cores: float) -> None:
    """Let the processes of a group have so many cores' time."""
    period_us = 100_000
    quota_us = int(cores * period_us)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota_us} {period_us}", encoding="ascii")
    else:
        (folder / "cpu.cfs_period_us").write_text(str(period_us), encoding="ascii")
        (folder / "cpu.cfs_quota_us").write_text(str(quota_us), encoding="ascii")
