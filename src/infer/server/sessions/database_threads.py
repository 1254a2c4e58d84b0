"""`DatabaseThreads`: where calls of the sessions' database wait, which is nowhere else.

A database that is locked or far away keeps a thread for seconds. It has threads of its own, with a
queue that has an end, so that nothing else of the server waits behind it. What goes wrong there is
a 503 with `Retry-After`: the client's request was right.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from infer.server.http.error_responses import HttpError

T = TypeVar("T")

NUM_THREADS = 4
MAX_CALLS = 64
"""that run or wait; further ones are refused"""
RETRY_AFTER_S = 5

log = logging.getLogger("infer.server")


class DatabaseError(HttpError):
    """The database cannot do it now."""

    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="database_unavailable", retry_after_s=RETRY_AFTER_S)


class DatabaseThreads:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "infer-database")
        self._num_calls = 0

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """`work(*arguments)` in a thread; raises `DatabaseError` where the database fails."""
        if self._num_calls >= MAX_CALLS:
            raise DatabaseError("too many requests wait for the database of sessions")
        self._num_calls += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        running.add_done_callback(self._count_down)  # also when nobody waits for it any more
        try:
            return await asyncio.shield(running)
        except (SQLAlchemyError, OSError) as error:
            # The cause is the operator's to see; it may name paths and hosts.
            cause = getattr(error, "orig", None) or error
            log.error("the database of sessions has failed: %s: %s", type(cause).__name__, cause)
            message = "the database of sessions is busy or cannot be used; nothing was changed"
            raise DatabaseError(message) from None

    def _count_down(self, running: asyncio.Future[Any]) -> None:
        self._num_calls -= 1
        if not running.cancelled():
            running.exception()  # somebody was told, or has left

    def close(self) -> None:
        """Waits for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
