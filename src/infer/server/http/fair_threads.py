"""`FairThreads`: a thread pool that is shared fairly between owners of work

The pool starts the first waiting job of each owner in turn, and one owner never has all threads. So
an owner with many jobs waits only for its own. All methods are called on the event loop; only the
jobs run in threads.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple


class _Job(NamedTuple):
    result: asyncio.Future[Any]
    work: Callable[[], Any]
    ended: Callable[[], None]


class FairThreads:
    """See the module's docstring."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._num_threads = num_threads
        self._waiting: dict[str, deque[_Job]] = {}
        """waiting jobs by owner; the owner whose turn is next comes first"""
        self._running: Counter[str] = Counter()

    def submit(
        self, owner: str, work: Callable[[], Any], ended: Callable[[], None]
    ) -> asyncio.Future[Any]:
        """Run `work` in a thread; returns a future of its result.

        `ended` is called when the work is done, even if the future was cancelled before, or when a
        cancelled job will not be started. Work of the owner "" (there are no keys) may use all
        threads.
        """
        result = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Job(result, work, ended))
        self._start_jobs()
        return result

    def _start_jobs(self) -> None:
        while self._running.total() < self._num_threads:
            owner = next(filter(self._may_start, self._waiting), None)
            if owner is None:
                return
            jobs = self._waiting.pop(owner)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # after all other owners
            if job.result.cancelled():
                job.ended()
                continue
            self._running[owner] += 1
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._done, owner, job))

    def _may_start(self, owner: str) -> bool:
        most = self._num_threads - 1 if owner else self._num_threads
        return self._running[owner] < max(1, most)

    def _done(self, owner: str, job: _Job, running: asyncio.Future[Any]) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        job.ended()
        error = None if running.cancelled() else running.exception()
        if job.result.done():
            pass
        elif running.cancelled():
            job.result.cancel()
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(running.result())
        self._start_jobs()

    def close(self) -> None:
        """Stop the threads without waiting for their jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)
