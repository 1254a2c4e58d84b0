"""What a front and the process that has started it say to each other, and `FrontStream`: the way

A front is one of several processes that answer HTTP (`server.front_process`); the one that has
started them has the engines (`server.front_keeper`). Messages are msgpack in the frames of
`replicas.messages`, over a socket pair. What engines say has sockets of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

from infer.config import settings_of
from infer.replicas.messages import FrameBuffer, framed
from infer.server.settings import ServerSettings
from infer.types import ErrorRecord

M = TypeVar("M")

_PIECE = 1 << 16
"""Bytes that are read at once."""


class FrontBegin(msgspec.Struct, array_like=True, tag="begin"):
    """The first message to a front: what it is and what it serves."""

    name: str
    num_fronts: int
    settings: str
    """`settings_text` of the server's."""
    text: bytes
    """A `Text` as `replicas.messages` encodes it."""
    engines: list[bytes]
    """A `Description` of each engine, in the order of the links."""
    seed: int
    """Of all fronts together; see `seed_of_front`."""


class FrontMayListen(msgspec.Struct, array_like=True, tag="listen"):
    """The front is to answer at its port from now on."""


class FrontSettings(msgspec.Struct, array_like=True, tag="settings"):
    """The front is to read its certificate again, and to take these settings."""

    settings: str
    """`settings_text`."""
    others: list[str]
    """Names of settings that have changed and need a restart."""


class FrontSignal(msgspec.Struct, array_like=True, tag="signal"):
    """The front is to do what this signal asks a server for."""

    number: int


class FrontReply(msgspec.Struct, array_like=True, tag="reply"):
    """What a `FrontCall` has returned."""

    number: int
    value: Any = None
    error: str = ""
    """Not empty: it has failed."""


class FrontPrepared(msgspec.Struct, array_like=True, tag="prepared"):
    """The front could listen now."""


class FrontServes(msgspec.Struct, array_like=True, tag="serves"):
    """The front answers at its port."""


class FrontAlive(msgspec.Struct, array_like=True, tag="alive"):
    """The event loop of the front turns."""

    num_open: int
    """Requests that it has."""


class FrontRefused(msgspec.Struct, array_like=True, tag="refused"):
    """The front cannot serve, and ends."""

    error: ErrorRecord


class FrontCall(msgspec.Struct, array_like=True, tag="call"):
    """A front calls a method of the `FrontExchange`."""

    number: int
    method: Literal["sync", "next_question", "answer", "ask"]
    arguments: list[Any]
    """Those behind the name of the front."""


TO_SERVER, TO_PROBES = b"s", b"p"
"""What comes with a connection that a front is given: for which of its ports it was."""

ToFront = FrontBegin | FrontMayListen | FrontSettings | FrontSignal | FrontReply
FromFront = FrontPrepared | FrontServes | FrontAlive | FrontRefused | FrontCall

decode_to_front = msgspec.msgpack.Decoder[ToFront](ToFront).decode
decode_from_front = msgspec.msgpack.Decoder[FromFront](FromFront).decode
_encode = msgspec.msgpack.Encoder().encode


def settings_text(settings: ServerSettings) -> str:
    """Settings as JSON, which also has paths that are no valid Unicode."""
    names = [setting.name for setting in settings_of(ServerSettings)]
    return json.dumps({name: getattr(settings, name) for name in names})


def read_settings(text: str) -> ServerSettings:
    """The settings that `settings_text` has written."""
    return ServerSettings(**json.loads(text))


def receive_first(sock: socket.socket) -> ToFront | None:
    """The first message to a front, before its event loop runs; None at the end. Blocks. The next
    one comes after the front's own first one."""
    buffer = FrameBuffer()
    while data := sock.recv(_PIECE):
        buffer.add(data)
        for body in buffer.frames():
            message: ToFront = decode_to_front(body)
            return message
    return None


def send_last(sock: socket.socket, message: FromFront) -> None:
    """Send a message without an event loop."""
    sock.sendall(framed(_encode(message)))


class FrontStream(Generic[M]):
    """One side of the way between a front and the process that has started it. Lives on an event
    loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decode: Callable[[bytes], M],
    ) -> None:
        self._reader, self._writer, self._decode = reader, writer, decode

    @classmethod
    async def over(cls, sock: socket.socket, decode: Callable[[bytes], M]) -> FrontStream[M]:
        """Over a socket, which belongs to the stream from now on. `decode`: what comes."""
        return cls(*await asyncio.open_connection(sock=sock), decode)

    def send(self, message: ToFront | FromFront) -> None:
        """Send a message; it is lost where the other side has gone."""
        self._writer.write(framed(_encode(message)))

    async def messages(self) -> AsyncIterator[M]:
        """What comes, until the other side has gone."""
        buffer = FrameBuffer()
        with contextlib.suppress(OSError):
            while data := await self._reader.read(_PIECE):
                buffer.add(data)
                for body in buffer.frames():
                    yield self._decode(body)

    def close(self) -> None:
        """Close this side."""
        self._writer.close()
