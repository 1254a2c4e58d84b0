"""`DistantReader`: reads an answer that another front keeps, by asking it again and again"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from infer.errors import OverloadedError, RequestError
from infer.server.http.error_responses import HttpError
from infer.server.kept_answers import REPLACED, KeptAnswers, KeptPiece
from infer.server.openai.events import NOTHING_YET

FIRST_WAIT_S, LAST_WAIT_S = 0.05, 0.5
"""Seconds before the next question: after something new, and at most."""
LOST_S = 30.0
"""Seconds without an answer of the other front after which it has gone."""
ALIVE_S = 15.0
"""Seconds of silence after which a comment says that the stream lives."""
LOST = b": the front that has this answer does not answer\n\n"


class DistantReader:
    """A front asks as often as there is something new, and less often while there is not. What a
    question gets is bounded (`KeptAnswer.piece`), and so is the number of questions
    (`server.fronts`). A `Reader`."""

    def __init__(self, first: KeptPiece, more: Callable[[KeptPiece], Awaitable[KeptPiece]]) -> None:
        """`first`: what there is already. `more` asks for what comes behind a piece."""
        self._next: KeptPiece | None = first
        self._read = first
        self._more = more
        self._wait_s = FIRST_WAIT_S
        self._said_s = _now_s()
        self._is_replaced = False

    async def take(self) -> bytes | None:
        """The next events, as one piece; None after the end."""
        while not (self._read.is_end and self._next is None):
            if self._is_replaced:
                self._read, self._next = KeptPiece(b"", 0, is_end=True), None
                return REPLACED
            piece, self._next = self._next or await self._asked(), None
            self._read = piece
            if piece.data:
                self._wait_s, self._said_s = FIRST_WAIT_S, _now_s()
                return piece.data
            if not piece.is_end and _now_s() - self._said_s > ALIVE_S:
                self._said_s = _now_s()
                return NOTHING_YET
        return None

    async def _asked(self) -> KeptPiece:
        until_s = _now_s() + LOST_S
        while _now_s() < until_s:
            await asyncio.sleep(self._wait_s)
            self._wait_s = min(2 * self._wait_s, LAST_WAIT_S)
            try:
                return await self._more(self._read)
            except (OverloadedError, HttpError) as error:
                if error.status not in (429, 503):
                    break
        return KeptPiece(LOST, self._read.last, is_end=True)

    def replace(self) -> None:
        """See `Reader`."""
        self._is_replaced = True

    def close(self) -> None:
        """See `Reader`."""


def told(kept: KeptAnswers, answer_id: str, after: int, num_passed: int) -> Any:
    """What a front says of an answer that it keeps: a `KeptPiece`, or an error's members."""
    try:
        answer = kept.get(answer_id)
        answer.check(after)
    except RequestError as error:
        return {
            "status": error.status,
            "message": error.message,
            "code": error.code,
            "param": error.param,
        }
    return answer.piece(after, num_passed)


def piece_of(fields: Any) -> KeptPiece:
    """What another front has told. Raises `HttpError`."""
    if isinstance(fields, dict):
        raise HttpError(**fields)
    return msgspec.convert(fields, KeptPiece)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
