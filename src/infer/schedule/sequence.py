"""`Sequence`: one generation in flight, and `Chunk` / `Plan`: what one step does.

A sequence is a list of tokens and a number: how many of them have been computed. A step moves
some of those numbers forward; whenever a number reaches the end of its list, one token is sampled
and appended. Sequences never leave the engine core. Only the scheduler changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from infer.cache.allocator import PageTable
from infer.types import Request, TokenLogprobs

ARRIVALS_PER_PRIORITY = 256
"""how many later requests may overtake one, for each level of priority that they are above it"""


class Status(Enum):
    """Where a sequence is. WAITING → RUNNING ⇄ PREEMPTED, and from anywhere to FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Account:
    """What one tenant has been given; kept by `schedule.accounts`."""

    num_tokens: int = 0
    num_here: int = 0
    """its requests that have not ended"""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request being worked on."""

    request: Request
    arrival: int
    """order of arrival"""
    tokens: list[int]
    """prompt and output"""
    num_prompt: int
    num_computed: int = 0
    """how many of `tokens` have their keys and values in the cache"""
    table: PageTable = field(default_factory=PageTable)
    status: Status = Status.WAITING
    num_cached: int = 0
    """prompt tokens that it found computed by others, up to its first preemption"""
    num_preemptions: int = 0
    last_turn: int = 0
    """the step in which it last moved forward"""
    admitted_s: float | None = None
    account: Account = field(default_factory=Account)
    """its tenant's"""
    end_token_ids: frozenset[int] = frozenset()
    """end-of-sequence and stop tokens of the request, for one quick look-up per token"""
    prompt_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    """log-probabilities of prompt tokens by position, as far as the runner has computed them"""
    constraint: object = None
    """the runner's, of a request with a grammar; it follows from the tokens and is never asked"""

    @classmethod
    def from_request(cls, request: Request, arrival: int) -> Sequence:
        """A fresh sequence that waits."""
        return cls(
            request=request,
            arrival=arrival,
            tokens=[*request.prompt_token_ids, *request.output_token_ids],
            num_prompt=len(request.prompt_token_ids),
            end_token_ids=frozenset(request.eos_token_ids)
            | frozenset(request.sampling.stop_token_ids),
        )

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.request.request_id

    @property
    def rank(self) -> tuple[int, int]:
        """Position in the total order: smaller goes first, and preempts larger.

        A level of priority is worth so many places in the order of arrival, and no more. That is
        the ageing: nothing has to be updated, and only a finite number of requests, those that
        arrive before `arrival + ARRIVALS_PER_PRIORITY * levels`, ever go before a given one.
        """
        return (self.arrival + ARRIVALS_PER_PRIORITY * self.request.priority, self.arrival)

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """If they are wanted and the first token has just been sampled."""
        if self.request.sampling.prompt_logprobs is None or self.num_output != 1:
            return None
        return tuple(self.prompt_scores[position] for position in range(1, self.num_prompt))

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed


@dataclass(slots=True, eq=False)
class Chunk:
    """The next `num_tokens` tokens of a sequence, from `start`, are computed in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the end of the list, so that a token is sampled."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


Plan = tuple[Chunk, ...]
"""The scheduler's decision for one step: at most one chunk a sequence; plain data."""


NOT_FINITE = "the model gave this request no finite numbers to choose a token from"
NONE_LEFT = (
    "no token is left to choose: what the grammar, allowed_token_ids, bad_words and min_tokens of"
    " this request leave has nothing in common"
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the runner returns for a chunk that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """why there is no token; the request fails with it"""
    completes: bool = False
    """nothing may follow this token"""
