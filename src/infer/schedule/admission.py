"""The batching modes: when may waiting requests take a seat?

This is the whole difference between sequential, static and continuous batching. A door is asked
once per step and answers with a number of seats; it knows neither tokens nor pages. A preempted
sequence keeps its seat. Used by the scheduler only.
"""

from __future__ import annotations

from typing import Protocol

from infer.config import SchedulerConfig


class Admission(Protocol):
    """Decides how many newcomers may sit down now."""

    num_seats: int

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """Seats for newcomers in this step."""

    def opens_at_s(self) -> float | None:
        """When the door will open by itself; None if that takes an event, not time."""


class ContinuousAdmission:
    """Always open: a seat is taken again at the step after it became free.

    With one seat this is sequential batching.
    """

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """Every seat that is free."""
        return self.num_seats - num_seated

    def opens_at_s(self) -> float | None:
        """None: it is open."""
        return None


class StaticAdmission:
    """Opens when the room is empty, for a batch that is full or has waited long enough.

    The wait starts when somebody waits in front of an empty room, so it starts afresh between
    batches: those who came while a batch ran get the chance to be joined by others.
    """

    def __init__(self, num_seats: int, wait_timeout_s: float) -> None:
        self.num_seats = num_seats
        self.wait_timeout_s = wait_timeout_s
        self._waiting_since_s: float | None = None

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """All seats when a batch is formed, else none."""
        if num_seated or not num_waiting:
            self._waiting_since_s = None
            return 0
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        full = num_waiting >= self.num_seats
        if not full and now_s - self._waiting_since_s < self.wait_timeout_s:
            return 0
        self._waiting_since_s = None
        return self.num_seats

    def opens_at_s(self) -> float | None:
        """The end of the wait for company."""
        if self._waiting_since_s is None:
            return None
        return self._waiting_since_s + self.wait_timeout_s


def make_admission(config: SchedulerConfig) -> Admission:
    """The door of `config.batching_mode`."""
    if config.batching_mode == "static":
        return StaticAdmission(config.max_batch_size, config.batch_wait_timeout_s)
    return ContinuousAdmission(1 if config.batching_mode == "sequential" else config.max_batch_size)
