"""The messages of a link between a front and an engine on another machine, and how they are written

An item is a list of records in msgpack; one item goes out for each step, for all requests of the
front together. The engine numbers the lives of its links by `epoch`, and uses no number twice: each
begins with `LinkReady`, and commands and reports of another epoch are ignored.
"""

from __future__ import annotations

import msgspec

from infer.types import FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents


class LinkReady(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes requests of this front, and has none."""

    epoch: int
    fingerprint: Fingerprint


class LinkReport(msgspec.Struct, array_like=True, tag="report"):
    """A step has ended."""

    epoch: int
    outputs: list[StepOutput]
    step_events: StepEvents | None
    stats: EngineStats


class LinkBeat(msgspec.Struct, array_like=True, tag="beat"):
    """The machine is alive; every `BEAT_S`."""

    stats: EngineStats
    silence_s: float
    """seconds since the engine's last report of a step; see `Member`"""
    link_silence_s: float
    """seconds since anything has come from the engine's process, which may be frozen while its
    machine is not"""
    alone: str | None
    is_ready: bool
    is_alive: bool


class LinkLost(msgspec.Struct, array_like=True, tag="lost"):
    """The engine has died; see `Loss`."""

    epoch: int
    reason: str
    from_outside: bool
    alone: str | None


class LinkDraining(msgspec.Struct, array_like=True, tag="draining"):
    """The engine will end; see `MemberListener.draining`."""

    timeout_s: float


class LinkFailing(msgspec.Struct, array_like=True, tag="failing"):
    """The engine does not start again; see `MemberListener.failing`."""

    reason: str


class LinkAdd(msgspec.Struct, array_like=True, tag="add"):
    """Accept a request."""

    epoch: int
    request: Request


class LinkAbort(msgspec.Struct, array_like=True, tag="abort"):
    """End a request."""

    epoch: int
    request_id: str
    reason: FinishReason


class LinkFollow(msgspec.Struct, array_like=True, tag="follow"):
    """Report the pages of the prefix index from the beginning."""

    epoch: int


class LinkAbandon(msgspec.Struct, array_like=True, tag="abandon"):
    """Drop all requests of this front, and begin another epoch."""

    epoch: int


class LinkSign(msgspec.Struct, array_like=True, tag="sign"):
    """The front is alive; every `BEAT_S`."""


LinkEvent = LinkReady | LinkReport | LinkBeat | LinkLost | LinkDraining | LinkFailing
LinkCommand = LinkAdd | LinkAbort | LinkFollow | LinkAbandon | LinkSign

BEAT_S = 1.0
"""interval in seconds at which both ends say that they are alive"""


class Description(msgspec.Struct, array_like=True):
    """What a front must know of an engine before it connects to it."""

    name: str
    model_name: str
    limits: EngineLimits
    fingerprint: Fingerprint
    is_draining: bool


encode = msgspec.msgpack.Encoder().encode
decode_events = msgspec.msgpack.Decoder(list[LinkEvent]).decode
decode_commands = msgspec.msgpack.Decoder(list[LinkCommand]).decode
decode_description = msgspec.msgpack.Decoder(Description).decode
