"""A front: one of several processes that answer HTTP at the same port, over shared engines"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette

from infer.child_process import be_known_as, end_with
from infer.engine.build.server_memory import FRONT_NAME
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.errors import InferError
from infer.replicas.fleet import fleet_limits
from infer.replicas.link_transport import LinkTransport
from infer.replicas.messages import Text, decode_description, decode_outward
from infer.replicas.replica import Replica
from infer.replicas.socket_link import SocketLink
from infer.server.address import of_descriptor
from infer.server.app import create_app
from infer.server.front_identity import seed_of_front
from infer.server.front_messages import (
    TO_SERVER,
    FromFront,
    FrontAlive,
    FrontBegin,
    FrontCall,
    FrontMayListen,
    FrontPrepared,
    FrontRefused,
    FrontReply,
    FrontServes,
    FrontSettings,
    FrontSignal,
    FrontStream,
    ToFront,
    decode_to_front,
    read_settings,
    receive_first,
    send_last,
)
from infer.server.front_relay import RelayedPeers, RelayError
from infer.server.fronts import SeveralFronts
from infer.server.observe.logs import log_on_stderr
from infer.server.probe_server import ProbeServer
from infer.server.serve import Server, fleet_settings, serve_alone
from infer.server.service_manager import ServiceManager
from infer.server.settings import ServerSettings
from infer.server.tenancy.front_limits import AuthorityError, FrontLimits
from infer.server.ui.page import Page
from infer.signals import answer_users, leave_signals_to_parent
from infer.text.tokenizer import Tokenizer
from infer.types import ErrorRecord

log = logging.getLogger("infer.server")

READY_S = 5.0
"""Seconds that an engine has to answer before the front listens all the same."""
_ALIVE_EVERY = 10
"""Calls of `on_tick`, of which there are ten a second, between two signs of life."""


class FrontParent:
    """The process that has started this front, as the front calls it: a `Relay`, and a transport of
    limits. Lives on the event loop, from `connect` on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream: FrontStream[ToFront] | None = None
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, obey: Callable[[ToFront], None]) -> None:
        """Begin. `obey`: is called with what is no reply."""
        self._stream = await FrontStream.over(self._sock, decode_to_front)
        self._reading = asyncio.create_task(self._read_messages(self._stream, obey))

    async def _read_messages(
        self, stream: FrontStream[ToFront], obey: Callable[[ToFront], None]
    ) -> None:
        async for message in stream.messages():
            if not isinstance(message, FrontReply):
                obey(message)
                continue
            waiting = self._waiting.pop(message.number, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        os._exit(1)  # it has gone, and the engines with it

    def send(self, message: FromFront) -> None:
        """Tell it something."""
        assert self._stream is not None
        self._stream.send(message)

    async def _call(self, method: Any, *arguments: Any) -> Any:
        self._num_calls += 1
        number, waiting = self._num_calls, asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self.send(FrontCall(number, method, list(arguments)))
        try:
            reply: FrontReply = await waiting
        finally:
            self._waiting.pop(number, None)
        return reply

    async def sync(self, said: bytes) -> bytes:
        """A transport of `FrontLimits`."""
        reply = await self._call("sync", said)
        if reply.error:
            raise AuthorityError(reply.error)
        return bytes(reply.value)

    async def next_question(self, front: str) -> tuple[int, bytes] | None:
        """See `Relay`, as the two below. It knows which front asks."""
        kind = tuple[int, bytes] | None
        question: tuple[int, bytes] | None = await self._relayed("next_question", kind)
        return question

    async def answer(self, front: str, number: int, data: bytes) -> None:
        await self._relayed("answer", None, number, data)

    async def ask(self, front: str, question: bytes, timeout_s: float) -> dict[str, bytes | None]:
        kind = dict[str, bytes | None]
        answers: dict[str, bytes | None] = await self._relayed("ask", kind, question, timeout_s)
        return answers

    async def _relayed(self, method: str, kind: Any, *arguments: Any) -> Any:
        reply = await self._call(method, *arguments)
        if reply.error:
            raise RelayError(reply.error)
        return msgspec.convert(reply.value, kind)


class FrontServer(Server):
    """A server as `infer serve` is one, over a fleet of links. Another process starts and ends it,
    and gives it connections that have come where no front is. It ignores the signals that a
    terminal or process manager sends to all processes: the one that has started it says when it
    ends."""

    def __init__(
        self,
        engine: AsyncLLM,
        sock: socket.socket,
        settings: ServerSettings,
        *,
        parent: FrontParent,
        fronts: SeveralFronts,
        handed: socket.socket,
        probes: socket.socket | None,
        page: Page | None,
    ) -> None:
        """`handed`: brings connections; `probes`: the port for health and metrics."""
        self._fronts = fronts
        self._llm = engine
        self._told = settings, list[str]()
        super().__init__(
            engine, sock, settings, page=page, announce=self._serves, read_again=self._tell_again
        )
        self._parent, self._handed = parent, handed
        self._manager = ServiceManager({})  # the process that has started this one speaks for all
        app = self.config.app
        assert isinstance(app, Starlette)
        self._views = app.state.views
        if probes is not None:
            self._probes = ProbeServer(probes, self._views, settings, self._places)
        self._may_listen = asyncio.Event()
        self._running: list[asyncio.Task[None]] = []

    def _app_of_one(
        self, engine: AsyncLLM, settings: ServerSettings, page: Page | None
    ) -> Starlette:
        return create_app(engine, settings, page=page, fronts=self._fronts)

    def _tell_again(self, _: ServerSettings) -> tuple[ServerSettings, list[str]]:
        """The settings as they were told last, and the others that have changed."""
        return self._told

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._parent.connect(self._obey)
        start_app = self.lifespan.startup
        self.lifespan.startup = partial(self._prepare, start_app)
        await super().startup(sockets)

    async def _prepare(self, start_app: Callable[[], Awaitable[None]]) -> None:
        """All that comes before the port is listened at."""
        await start_app()
        if self.lifespan.should_exit:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                while not self._llm.is_ready:
                    await asyncio.sleep(0.01)
        peers = self._fronts.peers
        assert isinstance(peers, RelayedPeers)
        self._running.append(asyncio.create_task(peers.serve(self._views.own)))
        self._parent.send(FrontPrepared())
        await self._may_listen.wait()

    def _serves(self, _: str) -> None:
        self._handed.setblocking(False)
        asyncio.get_running_loop().add_reader(self._handed, self._take_handed)
        self._parent.send(FrontServes())

    def _take_handed(self) -> None:
        """Serve connections that have been accepted elsewhere."""
        with contextlib.suppress(BlockingIOError):
            while True:
                kind, descriptors, _, _ = socket.recv_fds(self._handed, 1, 1)
                for number in descriptors:
                    taking = asyncio.create_task(self._take_one(kind, socket.socket(fileno=number)))
                    self._running = [task for task in self._running if not task.done()] + [taking]
                if not kind:
                    asyncio.get_running_loop().remove_reader(self._handed)
                    return

    async def _take_one(self, kind: bytes, connection: socket.socket) -> None:
        connection.setblocking(False)
        if kind == TO_SERVER:
            await self._take([connection])
        elif self._probes is not None:
            await self._probes.take(connection)

    def _obey(self, message: ToFront) -> None:
        match message:
            case FrontMayListen():
                self._may_listen.set()
            case FrontSettings(text, others):
                self._told = read_settings(text), others
                self._reload.begin()
            case FrontSignal(number):
                self.handle_exit(number, None)

    async def on_tick(self, counter: int) -> bool:
        if counter % _ALIVE_EVERY == 0:
            self._parent.send(FrontAlive(self._engine.num_open))
        return await super().on_tick(counter)


def _engine(begin: FrontBegin, settings: ServerSettings, links: list[socket.socket]) -> AsyncLLM:
    """The fleet of the engines at the other ends of the links."""
    text = decode_outward(begin.text)
    assert isinstance(text, Text)
    descriptions = [decode_description(encoded) for encoded in begin.engines]
    replicas = [
        Replica(
            description.name, description.limits, LinkTransport(SocketLink(link), description.name)
        )
        for description, link in zip(descriptions, links, strict=True)
    ]
    limits = fleet_limits([description.limits for description in descriptions])
    seed = seed_of_front(begin.seed, begin.name)
    input_processor = InputProcessor(Tokenizer(text.files), limits, seed, text.files.sampling)
    fleet = fleet_settings(settings).fleet(replicas)
    engine = AsyncLLM(fleet, input_processor, text.model_name)
    engine.warm_workers()
    return engine


def _server(
    begin: FrontBegin, control: socket.socket, handed: socket.socket, numbers: list[int]
) -> FrontServer:
    """`numbers`: descriptors, from that of the socket where it listens on. Raises `InferError`."""
    settings = read_settings(begin.settings)
    sock, probes, *links = numbers
    engine = _engine(begin, settings, [socket.socket(fileno=number) for number in links])
    above = FrontParent(control)
    limits = FrontLimits(begin.name, begin.num_fronts, above.sync)
    return FrontServer(
        engine,
        of_descriptor(sock),
        settings,
        parent=above,
        fronts=SeveralFronts(begin.name, limits, RelayedPeers(begin.name, above)),
        handed=handed,
        probes=of_descriptor(probes) if probes >= 0 else None,
        page=Page() if settings.ui else None,
    )


def main(parent: int, control_number: int, handed_number: int, *numbers: int) -> int:
    """Run a front; returns the exit code of the process.

    `python -m infer.server.front_process PARENT CONTROL HANDED SOCK PROBES LINK...` is started by
    `server.front_keeper` with descriptors: of what the two say to each other, of connections that
    it is given, of the socket where it listens and of that for probes (or -1), and of a link to
    each engine.
    """
    leave_signals_to_parent()
    answer_users()
    end_with(parent)
    be_known_as(FRONT_NAME, 0)
    control = socket.socket(fileno=control_number)
    begin = receive_first(control)
    if not isinstance(begin, FrontBegin):
        return 1  # the server has ended before
    settings = read_settings(begin.settings)
    writes = partial(log_on_stderr, is_quiet=settings.quiet, fields={"front": begin.name})
    with writes(settings.log_format, settings.log_level):
        try:
            handed = socket.socket(fileno=handed_number)
            serve_alone(_server(begin, control, handed, list(numbers)))
        except InferError as error:
            try:
                send_last(control, FrontRefused(ErrorRecord.of(error)))
            except OSError:  # it was closed with the event loop
                log.error("%s", error)
            return 2
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as soon as possible
    sys.exit(main(*map(int, sys.argv[1:])))
