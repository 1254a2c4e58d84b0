"""`FrameBuilder`: the steps of an engine since the last frame, and what happened to its requests

A frame is what a viewer of a running engine gets some times a second: a row for each step, the
events of requests, and the tokens that each request has got. `FrameWriter` writes frames as JSON
for one circle of viewers: requests are numbers that mean something in that circle only, and a name
is written where the circle may know it. docs/events.md describes the format. The server's stream
and the recordings of `infer bench` are made here.

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
from typing import Any, Literal, NamedTuple, assert_never

import msgspec

from infer.types import FinishReason, StepOutput
from infer.types.ends import end_of
from infer.types.step_events import (
    Admitted,
    BatchEnded,
    BatchEvent,
    BatchFormed,
    ComputedChunk,
    Preempted,
    Queued,
    RequestEvent,
    Resumed,
    Speculated,
    StepEvents,
)

VERSION = 1
"""version of the format"""
MAX_STEPS = 256
"""maximum number of rows in a frame"""
MAX_EVENTS = 128
"""maximum number of events in a frame"""
MAX_FOLLOWED = 2000
"""maximum number of waiting requests that are followed; others are followed once they are
admitted"""
GAP_BOUNDS_MS = (1, 2.5, 5, 10, 25, 50, 75, 100, 150, 200, 300, 500, 1000, 2500)
"""upper bounds of the classes by which gaps between two tokens are counted; a last class has those
above"""

State = Literal["waiting", "running", "preempted"]


class RequestFacts(NamedTuple):
    """What does not change about a request."""

    name: str
    """id of the answer to which it belongs"""
    choice: int
    """index of it among the choices of that answer"""
    owner: str
    """id of the key that sent it; empty without keys"""
    num_prompt: int
    """tokens of its prompt"""
    max_tokens: int
    """maximum number of output tokens"""
    received_s: float
    """time of arrival, on the monotonic clock"""


@dataclass(slots=True, eq=False)
class FollowedRequest:
    """An unfinished request as the frames so far describe it."""

    facts: RequestFacts
    state: State = "waiting"
    num_cached: int = 0
    """tokens found in the prefix cache when it was admitted last"""
    num_computed: int = 0
    """tokens that were computed or found since it was admitted last, output tokens apart"""
    num_output: int = 0
    """output tokens so far"""
    last_s: float | None = None
    """time of its latest token; None before the first"""
    member: str = ""
    """name of the engine that has it, or had it last, where there are several"""


class StepRow(NamedTuple):
    """One step, or several neighbours of one engine."""

    num_steps: int
    """number of steps; more than 1 where rows were merged"""
    started_s: float
    ended_s: float
    num_sequences: int
    """sequences computed; a sum over the steps"""
    num_prompt_tokens: int
    """prompt tokens computed; a sum over the steps"""
    num_free_pages: int
    """of the engine, after the last of the steps"""
    num_indexed_pages: int
    """of the engine, after the last of the steps"""
    member: str = ""
    """name of the engine, where there are several"""
    number: int = 0
    """number of the last of the steps at its engine"""

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
            self.member,
            other.number,
        )


def _halved(rows: list[StepRow]) -> list[StepRow]:
    """The rows with each two neighbours of one engine as one."""
    halved: list[StepRow] = []
    single: dict[str, int] = {}  # engine → index of its row that has no partner yet
    for row in rows:
        index = single.pop(row.member, None)
        if index is None:
            single[row.member] = len(halved)
            halved.append(row)
        else:
            halved[index] = halved[index].merged(row)
    return halved


class FrameEvent(NamedTuple):
    """Something that happened to a request."""

    kind: str
    request: FollowedRequest
    at_s: float
    values: tuple[Any, ...] = ()
    """what the format has behind the time; a `FollowedRequest` among them is written as its
    number"""


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
    """number of the step before the first row"""
    rows: list[StepRow] = field(default_factory=list)
    events: list[FrameEvent] = field(default_factory=list)
    batches: list[tuple[str, str, float, tuple[Any, ...]]] = field(default_factory=list)
    """what happened to static batches: kind, id, time and numbers"""
    tokens: dict[FollowedRequest, int] = field(default_factory=dict)
    """output tokens since the frame before"""
    gaps: list[int] = field(default_factory=lambda: [0] * (len(GAP_BOUNDS_MS) + 1))
    """gaps between two tokens of one request, counted by class"""
    restarted_s: float | None = None
    """time at which it was known that the engine had died; the frame's steps are those of the next
    engine"""
    left_out: LeftOut = field(default_factory=LeftOut)
    requests: list[FollowedRequest] | None = None
    """all unfinished requests after the frame, where a viewer cannot know them"""
    gauges: dict[str, Any] | None = None
    """gauges of the engine, where they have changed"""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        fields = (self.rows, self.events, self.tokens, self.batches, self.left_out)
        given = (self.restarted_s, self.requests, self.gauges)
        return not any(fields) and all(each is None for each in given)

    @property
    def num_steps(self) -> int:
        """Number of steps in it."""
        return sum(row.num_steps for row in self.rows)


class FrameBuilder:
    """Collects what an engine reports, until somebody takes the frame."""

    def __init__(
        self,
        describe: Callable[[str], RequestFacts | None],
        *,
        is_bounded: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`describe` gives the facts of a request by the engine's id; None for one that has ended.
        `is_bounded`: whether frames have a maximum size; recordings have none."""
        self._describe = describe
        self._max_steps = MAX_STEPS if is_bounded else None
        self._max_events = MAX_EVENTS if is_bounded else None
        self._clock = clock
        self._followed: dict[str, FollowedRequest] = {}
        self._num_waiting = 0
        self._last_number: int | None = None
        self._frame = Frame()
        self._closed: list[Frame] = []
        """frames that a restart has ended"""

    def follow(self, request_id: str, request: FollowedRequest) -> None:
        """Follow a request that has been there before."""
        self._followed[request_id] = request

    @property
    def requests(self) -> list[FollowedRequest]:
        """The unfinished requests, in the order in which they became known."""
        return list(self._followed.values())

    def stepped(self, outputs: Iterable[StepOutput], step_events: StepEvents | None) -> None:
        """A step has ended. Called for each step, on the event loop."""
        at_s = self._clock() if step_events is None else step_events.ended_s
        if step_events is not None:
            self._add_step(step_events)
        followed, frame = self._followed, self._frame
        known_ms, gap_class = -1.0, 0
        for output in outputs:
            request = followed.get(output.request_id)
            if request is None:
                continue
            if output.token_id is not None:
                frame.tokens[request] = frame.tokens.get(request, 0) + 1
                request.num_output += 1
                if request.last_s is None:
                    first_ms = round(1000 * (at_s - request.facts.received_s), 2)
                    self._note("first_token", request, at_s, first_ms)
                else:
                    gap_ms = 1000 * (at_s - request.last_s)
                    if gap_ms != known_ms:  # most gaps of a step are equal
                        known_ms, gap_class = gap_ms, bisect_left(GAP_BOUNDS_MS, gap_ms)
                    frame.gaps[gap_class] += 1
                request.last_s = at_s
            if output.finish_reason is not None:
                self._finish(output.request_id, at_s, output.finish_reason)

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """The caller of a request has gone; None where it had not finished."""
        self._finish(request_id, self._clock(), reason)

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
        number, started_s, num_prompt = step_events.number, step_events.started_s, 0
        member = step_events.member
        if member:
            number = 1 + (self._last_number or 0)  # the steps of all engines are counted
        elif self._last_number is not None and number < self._last_number:
            self.restarted()
        step_ms = round(1000 * (step_events.ended_s - started_s), 2)
        for event in step_events.events:
            if isinstance(event, BatchEvent):
                self._add_batch(event, started_s)
                continue
            if isinstance(event, ComputedChunk):
                num_prompt += event.num_tokens
            self._add_event(event, started_s, step_ms, member)
        if not step_events.num_sequences:
            return
        frame = self._frame
        if self._last_number is None:
            frame.number = number - 1
        self._last_number = number
        row = StepRow(
            1,
            started_s,
            step_events.ended_s,
            step_events.num_sequences,
            num_prompt,
            step_events.num_free_pages,
            step_events.num_indexed_pages,
            member,
            step_events.number,
        )
        frame.rows.append(row)
        if self._max_steps is not None and len(frame.rows) > self._max_steps:
            frame.rows = _halved(frame.rows)

    def _add_event(self, event: RequestEvent, at_s: float, step_ms: float, member: str) -> None:
        is_new = event.request_id not in self._followed
        request = self._find(event, at_s, member)
        if request is None:
            return
        request.member, where = member, (member,) if member else ()
        match event:
            case Queued():
                if not is_new:
                    self._note("queued", request, at_s, event.num_before, *where)
            case Resumed():
                request.state, request.num_computed, request.num_cached = "waiting", 0, 0
                if not is_new:
                    self._note("resumed", request, at_s, event.num_before, *where)
            case Admitted():
                request.state = "running"
                request.num_cached = request.num_computed = event.num_cached
                self._note("admitted", request, at_s, event.num_cached, event.num_tokens, *where)
            case ComputedChunk():
                request.num_computed = event.start + event.num_tokens
                self._note("chunk", request, at_s, event.start, event.num_tokens, step_ms)
            case Preempted():
                request.state, request.num_computed, request.num_cached = "preempted", 0, 0
                other = None if event.needed_by is None else self._followed.get(event.needed_by)
                self._note("preempted", request, at_s, event.num_lost, other)
            case Speculated():
                self._note("speculated", request, at_s, event.num_proposed, event.num_accepted)
            case _:
                assert_never(event)

    def _add_batch(self, event: BatchEvent, at_s: float) -> None:
        values: tuple[Any, ...]
        match event:
            case BatchFormed():
                kind, at_s = "formed", event.created_s
                wait_ms = round(1000 * event.wait_s, 2)
                values = (event.num_requests, event.num_prompt_tokens, event.num_padded_tokens)
                values = (*values, wait_ms)
            case BatchEnded():
                kind, values = "ended", (event.num_tokens, event.num_padded_tokens)
            case _:
                assert_never(event)
        if self._max_events is None or len(self._frame.batches) < self._max_events // 2:
            self._frame.batches.append((kind, event.batch_id, at_s, values))
        else:
            self._frame.left_out.events += 1

    def _find(self, event: RequestEvent, at_s: float, member: str) -> FollowedRequest | None:
        """The request of an event; a new one is introduced by an event of its own."""
        request = self._followed.get(event.request_id)
        if request is not None:
            return request
        if isinstance(event, Queued) and len(self._followed) >= MAX_FOLLOWED:
            return None
        facts = self._describe(event.request_id)
        if facts is None:
            return None
        request = self._followed[event.request_id] = FollowedRequest(facts)
        num_before = event.num_before if isinstance(event, Queued | Resumed) else 0
        self._note("queued", request, at_s, num_before, *((member,) if member else ()))
        return request

    def _finish(self, request_id: str, at_s: float, reason: FinishReason | None) -> None:
        request = self._followed.pop(request_id, None)
        if request is not None:
            self._note("finished", request, at_s, end_of(reason).outcome, request.num_output)

    def _note(self, kind: str, request: FollowedRequest, at_s: float, *values: Any) -> None:
        frame = self._frame
        full = self._max_events is not None and len(frame.events) >= self._max_events
        if full or frame.left_out.events:
            frame.left_out.events += 1 + len(frame.events)
            frame.events.clear()
        else:
            frame.events.append(FrameEvent(kind, request, at_s, values))


class FrameWriter:
    """Writes frames as JSON for a circle of viewers."""

    def __init__(self, zero_s: float, may_know: Callable[[RequestFacts], bool]) -> None:
        """`zero_s`: the time from which the times in frames count. `may_know` says whether the
        circle is shown a request's name."""
        self._zero_s = zero_s
        self._may_know = may_know
        self._numbers: dict[FollowedRequest, int] = {}
        self._num_given = 0

    def fields(self, frame: Frame, now_s: float) -> dict[str, Any]:
        """A frame as JSON values; see docs/events.md. `now_s` is the time of a frame in which
        nothing happens."""
        at_s = _begin_of(frame, now_s)
        fields: dict[str, Any] = {"at": self._ms(at_s)}
        if frame.restarted_s is not None:
            fields["restarted"] = True
        if frame.rows:
            fields["number"], fields["steps"] = frame.number, list(_step_rows(frame.rows, at_s))
        if frame.events:
            fields["events"] = [self._event(event, at_s) for event in frame.events]
        if frame.batches:
            fields["batches"] = [
                [kind, batch_id, round(1000 * (then_s - at_s), 2), *values]
                for kind, batch_id, then_s, values in frame.batches
            ]
        if frame.tokens:
            counts = frame.tokens.items()
            known = [[self._numbers.get(request), count] for request, count in counts]
            fields["tokens"] = [pair for pair in known if pair[0] is not None]
        for event in frame.events:
            if event.kind == "finished":
                self._numbers.pop(event.request, None)
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
        number = self._numbers.get(request)
        if number is None:
            self._num_given += 1
            number = self._numbers[request] = self._num_given
        return number

    def _event(self, event: FrameEvent, at_s: float) -> list[Any]:
        request, at_ms = event.request, round(1000 * (event.at_s - at_s), 2)
        if event.kind == "queued":
            num_before, *where = event.values
            number = self._number(request)
            return ["queued", number, at_ms, num_before, *self._facts(request), *where]
        values = (
            self._numbers.get(value) if isinstance(value, FollowedRequest) else value
            for value in event.values
        )
        return [event.kind, self._number(request), at_ms, *values]

    def _facts(self, request: FollowedRequest) -> tuple[Any, ...]:
        facts = request.facts
        name = facts.name if self._may_know(facts) else None
        since_ms = self._ms(facts.received_s)
        return name, facts.choice, facts.num_prompt, facts.max_tokens, since_ms

    def _snapshot(self, requests: list[FollowedRequest]) -> list[list[Any]]:
        numbers = {request: self._number(request) for request in requests}
        self._numbers = numbers
        return [
            [
                number,
                request.state,
                *self._facts(request),
                request.num_cached,
                request.num_computed,
                request.num_output,
                *([request.member] if request.member else []),
            ]
            for request, number in numbers.items()
        ]


def _begin_of(frame: Frame, now_s: float) -> float:
    times = [row.started_s for row in frame.rows[:1]]
    times += [event.at_s for event in frame.events[:1]]
    if frame.restarted_s is not None:
        times.append(frame.restarted_s)
    return min(times, default=now_s)


def _step_rows(rows: list[StepRow], since_s: float) -> Iterable[list[float | str]]:
    for row in rows:
        where: list[float | str] = [row.member, row.number] if row.member else []
        yield [
            row.num_steps,
            round(1000 * (row.started_s - since_s), 2),
            round(1000 * (row.ended_s - row.started_s), 2),
            row.num_sequences,
            row.num_prompt_tokens,
            row.num_free_pages,
            row.num_indexed_pages,
            *where,
        ]
        since_s = row.ended_s


def written(fields: Mapping[str, Any]) -> str:
    """JSON values as one line."""
    return msgspec.json.encode(fields).decode()
