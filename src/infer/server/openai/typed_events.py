"""`TypedEvents`: the stream format `events`, in which every token is an event of its own."""

from __future__ import annotations

from collections.abc import Iterator

from infer.server.openai.answer_parts import TokenUsage
from infer.server.openai.events import NOTHING_YET, dump, event
from infer.server.openai.generating_api import OnMessage, Part
from infer.types import FinishReason, TextDelta

EVENT_BYTES = 50
"""Size of one token's event, about."""


class TypedEvents:
    """`stream_format: "events"`: `token` for each token, then `done`, or `error`.

    The text of a token is what becomes visible with it: text that is held back (it may become a
    stop string, or a character lacks bytes) arrives with a later token, and all texts together are
    the answer. So this wants the engine's pieces one by one. One choice, no log-probabilities.
    """

    merges = False

    def __init__(self, usage: TokenUsage, on_message: OnMessage | None = None) -> None:
        """`usage`: of the answer, counted here."""
        self._usage = usage
        self._on_message = on_message
        self._reason: FinishReason | None = None

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def size_of(self, part: Part) -> int:
        return EVENT_BYTES * len(part.token_ids)

    def waiting(self) -> bytes:
        return NOTHING_YET

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(index, delta)
        if self._on_message is not None:
            self._on_message({"content": delta.text})
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            text = delta.text if i == last else ""
            yield event(dump({"token": text, "token_id": token_id}), "token")
        self._reason = delta.finish_reason

    def closing(self) -> Iterator[bytes]:
        done = {"finish_reason": self._reason, "usage": self._usage.fields()}
        yield event(dump(done), "done")

    def failure(self, error: str) -> Iterator[bytes]:
        yield event(error, "error")
