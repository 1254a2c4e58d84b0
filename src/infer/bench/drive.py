"""Sends planned requests to a target and makes a `Record` of when each piece came back.

In an open loop a request arrives at its planned time, whatever the target does. Its latencies count
from the planned time, not from the time at which it could be sent (no coordinated omission). In a
closed loop (`concurrency`) a request arrives when a place is free. The same code drives both kinds
of target, the engine in this process and a server. All times are seconds since the run began.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from infer.bench.workloads import Planned
from infer.errors import InferError

Prompt = tuple[int, ...] | str


class Usage(NamedTuple):
    """The target's own counts of a request's tokens."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Piece(NamedTuple):
    """A piece of an answer: tokens, the target's own count of them, or both."""

    num_tokens: int = 0
    answer: Prompt = ()
    """The answer of this piece, in the form in which the target takes prompts."""
    usage: Usage | None = None


class Failure(InferError):
    """A request that was not answered. Errors are counted by `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Target(Protocol):
    """Something that answers requests."""

    def prompt(self, planned: Prompt) -> Prompt:
        """A planned prompt in the form that this target takes. Two of them can be added with +."""

    def send(
        self, prompt: Prompt, output_len: int, temperature: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        """The pieces of an answer as they come. Raises `InferError` where its end does not come."""


@dataclass(slots=True)
class Record:
    """The course of one request. Times are seconds since the run began."""

    group: str
    arrival_s: float = 0.0
    """The time at which it was planned to be sent; in a closed loop, at which it was sent."""
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    """The times at which the pieces of the answer came; a piece usually is one token."""
    end_s: float = 0.0
    wanted_tokens: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    """The kind of its error; None: it was answered."""
    message: str = ""

    @property
    def ttft_s(self) -> float:
        """The time to first token, from `arrival_s`."""
        return self.token_s[0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """The time from `arrival_s` to the end of the stream."""
        return self.end_s - self.arrival_s

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """The times of each piece and of the next one."""
        return list(zip(self.token_s, self.token_s[1:], strict=False))

    @property
    def mean_itl_s(self) -> float:
        """The mean time of an output token after the first one; 0 where there is only one."""
        return (self.token_s[-1] - self.token_s[0]) / max(1, self.output_tokens - 1)


@dataclass(slots=True)
class _Talk:
    """The texts of a request, and the requests that wait for it."""

    prompt: Prompt = ()
    answer: Prompt = ()
    followers: list[tuple[int | None, asyncio.Event]] = field(default_factory=list)


class Drive:
    """One run of a workload's plan against a target."""

    def __init__(
        self,
        plan: Sequence[Planned],
        target: Target,
        *,
        concurrency: int | None = None,
        timeout_s: float = 600.0,
        on_end: Callable[[], Any] = lambda: None,
    ) -> None:
        """`concurrency`: the most requests in flight, which closes the loop. `timeout_s`: the time
        for one answer. `on_end` is called when a request has ended, with an error or without."""
        self.plan = plan
        self.records = [Record(request.group, wanted_tokens=request.output_len) for request in plan]
        self._talks = [_Talk() for _ in plan]
        self._waits = [asyncio.Event() for _ in plan]
        for planned, event in zip(plan, self._waits, strict=True):
            if planned.after is not None:
                self._talks[planned.after].followers.append((planned.after_tokens, event))
        self._target = target
        self._closed = concurrency is not None
        self._places = asyncio.Semaphore(concurrency or len(plan))
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._started_s = 0.0

    async def run(self) -> list[Record]:
        """Sends all requests; returns when the last one has ended."""
        self._started_s = time.perf_counter()
        await asyncio.gather(*map(self._one, range(len(self.plan))))
        return self.records

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self._started_s

    async def _one(self, index: int) -> None:
        planned, record, talk = self.plan[index], self.records[index], self._talks[index]
        base_s = 0.0
        if planned.after is not None:
            await self._waits[index].wait()
            base_s = self.now_s
        record.arrival_s = base_s + planned.arrival_s
        await asyncio.sleep(max(0.0, record.arrival_s - self.now_s))
        async with self._places:
            record.sent_s = self.now_s
            if self._closed:
                record.arrival_s = record.sent_s
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._send(planned, record, talk)
            except TimeoutError:
                record.error = "timeout"
                record.message = f"the answer had not ended after {self._timeout_s:g} s"
            except InferError as error:
                record.error = error.kind if isinstance(error, Failure) else type(error).__name__
                record.message = str(error)
            record.end_s = self.now_s
        for _, event in talk.followers:
            event.set()
        self._on_end()

    async def _send(self, planned: Planned, record: Record, talk: _Talk) -> None:
        talk.prompt = self._target.prompt(planned.prompt)
        if planned.continues:
            assert planned.after is not None
            before = self._talks[planned.after]
            if self.records[planned.after].error is not None:
                raise Failure("skipped", "the turn before it has failed")
            talk.prompt = before.prompt + before.answer + talk.prompt  # type: ignore[operator]
        if not isinstance(talk.prompt, str):
            record.prompt_tokens = len(talk.prompt)
        pieces = self._target.send(talk.prompt, planned.output_len, planned.temperature)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                self._note(piece, record, talk)
        if not record.token_s:
            if not record.output_tokens:
                raise Failure("empty", "the answer ended without a token")
            record.token_s.append(self.now_s)  # counted by the server, none of them had a text

    def _note(self, piece: Piece, record: Record, talk: _Talk) -> None:
        if piece.num_tokens:
            record.token_s.append(self.now_s)
            record.output_tokens += piece.num_tokens
            for tokens, event in talk.followers:
                if tokens is not None and record.output_tokens >= tokens:
                    event.set()
        if piece.answer:
            talk.answer = talk.answer + piece.answer if talk.answer else piece.answer  # type: ignore[operator]
        if piece.usage is not None:
            record.prompt_tokens, record.output_tokens, record.cached_tokens = piece.usage
