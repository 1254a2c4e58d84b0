"""`Mailbox`: the pieces of one request's output that have not been read"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

from infer.engine.client.output import OutputProcessor
from infer.errors import EngineError, RequestError
from infer.types import ErrorRecord, FinishReason, TextDelta


@dataclass(frozen=True, kw_only=True)
class MailboxLimits:
    """What may wait for slow readers."""

    max_bytes: int = 256 * 1024
    """Approximate bytes that may wait for one reader after merging; beyond it the request is
    cancelled."""
    max_bytes_in_all: int = 256 * 1024 * 1024
    """Approximate bytes that may wait for all readers together; beyond it the requests with most
    are cancelled and their pieces dropped."""


class OpenRequest(NamedTuple):
    """What waits for the reader of one request."""

    num_unread_bytes: int
    """Approximate bytes that wait because the reader is slow."""
    num_unread_tokens: int
    """Tokens in the pieces that wait."""
    finish_reason: FinishReason | None
    """How the request has ended; None while it runs."""


class Mailbox:
    """A slow reader gets the waiting pieces merged into one. `AsyncLLM` cancels a request for which
    too much waits. It is used on the event loop and has one reader."""

    def __init__(
        self, processor: OutputProcessor, merge: bool, limits: MailboxLimits | None = None
    ) -> None:
        """`merge`: a slow reader gets one merged piece instead of several."""
        self.processor = processor
        """Turns the request's tokens into text."""
        self.is_cancelled = False
        """Whether the server has cancelled the request."""
        self._merge = merge
        self._limits = limits or MailboxLimits()
        self._pieces: list[TextDelta] = []
        self.num_bytes = 0
        """Approximate bytes of the pieces that wait because the reader is slow."""
        self._reader: asyncio.Future[None] | None = None

    def snapshot(self) -> OpenRequest:
        """What waits now."""
        num_tokens = sum(len(piece.token_ids) for piece in self._pieces)
        return OpenRequest(self.num_bytes, num_tokens, self.processor.finish_reason)

    def cancel(self) -> None:
        """Count the request as cancelled, with whatever finish reason it ends."""
        self.is_cancelled = True

    def drop(self) -> None:
        """Drop all waiting pieces, the final one included; the next piece is the first again."""
        self._pieces, self.num_bytes, self.processor.finish_reason = [], 0, None

    def put(self, piece: TextDelta) -> None:
        """Add a piece; called on the event loop."""
        if self._pieces:  # the reader is slow; otherwise counting is not worth its time
            self.num_bytes += _size_of(piece)
            if self.num_bytes > self._limits.max_bytes and self._merge:
                self._pieces = [reduce(TextDelta.merge, self._pieces)]
                self.num_bytes = _size_of(self._pieces[0]) + _size_of(piece)
        self._pieces.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[TextDelta]:
        """Wait until a piece is there and take all of them (merged into one, if so constructed).
        There may be one reader at a time."""
        if not self._pieces:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        pieces, self._pieces, self.num_bytes = self._pieces, [], 0
        return [reduce(TextDelta.merge, pieces)] if self._merge else pieces

    def fail(self, error: EngineError | RequestError) -> None:
        """Add a final piece with an error, unless the request has ended."""
        if self.processor.finish_reason is None:
            self.processor.finish_reason = FinishReason.ERROR
            reason = ErrorRecord.of(error)
            self.put(TextDelta("", (), finish_reason=FinishReason.ERROR, error=reason))

    async def pieces(self) -> AsyncIterator[TextDelta]:
        """Yield the pieces as they arrive, up to the one with a finish reason."""
        while True:
            for piece in await self.take():
                yield piece
                if piece.finish_reason is not None:
                    return


def _size_of(piece: TextDelta) -> int:
    """Approximate bytes that a piece takes in memory."""
    pairs = sum(1 + len(entry.top) for entry in piece.logprobs)
    return 200 + len(piece.text) + 48 * len(piece.token_ids) + 125 * pairs
