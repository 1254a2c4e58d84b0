"""`InputProcessor`: what a caller gives becomes a `Request`, or a `RequestError` that says why not.

The one place where prompts are tokenised and defaults resolved (seed, `max_tokens`, end tokens),
used by both façades, so that every way in refuses the same things with the same words. Everything
that can be refused is refused here; the scheduler's own checks are a second line.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from infer.errors import RequestError, UnprocessableError, too_long
from infer.text.grammars.compiler import Vocabulary
from infer.text.grammars.grammar_checker import GrammarChecker
from infer.text.tokenizer import Tokenizer
from infer.types import Request, Sampling, SamplingParams
from infer.types.engine_limits import EngineLimits

log = logging.getLogger(__name__)

_MAX_SHRINKING = 4


def log_tool_use(tokenizer: Tokenizer) -> None:
    """Say how the model is taken to call tools; a warning where that is not known."""
    use = tokenizer.tool_use
    if use is not None:
        log.log(logging.INFO if use.is_known else logging.WARNING, "%s", use.summary)


@dataclass(frozen=True, slots=True)
class CheckedSampling:
    """A `Sampling` that this model can do, and what had to be worked out for that; made
    once, by `InputProcessor.check`, for all requests that share it."""

    sampling: Sampling
    bad_token_ids: tuple[tuple[int, ...], ...]
    grammar_bytes: int = 0
    """about the memory that its compiled grammar takes"""


class InputProcessor:
    """See the module's docstring."""

    def __init__(self, tokenizer: Tokenizer, limits: EngineLimits, seed: int = 0) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
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
    ) -> Request:
        """A valid request for a text (tokenised as the checkpoint says) or a list of token ids.

        Many requests with the same sampling share the result of one `check`; `seed`, 64 bits and
        signed, takes the place of the sampling's. `shown_token_ids`, `thoughts`: see `Request`.
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
            max_tokens=self._max_tokens(len(token_ids), sampling),
            eos_token_ids=() if sampling.ignore_eos else self._eos,
            priority=priority,
            # What others have computed has no logits.
            cache_scope="" if sampling.prompt_logprobs is None else request_id,
            bad_token_ids=checked.bad_token_ids,
            shown_token_ids=shown_token_ids,
            thoughts=thoughts,
            grammar_bytes=checked.grammar_bytes,
        )

    def close(self) -> None:
        """Let go of what it holds beside memory."""
        self.grammars.close()

    def check(self, sampling: Sampling) -> CheckedSampling:
        """Everything about a sampling that depends on the model and not on the prompt: ids,
        grammar, bad words. Takes time in proportion to its fields."""
        self._check_ids(sampling)
        num_bytes = 0
        if sampling.grammar is not None:
            num_bytes = self.grammars.check(sampling.grammar)
        return CheckedSampling(sampling, self._spellings(sampling.bad_words), num_bytes)

    def tokenize(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The token ids of a prompt, checked against the vocabulary."""
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
        self._check_room(len(prompt))  # before a look at each of a million
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
        """A text that cannot fit even if it were all longest tokens (and its normal form as much
        shorter as it gets) is not tokenised at all: that takes memory, a hundred times its size."""
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
        """The token ids of words, at the beginning of a text and behind a space."""
        texts = [text for word in words for text in (word, " " + word)]
        found = {tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts}
        return tuple(sorted(ids for ids in found if ids and max(ids) < self.limits.vocab_size))

    def _check_room(self, num_prompt: int) -> int:
        """For how many more tokens there is room; at least one."""
        limit = self.limits.max_seq_len
        if num_prompt >= limit:
            found = f"the prompt is too long: {num_prompt} tokens leave none for output"
            raise too_long(limit, found, param="prompt")
        return limit - num_prompt

    def _max_tokens(self, num_prompt: int, sampling: Sampling) -> int:
        limit, room = self.limits.max_seq_len, self._check_room(num_prompt)
        wanted = room if sampling.max_tokens is None else sampling.max_tokens
        if wanted > room:
            found = f"prompt ({num_prompt}) + max_tokens ({wanted}) is {num_prompt + wanted}"
            raise too_long(limit, found, param="max_tokens")
        if sampling.min_tokens > wanted:
            raise UnprocessableError(
                f"min_tokens ({sampling.min_tokens}) exceeds the {wanted} tokens that there is"
                " room for",
                param="min_tokens",
            )
        return wanted
