"""`BackgroundThread`: a thread that ends before the interpreter does.

The interpreter tears a daemon thread down where it next wants the interpreter's lock. If that is
inside C++ that may not be unwound, as torch's operations are, the process dies with SIGABRT
(`terminate called without an active exception`) and what was not yet written is lost. So each
thread of the package that may be in native code is told to stop, and waited for, at exit.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


class BackgroundThread:
    """A daemon thread that is stopped and joined before the interpreter ends."""

    def __init__(self, run: Callable[[], None], stop: Callable[[], object], name: str) -> None:
        """`run` is what the thread does; `stop` makes it return soon, from any thread, also when
        it has returned already."""
        self._run, self._stop = run, stop
        self._thread = threading.Thread(target=self._run_and_forget, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Called once."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Have it end, and wait until it has."""
        self._stop()
        self.join()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended, or for so long."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run_and_forget(self) -> None:
        try:
            self._run()
        finally:
            atexit.unregister(self.stop)
