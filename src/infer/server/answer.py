"""What all pieces of one answer share: its id, its time, its model, and the count of its tokens.

`Answer` is made once per HTTP request, before the engine sees anything. `TokenCount` adds up what
the choices report and renders the `usage` object. Used by `routes`, `bodies` and the streams.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import EngineError
from infer.types import ErrorRecord, FinishReason, Request

_WIRE_REASON = {
    FinishReason.EOS: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of every object that is sent."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Answer:
        return cls(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def wire_reason(reason: FinishReason) -> str:
    """OpenAI's word for why a choice ended; raises `EngineError` for an end that is none."""
    check_ended_well(reason, None)
    return _WIRE_REASON[reason]


def check_ended_well(reason: FinishReason, error: ErrorRecord | None) -> None:
    """Raises the error of a choice that was not finished but broken off."""
    if error is not None:
        raise error.exception()
    if reason is FinishReason.ERROR:
        raise EngineError("the engine failed on this request")
    if reason is FinishReason.ABORT:
        raise EngineError("the server has cancelled this request")


class TokenCount:
    """`usage`: the tokens of all choices; a prompt counts once, however many choices it has."""

    def __init__(self, requests: Sequence[Request], choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._num_prompt = sum(
            len(request.prompt_token_ids) for request in requests[::choices_per_prompt]
        )
        self._num_cached: dict[int, int] = {}
        self._num_completion = 0

    def add(self, index: int, num_tokens: int, num_cached: int) -> None:
        """Choice `index` has `num_tokens` more. Its siblings find its prompt in the cache, which
        is no hit that the caller could have had before; so the first one of a prompt counts."""
        self._num_completion += num_tokens
        if index % self._choices_per_prompt == 0:
            self._num_cached[index] = num_cached

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": self._num_completion,
            "total_tokens": self._num_prompt + self._num_completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
