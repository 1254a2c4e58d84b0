"""`ReplicaHost`: one engine that serves several fronts, and its ends of their links"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import msgspec

from infer.engine.commands import Abort, Add, Command, FollowPages, Reset, Stop
from infer.replicas.contract import ReplicaContract
from infer.replicas.messages import (
    Commands,
    Draining,
    EngineHealth,
    Event,
    Failing,
    FrameBuffer,
    Heartbeat,
    IsolatedStep,
    Loss,
    Ready,
    decode_inward,
    frame_of,
    reports,
)
from infer.replicas.router import ReplicaLoad
from infer.types import StepOutput
from infer.types.step_events import ForeignLoad, StepEvents

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 32 << 20
"""Bytes that wait for one front before its link is dropped."""
MAX_SILENCE_S = 10.0
"""Seconds without a sign of a front after which its link is dropped."""
SILENT_S = 2.5
"""Seconds without a sign of the engine's process, which gives one every `HEARTBEAT_S`, after
which no generation of a link begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What one engine has to do."""

    num_waiting_tokens: float = 0.0
    """Prompt tokens of requests without a seat."""
    prompt_tokens_per_s: float = 0.0
    """Measured; 0 where nothing has been measured."""
    num_unfinished: float = 0.0
    """Requests with or without a seat."""
    num_seats: float = 1.0


class FrontLink:
    """The queue of one front, and the requests that it has here."""

    def __init__(self, front: str, load: ReplicaLoad, wake: Callable[[], None]) -> None:
        """`wake` is called, by any thread, when there is something to take."""
        self.front = front
        """Name of the front."""
        self.generation = 0
        """Number of its present generation; 0 before the first."""
        self.begins_after: int | None = None
        """Commands that the engine must have applied before the next generation begins, so that
        none of its outputs is of a request of an earlier one; None where none is to begin."""
        self.load = load
        """Its requests."""
        self.requests: set[str] = set()
        """Ids of its requests."""
        self.heard_s = time.monotonic()
        self.is_closed = False
        self._wake = wake
        self._lock = threading.Lock()
        self._frames: list[bytes] = []
        self._num_bytes = 0

    def touch(self) -> None:
        """The front has given a sign."""
        self.heard_s = time.monotonic()

    def end_generation(self, num_commands: int) -> None:
        """The next generation begins when the engine has applied so many commands."""
        self.begins_after = num_commands

    def begin(self, load: ReplicaLoad, generation: int) -> None:
        """Another generation begins, with nothing to do."""
        self.generation, self.load, self.begins_after = generation, load, None

    def put(self, event: Event | Heartbeat) -> bool:
        """Queue an event; returns False, and closes the link, where the queue is full."""
        frame = frame_of(event)
        with self._lock:
            if self._num_bytes + len(frame) > MAX_QUEUED_BYTES:
                self.close()
                return False
            self._num_bytes += len(frame)
            self._frames.append(frame)
        self._wake()
        return True

    def take(self) -> bytes | None:
        """The frames of all events that wait; None if there are none."""
        with self._lock:
            frames = b"".join(self._frames)
            self._frames.clear()
            self._num_bytes = 0
        return frames or None

    def close(self) -> None:
        """Nothing more comes."""
        self.is_closed = True
        self._wake()


class ReplicaHost:
    """It is the listener of its replica. Each front gets the outputs of its own requests and the
    events of all steps, through a queue that is bounded in bytes: an engine never waits for a
    front. A link whose queue is full, or whose front is silent, is dropped with its requests; the
    front's journal has them. The generations of all links are numbered together, and each number is
    used once. It knows no Ray: `take` and `command` are called by whatever carries the bytes. A
    `ReplicaListener`."""

    def __init__(self, replica: ReplicaContract, *, first_generation: int = 1) -> None:
        """`first_generation`: above all numbers of a host whose place this one takes."""
        self.replica = replica
        """The engine."""
        self._next_generation = first_generation
        self._lock = threading.RLock()
        self._links: dict[str, FrontLink] = {}
        self._owners: dict[str, FrontLink] = {}
        self._generation = 0
        """Of the engine; 0 while there is none. Links have generations of their own."""
        self._drain_timeout_s: float | None = None
        self._prompt_tokens = self._prompt_s = 0.0

    # ---- for whoever carries the bytes

    def attach(self, front: str, wake: Callable[[], None]) -> FrontLink:
        """A link to a front, in place of the one that it had."""
        with self._lock:
            self.detach(front)
            link = FrontLink(front, ReplicaLoad(front, self.replica.limits), wake)
            self._links[front] = link
            self._send_heartbeat(link)
            if self._drain_timeout_s is not None:
                link.put(Draining(self._drain_timeout_s))
            elif self._generation:
                self._begin_soon(link)
            return link

    def detach(self, front: str, only: FrontLink | None = None) -> None:
        """Drop a link and the requests of its front; `only`: if it is this one."""
        with self._lock:
            link = self._links.get(front)
            if link is None or (only is not None and link is not only):
                return
            del self._links[front]
            self._drop_requests(link)
            link.close()

    def command(self, front: str, frames: bytes) -> None:
        """Obey what a front says."""
        with self._lock:
            link = self._links.get(front)
            if link is None:
                return
            link.touch()
            for message in map(decode_inward, FrameBuffer(frames).frames()):
                if isinstance(message, Commands):
                    for command in message.commands:
                        self._obey(link, message.generation, command)

    def heartbeat(self) -> None:
        """Say that this machine is alive, and drop the links of fronts that do not; called every
        `HEARTBEAT_S`."""
        with self._lock:
            for link in list(self._links.values()):
                if time.monotonic() - link.heard_s > MAX_SILENCE_S or link.is_closed:
                    log.warning("the link to %s is dropped", link.front)
                    self.detach(link.front)
                else:
                    self._send_heartbeat(link)
            self._begin_those_due()

    def drain(self, timeout_s: float) -> None:
        """Tell all fronts that this engine will end."""
        with self._lock:
            self._drain_timeout_s = timeout_s
            for link in self._links.values():
                link.put(Draining(timeout_s))

    @property
    def is_draining(self) -> bool:
        """Whether the engine will end."""
        return self._drain_timeout_s is not None

    @property
    def num_unfinished(self) -> int:
        """Requests of all fronts."""
        return len(self._owners)

    def load(self) -> EngineLoad:
        """What the engine has to do."""
        with self._lock:
            rate = self._prompt_tokens / self._prompt_s if self._prompt_s else 0.0
            return EngineLoad(
                num_waiting_tokens=sum(x.load.num_waiting_tokens for x in self._links.values()),
                prompt_tokens_per_s=rate,
                num_unfinished=len(self._owners),
                num_seats=self.replica.limits.num_seats,
            )

    # ---- as the listener of the engine

    def ready(self, replica: ReplicaContract, generation: int) -> int:
        """See `ReplicaListener`."""
        with self._lock:
            self._generation = generation
            if not self.is_draining:
                for link in self._links.values():
                    self._begin(link)
        return 0

    def reported(
        self,
        replica: ReplicaContract,
        generation: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            if generation != self._generation:
                return
            self._measure(step_events)
            self._begin_those_due()
            parts: dict[str, list[StepOutput]] = {name: [] for name in self._links}
            for output in outputs:
                if (link := self._owners.get(output.request_id)) is None:
                    continue
                parts[link.front].append(output)
                if output.finish_reason is not None:
                    self._forget(link, output.request_id)
            for link in list(self._links.values()):
                if step_events is not None:
                    link.load.stepped(step_events)
            stats = replica.stats()
            for link in list(self._links.values()):
                if link.generation and (parts[link.front] or step_events is not None):
                    events = self._events_for(link, step_events)
                    if not all(map(link.put, reports(parts[link.front], stats, events))):
                        log.warning("%s reads too slowly: its link is dropped", link.front)
                        self.detach(link.front)

    def lost(self, replica: ReplicaContract, generation: int, loss: Loss) -> bool:
        """See `ReplicaListener`. The fronts decide who is to blame."""
        with self._lock:
            self._generation = 0
            for link in self._links.values():
                if link.generation:
                    link.put(loss)
                self._drop_requests(link, is_engine_alive=False)
        return False

    def draining(self, replica: ReplicaContract, timeout_s: float) -> None:
        """See `ReplicaListener`."""
        self.drain(timeout_s)

    def computes_isolated(self, replica: ReplicaContract) -> None:
        """See `ReplicaListener`: this machine may vanish with it."""
        with self._lock:
            for link in self._links.values():
                link.put(IsolatedStep(replica.isolated))

    def failing(self, replica: ReplicaContract, reason: str) -> None:
        """See `ReplicaListener`."""
        with self._lock:
            for link in self._links.values():
                self._send_heartbeat(link)
                link.put(Failing(reason))

    def gone(self, replica: ReplicaContract) -> None:
        """See `ReplicaListener`: all links end."""
        with self._lock:
            for front in list(self._links):
                self.detach(front)

    # ---- inside; the lock is held

    @property
    def _is_silent(self) -> bool:
        return self.replica.link_silence_s > SILENT_S

    def _begin_soon(self, link: FrontLink) -> None:
        """Begin a generation, when the engine's process answers and has applied what was sent."""
        link.end_generation(self.replica.num_sent)
        self._begin_those_due()

    def _begin_those_due(self) -> None:
        if not self._generation or self.is_draining or self._is_silent:
            return
        for link in self._links.values():
            if link.begins_after is not None and self.replica.num_applied >= link.begins_after:
                self._begin(link)

    def _begin(self, link: FrontLink) -> None:
        replica = self.replica
        link.begin(ReplicaLoad(link.front, replica.limits), self._next_generation)
        self._next_generation += 1
        link.put(Ready(link.generation, replica.limits, replica.stats(), replica.fingerprint))

    def _send_heartbeat(self, link: FrontLink) -> None:
        replica = self.replica
        health = EngineHealth(
            replica.stats(),
            replica.silence_s,
            replica.link_silence_s,
            is_ready=replica.is_ready and replica.link_silence_s < MAX_SILENCE_S,
            is_alive=replica.is_alive,
        )
        link.put(Heartbeat(health))

    def _obey(self, link: FrontLink, generation: int, command: Command) -> None:
        if generation != link.generation or link.begins_after is not None or not self._generation:
            return
        match command:
            case Add(request):
                self._owners[request.request_id] = link
                link.requests.add(request.request_id)
                link.load.add(request)
                self.replica.add(request, self._generation)
            case Abort(request_id, reason):
                if request_id in link.requests:
                    self._forget(link, request_id)
                    self.replica.abort(request_id, self._generation, reason)
            case FollowPages():
                self.replica.follow_pages(self._generation)
            case Reset():
                self._drop_requests(link)
                if not self.is_draining:
                    self._begin_soon(link)
            case Stop():
                log.warning("%s wants to stop an engine that serves others", link.front)
            case _:
                assert_never(command)

    def _forget(self, link: FrontLink, request_id: str) -> None:
        self._owners.pop(request_id, None)
        link.requests.discard(request_id)
        link.load.remove(request_id)

    def _drop_requests(self, link: FrontLink, *, is_engine_alive: bool = True) -> None:
        for request_id in list(link.requests):
            self._forget(link, request_id)
            if is_engine_alive and self._generation:
                self.replica.abort(request_id, self._generation)

    def _events_for(self, link: FrontLink, step_events: StepEvents | None) -> StepEvents | None:
        """The events of a step, with what the engine has to do for the other fronts."""
        if step_events is None or len(self._links) == 1:
            return step_events
        others = [other.load for other in self._links.values() if other is not link]
        load = ForeignLoad(
            sum(other.num_waiting for other in others),
            sum(other.num_running for other in others),
            sum(other.num_waiting_tokens for other in others),
        )
        return msgspec.structs.replace(step_events, foreign_load=load)

    def _measure(self, step_events: StepEvents | None) -> None:
        if step_events is None:
            return
        if num_prompt := step_events.num_prompt_tokens:
            self._prompt_tokens = 0.98 * self._prompt_tokens + num_prompt
            took_s = step_events.ended_s - step_events.started_s
            self._prompt_s = 0.98 * self._prompt_s + took_s
