"""`BackgroundThread`: a thread that ends before the interpreter does.

At exit the interpreter ends a daemon thread where it next asks for the interpreter's lock. If that
is inside C++ code that may not be unwound, such as torch's operations, the process dies with
SIGABRT (`terminate called without an active exception`) and loses what it has not written. So each
thread of the package that may run native code is told to stop at exit, and is waited for.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


class BackgroundThread:
    """A daemon thread that is stopped and joined before the interpreter ends."""

    def __init__(self, run: Callable[[], None], stop: Callable[[], object], name: str) -> None:
        """`run` is the thread's work. `stop` makes `run` return soon; any thread may call it, also
        after `run` has returned."""
        self._run, self._stop = run, stop
        self._thread = threading.Thread(target=self._run_and_forget, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread; may be called once."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Make the thread end, and wait until it has."""
        self._stop()
        self.join()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the thread has ended, or for `timeout_s` seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run_and_forget(self) -> None:
        try:
            self._run()
        finally:
            atexit.unregister(self.stop)
