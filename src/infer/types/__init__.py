"""The frozen records that cross a boundary: what a caller asks and what comes back.

`SamplingParams` and `Request` travel inward, `StepOutput` travels outward, and nothing else
crosses between the engine and its callers. All are plain frozen records of numbers, strings
and tuples, so that a message boundary (thread, process, machine) can be put between the two sides
without changing either. `TextDelta` and `RequestOutput` are what callers of the façades see.
This module checks values (a `Request` that exists is valid); it knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import infer.errors as errors
from infer.errors import ConfigError, EngineError, InferError, RequestError
from infer.types.sampling import SamplingParams as SamplingParams


class FinishReason(StrEnum):
    """Why a sequence ended; every request ends in exactly one of these."""

    EOS = "eos"
    """the model ended it with one of its end-of-sequence tokens"""
    STOP = "stop"
    """a stop string or a stop token id of the request was reached"""
    COMPLETE = "complete"
    """what the request's grammar wants is complete, and nothing may follow"""
    LENGTH = "length"
    """`max_tokens` were generated"""
    ABORT = "abort"
    """the caller left or cancelled"""
    ERROR = "error"
    """refused by the engine, or the engine failed on it; `StepOutput.error` says which"""


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine works on: token ids in, everything resolved, nothing left to default.

    Built by `engine.client.input`, which knows the model's limits; the scheduler checks them again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """resolved, so that a request can be run again with the same result"""
    max_tokens: int
    """resolved, at least 1"""
    eos_token_ids: tuple[int, ...] = ()
    """tokens that end the sequence; empty with `ignore_eos`"""
    priority: int = 0
    """lower goes first; equal ones in order of arrival. A level is worth 256 arrivals: later
    requests overtake an earlier one at most so often, so that nobody waits for ever"""
    cache_scope: str = ""
    """prefix-cache entries are shared within a scope only"""
    num_public: int = 0
    """except those of so many tokens at the beginning, which are the operator's own words"""
    tenant: str = ""
    """whose share of the engine it is computed from"""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words`: of each the last token is not sampled where the others have just been"""
    shown_token_ids: tuple[int, ...] = ()
    """special tokens that are text all the same: marks of thoughts and calls, which are read"""
    thoughts: tuple[str, str] | None = None
    """marks around thoughts, behind which the text of the grammar begins; an empty first one: the
    prompt has begun them"""
    grammar_bytes: int = 0
    """of memory that its grammar takes when it is compiled"""
    output_token_ids: tuple[int, ...] = ()
    """generated before, by an engine that has died; the output goes on behind them"""
    num_crashes: int = 0
    """engines that have died while they had it"""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position, from the raw logits, natural logarithm."""

    logprob: float
    """of the sampled token"""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability) of the most probable tokens, best first"""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as it crosses a boundary: exceptions stay on their side, plain data travels."""

    message: str
    kind: str = EngineError.__name__
    """the nearest class of `infer.errors`"""
    param: str | None = None
    """the field that is to blame, of a request or of the settings"""
    code: str | None = None

    @classmethod
    def of(cls, error: InferError) -> ErrorRecord:
        """What `exception` makes an equal error of on the other side."""
        kind = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        if isinstance(error, RequestError):
            return cls(error.message, kind.__name__, error.param, error.code)
        if isinstance(error, ConfigError):
            return cls(str(error).removeprefix(f"{error.field}: "), kind.__name__, error.field)
        return cls(str(error), kind.__name__)

    def exception(self) -> InferError:
        """The error, to be raised where the caller is."""
        kind: type[InferError] = getattr(errors, self.kind)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param, code=self.code)
        if issubclass(kind, ConfigError):
            return kind(self.param or "", self.message)
        return kind(self.message)


class StepOutput(NamedTuple):
    """What one step did for one request. The last one of a request has a `finish_reason`."""

    request_id: str
    token_id: int | None
    """the sampled token; None if the request ended without one (abort, error)"""
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    num_cached: int = 0
    """prompt tokens that were taken from the prefix cache and not computed for this request"""
    error: ErrorRecord | None = None
    """set with `FinishReason.ERROR`"""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """with the first token, if asked for: of the prompt's tokens from the second one on"""


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
    """set with `FinishReason.ERROR`"""
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """in the first piece, if asked for"""

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
    """one entry per token, if asked for"""
    num_cached: int = 0
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    """of the prompt's tokens from the second one on, if asked for"""
