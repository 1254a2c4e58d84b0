"""`WorkerProcess`: a process that works on untrusted text, as its owner sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import weakref
from typing import IO

from infer.readiness import READABLE, WRITABLE, is_ready
from infer.text.untrusted.worker import HEAD

MAX_ANSWER_BYTES = 80 << 20
"""Maximum size of an answer in bytes; the longest prompt has 16 million characters."""
_CHUNK_BYTES = 1 << 20
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "LANG", "LC_ALL",
                   "LC_CTYPE", "PYTHONUTF8", "SYSTEMROOT")  # fmt: skip
"""Variables of the environment that the process gets; others may be secrets."""


class WorkerProcess:
    """Nothing that the process does, or fails to do, keeps its owner longer than a deadline: each
    read and each write waits for the pipe at most so long. One thread at a time uses it."""

    def __init__(self, kind: str) -> None:
        """`kind`: what the process works on; see `text.untrusted.worker`."""
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        # -P and PYTHONPATH: the process finds modules only where this process finds them.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "infer.text.untrusted.worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={
                **kept,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "OPENBLAS_NUM_THREADS": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        for pipe in (self._in, self._out):
            os.set_blocking(pipe.fileno(), False)
        self.is_prepared = False
        """Whether it has answered its first job."""
        # The process is killed when this object is collected and when the interpreter ends.
        self._finalizer = weakref.finalize(self, _kill, self._process)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, message: bytes, deadline_s: float) -> tuple[float, bytes]:
        """Send one message; returns its answer: (seconds of CPU time, JSON).

        Raises `EOFError` or `OSError` if the process dies, and `TimeoutError` after `deadline_s`
        seconds.
        """
        ends_s = time.monotonic() + deadline_s
        self._write(message, ends_s)
        num_bytes, cpu_s = HEAD.unpack(self._read(HEAD.size, ends_s))
        if num_bytes > MAX_ANSWER_BYTES:
            raise OSError("an answer is too long")
        body = self._read(num_bytes, ends_s)
        self.is_prepared = True
        return cpu_s, body

    def _write(self, data: bytes, ends_s: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self._in, WRITABLE, ends_s)
            left = left[os.write(self._in.fileno(), left[:_CHUNK_BYTES]) :]

    def _read(self, num_bytes: int, ends_s: float) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            _wait(self._out, READABLE, ends_s)
            more = os.read(self._out.fileno(), min(num_bytes - len(data), _CHUNK_BYTES))
            if not more:
                raise EOFError
            data += more
        return bytes(data)

    def kill(self) -> None:
        """Kill the process, so that `ask` in another thread ends."""
        self._process.kill()

    def end(self) -> int:
        """End the process; returns its exit code, or minus the signal that ended it."""
        with contextlib.suppress(OSError):
            self._in.close()
        # The process ends when its input ends, unless it works.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5 if self.is_prepared else 0)
        self._finalizer()
        return self._process.wait()


def _wait(pipe: IO[bytes], event: int, ends_s: float) -> None:
    if not is_ready(pipe, event, max(0.0, ends_s - time.monotonic())):
        raise TimeoutError


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()
    process.kill()
    process.wait()
