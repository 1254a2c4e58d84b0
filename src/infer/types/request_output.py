"""`TextDelta` and `RequestOutput`: what callers of the façades see, in pieces and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infer.types.ends import FinishReason
from infer.types.error_record import ErrorRecord
from infer.types.step_output import TokenLogprobs


class TextDelta(NamedTuple):
    """A piece of a stream: what is new since the last piece. Pieces may be merged.

    `token_ids` and `logprobs` may run ahead of `text`, which is held back while it could still be
    part of a stop string or of a character whose bytes are not all there.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    error: ErrorRecord | None = None
    """Set with `FinishReason.ERROR`."""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """In the first piece, if asked for."""
    num_predicted: tuple[int, int] = (0, 0)
    """Tokens of the request's prediction so far: accepted, and proposed in vain."""
    stop_string: str | None = None
    """The stop string that has ended the text, in the last piece."""

    def merge(self, later: TextDelta) -> TextDelta:
        """This piece and the one after it as one piece."""
        return TextDelta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            finish_reason=later.finish_reason,
            num_cached=later.num_cached,
            error=later.error,
            prompt_logprobs=self.prompt_logprobs,
            num_predicted=max(self.num_predicted, later.num_predicted),
            stop_string=later.stop_string,
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request, as `LLM.generate` returns it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry per token, if asked for."""
    num_cached: int = 0
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """Of the prompt's tokens from the second one on, if asked for."""
    num_predicted: tuple[int, int] = (0, 0)
    """Tokens of the request's prediction: accepted, and proposed in vain."""
    stop_string: str | None = None
    """The stop string that has ended the text."""
