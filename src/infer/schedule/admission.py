"""The batching modes: when waiting requests are admitted to the batch

This is the only difference between sequential, static and continuous batching. The scheduler calls
`Admission.seats` once per step and gets the number of sequences that it may admit. A seat is one
place in the batch. An admission knows neither tokens nor pages. A preempted sequence keeps its
seat. Used by the scheduler only.
"""

from __future__ import annotations

from typing import Protocol

from infer.config import SchedulerConfig


class Admission(Protocol):
    """Decides how many waiting sequences may be admitted now."""

    num_seats: int
    """maximum number of sequences in the batch"""

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """Number of waiting sequences that may be admitted in this step."""

    def opens_at_s(self) -> float | None:
        """Time (scheduler's clock, seconds) from which sequences are admitted without a further
        event; None if only an event can change the number of seats."""


class ContinuousAdmission:
    """Admits a sequence in the first step after a seat has become free.

    With one seat this is sequential batching.
    """

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """Number of free seats."""
        return self.num_seats - num_seated

    def opens_at_s(self) -> float | None:
        """None: time alone changes nothing."""
        return None


class StaticAdmission:
    """Admits a whole batch at once, when no sequence is left of the batch before.

    A batch is admitted when `min_batch_size` requests wait, or `wait_timeout_s` after a request
    first waited with no batch running. That wait never begins while a batch runs, so requests that
    came meanwhile also get the chance to be joined by others.
    """

    def __init__(
        self, num_seats: int, wait_timeout_s: float, min_batch_size: int | None = None
    ) -> None:
        """`min_batch_size`: None for `num_seats`."""
        self.num_seats = num_seats
        self.wait_timeout_s = wait_timeout_s
        self.min_batch_size = min_batch_size or num_seats
        self._waiting_since_s: float | None = None

    def seats(self, now_s: float, num_waiting: int, num_seated: int) -> int:
        """All seats if a batch is admitted in this step, else 0."""
        if num_seated or not num_waiting:
            self._waiting_since_s = None
            return 0
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        enough = num_waiting >= self.min_batch_size
        if not enough and now_s - self._waiting_since_s < self.wait_timeout_s:
            return 0
        self._waiting_since_s = None
        return self.num_seats

    def opens_at_s(self) -> float | None:
        """End of the wait for more requests; None if none is waited for."""
        if self._waiting_since_s is None:
            return None
        return self._waiting_since_s + self.wait_timeout_s


def make_admission(config: SchedulerConfig) -> Admission:
    """The admission of `config.batching_mode`."""
    if config.batching_mode == "static":
        return StaticAdmission(
            config.max_batch_size, config.batch_wait_timeout_s, config.min_batch_size
        )
    return ContinuousAdmission(1 if config.batching_mode == "sequential" else config.max_batch_size)
