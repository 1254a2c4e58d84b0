"""`CompilingThreads`: threads that compile grammars, for tenants in turn"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from infer.fair_queue import FairQueue
from infer.text.grammars.compiler import compiling_thread

T = TypeVar("T")

NUM_THREADS = 2
"""Number of threads: one tenant's hard grammar leaves one to all others."""
_NICE = 5


class _Job(NamedTuple):
    result: Future[Any]
    work: Callable[[], Any]

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.work())
        except BaseException as error:
            self.result.set_exception(error)


class CompilingThreads:
    """One tenant never has both threads (`FairQueue`). What a thread has compiled is freed in that
    thread. Any thread may call all methods. `runner.grammar_masks` uses it."""

    def __init__(self) -> None:
        self._threads = [compiling_thread(f"infer-grammar-{i}") for i in range(NUM_THREADS)]
        self._idle = list(self._threads)
        self._homes = {thread.submit(_lower_priority).result(): thread for thread in self._threads}
        """The threads by `threading.get_ident`."""
        self._queue: FairQueue[_Job] = FairQueue(NUM_THREADS)
        self._lock = threading.Lock()

    def submit(self, tenant: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a thread in the tenant's turn; jobs of one tenant run one by one, in order.

        Requests without a key have the tenant "", and one thread, too.
        """
        result: Future[T] = Future()
        with self._lock:
            self._queue.put(tenant or "anybody", _Job(result, work))
            self._start_jobs()
        return result

    def _start_jobs(self) -> None:
        """To be called with the lock."""
        while (taken := self._queue.take()) is not None:
            thread = self._idle.pop()
            thread.submit(self._run, thread, *taken)

    def _run(self, thread: ThreadPoolExecutor, owner: str, job: _Job) -> None:
        try:
            job.run()
        finally:
            with self._lock:
                self._idle.append(thread)
                self._queue.done(owner)
                self._start_jobs()

    def free(self, thread: int, holder: list[Any]) -> None:
        """Empty a list in the thread that has compiled what is in it (`threading.get_ident`).

        A compiled grammar has very many parts. If another thread frees them while that one compiles
        the next grammar, in the same arena of the C library, it takes 20 times as long, and holds
        the interpreter lock all the time.
        """
        home = self._homes.get(thread)
        if home is None:
            holder.clear()
        else:
            home.submit(holder.clear)


def _lower_priority() -> int:
    """Lower this thread's priority, so that compiling does not delay steps; returns its id."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    return threading.get_ident()
