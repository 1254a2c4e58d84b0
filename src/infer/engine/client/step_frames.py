"""`FrameBuilder`: the steps of an engine since the last frame, and what happened to its requests

A frame is what a viewer of a running engine gets some times a second: a row for each step, the
events of requests, and the tokens that each request has got. `FrameWriter` writes frames as JSON
for one group of viewers: requests are numbers that mean something in that group only, and a name
is written where the group may know it. docs/events.md describes the format. The server's stream
and the recordings of `infer bench` are made here. What state a request is in is read from
`requests.state`, and what an event says is written by `requests.event_fields`.

Where several engines serve a model, each row, request and event names its engine, and rows of two
engines are never made one: the steps of each are a timeline of their own.

Memory is bounded. Where a frame would hold more than `MAX_STEPS` rows, neighbours become one row;
where it would hold more than `MAX_EVENTS` events, they are left out and counted, and the frame
carries the state of all requests in their place.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, assert_never

import msgspec

from infer.requests.event_fields import fields_of, kind_of
from infer.requests.state import FoldedStep, RequestState
from infer.types import FinishReason
from infer.types.ends import end_of
from infer.types.step_events import (
    BatchEnded,
    BatchEvent,
    BatchFormed,
    ComputedChunk,
    Finished,
    FirstToken,
    Queued,
    RequestEvent,
    Resumed,
    StepEvents,
)

VERSION = 2
"""Version of the format."""
MAX_STEPS = 256
"""Maximum number of rows in a frame."""
MAX_EVENTS = 128
"""Maximum number of events in a frame."""
MAX_FOLLOWED = 2000
"""Maximum number of waiting requests that are followed; others are followed once they are
admitted."""
GAP_BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 500, 1000, 2500)
"""Upper bounds of the classes by which gaps between two tokens are counted; a last class has those
above."""


class RequestFacts(NamedTuple):
    """What does not change about a request."""

    name: str
    """Id of the answer to which it belongs."""
    choice: int
    """Index of it among the choices of that answer."""
    owner: str
    """Id of the key that sent it; empty without keys."""
    num_prompt: int
    """Tokens of its prompt."""
    max_tokens: int
    """Maximum number of output tokens."""
    received_s: float
    """Time of arrival, on the monotonic clock."""


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """An unfinished request that the frames tell of."""

    facts: RequestFacts
    state: RequestState


class StepRow(NamedTuple):
    """One step, or several neighbours of one engine."""

    num_steps: int
    """Number of steps; more than 1 where rows were merged."""
    started_s: float
    ended_s: float
    num_sequences: int
    """Sequences computed; a sum over the steps."""
    num_prompt_tokens: int
    """Prompt tokens computed; a sum over the steps."""
    num_free_pages: int
    """Of the engine, after the last of the steps."""
    num_indexed_pages: int
    """Of the engine, after the last of the steps."""
    replica: str = ""
    """Name of the engine, where there are several."""
    number: int = 0
    """Number of the last of the steps at its engine."""

    def merged(self, other: StepRow) -> StepRow:
        """One row for this one and the next of the same engine."""
        return StepRow(
            self.num_steps + other.num_steps,
            self.started_s,
            other.ended_s,
            self.num_sequences + other.num_sequences,
            self.num_prompt_tokens + other.num_prompt_tokens,
            other.num_free_pages,
            other.num_indexed_pages,
            self.replica,
            other.number,
        )


def _halved(rows: list[StepRow]) -> list[StepRow]:
    """The rows with each two neighbours of one engine as one."""
    halved: list[StepRow] = []
    single: dict[str, int] = {}  # engine → index of its row that has no partner yet
    for row in rows:
        index = single.pop(row.replica, None)
        if index is None:
            single[row.replica] = len(halved)
            halved.append(row)
        else:
            halved[index] = halved[index].merged(row)
    return halved


class FrameEvent(NamedTuple):
    """Something that happened to a request."""

    event: RequestEvent
    request: FollowedRequest
    at_s: float
    more: dict[str, Any]
    """What is known beside the event."""


@dataclass(slots=True)
class LeftOut:
    """What a viewer did not get."""

    frames: int = 0
    steps: int = 0
    events: int = 0

    def add(self, other: LeftOut) -> None:
        """Count more."""
        self.frames += other.frames
        self.steps += other.steps
        self.events += other.events

    def __bool__(self) -> bool:
        return bool(self.frames or self.steps or self.events)


@dataclass(slots=True)
class Frame:
    """What happened since the frame before."""

    number: int = 0
    """Number of the step before the first row."""
    rows: list[StepRow] = field(default_factory=list)
    events: list[FrameEvent] = field(default_factory=list)
    batches: list[tuple[BatchEvent, float]] = field(default_factory=list)
    """What happened to static batches, and when."""
    tokens: dict[FollowedRequest, int] = field(default_factory=dict)
    """Output tokens since the frame before."""
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_MS) + 1))
    """Gaps between two tokens of one request, counted by class."""
    restarted_s: float | None = None
    """Time at which it was known that the engine had died; the frame's steps are those of the next
    engine."""
    left_out: LeftOut = field(default_factory=LeftOut)
    requests: list[FollowedRequest] | None = None
    """All unfinished requests after the frame, where a viewer cannot know them."""
    gauges: dict[str, Any] | None = None
    """Gauges of the engine, where they have changed."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        fields = (self.rows, self.events, self.tokens, self.batches, self.left_out)
        given = (self.restarted_s, self.requests, self.gauges)
        return not any(fields) and all(value is None for value in given)

    @property
    def num_steps(self) -> int:
        """Number of steps in it."""
        return sum(row.num_steps for row in self.rows)


class FrameBuilder:
    """Collects what an engine reports, until somebody takes the frame."""

    def __init__(
        self,
        describe: Callable[[str], FollowedRequest | None],
        *,
        is_bounded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` gives a request by the engine's id; None for one that has ended.
        `is_bounded`: whether frames have a maximum size; recordings have none."""
        self._describe = describe
        self._max_steps = MAX_STEPS if is_bounded else None
        self._max_events = MAX_EVENTS if is_bounded else None
        self._clock = clock
        self._followed: dict[str, FollowedRequest] = {}
        self._last_number: int | None = None
        self._frame = Frame()
        self._closed: list[Frame] = []
        """Frames that a restart has ended."""

    def follow(self, request_id: str) -> None:
        """Tell of a request that has been there before."""
        if (request := self._describe(request_id)) is not None:
            self._followed[request_id] = request

    @property
    def requests(self) -> list[FollowedRequest]:
        """The unfinished requests, in the order in which they became known."""
        return list(self._followed.values())

    def stepped(self, step: FoldedStep) -> None:
        """A step has ended. Called for each step, on the event loop."""
        ended: list[str] = []
        if step.step is not None:
            self._add_step(step.step)
        for event, at_s in step.events:
            if isinstance(event, BatchEvent):
                self._add_batch(event, at_s)
                continue
            self._add_event(event, at_s, step)
            if isinstance(event, Finished):
                ended.append(event.request_id)
        followed, frame = self._followed, self._frame
        known_s, gap_class = -1.0, 0
        for state, _, before_s in step.tokens:
            request = followed.get(state.request_id)
            if request is None:
                continue
            frame.tokens[request] = frame.tokens.get(request, 0) + 1
            if before_s is not None:
                if before_s != known_s:  # most gaps of a step are equal
                    gap_ms = 1000 * (step.ended_s - before_s)
                    known_s, gap_class = before_s, bisect_left(GAP_BOUNDS_MS, gap_ms)
                frame.gaps[gap_class] += 1
        for request_id in ended:
            followed.pop(request_id, None)

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """The caller of a request has gone; None where it had not finished."""
        request = self._followed.pop(request_id, None)
        if request is not None:
            outcome, num_output = end_of(reason).outcome, request.state.num_output
            self._note(Finished(request_id, outcome, num_output), request, self._clock(), {})

    def restarted(self) -> None:
        """The engine has died; another one takes over."""
        if not self._frame.is_empty:
            self._closed.append(self._frame)
        self._frame = Frame(restarted_s=self._clock())
        self._last_number = None

    def take(self) -> list[Frame]:
        """What happened since the last call: one frame, and another for each restart."""
        frames, self._closed = [*self._closed, self._frame], []
        self._frame = Frame()
        if self._last_number is not None:
            self._frame.number = self._last_number
        if frames[-1].left_out.events:
            frames[-1].requests = self.requests
        return frames

    def _add_step(self, step_events: StepEvents) -> None:
        number, replica = step_events.number, step_events.replica
        if replica:
            number = 1 + (self._last_number or 0)  # the steps of all engines are counted
        elif self._last_number is not None and number < self._last_number:
            self.restarted()
        if not step_events.num_sequences:
            return
        frame = self._frame
        if self._last_number is None:
            frame.number = number - 1
        self._last_number = number
        row = StepRow(
            1,
            step_events.started_s,
            step_events.ended_s,
            step_events.num_sequences,
            step_events.num_prompt_tokens,
            step_events.num_free_pages,
            step_events.num_indexed_pages,
            replica,
            step_events.number,
        )
        frame.rows.append(row)
        if self._max_steps is not None and len(frame.rows) > self._max_steps:
            frame.rows = _halved(frame.rows)

    def _add_batch(self, event: BatchEvent, at_s: float) -> None:
        if self._max_events is None or len(self._frame.batches) < self._max_events // 2:
            self._frame.batches.append((event, at_s))
        else:
            self._frame.left_out.events += 1

    def _add_event(self, event: RequestEvent, at_s: float, step: FoldedStep) -> None:
        """Note an event; a new request is introduced by an event of its own."""
        more: dict[str, Any] = {"replica": step.replica} if step.replica else {}
        request = self._followed.get(event.request_id)
        if request is None:
            if isinstance(event, Queued) and len(self._followed) >= MAX_FOLLOWED:
                return
            request = self._describe(event.request_id)
            if request is None:
                return
            self._followed[event.request_id] = request
            waiting = event if isinstance(event, Queued | Resumed) else None
            first = waiting or Resumed(event.request_id, 0, 0)
            before = (first.num_before, first.num_running, first.behind)
            self._note(Queued(event.request_id, *before), request, at_s, more)
            if waiting is not None:
                return
        if isinstance(event, ComputedChunk) and step.step is not None:
            more = {**more, "duration": round(1000 * (step.ended_s - step.step.started_s), 2)}
        elif isinstance(event, FirstToken):
            more = {**more, "since_received": round(1000 * (at_s - request.facts.received_s), 2)}
        self._note(event, request, at_s, more)

    def _note(
        self, event: RequestEvent, request: FollowedRequest, at_s: float, more: dict[str, Any]
    ) -> None:
        frame = self._frame
        full = self._max_events is not None and len(frame.events) >= self._max_events
        if full or frame.left_out.events:
            frame.left_out.events += 1 + len(frame.events)
            frame.events.clear()
        else:
            frame.events.append(FrameEvent(event, request, at_s, more))


class FrameWriter:
    """Writes frames as JSON for a group of viewers."""

    def __init__(self, zero_s: float, may_know: Callable[[RequestFacts], bool]) -> None:
        """`zero_s`: the time from which the times in frames count. `may_know` says whether the
        group is shown a request's name."""
        self._zero_s = zero_s
        self._may_know = may_know
        self._numbers: dict[str, int] = {}
        """The engine's id of each request that is told → its number."""
        self._num_given = 0

    def fields(self, frame: Frame, now_s: float) -> dict[str, Any]:
        """A frame as JSON values; see docs/events.md. `now_s` is the time of a frame in which
        nothing happens."""
        at_s = _begin_of(frame, now_s)
        fields: dict[str, Any] = {"at": self._ms(at_s)}
        if frame.restarted_s is not None:
            fields["restarted"] = True
        if frame.rows:
            fields["number"], fields["steps"] = frame.number, _step_columns(frame.rows, at_s)
        if frame.events:
            fields["events"] = [self._event(event, at_s) for event in frame.events]
        if frame.batches:
            fields["batches"] = [_batch(event, then_s, at_s) for event, then_s in frame.batches]
        if frame.tokens:
            counts = frame.tokens.items()
            known = (
                (self._numbers.get(request.state.request_id), count) for request, count in counts
            )
            fields["tokens"] = {str(number): count for number, count in known if number is not None}
        for told in frame.events:
            if isinstance(told.event, Finished):
                self._numbers.pop(told.event.request_id, None)
        if any(frame.gaps):
            fields["gaps"] = frame.gaps
        if frame.gauges is not None:
            fields["gauges"] = frame.gauges
        if frame.left_out:
            fields["left_out"] = asdict(frame.left_out)
        if frame.requests is not None:
            fields["requests"] = self._snapshot(frame.requests)
        return fields

    def _ms(self, time_s: float) -> float:
        return round(1000 * (time_s - self._zero_s), 2)

    def _number(self, request: FollowedRequest) -> int:
        request_id = request.state.request_id
        number = self._numbers.get(request_id)
        if number is None:
            self._num_given += 1
            number = self._numbers[request_id] = self._num_given
        return number

    def _event(self, told: FrameEvent, since_s: float) -> dict[str, Any]:
        request = told.request
        return {
            "event": kind_of(told.event),
            "request": self._number(request),
            "after": round(1000 * (told.at_s - since_s), 2),
            **fields_of(told.event, self._numbers.get),
            **(self._facts(request) if isinstance(told.event, Queued) else {}),
            **told.more,
        }

    def _facts(self, request: FollowedRequest) -> dict[str, Any]:
        facts = request.facts
        return {
            "name": facts.name if self._may_know(facts) else None,
            "choice": facts.choice,
            "prompt_tokens": facts.num_prompt,
            "max_tokens": facts.max_tokens,
            "received": self._ms(facts.received_s),
        }

    def _snapshot(self, requests: list[FollowedRequest]) -> dict[str, list[Any]]:
        numbers = {known.state.request_id: self._number(known) for known in requests}
        self._numbers = numbers
        return _columns(
            {
                "request": numbers[request.state.request_id],
                **state_fields(request.state),
                **self._facts(request),
            }
            for request in requests
        )


def state_fields(state: RequestState) -> dict[str, Any]:
    """What a frame says of the state of a request."""
    return {
        "state": state.status,
        "cached_tokens": state.num_cached,
        "computed_tokens": state.num_computed,
        "output_tokens": state.num_output,
        "replica": state.replica,
    }


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows with the same names as one list for each name, without those that say nothing."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {name: values for name, values in columns.items() if name != "replica" or any(values)}


def _begin_of(frame: Frame, now_s: float) -> float:
    times = [row.started_s for row in frame.rows[:1]]
    times += [event.at_s for event in frame.events[:1]]
    if frame.restarted_s is not None:
        times.append(frame.restarted_s)
    return min(times, default=now_s)


def _batch(event: BatchEvent, at_s: float, since_s: float) -> dict[str, Any]:
    match event:
        case BatchFormed():
            kind, at_s = "formed", event.created_s
            more = {
                "requests": event.num_requests,
                "prompt_tokens": event.num_prompt_tokens,
                "padded_tokens": event.num_padded_tokens,
                "wait": round(1000 * event.wait_s, 2),
            }
        case BatchEnded():
            kind = "ended"
            more = {"tokens": event.num_tokens, "padded_tokens": event.num_padded_tokens}
        case _:
            assert_never(event)
    after = round(1000 * (at_s - since_s), 2)
    return {"event": kind, "batch_id": event.batch_id, "after": after, **more}


def _step_columns(rows: list[StepRow], since_s: float) -> dict[str, list[Any]]:
    begins = [since_s, *(row.ended_s for row in rows)]
    columns: dict[str, list[Any]] = {
        "count": [row.num_steps for row in rows],
        "pause": [
            round(1000 * (row.started_s - before_s), 2)
            for row, before_s in zip(rows, begins, strict=False)
        ],
        "duration": [round(1000 * (row.ended_s - row.started_s), 2) for row in rows],
        "sequences": [row.num_sequences for row in rows],
        "prompt_tokens": [row.num_prompt_tokens for row in rows],
        "free_pages": [row.num_free_pages for row in rows],
        "cached_pages": [row.num_indexed_pages for row in rows],
    }
    if rows[0].replica:
        columns["replica"] = [row.replica for row in rows]
        columns["number"] = [row.number for row in rows]
    return columns


def written(fields: Mapping[str, Any]) -> str:
    """JSON values as one line."""
    return msgspec.json.encode(fields).decode()
