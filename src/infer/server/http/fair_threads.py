"""`FairThreads`: a few threads that owners of work take turns on.

Whoever has much to do waits for itself: of the work that waits, each owner's first is begun in
turn, and one owner never has all the threads. Belongs to the event loop; only the work is done
elsewhere.
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
        """by owner; whose turn it is comes first"""
        self._running: Counter[str] = Counter()

    def submit(
        self, owner: str, work: Callable[[], Any], ended: Callable[[], None]
    ) -> asyncio.Future[Any]:
        """The result of `work`. `ended` is called when it has been done, which may be later than
        whoever waits for it has left, or when it will not be begun any more. Work of the owner ""
        (nobody has a key) may have all the threads."""
        result = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(_Job(result, work, ended))
        self._begin()
        return result

    def _begin(self) -> None:
        while self._running.total() < self._num_threads:
            owner = next(filter(self._may_begin, self._waiting), None)
            if owner is None:
                return
            jobs = self._waiting.pop(owner)
            job = jobs.popleft()
            if jobs:
                self._waiting[owner] = jobs  # behind the others
            if job.result.cancelled():
                job.ended()
                continue
            self._running[owner] += 1
            doing = asyncio.get_running_loop().run_in_executor(self._threads, job.work)
            doing.add_done_callback(partial(self._done, owner, job))

    def _may_begin(self, owner: str) -> bool:
        most = self._num_threads - 1 if owner else self._num_threads
        return self._running[owner] < max(1, most)

    def _done(self, owner: str, job: _Job, doing: asyncio.Future[Any]) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        job.ended()
        error = None if doing.cancelled() else doing.exception()
        if job.result.done():
            pass
        elif doing.cancelled():
            job.result.cancel()
        elif error is not None:
            job.result.set_exception(error)
        else:
            job.result.set_result(doing.result())
        self._begin()

    def close(self) -> None:
        """Waits for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
