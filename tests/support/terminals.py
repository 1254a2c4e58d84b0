"""`Session`: the `infer` command in a terminal of its own, and what is on its screen."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

_STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
_CLEARED = re.compile(r"[^\n]*\r\x1b\[K")
WAIT_S = 60.0


@dataclass
class Session:
    """A process in a terminal."""

    process: subprocess.Popen[bytes]
    fd: int
    """Our end of the terminal."""
    raw: str = ""
    """All that has come."""
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def until(self, pattern: str) -> str:
        """The screen, as soon as its end has a match of a pattern; fails where none comes."""
        ends_s = time.monotonic() + WAIT_S
        while not (found := re.search(pattern, self.screen())):
            assert time.monotonic() < ends_s, f"no {pattern!r} in\n{self.screen()}"
            assert self._read(), f"ended without {pattern!r}:\n{self.screen()}"
        return self.screen()[: found.end()]

    def rest(self) -> None:
        """Read until the process has ended."""
        ends_s = time.monotonic() + WAIT_S
        while self._read():
            assert time.monotonic() < ends_s, f"it does not end:\n{self.screen()}"

    def _read(self) -> bool:
        """Take what has come; False where the process has ended and nothing comes any more."""
        has_ended = self.process.poll() is not None
        if not select.select([self.fd], [], [], 0.2)[0]:
            return not has_ended
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # nobody has the other end
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)

    def screen(self) -> str:
        """What has come, without styles and without what was cleared."""
        text = self.raw.replace("\r\n", "\n")
        return _STYLES.sub("", _CLEARED.sub("", text))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self.fd, text.encode())


@contextmanager
def session(arguments: Sequence[str], columns: int, **more: str) -> Iterator[Session]:
    """Run `infer` in a terminal of this width; `more`: further variables."""
    fd, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {name: it for name, it in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    process = subprocess.Popen(
        [sys.executable, "-m", "infer", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **more},
    )
    try:
        yield Session(process, fd)
    finally:
        process.kill()
        process.wait()
        os.close(fd)
        os.close(theirs)
