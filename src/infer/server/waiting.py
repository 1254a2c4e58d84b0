"""Two ways to wait: for an answer or the client's leaving, and for all of several pieces of work.

Starlette does not cancel a handler whose client has left, and uvicorn only tells those who ask;
so every handler that waits for the engine does it inside `unless_gone`. Both functions leave no
task behind, however they end: when they return or raise, everything they started has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

from infer.server.failures import ClientGone

T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled: `ClientGone`.

    The request's body must have been read, because this takes the messages behind it.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _end(working, watching)


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in order; the first error cancels the others and is raised itself."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(*tasks)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
