"""`Sequence`: an unfinished request in the scheduler; `Chunk` and `Plan`: the work of one step

A sequence is a list of tokens and a number: how many of them have been computed. A step moves
some of those numbers forward; whenever a number reaches the end of its list, one token is sampled
and appended. Sequences never leave the engine core. Only the scheduler changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from infer.errors import EngineError, RequestError
from infer.schedule.ngram_index import Guesses
from infer.schedule.page_allocator import PageTable
from infer.types import ErrorRecord, Request, TokenLogprobs
from infer.types.step_events import ComputedChunk

PENDING = -1
"""Placeholder in `Sequence.tokens` for a token whose step is still being computed."""
ARRIVALS_PER_PRIORITY = 256
"""Number of later requests that may overtake a request, per level of priority between them."""


class Status(Enum):
    """State of a sequence: WAITING → RUNNING ⇄ PREEMPTED, and from each of them to FINISHED.

    With several tenants a preempted sequence becomes WAITING.
    """

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class TenantShare:
    """Counters of one tenant, kept by `schedule.fair_share`."""

    num_tokens: int = 0
    """Tokens computed for the tenant, raised when it becomes present; see `FairShare`."""
    num_here: int = 0
    """Number of the tenant's unfinished requests."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """The state of one unfinished request."""

    request: Request
    """Request as it was added."""
    arrival: int
    """Number of requests added before it."""
    tokens: list[int]
    """Token ids of prompt and output."""
    num_prompt: int
    """Number of prompt tokens."""
    num_computed: int = 0
    """Number of leading tokens whose keys and values are in the cache."""
    table: PageTable = field(default_factory=PageTable)
    """Pages that hold its keys and values."""
    status: Status = Status.WAITING
    num_cached: int = 0
    """Prompt tokens taken from the prefix cache before its first preemption."""
    num_preemptions: int = 0
    """Times it lost its pages."""
    last_turn: int = 0
    """Number of the step in which it last made progress."""
    queued_s: float = 0.0
    """Time at which it was handed to the engine (scheduler's clock, seconds)."""
    admitted_s: float | None = None
    """Time of its first admission (scheduler's clock, seconds); None before it."""
    is_owed_a_seat: bool = False
    """Whether another one got a seat in its turn; see `schedule.static_batches`."""
    tenant_share: TenantShare = field(default_factory=TenantShare)
    """Counters of its tenant, shared by all sequences of that tenant."""
    end_token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens of the request, in one set for one look-up per token."""
    prompt_scores: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Log-probabilities of prompt tokens by position, as far as the runner has computed them."""
    logits: dict[int, Any] = field(default_factory=dict)
    """Logits [V] float32 (numpy) by position, as far as the request asks for them."""
    max_length: int = 0
    """Maximum number of `tokens`: prompt and `max_tokens`."""
    is_special: bool = False
    """Whether sampling needs more than temperature, top-k, top-p, min-p and `min_tokens`."""
    reads_output: bool = False
    """Whether sampling needs the ids of all tokens before (grammar, budget of reasoning, penalties,
    bad words)."""
    guesses: Guesses | None = None
    """What speculation knows about it; None before tokens were first proposed for it."""
    constraint: object = None
    """The runner's state of the request's grammar; a function of `tokens`, never read here."""
    num_proposed: int = 0
    """Number of proposed tokens at the end of `tokens`; above 0 only in copies that
    `Chunk.samplers` makes."""

    @classmethod
    def from_request(cls, request: Request, arrival: int) -> Sequence:
        """A new sequence that waits."""
        sampling = request.sampling
        reads_output = bool(
            request.is_restricted
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
        """Position in the total order; a smaller rank goes first and may preempt a larger one.

        One level of priority is worth `ARRIVALS_PER_PRIORITY` places in the order of arrival. This
        is a form of ageing that needs no updates: only the finitely many requests that arrive
        before `arrival + ARRIVALS_PER_PRIORITY * levels` ever go before a given one.
        """
        return (self.arrival + ARRIVALS_PER_PRIORITY * self.request.priority, self.arrival)

    @property
    def num_output(self) -> int:
        """Number of output tokens, a pending one included."""
        return len(self.tokens) - self.num_prompt

    @property
    def known_output(self) -> tuple[int, ...]:
        """Output tokens without a pending one."""
        tokens = self.tokens[self.num_prompt :]
        return tuple(tokens[:-1] if self.is_pending else tokens)

    @property
    def is_pending(self) -> bool:
        """Whether its last token is still being computed."""
        return self.tokens[-1] == PENDING

    @property
    def is_ending(self) -> bool:
        """Whether it has its maximum number of tokens; the last one may be pending."""
        return len(self.tokens) >= self.max_length

    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of the prompt tokens from position 1, to be sent with the first output
        token; None if the request does not want them."""
        if self.request.sampling.prompt_logprobs is None:
            return None
        return tuple(self.prompt_scores[position] for position in range(1, self.num_prompt))

    @property
    def num_remaining(self) -> int:
        """Number of tokens to compute before the next can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed


@dataclass(slots=True, eq=False)
class Chunk:
    """A range of one sequence's tokens, `[start, start + num_tokens)`, to compute in a step."""

    sequence: Sequence
    start: int
    num_tokens: int
    proposed: tuple[int, ...] = ()
    """Tokens that are guessed to follow the sequence's last one, computed behind it; only where the
    chunk samples."""

    @property
    def num_rows(self) -> int:
        """Number of tokens that the chunk computes, proposed ones included."""
        return self.num_tokens + len(self.proposed)

    def samplers(self) -> list[Sequence]:
        """The sequence as it is sampled from at its end, and behind each of the proposed tokens."""
        sequence, proposed = self.sequence, self.proposed
        return [
            sequence,
            *(
                replace(sequence, tokens=[*sequence.tokens, *proposed[:num]], num_proposed=num)
                for num in range(1, len(proposed) + 1)
            ),
        ]

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the end of the sequence, so that a token is sampled."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


Plan = tuple[Chunk, ...]
"""The scheduler's decision for one step: at most one chunk per sequence."""


@dataclass(slots=True, eq=False)
class Advanced:
    """A chunk of a step that has been launched, with its sequence's state at the launch."""

    chunk: Chunk
    samples: bool
    """Whether a token is sampled from it."""
    is_prompt: bool
    """Whether it is part of a prompt, not the single token of a decoding sequence."""
    num_preemptions: int
    """`Sequence.num_preemptions` at the launch; a larger number at `commit` means that the pages
    are lost."""
    event: ComputedChunk | None
    """What `commit` tells about it; None for a token of a decoding sequence."""

    @property
    def end(self) -> int:
        """Number of the sequence's tokens that are computed when the chunk is."""
        return self.chunk.start + self.chunk.num_tokens


NOT_FINITE = "the model gave this request no finite numbers to choose a token from"
"""Error of a sequence whose logits are NaN or infinite."""
NONE_LEFT = (
    "no token is left to choose: the grammar, allowed_token_ids, bad_words and min_tokens of this"
    " request together exclude every token"
)
"""Error of a sequence whose constraints exclude every token."""


@dataclass(slots=True)
class Sampled:
    """The runner's result for a chunk that samples."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of the token and its alternatives, if the request wants them."""
    error: str = ""
    """Reason why there is no token, with which the request fails; empty if there is one."""
    is_refused: bool = False
    """Whether the request caused the error, not the engine."""
    completes: bool = False
    """Whether the grammar allows no token after this one."""
    is_late: bool = False
    """Whether there is no token because the grammar's mask was not ready in time; the sequence
    samples in a later step."""
    following: tuple[Sampled, ...] = ()
    """Results behind this one, one for each proposed token that was sampled as proposed."""

    @property
    def error_record(self) -> ErrorRecord | None:
        """The error in the form in which the caller gets it; None if there is none."""
        if not self.error:
            return None
        kind = RequestError if self.is_refused else EngineError
        return ErrorRecord(self.error, kind.__name__)


def verified(plan: Plan, results: Iterable[Sampled]) -> list[Sampled]:
    """One result per chunk that samples, from the results of all their rows in the plan's order.

    A proposed token is accepted if it was sampled from the row before it. What was sampled behind
    the first one that was not is dropped.
    """
    if not any(chunk.proposed for chunk in plan):
        return list(results)
    rows = iter(results)
    kept = []
    for chunk in plan:
        if not chunk.samples:
            continue
        first = last = next(rows)
        following: list[Sampled] = []
        is_open = True
        for token_id in chunk.proposed:
            row = next(rows)
            is_open = is_open and last.token_id == token_id and not last.error
            if is_open:
                following.append(row)
                last = row
        kept.append(replace(first, following=tuple(following)) if following else first)
    return kept
