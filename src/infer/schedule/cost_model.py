"""`CostModel`: what steps, rows and passes of a draft model cost, and what speculation may lose"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

ASSUMED_PRICE = 0.25
"""Price of a row while the times of steps do not say it."""
PLAIN_EVERY = 8
"""Number of steps after which one has no proposals, while the time of such a step is unknown."""
WIDE_ROWS = 64
"""Number of tokens from which a pass of the draft model is one of many: its time says nothing about
the time of a pass of a token per sequence."""
MARGIN = 1.03
"""Factor by which drafting must be faster than plain steps, as times are estimates."""
RISKED_SHARE = 0.01
"""Fraction of the time of steps that may be lost on proposals."""
MAX_RISKED_STEPS = 8.0
"""Maximum of the saved up time for such losses, in steps."""
STEPS_REMEMBERED = 0.98
"""Factor of the weight of earlier steps in all means."""


class StepCost(NamedTuple):
    """The time of a step without proposals."""

    num_rows: int
    step_ms: float
    row_ms: float
    """Time of one more row."""

    @property
    def price(self) -> float:
        """Number of tokens that the step gives in the time of one more row.

        It is 1 at most, because a step has some cost of its own."""
        return min(1.0, self.num_rows * self.row_ms / self.step_ms) if self.step_ms > 0 else 1.0

    def step_of(self, num_rows: float) -> float:
        """Time of a step of `num_rows` rows, in milliseconds."""
        return max(self.row_ms, self.step_ms + self.row_ms * (num_rows - self.num_rows))


class StepTimes:
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

    def cost(self, num_rows: int) -> StepCost | None:
        """The cost of a step of `num_rows` rows; None if it is not known yet."""
        if self._weight < 4:
            return None
        mean, mean_ms = self._rows / self._weight, self._ms / self._weight
        variance = self._rows2 / self._weight - mean * mean
        if variance < 0.05:
            return None
        slope = max(0.0, (self._rows_ms / self._weight - mean * mean_ms) / variance)
        return StepCost(num_rows, mean_ms + slope * (num_rows - mean), slope)

    def assumed(self, num_rows: int) -> StepCost:
        """A guess of the cost, while it is not known."""
        step_ms = self._ms / self._weight if self._weight else 1.0
        return StepCost(num_rows, step_ms, ASSUMED_PRICE * step_ms / num_rows)


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
        if num_rows > WIDE_ROWS:
            self._wide_rows = keep * self._wide_rows + num_rows
            self._wide_ms = keep * self._wide_ms + pass_ms
        else:
            self._weight = keep * self._weight + 1
            self._rows = keep * self._rows + num_rows
            self._ms = keep * self._ms + pass_ms

    def ratio(self, cost: StepCost) -> float:
        """Time of a pass as a fraction of the time of a step of as many rows."""
        if self._weight < 1.0:
            return self._assumed
        step_ms = cost.step_of(self._rows / self._weight)
        return self._ms / self._weight / max(step_ms, 1e-6)

    def wide_row_ms(self, cost: StepCost) -> float:
        """Time of a token in a pass over many, in milliseconds."""
        if not self._wide_rows:
            return self._assumed * cost.row_ms
        return self._wide_ms / self._wide_rows


class Allowance:
    """Time that may be lost on trials, in steps. It is saved up while steps are made."""

    def __init__(self) -> None:
        self.left = MAX_RISKED_STEPS
        """Time that is left; below 0 if a trial has cost more than there was."""

    def earn(self, num_steps: float = RISKED_SHARE) -> None:
        """Add time: the share of a step, or what a trial has given."""
        self.left = min(MAX_RISKED_STEPS, self.left + num_steps)

    def spend(self, num_steps: float) -> None:
        """Take time."""
        self.left -= num_steps


class SpeculationGain:
    """What proposals have cost and given in relation to steps without them."""

    def __init__(self) -> None:
        self._plain_ms: dict[int, float] = {}
        """Number of sequences → time of a step without proposals."""
        self._allowance = Allowance()
        self._token = 0.0

    def knows(self, num_sequences: int) -> bool:
        """Whether the time of a step without proposals is known."""
        return num_sequences in self._plain_ms

    @property
    def may_propose(self) -> bool:
        """Whether there may be proposals in a step: they have not lost too much."""
        return self._allowance.left > 0

    def record(self, num_sequences: int, num_proposed: int, step_ms: float) -> None:
        """Learn from a step without prompts; `gained` follows for the accepted ones of its
        proposed tokens."""
        self._token = 1 / num_sequences
        self._allowance.earn()
        plain_ms = self._plain_ms.get(num_sequences, step_ms)
        if num_proposed:
            # A step may be late for reasons of its own.
            lost = step_ms / max(plain_ms, 1e-6) - 1
            self._allowance.spend(min(1.0 + num_proposed, lost))
        else:
            usual_ms = min(step_ms, 2 * plain_ms)
            self._plain_ms[num_sequences] = plain_ms + (usual_ms - plain_ms) / 8

    def gained(self, num_tokens: int) -> None:
        """Count proposed tokens of the latest step that were accepted."""
        self._allowance.earn(num_tokens * self._token)


class CostModel:
    """All numbers are measured. The time of a step is fitted by a line over its rows (`StepTimes`),
    the time of a draft model's pass by a mean (`DraftTimes`). A line is a rough model where rows
    are computed in groups, so what proposals have cost and given is also counted
    (`SpeculationGain`). The time for what may not pay is taken from an `Allowance`, which bounds
    what all trials lose. The `Speculator` has one cost model; it knows no sequences and no tokens.
    """

    def __init__(self, draft_cost: float) -> None:
        """`draft_cost`: assumed time of a draft model's pass, as a fraction of a step's."""
        self.steps, self.passes = StepTimes(), DraftTimes(draft_cost)
        self.gain, self.trials = SpeculationGain(), Allowance()
        self._num_unknown = 0

    def record(self, num_sequences: int, num_rows: int, step_ms: float) -> None:
        """Learn from a step without prompts."""
        self.steps.record(num_rows, step_ms)
        self.gain.record(num_sequences, num_rows - num_sequences, step_ms)
        self.trials.earn()

    def is_plain(self, is_known: bool) -> bool:
        """Whether a step has no proposals, so that the times of steps with and without them can be
        compared; one step of `PLAIN_EVERY` while the times are not known."""
        self._num_unknown += not is_known
        return not is_known and self._num_unknown % PLAIN_EVERY == 0


def worthwhile(acceptance: float, price: float, limit: int) -> int:
    """Number of tokens to propose: as long as the next one is accepted with a probability above
    `price`, the number of tokens that the same time would give otherwise."""
    count, probability = 0, acceptance
    while count < limit and probability > price:
        count, probability = count + 1, probability * acceptance
    return count


def draft_counts(
    acceptance: Seq[float], limits: Seq[int], cost: StepCost, ratio: float
) -> list[int]:
    """Number of tokens to draft for each sequence of a step, so that it gives most tokens a second.

    `acceptance`, `limits`: for each sequence, the probability that a drafted token is accepted, and
    the maximum number of them. `cost`: of the step without proposals, each row of which gives a
    token. `ratio`: time of a pass of the draft model as a fraction of a step of as many rows.
    """
    counts, probabilities = [0] * len(limits), list(acceptance)
    row_ms = cost.row_ms
    best, gained, took_ms = list(counts), float(cost.num_rows), cost.step_ms
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
        gained += sum(probabilities[i] for i in members)
        took_ms += ratio * cost.step_of(num_drafted) + row_ms * len(members)
        for i in members:
            counts[i] += 1
            probabilities[i] *= acceptance[i]
        if gained / took_ms > best_rate:
            best, best_rate = list(counts), gained / took_ms
        elif number or not members:
            break  # each later pass gives less than the one before
    return best
