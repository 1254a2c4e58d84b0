"""`check_invariants`: what always holds between sequences, pages and counters

Tests call it, by `Scheduler.check`, after each step.
"""

from __future__ import annotations

from infer.schedule.policy import MAX_IDLE_STEPS
from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.seats import Seats
from infer.schedule.sequence import PENDING


def check_invariants(state: SchedulerState, seats: Seats) -> None:
    """Raise `AssertionError` if an invariant does not hold; O(pages and tokens)."""
    seated = [*seats.running, *seats.preempted]
    assert len(seated) <= seats.admission.num_seats
    for status, queue in seats.queues.items():
        assert [s.rank for s in queue] == sorted(s.rank for s in queue)
        assert all(s.status is status for s in queue)
    everyone = [*seats.waiting, *seated]
    assert {s.request_id: s for s in everyone} == state.by_id
    assert len(everyone) == len(state.by_id)
    page_size, longest_pause = state.allocator.page_size, MAX_IDLE_STEPS + seats.admission.num_seats
    for sequence in seats.running:
        table = sequence.table
        assert table.num_indexed * page_size <= sequence.num_computed < len(sequence.tokens)
        assert PENDING not in sequence.tokens[:-1]
        assert len(sequence.tokens) - 1 <= len(table.pages) * page_size
        assert state.num_turns - sequence.last_turn <= longest_pause
    for sequence in (*seats.waiting, *seats.preempted):
        assert sequence.num_computed == 0
        assert not sequence.table.pages
    state.allocator.check([sequence.table for sequence in seats.running] + seats.held)
    assert state.stats.num_submitted == len(everyone) + sum(state.stats.num_finished.values())
