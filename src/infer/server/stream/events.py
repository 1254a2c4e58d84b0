"""Typed events (`stream_format: "events"`): `token` for each token, then `done`, or `error`.

The text of a token is what becomes visible with it: text that is held back (it may become a stop
string, or a character lacks bytes) arrives with a later token, and all texts together are the
answer. So this renderer wants the engine's pieces one by one, not merged. One choice, no logprobs
(`wire` refuses others). Called by `stream.delivery`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from infer.server.answer import TokenCount
from infer.server.failures import Failure
from infer.server.stream import sse
from infer.types import TextDelta


class TypedEvents:
    """A `stream.chunks.Renderer`; see the module's docstring."""

    merges = False

    def __init__(self, count: TokenCount) -> None:
        self._count = count
        self._done: dict[str, Any] | None = None

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._count.add(index, len(delta.token_ids), delta.num_cached)
        for token_id in delta.token_ids[:-1]:
            yield _token("", token_id)
        if delta.token_ids:
            yield _token(delta.text, delta.token_ids[-1])
        if delta.finish_reason is not None:
            self._done = {"finish_reason": str(delta.finish_reason), "usage": self._count.usage()}

    def closing(self) -> Iterator[bytes]:
        assert self._done is not None, "delivery closes a stream after its last piece"
        yield sse.event("done", sse.dump(self._done))

    def failure(self, failure: Failure) -> bytes:
        return sse.event("error", failure.body())


def _token(text: str, token_id: int) -> bytes:
    return sse.event("token", sse.dump({"token": text, "token_id": token_id}))
