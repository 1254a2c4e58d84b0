"""The messages between an API process and its engine process, and how they are written

A frame is four bytes of length (little-endian) and msgpack. There is no pickle: a frame can only
become one of the records below. Text that is no valid Unicode, as the path of a file may be, is
carried in the settings as it is, and made readable anywhere else. Inward goes one `Begin`, where
the process has stood by after `Prepare`, and then `Commands`, each with all commands since the last
frame. Outward go `HasBegun`, and `Text` and `Ready` (or `Refused`) while the engine starts, then
one `Report` a step, `PromptScores` before it, and `Log` lines at any time. From `Ready` on a thread
of its own sends a `Heartbeat` every `HEARTBEAT_S`, whatever a step is doing.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, assert_never, overload

import msgspec

from infer.engine.commands import Add, Command
from infer.readable_text import readable
from infer.readiness import READABLE, selector_of
from infer.text.checkpoint_text import TextFiles
from infer.types import ErrorRecord, Sampling, StepOutput, TokenLogprobs
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents

DUMP_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""signal that writes the stacks of all threads to a file; None on systems without such signals.
Anybody may send it at any time."""
FORCED_DUMP_SIGNAL: signal.Signals | None = getattr(signal, "SIGRTMIN", None)
"""signal that does so without the interpreter's lock. It would end a process that works, and is for
one that has not answered `DUMP_SIGNAL`, because native code keeps the lock."""
_PIECE = 1 << 18
"""bytes that are read from a socket at once"""
_PAIRS_A_FRAME = 4096
"""of ids and log-probabilities; read in about a millisecond"""


class Prepare(msgspec.Struct, array_like=True, tag="prepare"):
    """The process is to import what an engine needs, and to wait for `Begin`."""

    factory: str
    """`module:function` that `Begin` will name; the module is imported"""


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


class HasBegun(msgspec.Struct, array_like=True, tag="begun"):
    """The process has read `Begin`."""


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
    fingerprint: Fingerprint = Fingerprint()


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The engine cannot be built."""

    error: ErrorRecord
    """error that is raised where the server was started"""


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A step has ended, or an idle engine says that it is alive."""

    outputs: list[StepOutput]
    stats: EngineStats
    step_events: StepEvents | None = None


class PromptScores(msgspec.Struct, array_like=True, tag="scores"):
    """Some of a prompt's log-probabilities, for the next report's output of this request."""

    request_id: str
    count: int
    packed: bytes
    """a list of so many `TokenLogprobs`, in msgpack"""


def reports(
    outputs: list[StepOutput], stats: EngineStats, step_events: StepEvents | None
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
    """The engine computes a request alone next, because an engine has died with it."""

    request_id: str | None
    """None: it computes several requests next"""


class HasReset(msgspec.Struct, array_like=True, tag="has_reset"):
    """The engine has ended all requests of a life. Reports before this are of that life."""

    life: int


class Heartbeat(msgspec.Struct, array_like=True, tag="heartbeat"):
    """The process lives; nothing about its engine."""


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line of the engine process's log."""

    logger: str
    level: int
    line: str


Inward = Prepare | Begin | Commands
Event = HasBegun | Text | Ready | Refused | Report | PromptScores | ComputingAlone | HasReset
"""messages about the engine, from its start to its end"""
Outward = Event | Log | Heartbeat

decode_outward = msgspec.msgpack.Decoder[Outward](Outward).decode
_decode_inward = msgspec.msgpack.Decoder[Inward](Inward).decode
_encode = msgspec.msgpack.Encoder().encode
_read_scores = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


def decode_inward(frame: bytes) -> Inward:
    """The message in a frame. The choices of one request share a sampling, which may hold thousands
    of token ids. So requests in a row that have equal samplings are made to share one here."""
    message = _decode_inward(frame)
    match message:
        case Prepare():
            return message
        case Begin():
            message.settings = _texts_of(message.settings)
            return message
        case Commands():
            return Commands(_with_shared_samplings(message.commands))
        case _:
            assert_never(message)


def encode(message: Inward | Outward) -> bytes:
    """The body of a frame; raises `ValueError`, `OverflowError` or `TypeError` for what cannot be
    sent, such as an integer of more than 64 bits."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        if isinstance(message, Begin):
            settings = _mapped(message.settings, _as_bytes)
            return _encode(msgspec.structs.replace(message, settings=settings))
        return _encode(_mapped(msgspec.to_builtins(message, builtin_types=(bytes,)), readable))


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    """A value with its texts changed, also those in lists and dicts."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(each, change) for key, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


def _as_bytes(text: str) -> str | bytes:
    """A text that is no valid Unicode as bytes, of which settings have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _texts_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they were before `encode`."""
    return {
        name: value.decode("utf-8", "surrogatepass") if isinstance(value, bytes) else value
        for name, value in settings.items()
    }


def _with_shared_samplings(commands: Sequence[Command]) -> list[Command]:
    shared: list[Command] = []
    sampling: Sampling | None = None
    for command in commands:
        if isinstance(command, Add):
            if command.request.sampling == sampling:
                command = Add(replace(command.request, sampling=sampling), command.sent_s)
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
        self._selector = selector_of(sock, READABLE)

    def send(self, message: Inward | Outward) -> None:
        """Write a frame; raises `OSError` if the other end is closed, and as `encode` does."""
        body = encode(message)
        with self._sending:
            self._sock.sendall(len(body).to_bytes(4, "little") + body)

    def frames(self, patience_s: float | None = None) -> Iterator[bytes | None]:
        """The frames that arrive, until the other end is closed. Yields None whenever nothing has
        come for `patience_s` seconds."""
        while True:
            while (end := self._end_of_frame()) is not None:
                frame = bytes(self._buffer[4:end])
                del self._buffer[:end]
                yield frame
            if not self._selector.select(patience_s):
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
