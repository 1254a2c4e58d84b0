"""The limits of the control groups (containers, services) in which this process runs, on Linux

Standard library only. Files are read below `root`, so that tests can describe other machines.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""a limit of a control group (version 1) from this number on means that there is none"""


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
    """Bytes of memory that the control groups of this process still allow; None if unlimited.

    Files that have not been used lately are not counted as used: the system gives them up first."""
    left = []
    for folder in _groups(root, "memory"):
        for limit, used, unused in (
            ("memory.max", "memory.current", "inactive_file"),  # version 2
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
        ):
            most, now = text_of_file(folder / limit), text_of_file(folder / used)
            if most.isdigit() and now.isdigit() and int(most) < _UNLIMITED:
                lines = map(str.split, text_of_file(folder / "memory.stat").splitlines())
                idle = next((int(words[1]) for words in lines if words[0] == unused), 0)
                left.append(max(0, int(most) - max(0, int(now) - idle)))
    return min(left, default=None)


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
