"""`RequestStates`: the state of each request, as the events of an engine's steps tell it"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, assert_never

from infer.types import StepOutput
from infer.types.ends import end_of
from infer.types.step_events import (
    Admitted,
    BatchEvent,
    ComputedChunk,
    Finished,
    FirstToken,
    Preempted,
    Queued,
    RequestEvent,
    Resumed,
    Speculated,
    StepEvents,
)

Status = Literal["waiting", "running", "preempted", "finished"]
Event = RequestEvent | BatchEvent


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request. Times are those of the events."""

    request_id: str
    num_tokens: int
    """Tokens that an engine computes before the next one: those that it was sent with."""
    status: Status = "waiting"
    num_cached: int = 0
    """Tokens found in the prefix cache when it was admitted last."""
    num_computed: int = 0
    """Tokens that were computed or found since it was admitted last, its further output apart."""
    num_output: int = 0
    """Output tokens so far."""
    admitted_s: float | None = None
    """When it first got a seat."""
    first_s: float | None = None
    """When it got its first token."""
    last_s: float | None = None
    """When it got its latest token."""
    replica: str = ""
    """Name of the engine that has it, or had it last, where there are several."""

    def apply(self, event: RequestEvent, at_s: float, replica: str = "") -> None:
        """Follow an event of this request; `replica`: name of its engine if there are several."""
        self.replica = replica or self.replica
        match event:
            case Queued() | Resumed():
                self._wait("waiting")
            case Preempted():
                self._wait("preempted")
            case Admitted():
                self.status = "running"
                self.num_cached = self.num_computed = event.num_cached
                if self.admitted_s is None:
                    self.admitted_s = at_s
            case ComputedChunk():
                self.num_computed = event.start + event.num_tokens
            case FirstToken():
                self.first_s = at_s
            case Finished():
                self.status, self.num_output = "finished", event.num_output
            case Speculated():
                pass
            case _:
                assert_never(event)

    def _wait(self, status: Status) -> None:
        self.status, self.num_cached, self.num_computed = status, 0, 0

    def add_tokens(self, count: int, at_s: float) -> float | None:
        """It has got output tokens; returns the time of the one before, None for the first."""
        before_s, self.last_s = self.last_s, at_s
        self.num_output += count
        return before_s


@dataclass(slots=True)
class FoldedStep:
    """A step of an engine, once the states have followed it."""

    step: StepEvents | None
    """None where the outputs come from no step, such as the ends of what an engine died with."""
    ended_s: float
    events: list[tuple[Event, float]] = field(default_factory=list)
    """What happened and when, in order; also to requests that nobody follows any more."""
    tokens: list[tuple[RequestState, int, float | None]] = field(default_factory=list)
    """For each output token its request, which of the request's it is, and the time of the one
    before (None for the first)."""

    @property
    def replica(self) -> str:
        """Name of the engine, where there are several."""
        return "" if self.step is None else self.step.replica


class RequestStates:
    """The only place where events become states. The façade, a fleet's replicas and `infer top`
    each keep `RequestStates` of their own requests; traces, frames, the limits of the queue and
    routers read them. A kind of event is a class in `types.step_events` and a case of
    `RequestState.apply`. The page has the same table (`server/ui/engine/states.js`), and
    tests/server/frames.json has what both must make of the same frames. One thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._by_status: dict[Status, dict[str, int]]
        self._by_status = {"waiting": {}, "running": {}, "preempted": {}}
        self._num_tokens: dict[Status, int] = dict.fromkeys(self._by_status, 0)

    # ---- the requests

    def add(self, request_id: str, num_tokens: int) -> RequestState:
        """Follow a request that is sent to an engine; it waits."""
        return self.put(RequestState(request_id, num_tokens))

    def put(self, state: RequestState) -> RequestState:
        """Follow a request that is in some state."""
        self._states[state.request_id] = state
        self._enter(state)
        return state

    def remove(self, request_id: str) -> None:
        """Follow a request no more; unknown ids are ignored."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._leave(state, state.status)

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request that is followed."""
        return self._states.get(request_id)

    def count(self, *statuses: Status) -> int:
        """Number of the requests that are in one of these states, "finished" apart."""
        by_status, count = self._by_status, 0
        for status in statuses:
            count += len(by_status[status])
        return count

    def num_tokens(self, *statuses: Status) -> int:
        """Sum of their `RequestState.num_tokens`."""
        return sum(self._num_tokens[status] for status in statuses)

    def waiting(self) -> Mapping[str, int]:
        """`num_tokens` of those that wait for a seat, in the order in which they came."""
        return self._by_status["waiting"]

    # ---- what happens to them

    def apply(self, event: RequestEvent, at_s: float, replica: str = "") -> RequestState | None:
        """Follow an event; returns the request's state, None for one that is not followed."""
        state = self._states.get(event.request_id)
        if state is not None:
            status = state.status
            state.apply(event, at_s, replica)
            if state.status != status:
                self._leave(state, status)
                self._enter(state)
        return state

    def follow(self, step: StepEvents) -> list[tuple[Event, float]]:
        """Follow the events of a step; returns them with their times."""
        known: list[tuple[Event, float]] = []
        for event in step.events:
            at_s = step.ended_s if isinstance(event, Speculated) else step.started_s
            if not isinstance(event, BatchEvent):
                self.apply(event, at_s, step.replica)
            known.append((event, at_s))
        return known

    def stepped(self, outputs: Iterable[StepOutput], step: StepEvents | None) -> FoldedStep:
        """Follow a step and what came of it. This is a hot path: it runs for each sequence."""
        if step is None:
            folded = FoldedStep(None, self._clock())
        else:
            folded = FoldedStep(step, step.ended_s, self.follow(step) if step.events else [])
        find, add, ended_s = self._states.get, folded.tokens.append, folded.ended_s
        for output in outputs:
            state = find(output.request_id)
            if state is None:
                continue
            if output.token_id is not None:
                before_s = state.add_tokens(1, ended_s)
                add((state, state.num_output, before_s))
                if before_s is None:
                    self._happened(folded, FirstToken(output.request_id, output.num_cached))
            if output.finish_reason is not None:
                outcome = end_of(output.finish_reason).outcome
                self._happened(folded, Finished(output.request_id, outcome, state.num_output))
        return folded

    def _happened(self, folded: FoldedStep, event: FirstToken | Finished) -> None:
        self.apply(event, folded.ended_s, folded.replica)
        folded.events.append((event, folded.ended_s))

    def restarted(self) -> None:
        """The engine has died: all wait for the next one, which begins with nothing."""
        for state in self._states.values():
            self._leave(state, state.status)
            state.apply(Resumed(state.request_id, 0, 0), 0.0)
            self._enter(state)

    def _enter(self, state: RequestState) -> None:
        if (ids := self._by_status.get(state.status)) is not None:
            ids[state.request_id] = state.num_tokens
            self._num_tokens[state.status] += state.num_tokens

    def _leave(self, state: RequestState, status: Status) -> None:
        if (ids := self._by_status.get(status)) is not None:
            self._num_tokens[status] -= ids.pop(state.request_id)
