"""`EngineState`: what a stream of an engine's steps says about the engine now and a minute ago."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from infer.engine.client.step_frames import VERSION
from infer.requests.event_fields import event_of
from infer.requests.state import RequestState, RequestStates
from infer.types.step_events import Finished

Fields = dict[str, Any]
MAX_STEPS = 20_000
MAX_TIMES = 2_000
WINDOW_MS = 60_000.0


@dataclass(slots=True)
class SeenRequest:
    """An unfinished request."""

    state: RequestState
    name: str | None
    """None for a request of another key."""
    choice: int
    max_tokens: int
    since_ms: float
    seat: int | None = None
    """Lowest seat of its replica that was free when it was admitted; None while it waits."""


@dataclass(slots=True)
class StepTotals:
    """A row of a frame."""

    ended_ms: float
    duration_ms: float
    num_steps: int
    num_sequences: int
    num_prompt_tokens: int
    replica: str = ""
    """Name of the engine, where there are several."""


@dataclass
class EngineState:
    """It takes the events of `GET /v1/engine/events` (docs/events.md) one after the other. Memory
    is bounded by the unfinished requests and by the steps of the last minute, of which at most
    `MAX_STEPS` are kept. All times are milliseconds since the stream's zero."""

    hello: Fields = field(default_factory=dict)
    states: RequestStates = field(default_factory=RequestStates)
    requests: dict[str, SeenRequest] = field(default_factory=dict)
    """By number, as text."""
    gauges: Fields = field(default_factory=dict)
    now_ms: float = 0.0
    number: int = 0
    """Number of the latest step."""
    steps: deque[StepTotals] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    first_token_ms: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=MAX_TIMES)
    )
    """When a first token came, and how long after its request."""
    gaps: deque[tuple[float, list[int]]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    output: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    """When output tokens came, and how many."""
    num_left_out: int = 0
    """Frames that the server has left out."""
    end: str | None = None
    """Why the stream has ended."""

    def take(self, kind: str, fields: Fields) -> None:
        """The next event; raises `LookupError`, `TypeError` or `ValueError` for one that is none of
        the format."""
        if kind == "hello":
            if fields.get("version") != VERSION:
                problem = f"its format has version {fields.get('version')}, not {VERSION}"
                raise ValueError(f"{problem}: use the server's own `infer top`")
            self.hello = fields
        elif kind == "end":
            self.end = str(fields["reason"])
        elif kind == "frame":
            self._take_frame(fields)

    def _take_frame(self, frame: Fields) -> None:
        at_ms = float(frame["at"])
        self.now_ms = max(self.now_ms, at_ms)
        if frame.get("restarted"):
            self.states.restarted()
            self._take_seats(*self.requests.values())
        self._take_steps(frame.get("number", self.number), at_ms, frame.get("steps", {}))
        for event in frame.get("events", ()):
            self._take_event(event, at_ms + event["after"])
        total = 0
        for number, count in frame.get("tokens", {}).items():
            total += count
            if (state := self.states.get(number)) is not None:
                state.add_tokens(count, self.now_ms)
        if total:
            self.output.append((self.now_ms, total))
        if "gaps" in frame:
            self.gaps.append((self.now_ms, frame["gaps"]))
        self.gauges = frame.get("gauges", self.gauges)
        self.num_left_out += frame.get("left_out", {}).get("frames", 0)
        if "requests" in frame:
            self._replace(frame["requests"])
        self._forget()

    def _take_steps(self, number: int, at_ms: float, columns: Fields) -> None:
        for row in rows_of(columns):
            duration_ms = row["duration"]
            number, at_ms = number + row["count"], at_ms + row["pause"] + duration_ms
            counts = (row["count"], row["sequences"], row["prompt_tokens"])
            self.steps.append(StepTotals(at_ms, duration_ms, *counts, row.get("replica", "")))
            self.now_ms = max(self.now_ms, at_ms)
        self.number = number

    def _take_event(self, told: Fields, at_ms: float) -> None:
        number = str(told["request"])
        if told["event"] == "queued" and number not in self.requests:
            self._see(told, RequestState(number, told["prompt_tokens"]))
        if told["event"] == "first_token":
            self.first_token_ms.append((at_ms, told["since_received"]))
        event = event_of(number, told)
        if event is None or self.states.apply(event, at_ms, told.get("replica", "")) is None:
            return
        if isinstance(event, Finished):
            self.states.remove(number)
            del self.requests[number]
        else:
            self._take_seats(self.requests[number])

    def _see(self, told: Fields, state: RequestState) -> SeenRequest:
        name, choice, max_tokens = told["name"], told["choice"], told["max_tokens"]
        seen = SeenRequest(self.states.put(state), name, choice, max_tokens, told["received"])
        self.requests[state.request_id] = seen
        return seen

    def _replace(self, columns: Fields) -> None:
        seats = {
            number: (seen.state.replica, seen.seat)
            for number, seen in self.requests.items()
            if seen.seat is not None
        }
        self.states, self.requests = RequestStates(), {}
        for row in rows_of(columns):
            number = str(row["request"])
            state = RequestState(number, row["prompt_tokens"], row["state"])
            state.num_cached, state.num_computed = row["cached_tokens"], row["computed_tokens"]
            state.num_output, state.replica = row["output_tokens"], row.get("replica", "")
            replica, seat = seats.get(number, ("", None))
            self._see(row, state).seat = seat if replica == state.replica else None
        self._take_seats(*self.requests.values())

    def _take_seats(self, *requests: SeenRequest) -> None:
        """A running request has the lowest free seat of its engine, and others have none."""
        for seen in requests:
            if seen.state.status != "running":
                seen.seat = None
            elif seen.seat is None:
                seen.seat = self._free_seat(seen.state.replica)

    def _free_seat(self, replica: str) -> int:
        taken = {
            request.seat for request in self.requests.values() if request.state.replica == replica
        }
        return next(seat for seat in range(len(taken) + 1) if seat not in taken)

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
        replicas = self.gauges.get("replicas", {})
        return {name: gauges for name, gauges in replicas.items() if isinstance(gauges, dict)}

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


def rows_of(columns: Fields) -> Iterator[Fields]:
    """The rows of a table that a frame has as one list for each column."""
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))
