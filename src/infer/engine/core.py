"""`EngineCore`: a scheduler and a runner, stepped by somebody else.

Synchronous and single-threaded; it has no torch, no threads, no clock of its own and no text. Two
edges point backwards into it and only those: the sampled token (inside `step`) and `abort`.
Whoever drives it (a thread, a process, a test) calls `add` and `abort` between steps only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Plan, Sampled
from infer.types import Request, StepOutput


class Runner(Protocol):
    """Turns a plan into sampled tokens."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order."""


class EngineCore:
    """See the module's docstring."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return self.scheduler.num_unfinished > 0

    def add(self, request: Request) -> None:
        """Accept a request; raises `RequestError` (and accepts nothing) if it cannot be served."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> StepOutput | None:
        """End a request now; unknown ids are ignored."""
        return self.scheduler.abort(request_id)

    def step(self, *, flush: bool = False) -> list[StepOutput]:
        """Do one step; an empty list if there was nothing to do or nothing was sampled.

        `flush`: nobody else will come, so a batch that is forming need not wait for company.
        """
        plan = self.scheduler.schedule(flush=flush)
        if not plan:
            return []
        return self.scheduler.commit(plan, self.runner.execute(plan))

    def wait_s(self) -> float | None:
        """How long nothing will happen unless a request comes: 0 = step now, None = for ever."""
        if self.scheduler.running or self.scheduler.preempted:
            return 0.0
        if not self.scheduler.waiting:
            return None
        wait_s = self.scheduler.wait_s()
        return 0.0 if wait_s is None else wait_s

    def run_until_complete(self) -> list[StepOutput]:
        """Step until every request has ended; all outputs in the order in which they came."""
        outputs: list[StepOutput] = []
        while self.has_work:
            outputs.extend(self.step(flush=True))
        return outputs

    def stats(self) -> dict[str, int | float]:
        """Gauges and counters by name."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        counts = scheduler.stats
        return {
            "num_waiting": len(scheduler.waiting),
            "num_running": len(scheduler.running),
            "num_preempted": len(scheduler.preempted),
            "num_pages": allocator.num_usable,
            "num_free_pages": allocator.num_free,
            "num_indexed_pages": allocator.num_indexed,
            "num_evictions": allocator.num_evictions,
            **{name: getattr(counts, name) for name in counts.__slots__ if name != "num_finished"},
            **{f"num_finished_{reason}": n for reason, n in counts.num_finished.items()},
        }
