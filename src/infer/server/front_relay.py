"""`FrontRelay`: brings the questions of each front to all others; `RelayedPeers`: a front's side"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from infer.server.fronts import AnswerQuestion

POLL_S = 10.0
"""Seconds for which a front waits at the relay before it comes again."""
FORGET_S = 60.0
"""Seconds after which a front that does not come is forgotten."""
RETRY_S = 0.5
"""Seconds between two attempts to reach the relay."""
MAX_QUEUED = 64
"""Questions that wait for a front; further ones get no answer from it."""

log = logging.getLogger(__name__)


class RelayError(Exception):
    """The relay cannot be reached."""


class Relay(Protocol):
    """The calls of a `FrontRelay`, from wherever it is. They raise `RelayError`."""

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        """The next question to a front, with its number; None after `POLL_S` without one."""

    async def answer(self, front: str, number: int, data: bytes) -> None:
        """The answer of a front to a question."""

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        """See `Peers.ask`; `front` is who asks."""


@dataclass(eq=False)
class _Known:
    """A front."""

    seen_s: float
    questions: asyncio.Queue[tuple[int, bytes]] = field(
        default_factory=lambda: asyncio.Queue(MAX_QUEUED)
    )


class FrontRelay:
    """Nothing can call a front from outside, so each waits for questions at one place that all
    know: the process that has started them, or an actor of Ray. A front that has not come for the
    next question for `FORGET_S` has gone; before that it is named as missing. The relay holds
    nothing that must survive it. Lives on an event loop. A `Relay`."""

    def __init__(self) -> None:
        self._fronts: dict[str, _Known] = {}
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[str, int], asyncio.Future[bytes]] = {}

    def forget(self, front: str) -> None:
        """A front has gone: it is asked no more, and nobody waits for its answers."""
        self._fronts.pop(front, None)
        for (name, _), waiting in self._waiting.items():
            if name == front:
                waiting.cancel()

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        known = self._fronts.setdefault(front, _Known(time.monotonic()))
        known.seen_s = time.monotonic()
        try:
            async with asyncio.timeout(POLL_S):
                return await known.questions.get()
        except TimeoutError:
            return None
        finally:
            known.seen_s = time.monotonic()

    async def answer(self, front: str, number: int, data: bytes) -> None:
        waiting = self._waiting.get((front, number))
        if waiting is not None and not waiting.done():
            waiting.set_result(data)

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        now_s = time.monotonic()
        self._fronts = {
            name: known
            for name, known in self._fronts.items()
            if now_s - known.seen_s < FORGET_S + POLL_S
        }
        number, loop = next(self._numbers), asyncio.get_running_loop()
        answers: dict[str, bytes | None] = {}
        waiting = {}
        for name, known in self._fronts.items():
            if name == front:
                continue
            answers[name] = None
            with contextlib.suppress(asyncio.QueueFull):
                known.questions.put_nowait((number, question))
                waiting[name] = self._waiting[name, number] = loop.create_future()
        if waiting:
            await asyncio.wait(waiting.values(), timeout=timeout_s)
        for name, future in waiting.items():
            del self._waiting[name, number]
            if future.done() and not future.cancelled():
                answers[name] = future.result()
        return answers


class RelayedPeers:
    """The `Peers` of a front, over a relay."""

    def __init__(self, front: str, relay: Relay) -> None:
        self._front = front
        self._relay = relay
        self._seen: dict[str, float] = {}
        """Other fronts, and when they have last answered."""

    async def ask(self, question: bytes, timeout_s: float) -> Mapping[str, bytes | None]:
        """See `Peers`."""
        now_s = time.monotonic()
        self._seen = {name: at_s for name, at_s in self._seen.items() if now_s - at_s < FORGET_S}
        try:
            async with asyncio.timeout(2 * timeout_s):
                answers = await self._relay.ask(self._front, question, timeout_s)
        except (RelayError, TimeoutError) as error:
            log.warning("the other fronts cannot be asked: %s", error or "no answer")
            return dict.fromkeys(self._seen)
        self._seen.update((name, now_s) for name, data in answers.items() if data is not None)
        # A relay that has just been made does not know all of them yet.
        return {**dict.fromkeys(self._seen), **answers}

    async def serve(self, answer: AnswerQuestion) -> None:
        """Answer the questions of others until cancelled."""
        while True:
            try:
                async with asyncio.timeout(2 * POLL_S):
                    numbered = await self._relay.next_question(self._front)
                if numbered is not None:
                    number, question = numbered
                    await self._relay.answer(self._front, number, answer(question))
            except (RelayError, TimeoutError):
                await asyncio.sleep(RETRY_S)
            except Exception:
                log.exception("a question of another front could not be answered")
                await asyncio.sleep(RETRY_S)
