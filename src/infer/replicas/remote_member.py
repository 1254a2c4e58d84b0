"""`RemoteMember`: an engine on another machine as a member of a front's fleet

A thread reads the items of its link and tells the fleet. What carries the items is a `Carrier`, so
this file knows no Ray. Where a link ends, so does the life; another link is tried until the engine
is known to have gone. The member then waits to be replaced: requests may wait for its successor, so
the front lets it leave when there is one. Times of the other machine are shifted to the clock of
this one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, assert_never

import msgspec

from infer.engine.engine_client import SOFT_LIMIT_S
from infer.replicas.link_messages import (
    BEAT_S,
    Description,
    LinkAbandon,
    LinkAbort,
    LinkAdd,
    LinkBeat,
    LinkCommand,
    LinkDraining,
    LinkEvent,
    LinkFailing,
    LinkFollow,
    LinkLost,
    LinkReady,
    LinkReport,
    LinkSign,
    decode_events,
    encode,
)
from infer.replicas.member import Loss, MemberListener
from infer.threads import BackgroundThread
from infer.types import FinishReason, Request
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""seconds between two attempts to connect"""


class LinkBrokenError(Exception):
    """The link has ended."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        """`is_final`: the engine has gone, and there is nothing to connect to."""
        super().__init__(reason)
        self.is_final = is_final


class Carrier(Protocol):
    """Carries items between this front and one engine. Each method raises `LinkBrokenError`."""

    def connect(self) -> Iterator[bytes]:
        """A link, in place of the one before: its items, as they come. Ends with the link."""

    def offset_s(self) -> float:
        """What has to be added to times of the engine's machine to have those of this one."""

    def send(self, item: bytes) -> None:
        """Send commands; does not wait. They arrive in order."""

    def close(self) -> None:
        """End the link, and `connect` in the thread that reads it."""


class RemoteMember:
    """A `Member`; see the module's docstring."""

    def __init__(self, description: Description, carrier: Carrier) -> None:
        self._described, self._carrier = description, carrier
        self._fingerprint = description.fingerprint
        self._lock = threading.Lock()
        self._life = self._epoch = 0
        """number of the latest life, and of its epoch at the other end; an epoch of 0: none"""
        self._beat = LinkBeat(EngineStats(), 0.0, 0.0, None, False, True)
        self._heard_s = self._beat_s = time.monotonic()
        self._offset_s = 0.0
        self._ended = threading.Event()
        self.has_gone = False
        """whether the engine has gone for good"""
        self._listener: MemberListener | None = None
        self._reader = BackgroundThread(self._run, self._end, f"infer-{self.name}")
        self._signer = BackgroundThread(self._sign, self._ended.set, f"infer-sign-{self.name}")

    @property
    def name(self) -> str:
        """See `Member`."""
        return self._described.name

    @property
    def limits(self) -> EngineLimits:
        """See `Member`."""
        return self._described.limits

    @property
    def fingerprint(self) -> Fingerprint:
        """See `Member`."""
        return self._fingerprint

    @property
    def is_alive(self) -> bool:
        """See `Member`."""
        return not self._ended.is_set() and (self.has_gone or self._beat.is_alive)

    @property
    def is_ready(self) -> bool:
        """See `Member`."""
        return self._epoch > 0 and self._beat.is_ready and not self.is_silent

    @property
    def is_silent(self) -> bool:
        """See `Member`."""
        return self.silence_s >= SOFT_LIMIT_S

    @property
    def silence_s(self) -> float:
        """See `Member`."""
        return max(self._beat.silence_s, self.link_silence_s) if self._epoch else 0.0

    @property
    def link_silence_s(self) -> float:
        """See `Member`: of the other machine, or of the engine's process on it."""
        if not self._epoch:
            return 0.0
        now_s, theirs_s = time.monotonic(), self._beat.link_silence_s
        return max(now_s - self._heard_s, theirs_s and theirs_s + now_s - self._beat_s)

    @property
    def alone(self) -> str | None:
        """See `Member`; as of the last beat."""
        return self._beat.alone

    def start(self, listener: MemberListener) -> None:
        """See `Member`."""
        self._listener = listener
        self._reader.start()
        self._signer.start()

    def add(self, request: Request, life: int) -> None:
        """See `Member`."""
        self._send(life, lambda epoch: LinkAdd(epoch, request))

    def abort(self, request_id: str, life: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """See `Member`."""
        self._send(life, lambda epoch: LinkAbort(epoch, request_id, reason))

    def follow_pages(self, life: int) -> None:
        """See `Member`."""
        self._send(life, LinkFollow)

    def abandon(self, life: int) -> None:
        """See `Member`."""
        self._send(life, LinkAbandon)
        with self._lock:
            if life == self._life:
                self._epoch = 0

    def stop(self) -> None:
        """See `Member`. The engine goes on: it serves other fronts."""
        self._signer.stop()
        self._reader.stop()

    def stats(self) -> EngineStats:
        """See `Member`: those of the engine, for all its fronts."""
        return self._beat.stats

    # ---- inside

    def _send(self, life: int, make: Callable[[int], LinkCommand]) -> None:
        with self._lock:
            if life != self._life or not self._epoch:
                return
            try:
                self._carrier.send(encode([make(self._epoch)]))
            except LinkBrokenError as error:  # the reader finds out
                log.debug("%s: %s", self.name, error)

    def _end(self) -> None:
        self._ended.set()
        self._carrier.close()

    def _sign(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                self._carrier.send(encode([LinkSign()]))
            except LinkBrokenError as error:
                log.debug("%s: %s", self.name, error)

    def _run(self) -> None:
        listener = self._listener
        assert listener is not None
        while not self._ended.is_set():
            reason, is_final = "its link has ended", False
            try:
                items = self._carrier.connect()
                self._offset_s = self._carrier.offset_s()
                for item in items:
                    self._heard_s = time.monotonic()
                    for event in decode_events(item):
                        self._hear(listener, event)
            except LinkBrokenError as error:
                reason, is_final = str(error), error.is_final
            if self._ended.is_set():
                return
            self._lose(listener, Loss(reason, from_outside=True, alone=self._beat.alone))
            if is_final:
                self.has_gone = True
                return
            self._ended.wait(PAUSE_S)

    def _lose(self, listener: MemberListener, loss: Loss) -> None:
        """The present life has ended, if there is one."""
        with self._lock:
            life, was_known, self._epoch = self._life, self._epoch > 0, 0
        if was_known:
            listener.lost(self, life, loss)

    def _hear(self, listener: MemberListener, event: LinkEvent) -> None:
        match event:
            case LinkReady():
                with self._lock:
                    self._life += 1
                    life, self._epoch = self._life, event.epoch
                    self._fingerprint = event.fingerprint
                    self._beat = msgspec.structs.replace(
                        self._beat, is_ready=True, is_alive=True, alone=None
                    )
                listener.ready(self, life)
            case LinkReport():
                self._beat = msgspec.structs.replace(
                    self._beat, stats=event.stats, silence_s=0.0, link_silence_s=0.0, alone=None
                )
                if event.epoch == self._epoch:
                    events = self._shifted(event.step_events)
                    listener.reported(self, self._life, event.outputs, events)
            case LinkBeat():
                self._beat, self._beat_s = event, self._heard_s
            case LinkLost():
                if event.epoch == self._epoch:
                    loss = Loss(event.reason, from_outside=event.from_outside, alone=event.alone)
                    self._lose(listener, loss)
            case LinkDraining():
                listener.draining(self, event.timeout_s)
            case LinkFailing():
                listener.failing(self, event.reason)
            case _:
                assert_never(event)

    def _shifted(self, step_events: StepEvents | None) -> StepEvents | None:
        if step_events is None or not self._offset_s:
            return step_events
        return msgspec.structs.replace(
            step_events,
            started_s=step_events.started_s + self._offset_s,
            ended_s=step_events.ended_s + self._offset_s,
        )
