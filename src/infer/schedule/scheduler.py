"""`Scheduler`: which sequences move forward in the next step, and by how many tokens"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from infer.config import SchedulerConfig
from infer.errors import RequestError
from infer.schedule.committer import Committer
from infer.schedule.drafting import Drafter
from infer.schedule.invariants import check_invariants
from infer.schedule.page_allocator import PageAllocator
from infer.schedule.scheduler_state import SchedulerState
from infer.schedule.seats import Seats
from infer.schedule.sequence import Advanced, Plan, Sampled, Sequence
from infer.schedule.speculation import Allowed, Speculator
from infer.schedule.step_budget import StepBudget
from infer.schedule.step_planner import StepPlanner
from infer.schedule.waiting_queue import WaitingQueue
from infer.types import ErrorRecord, FinishReason, Request, StepOutput


class Scheduler:
    """A step distributes three resources in three passes. Pages belong to the allocator: a running
    sequence that needs one more page may preempt those behind it. Seats are places in the batch;
    the admission decides how many waiting sequences get one, and a sequence takes it only if the
    pages for all its tokens are free. Tokens come from the step's budget and are offered in the
    policy's order.

    Four parts do it: `WaitingQueue` has the requests without a seat, `Seats` the batch and its
    pages, `StepPlanner` hands out the tokens, and `Committer` stores what a step has computed.

    Liveness. Sequences are totally ordered by rank, and only finitely many ever go before a given
    one (`Sequence.rank`). `add` refuses a request whose maximum length does not fit the whole pool.
    The first in rank of the running sequences can preempt all others, so it always gets its pages,
    and no running sequence is passed over for long (`StepPlanner`). So it finishes. Its seat and
    pages then go to the first in rank of those that wait, because admission never skips a sequence.
    So every sequence is served eventually. Between tenants, `schedule.fair_share` decides about
    seats and tokens by the number of tokens that each tenant has been given.

    Called by `engine.core` only. It knows no tensors, text, threads or time: its clock is given.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        allocator: PageAllocator,
        clock: Callable[[], float],
        allowed: Allowed | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        """`clock` gives seconds. `allowed` cuts proposed tokens where a grammar forbids them; None:
        sequences with grammars are not proposed for. `drafter`: the draft model of speculation."""
        self.config, self.allocator, self.clock = config, allocator, clock
        self._state = state = SchedulerState(config, allocator, clock)
        self.stats, self.fair_share = state.stats, state.fair_share
        self.by_id = state.by_id
        """The unfinished requests by id; not to be changed from outside."""
        self.pending_events = state.pending_events
        """Events since the last step; the caller that steps takes them and clears the list."""
        self._num_arrived = 0
        self._step_budget = StepBudget(config.max_step_ms) if config.max_step_ms else None
        self._speculator: Speculator | None = None
        if settings := config.speculative:
            self._speculator = Speculator(settings, allocator, state.stats, allowed, drafter)
        self._queue = WaitingQueue(state)
        self._seats = Seats(state, self._queue, self._forget)
        self._planner = StepPlanner(state, self._seats, self._step_budget)
        self._committer = Committer(state, self._seats, self._speculator)
        self.waiting = self._queue.sequences
        """Sequences without a seat, in order of rank, as are those of the next two."""
        self.running, self.preempted = self._seats.running, self._seats.preempted
        self._planned_s = 0.0

    def _forget(self, sequence: Sequence) -> None:
        if self._speculator is not None:
            self._speculator.forget(sequence)

    @property
    def num_seats(self) -> int:
        """Maximum number of sequences in the batch."""
        return self._seats.admission.num_seats

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return len(self.by_id)

    @property
    def unfinished(self) -> list[Sequence]:
        """The requests that have not ended, in order of arrival."""
        return list(self.by_id.values())

    def find(self, request_id: str) -> Sequence:
        """The unfinished request of this id; raises `RequestError` if there is none."""
        if (sequence := self.by_id.get(request_id)) is not None:
            return sequence
        message = f"there is no unfinished request with id {request_id!r}"
        raise RequestError(message, param="request_id", code="request_not_found")

    def num_batches_last_minute(self) -> int:
        """Number of static batches that were formed in the last minute; 0 in the other modes."""
        return self._seats.admission.num_formed_since(self.clock() - 60)

    def add(self, request: Request, sent_s: float | None = None) -> Sequence:
        """Put a request into the waiting queue; `sent_s`: see `EngineCore.add`.

        Raises `OverloadedError` if the queue is full, in requests or in prompt tokens;
        `RequestError` if the request can never fit or its id is in use.
        """
        self._queue.check(request, self.num_seats, self._seats.num_free)
        sequence = Sequence.from_request(request, self._num_arrived)
        sequence.queued_s = self.clock() if sent_s is None else sent_s
        self._num_arrived += 1
        self.by_id[request.request_id] = sequence
        self.fair_share.join(sequence)
        self._queue.add(sequence, len(self.running))
        self.stats.num_submitted += 1
        return sequence

    def may_wait(self, num_prompt: int) -> bool:
        """Whether one more request with a prompt of `num_prompt` tokens stays within
        `max_waiting_tokens`. Requests for which seats are free do not count."""
        return self._queue.may_wait(num_prompt, self._seats.num_free)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> StepOutput | None:
        """End a request now, in whatever queue it is; None, and no change, for an unknown id."""
        sequence = self.by_id.get(request_id)
        return None if sequence is None else self._committer.end(sequence, reason)

    def fail(self, request_id: str, error: ErrorRecord) -> StepOutput | None:
        """Like `abort`, for a request that failed with `error`."""
        sequence, reason = self.by_id.get(request_id), FinishReason.ERROR
        return None if sequence is None else self._committer.end(sequence, reason, error)

    def schedule(self, *, flush: bool = False) -> Plan:
        """Decide the next step.

        `flush`: no further request will arrive, so a static batch that is not full need not wait.
        """
        if self._step_budget or self._speculator:
            self._planned_s = self.clock()
        self._seats.grow_running()
        self._seats.admit(flush)
        plan = self._planner.plan(self._committer.launched)
        if self._speculator is None or not plan:
            return plan
        num_planned = sum(chunk.num_tokens for chunk in plan)
        num_left = self._planner.budget_beside_streams - num_planned
        return tuple(self._speculator.extend(plan, num_left))

    def wait_s(self) -> float | None:
        """Seconds until a step may do something without an event; None: never."""
        opens_at_s = self._seats.admission.opens_at_s()
        return None if opens_at_s is None else max(0.0, opens_at_s - self.clock())

    def preempt(self, sequence: Sequence, needed_by: Sequence | None = None) -> None:
        """Take a running sequence's pages; it keeps its tokens and recomputes their keys and values
        later. It keeps its seat unless other tenants are present, who may go first.

        `needed_by`: the sequence that gets the pages, for the event."""
        self._seats.preempt(sequence, needed_by)

    def keep_within_limit(self) -> None:
        """Preempt sequences, the last in rank first, while those that run use more pages than the
        allocator's `limit`; the first one goes on."""
        self._seats.keep_within_limit()

    def advance(self, plan: Plan) -> tuple[Advanced, ...]:
        """Move the numbers of a step that has been launched; the tokens it samples are `PENDING`
        until `commit`. Returns the step's chunks for `commit`."""
        return self._committer.advance(plan)

    def retract(self, step: Seq[Advanced]) -> None:
        """Undo `advance` for a step that has failed; the last one launched goes first."""
        self._committer.retract(step)

    def commit(
        self, step: Seq[Advanced], sampled: Seq[Sampled], step_ms: float | None = None
    ) -> list[StepOutput]:
        """Store the results of a step that has been computed; returns one output per sequence that
        got a token or failed.

        `sampled` has one entry per chunk that samples, in the plan's order. `step_ms` is how long
        the step took, in milliseconds; None means the time since it was scheduled."""
        if self._step_budget or self._speculator:
            took_ms = 1000 * (self.clock() - self._planned_s) if step_ms is None else step_ms
            if self._speculator is not None:
                took_ms -= self._speculator.drafting_ms()
            for learner in (self._step_budget, self._speculator):
                if learner is not None:
                    learner.record(step, took_ms)
        return self._committer.commit(step, sampled)

    def check(self) -> None:
        """Assert the invariants between sequences, pages and counters. For tests."""
        check_invariants(self._state, self._seats)
