"""What crosses between an API process and its engine process, and how it is written.

A frame is four bytes of length and msgpack; no pickle, so a frame can only ever become one of the
records below. Inward goes `Begin`, once, and then `Commands`: everything that was asked since the
last frame. Outward go `Text` and `Ready` (or `Refused`) while the engine starts, then one `Report`
a step, and `Log` lines at any time. Used by `engine.process.supervisor` and
`engine.process.child`.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never

import msgspec

from infer.engine.commands import Add, Command
from infer.text.checkpoint_text import TextFiles
from infer.types import ErrorRecord, Sampling, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.step_events import StepEvents

_PIECE = 1 << 18


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """How the engine process makes its engine."""

    factory: str
    """`module:function`; the function gets `settings` and returns a `Blueprint`"""
    settings: dict[str, Any]
    log_level: int
    """the least level of the lines that are sent back; see `logging`"""


class Commands(msgspec.Struct, array_like=True, tag="commands"):
    """What was asked since the last frame, in that order."""

    commands: Sequence[Command]


class Text(msgspec.Struct, array_like=True, tag="text"):
    """What the API side needs to turn text into tokens; sent before the weights are loaded."""

    model_name: str
    files: TextFiles


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes commands from now on."""

    limits: EngineLimits
    stats: EngineStats
    settings: dict[str, Any] = {}
    """what another engine must be given to take over from this one, beside its own settings"""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The engine cannot be made."""

    error: ErrorRecord
    """to be raised where the server was started"""


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A step is done, or there is nothing to do: the engine lives."""

    outputs: list[StepOutput]
    stats: EngineStats
    step_events: StepEvents | None = None
    more: bool = False
    """the rest of the step follows"""


def reports(
    outputs: list[StepOutput], stats: EngineStats, step_events: StepEvents | None
) -> Iterator[Report]:
    """A step's outputs. The log-probabilities of a prompt go in a frame of their own: reading
    those of eight long prompts at once would keep the interpreter for 50 ms."""
    large = [output for output in outputs if output.prompt_logprobs]
    for output in large:
        yield Report([output], stats, more=True)
    yield Report(
        [each for each in outputs if each not in large] if large else outputs, stats, step_events
    )


class ComputingAlone(msgspec.Struct, array_like=True, tag="alone"):
    """The request that the engine computes by itself next, because an engine has died with it."""

    request_id: str | None
    """None = those that are computed next are several"""


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line for the log."""

    logger: str
    level: int
    line: str


Inward = Begin | Commands
Event = Text | Ready | Refused | Report | ComputingAlone
"""what happens to an engine"""
Outward = Event | Log

decode_outward = msgspec.msgpack.Decoder[Outward](Outward).decode
_decode_inward = msgspec.msgpack.Decoder[Inward](Inward).decode
_encode = msgspec.msgpack.Encoder().encode


def decode_inward(frame: bytes) -> Inward:
    """The record of a frame. The choices of one request share a sampling, which may hold thousands
    of token ids; requests that follow one another with equal samplings share one here, too."""
    message = _decode_inward(frame)
    match message:
        case Begin():
            return message
        case Commands():
            return Commands(_with_shared_samplings(message.commands))
        case _:
            assert_never(message)


def _with_shared_samplings(commands: Sequence[Command]) -> list[Command]:
    shared: list[Command] = []
    sampling: Sampling | None = None
    for command in commands:
        if isinstance(command, Add):
            if command.request.sampling == sampling:
                command = Add(replace(command.request, sampling=sampling))
            sampling = command.request.sampling
        shared.append(command)
    return shared


class Channel:
    """Frames over a socket. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        # Once: a new piece for each frame, cut to what came, leaves the allocator ever more holes.
        self._piece = memoryview(bytearray(_PIECE))
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: Inward | Outward) -> None:
        """Write a frame; `OSError` if nobody is at the other end."""
        body = _encode(message)
        with self._sending:
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def frames(self, patience_s: float | None = None) -> Iterator[bytes | None]:
        """What arrives, until the other end is closed; None whenever nothing came for so long."""
        patience_ms = None if patience_s is None else patience_s * 1000
        while True:
            while (end := self._end_of_frame()) is not None:
                frame = bytes(self._buffer[4:end])
                del self._buffer[:end]
                yield frame
            if not self._readable.poll(patience_ms):
                yield None
                continue
            try:
                size = self._sock.recv_into(self._piece)
            except OSError:
                return
            if not size:
                return
            self._buffer += self._piece[:size]

    def _end_of_frame(self) -> int | None:
        if len(self._buffer) < 4:
            return None
        end = 4 + int.from_bytes(self._buffer[:4], "little")
        return end if end <= len(self._buffer) else None

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
