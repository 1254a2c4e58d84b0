"""The frozen records that cross a boundary: what a caller asks and what comes back.

`SamplingParams` and `Request` travel inward, `StepOutput` travels outward, and nothing else
crosses between the engine and its callers. All are plain frozen records of numbers, strings
and tuples, so that a message boundary (thread, process, machine) can be put between the two sides
without changing either. `TextDelta` and `RequestOutput` are what callers of the façades see.
This module checks values (a `Request` that exists is valid); it knows no model and no tokenizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from infer.errors import (
    CancelledError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    InferError,
    OverloadedError,
    RequestError,
    UnprocessableError,
)

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_TOKENS_CEILING = 2**31 - 1


class FinishReason(StrEnum):
    """Why a sequence ended; every request ends in exactly one of these."""

    EOS = "eos"
    """the model ended it with one of its end-of-sequence tokens"""
    STOP = "stop"
    """a stop string or a stop token id of the request was reached"""
    LENGTH = "length"
    """`max_tokens` were generated"""
    ABORT = "abort"
    """the caller left or cancelled"""
    ERROR = "error"
    """refused by the engine, or the engine failed on it; `StepOutput.error` says which"""


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} must be a number, not {type(value).__name__}", param=name)
    if not low <= value <= high:  # also false for NaN
        raise UnprocessableError(
            f"{name} must be between {low:g} and {high:g}, not {value!r}", param=name
        )


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {type(value).__name__}", param=name)
    if not low <= value <= high:
        raise UnprocessableError(
            f"{name} must be between {low} and {high}, not {value}", param=name
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Order of application: logit bias and penalties, temperature, top-k, top-p and min-p, draw.
    Log-probabilities are those of the model's raw logits. The draw is a pure function of the seed
    and the token's position, so a seeded request gives the same text in any company.

    Raises `RequestError` for a value of the wrong type, `UnprocessableError` for one out of range.
    """

    temperature: float = 1.0
    """0 = greedy; else 0.01 to 2"""
    top_k: int = 0
    """keep the k most probable tokens; 0 or -1 = all"""
    top_p: float = 1.0
    """keep the smallest set of most probable tokens whose probabilities add up to this; (0, 1]"""
    min_p: float = 0.0
    """drop tokens less probable than this fraction of the most probable one; 0 to 1"""
    repetition_penalty: float = 1.0
    """divide (or, if negative, multiply) the logits of tokens in prompt and output; (0, 10]"""
    presence_penalty: float = 0.0
    """subtract once from the logits of tokens in the output; -2 to 2"""
    frequency_penalty: float = 0.0
    """subtract for each time a token is in the output; -2 to 2"""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    """token id → value added to its logit, -100 to 100; kept as a sorted tuple of pairs"""
    seed: int | None = None
    """64-bit signed; None = one is chosen from the engine's seed"""
    max_tokens: int | None = 16
    """how many tokens to generate at most; None = as many as the context has room for"""
    min_tokens: int = 0
    """no end-of-sequence or stop token is sampled, and no stop string ends it, before this many"""
    stop: str | Iterable[str] = ()
    """strings that end the output; kept as a tuple"""
    stop_token_ids: Iterable[int] = ()
    """token ids that end the output; kept as a tuple"""
    ignore_eos: bool = False
    """go on after the model's end-of-sequence tokens"""
    include_stop_str_in_output: bool = False
    """keep the stop string (or stop token's text) that ended the output in its text"""
    skip_special_tokens: bool = True
    """leave special tokens out of the text"""
    logprobs: int | None = None
    """None = no log-probabilities; k = those of the sampled token and the k most probable ones"""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 2.0)
        if 0.0 < self.temperature < 0.01:
            raise UnprocessableError(
                f"temperature must be 0 (greedy) or between 0.01 and 2, not {self.temperature!r}",
                param="temperature",
            )
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p <= 0.0:
            raise UnprocessableError("top_p must be above 0 and at most 1", param="top_p")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0)
        if self.repetition_penalty <= 0.0:
            raise UnprocessableError(
                "repetition_penalty must be above 0 and at most 10", param="repetition_penalty"
            )
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_TOKENS_CEILING)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKENS_CEILING)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UnprocessableError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for flag in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, flag), bool):
                raise RequestError(f"{flag} must be true or false", param=flag)
        object.__setattr__(self, "stop", _clean_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _clean_stop_token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _clean_logit_bias(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept."""
        assert isinstance(self.stop, tuple)
        return self.stop

    @property
    def bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed; checked like a new one."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def _clean_stop(stop: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, Iterable):
        raise RequestError("stop must be a string or a list of strings", param="stop")
    strings = tuple(stop)
    if len(strings) > MAX_STOP_STRINGS:
        raise UnprocessableError(
            f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are supported",
            param="stop",
        )
    for string in strings:
        if not isinstance(string, str):
            raise RequestError(
                f"stop must contain strings, not {type(string).__name__}", param="stop"
            )
        if not 1 <= len(string) <= MAX_STOP_STRING_CHARS:
            raise UnprocessableError(
                f"a stop string must have 1 to {MAX_STOP_STRING_CHARS} characters,"
                f" not {len(string)}",
                param="stop",
            )
    return strings


def _clean_stop_token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(ids, Iterable):
        raise RequestError("stop_token_ids must be a list of integers", param="stop_token_ids")
    kept = tuple(ids)
    if len(kept) > MAX_STOP_TOKEN_IDS:
        raise UnprocessableError(
            f"stop_token_ids has {len(kept)} entries; at most {MAX_STOP_TOKEN_IDS} are supported",
            param="stop_token_ids",
        )
    for token_id in kept:
        _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
    return kept


def _clean_logit_bias(
    bias: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
    if len(pairs) > MAX_LOGIT_BIAS_ENTRIES:
        raise UnprocessableError(
            f"logit_bias has {len(pairs)} entries; at most {MAX_LOGIT_BIAS_ENTRIES} are supported",
            param="logit_bias",
        )
    for token_id, value in pairs:
        _check_int("logit_bias", token_id, 0, 2**31 - 1)
        _check_number("logit_bias", value, -100.0, 100.0)
    return tuple(sorted((token_id, float(value)) for token_id, value in pairs))


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine works on: token ids in, everything resolved, nothing left to default.

    Built by `engine.intake`, which knows the model's limits; the scheduler checks them again.
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
    tenant: str = ""
    """whose share of the engine it is computed from"""
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


_ERRORS: Mapping[str, type[InferError]] = {
    kind.__name__: kind
    for kind in (
        *(RequestError, UnprocessableError, OverloadedError, CancelledError, DeadlineError),
        *(EngineError, EngineDeadError),
    )
}


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as it crosses a boundary: exceptions stay on their side, plain data travels."""

    message: str
    kind: str = EngineError.__name__
    """the nearest class of `infer.errors` that can happen to a request"""
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: RequestError | EngineError) -> ErrorRecord:
        """What `exception` makes an equal error of on the other side."""
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)
        if isinstance(error, RequestError):
            return cls(error.message, kind, error.param, error.code)
        return cls(str(error), kind)

    def exception(self) -> InferError:
        """The error, to be raised where the caller is."""
        kind = _ERRORS[self.kind]
        if issubclass(kind, OverloadedError):
            return kind(self.message, code=self.code)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param, code=self.code)
        return kind(self.message)


@dataclass(frozen=True, slots=True)
class StepOutput:
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

    def merge(self, later: TextDelta) -> TextDelta:
        """This piece and the one after it as one piece."""
        return TextDelta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            finish_reason=later.finish_reason,
            num_cached=later.num_cached,
            error=later.error,
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

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the output tokens; NaN where none were asked for."""
        if not self.logprobs:
            return math.nan
        return sum(entry.logprob for entry in self.logprobs) / len(self.logprobs)
