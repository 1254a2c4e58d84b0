"""`Replica`: an engine that may die and come back, wherever it runs; the conversation with it"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Generator
from typing import Protocol, assert_never

import msgspec

import infer.replicas.messages as messages
from infer.engine.commands import Abort, Add, Command, FollowPages, Reset
from infer.engine.engine_client import SOFT_LIMIT_S
from infer.replicas.contract import ReplicaListener
from infer.threads import BackgroundThread
from infer.types import FinishReason, Request
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint

log = logging.getLogger(__name__)


class Transport(Protocol):
    """Carries the conversation with one engine, in order in both directions, over all its
    generations. Where it loses the engine it says so in its place, with `Loss`."""

    def events(self) -> Generator[messages.Outward, None, None]:
        """What comes, to be read by one thread; called once. Ends when there will be nothing more:
        the engine has gone for good, or the transport was stopped."""

    def send(self, generation: int, command: Command) -> None:
        """Send a command to the engine of a generation; does not wait. Where there is none any more
        the command is dropped."""

    def pardon(self) -> None:
        """The `Loss` that `events` has just given was the fault of a request, not the engine's."""

    def stats(self) -> EngineStats:
        """Gauges of the engine, and counters summed over all its generations."""

    def stop(self) -> None:
        """End the conversation, and `events` with it; a second call does nothing."""


class Replica:
    """A `ReplicaContract`.

    It folds what an engine says (`replicas.messages`) into what the fleet hears and asks
    (`ReplicaContract`). What carries the conversation is a `Transport`: to a process of this
    machine (`replicas.process_transport`), or over a link to another machine
    (`replicas.link_transport`). One thread reads it. A command goes out only while its generation
    is the present one, under a lock that is held where the present one changes; so nothing for one
    generation reaches the next.
    """

    def __init__(
        self,
        name: str,
        limits: EngineLimits,
        transport: Transport,
        *,
        ready: messages.Ready | None = None,
        soft_limit_s: float = SOFT_LIMIT_S,
    ) -> None:
        """`ready`: begins the first generation, where it has come already. `soft_limit_s`: seconds
        without a report after which it counts as hanging."""
        self._name, self._limits, self._soft_limit_s = name, limits, soft_limit_s
        self.transport = transport
        """What carries its conversation."""
        self._ready = ready
        self._fingerprint = Fingerprint() if ready is None else ready.fingerprint
        self._lock = threading.Lock()
        """Held while the present generation changes, and while it gets a command."""
        self._generation = 0
        """Number of the latest generation."""
        self._has_engine = self._is_abandoned = False
        """Whether that has not been lost, and whether the fleet has ended it."""
        self._heard_s = self._reported_s = time.monotonic()
        """When something has come, and when the engine has reported."""
        self._isolated: str | None = None
        self._num_sent = self._num_applied = 0
        self._is_working = self._has_future = True
        """Whether the engine works, and whether it does or is being started; as far as is known."""
        self._scores = messages.ScoreCollector()
        self._is_started = self._is_stopped = False
        self.has_gone = False
        """Whether its engine has gone for good. It is alive for all that: its requests may wait for
        a successor."""
        self._listener: ReplicaListener | None = None
        self._thread: BackgroundThread | None = None

    # ---- as a `ReplicaContract`

    @property
    def name(self) -> str:
        """See `ReplicaContract`."""
        return self._name

    @property
    def limits(self) -> EngineLimits:
        """See `ReplicaContract`."""
        return self._limits

    @property
    def fingerprint(self) -> Fingerprint:
        """See `ReplicaContract`."""
        return self._fingerprint

    @property
    def is_alive(self) -> bool:
        """See `ReplicaContract`."""
        return self._is_started and not self._is_stopped and self._has_future

    @property
    def is_ready(self) -> bool:
        """See `ReplicaContract`."""
        return self._is_present and self._is_working and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """See `ReplicaContract`."""
        return self.silence_s >= self._soft_limit_s

    @property
    def silence_s(self) -> float:
        """See `ReplicaContract`."""
        return time.monotonic() - self._reported_s if self._has_engine else 0.0

    @property
    def link_silence_s(self) -> float:
        """See `ReplicaContract`."""
        return time.monotonic() - self._heard_s if self._has_engine else 0.0

    @property
    def isolated(self) -> str | None:
        """See `ReplicaContract`."""
        return self._isolated

    @property
    def num_sent(self) -> int:
        """See `ReplicaContract`."""
        return self._num_sent

    @property
    def num_applied(self) -> int:
        """See `ReplicaContract`."""
        return self._num_applied

    def start(self, listener: ReplicaListener) -> None:
        """See `ReplicaContract`."""
        if self._is_stopped:
            return
        self._listener, self._is_started = listener, True
        events = self.transport.events()
        if self._ready is not None:
            self._begin(listener, self._ready)

        def read() -> None:
            self._read(listener, events)

        self._thread = BackgroundThread(read, self._end, f"infer-{self.name}")
        self._thread.start()

    def add(self, request: Request, generation: int) -> None:
        """See `ReplicaContract`."""
        self._send(generation, Add(request, time.monotonic()))

    def abort(
        self, request_id: str, generation: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """See `ReplicaContract`."""
        self._send(generation, Abort(request_id, reason))

    def follow_pages(self, generation: int) -> None:
        """See `ReplicaContract`."""
        self._send(generation, FollowPages())

    def abandon(self, generation: int) -> None:
        """See `ReplicaContract`."""
        self._send(generation, Reset())

    def stop(self) -> None:
        """See `ReplicaContract`."""
        if self._thread is not None:
            self._thread.stop()
        else:
            self._end()

    def stats(self) -> EngineStats:
        """See `ReplicaContract`."""
        return self.transport.stats()

    # ---- inside

    @property
    def _is_present(self) -> bool:
        """Whether the latest generation lives."""
        return self._has_engine and not self._is_abandoned

    def _send(self, generation: int, command: Command) -> None:
        with self._lock:
            if generation == self._generation and self._is_present:
                if isinstance(command, Reset):
                    self._is_abandoned = True
                self._num_sent += 1
                self.transport.send(generation, command)

    def _end(self) -> None:
        self._is_stopped = True
        self.transport.stop()

    def _read(
        self, listener: ReplicaListener, events: Generator[messages.Outward, None, None]
    ) -> None:
        """Follow the conversation to its end."""
        try:
            with contextlib.closing(events):
                for event in events:
                    self._apply(listener, event)
            self.has_gone = self._has_future = not self._is_stopped
        except BaseException:
            log.exception("the thread that hears %s has died", self.name)
            self._has_future = False
            listener.gone(self)

    def _apply(self, listener: ReplicaListener, event: messages.Outward) -> None:
        now_s = time.monotonic()
        match event:
            case messages.Report():
                self._heard_s = self._reported_s = now_s
                has_obeyed = event.num_applied != self._num_applied
                self._isolated, self._num_applied = None, event.num_applied
                outputs = self._scores.complete(event.outputs) if event.outputs else []
                if self._is_present and (outputs or event.step_events or has_obeyed):
                    listener.reported(self, self._generation, outputs, event.step_events)
            case messages.Heartbeat():
                self._note_heartbeat(event, now_s)
            case messages.PromptScores():
                self._heard_s = self._reported_s = now_s
                self._scores.add(event)
            case messages.IsolatedStep():
                self._heard_s = self._reported_s = now_s
                self._isolated = event.request_id
                listener.computes_isolated(self)
            case messages.Ready():
                self._begin(listener, event)
            case messages.Loss():
                self._lose(listener, event)
            case messages.Draining():
                listener.draining(self, event.timeout_s)
            case messages.Failing():
                self._has_future = False
                listener.failing(self, event.reason)
            case messages.Log():
                self._heard_s = self._reported_s = now_s
            case messages.HasBegun() | messages.Text() | messages.Refused():
                log.warning("%s says twice how it has started", self.name)
            case _:
                assert_never(event)

    def _note_heartbeat(self, heartbeat: messages.Heartbeat, now_s: float) -> None:
        """A sign of life: of the process, or of its machine, which knows how the process is."""
        engine = heartbeat.engine
        if engine is None:
            self._heard_s = now_s
            return
        self._heard_s = now_s - engine.link_silence_s
        self._reported_s = now_s - engine.silence_s
        self._is_working, self._has_future = engine.is_ready, engine.is_alive

    def _begin(self, listener: ReplicaListener, ready: messages.Ready) -> None:
        """Another generation begins."""
        is_first, self._scores = not self._generation, messages.ScoreCollector()
        with self._lock:
            self._generation, self._has_engine, self._is_abandoned = ready.generation, True, False
            self._fingerprint = ready.fingerprint
            self._num_sent = self._num_applied = 0
            self._heard_s = self._reported_s = time.monotonic()
            self._isolated, self._is_working, self._has_future = None, True, True
        num_requests = listener.ready(self, ready.generation)
        if not is_first:
            log.info("%s is back and has %d requests", self.name, num_requests)

    def _lose(self, listener: ReplicaListener, loss: messages.Loss) -> None:
        """The present generation has ended, if there is one."""
        with self._lock:
            had_engine, self._has_engine = self._has_engine, False
        loss, self._isolated = msgspec.structs.replace(loss, isolated=self._isolated), None
        if had_engine and self._is_abandoned:
            log.error("%s: %s", self.name, loss.reason)
        elif had_engine and listener.lost(self, self._generation, loss):
            self.transport.pardon()
