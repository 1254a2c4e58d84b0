"""`/v1/completions` as a stream of typed events: `infer serve --completions-api typed`

The endpoint answers with `TypedEvents` whatever `stream` says, and `event: error` carries a text.
There is one prompt, one choice and no field without effect. An unknown model and a prompt that is
too long together with `max_tokens` are 422, other than in OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.answer_parts import TokenUsage
from infer.server.openai.completions import as_ids
from infer.server.openai.events import NOTHING_YET, dump, event
from infer.server.openai.generating_api import Keeps, OnMessage, Part
from infer.server.openai.grammar_fields import warning_of
from infer.server.openai.schema import RANGES, Limit, SampledBody, limit
from infer.server.openai.schema_base import plain
from infer.server.openai.to_engine import (
    Prompt,
    grammar_name,
    in_callers_names,
    requests_of,
    sampling_of,
)
from infer.server.openai.typed_events import TypedEvents
from infer.text.untrusted.workers import Steps
from infer.types import Request, RequestOutput, TextDelta


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if (ids := as_ids(value)) is not None:
        return ids
    raise RequestError("prompt must be a string or a list of token ids (integers)")


class TypedCompletionBody(SampledBody):
    """`POST /v1/completions` of the typed API."""

    is_strict = True
    always_streams = True
    clamps_limit = False
    unknown_model_status = 422
    documented = RANGES | {"max_tokens": limit(1)}

    prompt: Annotated[Prompt, plain(_prompt, str | list[int])]
    max_tokens: Limit = 128


class TypedCompletion:
    """`AnswerFormat` and `StreamFormat` of the typed API."""

    merges = False

    def __init__(self, wire: TypedCompletionBody, requests: Sequence[Request]) -> None:
        """`requests`: the only one."""
        self.warning = warning_of(wire.enforced.dropped)
        self._usage = TokenUsage(requests)
        self._events = TypedEvents(self._usage)

    @property
    def num_prompt(self) -> int:
        return self._usage.num_prompt

    def body(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        raise AssertionError("a typed completion is always a stream")

    def events(self) -> TypedCompletion:
        return self

    def size_of(self, part: Part) -> int:
        return self._events.size_of(part)

    def opening(self) -> Iterator[bytes]:
        return self._events.opening()

    def waiting(self) -> bytes:
        return NOTHING_YET

    def piece(self, index: int, delta: TextDelta) -> Iterator[bytes]:
        return self._events.piece(index, delta)

    def closing(self) -> Iterator[bytes]:
        return self._events.closing()

    def failure(self, error: str) -> Iterator[bytes]:
        text = json.loads(error)["error"]["message"]
        yield event(dump({"error": text}), "error")


class TypedCompletionsApi:
    """Completions as typed events: one for each token, then `done`, or `error`."""

    path = "/v1/completions"
    body = TypedCompletionBody
    id_prefix = "cmpl-"
    refuses = ()
    keeps: Keeps = "nothing"

    def make_requests(
        self, engine: AsyncLLM, wire: TypedCompletionBody, answer_id: str
    ) -> Steps[list[Request]]:
        try:
            with in_callers_names(grammar_name(wire)):
                sampling = sampling_of(engine, wire, wire.max_tokens)
                checked = yield from engine.check_sampling(sampling)
                requests = requests_of(
                    engine,
                    [wire.prompt],
                    checked,
                    answer_id,
                    priority=wire.priority,
                    reuse_prefix=wire.reuse_prefix,
                    clamps=False,
                )
                return list(requests)
        except RequestError as error:
            if error.code != "context_length_exceeded":
                raise
            code = error.code
            raise UnprocessableError(error.message, param=error.param, code=code) from None

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: TypedCompletionBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> TypedCompletion:
        return TypedCompletion(wire, requests)
