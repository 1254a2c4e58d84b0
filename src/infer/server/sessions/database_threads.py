"""`DatabaseThreads`: a thread pool with a bounded queue for calls of the sessions' database

A locked or distant database blocks a thread for seconds. With threads of its own it delays nothing
else in the server. Its failures become a 503 with `Retry-After`, because the client's request was
correct.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from infer.server.http.error_responses import HttpError
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

T = TypeVar("T")

NUM_THREADS = 4
RETRY_AFTER_S = 5
"""seconds in `Retry-After` of a 503"""

log = logging.getLogger("infer.server")


class DatabaseError(HttpError):
    """A 503, because the database cannot be used now."""

    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="database_unavailable", retry_after_s=RETRY_AFTER_S)


class DatabaseThreads:
    """See the module's docstring."""

    def __init__(self, limits: ServerLimits = SERVER_LIMITS) -> None:
        self._max_calls = limits.max_database_calls
        self._threads = ThreadPoolExecutor(NUM_THREADS, "infer-database")
        self._num_calls = 0

    async def call(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run `work(*arguments)` in a thread. Raises `DatabaseError` if the database fails or too
        many calls wait."""
        if self._num_calls >= self._max_calls:
            raise DatabaseError("too many requests wait for the database of sessions")
        self._num_calls += 1
        running = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        running.add_done_callback(self._count_down)  # also if the caller was cancelled
        try:
            return await asyncio.shield(running)
        except (SQLAlchemyError, OSError) as error:
            # Only the operator may see the cause; it may contain paths and hosts.
            cause = getattr(error, "orig", None) or error
            log.error("the database of sessions has failed: %s: %s", type(cause).__name__, cause)
            message = "the database of sessions is busy or cannot be used; nothing was changed"
            raise DatabaseError(message) from None

    def _count_down(self, running: asyncio.Future[Any]) -> None:
        self._num_calls -= 1
        if not running.cancelled():
            running.exception()  # read, so that asyncio does not log it

    def close(self) -> None:
        """Stop the threads without waiting for their calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)
