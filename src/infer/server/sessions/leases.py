"""`SessionLeases`: which sessions this server is answering a turn of, told to the other servers"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError
from infer.server.sessions.database_threads import DatabaseError, DatabaseThreads

RENEW_S = 2.0
"""Seconds between two renewals."""
CLOSE_S = 1.0
"""Seconds that the end of a server waits for the database."""


class SessionLeases:
    """Several servers may have the same sessions. A turn takes the session's lease in the database
    before it computes anything, so a second turn at another server is refused at once. A lease ends
    with its turn, and `LEASE_S` after its server has stopped renewing it. Lives on the event loop.
    """

    def __init__(self, threads: DatabaseThreads, call_store: Callable[..., Any]) -> None:
        """`call_store` calls a method of the `SessionStore` by its name; it runs in a thread."""
        self._threads = threads
        self._call_store = call_store
        self._turns: set[str] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    async def take(self, owner: str, session_id: str, context: RequestContext) -> str:
        """The name of a new turn of a session, which has the lease until the request ends. Raises
        `HttpError`: see `SessionStore.lease`."""
        turn = secrets.token_hex(16)
        call = self._threads.call(owner, self._call_store, "lease", owner, session_id, turn)
        taking = asyncio.ensure_future(call)
        # A request may end while it waits for its lease; that one is given back, too.
        context.cleanup.callback(self._end, turn, taking)
        await asyncio.shield(taking)
        self._turns.add(turn)
        if self._renewing is None:
            self._renewing = asyncio.get_running_loop().create_task(self._renew())
        return turn

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if not self._turns:
                self._renewing = None
                return
            # Without a renewal the lease ends; then the writing of the turn finds a conflict.
            with contextlib.suppress(DatabaseError):
                await self._threads.call("", self._call_store, "renew_leases", list(self._turns))

    def _end(self, turn: str, taking: asyncio.Future[None]) -> None:
        self._turns.discard(turn)
        ending = asyncio.get_running_loop().create_task(self._forget(turn, taking))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _forget(self, turn: str, taking: asyncio.Future[None]) -> None:
        try:
            await taking
        except DatabaseError:
            pass  # it may have been written
        except HttpError:
            return  # it was refused
        with contextlib.suppress(DatabaseError):  # the lease ends by itself
            await self._threads.call("", self._call_store, "end_lease", turn)

    async def close(self) -> None:
        """Stop renewing, and wait until the leases of turns that have ended are given back, for
        `CLOSE_S` at most."""
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_S)
        for task in (self._renewing, *self._ending):
            if task is not None:
                task.cancel()
