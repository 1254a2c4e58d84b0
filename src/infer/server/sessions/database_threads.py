"""`DatabaseThreads`: a thread pool with a bounded queue for calls of the sessions' database"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from infer.server.http.error_responses import HttpError
from infer.server.http.fair_threads import FairThreads
from infer.server.tenancy.key_places import KeyPlaces
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

T = TypeVar("T")

NUM_THREADS = 4
RETRY_AFTER_S = 5
"""Seconds in `Retry-After` of a 503."""

log = logging.getLogger("infer.server")


class DatabaseError(HttpError):
    """A 503, because the database cannot be used now."""

    type = "server_error"

    def __init__(self, message: str) -> None:
        super().__init__(503, message, code="database_unavailable", retry_after_s=RETRY_AFTER_S)


class DatabaseThreads:
    """A locked or distant database blocks a thread for seconds. With threads of its own it delays
    nothing else in the server. Keys take turns at the threads, and none has all places of the
    queue. Failures become a 503 with `Retry-After`, because the client's request was correct."""

    def __init__(self, limits: ServerLimits = SERVER_LIMITS) -> None:
        self._threads = FairThreads(NUM_THREADS, "infer-database")
        self._places = KeyPlaces(
            "calls of the database of sessions open",
            limits.max_database_calls_of_key,
            limits.max_database_calls,
        )
        """Of calls that run or wait."""

    async def call(
        self, owner: str, work: Callable[..., T], *arguments: Any, is_begun: bool = False
    ) -> T:
        """Run `work(*arguments)` in a thread. `owner`: id of the key, "" for the server itself;
        `is_begun`: an answer is complete and is written, so the key's limit does not refuse it.

        Raises `DatabaseError` if the database fails or too many calls wait, `HttpError` (429) if
        too many of this key do."""
        if not is_begun and not self._places.has_room(owner):
            raise DatabaseError("too many requests wait for the database of sessions")
        self._places.acquire(owner)
        ended = partial(self._places.release, owner)
        running: asyncio.Future[T] = self._threads.submit(owner, partial(work, *arguments), ended)
        running.add_done_callback(_read)  # also if the caller was cancelled
        try:
            return await asyncio.shield(running)
        except (SQLAlchemyError, OSError) as error:
            # Only the operator may see the cause; it may contain paths and hosts.
            cause = getattr(error, "orig", None) or error
            log.error("the database of sessions has failed: %s: %s", type(cause).__name__, cause)
            message = "the database of sessions is busy or cannot be used; nothing was changed"
            raise DatabaseError(message) from None

    def close(self) -> None:
        """Stop the threads without waiting for their calls."""
        self._threads.close()


def _read(running: asyncio.Future[Any]) -> None:
    """Read the error, so that asyncio does not log it."""
    if not running.cancelled():
        running.exception()
