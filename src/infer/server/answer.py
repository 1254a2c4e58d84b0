"""One answer as the client sees it: OpenAI's objects for both endpoints, whole and in pieces.

An answer is made once per HTTP request and knows all its choices: `body` is the plain one; and
`opening`, `piece`, `closing` and `failure` write it as server-sent events. What stays the same in a
stream is rendered once; a piece costs one escaping and one concatenation, and one that shows
nothing (its text is held back) is not sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from infer.engine.async_llm import AsyncLLM
from infer.errors import EngineError
from infer.server.logprobs import ChoiceLogprobs
from infer.server.wire import Generation, StreamOptions
from infer.types import ErrorRecord, FinishReason, Request, RequestOutput, TextDelta

Part = RequestOutput | TextDelta


def wire_reason(reason: FinishReason, error: ErrorRecord | None = None) -> str:
    """OpenAI's word for why a choice ended; raises where it was not finished but broken off."""
    if error is not None:
        raise error.exception()
    if reason is FinishReason.ERROR:
        raise EngineError("the engine failed on this request")
    if reason is FinishReason.ABORT:
        raise EngineError("the server has cancelled this request")
    return "length" if reason is FinishReason.LENGTH else "stop"


dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""One line of ASCII JSON."""


def event(line: str, name: str | None = None) -> bytes:
    """Exactly `data: `, a line of ASCII and an empty line; before it a typed event's name.

    Load generators split on empty lines and cut the prefix off by its length, and some clients
    take U+2028 for the end of a line. One event is one write.
    """
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {line}\n\n".encode("ascii")


class CompletionAnswer:
    """`/v1/completions`: the last text and the finish reason come together."""

    prefix = "cmpl"
    """of its id"""
    kind = chunk_kind = "text_completion"
    merges = True
    """whether pieces that have gathered may come as one"""

    def __init__(
        self, engine: AsyncLLM, wire: Generation, requests: Sequence[Request], answer_id: str
    ) -> None:
        self._head = {
            "id": answer_id,
            "object": self.chunk_kind if wire.stream else self.kind,
            "created": int(time.time()),
            "model": engine.model_name,
        }
        self._options = wire.stream_options or StreamOptions()
        self._before = dump(self._head)[:-1] + ',"choices":['
        self._after = '],"usage":null}' if self._options.include_usage else "]}"
        self._num_choices = len(requests)
        self._n = wire.n
        self.num_prompt = sum(len(request.prompt_token_ids) for request in requests[:: wire.n])
        self._num_completion = 0
        self._num_cached: dict[int, int] = {}
        self._writers: list[ChoiceLogprobs] = []
        if requests[0].sampling.logprobs is not None:
            skip = wire.skip_special_tokens
            self._writers = [ChoiceLogprobs(engine.tokenizer, skip_special=skip) for _ in requests]

    def count(self, index: int, part: Part) -> None:
        """Choice `index` has more tokens. Its siblings find its prompt in the cache, which is no
        hit that the caller could have had before; so the first one of a prompt counts."""
        self._num_completion += len(part.token_ids)
        if index % self._n == 0:
            self._num_cached[index] = part.num_cached

    def usage(self) -> dict[str, Any]:
        """The tokens of all choices; a prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self.num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, output in enumerate(outputs):
            self.count(index, output)
            choice = {
                "index": index,
                **self._text(output.text),
                "logprobs": self._logprobs(index, output) if self._writers else None,
                "finish_reason": wire_reason(output.finish_reason),
            }
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": self.usage()}

    def opening(self) -> Iterator[bytes]:
        """Before the first token."""
        yield from ()

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """What is new in choice `index`."""
        self.count(index, delta)
        logprobs, reason = "null", "null"
        if self._writers and delta.token_ids:
            logprobs = dump(self._logprobs(index, delta))
        if delta.finish_reason is not None:
            reason = f'"{wire_reason(delta.finish_reason)}"'
        if delta.text or logprobs != "null" or reason != "null":
            yield from self._chunks(index, delta.text, logprobs, reason)

    def closing(self) -> Iterator[bytes]:
        """After the last choice has ended."""
        if self._options.include_usage:
            yield event(f'{self._before}],"usage":{dump(self.usage())}}}')
        yield event("[DONE]")

    def failure(self, error: str) -> bytes:
        """The last event of a stream that broke."""
        return event(error)

    def _text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, index: int, part: Part) -> dict[str, Any]:
        return self._writers[index].completion(part.token_ids, part.logprobs or ())

    def _chunks(self, index: int, text: str, logprobs: str, reason: str) -> Iterator[bytes]:
        yield self._chunk(index, f'"text":{dump(text)}', logprobs, reason)

    def _chunk(self, index: int, text: str, logprobs: str = "null", reason: str = "null") -> bytes:
        """The last three are JSON."""
        after = self._after
        if self._options.continuous_usage_stats:
            after = f'],"usage":{dump(self.usage())}}}'
        return event(
            f'{self._before}{{"index":{index},{text},"logprobs":{logprobs}'
            f',"finish_reason":{reason}}}{after}'
        )


class ChatAnswer(CompletionAnswer):
    """`/v1/chat/completions`: the role comes first, the finish reason last and alone."""

    prefix = "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[bytes]:
        for index in range(self._num_choices):
            yield self._chunk(index, '"delta":{"role":"assistant","content":""}')

    def _text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, index: int, part: Part) -> dict[str, Any]:
        return self._writers[index].chat(part.token_ids, part.logprobs or ())

    def _chunks(self, index: int, text: str, logprobs: str, reason: str) -> Iterator[bytes]:
        if text or logprobs != "null":
            yield self._chunk(index, f'"delta":{{"content":{dump(text)}}}', logprobs)
        if reason != "null":
            yield self._chunk(index, '"delta":{}', reason=reason)


class TypedEvents:
    """`stream_format: "events"`: `token` for each token, then `done`, or `error`.

    The text of a token is what becomes visible with it: text that is held back (it may become a
    stop string, or a character lacks bytes) arrives with a later token, and all texts together are
    the answer. So this wants the engine's pieces one by one. One choice, no logprobs.
    """

    merges = False

    def __init__(self, answer: CompletionAnswer) -> None:
        self._answer = answer
        self._reason: FinishReason | None = None

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._answer.count(index, delta)
        last = len(delta.token_ids) - 1
        for i, token_id in enumerate(delta.token_ids):
            text = delta.text if i == last else ""
            yield event(dump({"token": text, "token_id": token_id}), "token")
        self._reason = delta.finish_reason

    def closing(self) -> Iterator[bytes]:
        done = {"finish_reason": self._reason, "usage": self._answer.usage()}
        yield event(dump(done), "done")

    def failure(self, error: str) -> bytes:
        return event(error, "error")
