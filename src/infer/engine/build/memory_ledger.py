"""`MemoryLedger`: what the engines of this machine have promised their caches of main memory, and
on which processors they live"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infer.control_groups import ROOT
from infer.engine.build.server_memory import held_bytes

if sys.platform != "win32":
    import fcntl

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0
"""Seconds for which an engine that starts waits while others plan."""
_SUFFIX = ".engine"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Promise:
    """What an engine may take of main memory; sizes in bytes."""

    promised: int
    """Its weights, its cache at its largest, and the rest of its server."""
    least: int
    """The part without which it could not serve."""
    held: int
    """What it takes now."""
    cpus: frozenset[int] = frozenset()
    """Processors on which it lives."""


def for_newcomer(free: int, promises: Sequence[Promise]) -> tuple[int, int]:
    """What an engine that starts may plan with, given the bytes that are free and what others were
    promised: (what nobody was promised, or an equal part if that is more; all that others can do
    without). Others take less where their promises no longer fit together (`part_of`)."""
    unpromised = free - sum(max(0, promise.promised - promise.held) for promise in promises)
    spare = free - sum(promise.least - promise.held for promise in promises)
    return max(0, unpromised, min(free, spare // (len(promises) + 1))), max(0, min(free, spare))


def part_of(mine: Promise, others: Sequence[Promise], available: int) -> int:
    """What one engine may take while all together were promised more than there is: its least, and
    a part of what is left in proportion to its promise."""
    everyone = [mine, *others]
    left = available + sum(promise.held - promise.least for promise in everyone)
    wanted = sum(promise.promised - promise.least for promise in everyone)
    if wanted <= left:
        return mine.promised
    return mine.least + max(0, left) * (mine.promised - mine.least) // wanted


def ledger_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of this user's ledger; it may be absent."""
    if given := environment.get("XDG_RUNTIME_DIR"):
        return Path(given) / "infer"
    uid = os.getuid()
    if (runtime := Path(f"/run/user/{uid}")).is_dir():
        return runtime / "infer"  # the same one for a service without the variable
    return Path(tempfile.gettempdir()) / f"infer-{uid}"


class MemoryLedger:
    """Each engine of a user has a file in a folder that belongs to the user, and holds a lock on
    it, which the system releases when the engine ends, in whatever way. A file without a lock is a
    dead engine's; whoever finds it removes it. So the engines of several servers, of several models
    of one server and of a cluster see each other. The ledger is an addition only: where its folder
    cannot be used, one line of the log says so, and memory is planned without it. No torch. Not
    thread-safe."""

    def __init__(self, folder: Path | None = None, root: Path = ROOT) -> None:
        """`folder`: None for the user's own. `root`: folder below which the system's files are."""
        self._root = root
        self._mine: Path | None = None
        self._file: int | None = None
        self._last: list[Promise] = []
        self._folder: Path | None = None
        self._complained = False
        if sys.platform == "win32":
            return
        try:
            self._folder = _checked(folder or ledger_folder())
        except OSError as error:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            log.warning(
                "what other engines of this machine may take is not known (%s); memory is planned"
                " without it",
                error,
            )
        self._complained = True

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Hold the ledger while memory is planned: engines that start together plan in turn."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(LOCK_TIMEOUT_S))
            except OSError as error:
                self._complain(error)
            yield

    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        if self._folder is None:
            yield
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(self._folder / "lock", flags, 0o600)
        try:
            ends_s = time.monotonic() + timeout_s
            while not _lock(file, exclusive=True):
                if time.monotonic() >= ends_s:
                    raise TimeoutError(f"{self._folder / 'lock'} is held by another process")
                time.sleep(0.02)
            yield
        finally:
            os.close(file)

    def enter(self, promised: int, least: int, cpus: Collection[int] = ()) -> None:
        """Say what this engine was promised, and on which processors it lives; within `planning`.
        Until this process ends, or `leave`."""
        if self._folder is None:
            return
        self.leave()
        entry = {"pid": os.getpid(), "space": _pid_space(), "promised": promised, "least": least}
        entry["cpus"] = sorted(cpus)
        path = self._folder / f"{os.getpid()}-{os.urandom(4).hex()}{_SUFFIX}"
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
            self._mine = path
            _lock(self._file, exclusive=True)
            os.write(self._file, json.dumps(entry).encode())
        except OSError as error:
            self.leave()
            self._complain(error)

    def leave(self) -> None:
        """Take the promise back."""
        if self._mine is not None:
            with contextlib.suppress(OSError):
                self._mine.unlink()
        if self._file is not None:
            os.close(self._file)
        self._mine = self._file = None

    def __del__(self) -> None:
        self.leave()

    def others(self) -> list[Promise]:
        """What the other engines of this user were promised; within `planning`."""
        if self._folder is None:
            return []
        promises = []
        try:
            for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
                if path != self._mine and (promise := self._read(path)) is not None:
                    promises.append(promise)
        except OSError as error:
            self._complain(error)
        self._last = promises
        return promises

    def cpus_of_others(self) -> frozenset[int]:
        """The processors on which other engines of this user live; within `planning`."""
        return frozenset(cpu for promise in self.others() for cpu in promise.cpus)

    def others_now(self) -> list[Promise]:
        """Like `others`, outside of `planning`: as they were last, while an engine plans."""
        try:
            with self._locked(0.0):
                return self.others()
        except OSError:
            return self._last

    def _read(self, path: Path) -> Promise | None:
        """The promise in a file; None, and it is removed, if its engine has ended."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if _lock(file, exclusive=False):
                path.unlink(missing_ok=True)
                return None
            entry = json.loads(os.read(file, _MAX_BYTES))
            promised, least = int(entry["promised"]), int(entry["least"])
            if not 0 <= least <= promised:
                raise ValueError("promises less than nothing")
            held = held_bytes(int(entry["pid"]), self._root)
            is_near = entry["space"] == _pid_space()
            cpus = frozenset(map(int, entry.get("cpus", ())))
            return Promise(promised, least, held if is_near else promised, cpus)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self._complain(ValueError(f"{path} is damaged: {error}"))
            return None
        finally:
            os.close(file)


def _checked(folder: Path) -> Path:
    """The folder, made if it is absent; raises `OSError` if it is not this user's own."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _lock(file: int, *, exclusive: bool) -> bool:
    """Lock a file without waiting; whether nobody else has it."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _pid_space() -> str:
    """The namespace in which process ids are counted; "" where the system has none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
