"""`EngineCore`: the engine as a synchronous object: a scheduler and a runner, one step per call"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard

from infer.errors import DeviceLostError
from infer.schedule.page_allocator import PageTable
from infer.schedule.scheduler import Scheduler
from infer.schedule.sequence import Advanced, Chunk, Plan, Sampled, Sequence, Status
from infer.types import (
    ErrorRecord,
    FinishReason,
    Request,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from infer.types.engine_stats import EngineGauges, EngineStats
from infer.types.page_changes import PageChanges
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

MAX_LOST_STEPS = 3
"""Number of steps in a row without any result after which `try_out` decides whether the engine is
broken or the requests are."""
_TRIAL = "trial"
_LOST = ErrorRecord("the engine failed while computing this request")


class Runner(Protocol):
    """Turns a plan into sampled tokens."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """Compute every chunk; returns one result per chunk that samples, in the plan's order."""


class Flight(Protocol):
    """A step in flight: launched on a device, not yet committed."""

    def results(self) -> Seq[Sampled]:
        """Wait for the step; returns one result per chunk that samples, in the plan's order."""

    def elapsed_ms(self) -> float | None:
        """Time the device took for the step, in milliseconds; known after `results`, else None."""


Launched = tuple[Seq[Advanced], Flight]
"""A step that has been launched: its chunks, and its results to come."""


class LaunchingRunner(Runner, Protocol):
    """A runner whose device computes while the host works."""

    def launch(self, plan: Plan) -> Flight:
        """Begin to compute every chunk. Pending tokens come from the launch before."""


class ChoosyRunner(LaunchingRunner, Protocol):
    """A launching runner that does not always work ahead."""

    def goes_ahead(self, running: Seq[Sequence]) -> bool:
        """Whether the next step is launched before the one in flight is committed. `running`: the
        sequences that may be in it."""


def chooses(runner: Runner) -> TypeGuard[ChoosyRunner]:
    """Whether a runner does not always work ahead."""
    return hasattr(runner, "goes_ahead")


def is_launching(runner: Runner) -> TypeGuard[LaunchingRunner]:
    """Whether a runner can launch steps. In Python 3.11 `isinstance` with a protocol takes 10 µs,
    a third of the scheduling of a step of one sequence."""
    return hasattr(runner, "launch")


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """The result of a request that has ended, as `EngineCore.run_until_complete` returns it."""

    request_id: str
    token_ids: tuple[int, ...]
    """All output tokens, an end-of-sequence token included."""
    finish_reason: FinishReason
    num_cached: int = 0
    """Prompt tokens taken from the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the tokens sampled during the call; empty if the request did not ask."""
    error: ErrorRecord | None = None
    """Error of the request; set if and only if `finish_reason` is ERROR."""

    @classmethod
    def of(cls, before: tuple[int, ...], outputs: Seq[StepOutput]) -> CompletedRequest:
        """Join the output tokens known before the call with the outputs since then."""
        last = outputs[-1]
        assert last.finish_reason is not None
        return cls(
            last.request_id,
            (*before, *(o.token_id for o in outputs if o.token_id is not None)),
            last.finish_reason,
            last.num_cached,
            tuple(o.logprobs for o in outputs if o.logprobs is not None),
            last.error,
        )


class Keeper(Protocol):
    """Looks after the memory of the KV cache."""

    def tend(self) -> None:
        """Do what is due; called between steps."""


class EngineCore:
    """It is single-threaded and has no torch, no threads, no clock of its own and no text. The
    caller (a thread, a process, a test) calls `step` in a loop, and `add` and `abort` between steps
    only.

    One step ahead. A runner with `launch` has a step computed on a device while the host works: the
    core schedules and launches the next step before it waits for the tokens of the last one. A
    token that is not known yet is pending; the runner reads it on the device. A sequence whose
    sampling needs token ids on the host is left out of every second step. Where its grammar's mask
    is not ready in time, the step's result says so, and the last token is computed again. On CPUs
    the runner chooses for each step whether it goes ahead (`goes_ahead`).

    Containment. A step that raises has changed no sequence, and executing a part of its plan again
    writes the same cells. So the plan is executed in halves, and in halves of those, until the
    request that causes the error is alone; that request fails, and the others are not affected. A
    lost device is no request's failure: `DeviceLostError` is passed on, the process ends, and
    another engine continues the requests.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        announce: Callable[[str | None], None] = lambda request_id: None,
        *,
        kv_bytes: int = 0,
        cores_taken: Callable[[], float] = lambda: 0.0,
        keeper: Keeper | None = None,
    ) -> None:
        """`announce` is called with the id of a request that has an isolated step next because an
        engine crashed with it, and with None before several requests are computed together.
        `kv_bytes` is the size of the runner's KV cache, `cores_taken` tells the gauge of that name,
        for statistics. `keeper` looks after the cache's memory."""
        self.scheduler = scheduler
        self.runner = runner
        self.announce = announce
        self._kv_bytes, self._cores_taken = kv_bytes, cores_taken
        self._keeper = keeper
        self.step_events: StepEvents | None = None
        """Events of the last call of `step`; None if there were none."""
        self._num_lost = 0
        self._in_flight: Launched | None = None
        """The step that has been launched and not yet committed."""
        self._behind: Launched | None = None
        """The step that was launched after it."""

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return self.scheduler.num_unfinished > 0 or self._in_flight is not None

    def add(self, request: Request, sent_s: float | None = None) -> None:
        """Accept a request. Raises `RequestError` if it can never be served, `OverloadedError` if
        the queue is full. `sent_s` is the time on the scheduler's clock, in seconds, from which it
        has waited; None: now."""
        self.scheduler.add(request, sent_s)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> StepOutput | None:
        """End a request now; returns None for an unknown id.

        `reason` is `STOP` if the text has reached a stop string, which only the caller can see.
        """
        return self.scheduler.abort(request_id, reason)

    def abort_all(self) -> None:
        """End all requests now."""
        for sequence in self.scheduler.unfinished:
            self.scheduler.abort(sequence.request_id)

    def step(self, *, flush: bool = False) -> list[StepOutput]:
        """Compute one step; returns the outputs of sequences that got a token or ended.

        `flush`: no further request will arrive, so a static batch that is not full need not wait.
        """
        if self._keeper is not None:
            self._keeper.tend()
        scheduler, runner = self.scheduler, self.runner
        started_s = scheduler.clock()
        if is_launching(runner) and (not chooses(runner) or runner.goes_ahead(scheduler.running)):
            plan = scheduler.schedule(flush=flush)
            outputs = self._step_ahead(runner, plan)
        else:
            outputs = self._commit_in_flight()
            plan = scheduler.schedule(flush=flush)
            outputs += self._step_now(plan) if plan else []
        self._collect_events(started_s, plan)
        return outputs

    def _step_ahead(self, runner: LaunchingRunner, plan: Plan) -> list[StepOutput]:
        """Launch a plan, then commit the step before it."""
        launched = None
        if plan and not _suspects(plan):
            try:
                flight = runner.launch(plan)
            except DeviceLostError:
                raise
            except Exception as error:
                log.warning("a step of %d requests cannot be launched (%s)", len(plan), error)
            else:
                launched = (self.scheduler.advance(plan), flight)
                self._num_lost = 0
        self._behind = launched
        outputs = self._commit_in_flight()
        self._in_flight, self._behind = self._behind, None
        if plan and launched is None:
            # Computed with nothing in flight. Some sequences may have ended with the step before.
            rest = tuple(c for c in plan if c.sequence.status is Status.RUNNING)
            rest = tuple(c for c in rest if c.start == c.sequence.num_computed)  # not repeated
            outputs += self._step_now(rest) if rest else []
        return outputs

    def _commit_in_flight(self) -> list[StepOutput]:
        """Wait for the step in flight, if there is one, and commit it."""
        if self._in_flight is None:
            return []
        (step, flight), self._in_flight = self._in_flight, None
        try:
            sampled = flight.results()
        except DeviceLostError:
            raise
        except Exception as error:
            log.warning("a step of %d requests fails (%s); it is repeated", len(step), error)
            return self._repeat(step)
        return self.scheduler.commit(step, sampled, flight.elapsed_ms())

    def _repeat(self, failed: Seq[Advanced]) -> list[StepOutput]:
        """Forget a step that has failed in flight, and what was launched after it, which had no
        tokens to begin with. Then compute one with nothing in flight, so that it is halved."""
        if self._behind is not None:
            (step, flight), self._behind = self._behind, None
            with contextlib.suppress(Exception):
                flight.results()
            self.scheduler.retract(step)
        self.scheduler.retract(failed)
        plan = self.scheduler.schedule()
        return self._step_now(plan) if plan else []

    def _step_now(self, plan: Plan) -> list[StepOutput]:
        """Execute a plan and commit it."""
        computed: list[Chunk] = []
        sampled: list[Sampled] = []
        failed: dict[str, ErrorRecord] = {}
        for part in self._parts(plan):
            if part is not plan or _is_suspect(part[0]):
                self.announce(part[0].sequence.request_id if _is_suspect(part[0]) else None)
            self._execute(part, computed, sampled, failed)
        outputs = self.scheduler.commit(self.scheduler.advance(tuple(computed)), sampled)
        for request_id, error in failed.items():
            output = self.scheduler.fail(request_id, error)
            assert output is not None
            outputs.append(output)
        if computed:
            self._num_lost = 0
        # An error that the runner attributes to a request says nothing about the engine.
        elif any(error is _LOST for error in failed.values()):
            self._num_lost += 1
        if self._num_lost == MAX_LOST_STEPS:
            if problem := self.try_out():
                lost = f"nothing could be computed in {MAX_LOST_STEPS} steps in a row"
                raise RuntimeError(f"{lost}, and a trial step without a request fails: {problem}")
            self._num_lost = 0
        return outputs

    def try_out(self) -> str:
        """Compute one token of a trial sequence, between steps; returns why that failed, or "".

        It uses a free page, which is dropped from the prefix cache."""
        request = Request(_TRIAL, (0,), SamplingParams(temperature=0.0, max_tokens=1), 1, 1)
        allocator = self.scheduler.allocator
        sequence = Sequence.from_request(request, 0)
        sequence.table = PageTable()
        if not allocator.grow(sequence.table, 1):
            return "no page of the cache is free"
        try:
            (sampled,) = self.runner.execute((Chunk(sequence, 0, 1),))
        except DeviceLostError:
            raise
        except Exception as error:
            log.exception("a trial step fails")
            return f"{type(error).__name__}: {error}"
        finally:
            allocator.release(sequence.table)
        return sampled.error

    def follow_pages(self) -> None:
        """Report the pages of the prefix index; see `FollowPages`."""
        self.scheduler.allocator.follow()

    def idle_events(self) -> StepEvents | None:
        """Changes of the prefix index, without a step; None if nobody follows it. Called about
        every second while there is no work, so memory is looked after, too."""
        if self._keeper is not None:
            self._keeper.tend()
        changes = self.scheduler.allocator.take_changes(even_empty=True)
        now_s = self.scheduler.clock()
        return None if changes is None else self._step_events(now_s, 0, changes)

    def _collect_events(self, started_s: float, plan: Plan) -> None:
        changes = self.scheduler.allocator.take_changes()
        if plan or self.scheduler.pending_events or changes:
            self.step_events = self._step_events(started_s, len(plan), changes)
        else:
            self.step_events = None

    def _step_events(
        self, started_s: float, num_sequences: int, changes: PageChanges | None
    ) -> StepEvents:
        scheduler = self.scheduler
        step_events = StepEvents(
            scheduler.stats.num_steps,
            started_s,
            scheduler.clock(),
            num_sequences,
            tuple(scheduler.pending_events),
            scheduler.allocator.num_free,
            scheduler.allocator.num_indexed,
            changes,
        )
        scheduler.pending_events.clear()
        return step_events

    def _parts(self, plan: Plan) -> list[Plan]:
        """The parts in which a plan is executed: an isolated step for each suspect (see
        `replicas.blame`), then all others together. A suspect in an isolated step is known to
        be the cause if the engine crashes again."""
        suspects = _suspects(plan)
        if not suspects:
            return [plan]
        rest = tuple(chunk for chunk in plan if not _is_suspect(chunk))
        return [*((chunk,) for chunk in suspects), *([rest] if rest else [])]

    def _execute(
        self,
        plan: Plan,
        computed: list[Chunk],
        sampled: list[Sampled],
        failed: dict[str, ErrorRecord],
    ) -> None:
        """Execute a plan, in halves if it raises.

        A chunk is added to `computed` (and its result to `sampled`), or its request to `failed`. A
        chunk whose grammar mask is late is added without its last token, or not at all.
        """
        try:
            results = iter(self.runner.execute(plan))
        except DeviceLostError:
            raise
        except Exception as error:
            is_memory = isinstance(error, MemoryError)
            if len(plan) == 1:
                log.exception("request %s fails", plan[0].sequence.request_id)
            else:
                log.warning("a step of %d requests fails (%s); halving it", len(plan), error)
        else:
            for chunk in plan:
                result = next(results) if chunk.samples else None
                if result is not None and (refusal := result.error_record):
                    failed[chunk.sequence.request_id] = refusal
                    continue
                if result is not None and result.is_late:
                    if chunk.num_tokens > 1:  # the last token is computed again in another step
                        most = Chunk(chunk.sequence, chunk.start, chunk.num_tokens - 1)
                        computed.append(most)
                    continue
                computed.append(chunk)
                if result is not None:
                    sampled.append(result)
            return
        # Outside of the handler, where the exception no longer keeps the failed step's tensors.
        middle, only = len(plan) // 2, plan[0]
        if middle:
            self._execute(plan[:middle], computed, sampled, failed)
            self._execute(plan[middle:], computed, sampled, failed)
        elif only.proposed:  # proposals must not be the reason why a request fails
            self._execute((replace(only, proposed=()),), computed, sampled, failed)
        elif is_memory and only.num_tokens > 1:
            shorter = Chunk(only.sequence, only.start, only.num_tokens // 2)
            self._execute((shorter,), computed, sampled, failed)
        else:
            failed[only.sequence.request_id] = _LOST

    def wait_s(self) -> float | None:
        """Seconds until `step` may have something to do if no request arrives: 0 = now, None =
        never."""
        if self.scheduler.running or self.scheduler.preempted or self._in_flight is not None:
            return 0.0
        if not self.scheduler.waiting:
            return 0.0 if self.scheduler.allocator.has_changes else None
        wait_s = self.scheduler.wait_s()
        return 0.0 if wait_s is None else wait_s

    def run_until_complete(self, *request_ids: str) -> dict[str, CompletedRequest]:
        """Step until the named requests have ended; without names, until all have.

        Returns the results by request id, in the order in which the requests ended; those of other
        requests that ended meanwhile are included. Raises `RequestError` before anything is
        computed if an id is not that of an unfinished request.
        """
        for request_id in request_ids:
            self.scheduler.find(request_id)
        outputs_of: dict[str, list[StepOutput]] = {}
        before = {s.request_id: s.known_output for s in self.scheduler.unfinished}
        wanted = set(request_ids or before)
        completed: dict[str, CompletedRequest] = {}
        while wanted - completed.keys():
            for output in self.step(flush=True):
                outputs = outputs_of.setdefault(output.request_id, [])
                outputs.append(output)
                if output.finish_reason is not None:
                    done = CompletedRequest.of(before[output.request_id], outputs)
                    completed[output.request_id] = done
        return completed

    def outputs_until_complete(self) -> list[StepOutput]:
        """Step until every request has ended; returns all outputs in order."""
        outputs: list[StepOutput] = []
        while self.has_work:
            outputs.extend(self.step(flush=True))
        return outputs

    def stats(self) -> EngineStats:
        """The current gauges and counters; may be called while another thread steps."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return EngineStats(
            EngineGauges(
                num_waiting=len(scheduler.waiting),
                num_running=len(scheduler.running),
                num_preempted=len(scheduler.preempted),
                num_pages=allocator.num_usable,
                num_free_pages=allocator.num_free,
                num_indexed_pages=allocator.num_indexed,
                kv_bytes=self._kv_bytes,
                cores_taken=self._cores_taken(),
                num_batches_last_minute=scheduler.num_batches_last_minute(),
                num_touched_pages=allocator.num_touched,
                num_allowed_pages=allocator.limit,
            ),
            scheduler.stats.counters(num_evictions=allocator.num_evictions),
        )


def _suspects(plan: Plan) -> list[Chunk]:
    # Nearly no request has been in a crash. Asking about each takes as long as a tenth of a step.
    return [c for c in plan if c.sequence.request.num_crashes and _is_suspect(c)]


def _is_suspect(chunk: Chunk) -> bool:
    return chunk.sequence.request.is_suspect(chunk.sequence.num_output)
