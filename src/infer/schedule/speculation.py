"""`Speculator`: which tokens are proposed for a sequence, so that one step can compute several"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from infer.config import SpeculativeConfig
from infer.schedule.cost_model import WIDE_ROWS, CostModel, StepCost, draft_counts, worthwhile
from infer.schedule.drafting import Drafter
from infer.schedule.ngram_index import Acceptance, Guesses, NgramIndex, Prediction
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Advanced, Chunk, Plan, Sequence
from infer.schedule.stats import SchedulerStats

CATCH_UP_SHARE = 0.25
"""Maximum time to catch up with a sequence, as a fraction of what its remaining tokens take without
speculation."""
TOKENS_TRIED = 4
"""Number of tokens that are drafted in a step to learn again what rows cost."""
TOKENS_EXPECTED = 256
"""Maximum of the number of remaining tokens that is assumed, as most answers end before their
limit."""

Allowed = Callable[[Sequence, tuple[int, ...]], tuple[int, ...]]
"""A function that cuts proposed tokens where a sequence's grammar forbids them."""


def _nothing(sequence: Sequence, proposed: tuple[int, ...]) -> tuple[int, ...]:
    return ()


class Speculator:
    """A proposal is a guess of the tokens that follow. A step computes them behind the sequence's
    last token, and the runner keeps those that it would have sampled one by one. So a proposal
    never changes a token; it only changes how many a step gives. Proposals are the tokens that have
    followed the same few tokens before (`NgramIndex`; Saxena 2023, "prompt lookup decoding"), those
    of a text that the caller expects (`Prediction`), or those of a smaller model (`Drafter`;
    Leviathan et al. 2023, "Fast inference from transformers via speculative decoding").

    Proposals are made where they pay, as `schedule.cost_model` says. The j-th proposed token of a
    sequence is accepted with a probability of about p^j, where p is measured per sequence. It is
    proposed if it gives more tokens per second than the step gives without it. A sequence whose
    proposals do not pay is tried again after a pause, which doubles each time. There are no
    proposals while they have lost too much.

    A draft model's passes cost time, too, and are made for all sequences at once. So the numbers of
    drafted tokens are decided for a step as a whole (`draft_counts`): another pass is made if it
    gives more tokens per second than the step gives without it. The scheduler has one if the
    settings ask for speculation.
    """

    def __init__(
        self,
        config: SpeculativeConfig,
        allocator: PageAllocator,
        stats: SchedulerStats,
        allowed: Allowed | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`allowed`: cuts the proposals for sequences with grammars; None: there are none.
        `drafter`: the draft model; None: proposals come from the n-gram index."""
        self._config = config
        self._drafter = drafter
        self._costs = CostModel(drafter.cost_ratio if drafter else 0.0)
        self._usual = Acceptance()
        self._knew_times = False
        self._allowed = allowed or _nothing
        self._allocator = allocator
        self._stats = stats

    def extend(self, plan: Plan, budget: int) -> list[Chunk]:
        """The plan with proposals behind chunks of decoding sequences.

        `budget`: tokens that the step has left. Pages for proposals are taken only if they are
        free.
        """
        if any(chunk.start + chunk.num_tokens <= chunk.sequence.num_prompt for chunk in plan):
            return list(plan)  # a step with prompts has rows enough
        if self._drafter is not None:
            return self._extend_with_drafts(plan, budget, self._drafter)
        costs, num_rows = self._costs, sum(chunk.num_tokens for chunk in plan)
        cost = costs.steps.cost(num_rows)
        is_known = cost is not None and costs.gain.knows(len(plan))
        if costs.is_plain(is_known) or not costs.gain.may_propose:
            return list(plan)
        price = (cost or costs.steps.assumed(num_rows)).price
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

    def _extend_with_drafts(self, plan: Plan, budget: int, drafter: Drafter) -> list[Chunk]:
        """`extend`, with proposals of the draft model and of predictions."""
        num_rows = sum(chunk.num_tokens for chunk in plan)
        cost = self._costs.steps.cost(num_rows)
        members, limits = [], []
        for chunk in plan:
            if chunk.samples and chunk.sequence.num_output and self._may_propose(chunk):
                members.append(chunk)
                limits.append(self._limit(chunk))
        if self._costs.is_plain(cost is not None):
            return list(plan)
        if cost is None:
            assumed, num_tried = self._costs.steps.assumed(num_rows), 0
            if self._knew_times:
                num_tried = TOKENS_TRIED
            wanted = self._draft_wishes(members, limits, assumed, drafter, num_tried)
            del wanted[1:]  # one sequence is enough to learn what rows cost
        else:
            self._knew_times = True
            wanted = self._draft_wishes(members, limits, cost, drafter)
        proposals: dict[int, tuple[int, ...]] = {}
        drafts: list[tuple[Sequence, int]] = []
        for sequence, count in wanted:
            guesses, count = self._guesses_of(sequence), min(count, budget)
            if count < 1:
                continue
            if predicted := guesses.propose_predicted(sequence.tokens, sequence.num_output, count):
                proposals[id(sequence)] = predicted
            else:
                drafts.append((sequence, count))
            budget -= count
        if drafts:
            drafted = drafter.propose(drafts, self._costs.passes.record)
            proposals |= {id(s): tokens for (s, _), tokens in zip(drafts, drafted, strict=True)}
        extended = []
        for chunk in plan:
            if proposed := proposals.get(id(chunk.sequence), ()):
                proposed = self._possible(chunk.sequence, proposed)
            extended.append(replace(chunk, proposed=proposed) if proposed else chunk)
        return extended

    def _draft_wishes(
        self,
        members: list[Chunk],
        limits: list[int],
        cost: StepCost,
        drafter: Drafter,
        num_tried: int = 0,
    ) -> list[tuple[Sequence, int]]:
        """How many tokens are to be proposed for which sequences.

        `num_tried`: number of tokens for a trial with any sequence; 0: trials are made with those
        sequences only for which proposals did not pay."""
        costs, ratio = self._costs, self._costs.passes.ratio(cost)
        # At this load, not even proposals that are all right would pay.
        if not any(draft_counts([1.0] * len(limits), limits, cost, ratio)):
            return []
        ready: list[tuple[Sequence, int]] = []
        trials: list[tuple[Sequence, int]] = []
        for chunk, limit in zip(members, limits, strict=True):
            sequence, guesses = chunk.sequence, self._guesses_of(chunk.sequence)
            limit = min(limit, drafter.room(sequence))
            if limit < 1 or guesses.is_paused():
                continue
            behind = drafter.num_behind(sequence)
            behind_ms = behind * costs.passes.wide_row_ms(cost)
            if num_tried or guesses.is_on_trial:
                count = min(limit, max(1, num_tried))
                pass_ms = ratio * cost.step_of(1)
                price = (behind_ms + count * (pass_ms + cost.row_ms)) / cost.step_ms
                if price <= costs.trials.left and not (num_tried and trials):
                    costs.trials.spend(price)
                    trials.append((sequence, count))
                continue
            left = min(TOKENS_EXPECTED, sequence.max_length - len(sequence.tokens))
            usual_ms = left * cost.step_ms / cost.num_rows
            if behind <= WIDE_ROWS or behind_ms <= CATCH_UP_SHARE * usual_ms:
                ready.append((sequence, limit))
        acceptance = [self._guesses_of(sequence).acceptance for sequence, _ in ready]
        counts = draft_counts(acceptance, [limit for _, limit in ready], cost, ratio)
        wanted = [
            (sequence, count) for (sequence, _), count in zip(ready, counts, strict=True) if count
        ]
        for (sequence, _), count in zip(ready, counts, strict=True):
            if not count:
                self._guesses_of(sequence).pause()
        return wanted + trials

    def _may_propose(self, chunk: Chunk) -> bool:
        """Whether tokens may be drafted for a sequence. Not with a request with which an engine has
        died: the draft model might be the reason."""
        request = chunk.sequence.request
        return request.sampling.speculation and not request.num_crashes and self._limit(chunk) > 0

    def _guesses_of(self, sequence: Sequence) -> Guesses:
        """What is known about a sequence's proposals; made the first time."""
        if sequence.guesses is None:
            least, most = self._config.prompt_lookup_min, self._config.prompt_lookup_max
            predicted = sequence.request.prediction_token_ids
            prediction = Prediction(predicted, least, most) if predicted else None
            index = NgramIndex(least, most)
            # A prediction is trusted at first; else what others have had is the best estimate.
            first = 1.0 if prediction else self._usual.rate
            sequence.guesses = Guesses(index, prediction, first)
        return sequence.guesses

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
        guesses = self._guesses_of(sequence)
        if guesses.is_paused():
            return ()
        # What was appended in a pause is read at its end, which is faster than piece by piece.
        if not guesses.index.read(sequence.tokens):
            return ()
        count = worthwhile(guesses.acceptance, price, limit)
        if not count and (price >= 1 or not guesses.is_on_trial):
            guesses.pause()  # at a price of 1, not even a proposal that is right would pay
            return ()
        count = max(1, count)
        proposed = guesses.propose(sequence.tokens, sequence.num_output, count)
        return self._possible(sequence, proposed)

    def _possible(self, sequence: Sequence, proposed: tuple[int, ...]) -> tuple[int, ...]:
        """The leading proposed tokens that the grammar allows, and for which pages are free."""
        if proposed and sequence.request.is_restricted:
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
            num_rows = sum(advanced.chunk.num_rows for advanced in step)
            self._costs.record(len(step), num_rows, step_ms)

    def drafting_ms(self) -> float:
        """Time that was spent on drafts since the last call, in milliseconds."""
        return 0.0 if self._drafter is None else self._drafter.take_ms()

    def forget(self, sequence: Sequence) -> None:
        """Give back what the draft model has of a sequence that has ended or lost its pages."""
        if self._drafter is not None:
            self._drafter.release(sequence.request_id)

    def settle(self, advanced: Advanced, num_accepted: int, num_kept: int) -> None:
        """Count the proposed tokens that the sequence got as computed, and learn from them. The
        cells of the others are written again, or given back.

        `num_accepted`: tokens that were sampled as proposed; `num_kept`: those of them that the
        sequence got before it ended.
        """
        sequence, allocator = advanced.chunk.sequence, self._allocator
        self._stats.num_computed_tokens += num_kept
        sequence.tenant_share.num_tokens += num_kept
        if sequence.num_preemptions == advanced.num_preemptions:
            if allocator.keeps_computed:
                sequence.num_computed = end = advanced.end + num_kept
                if (sequence.table.num_indexed + 1) * allocator.page_size <= end:
                    allocator.commit(sequence.table, sequence.tokens, end)
            allocator.shrink(sequence.table, len(sequence.tokens))
        self._learn(advanced.chunk, num_accepted, num_kept)

    def _learn(self, chunk: Chunk, num_accepted: int, num_kept: int) -> None:
        guesses, num_proposed, stats = chunk.sequence.guesses, len(chunk.proposed), self._stats
        if guesses is not None:
            guesses.record(num_proposed, num_accepted, num_kept)
            if guesses.is_on_trial and num_accepted < num_proposed:
                guesses.pause()
            self._usual.record(min(num_proposed, num_accepted + 1), num_accepted)
        self._costs.gain.gained(num_kept)
        stats.num_drafts += 1
        stats.num_draft_tokens += num_proposed
        stats.num_accepted_tokens += num_kept
        for position in range(num_kept):
            stats.num_accepted_at[position] += 1
