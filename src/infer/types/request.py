"""`Request`: what the engine works on."""

from __future__ import annotations

from dataclasses import dataclass

from infer.errors import RequestError
from infer.types.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """What the engine works on: token ids in, everything resolved, nothing left to default.

    Built by `engine.client.input`, which knows the model's limits; the scheduler checks them again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Resolved, so that a request can be run again with the same result."""
    max_tokens: int
    """Resolved, at least 1."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence; empty with `ignore_eos`."""
    priority: int = 0
    """Lower goes first; equal ones in order of arrival. A level is worth 256 arrivals: later
    requests overtake an earlier one at most so often, so that nobody waits for ever."""
    cache_scope: str = ""
    """Prefix-cache entries are shared within a scope only."""
    num_public: int = 0
    """Except those of so many tokens at the beginning, which are the operator's own words."""
    tenant: str = ""
    """Whose share of the engine it is computed from."""
    conversation: str = ""
    """What a client calls its conversation, as a hash within the tenant: a hint for routers."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """`bad_words`: of each the last token is not sampled where the others have just been."""
    shown_token_ids: tuple[int, ...] = ()
    """Special tokens that are text all the same: marks of thoughts and calls, which are read."""
    thoughts: tuple[str, str] | None = None
    """Marks around thoughts, behind which the text of the grammar begins; an empty first one: the
    prompt has begun them."""
    thought_end: tuple[int, ...] = ()
    """Tokens that end thoughts of `thinking_token_budget` tokens; none: nothing ends them."""
    grammar_bytes: int = 0
    """Of memory that its grammar takes when it is compiled."""
    output_token_ids: tuple[int, ...] = ()
    """Generated before, by an engine that has died; the output goes on behind them."""
    logits_at: tuple[int, ...] = ()
    """Positions of the prompt whose logits the runner keeps in `Sequence.logits`, where callers in
    the engine's process can read them."""
    prediction_token_ids: tuple[int, ...] = ()
    """Text that its caller expects; tokens are proposed from it, and none depends on it."""
    num_crashes: int = 0
    """Engines that have died while they had it."""
    has_other_bits: bool = False
    """Whether `output_token_ids` are of an engine with another fingerprint, so that the tokens
    behind them may be others than there."""

    @property
    def is_restricted(self) -> bool:
        """Whether its own tokens decide which may be next: by a grammar or a budget."""
        return self.sampling.grammar is not None or bool(self.thought_end)

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")

    def is_suspect(self, num_output: int) -> bool:
        """Whether an engine has died with it, and it has not sampled a token since.

        `num_output`: output tokens that it has now, those of the dead engines included.
        """
        return self.num_crashes > 0 and num_output == len(self.output_token_ids)
