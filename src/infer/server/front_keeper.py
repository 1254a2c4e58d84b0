"""`FrontKeeper`: `infer serve --fronts N`: has the engines, and N processes that answer HTTP"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, assert_never

from infer.engine.engine_client import HEARTBEAT_S
from infer.engine.loop import freeze_heap
from infer.errors import InferError, LoadError
from infer.replicas.host import ReplicaHost
from infer.replicas.launch import FleetSettings, LaunchedEngines
from infer.replicas.messages import Description, encode
from infer.replicas.replica import Replica
from infer.replicas.socket_link import serve_link
from infer.server.address import url_of
from infer.server.early_listener import EarlyListener
from infer.server.front_exchange import FrontExchange
from infer.server.front_messages import (
    TO_PROBES,
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
    settings_text,
)
from infer.server.front_places import FrontPlace, FrontProcess
from infer.server.observe.logs import set_log_level
from infer.server.reload import ReadAgain
from infer.server.screen import Screen, Served
from infer.server.service_manager import ServiceManager
from infer.server.settings import ServerSettings
from infer.signals import ENDING, Hangup

log = logging.getLogger("infer.server")

TICK_S = 0.1
"""Seconds between two looks at what has become of the fronts."""
HANG_S, START_S = 30.0, 120.0
"""Seconds without a sign of a front's event loop after which its process is ended: while it serves,
and while it starts."""
OWN_PAUSE_S = 2.0
"""Seconds without a look after which this process itself was stopped, and its fronts perhaps too.
"""
LAST_WORDS_S = 10.0
"""Seconds that fronts have to end after what the settings give their requests."""
AT_ONCE_S = 2.0
"""The same after a third signal."""
STEADY_S = 10.0
"""Seconds of service after which the death of a front is not one of several in a row."""
MAX_FAILURES = 3
"""Fronts in a row that may die before they have served, at the start of the server."""
MAX_PAUSE_S = 30.0
"""Longest pause in seconds before another front is started."""
MAX_ACCEPTED = 64
"""Connections that are accepted for others in a turn."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def run_fronts(
    engines: LaunchedEngines,
    places: Sequence[FrontPlace],
    listener: EarlyListener,
    settings: ServerSettings,
    *,
    seed: int = 0,
    read_again: ReadAgain | None = None,
    hangup: Hangup | None = None,
    screen: Screen | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, by the fronts at `places`; see `serve.run` for the rest.
    Raises `LoadError` where the fronts cannot serve."""
    hosts = [ReplicaHost(replica) for replica in engines.replicas]
    for host in hosts:
        host.replica.start(host)
    keeper = FrontKeeper(
        engines,
        hosts,
        places,
        listener,
        settings,
        seed=seed,
        read_again=read_again,
        hangup=hangup or Hangup(),
        screen=screen or Screen(),
    )
    sys.setswitchinterval(0.001)  # the seconds that links wait for the thread that hears an engine
    freeze_heap()
    try:
        asyncio.run(keeper.run())
    finally:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(Replica.stop, engines.replicas))


class FrontKeeper:
    """The fronts (`server.front_process`) listen at one address, each with a socket of its own, and
    the system gives each new connection to one of them (SO_REUSEPORT). This process answers no
    requests. It has the engines' processes (`ReplicaHost`: each front has a link to each engine),
    what the fronts share (`FrontExchange`), the sockets, and the signals.

    A front that dies takes its connections with it. Another one is started in its place, at the
    same socket; until that serves, what comes to the socket is accepted here and given to the
    others, so nobody is refused. A front whose event loop stands still is ended and replaced. Where
    this process dies, the system ends all others with it. Lives on the event loop of `run`.
    """

    def __init__(
        self,
        engines: LaunchedEngines,
        hosts: Sequence[ReplicaHost],
        places: Sequence[FrontPlace],
        listener: EarlyListener,
        settings: ServerSettings,
        *,
        seed: int,
        read_again: ReadAgain | None,
        hangup: Hangup,
        screen: Screen,
    ) -> None:
        """`hosts`: of the engines, which have been started."""
        self._engines, self._hosts, self._places = engines, hosts, places
        self._listener, self._settings = listener, settings
        self._seed, self._read_again = seed, read_again
        self._hangup, self._screen = hangup, screen
        self._manager = ServiceManager()
        self._exchange = FrontExchange(len(places))
        self._turns = itertools.count()
        """Whose turn it is to get a connection that was accepted here."""
        self._silent: list[tuple[bytes, socket.socket]] = []
        """Connections that nobody has yet."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._has_handed = self._has_served = False
        """Whether the fronts may listen, and whether all of them have served."""
        self._leaving = asyncio.Event()
        self._num_signals = 0
        self._ends_s = 0.0
        """When fronts that have not ended are killed."""

    async def run(self) -> None:
        """Serve until a signal; returns when all fronts have ended. Raises `InferError`."""
        watching = asyncio.create_task(self._watch())
        try:
            with self._signals():
                async with asyncio.TaskGroup() as group:
                    for place in self._places:
                        group.create_task(self._keep(place))
        # Not `except*`: what that raises is in a group again in Python 3.11.2, which Debian 12 has.
        except BaseExceptionGroup as errors:
            if all(isinstance(error, InferError) for error in errors.exceptions):
                raise errors.exceptions[0] from None
            raise
        finally:
            for task in (watching, *self._tasks):
                task.cancel()
            await asyncio.gather(watching, *self._tasks, return_exceptions=True)

    # ---- a front

    async def _keep(self, place: FrontPlace) -> None:
        """Have a front at a place until the server ends."""
        while not self._leaving.is_set():
            try:
                front = place.front or place.start()
            except OSError as error:
                log.error("another front cannot be started: %s", error)
                await self._pause(MAX_PAUSE_S)
                continue
            await self._follow(place, front)
            code = await asyncio.to_thread(front.popen.wait)
            place.front = None
            if self._leaving.is_set():
                return
            self._count_death(place, front, code)
            num = place.num_failures
            await self._pause(0.0 if num < 2 else min(MAX_PAUSE_S, 0.5 * 2.0 ** (num - 2)))

    async def _pause(self, pause_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), pause_s)

    async def _follow(self, place: FrontPlace, front: FrontProcess) -> None:
        """Serve what a front asks for until it ends."""
        stream = await front.begin(self._begin(front))
        links = [
            asyncio.create_task(serve_link(host, front.name, link))
            for host, link in zip(self._hosts, front.links, strict=True)
        ]
        try:
            async for message in stream.messages():
                await self._apply(place, front, message)
        finally:
            if not self._leaving.is_set():
                front.popen.kill()
            for task in links:
                task.cancel()
            await asyncio.gather(*links, return_exceptions=True)
            front.close()
            self._exchange.forget(front.name)
            self._cover()

    def _begin(self, front: FrontProcess) -> FrontBegin:
        return FrontBegin(
            front.name,
            len(self._places),
            settings_text(self._settings),
            encode(self._engines.text),
            [encode(self._description(host)) for host in self._hosts],
            self._seed,
        )

    def _description(self, host: ReplicaHost) -> Description:
        replica, model_name = host.replica, self._engines.text.model_name
        limits, fingerprint = replica.limits, replica.fingerprint
        return Description(replica.name, model_name, limits, fingerprint, is_draining=False)

    async def _apply(self, place: FrontPlace, front: FrontProcess, message: FromFront) -> None:
        match message:
            case FrontAlive(num_open):
                front.alive(num_open)
            case FrontCall():
                self._do(self._answer(front, message))
            case FrontPrepared():
                front.prepared()
                await self._let_listen(front)
            case FrontServes():
                front.serves()
                place.has_listened = True
                self._pass_on()
                self._cover()
                self._say_where()
            case FrontRefused(error):
                if not self._has_served:
                    raise error.exception()
                log.error("%s cannot serve: %s", front.name, error.message)
            case _:
                assert_never(message)

    async def _answer(self, front: FrontProcess, call: FrontCall) -> None:
        """Do what a front calls."""
        method = getattr(self._exchange, call.method)
        names = [] if call.method == "sync" else [front.name]
        try:
            reply = FrontReply(call.number, await method(*names, *call.arguments))
        except Exception as error:
            log.exception("%s has asked for what cannot be done", front.name)
            reply = FrontReply(call.number, error=type(error).__name__)
        front.send(reply)

    async def _let_listen(self, front: FrontProcess) -> None:
        """Let fronts listen: all at the same time at the start, so that no question whether the
        server is ready is answered in two ways; later each as soon as it can."""
        front.settle(settings_text(self._settings), [], always=False)
        if self._has_handed:
            front.send(FrontMayListen())
            return
        fronts = [place.front for place in self._places]
        if all(process is not None and process.is_prepared for process in fronts):
            await asyncio.to_thread(self._take_over)
            self._has_handed = True
            for process in fronts:
                if process is not None:
                    process.send(FrontMayListen())

    def _take_over(self) -> None:
        """Have the early listener answer no more. Blocks."""
        early = self._listener
        self._silent += [(TO_SERVER, sock) for sock in early.hand_over()]
        if early.metrics is not None:
            self._silent += [(TO_PROBES, sock) for sock in early.metrics.hand_over()]

    def _say_where(self) -> None:
        """Say that the server serves, once all fronts do."""
        if self._has_served or not all(place.serving for place in self._places):
            return
        self._has_served = True
        settings, names = self._settings, self._engines.text.model_name
        url = url_of(self._places[0].sock, is_tls=settings.ssl_certfile is not None)
        line = f"infer serves {names} at {url} (Ctrl+C to stop)"
        shown = self._engines.llm(FleetSettings(replicas=len(self._hosts)), 0)
        served = Served(names=names, engines=[shown], url=url, has_page=settings.ui)
        self._screen.serving(line, served)
        self._manager.ready(f"serves at {url}")

    def _count_death(self, place: FrontPlace, front: FrontProcess, code: int) -> None:
        """Log that a front has died. Raises `LoadError` if it has never served, several times."""
        place.num_failures = 1 if front.served_s > STEADY_S else place.num_failures + 1
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self._has_served and place.num_failures >= MAX_FAILURES:
            raise LoadError(f"the processes that answer HTTP end while they start ({how})")
        log.error(
            "%s has died (%s) with %d requests; another front is started",
            *(front.name, how, front.num_open),
        )

    # ---- connections that come where no front is

    def _cover(self) -> None:
        """Accept connections for fronts that are away, as long as others serve."""
        loop = asyncio.get_running_loop()
        has_others = any(place.serving for place in self._places)
        for place in self._places:
            is_away = place.has_listened and place.serving is None
            wanted = is_away and has_others and not self._leaving.is_set()
            socks = place.socks if wanted else set()
            for sock in place.covered - socks:
                loop.remove_reader(sock)
            for sock in socks - place.covered:
                loop.add_reader(sock, self._accept, place, sock)
            place.covered = socks

    def _accept(self, place: FrontPlace, sock: socket.socket) -> None:
        kind = TO_SERVER if sock is place.sock else TO_PROBES
        for _ in range(MAX_ACCEPTED):
            try:
                self._silent.append((kind, sock.accept()[0]))
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno in _NO_ROOM:
                    break  # it waits in the system's queue
        self._pass_on()

    def _pass_on(self) -> None:
        """Give connections that nobody has to fronts, in turn."""
        fronts = [front for place in self._places if (front := place.serving) is not None]
        if not fronts:
            return
        silent, self._silent = self._silent, []
        for kind, connection in silent:
            with connection:
                start = next(self._turns) % len(fronts)
                for front in fronts[start:] + fronts[:start]:
                    if front.hand(kind, connection):
                        break

    # ---- signals and time

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = [ending for ending in ENDING if signal.getsignal(ending) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._obey, number)
        before = signal.getsignal(signal.SIGUSR1)
        loop.add_signal_handler(signal.SIGUSR1, self._write_stacks, before)
        try:
            yield
        finally:
            for number in (*numbers, signal.SIGUSR1):
                loop.remove_signal_handler(number)

    def _write_stacks(self, handler: Any) -> None:
        """Have all processes that answer write their stacks."""
        if callable(handler):
            handler(signal.SIGUSR1, None)
        for front in self._fronts():
            front.popen.send_signal(signal.SIGUSR1)

    def _fronts(self) -> list[FrontProcess]:
        return [place.front for place in self._places if place.front is not None]

    def _obey(self, number: int) -> None:
        if number == signal.SIGHUP:
            if self._leaving.is_set():
                return
            if not self._hangup.is_end():
                if self._has_served:
                    self._do(self._read())
                return
        self._num_signals += 1
        if not self._leaving.is_set():
            self._leave()
        elif self._num_signals > 2:
            self._ends_s = min(self._ends_s, time.monotonic() + AT_ONCE_S)
        for front in self._fronts():
            front.signal(signal.SIGTERM)

    def _leave(self) -> None:
        """Begin to end: the fronts have the sockets alone, and are not replaced any more."""
        self._leaving.set()
        self._cover()
        self._manager.stopping()
        settings = self._settings
        rest_s = settings.drain_delay_s + settings.drain_timeout_s
        self._ends_s = time.monotonic() + rest_s + LAST_WORDS_S
        self._screen.ending(sum(front.num_open for front in self._fronts()), rest_s)
        for place in self._places:
            for sock in place.socks:
                sock.close()

    async def _read(self) -> None:
        """Read the settings again, and have the fronts take them and read their certificates."""
        self._manager.reloading()
        others: list[str] = []
        if self._read_again is not None:
            try:
                settings_and_others = await asyncio.to_thread(self._read_again, self._settings)
                self._settings, others = settings_and_others
                set_log_level(self._settings.log_level)
            except InferError as error:
                log.error("the settings stay as they were: %s", error)
        told = settings_text(self._settings)
        for front in self._fronts():
            front.settle(told, others, always=True)
        self._manager.say("READY=1")

    def _do(self, work: Any) -> None:
        """Run a coroutine beside the others."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Say that this process lives, to engines and whoever has started it; end what hangs."""
        looked_s = beat_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            self._manager.tick()
            if now_s - beat_s >= HEARTBEAT_S:
                beat_s = now_s
                for host in self._hosts:
                    host.heartbeat()
            for front in self._fronts():
                if now_s - looked_s > OWN_PAUSE_S:
                    front.excuse()
                limit_s = HANG_S if front.is_serving else START_S
                if self._leaving.is_set():
                    is_late = now_s > self._ends_s
                else:
                    is_late = front.silence_s > limit_s
                if is_late:
                    log.error("%s is ended: no sign for %.0f s", front.name, front.silence_s)
                    front.popen.kill()
            looked_s = now_s
