"""Files that only their owner may read, written atomically and under a lock between processes

`warn_if_shared` says of a file with secrets that others can read it, wherever it is from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from infer.files import MAX_CONFIG_BYTES, read_text

try:
    import fcntl
except ImportError:  # Windows; there files are not locked
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

MAX_WAIT_S = 10.0
"""Default seconds to wait for a file's lock."""


@contextlib.contextmanager
def locked(path: Path, max_wait_s: float = MAX_WAIT_S) -> Iterator[None]:
    """Hold the lock of a file (a file beside it) that excludes other processes until the block
    ends. Raises `TimeoutError` after `max_wait_s` seconds."""
    if fcntl is None:
        yield
        return
    path = path.resolve()
    ends_s = time.monotonic() + max_wait_s
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with os.fdopen(
        os.open(path.with_name(f".{path.name}.lock"), flags, 0o600), "w", encoding="utf-8"
    ) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_s:
                    raise TimeoutError(f"another process keeps {path.name} locked") from None
                time.sleep(0.01)
        yield


def write_private(path: Path, text: str) -> None:
    """Replace a file's content atomically; only the owner may read it. A symbolic link is kept, and
    its target replaced."""
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(
        os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        os.fchmod(file.fileno(), 0o600)  # a umask may have taken the owner's rights
        file.write(text)
    beside.replace(path)


def warn_if_shared(path: Path, mode: int | None = None) -> None:
    """Log a warning where others than its owner can read or write a file with secrets. `mode`: the
    file's, where it is known."""
    if os.name != "posix":
        return
    mode = path.stat().st_mode if mode is None else mode
    if mode & 0o077:
        shown = f"{mode & 0o777:04o}"
        text = "%s can be read or written by others than its owner (mode %s): chmod 600 it"
        log.warning(text, path, shown)


def secret_in(name: str) -> str:
    """The text of a file with a secret, without blanks around it; see `warn_if_shared`. Raises
    `OSError` and `UnicodeDecodeError` where it cannot be read."""
    path = Path(name).expanduser()
    text = read_text(path, MAX_CONFIG_BYTES).strip()
    warn_if_shared(path)
    return text


def state_folder() -> Path:
    """The user's folder for what a server keeps; makes it."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "infer"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
