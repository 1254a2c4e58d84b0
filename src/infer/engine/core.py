"""`EngineCore`: a scheduler and a runner, stepped by somebody else.

Synchronous and single-threaded; it has no torch, no threads, no clock of its own and no text. Two
edges point backwards into it and only those: the sampled token (inside `step`) and `abort`.
Whoever drives it (a thread, a process, a test) calls `add` and `abort` between steps only.

One step ahead. A runner that `launch`es has a step computed on a device while the host works: the
core schedules and launches the next step before it waits for the tokens of the last one. A token
that is not known yet is pending; the runner reads it on the device. What needs the numbers of
tokens on the host sits out a step.

Containment. A step that raises has moved nothing: whatever part of its plan is executed again
writes the same cells. So it is executed in halves, and halves of halves, until the request that is
to blame is alone; it fails, and the others never know. A device that is lost is not a request's
failure: that error passes, the process ends, and another engine goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from infer.engine.process.blame import is_suspect
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
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

MAX_LOST_STEPS = 3
"""steps in a row of which nothing could be computed, before it is tried who is broken: the engine
or the requests"""
_TRIAL = "trial"
_LOST = ErrorRecord("the engine failed while computing this request")


class Runner(Protocol):
    """Turns a plan into sampled tokens."""

    def execute(self, plan: Plan) -> Seq[Sampled]:
        """Compute every chunk; one result per chunk that samples, in the plan's order."""


class Flight(Protocol):
    """A step that is being computed."""

    def results(self) -> Seq[Sampled]:
        """Wait for it: one result per chunk that samples, in the plan's order."""

    def elapsed_ms(self) -> float | None:
        """How long the device took for it, after `results`; None if that is not known."""


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner whose device computes while the host goes on."""

    def launch(self, plan: Plan) -> Flight:
        """Begin to compute every chunk. Pending tokens are those of the launch before."""


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """What a request that has ended produced, as `EngineCore.run_until_complete` returns it."""

    request_id: str
    token_ids: tuple[int, ...]
    """all output tokens, an end-of-sequence token included"""
    finish_reason: FinishReason
    num_cached: int = 0
    """prompt tokens taken from the prefix cache"""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """of the tokens that were sampled during the call, if the request asked for them"""
    error: ErrorRecord | None = None
    """set with `FinishReason.ERROR`"""

    @classmethod
    def of(cls, before: tuple[int, ...], outputs: Seq[StepOutput]) -> CompletedRequest:
        """From the tokens known before, and the request's outputs since then."""
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


class EngineCore:
    """See the module's docstring."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        announce: Callable[[str | None], None] = lambda request_id: None,
    ) -> None:
        """`announce` gets the id of the request that is computed by itself next, after a crash;
        None = those that are computed next are several."""
        self.scheduler = scheduler
        self.runner = runner
        self._announce = announce
        self.step_events: StepEvents | None = None
        """of the last call of `step`; None if nothing happened in it"""
        self._num_lost = 0
        self._flying: tuple[Seq[Advanced], Flight] | None = None
        """the step that has been launched and not been committed"""

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step has not."""
        return self.scheduler.num_unfinished > 0 or self._flying is not None

    def add(self, request: Request) -> None:
        """Accept a request; raises `RequestError` (and accepts nothing) if it cannot be served."""
        self.scheduler.add(request)

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT
    ) -> StepOutput | None:
        """End a request now; unknown ids are ignored. `reason`: `STOP` for one whose text has
        reached a stop string, which only its caller can see."""
        return self.scheduler.abort(request_id, reason)

    def step(self, *, flush: bool = False) -> list[StepOutput]:
        """Do one step; an empty list if there was nothing to do or nothing was sampled.

        `flush`: nobody else will come, so a batch that is forming need not wait for company.
        """
        started_s = self.scheduler.clock()
        plan = self.scheduler.schedule(flush=flush)
        if isinstance(self.runner, LaunchingRunner):
            outputs = self._step_ahead(self.runner, plan)
        else:
            outputs = self._step_now(plan) if plan else []
        self._note(started_s, plan)
        return outputs

    def _step_ahead(self, runner: LaunchingRunner, plan: Plan) -> list[StepOutput]:
        """Launch a plan, then commit the step before it."""
        launched = None
        if plan and not any(map(_is_suspect, plan)):
            try:
                flight = runner.launch(plan)
            except DeviceLostError:
                raise
            except Exception as error:
                log.warning("a step of %d requests cannot be launched (%s)", len(plan), error)
            else:
                launched = (self.scheduler.advance(plan), flight)
                self._num_lost = 0
        outputs = self._land()
        self._flying = launched
        if plan and launched is None:
            # By itself, with nothing in flight. Some of it may have ended with the step before.
            rest = tuple(c for c in plan if c.sequence.status is Status.RUNNING)
            outputs += self._step_now(rest) if rest else []
        return outputs

    def _land(self) -> list[StepOutput]:
        """Wait for the step that is being computed, if one is, and commit it."""
        if self._flying is None:
            return []
        (step, flight), self._flying = self._flying, None
        sampled = flight.results()
        return self.scheduler.commit(step, sampled, flight.elapsed_ms())

    def _step_now(self, plan: Plan) -> list[StepOutput]:
        """Execute a plan and commit it."""
        computed: list[Chunk] = []
        sampled: list[Sampled] = []
        failed: dict[str, ErrorRecord] = {}
        for part in self._parts(plan):
            if part is not plan or _is_suspect(part[0]):
                self._announce(part[0].sequence.request_id if _is_suspect(part[0]) else None)
            self._execute(part, computed, sampled, failed)
        outputs = self.scheduler.commit(self.scheduler.advance(tuple(computed)), sampled)
        for request_id, error in failed.items():
            output = self.scheduler.fail(request_id, error)
            assert output is not None
            outputs.append(output)
        if computed:
            self._num_lost = 0
        # What the runner has pinned on a request says nothing about the engine.
        elif any(error is _LOST for error in failed.values()):
            self._num_lost += 1
        if self._num_lost == MAX_LOST_STEPS:
            if problem := self.try_out():
                lost = f"nothing could be computed in {MAX_LOST_STEPS} steps in a row"
                raise RuntimeError(f"{lost}, nor for no request: {problem}")
            self._num_lost = 0
        return outputs

    def try_out(self) -> str:
        """Compute a token for nobody, between steps; why that is not possible, or "".

        It takes a page that is free, and what was in it can no longer be found."""
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

    def _note(self, started_s: float, plan: Plan) -> None:
        scheduler, self.step_events = self.scheduler, None
        if plan or scheduler.pending_events:
            number, pending_events = scheduler.stats.num_steps, tuple(scheduler.pending_events)
            self.step_events = StepEvents(
                number, started_s, scheduler.clock(), len(plan), pending_events
            )
            scheduler.pending_events.clear()

    def _parts(self, plan: Plan) -> list[Plan]:
        """The plan in one piece; but a suspect (see `engine.process.blame`) is computed alone, so
        that another crash leaves no doubt about whom it happened with."""
        alone = [chunk for chunk in plan if _is_suspect(chunk)]
        if not alone:
            return [plan]
        rest = tuple(chunk for chunk in plan if not _is_suspect(chunk))
        return [*((chunk,) for chunk in alone), *([rest] if rest else [])]

    def _execute(
        self,
        plan: Plan,
        computed: list[Chunk],
        sampled: list[Sampled],
        failed: dict[str, ErrorRecord],
    ) -> None:
        """Execute a plan, in halves if it must be; every chunk goes to `computed` or `failed`."""
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
                    if chunk.num_tokens > 1:  # the last one is computed again, and sampled then
                        most = Chunk(chunk.sequence, chunk.start, chunk.num_tokens - 1)
                        computed.append(most)
                    continue
                computed.append(chunk)
                if result is not None:
                    sampled.append(result)
            return
        # Out here, where the exception no longer keeps the tensors of the failed step.
        middle, only = len(plan) // 2, plan[0]
        if middle:
            self._execute(plan[:middle], computed, sampled, failed)
            self._execute(plan[middle:], computed, sampled, failed)
        elif is_memory and only.num_tokens > 1:
            shorter = Chunk(only.sequence, only.start, only.num_tokens // 2)
            self._execute((shorter,), computed, sampled, failed)
        else:
            failed[only.sequence.request_id] = _LOST

    def wait_s(self) -> float | None:
        """How long nothing will happen unless a request comes: 0 = step now, None = for ever."""
        if self.scheduler.running or self.scheduler.preempted or self._flying is not None:
            return 0.0
        if not self.scheduler.waiting:
            return None
        wait_s = self.scheduler.wait_s()
        return 0.0 if wait_s is None else wait_s

    def run_until_complete(self, *request_ids: str) -> dict[str, CompletedRequest]:
        """Step until the named requests have ended; without names, until all have.

        Returns what each request produced, by id and in the order in which they ended. Requests
        that nobody named and that end meanwhile are in it too. Raises `RequestError` for an id
        that is not unfinished here, before anything is computed.
        """
        for request_id in request_ids:
            self.scheduler.find(request_id)
        found: dict[str, list[StepOutput]] = {}
        before = {s.request_id: s.known_output for s in self.scheduler.unfinished}
        wanted = set(request_ids or before)
        completed: dict[str, CompletedRequest] = {}
        while wanted - completed.keys():
            for output in self.step(flush=True):
                outputs = found.setdefault(output.request_id, [])
                outputs.append(output)
                if output.finish_reason is not None:
                    done = CompletedRequest.of(before[output.request_id], outputs)
                    completed[output.request_id] = done
        return completed

    def outputs_until_complete(self) -> list[StepOutput]:
        """Step until every request has ended; all outputs in the order in which they came."""
        outputs: list[StepOutput] = []
        while self.has_work:
            outputs.extend(self.step(flush=True))
        return outputs

    def stats(self) -> EngineStats:
        """Gauges and counters of now; also while another thread steps, which may be in between."""
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return EngineStats(
            EngineGauges(
                num_waiting=len(scheduler.waiting),
                num_running=len(scheduler.running),
                num_preempted=len(scheduler.preempted),
                num_pages=allocator.num_usable,
                num_free_pages=allocator.num_free,
                num_indexed_pages=allocator.num_indexed,
            ),
            scheduler.stats.counters(num_evictions=allocator.num_evictions),
        )


def _is_suspect(chunk: Chunk) -> bool:
    return is_suspect(chunk.sequence.request, chunk.sequence.num_output)
