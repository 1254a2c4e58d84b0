"""`StepOutput`: what one step gave one request; the only thing that travels outward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.types.ends import FinishReason
from infer.types.error_record import ErrorRecord


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the raw logits, natural logarithm."""

    logprob: float
    """Of the sampled token."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most probable tokens, best first."""


class StepOutput(NamedTuple):
    """What one step did for one request. The last one of a request has a `finish_reason`."""

    request_id: str
    token_id: int | None
    """The sampled token; None if the request ended without one (abort, error)."""
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    num_cached: int = 0
    """Prompt tokens that were taken from the prefix cache and not computed for this request."""
    error: ErrorRecord | None = None
    """Set with `FinishReason.ERROR`."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """With the first token, if asked for: of the prompt's tokens from the second one on."""
    num_predicted: tuple[int, int] = (0, 0)
    """Tokens of the request's prediction so far: accepted, and proposed in vain."""
