"""The messages between an API process and its engine process, and how they are written

A frame is four bytes of length (little-endian) and msgpack. There is no pickle: a frame can only
become one of the records below. Inward goes one `Begin` and then `Commands`, each with all commands
since the last frame. Outward go `Text` and `Ready` (or `Refused`) while the engine starts, then one
`Report` a step, and `Log` lines at any time.
"""

from __future__ import annotations

import select
import signal
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

DUMP_SIGNAL = signal.SIGUSR1
"""signal that writes the stacks of all threads to stderr, even while the interpreter is stuck"""
_PIECE = 1 << 18
"""bytes that are read from a socket at once"""


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """The engine process is to build its engine."""

    factory: str
    """`module:function`; the function gets `settings` and returns a `Blueprint`"""
    settings: dict[str, Any]
    log_level: int
    """lowest level of log lines that are sent back; see `logging`"""


class Commands(msgspec.Struct, array_like=True, tag="commands"):
    """The commands since the last frame, in order."""

    commands: Sequence[Command]


class Text(msgspec.Struct, array_like=True, tag="text"):
    """The text side of the checkpoint; sent before the weights are loaded."""

    model_name: str
    files: TextFiles


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes commands."""

    limits: EngineLimits
    stats: EngineStats
    settings: dict[str, Any] = {}
    """settings that the next engine needs to take over, beside those of `Begin`"""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The engine cannot be built."""

    error: ErrorRecord
    """error that is raised where the server was started"""


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A step has ended, or an idle engine says that it is alive."""

    outputs: list[StepOutput]
    stats: EngineStats
    step_events: StepEvents | None = None
    more: bool = False
    """whether another report of the same step follows"""


def reports(
    outputs: list[StepOutput], stats: EngineStats, step_events: StepEvents | None
) -> Iterator[Report]:
    """The reports of a step. An output with log-probabilities of a prompt gets a frame of its own:
    decoding those of eight long prompts at once would hold the interpreter's lock for 50 ms."""
    large = [output for output in outputs if output.prompt_logprobs]
    for output in large:
        yield Report([output], stats, more=True)
    yield Report(
        [each for each in outputs if each not in large] if large else outputs, stats, step_events
    )


class ComputingAlone(msgspec.Struct, array_like=True, tag="alone"):
    """The engine computes a request alone next, because an engine has died with it."""

    request_id: str | None
    """None: it computes several requests next"""


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line of the engine process's log."""

    logger: str
    level: int
    line: str


Inward = Begin | Commands
Event = Text | Ready | Refused | Report | ComputingAlone
"""messages about the engine, from its start to its end"""
Outward = Event | Log

decode_outward = msgspec.msgpack.Decoder[Outward](Outward).decode
_decode_inward = msgspec.msgpack.Decoder[Inward](Inward).decode
_encode = msgspec.msgpack.Encoder().encode


def decode_inward(frame: bytes) -> Inward:
    """The message in a frame. The choices of one request share a sampling, which may hold thousands
    of token ids. So requests in a row that have equal samplings are made to share one here."""
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
    """Frames over a socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        # One buffer for all frames: one for each would fragment the heap more and more.
        self._piece = memoryview(bytearray(_PIECE))
        self._sending = threading.Lock()
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    def send(self, message: Inward | Outward) -> None:
        """Write a frame; raises `OSError` if the other end is closed."""
        body = _encode(message)
        with self._sending:
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def frames(self, patience_s: float | None = None) -> Iterator[bytes | None]:
        """The frames that arrive, until the other end is closed. Yields None whenever nothing has
        come for `patience_s` seconds."""
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
