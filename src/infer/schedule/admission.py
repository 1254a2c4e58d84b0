"""The batching modes: who of the waiting requests gets a seat, and when

This is the only difference between sequential, static and continuous batching, and no other part
knows which of them it is. Once per step, `Seats` asks its `Admission` for the number of open seats
and has it fill them. A seat is one place in the batch. An admission knows no tokens and no pages.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from infer.config import SchedulerConfig
from infer.schedule.fair_share import FairShare
from infer.schedule.sequence import Sequence
from infer.schedule.static_batches import StaticBatches
from infer.types.step_events import BatchEnded, BatchFormed


class Room(Protocol):
    """The seats that an admission fills."""

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait, in order of rank; a sequence that is seated is removed."""

    @property
    def fair_share(self) -> FairShare:
        """Whose turn it is among tenants."""

    @property
    def clock(self) -> Callable[[], float]:
        """Gives seconds."""

    def seat(self, sequence: Sequence) -> bool:
        """Give a sequence a seat if the pages for all its tokens are free; returns whether."""

    def free_seat(self, sequence: Sequence) -> bool:
        """Take a seat from another tenant that has too many; returns whether there was one."""


class Admission(Protocol):
    """Decides which waiting sequences get a seat."""

    num_seats: int
    """Maximum number of sequences in the batch."""
    keeps_seats: bool
    """Whether a preempted sequence keeps its seat, even while several tenants are present."""

    @property
    def batch_id(self) -> str | None:
        """Id of the batch that is being formed or runs; None in modes without batches."""

    def num_free(self, num_seated: int) -> int:
        """Number of seats that a newcomer could get while `num_seated` are taken."""

    def num_open(self, now_s: float, num_waiting: int, num_running: int, flush: bool) -> int:
        """Number of waiting sequences that may be admitted in this step. `flush`: no further
        request will arrive."""

    def opens_at_s(self) -> float | None:
        """Time (scheduler's clock, seconds) from which sequences are admitted without a further
        event; None if only an event can change the number of seats."""

    def fill(self, room: Room, num_open: int) -> BatchFormed | None:
        """Give up to `num_open` waiting sequences a seat; returns the event of a batch that has
        been formed."""

    def leave(self, sequence: Sequence) -> None:
        """Take note that a sequence which had a seat has ended."""

    def end_batch(self) -> BatchEnded | None:
        """Take note that no sequence is left in the batch; returns the event, if it was one."""

    def num_formed_since(self, since_s: float) -> int:
        """Number of batches formed after a time of the last minute, counted in whole seconds."""


class ContinuousAdmission:
    """Admits a sequence in the first step after a seat has become free.

    With one seat this is sequential batching.
    """

    keeps_seats = False
    batch_id = None

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats

    def num_free(self, num_seated: int) -> int:
        """See `Admission`."""
        return max(0, self.num_seats - num_seated)

    def num_open(self, now_s: float, num_waiting: int, num_running: int, flush: bool) -> int:
        """Number of free seats."""
        return self.num_seats - num_running

    def opens_at_s(self) -> float | None:
        """None: time alone changes nothing."""
        return None

    def fill(self, room: Room, num_open: int) -> BatchFormed | None:
        """Admit in order of rank, between tenants by their shares; nobody is skipped."""
        waiting, share = room.waiting, room.fair_share
        while waiting:
            sequence = share.next_of(waiting)
            while num_open <= 0 or not room.seat(sequence):
                if not room.free_seat(sequence):
                    return None
                num_open += 1
            waiting.remove(sequence)
            num_open -= 1
        return None

    def leave(self, sequence: Sequence) -> None:
        """Nothing: there are no batches."""

    def end_batch(self) -> BatchEnded | None:
        """None: there are no batches."""
        return None

    def num_formed_since(self, since_s: float) -> int:
        """0: there are no batches."""
        return 0


class StaticAdmission:
    """Admits a whole batch at once, when no sequence is left of the batch before.

    A batch is admitted when `min_batch_size` requests wait, or `wait_timeout_s` after a request
    first waited with no batch running. That wait never begins while a batch runs, so requests that
    came meanwhile also get the chance to be joined by others.
    """

    keeps_seats = True

    def __init__(
        self,
        batches: StaticBatches,
        num_seats: int,
        wait_timeout_s: float,
        min_batch_size: int | None = None,
    ) -> None:
        """`min_batch_size`: None for `num_seats`."""
        self.num_seats = num_seats
        self.wait_timeout_s = wait_timeout_s
        self.min_batch_size = min_batch_size or num_seats
        self._batches = batches
        self._waiting_since_s: float | None = None

    @property
    def batch_id(self) -> str | None:
        """See `Admission`."""
        return self._batches.current_id

    def num_free(self, num_seated: int) -> int:
        """All seats or none: nobody joins a batch that runs."""
        return 0 if num_seated else self.num_seats

    def num_open(self, now_s: float, num_waiting: int, num_running: int, flush: bool) -> int:
        """All seats if a batch is admitted in this step, else 0."""
        if num_running or not num_waiting:
            self._waiting_since_s = None
            return 0
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        enough = num_waiting >= self.min_batch_size
        if not enough and now_s - self._waiting_since_s < self.wait_timeout_s:
            return self.num_seats if flush else 0
        self._waiting_since_s = None
        return self.num_seats

    def opens_at_s(self) -> float | None:
        """End of the wait for more requests; None if none is waited for."""
        if self._waiting_since_s is None:
            return None
        return self._waiting_since_s + self.wait_timeout_s

    def fill(self, room: Room, num_open: int) -> BatchFormed | None:
        """Admit a batch of at most `num_open`, as large as the free pages allow. Between several
        tenants, fair sharing decides who is in it."""
        waiting, share, members = room.waiting, room.fair_share, list[Sequence]()
        if not waiting or num_open <= 0:
            return None
        self._batches.open()
        chosen: Seq[Sequence] = ()
        if not share.several:
            chosen = tuple(self._batches.choose(waiting, num_open))
        while waiting and len(members) < num_open:
            sequence = share.next_of(waiting) if share.several else chosen[len(members)]
            if not room.seat(sequence):
                break
            waiting.remove(sequence)
            members.append(sequence)
        return self._batches.form(members, waiting, room.clock()) if members else None

    def leave(self, sequence: Sequence) -> None:
        """Count a request of the batch that has ended."""
        self._batches.leave(sequence)

    def end_batch(self) -> BatchEnded | None:
        """See `Admission`."""
        return self._batches.end()

    def num_formed_since(self, since_s: float) -> int:
        """See `Admission`."""
        return self._batches.num_formed_since(since_s)


def make_admission(config: SchedulerConfig, clock: Callable[[], float]) -> Admission:
    """The admission of `config.batching_mode`; `clock`: the scheduler's, which gives seconds."""
    match config.batching_mode:
        case "static":
            return StaticAdmission(
                StaticBatches(config.static_order, clock()),
                config.max_batch_size,
                config.batch_wait_timeout_s,
                config.min_batch_size,
            )
        case "sequential":
            return ContinuousAdmission(1)
        case _:
            return ContinuousAdmission(config.max_batch_size)
