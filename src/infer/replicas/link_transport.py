"""`LinkTransport`: the conversation with an engine on another machine, over links that may break"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from typing import Protocol

import msgspec

from infer.engine.commands import Command
from infer.engine.engine_client import HEARTBEAT_S
from infer.replicas.messages import (
    Commands,
    FrameBuffer,
    Heartbeat,
    Inward,
    Loss,
    Outward,
    Ready,
    Report,
    decode_outward,
    frame_of,
)
from infer.threads import BackgroundThread
from infer.types.engine_stats import EngineStats

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Seconds between two attempts to connect."""


class LinkBrokenError(Exception):
    """The link has ended."""

    def __init__(self, reason: str, *, is_final: bool) -> None:
        """`is_final`: the engine has gone, and there is nothing to connect to."""
        super().__init__(reason)
        self.is_final = is_final


class Link(Protocol):
    """Carries bytes between this client and one engine, in order. Each method raises
    `LinkBrokenError`."""

    def connect(self) -> Iterator[bytes]:
        """A link, in place of the one before: its bytes, as they come. Ends with the link."""

    def offset_s(self) -> float:
        """What has to be added to times of the engine's machine to have those of this one."""

    def send(self, frames: bytes) -> None:
        """Send whole frames; does not wait. They arrive in order."""

    def close(self) -> None:
        """End the link, and `connect` in the thread that reads it."""


class LinkTransport:
    """A `Transport`.

    It is a `Transport` of a `Replica`. What carries the bytes is a `Link`, so this file knows no
    Ray. Where a link ends, so does the generation; another link is tried until the engine is known
    to have gone. Times of the other machine are shifted to the clock of this one. A thread says
    every `HEARTBEAT_S` that this client lives.
    """

    def __init__(self, link: Link, name: str) -> None:
        """`name`: of the replica."""
        self._link, self._name = link, name
        self._stats = EngineStats()
        self._is_stopped = threading.Event()
        self._heart = BackgroundThread(self._beat, self._is_stopped.set, f"infer-heart-{name}")

    def events(self) -> Generator[Outward, None, None]:
        """See `Transport`. It ends when the engine has gone for good."""
        self._heart.start()
        return self._events()

    def send(self, generation: int, command: Command) -> None:
        """See `Transport`."""
        self._send(Commands(generation, [command]))

    def pardon(self) -> None:
        """See `Transport`: it is not counted here how often an engine fails."""

    def stats(self) -> EngineStats:
        """See `Transport`: those of the engine, for all its clients."""
        return self._stats

    def stop(self) -> None:
        """See `Transport`. The engine goes on: it serves others."""
        self._heart.stop()
        self._link.close()

    # ---- inside

    def _send(self, message: Inward) -> None:
        try:
            self._link.send(frame_of(message))
        except LinkBrokenError as error:  # the reader finds out
            log.debug("%s: %s", self._name, error)

    def _beat(self) -> None:
        while not self._is_stopped.wait(HEARTBEAT_S):
            self._send(Heartbeat())

    def _events(self) -> Generator[Outward, None, None]:
        while not self._is_stopped.is_set():
            reason, is_final = "its link has ended", False
            try:
                yield from self._connected()
            except LinkBrokenError as error:
                reason, is_final = str(error), error.is_final
            if self._is_stopped.is_set():
                return
            yield Loss(reason, from_outside=True)
            if is_final:
                return
            self._is_stopped.wait(PAUSE_S)

    def _connected(self) -> Iterator[Outward]:
        """What comes over one link."""
        chunks = self._link.connect()
        offset_s, buffer = self._link.offset_s(), FrameBuffer()
        for chunk in chunks:
            buffer.add(chunk)
            for event in map(decode_outward, buffer.frames()):
                if isinstance(event, Ready | Report):
                    self._stats = event.stats
                elif isinstance(event, Heartbeat) and event.engine is not None:
                    self._stats = event.engine.stats
                yield _shifted(event, offset_s) if offset_s else event


def _shifted(event: Outward, offset_s: float) -> Outward:
    """An event with its times on the clock of this machine."""
    if not isinstance(event, Report) or event.step_events is None:
        return event
    shifted = msgspec.structs.replace(
        event.step_events,
        started_s=event.step_events.started_s + offset_s,
        ended_s=event.step_events.ended_s + offset_s,
    )
    return msgspec.structs.replace(event, step_events=shifted)
