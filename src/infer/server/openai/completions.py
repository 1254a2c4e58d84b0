"""`/v1/completions`: the endpoint's body, its requests and its answer.

The last text and the finish reason come together. A piece that shows nothing, because its text is
held back, is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import model_validator

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.answer_parts import (
    ChunkWriter,
    TokenDetails,
    TokenUsage,
    head_of,
    wire_reason,
)
from infer.server.openai.events import dump
from infer.server.openai.generating_api import Keeps, OnMessage, Part, StreamFormat
from infer.server.openai.grammar_fields import warning_of
from infer.server.openai.large_json import Deferred
from infer.server.openai.schema import RANGES, Generation, Limit, between, limit
from infer.server.openai.schema_base import Int, plain, whole_list
from infer.server.openai.to_engine import (
    Prompt,
    check_stream_format,
    grammar_name,
    in_callers_names,
    requests_of,
    sampling_of,
)
from infer.server.openai.typed_events import TypedEvents
from infer.text.untrusted.workers import Steps
from infer.types import FinishReason, Request, RequestOutput, TextDelta, TokenLogprobs
from infer.types.sampling import DEFAULT_MAX_TOKENS, MAX_LOGPROBS

MAX_CHOICES = 256
"""Maximum number of choices of one request: prompts x n."""


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of any of the four forms that `prompt` may have."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of strings or token ids")
    if (ids := as_ids(value)) is not None:
        return (ids,)
    if len(value) > MAX_CHOICES:
        raise UnprocessableError(f"prompt is a list of more than {MAX_CHOICES} prompts")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    lists = [as_ids(item) for item in value]
    if None not in lists:
        return tuple(ids for ids in lists if ids is not None)
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids (integers)"
        " or a list of lists of token ids"
    )


def as_ids(value: Any) -> tuple[int, ...] | None:
    """The members of a list of integers, and no booleans; None for anything else."""
    if not isinstance(value, list):
        return None
    items = whole_list(value)
    return tuple(items) if set(map(type, items)) <= {int} else None


class CompletionBody(Generation):
    """`POST /v1/completions`."""

    documented = RANGES | {
        "max_tokens": limit(0),
        "logprobs": {"anyOf": [{"type": "integer", **between(0, MAX_LOGPROBS)}]},
    }

    prompt: Annotated[tuple[Prompt, ...], plain(_prompts, str | list[str | int | list[int]])]
    max_tokens: Limit = DEFAULT_MAX_TOKENS
    logprobs: Int | None = None
    echo: bool = False

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * self.n

    @property
    def wants_only_prompt(self) -> bool:
        """Whether the prompt is only to be looked at. A token is sampled all the same, and not
        shown."""
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if self.num_choices > MAX_CHOICES:
            raise UnprocessableError(
                f"{len(self.prompt)} prompts x n={self.n} is more than {MAX_CHOICES} choices",
                param="n",
            )
        return self


def completion_requests(
    engine: AsyncLLM, wire: CompletionBody, answer_id: str
) -> Steps[list[Request]]:
    """The requests of all prompts; raises `RequestError`."""
    with in_callers_names(grammar_name(wire)):
        most = 1 if wire.wants_only_prompt else wire.max_tokens
        check_stream_format(wire, wire.logprobs, len(wire.prompt))
        sampling = sampling_of(engine, wire, most, wire.logprobs)
        if wire.echo and wire.logprobs is not None:
            count = max(wire.logprobs, wire.prompt_logprobs or 0)
            sampling = sampling.replace(prompt_logprobs=count)
        checked = yield from engine.check_sampling(sampling)
        requests = requests_of(
            engine,
            wire.prompt,
            checked,
            answer_id,
            n=wire.n,
            priority=wire.priority,
            reuse_prefix=wire.reuse_prefix,
        )
        return list(requests)


class _Shown(NamedTuple):
    """The part of a choice that the client sees."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]
    """Of each token; None: of the first token of a prompt."""


class CompletionAnswer:
    """`AnswerFormat` and `StreamFormat` of completions. What is said about a prompt stands in each
    of its choices."""

    merges = True

    def __init__(
        self, engine: AsyncLLM, wire: CompletionBody, requests: Sequence[Request], answer_id: str
    ) -> None:
        self.warning = warning_of(wire.enforced.dropped)
        self._wire = wire
        self._requests = requests
        self._only_prompt = wire.wants_only_prompt
        self._head = head_of("text_completion", engine.model_name, answer_id)
        self._usage = TokenUsage(requests, wire.n, only_prompt=self._only_prompt)
        self._details = TokenDetails(engine.tokenizer, wire, requests)
        self._chunks = ChunkWriter(self._head, len(requests), wire.stream_options, self._usage)
        self._begun: set[int] = set()
        """Choices whose prompt's ids have been sent."""
        self._echoes: dict[int, str] = {}
        """Texts of the prompts that are still to be echoed, by choice."""
        for index, request in enumerate(requests if wire.echo else ()):
            if index % wire.n == 0:  # its siblings have the same prompt
                text = engine.tokenizer.decode(request.prompt_token_ids)
            self._echoes[index] = text

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def size_of(self, part: Part) -> int:
        return self._details.size_of(part)

    # ---- whole

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Choices are made one by one while they are written, since the log-probabilities of all
        are very many objects."""
        usage = Deferred(self._usage.fields)
        return {**self._head, "choices": self._choices(outputs), "usage": usage}

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        for index, output in enumerate(outputs):
            self._usage.count(index, output)
            shown = self._shown(index, output)
            choice = {
                "index": index,
                "text": shown.text,
                "logprobs": self._logprobs(index, shown) if self._details.writers else None,
                "finish_reason": self._reason(output.finish_reason),
                **self._ids(index, output),
            }
            if self._wire.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._details.prompt_logprobs(index, output)
            yield choice

    # ---- in pieces

    def events(self) -> StreamFormat:
        """The answer itself, or the typed events in its place."""
        return TypedEvents(self._usage) if self._wire.stream_format == "events" else self

    def opening(self) -> Iterator[bytes]:
        yield from ()

    def waiting(self) -> bytes:
        return self._chunks.chunk(0, '"text":""')

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        self._usage.count(index, delta)
        logprobs, extra, ended = "null", "", delta.finish_reason
        if self._wire.return_token_ids:
            extra = "," + dump(self._ids(index, delta))[1:-1]
        shown = self._shown(index, delta)
        if self._details.writers and shown.token_ids:
            logprobs = dump(self._logprobs(index, shown))
        if shown.text or logprobs != "null" or ended or extra:
            reason = dump(ended and self._reason(ended))
            yield self._chunks.chunk(index, f'"text":{dump(shown.text)}', logprobs, reason, extra)

    def closing(self) -> Iterator[bytes]:
        return self._chunks.closing()

    def failure(self, error: str) -> Iterator[bytes]:
        return self._chunks.failure('"text":""', error)

    # ---- of one choice

    def _shown(self, index: int, part: Part) -> _Shown:
        """A part with the prompt before it, if that is to be echoed, and without what is not to be
        seen."""
        shown = _Shown(part.text, part.token_ids, tuple(part.logprobs or ()))
        if self._only_prompt:
            shown = _Shown("", (), ())
        if index in self._echoes:
            prompt, more = self._requests[index].prompt_token_ids, part.prompt_logprobs or ()
            logprobs = (None, *map(self._cut, more), *shown.logprobs)
            text = self._echoes.pop(index) + shown.text
            shown = _Shown(text, (*prompt, *shown.token_ids), logprobs)
        return shown

    def _cut(self, entry: TokenLogprobs) -> TokenLogprobs:
        return TokenLogprobs(entry.logprob, entry.top[: self._requests[0].sampling.logprobs])

    def _ids(self, index: int, part: Part) -> dict[str, Any]:
        """What `return_token_ids` adds to a choice: the prompt's ids come with its first part."""
        if not self._wire.return_token_ids:
            return {}
        ids: dict[str, Any] = {}
        if index not in self._begun:
            self._begun.add(index)
            ids["prompt_token_ids"] = self._requests[index].prompt_token_ids
        return {**ids, "token_ids": () if self._only_prompt else part.token_ids}

    def _reason(self, reason: FinishReason) -> str:
        return "length" if self._only_prompt else wire_reason(reason)

    def _logprobs(self, index: int, shown: _Shown) -> dict[str, Any]:
        return self._details.writers[index].completion(shown.token_ids, shown.logprobs)


class CompletionsApi:
    """OpenAI's completions."""

    path = "/v1/completions"
    body = CompletionBody
    id_prefix = "cmpl-"
    refuses = ()
    keeps: Keeps = "nothing"

    def make_requests(
        self, engine: AsyncLLM, wire: CompletionBody, answer_id: str
    ) -> Steps[list[Request]]:
        return completion_requests(engine, wire, answer_id)

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: CompletionBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> CompletionAnswer:
        return CompletionAnswer(engine, wire, requests, answer_id)
