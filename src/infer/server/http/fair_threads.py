"""`FairThreads`: a thread pool that is shared fairly between owners of work"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from infer.fair_queue import FairQueue


class _Job(NamedTuple):
    result: asyncio.Future[Any]
    work: Callable[[], Any]
    ended: Callable[[], None]


class FairThreads:
    """The pool starts the first waiting job of each owner in turn, and one owner never has all
    threads (`FairQueue`). All methods are called on the event loop; only the jobs run in threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._queue: FairQueue[_Job] = FairQueue(num_threads)

    def submit(
        self, owner: str, work: Callable[[], Any], ended: Callable[[], None]
    ) -> asyncio.Future[Any]:
        """Run `work` in a thread; returns a future of its result.

        `ended` is called when the work is done, even if the future was cancelled before, or when a
        cancelled job will not be started. Work of the owner "" (there are no keys) may use all
        threads.
        """
        result = asyncio.get_running_loop().create_future()
        self._queue.put(owner, _Job(result, work, ended))
        self._start_jobs()
        return result

    def _start_jobs(self) -> None:
        while (taken := self._queue.take()) is not None:
            owner, job = taken
            if job.result.cancelled():
                self._queue.done(owner)
                job.ended()
                continue
            running = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            running.add_done_callback(partial(self._done, owner, job))

    def _done(self, owner: str, job: _Job, running: asyncio.Future[Any]) -> None:
        self._queue.done(owner)
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
