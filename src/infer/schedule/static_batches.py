"""`StaticBatches`: the batches of static mode: their requests, ids, waits and padding"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate

from infer.schedule.sequence import Sequence
from infer.types.step_events import BatchEnded, BatchFormed

MIN_CONSIDERED = 128
"""Number of waiting sequences, the first in rank, among which a batch is chosen; if there are more
seats than half of it, twice the number of seats."""

Rank = tuple[int, int]


class StaticBatches:
    """The scheduler has one in static mode. Which requests a batch has in the order `prompt_length`
    is decided by `similar`."""

    def __init__(self, order: str, started_s: float) -> None:
        """`order`: see `EngineConfig.static_order`. `started_s`: the present time on the
        scheduler's clock, so that the engine after this one has other ids."""
        self._is_by_length = order == "prompt_length"
        self._prefix = f"batch-{int(1000 * started_s):x}"
        self._num_formed = 0
        self.current_id: str | None = None
        """Id of the batch that is being formed or runs; None if there is none."""
        self._lengths: list[int] = []
        """Lengths in tokens of the requests of the current batch that have ended."""
        self._early: list[Rank] = []
        """Ranks, in order, of the sequences that got a seat before their turn, which has not come;
        as many as are owed a seat."""
        self._recent: deque[tuple[int, int]] = deque(maxlen=61)
        """(second, number of batches formed in it), the latest last."""

    def choose(self, waiting: Seq[Sequence], num_seats: int) -> Seq[Sequence]:
        """The sequences for a batch of at most `num_seats`, those that are owed a seat first.

        `waiting` is in order of rank."""
        if not self._is_by_length or len(waiting) <= num_seats:
            return waiting[:num_seats]
        turns = self._whose_turn(waiting, num_seats)
        limit = max(MIN_CONSIDERED, 2 * num_seats)
        considered = [s for i, s in enumerate(waiting) if i < limit or s.is_owed_a_seat]
        owed = [i for i, sequence in enumerate(considered) if sequence.is_owed_a_seat]
        due = [i for i, sequence in enumerate(considered) if sequence.rank in turns]
        lengths = [len(sequence.tokens) for sequence in considered]
        return [considered[i] for i in similar(lengths, owed[:num_seats], due, num_seats)]

    def _whose_turn(self, waiting: Seq[Sequence], count: int) -> set[Rank]:
        """The first `count` in rank of the sequences whose turn has not come."""
        ranks = [sequence.rank for sequence in waiting if not sequence.is_owed_a_seat]
        # Fewer are owed a seat if some of them were aborted.
        num_owed = len(waiting) - len(ranks)
        del self._early[: max(0, len(self._early) - num_owed)]
        return set(sorted([*ranks, *self._early])[:count])

    def num_formed_since(self, since_s: float) -> int:
        """Number of batches formed after a time of the last minute, counted in whole seconds."""
        return sum(count for second, count in list(self._recent) if second > since_s)

    def open(self) -> None:
        """Begin to form a batch."""
        self._num_formed += 1
        self.current_id = f"{self._prefix}-{self._num_formed}"

    def form(self, members: Seq[Sequence], waiting: Seq[Sequence], now_s: float) -> BatchFormed:
        """Record that `members` got the seats and `waiting` did not; returns the event."""
        assert self.current_id is not None
        if self._is_by_length:
            turns = self._whose_turn([*members, *waiting], len(members))
            self._early = [rank for rank in self._early if rank not in turns]
            for sequence in members:
                if not sequence.is_owed_a_seat and sequence.rank not in turns:
                    insort(self._early, sequence.rank)
            for sequence in waiting:
                sequence.is_owed_a_seat |= sequence.rank in turns
        second, count = int(now_s), 1
        if self._recent and self._recent[-1][0] == second:
            count += self._recent.pop()[1]
        self._recent.append((second, count))
        lengths = [len(sequence.tokens) for sequence in members]
        return BatchFormed(
            self.current_id,
            now_s,
            len(members),
            now_s - min(sequence.queued_s for sequence in members),
            sum(lengths),
            max(lengths) * len(lengths),
        )

    def leave(self, sequence: Sequence) -> None:
        """Count a request of the current batch that has ended."""
        self._lengths.append(len(sequence.tokens))

    def end(self) -> BatchEnded | None:
        """End the current batch, all of whose requests have ended; None if there is none."""
        batch_id, lengths = self.current_id, self._lengths
        self.current_id, self._lengths = None, []
        if batch_id is None or not lengths:
            return None
        return BatchEnded(batch_id, sum(lengths), max(lengths) * len(lengths))


def similar(lengths: Seq[int], owed: Seq[int], due: Seq[int], num_seats: int) -> list[int]:
    """The indices of a batch of `num_seats` sequences whose prompts are similarly long.

    Padding such a batch would cost little. A request is put at most one batch behind its turn for
    this. Its turn is the batch that it would have if the same numbers of requests were taken at the
    same times in order of rank. A request whose turn has passed is owed a seat in the next batch.
    The other seats are given so that this batch and the next, which must have all requests whose
    turn passes now, have the least padding together. At most as many requests are owed a seat as
    the batch before had. So all of them are in the next batch, unless the free pages suffice for
    fewer requests than before.

    `lengths` [tokens] are those of the sequences in order of rank, of which there are more than
    seats. `owed` are the indices of those that are owed a seat, `due` of those whose turn is now.
    Its time is quadratic in the number of sequences."""
    free = sorted(set(range(len(lengths))).difference(owed), key=lengths.__getitem__)
    size = num_seats - len(owed)
    best: tuple[int, list[int]] | None = None
    for padding, begin in _choices(lengths, owed, free, size):
        chosen = free[begin : begin + size]
        next_owed = set(due).difference(chosen)
        rest = [i for i in free[:begin] + free[begin + size :] if i not in next_owed]
        size_of_next = min(num_seats - len(next_owed), len(rest))
        padding += min(p for p, _ in _choices(lengths, list(next_owed), rest, size_of_next))
        if best is None or padding < best[0]:
            best = padding, chosen
    assert best is not None
    return [*owed, *sorted(best[1])]


def _choices(
    lengths: Seq[int], must: Seq[int], free: Seq[int], size: int
) -> Iterator[tuple[int, int]]:
    """The choices of `size` sequences that share a batch with those in `must`: the padding of the
    batch in tokens, and the begin of the choice.

    A choice is a range of `free`, which is in order of length: of all batches with the same longest
    sequence, the one with the longest others has the least padding."""
    num_seats, num_must = size + len(must), sum(lengths[i] for i in must)
    longest = max((lengths[i] for i in must), default=0)
    if not size:
        yield longest * num_seats - num_must, 0
        return
    sums = list(accumulate((lengths[i] for i in free), initial=0))
    for begin in range(len(free) - size + 1):
        end = begin + size
        width = max(longest, lengths[free[end - 1]])
        yield width * num_seats - num_must - (sums[end] - sums[begin]), begin
