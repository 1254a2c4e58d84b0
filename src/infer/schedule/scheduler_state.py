"""`SchedulerState`: what the parts of the scheduler have in common"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from infer.config import SchedulerConfig
from infer.schedule.fair_share import FairShare
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.sequence import Sequence
from infer.schedule.stats import SchedulerStats
from infer.types.step_events import StepEvent


@dataclass(slots=True, eq=False)
class SchedulerState:
    """Each part changes its own: `WaitingQueue`, `Seats`, `StepPlanner` and `Committer`."""

    config: SchedulerConfig
    allocator: PageAllocator
    clock: Callable[[], float]
    """Gives seconds."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    fair_share: FairShare = field(default_factory=FairShare)
    """Counts the tokens computed for each tenant."""
    by_id: dict[str, Sequence] = field(default_factory=dict)
    """The unfinished requests by id, in order of arrival."""
    pending_events: list[StepEvent] = field(default_factory=list)
    """Events since the last step."""
    num_turns: int = 0
    """Number of steps planned so far."""
