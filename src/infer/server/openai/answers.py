"""One answer as the client sees it: OpenAI's objects for both endpoints, whole and in pieces.

An answer is made once per HTTP request and knows all its choices: `body` is the plain one; and
`opening`, `piece`, `closing` and `failure` write it as server-sent events. What stays the same in a
stream is rendered once; a piece costs one escaping and one concatenation, and one that shows
nothing (its text is held back) is not sent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from infer.engine.client.async_llm import AsyncLLM
from infer.server.openai.large_json import BYTES_A_LOGPROB, Later
from infer.server.openai.logprobs import ChoiceLogprobs
from infer.server.openai.schema import ChatBody, CompletionBody, Generation, StreamOptions
from infer.server.openai.to_engine import prompt_end, tool_format
from infer.text.answer_parser import parser_for
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tools.formats import thoughts_in
from infer.types import (
    ErrorRecord,
    FinishReason,
    Request,
    RequestOutput,
    TextDelta,
    TokenLogprobs,
)
from infer.types.ends import end_of

Part = RequestOutput | TextDelta
BYTES_AN_EVENT = 50
"""about, of a token in `TypedEvents`"""


def wire_reason(reason: FinishReason, error: ErrorRecord | None = None) -> str:
    """OpenAI's word for why a choice ended; raises where it was not finished but broken off."""
    if error is not None:
        raise error.exception()
    word = end_of(reason).word
    assert word is not None, "an error says why"
    return word


dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
"""One line of ASCII JSON."""


def event(line: str, name: str | None = None) -> bytes:
    """Exactly `data: `, a line of ASCII and an empty line; before it a typed event's name.

    Load generators split on empty lines and cut the prefix off by its length, and some clients
    take U+2028 for the end of a line. One event is one write.
    """
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {line}\n\n".encode("ascii")


class Shown(NamedTuple):
    """The part of an answer that the client sees."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """None: of the first token of a prompt"""


class CompletionAnswer:
    """`/v1/completions`: the last text and the finish reason come together."""

    prefix = "cmpl"
    """of its id"""
    kind = chunk_kind = "text_completion"
    merges = True
    """whether pieces that have gathered may come as one"""
    prompt_is_shared = False
    """whether what is said about the prompt stands beside the choices and not in each of them"""
    on_new: Callable[[dict[str, Any]], None] | None = None
    """of a chat: is given what is new in the message, whole or in pieces"""

    def __init__(
        self, engine: AsyncLLM, wire: Generation, requests: Sequence[Request], answer_id: str
    ) -> None:
        self._head = {
            "id": answer_id,
            "object": self.chunk_kind if wire.stream else self.kind,
            "created": int(time.time()),
            "model": engine.model_name,
        }
        self._wire = wire
        self._requests = requests
        self._tokenizer = engine.tokenizer
        self._options = wire.stream_options or StreamOptions()
        self._before = dump(self._head)[:-1] + ',"choices":['
        self._after = '],"usage":null}' if self._options.include_usage else "]}"
        self.num_prompt = sum(len(request.prompt_token_ids) for request in requests[:: wire.n])
        self._num_completion = 0
        self._num_cached: dict[int, int] = {}
        self._looks = wire.max_tokens == 0
        """only the prompt is to be looked at: what was sampled is not shown"""
        self._begun: set[int] = set()
        self._echoes: dict[int, str] = {}
        """texts of the prompts that are still to be echoed, by choice"""
        if isinstance(wire, CompletionBody) and wire.echo:
            for index, request in enumerate(requests):
                if index % wire.n == 0:  # its siblings have the same prompt
                    text = engine.tokenizer.decode(request.prompt_token_ids)
                self._echoes[index] = text
        self._writers: list[ChoiceLogprobs] = []
        if requests[0].sampling.logprobs is not None:
            skip = wire.skip_special_tokens
            self._writers = [ChoiceLogprobs(engine.tokenizer, skip_special=skip) for _ in requests]

    def count(self, index: int, part: Part) -> None:
        """Choice `index` has more tokens. Its siblings find its prompt in the cache, which is no
        hit that the caller could have had before; so the first one of a prompt counts."""
        self._num_completion += 0 if self._looks else len(part.token_ids)
        if index % self._wire.n == 0:
            self._num_cached[index] = part.num_cached

    def size_of(self, part: Part) -> int:
        """About how many bytes a part becomes."""
        sampling = self._requests[0].sampling
        size = len(part.text) + 8 * len(part.token_ids)
        for entries, num_top in (
            (part.logprobs, sampling.logprobs),
            (part.prompt_logprobs, sampling.prompt_logprobs),
        ):
            size += len(entries or ()) * (1 + (num_top or 0)) * BYTES_A_LOGPROB
        return size

    def usage(self) -> dict[str, Any]:
        """The tokens of all choices; a prompt counts once, however many choices it has."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self.num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self._num_reasoning()},
        }

    def _num_reasoning(self) -> int:
        return 0

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The answer in one piece, for `rendering`: its choices are made one by one, since the
        log-probabilities of all are very many objects."""
        return {**self._head, "choices": self._choices(outputs), "usage": Later(self.usage)}

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            self.count(index, output)
            ids = self._ids(index, output, first=not self.prompt_is_shared)
            shown = self._shown(index, output)
            choice = {
                "index": index,
                **self._text(index, shown.text),
                "logprobs": self._logprobs(index, shown) if self._writers else None,
                "finish_reason": self._reason(index, output.finish_reason),
                **ids,
            }
            if self._wire.prompt_logprobs is not None and not self.prompt_is_shared:
                choice["prompt_logprobs"] = self._prompt_logprobs(index, output)
            yield choice

    def _prompt_ids(self) -> dict[str, Any]:
        """Of a prompt that all choices share, if `return_token_ids` asks for them."""
        if not (self._wire.return_token_ids and self.prompt_is_shared):
            return {}
        return {"prompt_token_ids": self._requests[0].prompt_token_ids}

    def opening(self) -> Iterator[bytes]:
        """Before the first token."""
        yield from ()

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        """What is new in choice `index`."""
        self.count(index, delta)
        logprobs, extra = "null", ""
        if self._wire.return_token_ids:
            first = index not in self._begun and not self.prompt_is_shared
            extra = "," + dump(self._ids(index, delta, first=first))[1:-1]
            self._begun.add(index)
        shown = self._shown(index, delta)
        if self._writers and shown.token_ids:
            logprobs = dump(self._logprobs(index, shown))
        yield from self._chunks(index, shown.text, delta.finish_reason, logprobs, extra)

    def closing(self) -> Iterator[bytes]:
        """After the last choice has ended."""
        if self._options.include_usage:
            yield event(f'{self._before}],"usage":{dump(self.usage())}}}')
        yield event("[DONE]")

    def failure(self, error: str) -> bytes:
        """The last event of a stream that broke."""
        return event(error)

    def _text(self, index: int, text: str) -> dict[str, Any]:
        return {"text": text}

    def _shown(self, index: int, part: Part) -> Shown:
        """With the prompt before it, if that is to be echoed; without what is not to be seen."""
        shown = Shown(part.text, part.token_ids, tuple(part.logprobs or ()))
        if self._looks:
            shown = Shown("", (), ())
        if index in self._echoes:
            prompt, more = self._requests[index].prompt_token_ids, part.prompt_logprobs or ()
            logprobs = (None, *map(self._cut, more), *shown.logprobs)
            text = self._echoes.pop(index) + shown.text
            shown = Shown(text, (*prompt, *shown.token_ids), logprobs)
        return shown

    def _cut(self, entry: TokenLogprobs) -> TokenLogprobs:
        return TokenLogprobs(entry.logprob, entry.top[: self._requests[0].sampling.logprobs])

    def _ids(self, index: int, part: Part, *, first: bool) -> dict[str, Any]:
        """What `return_token_ids` adds to a choice."""
        if not self._wire.return_token_ids:
            return {}
        prompt = {"prompt_token_ids": self._requests[index].prompt_token_ids} if first else {}
        return {**prompt, "token_ids": () if self._looks else part.token_ids}

    def _prompt_logprobs(
        self, index: int, output: RequestOutput
    ) -> Iterator[dict[str, Any] | None]:
        ids, count = self._requests[index].prompt_token_ids, self._wire.prompt_logprobs or 0
        writer = ChoiceLogprobs(self._tokenizer, skip_special=False)
        return writer.prompt(ids, output.prompt_logprobs or (), count)

    def _reason(self, index: int, reason: FinishReason) -> str:
        return "length" if self._looks else wire_reason(reason)

    def _logprobs(self, index: int, shown: Shown) -> dict[str, Any]:
        return self._writers[index].completion(shown.token_ids, shown.logprobs)

    def _chunks(
        self, index: int, text: str, ended: FinishReason | None, logprobs: str, extra: str
    ) -> Iterator[bytes]:
        if text or logprobs != "null" or ended or extra:
            reason = dump(ended and self._reason(index, ended))
            yield self._chunk(index, f'"text":{dump(text)}', logprobs, reason, extra)

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: str = "null",
        reason: str = "null",
        extra: str = "",
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        """All but the first are JSON, `extra` further members with a comma before; `beside` are
        members beside the choices."""
        after = self._after
        if self._options.continuous_usage_stats and self._options.include_usage:
            after = f'],"usage":{dump(self.usage())}}}'
        if beside:
            after = f"{after[:-1]},{dump(beside)[1:]}"
        return event(
            f'{self._before}{{"index":{index},{text},"logprobs":{logprobs}'
            f',"finish_reason":{reason}{extra}}}{after}'
        )


class ChatAnswer(CompletionAnswer):
    """`/v1/chat/completions`: the role comes first, the finish reason last and alone.

    The text goes through one parser, whole or in pieces, which finds reasoning and tool calls.
    """

    prefix = "chatcmpl"
    prompt_is_shared = True
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, engine: AsyncLLM, wire: ChatBody, requests: Sequence[Request], answer_id: str
    ) -> None:
        super().__init__(engine, wire, requests, answer_id)
        template, tools = engine.tokenizer.tool_template, tool_format(engine, wire)
        end = prompt_end(engine, requests[0].prompt_token_ids)
        source = template.source if template else ""
        names = [tool["function"]["name"] for tool in wire.forced_tools or wire.shown_tools]
        forced = bool(wire.forced_tools)
        self._parsers = [
            parser_for(source, tools, prompt_end=end, names=names, forced=forced) for _ in requests
        ]
        self._thoughts: list[ThoughtTokens] = []
        if marks := thoughts_in(source):
            inside = end.rstrip().endswith(marks.opening)
            self._thoughts = [
                ThoughtTokens(engine.tokenizer, marks, inside=inside) for _ in requests
            ]
        self._num_calls = [0] * len(requests)
        self._answer_id = answer_id.rpartition("-")[2]
        self._shows_reasoning = wire.include_reasoning

    def count(self, index: int, part: Part) -> None:
        super().count(index, part)
        if self._thoughts and not self._looks:
            self._thoughts[index].push(part.token_ids)

    def _num_reasoning(self) -> int:
        return sum(each.count for each in self._thoughts)

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        body = super().body(outputs) | self._prompt_ids()
        if self._wire.prompt_logprobs is not None:
            body["prompt_logprobs"] = Later(lambda: self._prompt_logprobs(0, outputs[0]))
        return body

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._requests)):
            beside = {} if index else self._prompt_ids()
            yield self._chunk(index, '"delta":{"role":"assistant","content":""}', beside=beside)

    def _parsed(self, index: int, text: str, *, end: bool) -> dict[str, Any]:
        """What is new in a choice, as members of its message."""
        reasoning, content, calls = self._parsers[index].push(text, end=end)
        new: dict[str, Any] = {}
        if reasoning and self._shows_reasoning:
            new["reasoning_content"] = reasoning
        if content:
            new["content"] = content
        if calls:
            first = self._num_calls[index]
            self._num_calls[index] += len(calls)
            new["tool_calls"] = [
                {
                    "index": number,
                    "id": f"call_{self._answer_id}_{index}_{number}",
                    "type": "function",
                    "function": call._asdict(),
                }
                for number, call in enumerate(calls, first)
            ]
        if self.on_new is not None:
            self.on_new(new)
        return new

    def _text(self, index: int, text: str) -> dict[str, Any]:
        new = self._parsed(index, text, end=True)
        empty = None if new else ""
        message = {"role": "assistant", "content": empty, "refusal": None, **new}
        if "tool_calls" in new:
            message["tool_calls"] = unnumbered(new["tool_calls"])
        return {"message": message}

    def _reason(self, index: int, reason: FinishReason) -> str:
        word = wire_reason(reason)
        return "tool_calls" if word == "stop" and self._num_calls[index] else word

    def _logprobs(self, index: int, shown: Shown) -> dict[str, Any]:
        return self._writers[index].chat(shown.token_ids, shown.logprobs)

    def _chunks(
        self, index: int, text: str, ended: FinishReason | None, logprobs: str, extra: str
    ) -> Iterator[bytes]:
        new = self._parsed(index, text, end=ended is not None)
        if logprobs != "null" or extra:
            new.setdefault("content", "")
        if new:
            yield self._chunk(index, f'"delta":{dump(new)}', logprobs, extra=extra)
        if ended is not None:
            yield self._chunk(index, '"delta":{}', reason=dump(self._reason(index, ended)))


def unnumbered(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as a message has them: only pieces of a list say where they belong."""
    return [{name: each[name] for name in each if name != "index"} for each in calls]


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

    def size_of(self, part: Part) -> int:
        """See `CompletionAnswer`."""
        return BYTES_AN_EVENT * len(part.token_ids)

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._answer.count(index, delta)
        if self._answer.on_new is not None:
            self._answer.on_new({"content": delta.text})
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
