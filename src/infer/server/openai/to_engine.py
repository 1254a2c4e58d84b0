"""Wire model → the engine's requests, one for each choice of the answer: what endpoints share.

Here names of the wire meet names of `SamplingParams`, and errors that name our fields are put into
the caller's names (`max_tokens` → `max_completion_tokens`). Choices are numbered prompt by prompt.
Choice i of a prompt draws with seed + i, so each of them can be asked for again alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import CheckedSampling
from infer.errors import RequestError, UnprocessableError
from infer.server.openai.schema import Generation, SampledBody
from infer.types import Request, SamplingParams

Prompt = str | tuple[int, ...]
"""Text or token ids."""


@contextmanager
def in_callers_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors inside of the block get the caller's names of fields; `names`: ours → the caller's."""
    try:
        yield
    except RequestError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = error.message
        if error.param != "prompt":  # no field of a chat, but the right word for what it becomes
            # Once: later on "grammar" is a word, or a name in the client's own text.
            message = re.sub(rf"\b{error.param}\b", theirs, message, count=1)
        raise type(error)(message, param=theirs, code=error.code) from None


def grammar_name(wire: SampledBody) -> dict[str, str]:
    """The name of the field by which the caller has asked for a grammar."""
    return {"grammar": next(iter(wire.grammars), "tools")}


def check_stream_format(wire: Generation, logprobs: int | None, num_prompts: int = 1) -> None:
    """Refuse what the typed events of the default API cannot carry."""
    extra = logprobs is not None or wire.return_token_ids or getattr(wire, "echo", False)
    if wire.stream_format == "events" and (extra or wire.n * num_prompts > 1):
        raise UnprocessableError(
            "stream_format 'events' carries one choice without logprobs, echo and token ids;"
            " use stream_format 'openai' for more",
            param="stream_format",
        )


def sampling_of(
    engine: AsyncLLM, wire: SampledBody, max_tokens: int | None, logprobs: int | None = None
) -> SamplingParams:
    """The fields of `SamplingParams` have the same names on the wire, except for `max_tokens`,
    `logprobs` and the grammar. Fields that the client leaves out are left to the checkpoint, as is
    the limit of tokens where it has one."""
    translated = {"max_tokens", "logprobs", "grammar"}
    names = {field.name for field in fields(SamplingParams)} & type(
        wire
    ).model_fields.keys() - translated
    given = {name: getattr(wire, name) for name in names & wire.model_fields_set}
    if wire.sets_limit or engine.sampling_defaults.max_tokens is None:
        given["max_tokens"] = max_tokens
    grammar = wire.enforced.grammar
    return SamplingParams(**given, logprobs=logprobs, grammar=grammar)


def requests_of(
    engine: AsyncLLM,
    prompts: Sequence[Prompt],
    checked: CheckedSampling,
    answer_id: str,
    *,
    n: int = 1,
    priority: int = 0,
    shown_token_ids: tuple[int, ...] = (),
    thoughts: tuple[str, str] | None = None,
    reuse_prefix: bool = True,
    clamps: bool = True,
) -> Iterator[Request]:
    """`n` requests for each prompt, all with one sampling; see `InputProcessor.make_request`.

    `clamps`: agents send the same large `max_tokens` in every request, whatever a prompt leaves.
    """
    ids = (f"{answer_id}-{index}" for index in itertools.count())
    for prompt in prompts:
        request = engine.make_request(
            prompt,
            checked,
            request_id=next(ids),
            priority=priority,
            shown_token_ids=shown_token_ids,
            thoughts=thoughts,
            reuse_prefix=reuse_prefix,
            clamps=clamps,
        )
        yield request
        for i in range(1, n):
            seed = checked.sampling.seed
            if seed is not None:  # a negative one would be none
                seed = (seed + i) % 2**63
            yield engine.another_choice(request, next(ids), seed)
