"""OpenAI's streamed answers: engine pieces → `data:` events of a completion or a chat completion.

What stays the same in a stream is rendered once, in the constructor; a piece costs one escaping
and one concatenation. A piece that shows nothing (its text is held back) is not sent. A renderer
serves one answer with all its choices. Called by `stream.delivery`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from infer.server.answer import Answer, TokenCount, wire_reason
from infer.server.failures import Failure
from infer.server.logprobs import ChoiceLogprobs
from infer.server.stream import sse
from infer.server.wire import StreamOptions
from infer.types import TextDelta


class Renderer(Protocol):
    """What `stream.delivery` writes, event by event."""

    merges: bool
    """whether pieces that have gathered may come as one"""

    def opening(self) -> Iterator[bytes]:
        """Before the first token."""

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """What is new in choice `index`."""

    def closing(self) -> Iterator[bytes]:
        """After the last choice has ended."""

    def failure(self, failure: Failure) -> bytes:
        """The last event of a stream that broke."""


class Chunks:
    """What the two kinds of chunks share; see the module's docstring."""

    kind: str
    merges = True

    def __init__(
        self,
        answer: Answer,
        count: TokenCount,
        num_choices: int,
        options: StreamOptions,
        logprobs: Sequence[ChoiceLogprobs] | None,
    ) -> None:
        self._count = count
        self._num_choices = num_choices
        self._options = options
        self._logprobs = logprobs
        self._head = sse.dump(answer.head(self.kind))[:-1] + ',"choices":['
        self._tail = "]}"
        if options.include_usage:
            self._tail = '],"usage":null}'

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def closing(self) -> Iterator[bytes]:
        if self._options.include_usage:
            yield sse.data(self._head + f'],"usage":{sse.dump(self._count.usage())}}}')
        yield sse.DONE

    def failure(self, failure: Failure) -> bytes:
        return sse.data(failure.body())

    def _chunk(self, choice: str) -> bytes:
        tail = self._tail
        if self._options.continuous_usage_stats:
            tail = f'],"usage":{sse.dump(self._count.usage())}}}'
        return sse.data(self._head + choice + tail)

    def _counted(self, index: int, delta: TextDelta) -> None:
        self._count.add(index, len(delta.token_ids), delta.num_cached)


class CompletionChunks(Chunks):
    """Chunks of `/v1/completions`: the last text and the finish reason come together."""

    kind = "text_completion"

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._counted(index, delta)
        logprobs, reason = "null", "null"
        if self._logprobs and delta.token_ids:
            entry = self._logprobs[index].completion(delta.token_ids, delta.logprobs)
            logprobs = sse.dump(entry)
        if delta.finish_reason is not None:
            reason = f'"{wire_reason(delta.finish_reason)}"'
        if delta.text or logprobs != "null" or reason != "null":
            yield self._chunk(
                f'{{"index":{index},"text":{sse.dump(delta.text)}'
                f',"logprobs":{logprobs},"finish_reason":{reason}}}'
            )


class ChatChunks(Chunks):
    """Chunks of `/v1/chat/completions`: the role comes first, the finish reason last and alone."""

    kind = "chat.completion.chunk"

    def opening(self) -> Iterator[bytes]:
        for index in range(self._num_choices):
            yield self._chunk(_chat_choice(index, {"role": "assistant", "content": ""}))

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._counted(index, delta)
        logprobs = "null"
        if self._logprobs and delta.token_ids:
            logprobs = sse.dump(self._logprobs[index].chat(delta.token_ids, delta.logprobs))
        if delta.text or logprobs != "null":
            yield self._chunk(
                f'{{"index":{index},"delta":{{"content":{sse.dump(delta.text)}}}'
                f',"logprobs":{logprobs},"finish_reason":null}}'
            )
        if delta.finish_reason is not None:
            yield self._chunk(_chat_choice(index, {}, wire_reason(delta.finish_reason)))


def _chat_choice(index: int, delta: dict[str, Any], reason: str | None = None) -> str:
    return sse.dump({"index": index, "delta": delta, "logprobs": None, "finish_reason": reason})
