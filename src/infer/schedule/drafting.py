"""`Drafter`: proposes tokens with a draft model, a smaller model of the same vocabulary"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

from infer.errors import DeviceLostError
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Chunk, Plan, Sampled, Sequence
from infer.types import Request, SamplingParams

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of failed drafts in a row after which nothing is drafted any more."""


class DraftRunner(Protocol):
    """Computes chunks with the draft model."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """Compute every chunk; returns one result per chunk that samples, in the plan's order."""


class PassRecorder(Protocol):
    """Learns how long the draft model takes."""

    def __call__(self, num_rows: int, pass_ms: float) -> None:
        """A pass over `num_rows` tokens took `pass_ms` milliseconds."""


@dataclass(slots=True, eq=False)
class _Draft:
    """A sequence as the draft model has it."""

    sequence: Sequence
    """Copy of the sequence, with pages of the draft model's cache and drafted tokens at its end."""
    num_known: int
    """Number of its tokens that are no drafted ones."""


class Drafter:
    """The draft model's keys and values have an allocator of their own, and each sequence has a
    second page table there. Nothing in it is ever missed: what the draft model has not computed of
    a sequence (its prompt, what plain steps have generated, all of it after a preemption) is
    computed when tokens are next wanted, in parts of bounded size. So the draft model costs nothing
    while it does not propose.

    Tokens are drafted for all sequences at once. The first pass computes what is missing and
    samples; each further pass computes the token sampled last. A draft is sampled with the
    request's own parameters, seed and position, as the verification samples. So drawn tokens agree
    as often as the two models' probabilities do. Which tokens are accepted never depends on how
    they were drafted.

    Used by `schedule.speculation`. It knows no tensors: the runner is injected.
    """

    def __init__(
        self,
        runner: DraftRunner,
        allocator: PageAllocator,
        clock: Callable[[], float],
        *,
        vocab_size: int,
        max_seq_len: int,
        max_tokens: int,
        cost_ratio: float = 0.25,
    ) -> None:
        """`runner`, `allocator`: of the draft model. `vocab_size`, `max_seq_len`: its limits in
        tokens. `max_tokens`: the most tokens of a pass. `cost_ratio`: time of a pass as a fraction
        of a step's, as far as that is known beforehand."""
        self._runner = runner
        self.allocator = allocator
        self._clock = clock
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._max_tokens = max_tokens
        self.cost_ratio = cost_ratio
        self._drafts: dict[str, _Draft] = {}
        self._num_failures = 0
        self._took_ms = 0.0

    @property
    def num_sequences(self) -> int:
        """Number of sequences of which the draft model has pages."""
        return len(self._drafts)

    def room(self, sequence: Sequence) -> int:
        """Number of tokens that can be drafted behind the sequence's last one."""
        if self._num_failures >= MAX_FAILURES:
            return 0
        return max(0, self._max_seq_len - len(sequence.tokens))

    def num_behind(self, sequence: Sequence) -> int:
        """Number of tokens that the draft model has to compute before it samples."""
        draft = self._drafts.get(sequence.request_id)
        done = 0 if draft is None else min(draft.sequence.num_computed, draft.num_known)
        return len(sequence.tokens) - done

    def take_ms(self) -> float:
        """Time of all passes since the last call, in milliseconds."""
        took_ms, self._took_ms = self._took_ms, 0.0
        return took_ms

    def release(self, request_id: str) -> None:
        """Give a sequence's pages back; if it goes on, they are computed again."""
        if (draft := self._drafts.pop(request_id, None)) is not None:
            self.allocator.release(draft.sequence.table)

    def propose(
        self, wanted: Seq[tuple[Sequence, int]], record: PassRecorder
    ) -> list[tuple[int, ...]]:
        """Up to as many tokens for each sequence as are wanted, at least 1.

        None for a sequence that the draft model has not caught up with yet. A failure of the draft
        model is logged, and proposes nothing.
        """
        try:
            proposals = self._propose(wanted, record)
        except DeviceLostError:
            raise
        except Exception:
            self._num_failures += 1
            off = "; nothing is drafted any more" if self._num_failures == MAX_FAILURES else ""
            log.exception("the draft model fails%s", off)
            for request_id in list(self._drafts):
                self.release(request_id)
            return [()] * len(wanted)
        self._num_failures = 0
        return proposals

    def _propose(
        self, wanted: Seq[tuple[Sequence, int]], record: PassRecorder
    ) -> list[tuple[int, ...]]:
        drafts = [self._caught_up(sequence) for sequence, _ in wanted]
        order = sorted(
            (i for i, draft in enumerate(drafts) if draft is not None),
            key=lambda i: self.num_behind(wanted[i][0]),
        )
        budget, plan, active = self._max_tokens, [], []
        for i in order:
            draft, count = drafts[i], wanted[i][1]
            assert draft is not None
            sequence = draft.sequence
            num_tokens = min(sequence.num_remaining, budget)
            # The last drafted token is not computed.
            length = len(sequence.tokens) + count - 1
            if num_tokens and self.allocator.grow(sequence.table, length):
                budget -= num_tokens
                plan.append(Chunk(sequence, sequence.num_computed, num_tokens))
                if num_tokens == sequence.num_remaining:
                    active.append(i)
        proposals: list[list[int]] = [[] for _ in wanted]
        while plan:
            results = iter(self._compute(plan, record))
            plan = []
            for i in active:
                draft, result = drafts[i], next(results)
                assert draft is not None
                sequence, proposal = draft.sequence, proposals[i]
                if result.error or result.token_id >= self._vocab_size:
                    continue
                proposal.append(result.token_id)
                sequence.tokens.append(result.token_id)
                if len(proposal) < wanted[i][1] and not _ends(sequence):
                    plan.append(Chunk(sequence, sequence.num_computed, 1))
            going_on = {id(chunk.sequence) for chunk in plan}
            active = [i for i in active if _is_in(drafts[i], going_on)]
        return [tuple(proposal) for proposal in proposals]

    def _compute(self, plan: list[Chunk], record: PassRecorder) -> Seq[Sampled]:
        started_s = self._clock()
        results = self._runner.execute(tuple(plan))
        took_ms = 1000 * (self._clock() - started_s)
        self._took_ms += took_ms
        record(sum(chunk.num_tokens for chunk in plan), took_ms)
        for chunk in plan:
            chunk.sequence.num_computed += chunk.num_tokens
        return results

    def _caught_up(self, sequence: Sequence) -> _Draft | None:
        """The draft model's copy of a sequence, with the sequence's tokens; None if it has a token
        that the draft model does not know."""
        draft, tokens = self._drafts.get(sequence.request_id), sequence.tokens
        if draft is None:
            if max(tokens) >= self._vocab_size:
                return None
            draft = self._begun(sequence)
        copy, end = draft.sequence, draft.num_known
        if max(tokens[end:], default=0) >= self._vocab_size:
            return None
        shared = min(len(copy.tokens), len(tokens))
        while end < shared and copy.tokens[end] == tokens[end]:
            end += 1
        copy.tokens[end:] = tokens[end:]
        # Cells behind the last accepted token are written again; one token is left to sample from.
        copy.num_computed = min(copy.num_computed, end, len(tokens) - 1)
        draft.num_known = len(tokens)
        allocator, table = self.allocator, copy.table
        allocator.commit(table, copy.tokens, copy.num_computed)
        allocator.adopt(table, copy.tokens)
        copy.num_computed = max(copy.num_computed, table.num_indexed * allocator.page_size)
        return draft

    def _begun(self, sequence: Sequence) -> _Draft:
        """A copy of a sequence without anything of its own computed."""
        request = sequence.request
        plain = replace(
            request,
            sampling=replace(request.sampling, logprobs=None, prompt_logprobs=None, grammar=None),
            thought_end=(),
            logits_at=(),
        )
        copy = Sequence.from_request(plain, sequence.arrival)
        copy.tokens = list(sequence.tokens)
        copy.table = self.allocator.match(copy.tokens, request.cache_scope, request.num_public)
        draft = self._drafts[sequence.request_id] = _Draft(copy, len(copy.tokens))
        return draft

    def try_out(self) -> str:
        """Draft two tokens of a trial sequence; returns why that failed, or ""."""
        request = Request("trial", (0,), SamplingParams(temperature=0.0, max_tokens=4), 1, 4)
        try:
            proposals = self._propose([(Sequence.from_request(request, 0), 2)], lambda *_: None)
        except Exception as error:
            log.exception("a trial of the draft model fails")
            return f"{type(error).__name__}: {error}"
        finally:
            self.release("trial")
        return "" if proposals[0] else "it samples no token"

    def check(self) -> None:
        """Assert the invariants between sequences and pages. For tests."""
        for draft in self._drafts.values():
            copy = draft.sequence
            assert copy.table.num_indexed * self.allocator.page_size <= draft.num_known
            assert copy.num_computed <= len(copy.table.pages) * self.allocator.page_size
        self.allocator.check([draft.sequence.table for draft in self._drafts.values()])


def _ends(sequence: Sequence) -> bool:
    """Whether the last token ends the sequence if it is accepted."""
    is_end = sequence.tokens[-1] in sequence.end_token_ids
    return is_end and sequence.num_output > sequence.request.sampling.min_tokens


def _is_in(draft: _Draft | None, sequences: set[int]) -> bool:
    return draft is not None and id(draft.sequence) in sequences
