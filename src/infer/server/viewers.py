"""`EngineViewers`: those who watch one engine, and the frames that they get"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.step_frames import (
    GAP_BOUNDS_MS,
    VERSION,
    Frame,
    FrameBuilder,
    FrameWriter,
    LeftOut,
    RequestFacts,
    written,
)
from infer.errors import EngineDeadError, RequestError
from infer.requests.state import FoldedStep
from infer.server.http.error_responses import HttpError, too_many
from infer.server.observe.request_trace import RequestTrace, RequestTraces
from infer.server.openai.events import dump, event
from infer.types import FinishReason
from infer.types.engine_stats import EngineStats

log = logging.getLogger(__name__)

MAX_VIEWERS = 8
"""Maximum number of viewers of an engine."""
MAX_VIEWERS_A_KEY = 4
"""Maximum number of them with one key."""
TURN_S = 10.0
"""Seconds after which a viewer gives way to a key without one, where each has one."""
FRAME_S = 0.05
"""Minimum seconds between two frames."""
IDLE_FRAME_S = 1.0
"""Seconds without anything to tell after which an empty frame says that the stream lives."""
MAX_BYTES_A_SECOND = 40_000
"""Bytes of frames a second for a viewer, on average; with the largest frame less than 64 KiB in any
second."""
MAX_PENDING_BYTES = 64 * 1024
"""Bytes that wait for a viewer who reads slowly."""
MAX_EVERY_MS = 1000
"""Maximum number of milliseconds for which a viewer may let frames wait for the next write; the
frames of that time must fit into `MAX_PENDING_BYTES`."""
_CREDIT_BYTES = 2_000
"""Bytes that may be written at once after a quiet time, in addition to the frame itself."""
_RETRY_S = 5


class Viewer:
    """One who watches: the events that he has not read. Has one reader, on the event loop."""

    def __init__(
        self,
        owner: str | None,
        party: str,
        since_s: float,
        hello: bytes,
        *,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`owner`: id of the key whose requests he knows by name; None for all. `party`: see
        `EngineViewers.join`. `since_s`: when he came. `hello`: the first event. `every_s`: minimum
        seconds between two results of `take`."""
        self.owner = owner
        self._every_s, self._clock, self._due_s = every_s, clock, since_s
        self._end = asyncio.Event()
        self.party = party
        self.since_s = since_s
        self.is_synced = False
        """Whether he knows the state of all requests as of the last frame."""
        self.left_out = LeftOut()
        """What he did not get since he was in sync; nothing before he was for the first time."""
        self._has_begun = False
        self._pending = [hello]
        self._num_bytes = 0
        self._arrival: asyncio.Future[None] | None = None
        self._is_resting = False

    @property
    def has_read_all(self) -> bool:
        """Whether he waits for the next event."""
        return not self._pending and (self._arrival is not None or self._is_resting)

    def put(self, data: bytes, told: Frame) -> None:
        """Add a frame, unless too much waits already; then he gets no more until he has read it."""
        if self._num_bytes + len(data) > MAX_PENDING_BYTES:
            self.is_synced = False
        if not self.is_synced:
            self.skip(told)
            return
        self._add(data)

    def skip(self, told: Frame) -> None:
        """Count a frame that he does not get."""
        if self._has_begun:
            self.left_out.add(LeftOut(1, told.num_steps, len(told.events)))

    def sync(self, data: bytes) -> None:
        """Add a frame with the state of all requests."""
        self.is_synced = self._has_begun = True
        self.left_out = LeftOut()
        self._add(data)

    def end(self, reason: str) -> None:
        """Let the stream end, with an event that says why."""
        if not self._end.is_set():
            self._add(event(dump({"reason": reason}), "end"))
            self._end.set()

    def _add(self, data: bytes) -> None:
        if self._end.is_set():
            return
        self._pending.append(data)
        self._num_bytes += len(data)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def take(self) -> bytes | None:
        """The events that wait, as one piece, at most one each `every_s`; None after the end."""
        await self._rest()
        if not self._pending and not self._end.is_set():
            self._arrival = asyncio.get_running_loop().create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        if not self._pending:
            return None
        data, self._pending, self._num_bytes = b"".join(self._pending), [], 0
        self._due_s = self._clock() + self._every_s
        return data

    async def _rest(self) -> None:
        """Wait until the next piece is due, or for the end."""
        if (left_s := self._due_s - self._clock()) <= 0:
            return
        self._is_resting = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._end.wait(), left_s)
        self._is_resting = False


@dataclass(eq=False)
class ViewerGroup:
    """Viewers who may know the same names."""

    writer: FrameWriter
    viewers: list[Viewer] = field(default_factory=list)


class EngineViewers:
    """Nothing is collected and no timer runs while nobody watches. Viewers who may know the same
    names are a group: a frame is written once for all of them. A group's numbers for requests are
    its own, and only owners and administrators get names.

    Every bound is one of memory or of traffic, and none of them reaches the engine. At most
    `MAX_VIEWERS` watch; no number of keys or clients can keep all of these places from another. A
    frame has a maximum size (`step_frames`), and frames are written only while their bytes stay
    within `MAX_BYTES_A_SECOND`; what waits for a later frame is merged. What a viewer has not read
    is dropped beyond `MAX_PENDING_BYTES` and counted; once it reads again, it gets the state of all
    requests. A viewer may ask for less frequent writes: then he gets several frames at once. For a
    browser on the cores of the engine each piece of a stream costs more than what is in it. Lives
    on the event loop.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        traces: RequestTraces,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._traces = traces
        self._clock = clock
        self._viewers: dict[Viewer, None] = {}
        """Those who watch, the oldest first."""
        self._groups: dict[str | None, ViewerGroup] = {}
        self._builder: FrameBuilder | None = None
        """None while nobody watches."""
        self._ticking: asyncio.Task[None] | None = None
        self._zero_s = 0.0
        self._zero_at = 0.0
        self._gauges: dict[str, Any] = {}
        self._num_restarts = 0
        self._credit = 0.0
        self._told_s = 0.0
        """Time of the last frame."""

    @property
    def num_viewers(self) -> int:
        """Number of those who watch."""
        return len(self._viewers)

    def join(
        self, owner: str | None, key_id: str, address: str = "", *, every_s: float = 0.0
    ) -> Viewer:
        """A new viewer, who must `leave` and gets at most one piece each `every_s` seconds. Raises
        `HttpError` if there are too many (503) or too many with his key (429), `EngineDeadError` if
        the server shuts down.

        Viewers with one key are a party; without keys, those from one `address` are. If all places
        are taken, the party that has most of them gives one up for a party that has fewer. Parties
        that have one each take turns with one that has none, of `TURN_S`."""
        if self._engine.is_ending:
            raise EngineDeadError("the server is shutting down")
        party = key_id or address
        num_own = sum(other.party == party for other in self._viewers)
        if key_id and num_own >= MAX_VIEWERS_A_KEY:
            raise too_many(f"this key may have {MAX_VIEWERS_A_KEY} viewers of an engine", _RETRY_S)
        if self.num_viewers >= MAX_VIEWERS and not self._make_room(num_own):
            raise HttpError(
                503,
                f"{MAX_VIEWERS} viewers watch this engine, which is the maximum: close one of them",
                code="too_many_viewers",
                type="overloaded_error",
                retry_after_s=_RETRY_S if num_own else max(1, math.ceil(self._turn_left_s())),
            )
        if self._builder is None:
            self._begin()
        hello = event(dump(self._hello()), "hello")
        viewer = Viewer(owner, party, self._clock(), hello, every_s=every_s, clock=self._clock)
        group = self._groups.get(owner)
        if group is None:
            group = self._groups[owner] = ViewerGroup(self._writer(owner))
        group.viewers.append(viewer)
        self._viewers[viewer] = None
        return viewer

    def _make_room(self, num_own: int) -> bool:
        """End the oldest viewer of the party that has most, if it has more than a party of
        `num_own` will have with one more, or a party has none and it is its turn; returns whether
        there is room now."""
        sizes = Counter(viewer.party for viewer in self._viewers)
        party, most = sizes.most_common(1)[0]  # of several the one whose viewer is the oldest
        if most <= num_own + 1 and (num_own or self._turn_left_s() > 0):
            return False
        oldest = next(viewer for viewer in self._viewers if viewer.party == party)
        oldest.end("replaced")
        self.leave(oldest)
        return True

    def _turn_left_s(self) -> float:
        """Seconds for which the oldest viewer gives way to nobody."""
        return next(iter(self._viewers)).since_s + TURN_S - self._clock()

    def leave(self, viewer: Viewer) -> None:
        """One watches no more; with the last one the collecting ends."""
        if viewer not in self._viewers:
            return  # he has given his place up
        del self._viewers[viewer]
        group = self._groups[viewer.owner]
        group.viewers.remove(viewer)
        if not group.viewers:
            del self._groups[viewer.owner]
        if not self._groups:
            self._traces.unwatch(self)
            self._builder = None
            if self._ticking is not None:
                self._ticking.cancel()
                self._ticking = None

    # ---- what the engine reports; see `EngineWatcher`

    def stepped(self, step: FoldedStep) -> None:
        """See `Observer`."""
        if self._builder is not None:
            self._builder.stepped(step)

    def left(self, request_id: str, reason: FinishReason | None) -> None:
        """See `Observer`."""
        if self._builder is not None:
            self._builder.left(request_id, reason)

    def ended(self, trace: RequestTrace) -> None:
        """See `EngineWatcher`."""
        if self._builder is not None:
            for request_id in trace.choices:
                self._builder.left(request_id, None)

    # ---- frames

    def _begin(self) -> None:
        self._zero_s, self._zero_at = self._clock(), time.time()
        self._builder = FrameBuilder(self._traces.followed, clock=self._clock)
        for request_id in self._traces.unfinished():
            self._builder.follow(request_id)
        self._num_restarts = self._engine.read_stats().engine.counters.num_restarts
        self._gauges, self._credit, self._told_s = {}, float(_CREDIT_BYTES), self._zero_s
        self._traces.watch(self)
        self._ticking = asyncio.ensure_future(self._tick_often())

    def _writer(self, owner: str | None) -> FrameWriter:
        def may_know(facts: RequestFacts) -> bool:
            return owner is None or facts.owner == owner

        return FrameWriter(self._zero_s, may_know)

    def _hello(self) -> dict[str, Any]:
        engine = self._engine
        return {
            "version": VERSION,
            "model": engine.model_name,
            "mode": engine.batching_mode,
            "seats": engine.num_seats,
            "page_size": engine.page_size,
            "max_model_len": engine.max_seq_len,
            "gap_bounds_ms": GAP_BOUNDS_MS,
            "time": round(1000 * self._zero_at),
        }

    async def _tick_often(self) -> None:
        try:
            while True:
                await asyncio.sleep(FRAME_S)
                self._credit += MAX_BYTES_A_SECOND * FRAME_S
                self._credit = min(self._credit, float(_CREDIT_BYTES))
                self._tick()
        except Exception:
            log.exception("the engine's viewers get no more frames")
            self._end_all("failed")

    def _end_all(self, reason: str) -> None:
        for viewer in self._viewers:
            viewer.end(reason)

    def _tick(self) -> None:
        """Write what has happened since the last frame, if there is credit for it."""
        builder = self._builder
        assert builder is not None
        if self._engine.is_ending:
            self._end_all("shutting_down")
            return
        gauges = self._read_gauges()
        if self._credit < 0:
            return
        frames = builder.take()
        frames[-1].gauges = None if gauges == self._gauges else gauges
        self._gauges = gauges
        now_s = self._clock()
        is_idle = all(frame.is_empty for frame in frames)
        if not is_idle or now_s >= self._told_s + IDLE_FRAME_S:
            self._told_s = now_s
            shown = [frame for frame in frames if is_idle or not frame.is_empty]
            self._credit -= max(
                self._put_frames(group, shown, now_s) for group in self._groups.values()
            )
        self._credit -= max(self._sync(group, now_s) for group in self._groups.values())

    def _put_frames(self, group: ViewerGroup, frames: list[Frame], now_s: float) -> int:
        """Give frames to the viewers of a group; returns the bytes that each of them gets."""
        num_bytes = 0
        for frame in frames:
            data = self._data(group, frame, now_s)
            num_bytes += len(data)
            for viewer in group.viewers:
                viewer.put(data, frame)
        return num_bytes

    def _sync(self, group: ViewerGroup, now_s: float) -> int:
        """Give the state of all requests to those of a group who do not know it and are there to
        read it; returns the bytes that each of them gets."""
        assert self._builder is not None
        num_bytes = 0
        for viewer in group.viewers:
            if not viewer.is_synced and viewer.has_read_all:
                state = Frame(
                    requests=self._builder.requests, gauges=self._gauges, left_out=viewer.left_out
                )
                data = self._data(group, state, now_s)
                num_bytes = max(num_bytes, len(data))
                viewer.sync(data)
        return num_bytes

    @staticmethod
    def _data(group: ViewerGroup, frame: Frame, now_s: float) -> bytes:
        return event(written(group.writer.fields(frame, now_s)), "frame")

    def _read_gauges(self) -> dict[str, Any]:
        stats, by_replica = self._engine.read_stats(), self._engine.stats_of_replicas()
        counters = stats.engine.counters
        if counters.num_restarts > self._num_restarts:
            self._num_restarts = counters.num_restarts
            if self._builder is not None and not by_replica:
                self._builder.restarted()
        ready = self._engine.ready_replicas()
        replicas = {
            name: _gauges_of(of_replica, name in ready) for name, of_replica in by_replica.items()
        }
        return {
            **_gauges_of(stats.engine, self._engine.is_ready),
            "open": stats.num_open,
            **({"replicas": replicas} if replicas else {}),
        }


def every_s_of(given: str | None) -> float:
    """Seconds between two writes, of what a viewer's query says of it in milliseconds; 0 without.
    Raises `RequestError`."""
    text = "0" if given is None else given
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and int(text) <= MAX_EVERY_MS):
        message = f"every_ms must be a number of milliseconds: an integer from 0 to {MAX_EVERY_MS}"
        raise RequestError(message, param="every_ms", code="invalid_value")
    return int(text) / 1000


def _gauges_of(stats: EngineStats, is_ready: bool) -> dict[str, Any]:
    """The gauges of one engine, or of all together."""
    gauges = stats.gauges
    return {
        "ready": is_ready,
        "waiting": gauges.num_waiting,
        "running": gauges.num_running,
        "preempted": gauges.num_preempted,
        "pages": gauges.num_pages,
        "free_pages": gauges.num_free_pages,
        "cached_pages": gauges.num_indexed_pages,
        "restarts": stats.counters.num_restarts,
    }
