"""`Speculator`: which tokens are proposed for a sequence, so that one step can compute several

A proposal is a guess of the tokens that follow. A step computes them behind the sequence's last
token, and the runner keeps those that it would have sampled one by one. So a proposal never changes
a token; it only changes how many a step gives. Proposals are the tokens that have followed the same
few tokens before (`NgramIndex`; Saxena 2023, "prompt lookup decoding"), or those of a text that the
caller expects (`Prediction`).

Proposals are made where they pay. Step times are fitted by a line over the number of rows of a step
(`StepCosts`). The j-th proposed token of a sequence is accepted with a probability of about p^j,
where p is measured per sequence. It is proposed if it gives more tokens per second than the step
gives without it. A sequence whose proposals do not pay is tried again after a pause, which doubles
each time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from infer.config import SpeculativeConfig
from infer.schedule.ngram_index import Guesses, NgramIndex, Prediction
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Advanced, Chunk, Plan, Sequence
from infer.schedule.stats import SchedulerStats

ASSUMED_PRICE = 0.25
"""price of a row while the times of steps do not say it"""
BLIND_STEPS = 16
"""number of steps without a known price after which one has no proposals, so that the times of
steps with and without them can be compared"""
STEPS_REMEMBERED = 0.98
"""factor of the weight of earlier steps in the fit of step times"""


Allowed = Callable[[Sequence, tuple[int, ...]], tuple[int, ...]]
"""A function that cuts proposed tokens where a sequence's grammar forbids them."""


def _nothing(sequence: Sequence, proposed: tuple[int, ...]) -> tuple[int, ...]:
    return ()


class StepCosts:
    """The time of a step as a line over its rows, fitted to recent steps."""

    def __init__(self) -> None:
        self._weight = self._rows = self._ms = self._rows2 = self._rows_ms = 0.0

    def record(self, num_rows: int, step_ms: float) -> None:
        """Learn from a step without prompts that took `step_ms` milliseconds."""
        keep = STEPS_REMEMBERED
        self._weight = keep * self._weight + 1
        self._rows = keep * self._rows + num_rows
        self._ms = keep * self._ms + step_ms
        self._rows2 = keep * self._rows2 + num_rows * num_rows
        self._rows_ms = keep * self._rows_ms + num_rows * step_ms

    def price_of_row(self, num_rows: int) -> float | None:
        """Number of tokens that a step of `num_rows` rows gives in the time of one more row.

        It is 1 at most, because a step has some cost of its own. None if it is not known yet.
        """
        if self._weight < 4:
            return None
        mean, mean_ms = self._rows / self._weight, self._ms / self._weight
        variance = self._rows2 / self._weight - mean * mean
        if variance < 0.05:
            return None
        slope = max(0.0, (self._rows_ms / self._weight - mean * mean_ms) / variance)
        step_ms = mean_ms + slope * (num_rows - mean)
        return min(1.0, num_rows * slope / step_ms) if step_ms > 0 else 1.0


class Speculator:
    """See the module's docstring. The scheduler has one if the settings ask for speculation."""

    def __init__(
        self,
        config: SpeculativeConfig,
        allocator: PageAllocator,
        stats: SchedulerStats,
        allowed: Allowed | None = None,
    ) -> None:
        """`allowed`: cuts the proposals for sequences with grammars; None: there are none."""
        self._config = config
        self._allowed = allowed or _nothing
        self._allocator = allocator
        self._stats = stats
        self._costs = StepCosts()
        self._num_blind = 0

    def extend(self, plan: Plan, budget: int) -> list[Chunk]:
        """The plan with proposals behind chunks of decoding sequences.

        `budget`: tokens that the step has left. Pages for proposals are taken only if they are
        free.
        """
        if any(chunk.start + chunk.num_tokens <= chunk.sequence.num_prompt for chunk in plan):
            return list(plan)  # a step with prompts has rows enough
        num_rows = sum(chunk.num_tokens for chunk in plan)
        price = self._costs.price_of_row(num_rows)
        if price is None:
            price = ASSUMED_PRICE
            self._num_blind += 1
            if self._num_blind % BLIND_STEPS == 0:
                return list(plan)
        extended = []
        for chunk in plan:
            proposed: tuple[int, ...] = ()
            if budget > 0 and chunk.samples and chunk.sequence.num_output:
                proposed = self._propose(chunk.sequence, min(budget, self._limit(chunk)), price)
                budget -= len(proposed)
            extended.append(
                Chunk(chunk.sequence, chunk.start, chunk.num_tokens, proposed)
                if proposed
                else chunk
            )
        return extended

    def _limit(self, chunk: Chunk) -> int:
        """Maximum number of proposed tokens, the sequence's end considered: the step gives one
        more than are accepted."""
        sequence = chunk.sequence
        left = sequence.max_length - len(sequence.tokens) - 1
        return min(self._config.num_speculative_tokens, left)

    def _propose(self, sequence: Sequence, limit: int, price: float) -> tuple[int, ...]:
        sampling = sequence.request.sampling
        if limit < 1 or not sampling.speculation:
            return ()
        if sequence.guesses is None:
            least, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            predicted = sequence.request.prediction_token_ids
            prediction = Prediction(predicted, least, most) if predicted else None
            sequence.guesses = Guesses(NgramIndex(least, most), prediction)
        guesses = sequence.guesses
        if not guesses.index.read(sequence.tokens) or guesses.is_paused():
            return ()
        count = worthwhile(guesses.acceptance, price, limit)
        if not count and not guesses.is_on_trial:
            guesses.pause()
            return ()
        count = max(1, count)
        proposed = guesses.propose(sequence.tokens, sequence.num_output, count)
        if proposed and sampling.grammar is not None:
            proposed = self._allowed(sequence, proposed)
        if not proposed:
            return ()
        pages = len(sequence.table.pages) * self._allocator.page_size
        if len(sequence.tokens) + len(proposed) > pages and not self._allocator.grow(
            sequence.table, len(sequence.tokens) + len(proposed)
        ):
            proposed = proposed[: pages - len(sequence.tokens)]
        return proposed

    def record(self, step: Seq[Advanced], step_ms: float) -> None:
        """Learn from the time of a step, unless it had prompts."""
        if step and not any(advanced.is_prompt for advanced in step):
            self._costs.record(sum(advanced.chunk.num_rows for advanced in step), step_ms)

    def learn(self, chunk: Chunk, num_accepted: int, num_kept: int) -> None:
        """Learn from a verified proposal.

        `num_accepted`: tokens that were sampled as proposed; `num_kept`: those of them that the
        sequence got before it ended.
        """
        guesses, num_proposed, stats = chunk.sequence.guesses, len(chunk.proposed), self._stats
        if guesses is not None:
            guesses.record(num_proposed, num_accepted, num_kept)
            if guesses.is_on_trial and num_accepted < num_proposed:
                guesses.pause()
        stats.num_drafts += 1
        stats.num_draft_tokens += num_proposed
        stats.num_accepted_tokens += num_kept
        for position in range(num_kept):
            stats.num_accepted_at[position] += 1


def worthwhile(acceptance: float, price: float, limit: int) -> int:
    """Number of tokens to propose: as long as the next one is accepted with a probability above
    `price`, the number of tokens that the same time would give otherwise."""
    count, probability = 0, acceptance
    while count < limit and probability > price:
        count, probability = count + 1, probability * acceptance
    return count
