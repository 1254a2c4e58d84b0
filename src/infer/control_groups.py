"""The limits of the control groups (containers, services) in which this process runs, on Linux

Standard library only. Files are read below `root`, so that tests can describe other machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""A limit of a control group (version 1) from this number on means that there is none."""


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU seconds per second that the control groups of this process allow; None if unlimited."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = text_of_file(folder / "cpu.max").split()  # version 2
        if not words:  # version 1
            words = [text_of_file(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        numbers = [int(word) for word in words if word.isdigit()]
        if len(numbers) == 2 and numbers[1]:
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes of memory that the control groups of this process still allow; None if unlimited."""
    return min((group.left for group in memory_groups(root)), default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """The lowest limit of memory of the control groups of this process; None if unlimited."""
    return min((group.limit for group in memory_groups(root)), default=None)


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A control group with a limit of memory; sizes in bytes."""

    folder: Path
    limit: int
    """The hard limit, or the lower one from which on the system slows the group down."""
    used: int
    """Without files that have not been used lately: the system gives them up first."""

    @property
    def left(self) -> int:
        """What the group may still take."""
        return max(0, self.limit - self.used)


def memory_groups(root: Path = ROOT) -> list[MemoryGroup]:
    """The control groups of this process that limit memory, and those around them."""
    groups = []
    for folder in _groups(root, "memory"):
        for limits, used, unused in (
            (("memory.max", "memory.high"), "memory.current", "inactive_file"),  # version 2
            (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most = [int(text) for name in limits if (text := text_of_file(folder / name)).isdigit()]
            now = text_of_file(folder / used)
            if now.isdigit() and min(most, default=_UNLIMITED) < _UNLIMITED:
                lines = map(str.split, text_of_file(folder / "memory.stat").splitlines())
                idle = next((words[1] for words in lines if words[:-1] == [unused]), "0")
                used_bytes = max(0, int(now) - (int(idle) if idle.isdigit() else 0))
                groups.append(MemoryGroup(folder, min(most), used_bytes))
    return groups


def _groups(root: Path, controller: str) -> list[Path]:
    """Folders of the control groups of this process, and of the groups around them."""
    mount = root / "sys/fs/cgroup"
    folders = [mount, mount / controller]
    for line in text_of_file(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        is_second = number == "0" and not names
        if not is_second and controller not in names.split(","):
            continue
        folder = mount if is_second else mount / controller
        for part in Path(path.lstrip("/")).parts:
            if part == "..":  # outside of what this process can see
                break
            folders.append(folder := folder / part)
    return folders


def text_of_file(file: Path) -> str:
    """The text of a file of the operating system, stripped; "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
