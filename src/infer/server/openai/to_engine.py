"""Wire model → the engine's requests, one for each choice of the answer.

Here names of the wire meet names of `SamplingParams`, and errors that speak of our names are
re-told in the caller's (`max_tokens` → `max_completion_tokens`). Choices are numbered prompt by
prompt; choice i of a prompt draws with seed + i, so each of them can be asked for again alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import CheckedSampling
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.schema import (
    ChatBody,
    CompletionBody,
    Conversation,
    Generation,
    Prompt,
)
from infer.text import answer_parser
from infer.text.tools.formats import ToolFormat, thoughts_in
from infer.types import Request, SamplingParams


def completion_requests(engine: AsyncLLM, wire: CompletionBody, answer_id: str) -> list[Request]:
    with _retold(_grammar_name(wire)):
        # To look at a prompt only: a token is sampled all the same, and not shown.
        looks = wire.max_tokens == 0 and (wire.echo or wire.prompt_logprobs is not None)
        limit = 1 if looks else wire.max_tokens
        sampling = _sampling(wire, limit, wire.logprobs, len(wire.prompt))
        if wire.echo and wire.logprobs is not None:
            count = max(wire.logprobs, wire.prompt_logprobs or 0)
            sampling = sampling.replace(prompt_logprobs=count)
        checked = engine.check_sampling(sampling)
        return list(_choices(engine, wire, wire.prompt, checked, answer_id))


def chat_requests(engine: AsyncLLM, wire: ChatBody, answer_id: str) -> list[Request]:
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire) as sampling:
        # First, since rendering takes longer than it takes to refuse a grammar.
        checked = engine.check_sampling(sampling)
        ids = engine.render_chat(messages, **wire.template_arguments)
        shown = _read_tokens(engine, wire)
        thoughts = None if sampling.grammar is None else engine.tokenizer.thoughts_before(ids)
        return list(_choices(engine, wire, [tuple(ids)], checked, answer_id, shown, thoughts))


def rendered_chat(engine: AsyncLLM, wire: ChatBody) -> tuple[str, list[int]]:
    """The text and the ids of the prompt that `chat_requests` would make; same refusals, but a
    prompt may be longer than the model serves: by how much is what a caller may want to know."""
    messages = plain_messages(wire)
    with _chat_sampling(engine, wire):
        return engine.tokenizer.apply_chat_template(messages, **wire.template_arguments)


def plain_messages(wire: Conversation) -> list[dict[str, Any]]:
    """The messages for the template."""
    if not wire.messages:
        raise RequestError("messages is empty: it needs at least one message", param="messages")
    return [{name: given for name, given in m if given not in (None, [])} for m in wire.messages]


def tool_format(engine: AsyncLLM, wire: ChatBody) -> ToolFormat | None:
    """How the answer writes its calls; None where it is not to make any."""
    use = engine.tokenizer.tool_use
    if use is None or not wire.shown_tools:
        return None
    return answer_parser.forced_format(use.format) if wire.forced_tools else use.format


def tool_warning(engine: AsyncLLM, wire: ChatBody) -> str | None:
    """What the client should know about its tools; None: nothing."""
    use = engine.tokenizer.tool_use
    return use.warning if use and wire.shown_tools and not wire.forced_tools else None


def _read_tokens(engine: AsyncLLM, wire: ChatBody) -> tuple[int, ...]:
    """The special tokens that the parser of the answer must see."""
    template, way = engine.tokenizer.tool_template, tool_format(engine, wire)
    thoughts = thoughts_in(template.source) if template else None
    marks = (*(thoughts or ()), *(way.all_marks if way else ()))
    return engine.tokenizer.special_ids_of(marks) if wire.skip_special_tokens else ()


def prompt_end(engine: AsyncLLM, prompt: Sequence[int]) -> str:
    """The last characters of a prompt, by which it shows what it has begun."""
    return engine.tokenizer.decode(prompt[-16:], skip_special_tokens=False)


@contextmanager
def _chat_sampling(engine: AsyncLLM, wire: ChatBody) -> Iterator[SamplingParams]:
    """A chat's sampling; errors inside of the block are told with the names of a chat."""
    names = {"logprobs": "top_logprobs", "prompt": "messages", **_grammar_name(wire)}
    limit, logprobs = wire.max_tokens, wire.top_logprobs
    if wire.max_completion_tokens is not None:
        if limit not in (None, wire.max_completion_tokens):
            message = "max_tokens and max_completion_tokens differ; send one of them"
            raise RequestError(message, param="max_tokens")
        limit, names["max_tokens"] = wire.max_completion_tokens, "max_completion_tokens"
    if logprobs is None and wire.logprobs:
        logprobs = 0
    with _retold(names):
        sampling = _sampling(wire, limit, logprobs)
        way = tool_format(engine, wire)
        if way is not None and wire.forced_tools:
            parallel = wire.parallel_tool_calls and isinstance(wire.tool_choice, str)
            grammar = answer_parser.forced_calls(way, wire.forced_tools, parallel=parallel)
            sampling = sampling.replace(grammar=grammar)
        if logprobs is not None and not wire.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        yield sampling


def _grammar_name(wire: Generation) -> dict[str, str]:
    return {"grammar": next(iter(wire.grammars), "tools")}


@contextmanager
def _retold(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside of the block are told with the caller's names in the place of ours."""
    try:
        yield
    except RequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = error.message
        if error.param != "prompt":  # no field of a chat, but the right word for what it becomes
            message = re.sub(rf"\b{error.param}\b", theirs, message)
        raise type(error)(message, param=theirs, code=error.code) from None


def _sampling(
    wire: Generation, max_tokens: int | None, logprobs: int | None, num_prompts: int = 1
) -> SamplingParams:
    """The fields of `SamplingParams` have the same names on the wire, except for these three."""
    extra = logprobs is not None or wire.return_token_ids or getattr(wire, "echo", False)
    if wire.stream_format == "events" and (extra or wire.n * num_prompts > 1):
        raise UnprocessableError(
            "stream_format 'events' carries one choice without logprobs, echo and token ids;"
            " use stream_format 'openai' for more",
            param="stream_format",
        )
    own = {"max_tokens", "logprobs", "grammar"}
    names = {field.name for field in fields(SamplingParams)} - own
    given = {name: getattr(wire, name) for name in names}
    grammar = next(iter(wire.grammars.values()), None)
    return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, grammar=grammar)


def _choices(
    engine: AsyncLLM,
    wire: Generation,
    prompts: Sequence[Prompt],
    checked: CheckedSampling,
    answer_id: str,
    shown_token_ids: tuple[int, ...] = (),
    thoughts: tuple[str, str] | None = None,
) -> Iterator[Request]:
    ids = (f"{answer_id}-{index}" for index in itertools.count())
    for prompt in prompts:
        for i in range(wire.n):
            seed = checked.sampling.seed
            if seed is not None:  # seed + i, within 64 signed bits
                seed = (seed + i + 2**63) % 2**64 - 2**63
            request = engine.make_request(
                prompt,
                checked,
                request_id=next(ids),
                priority=wire.priority,
                shown_token_ids=shown_token_ids,
                seed=seed,
                thoughts=thoughts,
            )
            prompt = request.prompt_token_ids  # tokenized once
            yield request
