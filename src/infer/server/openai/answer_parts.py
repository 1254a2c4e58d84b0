"""What OpenAI's answers hold in common: the usage, what is asked for beside the text, and chunks.

What stays the same in a stream is rendered once; a piece costs one escaping and one concatenation.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.server.openai.events import dump, event
from infer.server.openai.generating_api import Part
from infer.server.openai.large_json import BYTES_A_LOGPROB
from infer.server.openai.logprobs import ChoiceLogprobs
from infer.server.openai.schema import Generation, StreamOptions
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tokenizer import Tokenizer
from infer.types import ErrorRecord, FinishReason, Request, RequestOutput
from infer.types.ends import end_of


def wire_reason(reason: FinishReason, error: ErrorRecord | None = None) -> str:
    """OpenAI's word for why a choice ended; raises where it was not finished but broken off."""
    if error is not None:
        raise error.exception()
    word = end_of(reason).word
    assert word is not None, "an error says why"
    return word


def head_of(kind: str, model: str, answer_id: str) -> dict[str, Any]:
    """The first members of an answer, and of every chunk of it; `kind`: its `object`."""
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


class TokenUsage:
    """Counts the tokens of all choices of an answer."""

    def __init__(
        self,
        requests: Sequence[Request],
        n: int = 1,
        thoughts: Sequence[ThoughtTokens] = (),
        *,
        only_prompt: bool = False,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """`n`: choices of each prompt. `thoughts`: counts those tokens of each choice, where the
        template has thoughts. `only_prompt`: what is generated does not count. `more`: further
        members of the usage."""
        self.num_prompt = sum(len(request.prompt_token_ids) for request in requests[::n])
        self._n = n
        self._thoughts = thoughts
        self._only_prompt = only_prompt
        self._more = dict(more or {})
        self._num_completion = 0
        self._num_cached: dict[int, int] = {}
        self._has_prediction = any(request.prediction_token_ids for request in requests)
        self._num_predicted: dict[int, tuple[int, int]] = {}

    def count(self, index: int, part: Part) -> None:
        """Choice `index` has more tokens. Its siblings find its prompt in the cache, which is no
        hit that the caller could have had before; so the first one of a prompt counts."""
        if index % self._n == 0:
            self._num_cached[index] = part.num_cached
        if self._only_prompt:
            return
        self._num_completion += len(part.token_ids)
        if self._has_prediction:
            known = self._num_predicted.get(index, (0, 0))
            self._num_predicted[index] = max(known, part.num_predicted)
        if self._thoughts:
            self._thoughts[index].push(part.token_ids)

    def fields(self) -> dict[str, Any]:
        """OpenAI's `usage` of what has been counted."""
        details = {"reasoning_tokens": sum(thoughts.count for thoughts in self._thoughts)}
        if self._has_prediction:
            counts = self._num_predicted.values()
            details["accepted_prediction_tokens"] = sum(accepted for accepted, _ in counts)
            details["rejected_prediction_tokens"] = sum(rejected for _, rejected in counts)
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self.num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
            "completion_tokens_details": details,
            **self._more,
        }


class TokenDetails:
    """What a body asks for beside the text: log-probabilities of output and prompt."""

    def __init__(self, tokenizer: Tokenizer, wire: Generation, requests: Sequence[Request]) -> None:
        self._tokenizer = tokenizer
        self._wire = wire
        self._requests = requests
        self._sampling = requests[0].sampling
        self.writers: list[ChoiceLogprobs] = []
        """One for each choice; none where the body does not ask for log-probabilities."""
        if self._sampling.logprobs is not None:
            skip = wire.skip_special_tokens
            self.writers = [ChoiceLogprobs(tokenizer, skip_special=skip) for _ in requests]

    def size_of(self, part: Part) -> int:
        """Bytes that a part of an answer becomes, about."""
        size = len(part.text) + 8 * len(part.token_ids)
        for entries, num_top in (
            (part.logprobs, self._sampling.logprobs),
            (part.prompt_logprobs, self._sampling.prompt_logprobs),
        ):
            size += len(entries or ()) * (1 + (num_top or 0)) * BYTES_A_LOGPROB
        return size

    def prompt_logprobs(self, index: int, output: RequestOutput) -> Iterator[dict[str, Any] | None]:
        """Yield `prompt_logprobs` of the prompt of choice `index`, token by token."""
        ids, count = self._requests[index].prompt_token_ids, self._wire.prompt_logprobs or 0
        writer = ChoiceLogprobs(self._tokenizer, skip_special=False)
        return writer.prompt(ids, output.prompt_logprobs or (), count)


class ChunkWriter:
    """Writes the chunks of a stream in OpenAI's format."""

    def __init__(
        self,
        head: dict[str, Any],
        num_choices: int,
        options: StreamOptions | None,
        usage: TokenUsage,
    ) -> None:
        """`head`: the first members of each chunk."""
        self._running = dict.fromkeys(range(num_choices))
        """Choices whose end has not been told."""
        self._usage = usage
        self._options = options or StreamOptions()
        self._before = dump(head)[:-1] + ',"choices":['
        self._after = '],"usage":null}' if self._options.include_usage else "]}"

    def chunk(
        self,
        index: int,
        text: str,
        logprobs: str = "null",
        reason: str = "null",
        extra: str = "",
        beside: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk of choice `index`. `text`: the member that carries the text. `logprobs`,
        `reason`: JSON. `extra`: further members of the choice, with a comma before them. `beside`:
        members beside the choices."""
        if reason != "null":
            self._running.pop(index, None)
        after = self._after
        if self._options.continuous_usage_stats and self._options.include_usage:
            after = f'],"usage":{dump(self._usage.fields())}}}'
        if beside:
            after = f"{after[:-1]},{dump(beside)[1:]}"
        return event(
            f'{self._before}{{"index":{index},{text},"logprobs":{logprobs}'
            f',"finish_reason":{reason}{extra}}}{after}'
        )

    def failure(self, text: str, error: str) -> Iterator[bytes]:
        """The end of each choice that was broken off, then the error: clients that look for an end
        and find none ask the same again without end. `text`: see `chunk`."""
        for index in tuple(self._running):
            yield self.chunk(index, text, reason='"error"')
        yield event(error)

    def closing(self) -> Iterator[bytes]:
        """The usage, if the body asks for it, and `[DONE]`."""
        if self._options.include_usage:
            yield event(f'{self._before}],"usage":{dump(self._usage.fields())}}}')
        yield event("[DONE]")
