"""What crosses between an API process and its engine process, and how it is written.

A frame is four bytes of length and msgpack; no pickle, so a frame can only ever become one of the
records below. Inward goes `Begin`, once, and then lists of commands: everything that was asked
since the last frame. Outward go `Text` and `Ready` (or `Refused`) while the engine starts, then one
`Report` a step, `PromptScores` before it, and `Log` lines at any time. Used by
`engine.process.supervisor` and `engine.process.child`.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload

import msgspec

from infer.engine.client.input import EngineLimits
from infer.engine.loop import Abort, Command
from infer.text.checkpoint_text import TextFiles
from infer.types import ErrorRecord, Request, SamplingParams, StepOutput, TokenLogprobs
from infer.types.step_events import StepEvents

_PIECE = 1 << 18
_PAIRS_A_FRAME = 4096
"""of ids and log-probabilities; read in about a millisecond"""


class Begin(msgspec.Struct, array_like=True):
    """How the engine process makes its engine."""

    factory: str
    """`module:function`; the function gets `settings` and returns a `Blueprint`"""
    settings: dict[str, Any]
    log_level: int


class Text(msgspec.Struct, array_like=True, tag="text"):
    """What the API side needs to turn text into tokens; sent before the weights are loaded."""

    model_name: str
    files: TextFiles


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine takes commands from now on."""

    limits: EngineLimits
    stats: dict[str, int | float]
    settings: dict[str, Any] = {}
    """what another engine must be given to take over from this one, beside its own settings"""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The engine cannot be made."""

    error: ErrorRecord
    """to be raised where the server was started"""


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A step is done, or there is nothing to do: the engine lives."""

    outputs: list[StepOutput]
    stats: dict[str, int | float]
    step_events: StepEvents | None = None


class PromptScores(msgspec.Struct, array_like=True, tag="scores"):
    """Some of a prompt's log-probabilities, for the next report's output of this request."""

    request_id: str
    count: int
    packed: bytes
    """a list of so many `TokenLogprobs`, in msgpack"""


def reports(
    outputs: list[StepOutput], stats: dict[str, int | float], step_events: StepEvents | None
) -> Iterator[PromptScores | Report]:
    """A step's outputs, and before them the log-probabilities of prompts, in small frames: those of
    a long prompt are millions of numbers, and whoever reads them at once keeps the interpreter for
    a second."""
    for output in outputs:
        entries = output.prompt_logprobs or ()
        if entries:
            size = max(1, _PAIRS_A_FRAME // (1 + len(entries[0].top)))
            for start in range(0, len(entries), size):
                part = entries[start : start + size]
                yield PromptScores(output.request_id, len(part), _encode(part))
    rest = [it._replace(prompt_logprobs=None) if it.prompt_logprobs else it for it in outputs]
    yield Report(rest, stats, step_events)


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities of a prompt as they came: read when they are looked at, some at a time, so
    that neither reading them nor letting go of them takes long."""

    def __init__(self, parts: Sequence[PromptScores]) -> None:
        self._parts = parts
        self._count = sum(part.count for part in parts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for part in self._parts:
            yield from _read_scores(part.packed)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        """Of few: it reads all."""
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))


class ScoreCollector:
    """Puts the log-probabilities of prompts back into the outputs that they belong to."""

    def __init__(self) -> None:
        self._parts: dict[str, list[PromptScores]] = {}

    def add(self, part: PromptScores) -> None:
        """One that has come."""
        self._parts.setdefault(part.request_id, []).append(part)

    def complete(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """The outputs of the next report, with what has come for them."""
        if not self._parts:
            return outputs
        parts, self._parts = self._parts, {}
        return [
            it._replace(prompt_logprobs=PackedLogprobs(parts[it.request_id]))
            if it.request_id in parts
            else it
            for it in outputs
        ]


class ComputingAlone(msgspec.Struct, array_like=True, tag="alone"):
    """Whom the engine computes by itself next, because an engine has died with it; "" = nobody."""

    request_id: str


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line for the log."""

    logger: str
    level: int
    line: str


Event = Text | Ready | Refused | Report | PromptScores | ComputingAlone | Log

read_begin = msgspec.msgpack.Decoder(Begin).decode
read_event = msgspec.msgpack.Decoder[Event](Event).decode
_encode = msgspec.msgpack.Encoder().encode
_read_scores = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


def read_commands(frame: bytes) -> list[Command]:
    """The commands of a frame. Values are checked as they are when a caller makes them; those that
    the choices of one request share are checked once."""
    commands: list[Command] = []
    given: dict[str, Any] = {}
    sampling = SamplingParams()
    for command in msgspec.msgpack.decode(frame):
        if isinstance(command, dict):
            if command["sampling"] != given:
                given = command["sampling"]
                sampling = SamplingParams(**given)
            lists = {name: tuple(v) for name, v in command.items() if isinstance(v, list)}
            commands.append(Request(**{**command, **lists, "sampling": sampling}))
        else:
            commands.append(None if command is None else msgspec.convert(command, Abort))
    return commands


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

    def send(self, message: msgspec.Struct | Sequence[Command]) -> None:
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
