"""`EngineState`: what a stream of an engine's steps says about the engine now and a minute ago.

It takes the events of `GET /v1/engine/events` (docs/events.md) one after the other. Memory is
bounded by the unfinished requests and by the steps of the last minute, of which at most
`MAX_STEPS` are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

Fields = dict[str, Any]
MAX_STEPS = 20_000
MAX_TIMES = 2_000
WINDOW_MS = 60_000.0


@dataclass(slots=True)
class RequestState:
    """An unfinished request."""

    number: int
    name: str | None
    """None for a request of another key"""
    choice: int
    num_prompt: int
    max_tokens: int
    since_ms: float
    state: str = "waiting"
    num_cached: int = 0
    num_computed: int = 0
    num_output: int = 0
    seat: int | None = None
    """lowest seat of its replica that was free when it was admitted; None while it waits"""
    replica: str = ""
    """name of the engine that has it, or had it last, where there are several"""


@dataclass(slots=True)
class StepTotals:
    """A row of a frame."""

    ended_ms: float
    duration_ms: float
    num_steps: int
    num_sequences: int
    num_prompt_tokens: int
    replica: str = ""
    """name of the engine, where there are several"""


@dataclass
class EngineState:
    """See the module's docstring. All times are milliseconds since the stream's zero."""

    hello: Fields = field(default_factory=dict)
    requests: dict[int, RequestState] = field(default_factory=dict)
    gauges: Fields = field(default_factory=dict)
    now_ms: float = 0.0
    number: int = 0
    """number of the latest step"""
    steps: deque[StepTotals] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    first_token_ms: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_TIMES)
    )
    """when a first token came, and how long after its request"""
    gaps: deque[tuple[float, list[int]]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    output: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """when output tokens came, and how many"""
    num_left_out: int = 0
    """frames that the server has left out"""
    end: str | None = None
    """why the stream has ended"""

    def take(self, kind: str, fields: Fields) -> None:
        """The next event; raises `LookupError`, `TypeError` or `ValueError` for one that is none of
        the format."""
        if kind == "hello":
            self.hello = fields
        elif kind == "end":
            self.end = str(fields["reason"])
        elif kind == "frame":
            self._take_frame(fields)

    def _take_frame(self, frame: Fields) -> None:
        at_ms = float(frame["at"])
        self.now_ms = max(self.now_ms, at_ms)
        if frame.get("restarted"):
            for request in self.requests.values():
                request.state, request.seat, request.num_computed = "waiting", None, 0
        self._take_steps(frame.get("number", self.number), at_ms, frame.get("steps", ()))
        for kind, number, after_ms, *values in frame.get("events", ()):
            self._take_event(kind, number, at_ms + after_ms, values)
        total = 0
        for number, count in frame.get("tokens", ()):
            total += count
            if number in self.requests:
                self.requests[number].num_output += count
        if total:
            self.output.append((self.now_ms, total))
        if "gaps" in frame:
            self.gaps.append((self.now_ms, frame["gaps"]))
        self.gauges = frame.get("gauges", self.gauges)
        self.num_left_out += frame.get("left_out", {}).get("frames", 0)
        if "requests" in frame:
            self._replace(frame["requests"])
        self._forget()

    def _take_steps(self, number: int, at_ms: float, rows: Iterable[list[Any]]) -> None:
        for count, pause_ms, duration_ms, num_sequences, num_prompt, _, _, *where in rows:
            number, at_ms = number + count, at_ms + pause_ms + duration_ms
            replica = str(where[0]) if where else ""
            self.steps.append(
                StepTotals(at_ms, duration_ms, count, num_sequences, num_prompt, replica)
            )
            self.now_ms = max(self.now_ms, at_ms)
        self.number = number

    def _take_event(self, kind: str, number: int, at_ms: float, values: list[Any]) -> None:
        if kind == "queued" and number not in self.requests:
            self.requests[number] = RequestState(number, *values[1:6])
        request = self.requests.get(number)
        if request is None:
            return
        num_values = {"queued": 6, "admitted": 2, "resumed": 1}.get(kind)
        if num_values is not None and len(values) > num_values:
            request.replica = str(values[num_values])
        match kind:
            case "admitted":
                request.state, request.num_cached = "running", values[0]
                request.num_computed, request.seat = values[0], self._free_seat(request.replica)
            case "chunk":
                request.num_computed = values[0] + values[1]
            case "first_token":
                self.first_token_ms.append((at_ms, values[0]))
            case "preempted":
                request.state, request.seat, request.num_computed = "preempted", None, 0
            case "resumed":
                request.state, request.seat, request.num_computed = "waiting", None, 0
            case "finished":
                del self.requests[number]

    def _free_seat(self, replica: str) -> int:
        taken = {each.seat for each in self.requests.values() if each.replica == replica}
        return next(seat for seat in range(len(taken) + 1) if seat not in taken)

    def _replace(self, rows: Iterable[list[Any]]) -> None:
        seats = {
            number: (each.replica, each.seat)
            for number, each in self.requests.items()
            if each.seat is not None
        }
        self.requests = {}
        for number, state, name, choice, num_prompt, most, since_ms, *counts in rows:
            request = RequestState(number, name, choice, num_prompt, most, since_ms, state)
            request.num_cached, request.num_computed, request.num_output, *where = counts
            request.replica = str(where[0]) if where else ""
            replica, seat = seats.get(number, ("", None))
            if state == "running" and replica == request.replica:
                request.seat = seat
            self.requests[number] = request
        for request in self.requests.values():
            if request.state == "running" and request.seat is None:
                request.seat = self._free_seat(request.replica)

    def _forget(self) -> None:
        since_ms = self.now_ms - WINDOW_MS
        while self.steps and self.steps[0].ended_ms < since_ms:
            self.steps.popleft()
        for times in (self.first_token_ms, self.gaps, self.output):
            while times and times[0][0] < since_ms:
                times.popleft()

    # ---- what a view shows

    @property
    def replicas(self) -> dict[str, Fields]:
        """Gauges of each engine by name; empty where there is one."""
        found = self.gauges.get("replicas", {})
        return {name: each for name, each in found.items() if isinstance(each, dict)}

    def steps_of(self, replica: str) -> list[StepTotals]:
        """The steps of the last minute of one of several engines."""
        return [step for step in self.steps if step.replica == replica]

    def rate(self, values: Iterable[tuple[float, float]], over_ms: float = 5_000.0) -> float:
        """Sum of (time, number) pairs of the last `over_ms`, per second."""
        since_ms = self.now_ms - over_ms
        return sum(value for at_ms, value in values if at_ms >= since_ms) / (over_ms / 1000)

    def history(self, values: Iterable[tuple[float, float]], num_columns: int) -> list[float]:
        """Sums of (time, number) pairs of the last minute in columns of equal width, the latest
        last."""
        columns = [0.0] * num_columns
        width_ms = WINDOW_MS / num_columns
        for at_ms, value in values:
            column = num_columns - 1 - int((self.now_ms - at_ms) / width_ms)
            if 0 <= column < num_columns:
                columns[column] += value
        return columns

    def gap_percentile(self, share: float) -> float | None:
        """Upper bound of the class in which so large a share of the gaps between two tokens of the
        last minute ends, in milliseconds; None without gaps."""
        bounds = self.hello.get("gap_bounds_ms", ())
        counts = [sum(column) for column in zip(*(gaps for _, gaps in self.gaps), strict=False)]
        wanted, so_far = share * sum(counts), 0
        for count, bound in zip(counts, [*bounds, float("inf")], strict=False):
            so_far += count
            if count and so_far >= wanted:
                return float(bound)
        return None
