"""Answers in one piece: finished requests → the body of a completion or of a chat completion.

Choices are in the order of the requests. Called by `routes`; the streamed forms of the same
objects are in `stream.chunks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from infer.server.answer import Answer, TokenCount, wire_reason
from infer.server.logprobs import ChoiceLogprobs
from infer.types import RequestOutput


def completion(
    answer: Answer,
    outputs: Sequence[RequestOutput],
    logprobs: Sequence[ChoiceLogprobs] | None,
    count: TokenCount,
) -> dict[str, Any]:
    """The body of a completion; `logprobs` has a writer per choice if they were asked for."""
    choices = [
        {
            "index": index,
            "text": output.text,
            "logprobs": (
                logprobs[index].completion(output.token_ids, output.logprobs or ())
                if logprobs
                else None
            ),
            "finish_reason": _ended(count, index, output),
        }
        for index, output in enumerate(outputs)
    ]
    return {**answer.head("text_completion"), "choices": choices, "usage": count.usage()}


def chat(
    answer: Answer,
    outputs: Sequence[RequestOutput],
    logprobs: Sequence[ChoiceLogprobs] | None,
    count: TokenCount,
) -> dict[str, Any]:
    """The body of a chat completion."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": (
                logprobs[index].chat(output.token_ids, output.logprobs or ()) if logprobs else None
            ),
            "finish_reason": _ended(count, index, output),
        }
        for index, output in enumerate(outputs)
    ]
    return {**answer.head("chat.completion"), "choices": choices, "usage": count.usage()}


def _ended(count: TokenCount, index: int, output: RequestOutput) -> str:
    count.add(index, len(output.token_ids), output.num_cached)
    return wire_reason(output.finish_reason)
