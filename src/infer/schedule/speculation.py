"""`Speculator`: which tokens are proposed for a sequence, so that one step can compute several

A proposal is a guess of the tokens that follow. A step computes them behind the sequence's last
token, and the runner keeps those that it would have sampled one by one. So a proposal never changes
a token; it only changes how many a step gives. Proposals are the tokens that have followed the same
few tokens before (`NgramIndex`; Saxena 2023, "prompt lookup decoding"), those of a text that the
caller expects (`Prediction`), or those of a smaller model (`Drafter`; Leviathan et al. 2023,
"Fast inference from transformers via speculative decoding").

Proposals are made where they pay. Step times are fitted by a line over the number of rows of a step
(`StepCosts`). The j-th proposed token of a sequence is accepted with a probability of about p^j,
where p is measured per sequence. It is proposed if it gives more tokens per second than the step
gives without it. A sequence whose proposals do not pay is tried again after a pause, which doubles
each time. A line is a rough model where rows are computed in groups, so what proposals have cost
and given is also counted (`Balance`), and there are none while they have lost too much.

A draft model's passes cost time, too, and are made for all sequences at once. So the numbers of
drafted tokens are decided for a step as a whole (`draft_counts`): another pass is made if it gives
more tokens per second than the step gives without it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from infer.config import SpeculativeConfig
from infer.schedule.drafting import Drafter
from infer.schedule.ngram_index import Acceptance, Guesses, NgramIndex, Prediction
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Advanced, Chunk, Plan, Sequence
from infer.schedule.stats import SchedulerStats

ASSUMED_PRICE = 0.25
"""price of a row while the times of steps do not say it"""
BLIND_STEPS = 16
"""number of steps without a known price after which one has no proposals, so that the times of
steps with and without them can be compared"""
MAX_ROWS_OF_PASS = 64
"""number of tokens up to which a pass of the draft model counts for the time of later ones"""
MAX_BEHIND = 32
"""number of tokens that the draft model may have to catch up with whatever that costs"""
CATCH_UP_SHARE = 0.25
"""maximum time to catch up with a sequence, as a fraction of what its remaining tokens take without
speculation"""
MARGIN = 1.03
"""factor by which drafting must be faster than plain steps, as times are estimates"""
TRIAL_SHARE = 0.01
"""fraction of the time of steps that may be spent on trials of the draft model"""
LOST_SHARE = 0.01
"""fraction of the time of steps that other proposals may lose beyond what their tokens are worth"""
UNKNOWN_STEPS = 8
"""number of steps after which one has no proposals, while the time of such a step is unknown"""
MAX_LOST_STEPS = 4.0
"""maximum of the saved up time for such losses, in steps"""
MAX_TRIAL_STEPS = 8.0
"""maximum of the saved up time for trials, in steps"""
TOKENS_TRIED = 4
"""number of tokens that are drafted in a step to learn again what rows cost"""
TOKENS_EXPECTED = 256
"""maximum of the number of remaining tokens that is assumed, as most answers end before their
limit"""
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
        if (times := self.times(num_rows)) is None:
            return None
        step_ms, row_ms = times
        return min(1.0, num_rows * row_ms / step_ms) if step_ms > 0 else 1.0

    @property
    def mean_ms(self) -> float | None:
        """Mean time of recent steps, in milliseconds; None before the first."""
        return self._ms / self._weight if self._weight else None

    def times(self, num_rows: int) -> tuple[float, float] | None:
        """(time of a step of `num_rows` rows, time of one more row), in milliseconds; None if they
        are not known yet."""
        if self._weight < 4:
            return None
        mean, mean_ms = self._rows / self._weight, self._ms / self._weight
        variance = self._rows2 / self._weight - mean * mean
        if variance < 0.05:
            return None
        slope = max(0.0, (self._rows_ms / self._weight - mean * mean_ms) / variance)
        return mean_ms + slope * (num_rows - mean), slope


class Balance:
    """What proposals have cost and given in relation to steps without them, in steps."""

    def __init__(self) -> None:
        self._plain_ms: dict[int, float] = {}
        """number of sequences → time of a step without proposals"""
        self._left = MAX_LOST_STEPS
        self._token = 0.0
        self._num_unknown = 0

    def may_propose(self, num_sequences: int) -> bool:
        """Whether there may be proposals in a step: they have not lost too much. Some steps are
        without them while the time of such a step is not known."""
        if num_sequences not in self._plain_ms:
            self._num_unknown += 1
            if self._num_unknown % UNKNOWN_STEPS == 0:
                return False
        return self._left > 0

    def record(self, num_sequences: int, num_proposed: int, step_ms: float) -> None:
        """Learn from a step without prompts; `gained` follows for the accepted ones of its
        proposed tokens."""
        self._token = 1 / num_sequences
        self._left = min(MAX_LOST_STEPS, self._left + LOST_SHARE)
        plain_ms = self._plain_ms.get(num_sequences, step_ms)
        if num_proposed:
            # A step may be late for reasons of its own.
            self._left -= min(1.0 + num_proposed, step_ms / max(plain_ms, 1e-6) - 1)
        else:
            usual_ms = min(step_ms, 2 * plain_ms)
            self._plain_ms[num_sequences] = plain_ms + (usual_ms - plain_ms) / 8

    def gained(self, num_tokens: int) -> None:
        """Count proposed tokens of the latest step that were accepted."""
        self._left = min(MAX_LOST_STEPS, self._left + num_tokens * self._token)


class DraftTimes:
    """The times of the draft model's passes, in relation to those of steps."""

    def __init__(self, assumed: float) -> None:
        """`assumed`: time of a pass as a fraction of a step's, before any pass was timed."""
        self._assumed = assumed
        self._weight = self._rows = self._ms = 0.0
        self._wide_rows = self._wide_ms = 0.0

    def record(self, num_rows: int, pass_ms: float) -> None:
        """Learn from a pass over `num_rows` tokens that took `pass_ms` milliseconds."""
        keep = STEPS_REMEMBERED
        if num_rows > MAX_ROWS_OF_PASS:
            self._wide_rows = keep * self._wide_rows + num_rows
            self._wide_ms = keep * self._wide_ms + pass_ms
        else:
            self._weight = keep * self._weight + 1
            self._rows = keep * self._rows + num_rows
            self._ms = keep * self._ms + pass_ms

    def ratio(self, step_ms: float, row_ms: float, num_rows: int) -> float:
        """Time of a pass as a fraction of the time of a step of as many rows.

        `step_ms`, `row_ms`: time of a step of `num_rows` rows, and of one more row.
        """
        if self._weight < 1.0:
            return self._assumed
        mean = self._rows / self._weight
        return self._ms / self._weight / max(row_ms, step_ms + row_ms * (mean - num_rows), 1e-6)

    def wide_row_ms(self, row_ms: float) -> float:
        """Time of a token in a pass over many, in milliseconds. `row_ms`: time of one more row of
        a step."""
        if not self._wide_rows:
            return self._assumed * row_ms
        return self._wide_ms / self._wide_rows


class Speculator:
    """See the module's docstring. The scheduler has one if the settings ask for speculation."""

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
        self._draft_times = DraftTimes(drafter.cost_ratio if drafter else 0.0)
        self._usual = Acceptance()
        self._knew_times = False
        self._trial_steps = MAX_TRIAL_STEPS
        """time that may be spent on trials, in steps"""
        self._balance = Balance()
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
        if self._drafter is not None:
            return self._extend_with_drafts(plan, budget, self._drafter)
        num_rows = sum(chunk.num_tokens for chunk in plan)
        price = self._costs.price_of_row(num_rows)
        if price is None:
            price = ASSUMED_PRICE
            self._num_blind += 1
            if self._num_blind % BLIND_STEPS == 0:
                return list(plan)
        if not self._balance.may_propose(len(plan)):
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

    def _extend_with_drafts(self, plan: Plan, budget: int, drafter: Drafter) -> list[Chunk]:
        """`extend`, with proposals of the draft model and of predictions."""
        num_rows = sum(chunk.num_tokens for chunk in plan)
        times = self._costs.times(num_rows)
        members, limits = [], []
        for chunk in plan:
            if chunk.samples and chunk.sequence.num_output and self._may_propose(chunk):
                members.append(chunk)
                limits.append(self._limit(chunk))
        if times is None:
            self._num_blind += 1
            if self._num_blind % BLIND_STEPS == 0:
                return list(plan)
            step_ms = self._costs.mean_ms or 1.0
            assumed = step_ms, ASSUMED_PRICE * step_ms / num_rows
            num_tried = TOKENS_TRIED if self._knew_times else 0
            wanted = self._draft_wishes(members, limits, num_rows, assumed, drafter, num_tried)
            del wanted[1:]  # one sequence is enough to learn what rows cost
        else:
            self._knew_times = True
            wanted = self._draft_wishes(members, limits, num_rows, times, drafter)
        found: dict[int, tuple[int, ...]] = {}
        drafts: list[tuple[Sequence, int]] = []
        for sequence, count in wanted:
            guesses, count = self._guesses_of(sequence), min(count, budget)
            if count < 1:
                continue
            if predicted := guesses.propose_predicted(sequence.tokens, sequence.num_output, count):
                found[id(sequence)] = predicted
            else:
                drafts.append((sequence, count))
            budget -= count
        if drafts:
            drafted = drafter.propose(drafts, self._draft_times.record)
            found |= {id(s): tokens for (s, _), tokens in zip(drafts, drafted, strict=True)}
        extended = []
        for chunk in plan:
            if proposed := found.get(id(chunk.sequence), ()):
                proposed = self._possible(chunk.sequence, proposed)
            extended.append(replace(chunk, proposed=proposed) if proposed else chunk)
        return extended

    def _draft_wishes(
        self,
        members: list[Chunk],
        limits: list[int],
        num_rows: int,
        times: tuple[float, float],
        drafter: Drafter,
        num_tried: int = 0,
    ) -> list[tuple[Sequence, int]]:
        """How many tokens are to be proposed for which sequences.

        `num_tried`: number of tokens for a trial with any sequence; 0: trials are made with those
        sequences only for which proposals did not pay."""
        step_ms, row_ms = times
        ratio = self._draft_times.ratio(step_ms, row_ms, num_rows)

        def counts(acceptance: list[float], limits: list[int]) -> list[int]:
            return draft_counts(acceptance, limits, num_rows, step_ms, row_ms, ratio)

        # At this load, not even proposals that are all right would pay.
        if not any(counts([1.0] * len(limits), limits)):
            return []
        ready: list[tuple[Sequence, int]] = []
        trials: list[tuple[Sequence, int]] = []
        for chunk, limit in zip(members, limits, strict=True):
            sequence, guesses = chunk.sequence, self._guesses_of(chunk.sequence)
            limit = min(limit, drafter.room(sequence))
            if limit < 1 or guesses.is_paused():
                continue
            behind = drafter.num_behind(sequence)
            behind_ms = behind * self._draft_times.wide_row_ms(row_ms)
            if num_tried or guesses.is_on_trial:
                count = min(limit, max(1, num_tried))
                pass_ms = ratio * max(row_ms, step_ms + row_ms * (1 - num_rows))
                cost = (behind_ms + count * (pass_ms + row_ms)) / step_ms
                if cost <= self._trial_steps and not (num_tried and trials):
                    self._trial_steps -= cost
                    trials.append((sequence, count))
                continue
            left = min(TOKENS_EXPECTED, sequence.max_length - len(sequence.tokens))
            if behind <= MAX_BEHIND or behind_ms <= CATCH_UP_SHARE * left * step_ms / num_rows:
                ready.append((sequence, limit))
        acceptance = [self._guesses_of(sequence).acceptance for sequence, _ in ready]
        found = counts(acceptance, [limit for _, limit in ready])
        wanted = [
            (sequence, count) for (sequence, _), count in zip(ready, found, strict=True) if count
        ]
        for (sequence, _), count in zip(ready, found, strict=True):
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
        if proposed and sequence.request.sampling.grammar is not None:
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
            self._costs.record(num_rows, step_ms)
            self._balance.record(len(step), num_rows - len(step), step_ms)
            self._trial_steps = min(MAX_TRIAL_STEPS, self._trial_steps + TRIAL_SHARE)

    def drafting_ms(self) -> float:
        """Time that was spent on drafts since the last call, in milliseconds."""
        return 0.0 if self._drafter is None else self._drafter.take_ms()

    def forget(self, sequence: Sequence) -> None:
        """Give back what the draft model has of a sequence that has ended or lost its pages."""
        if self._drafter is not None:
            self._drafter.release(sequence.request_id)

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
            self._usual.record(min(num_proposed, num_accepted + 1), num_accepted)
        self._balance.gained(num_kept)
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


def draft_counts(
    acceptance: Seq[float],
    limits: Seq[int],
    num_rows: int,
    step_ms: float,
    row_ms: float,
    ratio: float,
) -> list[int]:
    """Number of tokens to draft for each sequence of a step, so that it gives most tokens a second.

    `acceptance`, `limits`: for each sequence, the probability that a drafted token is accepted, and
    the maximum number of them. `num_rows`: rows of the step without proposals, each of which gives
    a token. `step_ms`, `row_ms`: time of that step, and of one more row of it. `ratio`: time of a
    pass of the draft model as a fraction of a step of as many rows.
    """
    counts, probabilities = [0] * len(limits), list(acceptance)
    best, gained, took_ms = list(counts), float(num_rows), step_ms
    best_rate = gained / took_ms * MARGIN
    members = list(range(len(limits)))
    for number in range(max(limits, default=0)):
        members = [
            i
            for i in members
            if counts[i] < limits[i] and probabilities[i] * took_ms > (1 + ratio) * row_ms * gained
        ]
        # The first pass also computes the token behind the last draft.
        num_drafted = len(members) * (1 if number else 2)
        pass_ms = ratio * max(row_ms, step_ms + row_ms * (num_drafted - num_rows))
        gained += sum(probabilities[i] for i in members)
        took_ms += pass_ms + row_ms * len(members)
        for i in members:
            counts[i] += 1
            probabilities[i] *= acceptance[i]
        if gained / took_ms > best_rate:
            best, best_rate = list(counts), gained / took_ms
        elif number or not members:
            break  # each later pass gives less than the one before
    return best
