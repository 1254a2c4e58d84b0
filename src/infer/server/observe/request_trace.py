"""`RequestTraces`: what happened to each request and when, from the events of steps"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Protocol, assert_never

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.step_frames import FollowedRequest, RequestFacts
from infer.errors import CancelledError, RequestError
from infer.requests.event_fields import fields_of, kind_of
from infer.requests.state import FoldedStep, RequestState
from infer.server.http.context import RequestContext, bare_id
from infer.server.http.error_responses import HttpError
from infer.types import FinishReason, Request
from infer.types.ends import outcome_of
from infer.types.server_limits import SERVER_LIMITS, ServerLimits
from infer.types.step_events import (
    Admitted,
    BatchEnded,
    BatchEvent,
    BatchFormed,
    ComputedChunk,
    Finished,
    FirstToken,
    RequestEvent,
    StepEvents,
)

MAX_BATCHES = 16
"""Number of static batches that a trace names; the choices of one request may be in several."""
MAX_REPLICAS = 16
"""Number of engines that a trace names."""
MAX_SHOWN_IDS = 8
"""Number of requests that the error for an ambiguous name shows."""
NUM_GAPS = 5
MAX_STEPS = 256
"""Number of latest steps that can explain a slow gap."""
GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


@dataclass(slots=True)
class ChoiceTrace:
    """The trace of one choice, which is a request of its own to the engine."""

    trace: RequestTrace
    index: int
    state: RequestState
    """As the engine's steps tell it; that of a request that waits until it is sent."""
    num_cached: int = 0
    """Prompt tokens that had been found in the prefix cache when it sampled its first token."""
    reason: FinishReason | None = None
    """Why it ended; None while it runs, and if its client left before the end."""

    @property
    def num_tokens(self) -> int:
        """Output tokens until now."""
        return self.state.num_output


@dataclass(slots=True, eq=False)
class BatchTrace:
    """A static batch, shared by the traces of its requests."""

    formed: BatchFormed
    ended: BatchEnded | None = None
    """None while it runs, and if its engine has died."""

    def fields(self, context: RequestContext | None = None) -> dict[str, Any]:
        """The batch as JSON: sizes in tokens, and its creation as the time of day in seconds.

        With a `context` also in milliseconds since that request was received."""
        formed, ended = self.formed, self.ended
        now_s, now_at = time.monotonic(), time.time()
        since = {} if context is None else {"created_ms": _ms(formed.created_s, context)}
        return {
            "batch_id": formed.batch_id,
            "created": round(now_at - (now_s - formed.created_s), 3),
            **since,
            "requests": formed.num_requests,
            "wait_ms": round(1000 * formed.wait_s, 3),
            "prompt_tokens": formed.num_prompt_tokens,
            "prompt_padding_tokens": formed.num_padded_tokens - formed.num_prompt_tokens,
            "tokens": None if ended is None else ended.num_tokens,
            "padding_tokens": None if ended is None else ended.num_padded_tokens - ended.num_tokens,
        }


@dataclass(slots=True)
class RequestTrace:
    """The trace of one request of a client."""

    id: str
    owner: str
    context: RequestContext
    num_prompt: int
    max_tokens: int
    max_events: int = SERVER_LIMITS.max_trace_events
    choices: dict[str, ChoiceTrace] = field(default_factory=dict)
    """Engine's request id → choice."""
    events: list[dict[str, Any]] = field(default_factory=list)
    num_left_out: int = 0
    gaps: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    """(seconds, details) of the longest gaps between two tokens, the longest first."""
    batches: list[BatchTrace] = field(default_factory=list)
    """The static batches that its choices were in."""
    replicas: list[str] = field(default_factory=list)
    """Names of the engines that had its choices, where there are several, in order of the first
    time."""
    ended_s: float | None = None
    outcome: str | None = None
    error: RequestError | None = None
    """Error with which the request was cancelled."""

    def record(self, at_s: float, choice: int, kind: str, **details: Any) -> None:
        """Add an event while there is room; the last place is kept for `finished`."""
        if len(self.events) < self.max_events - (kind != "finished"):
            of_choice = {"choice": choice} if choice else {}
            self.events.append({"at_ms": self.ms(at_s), "event": kind, **of_choice, **details})
        else:
            self.num_left_out += 1

    @property
    def state(self) -> str:
        """The most advanced state of its choices."""
        if self.outcome is not None:
            return "finished"
        statuses = {
            choice.state.status for choice in self.choices.values() if choice.reason is None
        }
        order = {"running": "running", "preempted": "preempted", "waiting": "queued"}
        return next((shown for status, shown in order.items() if status in statuses), "running")

    @property
    def batch_ids(self) -> list[str]:
        """The ids of its static batches."""
        return [batch.formed.batch_id for batch in self.batches]

    def sum_of(self, name: str) -> int:
        """Sum of a number over its choices; `name`: the attribute of `ChoiceTrace`."""
        return sum(getattr(choice_trace, name) for choice_trace in self.choices.values())

    @property
    def num_preemptions(self) -> int:
        """Number of recorded preemptions of its choices."""
        return sum(event["event"] == "preempted" for event in self.events)

    @property
    def num_restarts(self) -> int:
        """Number of recorded restarts of the engine that one of its choices survived."""
        resumed = (event.get("choice", 0) for event in self.events if event["event"] == "resumed")
        return max(Counter(resumed).values(), default=0)

    def ran_on(self, replica: str) -> None:
        """Note that an engine has one of its choices."""
        if replica not in self.replicas and len(self.replicas) < MAX_REPLICAS:
            self.replicas.append(replica)

    def ms(self, time_s: float | None) -> float | None:
        """Milliseconds from the arrival of the request to a time on the monotonic clock."""
        return None if time_s is None else _ms(time_s, self.context)

    def earliest(self, name: str) -> float | None:
        """Earliest time among its choices; `name`: the attribute of `RequestState`."""
        times = [getattr(choice_trace.state, name) for choice_trace in self.choices.values()]
        return min((time_s for time_s in times if time_s is not None), default=None)


def _ms(time_s: float, context: RequestContext) -> float:
    return round(1000 * (time_s - context.received_s), 3)


class EngineWatcher(Protocol):
    """Gets what the engine reports, as long as somebody watches."""

    def stepped(self, step: FoldedStep) -> None:
        """See `Observer`."""

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """See `Observer`."""

    def ended(self, trace: RequestTrace) -> None:
        """Called when a trace has ended, and with it all of its choices."""


class Histogram:
    """Counts of values by size."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add_to(self, bucket: int, value: float) -> None:
        """Count a value whose bucket is known."""
        self.counts[bucket] += 1
        self.sum += value

    def add(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class RequestTraces:
    """An `Observer` of the engine. A trace is kept from the moment when a request is accepted until
    `max_traces_of_owner` others of its owner have ended after it, or `max_traces` of all owners, of
    whom the one with the most loses its oldest (`ServerLimits`). It has at most `max_trace_events`
    events and the `NUM_GAPS` longest gaps between two tokens, each with what the slowest step in it
    was doing. A token costs one look-up, one subtraction and two comparisons. Ids are those that
    the server makes; the names of other owners' requests are not shown. Lives on the event loop."""

    def __init__(self, engine: AsyncLLM, limits: ServerLimits = SERVER_LIMITS) -> None:
        self._engine = engine
        self._limits = limits
        self._open: dict[str, RequestTrace] = {}
        self._ended: dict[str, RequestTrace] = {}
        self._ended_of: dict[str, dict[str, None]] = {}
        """Owner → ids of its ended traces, the oldest first."""
        self._choices: dict[str, ChoiceTrace] = {}
        self._steps: deque[StepEvents] = deque(maxlen=MAX_STEPS)
        self._batches: dict[str, BatchTrace] = {}
        """The static batch that runs in each engine, by the engine's name."""
        self.on_step: list[Callable[[StepEvents], None]] = []
        self.on_end: list[Callable[[RequestTrace], None]] = []
        self.on_batch_end: list[Callable[[BatchTrace], None]] = []
        self.gaps = Histogram(GAP_BUCKETS_S)
        self._watchers: list[EngineWatcher] = []
        engine.observe(self)

    # ---- from those who watch the engine

    def watch(self, watcher: EngineWatcher) -> None:
        """Call `watcher` from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: EngineWatcher) -> None:
        """Call `watcher` no more."""
        self._watchers.remove(watcher)

    def followed(self, request_id: str) -> FollowedRequest | None:
        """A choice as frames tell of it, by the engine's id; None once its trace has ended."""
        choice = self._choices.get(request_id)
        return None if choice is None else FollowedRequest(_facts(choice), choice.state)

    def unfinished(self) -> list[str]:
        """The engine's ids of the choices that it has not finished."""
        return [
            request_id
            for request_id, choice in self._choices.items()
            if choice.reason is None and choice.state.status != "finished"
        ]

    # ---- from the server

    def begin(
        self,
        answer_id: str,
        context: RequestContext,
        owner: str,
        requests: Sequence[Request],
        num_prompt: int,
    ) -> RequestTrace:
        """Begin the trace of an accepted request; it ends with the answer to the HTTP request."""
        max_tokens, max_events = requests[0].max_tokens, self._limits.max_trace_events
        trace = RequestTrace(answer_id, owner, context, num_prompt, max_tokens, max_events)
        for index, request in enumerate(requests):
            state = RequestState(request.request_id, len(request.prompt_token_ids))
            choice_trace = ChoiceTrace(trace, index, state)
            trace.choices[request.request_id] = self._choices[request.request_id] = choice_trace
        self._open[context.id] = trace
        trace.record(context.received_s, 0, "received")
        context.cleanup.callback(self._end, trace)
        return trace

    def _end(self, trace: RequestTrace) -> None:
        for name in trace.choices:
            del self._choices[name]
        trace.ended_s = time.monotonic()
        reasons = {choice_trace.reason for choice_trace in trace.choices.values()}
        if trace.error is not None:
            trace.outcome = trace.error.code
        else:
            trace.outcome = outcome_of(reasons, failed=trace.context.status >= 400)
        trace.record(trace.ended_s, 0, "finished", outcome=trace.outcome)
        del self._open[trace.context.id]
        self._ended[trace.context.id] = trace
        ended = self._ended_of.setdefault(trace.owner, {})
        ended[trace.context.id] = None
        if len(ended) > self._limits.max_traces_of_owner:
            self._forget(trace.owner)
        elif len(self._ended) > self._limits.max_traces:
            self._forget(max(self._ended_of, key=lambda owner: len(self._ended_of[owner])))
        trace.context.trace_summary = summary(trace)
        for watcher in self._watchers:
            watcher.ended(trace)
        for listener in self.on_end:
            listener(trace)

    def _forget(self, owner: str) -> None:
        """Drop the oldest ended trace of an owner."""
        ended = self._ended_of[owner]
        oldest = self._ended.pop(next(iter(ended)))
        oldest.choices.clear()  # breaks a cycle, so that no garbage collection is needed
        del ended[oldest.context.id]
        if not ended:
            del self._ended_of[owner]

    def cancel(self, trace: RequestTrace, error: RequestError | None = None) -> bool:
        """End a running request with `error`, which its client gets. False if it has ended."""
        if trace.outcome is not None or trace.error is not None:
            return False
        message = "this request was cancelled"
        trace.error = error or CancelledError(message, code="request_cancelled")
        for name in trace.choices:
            self._engine.cancel(name, trace.error)
        return True

    def open_one(self, context_id: str) -> RequestTrace | None:
        """The trace of the running request with this context."""
        return self._open.get(context_id)

    def named(self, name: str, owner: str | None) -> list[RequestTrace]:
        """The traces that a name may mean, among those of `owner` (None: of all). It is the id of
        an answer, or an `x-request-id`: one that the server made, or that of a client, which
        several requests may have. Then all that run, the newest first, or else the one that ended
        last."""
        key = bare_id(name)
        trace = self._open.get(key) or self._ended.get(key)
        if trace is not None and name in (key, trace.id) and owner in (None, trace.owner):
            return [trace]
        named = [trace for trace in self.all(owner) if trace.context.client_id == name]
        return [trace for trace in named if trace.ended_s is None] or named[:1]

    def all(self, owner: str | None) -> Iterator[RequestTrace]:
        """The running traces, then the ended ones, each the newest first; `owner` None: of all."""
        for traces in (self._open, self._ended):
            for trace in reversed(traces.values()):
                if owner in (None, trace.owner):
                    yield trace

    @property
    def num_choices(self) -> int:
        """Number of choices that have not ended, of all owners."""
        return sum(choice_trace.reason is None for choice_trace in self._choices.values())

    def num_queued(self, owner: str) -> int:
        """Number of choices of an owner's requests that wait for a seat; 0 without keys. Its time
        is linear in the number of open choices."""
        choices = self._choices.values() if owner else ()
        return sum(t.trace.owner == owner and t.state.status == "waiting" for t in choices)

    # ---- from the engine

    def entered(self, request: Request, state: RequestState) -> None:
        """See `Observer`."""
        if (choice_trace := self._choices.get(request.request_id)) is not None:
            choice_trace.state = state

    def stepped(self, step: FoldedStep) -> None:
        """See `Observer`. This is a hot path: it runs for each sequence of each step."""
        for watcher in self._watchers:
            watcher.stepped(step)
        if step.step is None:
            return
        self._steps.append(step.step)
        choices, known_s, bucket = self._choices, -1.0, 0
        for event, at_s in step.events:
            if isinstance(event, BatchEvent):
                self._record_batch(event, step.replica)
            elif (choice_trace := choices.get(event.request_id)) is not None:
                self._record_event(choice_trace, event, at_s, step.step)
        for state, number, before_s in step.tokens:
            if before_s is None or (choice_trace := choices.get(state.request_id)) is None:
                continue
            gap_s = step.ended_s - before_s
            if gap_s != known_s:  # most gaps of a step are equal
                known_s, bucket = gap_s, bisect_left(GAP_BUCKETS_S, gap_s)
            self.gaps.add_to(bucket, gap_s)
            gaps = choice_trace.trace.gaps
            if len(gaps) < NUM_GAPS or gap_s > gaps[-1][0]:
                self._note_gap(choice_trace, number, before_s, step.step)
        for listener in self.on_step:
            listener(step.step)

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """See `Observer`."""
        for watcher in self._watchers:
            watcher.left(request_id, reason)
        if (choice_trace := self._choices.get(request_id)) is not None:
            choice_trace.reason = reason

    def _record_batch(self, event: BatchEvent, replica: str) -> None:
        match event:
            case BatchFormed():
                self._batches[replica] = BatchTrace(event)
            case BatchEnded():
                batch = self._batches.pop(replica, None)
                if batch is None or batch.formed.batch_id != event.batch_id:
                    return  # its engine has died meanwhile
                batch.ended = event
                for listener in self.on_batch_end:
                    listener(batch)
            case _:
                assert_never(event)

    def _join_batch(self, trace: RequestTrace, batch_id: str, replica: str) -> None:
        """Note that a choice of a request is in the batch that runs; its choices may be in
        several."""
        batch = self._batches.get(replica)
        if batch is None or batch.formed.batch_id != batch_id or batch in trace.batches:
            return
        if len(trace.batches) < MAX_BATCHES:
            trace.batches.append(batch)

    def _record_event(
        self, choice_trace: ChoiceTrace, event: RequestEvent, at_s: float, step_events: StepEvents
    ) -> None:
        trace = choice_trace.trace
        if isinstance(event, Finished):
            return  # the trace ends with the answer
        if isinstance(event, FirstToken):
            choice_trace.num_cached = event.num_cached
            trace.record(at_s, choice_trace.index, kind_of(event))
            return
        if isinstance(event, Admitted) and event.batch_id is not None:
            self._join_batch(trace, event.batch_id, step_events.replica)
        if isinstance(event, ComputedChunk):
            at_s = step_events.ended_s
        details = fields_of(event, lambda name: self._shown(name, trace))
        details["step"] = step_events.number
        if step_events.replica:
            details["replica"] = step_events.replica
            trace.ran_on(step_events.replica)
        trace.record(at_s, choice_trace.index, kind_of(event), **details)

    def _shown(self, name: str, trace: RequestTrace) -> str:
        """The name of a request in the trace of another one."""
        choice_trace = self._choices.get(name)
        if choice_trace is None or choice_trace.trace.owner != trace.owner:
            return "somebody else's"
        return "another choice of it" if choice_trace.trace is trace else choice_trace.trace.id

    def _note_gap(
        self, choice_trace: ChoiceTrace, number: int, before_s: float, step_events: StepEvents
    ) -> None:
        """Note the gap before a token, the `number`-th of its choice."""
        trace, replica, gap_s = (
            choice_trace.trace,
            step_events.replica,
            step_events.ended_s - before_s,
        )
        within = [
            step for step in self._steps if step.started_s >= before_s and step.replica == replica
        ]
        slowest = max(within, key=lambda step: step.ended_s - step.started_s, default=step_events)
        chunks = [event for event in slowest.events if isinstance(event, ComputedChunk)]
        details = {
            "gap_ms": round(1000 * gap_s, 3),
            "at_ms": trace.ms(step_events.ended_s),
            "token": number,
            "choice": choice_trace.index,
            "steps": max(1, len(within)),
            "slowest_step": {
                "step": slowest.number,
                "step_ms": round(1000 * (slowest.ended_s - slowest.started_s), 3),
                "sequences": slowest.num_sequences,
                "prompt_tokens": slowest.num_prompt_tokens,
                "prompts_of": [self._shown(event.request_id, trace) for event in chunks[:4]],
                **({"replica": replica} if replica else {}),
            },
        }
        trace.gaps.append((gap_s, details))
        trace.gaps.sort(key=lambda gap: -gap[0])
        del trace.gaps[NUM_GAPS:]


def _facts(choice: ChoiceTrace) -> RequestFacts:
    trace = choice.trace
    return RequestFacts(
        trace.id,
        choice.index,
        trace.owner,
        choice.state.num_tokens,
        trace.max_tokens,
        trace.context.received_s,
    )


def the_one(traces: Sequence[RequestTrace], name: str) -> RequestTrace:
    """The one of those that `RequestTraces.named` found for a name, in one or several engines.

    It is the one that has the name as its own id, or else the one that runs, or else the one that
    ended last. Raises `HttpError`: 404 if there is none, 409 if several run."""
    for trace in traces:
        if name in (trace.id, trace.context.id):
            return trace
    running = [trace.id for trace in traces if trace.ended_s is None]
    if len(running) > 1:
        raise several_run(running)
    if not traces:
        raise RequestNotFoundError
    return max(traces, key=lambda trace: (trace.ended_s is None, trace.ended_s or 0.0))


def several_run(ids: Sequence[str]) -> HttpError:
    """The error for a client's `x-request-id` that several running requests have."""
    shown = ", ".join(ids[:MAX_SHOWN_IDS]) + (", …" if len(ids) > MAX_SHOWN_IDS else "")
    message = f"{len(ids)} requests with this x-request-id run: name one of them by its id, {shown}"
    return HttpError(409, message, code="request_ambiguous")


class RequestNotFoundError(HttpError):
    """The error for an unknown id, or one of another owner."""

    def __init__(self) -> None:
        message = "there is no such request; the server remembers those that run and some that"
        super().__init__(404, f"{message} ended", code="request_not_found")


def cancel_answer(trace: RequestTrace, done: bool) -> dict[str, Any]:
    """The answer to `/v1/requests/{id}/cancel`; `done` is what `RequestTraces.cancel` returned."""
    return {"id": trace.id, "object": "request.cancel", "cancelled": done}


def summary(trace: RequestTrace) -> dict[str, Any]:
    """A trace as it is shown in a list."""
    return trace.context.trace_summary or {
        "id": trace.id,
        "object": "request",
        "client_request_id": trace.context.client_id,
        "path": trace.context.path,
        "created": int(trace.context.received_at),
        "state": trace.state,
        "outcome": trace.outcome,
        "choices": len(trace.choices),
        "prompt_tokens": trace.num_prompt,
        "cached_tokens": trace.sum_of("num_cached"),
        "completion_tokens": trace.sum_of("num_tokens"),
        "max_tokens": trace.max_tokens,
        "preemptions": trace.num_preemptions,
        "restarts": trace.num_restarts,
        "admitted_ms": trace.ms(trace.earliest("admitted_s")),
        "first_token_ms": trace.ms(trace.earliest("first_s")),
        "total_ms": trace.ms(trace.ended_s),
        **({"batch_ids": trace.batch_ids} if trace.batches else {}),
        **({"replicas": trace.replicas} if trace.replicas else {}),
    }


def view(trace: RequestTrace) -> dict[str, Any]:
    """A whole trace as JSON; times are milliseconds since the request was received."""
    batches = [batch.fields(trace.context) for batch in trace.batches]
    return {
        **summary(trace),
        **({"batches": batches} if batches else {}),
        "events": sorted(trace.events, key=itemgetter("at_ms")),
        "events_left_out": trace.num_left_out,
        "slowest_gaps": [details for _, details in trace.gaps],
    }
