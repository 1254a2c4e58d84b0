"""The messages between whoever has requests and an engine, and how they are written

One conversation, over the socket of a process and over a link between machines. A frame is four
bytes of length (little-endian) and msgpack. There is no pickle: a frame can only become one of the
records below. Text that is no valid Unicode, as the path of a file may be, is carried in the
settings as it is, and made readable anywhere else.

Outward, a generation of the engine begins with `Ready`: it takes requests and has none. Then come
one `Report` a step, `PromptScores` before it, and `IsolatedStep`; all that comes until the next
`Ready` is of this generation. It ends with `Loss`, or when the other side says `Reset`. A
`Heartbeat` comes every `HEARTBEAT_S`, whatever a step is doing. Inward, `Commands` name their
generation. At the end of a link, where generations also end by themselves, those of another one are
ignored; a process is asked for each generation after its first, so none reach it.

A process is told `Begin` and says `HasBegun`, and `Text` or `Refused`, before its first `Ready`;
its `Log` lines come at any time. After `Prepare` it says by a `Heartbeat` that it waits for
`Begin`. What is at the other end of a link has an engine process and says for it what the process
cannot: `Loss`, `Failing`, `Draining`, and in its heartbeat how the process is. It has several
clients, and each gives it a `Heartbeat`.
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
"""Signal that writes the stacks of all threads to a file; None on systems without such signals.
Anybody may send it at any time."""
FORCED_DUMP_SIGNAL: signal.Signals | None = getattr(signal, "SIGRTMIN", None)
"""Signal that does so without the interpreter's lock. It would end a process that works, and is for
one that has not answered `DUMP_SIGNAL`, because native code keeps the lock."""
_LENGTH_BYTES = 4
_PIECE = 1 << 18
"""Bytes that are read from a socket at once."""
_PAIRS_A_FRAME = 4096
"""Of ids and log-probabilities; read in about a millisecond."""


class Prepare(msgspec.Struct, array_like=True, tag="prepare"):
    """The process is to import what an engine needs, and to wait for `Begin`."""

    factory: str
    """`module:function` that `Begin` will name; the module is imported."""


class Begin(msgspec.Struct, array_like=True, tag="begin"):
    """The engine process is to build its engine."""

    factory: str
    """`module:function`; the function gets `settings` and returns a `Blueprint`."""
    settings: dict[str, Any]
    log_level: int
    """Lowest level of log lines that are sent back; see `logging`."""
    generation: int = 1
    """Number of its first generation."""


class Commands(msgspec.Struct, array_like=True, tag="commands"):
    """The commands since the last frame, in order."""

    generation: int
    """Of the engine that they are for."""
    commands: Sequence[Command]


class HasBegun(msgspec.Struct, array_like=True, tag="begun"):
    """The process has read `Begin`."""


class Text(msgspec.Struct, array_like=True, tag="text"):
    """The text side of the checkpoint; sent before the weights are loaded."""

    model_name: str
    files: TextFiles


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """A generation begins: the engine takes commands and has no requests of this client."""

    generation: int
    """Its number, above those before it; no other one has it."""
    limits: EngineLimits
    stats: EngineStats
    fingerprint: Fingerprint = Fingerprint()
    settings: dict[str, Any] = {}
    """Settings that the next engine process needs to take over, beside those of `Begin`."""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The engine cannot be built."""

    error: ErrorRecord
    """Error that is raised where the server was started."""


class Report(msgspec.Struct, array_like=True, tag="report"):
    """A step has ended, or an idle engine says that it is alive."""

    outputs: list[StepOutput]
    stats: EngineStats
    step_events: StepEvents | None = None
    num_applied: int = 0
    """Commands of this generation that the engine of a process had applied before; not counted for
    the client of a link."""


class PromptScores(msgspec.Struct, array_like=True, tag="scores"):
    """Some of a prompt's log-probabilities, for the next report's output of this request."""

    request_id: str
    count: int
    packed: bytes
    """A list of so many `TokenLogprobs`, in msgpack."""


def reports(
    outputs: list[StepOutput],
    stats: EngineStats,
    step_events: StepEvents | None,
    num_applied: int = 0,
) -> Iterator[PromptScores | Report]:
    """A step's outputs, and before them the log-probabilities of prompts, in small frames: those of
    a long prompt are millions of numbers, and whoever reads them at once keeps the interpreter for
    a second."""
    for output in outputs:
        entries = output.prompt_logprobs or ()
        if isinstance(entries, PackedLogprobs):
            yield from entries.parts
        elif entries:
            size = max(1, _PAIRS_A_FRAME // (1 + len(entries[0].top)))
            for start in range(0, len(entries), size):
                part = entries[start : start + size]
                yield PromptScores(output.request_id, len(part), _encode(part))
    rest = [_without_scores(output) for output in outputs]
    yield Report(rest, stats, step_events, num_applied)


def _without_scores(output: StepOutput) -> StepOutput:
    return output._replace(prompt_logprobs=None) if output.prompt_logprobs else output


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities of a prompt as they came: read when they are looked at, some at a time, so
    that neither reading them nor letting go of them takes long."""

    def __init__(self, parts: Sequence[PromptScores]) -> None:
        self.parts = parts
        """What has come."""
        self._count = sum(part.count for part in parts)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for part in self.parts:
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
            output._replace(prompt_logprobs=PackedLogprobs(parts[output.request_id]))
            if output.request_id in parts
            else output
            for output in outputs
        ]


class IsolatedStep(msgspec.Struct, array_like=True, tag="alone"):  # the tag is on the wire
    """The engine computes a request alone next, because an engine has died with it."""

    request_id: str | None
    """None: it computes several requests next."""


class EngineHealth(msgspec.Struct, array_like=True):
    """How an engine process is, as its machine sees it."""

    stats: EngineStats
    silence_s: float
    """Seconds since its last report of a step."""
    link_silence_s: float
    """Seconds since anything has come from it: it may be frozen while its machine is not."""
    is_ready: bool
    is_alive: bool
    """See `ReplicaContract`, as the two above."""


class Heartbeat(msgspec.Struct, array_like=True, tag="heartbeat"):
    """Whoever sends it lives."""

    engine: EngineHealth | None = None
    """None where the sender says nothing about its engine, or has none."""


class Loss(msgspec.Struct, array_like=True, tag="lost"):
    """How a generation has ended."""

    reason: str
    """What has happened, for the log, such as "the engine process has died (SIGSEGV)"."""
    from_outside: bool
    """Whether the engine may have been ended by something else than its requests: by a signal from
    outside, or with its machine."""
    isolated: str | None = None
    """Id of the request that the engine computed alone, if any; `Replica` knows it."""


class Draining(msgspec.Struct, array_like=True, tag="draining"):
    """The engine will end; see `ReplicaListener.draining`."""

    timeout_s: float


class Failing(msgspec.Struct, array_like=True, tag="failing"):
    """The engine does not start again; see `ReplicaListener.failing`."""

    reason: str


class Log(msgspec.Struct, array_like=True, tag="log"):
    """A line of the engine process's log."""

    logger: str
    level: int
    line: str


class Description(msgspec.Struct, array_like=True):
    """What a client must know of an engine on another machine before there is a link."""

    name: str
    model_name: str
    limits: EngineLimits
    fingerprint: Fingerprint
    is_draining: bool


Starting = HasBegun | Text | Refused
"""What a process says once, before its first `Ready`."""
Event = Ready | Report | PromptScores | IsolatedStep | Loss | Draining | Failing
"""What happens to an engine that has started."""
Inward = Prepare | Begin | Commands | Heartbeat
Outward = Starting | Event | Log | Heartbeat

decode_outward = msgspec.msgpack.Decoder[Outward](Outward).decode
decode_description = msgspec.msgpack.Decoder(Description).decode
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
            return Commands(message.generation, _with_shared_samplings(message.commands))
        case Heartbeat():
            return message
        case _:
            assert_never(message)


def encode(message: Inward | Outward | Description | TextFiles) -> bytes:
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
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, list | tuple) else value


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


def frame_of(message: Inward | Outward) -> bytes:
    """A message with its length; raises as `encode` does."""
    return framed(encode(message))


def framed(body: bytes) -> bytes:
    """The body of a frame with its length."""
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class FrameBuffer:
    """Cuts a stream of bytes into the bodies of its frames."""

    def __init__(self, data: bytes = b"") -> None:
        """`data`: its beginning."""
        self._bytes = bytearray(data)

    def add(self, data: bytes | memoryview) -> None:
        """What has arrived next."""
        self._bytes += data

    def frames(self) -> Iterator[bytes]:
        """The frames that are complete; each is given once."""
        while len(self._bytes) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
            if end > len(self._bytes):
                return
            frame = bytes(self._bytes[_LENGTH_BYTES:end])
            del self._bytes[:end]
            yield frame

    def whole(self) -> bytes:
        """The frames that are complete, with their lengths; each is given once."""
        return b"".join(map(framed, self.frames()))


class Channel:
    """Frames over a socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = FrameBuffer()
        # One buffer for all frames: one for each would fragment the heap more and more.
        self._piece = memoryview(bytearray(_PIECE))
        self._sending = threading.Lock()
        self._selector = selector_of(sock, READABLE)

    def send(self, message: Inward | Outward) -> None:
        """Write a frame; raises `OSError` if the other end is closed, and as `encode` does."""
        frame = frame_of(message)
        with self._sending:
            self._sock.sendall(frame)

    def frames(self, timeout_s: float | None = None) -> Iterator[bytes | None]:
        """The frames that arrive, until the other end is closed. Yields None whenever nothing has
        come for `timeout_s` seconds."""
        while True:
            yield from self._buffer.frames()
            if not self._selector.select(timeout_s):
                yield None
                continue
            try:
                size = self._sock.recv_into(self._piece)
            except OSError:
                return
            if not size:
                return
            self._buffer.add(self._piece[:size])

    @property
    def has_arrived(self) -> bool:
        """Whether there is something to receive, or the other end is closed."""
        return bool(self._selector.select(0))

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
