"""`InputProcessor`: makes a `Request` from a caller's input, or raises a `RequestError`"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from infer.errors import RequestError, UnprocessableError, too_long
from infer.text.grammars.compiler import Vocabulary
from infer.text.tokenizer import Tokenizer
from infer.text.untrusted.grammar_checker import GrammarChecker
from infer.text.untrusted.workers import Steps, run_steps
from infer.types import Request, Sampling, SamplingParams
from infer.types.engine_limits import EngineLimits
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults

log = logging.getLogger(__name__)

_MAX_SHRINKING = 4
"""Largest factor by which a tokenizer's normalisation may shorten a text."""


def log_defaults(model_name: str, defaults: SamplingDefaults) -> None:
    """Log the defaults of requests, and warnings about what a checkpoint asks for in vain."""
    log.info("%s: defaults of requests: %s", model_name, defaults)
    for note in defaults.notes:
        log.warning("%s: %s", model_name, note)


def log_tool_use(tokenizer: Tokenizer) -> None:
    """Log how the model is assumed to call tools; a warning if that is not known."""
    use = tokenizer.tool_use
    if use is not None:
        log.log(logging.INFO if use.is_known else logging.WARNING, "%s", use.summary)


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """A `Sampling` that is valid for the model, with derived values; made once by
    `InputProcessor.check` for all requests that share it."""

    sampling: Sampling
    bad_token_ids: tuple[tuple[int, ...], ...]
    """Token sequences that must not be generated, from `bad_words`."""
    grammar_bytes: int = 0
    """Approximate bytes of the compiled grammar."""
    prediction_token_ids: tuple[int, ...] = ()
    """Tokens of `prediction`, as many as a sequence may have."""
    defaulted: frozenset[str] = frozenset()
    """Fields that have a default of the checkpoint, which refuses nothing."""


class InputProcessor:
    """It is the only place where prompts are tokenised and defaults (seed, `max_tokens`, end
    tokens) are resolved. Both façades use it, so they refuse the same input with the same messages.
    Everything that can be refused is refused here; the scheduler checks lengths once more."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        seed: int = 0,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        """`defaults`: what the checkpoint says about fields that a `SamplingParams` leaves out."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.defaults = defaults
        self.grammars = GrammarChecker(lambda: Vocabulary.of(tokenizer, limits.vocab_size))
        self._seeds = random.Random(seed)
        self._eos = tuple(i for i in tokenizer.eos_token_ids if i < limits.vocab_size)

    def make_request(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | CheckedSampling | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        shown_token_ids: tuple[int, ...] = (),
        seed: int | None = None,
        thoughts: tuple[str, str] | None = None,
        reuse_prefix: bool = True,
        clamps: bool = False,
    ) -> Request:
        """Make a request from a text (tokenised as the checkpoint says) or a list of token ids.

        Requests with the same sampling can share the result of one `check`. `seed`, a signed 64-bit
        integer, overrides the sampling's; without either the seed is random. For `shown_token_ids`
        and `thoughts` see `Request`. Without `reuse_prefix` the request takes nothing from the
        prefix cache, and no other request finds anything of it there. With `clamps` a `max_tokens`
        beyond what the prompt leaves becomes what it leaves; otherwise it is refused. Raises
        `RequestError` for input that is invalid or too long.
        """
        token_ids = self.tokenize(prompt)
        checked = sampling
        if not isinstance(checked, CheckedSampling):
            checked = self.check(checked or SamplingParams())
        sampling = checked.sampling
        if seed is None:
            seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        request_id = request_id or secrets.token_urlsafe(16)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling=sampling,
            seed=seed,
            max_tokens=self._max_tokens(len(token_ids), checked, clamps=clamps),
            eos_token_ids=() if sampling.ignore_eos else self._eos,
            priority=priority,
            # Cached pages give no logits, so log-probabilities of the prompt exclude sharing.
            cache_scope="" if reuse_prefix and sampling.prompt_logprobs is None else request_id,
            bad_token_ids=checked.bad_token_ids,
            shown_token_ids=shown_token_ids,
            thoughts=thoughts,
            thought_end=self._thought_end(sampling) if thoughts is not None else (),
            grammar_bytes=checked.grammar_bytes,
            prediction_token_ids=checked.prediction_token_ids,
        )

    def another_choice(self, request: Request, request_id: str, seed: int | None) -> Request:
        """The same request with another id and seed (None: a random one), which is made in a time
        that does not depend on the prompt."""
        shares = request.cache_scope != request.request_id
        return replace(
            request,
            request_id=request_id,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            cache_scope=request.cache_scope if shares else request_id,
        )

    def warm(self) -> None:
        """Start the processes for grammars and chat templates, without waiting for them."""
        self.grammars.warm()
        self.tokenizer.warm()

    def close(self) -> None:
        """End the processes for grammars and chat templates."""
        self.grammars.close()
        self.tokenizer.rest()

    def check(self, sampling: Sampling) -> CheckedSampling:
        """Check a sampling, and block meanwhile; see `checking`."""
        return run_steps(self.checking(sampling))

    def checking(self, sampling: Sampling) -> Steps[CheckedSampling]:
        """Fill in the checkpoint's defaults (into a `SamplingParams`; a bare `Sampling` is
        complete), and check everything that depends on the model but not on the prompt: token ids,
        grammar, bad words. Raises `RequestError`. The time is linear in the fields' sizes."""
        defaulted: frozenset[str] = frozenset()
        if isinstance(sampling, SamplingParams):
            defaulted = frozenset(self.defaults.values.keys() - sampling.given)
            sampling = self.defaults.fill(sampling)
        self._check_ids(sampling)
        num_bytes = 0
        if sampling.grammar is not None:
            num_bytes = yield from self.grammars.checking(sampling.grammar)
        predicted = self._predicted(sampling.prediction)
        bad_words = self._spellings(sampling.bad_words)
        return CheckedSampling(sampling, bad_words, num_bytes, predicted, defaulted)

    def _thought_end(self, sampling: Sampling) -> tuple[int, ...]:
        """The tokens that end reasoning of which there is enough; none if there is no limit."""
        if sampling.thinking_token_budget is None:
            return ()
        ids = self.tokenizer.thought_end(only_mark=sampling.grammar is not None)
        return ids if max(ids, default=0) < self.limits.vocab_size else ()

    def _predicted(self, text: str) -> tuple[int, ...]:
        """The token ids of a prediction; a part of it that is no text is replaced."""
        if not text:
            return ()
        text = text.encode("utf-8", "replace").decode()
        ids = self.tokenizer.encode(text, add_special_tokens=False)[: self.limits.max_seq_len]
        vocab_size = self.limits.vocab_size
        return tuple(ids) if max(ids, default=0) < vocab_size else ()

    def tokenize(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt. Raises `RequestError` if it is empty, too long or of a wrong
        type, `UnprocessableError` for an id outside the vocabulary."""
        if not isinstance(prompt, (str, list, tuple, range)):
            raise RequestError(
                f"a prompt must be text or a list of token ids, not {type(prompt).__name__}",
                param="prompt",
            )
        if not prompt:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                raise RequestError(
                    "the prompt contains a lone surrogate, which is not text", param="prompt"
                ) from None
            self._check_chars(len(prompt))
            return tuple(self.tokenizer.encode(prompt))
        self._remaining_tokens(len(prompt))  # before each id is checked: there may be a million
        vocab_size = self.limits.vocab_size
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int):
                raise RequestError(
                    f"token ids must be integers, not {type(token).__name__}", param="prompt"
                )
            if not 0 <= token < vocab_size:
                raise UnprocessableError(
                    f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})",
                    param="prompt",
                )
        return tuple(prompt)

    def _check_chars(self, num_chars: int) -> None:
        """Refuse a text that could not fit even if it consisted of longest tokens and were
        normalised to the shortest form. Tokenising takes a hundred times the text's memory."""
        limit = self.limits.max_seq_len
        if num_chars > limit * self.tokenizer.max_token_chars * _MAX_SHRINKING:
            raise too_long(limit, f"the prompt is too long: {num_chars} characters", param="prompt")

    def _check_ids(self, sampling: Sampling) -> None:
        for name, ids in (
            ("logit_bias", tuple(token for token, _ in sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ):
            for token in ids:
                if token >= self.limits.vocab_size:
                    raise UnprocessableError(
                        f"{name}: token id {token} is outside the vocabulary"
                        f" (0 to {self.limits.vocab_size - 1})",
                        param=name,
                    )

    def _spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a space."""
        texts = [text for word in words for text in (word, " " + word)]
        spellings = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts}
        return tuple(sorted(ids for ids in spellings if ids and max(ids) < self.limits.vocab_size))

    def _remaining_tokens(self, num_prompt: int) -> int:
        """Number of tokens that fit after the prompt, at least 1; raises `RequestError` if none."""
        limit = self.limits.max_seq_len
        if num_prompt >= limit:
            # The second half is what Anthropic's clients read, to know how much to leave out.
            excess = f"the prompt is too long: {num_prompt} tokens > {limit - 1} maximum"
            raise too_long(limit, excess, param="prompt")
        return limit - num_prompt

    def _max_tokens(self, num_prompt: int, checked: CheckedSampling, *, clamps: bool) -> int:
        limit, room = self.limits.max_seq_len, self._remaining_tokens(num_prompt)
        most, least = checked.sampling.max_tokens, checked.sampling.min_tokens
        wanted = room if most is None else most
        if clamps or "max_tokens" in checked.defaulted:
            wanted = min(wanted, room)
        if wanted > room:
            excess = f"prompt ({num_prompt}) + max_tokens ({wanted}) is {num_prompt + wanted}"
            raise too_long(limit, excess, param="max_tokens")
        if least > wanted and "min_tokens" not in checked.defaulted:
            raise UnprocessableError(
                f"min_tokens ({least}) exceeds the {wanted} tokens that there is room for",
                param="min_tokens",
            )
        return wanted
