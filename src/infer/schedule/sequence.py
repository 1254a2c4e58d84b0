"""`Sequence`: one generation in flight, and `Chunk` / `Plan`: what one step does.

A sequence is a list of tokens and a number: how many of them have been computed. A step moves
some of those numbers forward; whenever a number reaches the end of its list, one token is sampled
and appended. Sequences never leave the engine core. Only the scheduler changes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from infer.errors import EngineError, RequestError
from infer.schedule.page_allocator import PageTable
from infer.types import ErrorRecord, Request, TokenLogprobs

PENDING = -1
"""in `Sequence.tokens`: a token that a step which is still being computed samples"""
ARRIVALS_PER_PRIORITY = 256
"""how many later requests may overtake one, for each level of priority that they are above it"""


class Status(Enum):
    """Where a sequence is. WAITING → RUNNING ⇄ PREEMPTED, and from anywhere to FINISHED."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class TenantShare:
    """What one tenant has been given; kept by `schedule.fair_share`."""

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
    tenant_share: TenantShare = field(default_factory=TenantShare)
    """its tenant's"""
    end_token_ids: frozenset[int] = frozenset()
    """end-of-sequence and stop tokens of the request, for one quick look-up per token"""
    prompt_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    """log-probabilities of prompt tokens by position, as far as the runner has computed them"""
    max_length: int = 0
    """of `tokens`, when it has all that were asked for"""
    is_special: bool = False
    """whether sampling it takes more than temperature, top-k, top-p and min-p (and `min_tokens`)"""
    reads_output: bool = False
    """whether its next token can be sampled only when the numbers of all before are known"""
    constraint: object = None
    """the runner's, of a request with a grammar; it follows from the tokens and is never asked"""

    @classmethod
    def from_request(cls, request: Request, arrival: int) -> Sequence:
        """A fresh sequence that waits."""
        sampling = request.sampling
        reads_output = bool(
            sampling.grammar is not None
            or sampling.repetition_penalty != 1.0
            or sampling.presence_penalty
            or sampling.frequency_penalty
            or request.bad_token_ids
        )
        return cls(
            max_length=len(request.prompt_token_ids) + request.max_tokens,
            reads_output=reads_output,
            is_special=reads_output
            or sampling.logprobs is not None
            or bool(sampling.logit_bias)
            or sampling.allowed_token_ids is not None,
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
        """Tokens generated so far, a pending one included."""
        return len(self.tokens) - self.num_prompt

    @property
    def known_output(self) -> tuple[int, ...]:
        """Tokens generated so far, without a pending one."""
        tokens = self.tokens[self.num_prompt :]
        return tuple(tokens[:-1] if self.is_pending else tokens)

    @property
    def is_pending(self) -> bool:
        """Whether its last token is still being computed."""
        return self.tokens[-1] == PENDING

    @property
    def is_ending(self) -> bool:
        """Whether it has all its tokens, the last of them perhaps pending."""
        return len(self.tokens) >= self.max_length

    def prompt_logprobs(self, num_output: int) -> tuple[TokenLogprobs, ...] | None:
        """With the first token (`num_output` 1), if they are wanted."""
        if self.request.sampling.prompt_logprobs is None or num_output != 1:
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


@dataclass(slots=True, eq=False)
class Advanced:
    """A chunk of a step that is being computed, as it was when the step was launched."""

    chunk: Chunk
    samples: bool
    is_prompt: bool
    """whether it is (a part of) a prompt, not the one token of a stream"""
    num_preemptions: int
    """of its sequence until then: if there are more by now, its pages have gone"""

    @property
    def end(self) -> int:
        """Tokens of the sequence that are computed after it."""
        return self.chunk.start + self.chunk.num_tokens


NOT_FINITE = "the model gave this request no finite numbers to choose a token from"
NONE_LEFT = (
    "no token is left to choose: what the grammar, allowed_token_ids, bad_words and min_tokens of"
    " this request leave has nothing in common"
)


@dataclass(slots=True)
class Sampled:
    """What the runner returns for a chunk that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str = ""
    """why there is no token; the request fails with it"""
    is_refused: bool = False
    """whether that error is the request's own doing, and not the engine's"""
    completes: bool = False
    """nothing may follow this token"""
    is_late: bool = False
    """whether there is no token because what it takes to choose one was not there in time; the
    sequence samples in another step"""

    @property
    def error_record(self) -> ErrorRecord | None:
        """The error as the caller gets it."""
        if not self.error:
            return None
        kind = RequestError if self.is_refused else EngineError
        return ErrorRecord(self.error, kind.__name__)
