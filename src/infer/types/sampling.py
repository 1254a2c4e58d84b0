"""`SamplingParams`: how the tokens of one request are chosen; checked when it is made.

`SamplingParams` is what a caller gives; `Sampling` is what is kept of it. The engine knows only
the second. What a caller leaves out is filled in by `types.sampling_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from infer.errors import RequestError, UnprocessableError
from infer.types.grammar import KINDS, MAX_GRAMMAR_CHARS, Grammar

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 64
MAX_PREDICTION_CHARS = 1 << 18
MAX_TOKENS_CEILING = 2**31 - 1
MIN_TEMPERATURE = 0.01
"""A lower temperature is greedy."""
DEFAULT_MAX_TOKENS = 16
NO_LIMIT = (-1, -2)
"""Values of `max_tokens` that clients send for "no limit\"."""
DEFAULTED = frozenset({
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "max_tokens", "min_tokens", "stop",
})  # fmt: skip
"""Fields for which a checkpoint may have a default of its own."""


class _Unset:
    """What an argument is that the caller leaves out."""

    def __repr__(self) -> str:
        return "the checkpoint's"


UNSET: Any = _Unset()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not _is_number(value):
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


def _check_token_id(name: str, token_id: int) -> None:
    if isinstance(token_id, bool) or not isinstance(token_id, int):
        kind = type(token_id).__name__
        raise RequestError(f"a token id of {name} must be an integer, not {kind}", param=name)
    if not 0 <= token_id < 2**31:
        message = f"a token id of {name} must be between 0 and {2**31 - 1}, not {token_id}"
        raise UnprocessableError(message, param=name)


def _check_count(name: str, count: int, limit: int, what: str = "entries") -> None:
    if count > limit:
        message = f"{name} has {count} {what}; at most {limit} are supported"
        raise UnprocessableError(message, param=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of one request are chosen and when it ends, each value in its one form.

    Order of application: logit bias and penalties, what is not allowed, temperature, top-k, top-p
    and min-p, draw.
    Log-probabilities are those of the model's raw logits. The draw is a pure function of the seed
    and the token's position, so a seeded request gives the same text in any batch.

    Callers construct `SamplingParams`; a message boundary decodes this class. Both raise
    `RequestError` for a value of the wrong type and `UnprocessableError` for one out of range.
    """

    temperature: float = 1.0
    """0 = greedy; else 0.01 to 2."""
    top_k: int = 0
    """Number of most probable tokens that are kept; 0 or -1 = all."""
    top_p: float = 1.0
    """Probability mass of the smallest set of most probable tokens that is kept; (0, 1]."""
    min_p: float = 0.0
    """Least probability of a token that is kept, as a fraction of the highest one; 0 to 1."""
    repetition_penalty: float = 1.0
    """Divisor (of a negative logit, factor) for tokens in prompt and output; (0, 10]."""
    presence_penalty: float = 0.0
    """Number subtracted once from the logit of a token that is in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Number subtracted from a token's logit for each time it is in the output; -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit, -100 to 100), in ascending order."""
    seed: int | None = None
    """64-bit signed; None = one is chosen from the engine's seed."""
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    """Most tokens that are generated; None = as many as the context has room for."""
    min_tokens: int = 0
    """Tokens before which no end-of-sequence or stop token is sampled and no stop string ends the
    output."""
    stop: tuple[str, ...] = ()
    """Strings that end the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    ignore_eos: bool = False
    """Whether the output goes on after the model's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string (or stop token's text) that ended it."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    logprobs: int | None = None
    """None = no log-probabilities; k = those of the sampled token and the k most probable ones."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first; such a prompt is always computed."""
    grammar: Grammar | None = None
    """What the text must be; it ends when it is complete, whatever `ignore_eos` says."""
    thinking_token_budget: int | None = None
    """Most tokens of an answer's reasoning, which then ends as the model itself ends it, where the
    chat template has marks for it; None = no limit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that are sampled; None = all."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated, as far as they are spelled as alone."""
    prediction: str = ""
    """Text that is likely to be the output, or much of it; an engine that proposes tokens takes
    them from it, and no token depends on it."""
    speculation: bool = True
    """Whether an engine that proposes tokens does so for this request; no token depends on it."""
    given: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    """Names of those fields of `DEFAULTED` that a caller has chosen in a `SamplingParams`."""

    @property
    def reads_thoughts(self) -> bool:
        """Whether what it asks for depends on where an answer's reasoning ends."""
        return self.grammar is not None or self.thinking_token_budget is not None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0 or 0.0 < self.temperature < MIN_TEMPERATURE:
            message = f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE}, top_p above 0"
            raise UnprocessableError(message, param="temperature")
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
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_TOKENS_CEILING)
        if not isinstance(self.prediction, str):
            raise RequestError("prediction must be a text", param="prediction")
        _check_count("prediction", len(self.prediction), MAX_PREDICTION_CHARS, "characters")
        for flag in (
            "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "speculation"
        ):  # fmt: skip
            if not isinstance(getattr(self, flag), bool):
                raise RequestError(f"{flag} must be true or false", param=flag)


class SamplingParams(Sampling):
    """A `Sampling` made from what a caller gives; every field by keyword.

    Some fields may be given in more forms than the one that is kept: `stop` as one string,
    `logit_bias` as a mapping, `grammar` as a mapping of `kind` and `text`, and all lists as any
    iterable; a `top_p` of 0 or a temperature below 0.01 for greedy, a negative seed for none,
    `max_tokens=-1` for no limit, and empty strings in `stop` and `bad_words` for nothing.

    A field of `DEFAULTED` that is left out is the checkpoint's where its files name a value. Where
    they do not, it has the value that `Sampling` shows; `max_tokens` is then at least `min_tokens`.
    """

    __slots__ = ()

    def __init__(
        self,
        *,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = (),
        stop: str | Iterable[str] = UNSET,
        stop_token_ids: Iterable[int] = (),
        grammar: Grammar | Mapping[str, str] | None = None,
        thinking_token_budget: int | None = None,
        allowed_token_ids: Iterable[int] | None = None,
        bad_words: Iterable[str] = (),
        temperature: float = UNSET,
        top_k: int = UNSET,
        top_p: float = UNSET,
        min_p: float = UNSET,
        repetition_penalty: float = UNSET,
        presence_penalty: float = UNSET,
        frequency_penalty: float = UNSET,
        seed: int | None = None,
        max_tokens: int | None = UNSET,
        min_tokens: int = UNSET,
        ignore_eos: bool = False,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        prediction: str = "",
        speculation: bool = True,
        given: frozenset[str] = frozenset(),
    ) -> None:
        """`given`: further fields that are chosen, with their fixed defaults."""
        chosen = _chosen(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, stop=stop,
            repetition_penalty=repetition_penalty, presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty, max_tokens=max_tokens, min_tokens=min_tokens,
        )  # fmt: skip
        given |= chosen.keys()
        if max_tokens is UNSET and isinstance(min_tokens, int):
            chosen["max_tokens"] = max(DEFAULT_MAX_TOKENS, min_tokens)
        super().__init__(
            **chosen,
            given=given,
            logit_bias=_clean_logit_bias(logit_bias),
            seed=_clean_seed(seed),
            stop_token_ids=_clean_ids("stop_token_ids", stop_token_ids, MAX_STOP_TOKEN_IDS),
            ignore_eos=ignore_eos,
            include_stop_str_in_output=include_stop_str_in_output,
            skip_special_tokens=skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=_clean_grammar(grammar),
            thinking_token_budget=thinking_token_budget,
            allowed_token_ids=_clean_allowed(allowed_token_ids),
            bad_words=_clean_strings("bad_words", bad_words, MAX_BAD_WORDS),
            prediction=prediction,
            speculation=speculation,
        )

    def replace(self, **changes: object) -> SamplingParams:
        """A copy with some fields changed, which are then given; checked like a new one."""
        return SamplingParams(**{**self._arguments(), **changes})

    def _arguments(self) -> dict[str, Any]:
        """The arguments that make an equal one."""
        left_out = {"given", *(DEFAULTED - self.given)}
        names = (
            field_of_params.name
            for field_of_params in fields(self)
            if field_of_params.name not in left_out
        )
        return {name: getattr(self, name) for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_again, (self._arguments(),)


def _made_again(arguments: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**arguments)


def _chosen(**arguments: Any) -> dict[str, Any]:
    """Those of the fields of `DEFAULTED` that are given, each in the form that is kept."""
    chosen = {name: value for name, value in arguments.items() if value is not UNSET}
    temperature, limit = chosen.get("temperature", 0.0), chosen.get("max_tokens")
    _check_number("temperature", temperature, 0.0, 2.0)
    if 0.0 < temperature < MIN_TEMPERATURE:
        chosen["temperature"] = 0.0
    if _is_number(chosen.get("top_p")) and chosen["top_p"] == 0:
        chosen |= {"top_p": 1.0, "temperature": 0.0}
    if type(limit) is int and limit in NO_LIMIT:
        chosen["max_tokens"] = None
    if "stop" in chosen:
        chosen["stop"] = _clean_strings("stop", chosen["stop"], MAX_STOP_STRINGS)
    return chosen


def _clean_seed(seed: int | None) -> int | None:
    """The seed; None for a negative one, which clients send for a random one."""
    if seed is None:
        return None
    _check_int("seed", seed, -(2**63), 2**63 - 1)
    return None if seed < 0 else seed


def _clean_strings(name: str, strings: str | Iterable[str], limit: int) -> tuple[str, ...]:
    if isinstance(strings, str):
        strings = (strings,)
    if not isinstance(strings, Iterable):
        raise RequestError(f"{name} must be a string or a list of strings", param=name)
    kept = tuple(string for string in strings if string not in (None, ""))  # they stop nothing
    _check_count(name, len(kept), limit, "strings")
    for string in kept:
        if not isinstance(string, str):
            raise RequestError(
                f"{name} must contain strings, not {type(string).__name__}", param=name
            )
        if len(string) > MAX_STOP_STRING_CHARS:
            raise UnprocessableError(
                f"a string of {name} must have at most {MAX_STOP_STRING_CHARS} characters,"
                f" not {len(string)}",
                param=name,
            )
    return kept


def _clean_ids(name: str, ids: Iterable[int], limit: int) -> tuple[int, ...]:
    if not isinstance(ids, Iterable):
        raise RequestError(f"{name} must be a list of integers", param=name)
    kept = tuple(ids)
    _check_count(name, len(kept), limit)
    for token_id in kept:
        _check_token_id(name, token_id)
    return kept


def _clean_allowed(ids: Iterable[int] | None) -> tuple[int, ...] | None:
    if ids is None:
        return None
    name = "allowed_token_ids"
    kept = _clean_ids(name, ids, MAX_ALLOWED_TOKEN_IDS)
    if not kept:
        raise UnprocessableError(f"{name} is empty: nothing could be sampled", param=name)
    return kept


def _clean_grammar(grammar: Grammar | Mapping[str, str] | None) -> Grammar | None:
    if grammar is None:
        return None
    if isinstance(grammar, Mapping):
        grammar = Grammar(**grammar)
    if grammar.kind not in KINDS or not isinstance(grammar.text, str):
        raise RequestError(f"grammar must be a Grammar of {', '.join(KINDS)}", param="grammar")
    if len(grammar.text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARS} are taken",
            param="grammar",
        )
    return grammar


def _clean_logit_bias(
    bias: Mapping[int, float] | Iterable[tuple[int, float]],
) -> tuple[tuple[int, float], ...]:
    pairs = tuple(bias.items()) if isinstance(bias, Mapping) else tuple(bias)
    _check_count("logit_bias", len(pairs), MAX_LOGIT_BIAS_ENTRIES)
    for token_id, value in pairs:
        _check_token_id("logit_bias", token_id)
        _check_number("logit_bias", value, -100.0, 100.0)
    return tuple(sorted((token_id, float(value)) for token_id, value in pairs))
