"""Wire model → the engine's requests, one for each choice of the answer.

Here names of the wire meet names of `SamplingParams`, and errors that speak of our names are
re-told in the caller's (`max_tokens` → `max_completion_tokens`). Choices are numbered prompt by
prompt; choice i of a prompt draws with seed + i, so each of them can be asked for again alone.
Called by `routes` before anything is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infer.errors import RequestError, UnprocessableError
from infer.server.limits import MAX_CHOICES, MAX_TOP_LOGPROBS
from infer.server.wire import (
    ChatBody,
    CompletionBody,
    Conversation,
    Generation,
    Message,
    Prompt,
)
from infer.types import Request, SamplingParams

if TYPE_CHECKING:
    from infer.engine.async_llm import AsyncLLM


def check_model(engine: AsyncLLM, name: str | None) -> None:
    """There is one model; a request may leave its name out."""
    if name is not None and name != engine.model_name:
        raise UnprocessableError(
            f"there is no such model here; this server has {engine.model_name!r}",
            param="model",
            code="model_not_found",
        )


def completion_requests(
    engine: AsyncLLM, wire: CompletionBody, answer_id: str
) -> tuple[Request, ...]:
    if len(wire.prompt) * wire.n > MAX_CHOICES:
        raise UnprocessableError(
            f"{len(wire.prompt)} prompts x n={wire.n} is more than {MAX_CHOICES} choices", param="n"
        )
    sampling = _sampling(wire, max_tokens=wire.max_tokens, logprobs=wire.logprobs)
    return tuple(_choices(engine, wire, wire.prompt, sampling, answer_id))


def chat_requests(engine: AsyncLLM, wire: ChatBody, answer_id: str) -> tuple[Request, ...]:
    messages = plain_messages(wire)
    with _chat_sampling(wire) as sampling:
        ids = engine.render_chat(messages, **wire.template_arguments)
        return tuple(_choices(engine, wire, [tuple(ids)], sampling, answer_id))


def rendered_chat(engine: AsyncLLM, wire: ChatBody) -> tuple[str, list[int]]:
    """The text and the ids of the prompt that `chat_requests` would make; same refusals, but a
    prompt may be longer than the model serves: by how much is what a caller may want to know."""
    messages = plain_messages(wire)
    with _chat_sampling(wire):
        return engine.render_chat_text(messages, **wire.template_arguments)


def plain_messages(wire: Conversation) -> list[dict[str, Any]]:
    """The messages for the template."""
    if not wire.messages:
        raise RequestError("messages is empty: it needs at least one message", param="messages")
    return [_plain(message) for message in wire.messages]


@contextmanager
def _chat_sampling(wire: ChatBody) -> Iterator[SamplingParams]:
    """A chat's sampling; errors inside of the block are told with the names of a chat."""
    limit, limit_name = wire.max_tokens, "max_tokens"
    if wire.max_completion_tokens is not None:
        if limit not in (None, wire.max_completion_tokens):
            raise RequestError(
                "max_tokens and max_completion_tokens differ; send one of them", param="max_tokens"
            )
        limit, limit_name = wire.max_completion_tokens, "max_completion_tokens"
    with _told_as({"max_tokens": limit_name, "logprobs": "top_logprobs", "prompt": "messages"}):
        yield _sampling(wire, max_tokens=limit, logprobs=_top_logprobs(wire))


def _choices(
    engine: AsyncLLM,
    wire: Generation,
    prompts: tuple[Prompt, ...] | list[Prompt],
    sampling: SamplingParams,
    answer_id: str,
) -> Iterator[Request]:
    index = 0
    for prompt in prompts:
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        for i in range(wire.n):
            request = engine.make_request(
                prompt,
                sampling if i == 0 else sampling.replace(seed=_later_seed(sampling.seed, i)),
                request_id=f"{answer_id}-{index}",
                priority=wire.priority,
            )
            prompt = request.prompt_token_ids  # tokenized once
            index += 1
            yield request


def _later_seed(seed: int | None, i: int) -> int | None:
    """seed + i within 64 signed bits; no seed stays none, the engine draws another one."""
    return None if seed is None else (seed + i + 2**63) % 2**64 - 2**63


def _sampling(wire: Generation, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    return SamplingParams(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logit_bias=wire.logit_bias,
        seed=wire.seed,
        max_tokens=max_tokens,
        min_tokens=wire.min_tokens,
        stop=wire.stop,
        stop_token_ids=wire.stop_token_ids,
        ignore_eos=wire.ignore_eos,
        include_stop_str_in_output=wire.include_stop_str_in_output,
        skip_special_tokens=wire.skip_special_tokens,
        logprobs=logprobs,
    )


def _top_logprobs(wire: ChatBody) -> int | None:
    if wire.top_logprobs is None:
        return 0 if wire.logprobs else None
    if not 0 <= wire.top_logprobs <= MAX_TOP_LOGPROBS:
        raise UnprocessableError(
            f"top_logprobs must be between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    if not wire.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return wire.top_logprobs


def _plain(message: Message) -> dict[str, Any]:
    """A message for the template. Templates know no developer: it is the newer name of system."""
    role = "system" if message.role == "developer" else message.role
    content = None if message.content is None else message.content.value
    fields = {**dict(message), "role": role, "content": content}
    return {name: value for name, value in fields.items() if value is not None}


@contextmanager
def _told_as(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our names become errors about the caller's."""
    try:
        yield
    except RequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None or theirs == error.param:
            raise
        message = re.sub(rf"\b{error.param}\b", theirs, error.message)
        raise type(error)(message, param=theirs, code=error.code) from None
