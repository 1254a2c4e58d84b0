"""Runs an app under uvicorn: takes the address over, says when it serves, drains at the end.

The address is bound before anything is imported or loaded, so that a port in use is known at once
and not after minutes; an `EarlyListener` answers there until the server does. At SIGINT, SIGTERM or
the end of its terminal, running requests may finish, and new ones are refused (503). With
`drain_delay_s` the server is first said to be not ready, and serves newcomers for so long; then it
closes its port. The engine is closed when nothing runs any more, after `drain_timeout_s`, or at a
second signal; that ends every remaining stream with a typed error. A third signal waits for
nothing. A terminal that is closed may send SIGHUP several times, so only the first one counts. Any
other SIGHUP has files read again (`Reload`); a server that was started with `nohup` ignores it.
SIGUSR1 writes the stacks of all threads to stderr, SIGUSR2 does nothing; log rotation tools send
them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from infer.config import DEFAULT_HOST, DEFAULT_PORT, EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.loop import freeze_heap
from infer.errors import ConfigError, InferError
from infer.replicas.launch import FleetSettings, Loads, launch_engines, standing_by
from infer.replicas.spawned import EarlyProcess
from infer.replicas.standby import Standby
from infer.server.address import cannot_listen, take_no_more, url_of
from infer.server.app import create_app, layers
from infer.server.certificate import LOOK_S, Certificate
from infer.server.early_listener import EarlyListener, listening
from infer.server.http.bounded_protocol import BoundedProtocol
from infer.server.http.connections import ConnectionLimits, Connections, connection_limits
from infer.server.http.tls_connection import accept_tls
from infer.server.http.uvicorn_config import uvicorn_config
from infer.server.loaded_models import LoadedModels
from infer.server.models_folder import ModelsFolder, launches_in
from infer.server.models_memory import ModelsMemory
from infer.server.multi_model import ModelRouter
from infer.server.observe.logs import log_on_stderr, log_request
from infer.server.observe.spans import check_packages
from infer.server.probe_server import ProbeServer
from infer.server.reload import ReadAgain, Reload
from infer.server.request_views import RequestViews
from infer.server.route_table import unknown_model_statuses
from infer.server.screen import Screen, Served, leave_closed_streams
from infer.server.served_models import Presets, names_of
from infer.server.service_manager import ServiceManager
from infer.server.sessions import NO_SESSIONS
from infer.server.sessions.routes import default_url
from infer.server.sessions.store import SessionStore, is_in_memory
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Keys
from infer.server.turn_away import TurnAway
from infer.server.ui.page import Page
from infer.signals import ENDING, Hangup, answer_users, open_standard_streams

log = logging.getLogger("infer.server")

LAST_REQUESTS_S = 1.0
"""The seconds for which a server stays whose port is closed, for connections that came just then.
"""
_OPENING_S = 0.25
"""The seconds that connections have to be opened which were asked for before the port closes."""
_TICKS_BETWEEN_LOOKS = int(LOOK_S / 0.1)
"""Of `Server.on_tick`."""
_LAST_WORDS_S = 5
"""The seconds between the end of the engine and that of uvicorn, in which streams send their
error."""
_COLLECT_S = 2.0
"""The seconds between full garbage collections while nobody is connected. With n connections (300
objects each) it is 1 + (n / 16)² times as long, because they make a collection longer: 50 ms with
hundreds of them."""
_MAX_COLLECTIONS = 300
"""The number of collections of young objects (one for 7,000 new ones) that force a full one."""


class Server(uvicorn.Server):
    """uvicorn with an announcement at the start and typed errors at the end."""

    def __init__(
        self,
        engine: AsyncLLM | ModelRouter,
        sock: socket.socket,
        settings: ServerSettings | None = None,
        *,
        announce: Callable[[str], None] | None = None,
        page: Page | None = None,
        early: EarlyListener | None = None,
        read_again: ReadAgain | None = None,
        hangup: Hangup | None = None,
        screen: Screen | None = None,
    ) -> None:
        """`announce`: gets the line that says where it serves. `early`: answers at `sock` until the
        server does. `read_again`: the settings as they are given now. `hangup`: tells what a HUP
        means, since the start. `screen`: is told of the beginning and the end."""
        settings = settings or ServerSettings()
        self._limits = most = settings.limits
        whole = ConnectionLimits(settings.max_connections, most.probe_connections)
        self._places = places = Connections(connection_limits(whole))
        app, turn_away = self._app_of(engine, settings, page)
        super().__init__(
            uvicorn_config(
                app,
                functools.partial(
                    BoundedProtocol,
                    write_stall_s=settings.write_stall_s,
                    places=places,
                    turn_away=turn_away,
                    overload_status=settings.status_when_full,
                    limits=most,
                ),
                loop="asyncio",  # whose transports BoundedProtocol knows; uvloop comes with Ray
                lifespan="on",
                log_level="warning",
                backlog=places.limits.accepted_at_once,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_graceful_shutdown=int(settings.drain_timeout_s + _LAST_WORDS_S),
            )
        )
        self._engine, self._sock, self._early = engine, sock, early
        self._reload = Reload(settings, Certificate(settings), app.state.apply, read_again)
        self._hangup = hangup or Hangup()
        self._manager = ServiceManager()
        self._probes = _probes_of(early, app.state.views, settings, places)
        self._announce, self._screen = announce, screen
        self._port_closes_s: float | None = None
        """When newcomers are served no longer, on the monotonic clock; None: not known, or past."""
        self._stays_until_s = 0.0
        self._drain_ends_s: float | None = None
        self._quiet_s = 0.0
        """Since the last full garbage collection; less the more connections there are."""
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _app_of(
        self, engine: AsyncLLM | ModelRouter, settings: ServerSettings, page: Page | None
    ) -> tuple[Starlette, TurnAway | None]:
        """The app over an engine or several, and what refuses requests by their headers."""
        if isinstance(engine, ModelRouter):
            outer = layers(settings, (engine.seen,), page=page)
            return engine.make_app(outer, settings.status_when_full), None
        app = self._app_of_one(engine, settings, page)
        if settings.api_keys is not None:
            return app, None
        on_end = (app.state.metrics.seen, log_request)
        paths, status = app.state.generating_paths, settings.status_when_full
        return app, TurnAway(engine, paths, on_end, status)

    def _app_of_one(
        self, engine: AsyncLLM, settings: ServerSettings, page: Page | None
    ) -> Starlette:
        return create_app(engine, settings, page=page)

    @property
    def settings(self) -> ServerSettings:
        """As they are now; HUP may change some."""
        return self._reload.settings

    def serve_until_stopped(self) -> None:
        """Serve; returns after a signal, or when `should_exit` is set."""
        self.run(sockets=[self._sock])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        url = url_of(self._sock, is_tls=self.config.is_ssl)
        if self.config.ssl is not None:  # asyncio would count no connection before its handshake
            make: Any = self.config.http_protocol_class
            rest = (self._reload.context, self._places, self._limits)
            accept = functools.partial(accept_tls, make, *rest)
            self.config.http_protocol_class = accept  # type: ignore[assignment]
            self.config.ssl = None
        early = self._early
        begun = early.hand_over() if early is not None else []
        probing = early.metrics.hand_over() if early is not None and early.metrics else []
        try:
            await super().startup(sockets)
            await self._take(begun)
            if self._probes is not None:
                await self._probes.start(probing)
        except OSError as error:
            await self.lifespan.shutdown()
            raise cannot_listen(self._sock, error) from None
        finally:
            for connection in begun:
                connection.close()
        self._say_where(url)
        self._manager.ready(f"serves at {url}")

    def _say_where(self, url: str) -> None:
        engine = self._engine
        if isinstance(engine, ModelRouter):
            (names, more), engines = engine.announcement, engine.engines()
        else:
            names, more, engines = engine.model_name, "", [engine]
        line = f"infer serves {names} at {url} (Ctrl+C to stop){more}"
        if self._announce is not None:
            self._announce(line)
        if self._screen is not None:
            has_page = self.settings.ui
            served = Served(names=names, engines=engines, url=url, has_page=has_page)
            self._screen.serving(line, served)

    async def _take(self, begun: list[socket.socket]) -> None:
        """Serve connections that have been accepted before, as if they were accepted now."""
        loop = asyncio.get_running_loop()
        make = functools.partial(
            cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        while begun:
            with contextlib.suppress(OSError):  # it has gone
                await loop.connect_accepted_socket(make, begun.pop())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_what_still_runs())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
            if self._probes is not None:
                await self._probes.close()

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        self._quiet_s += 0.1 / (1 + (len(self.server_state.connections) / 16) ** 2)
        if self._quiet_s > _COLLECT_S:
            self._quiet_s = 0.0
            gc.collect()
        self._manager.tick()
        if counter % _TICKS_BETWEEN_LOOKS == 0:
            self._reload.refresh()
        now_s = time.monotonic()
        if self._port_closes_s is not None and now_s >= self._port_closes_s:
            self._port_closes_s = None
            await self._close_port()
            now_s = time.monotonic()  # closing serves what has come, which may take a while
            self._stays_until_s = now_s + LAST_REQUESTS_S
            self._drain_ends_s = now_s + self.settings.drain_timeout_s
        if self._drain_ends_s is None or now_s < self._stays_until_s:
            return False
        return self._engine.num_open == 0 or now_s >= self._drain_ends_s

    def _leave(self) -> None:
        """Begin to end: at once, or once proxies have seen that the server is not ready."""
        self._manager.stopping()
        delay_s = self.settings.drain_delay_s
        if self._screen is not None and self._loop is not None:  # a signal may interrupt a print
            timeout_s = delay_s + self.settings.drain_timeout_s
            tell = self._screen.ending
            self._loop.call_soon_threadsafe(tell, self._engine.num_open, timeout_s)
        if not delay_s:
            self._drain()
            return
        log.info(
            "the server ends: it is not ready any more, and serves newcomers for %g s", delay_s
        )
        self._places.leave()
        self._port_closes_s = time.monotonic() + delay_s

    async def _close_port(self) -> None:
        """Serve what has come to the port, and close it; kept connections without a request too."""
        if take_no_more(self._sock):
            await asyncio.sleep(_OPENING_S)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock.fileno())
        waiting = []
        with contextlib.suppress(OSError):  # nobody waits any more
            while True:
                waiting.append(self._sock.accept()[0])
        for server in self.servers:
            server.close()
        for sock in waiting:
            sock.setblocking(False)
        await self._take(waiting)
        self._places.close_idle()

    def _read_again(self) -> None:
        self._manager.reloading()
        self._reload.begin().add_done_callback(lambda _: self._manager.say("READY=1"))

    def _drain(self) -> None:
        self._engine.drain()
        self._port_closes_s = None
        self._drain_ends_s = time.monotonic() + self.settings.drain_timeout_s

    @property
    def _is_ending(self) -> bool:
        return self._drain_ends_s is not None or self._port_closes_s is not None

    async def _end_what_still_runs(self) -> None:
        if self._drain_ends_s is None:
            self._drain()
        assert self._drain_ends_s is not None
        with contextlib.suppress(TimeoutError):
            left_s = max(0.0, self._drain_ends_s - time.monotonic())
            await asyncio.wait_for(self._hurry.wait(), left_s)
        await self._engine.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again; so the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        answer_users()
        signals = [ending for ending in ENDING if signal.getsignal(ending) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, former in before.items():
                signal.signal(number, former)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig == getattr(signal, "SIGHUP", None):
            if self._is_ending:
                return
            if not self._hangup.is_end():
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._read_again)
                return
        if self._loop is None or self._is_ending:
            self.force_exit = self._hurry.is_set()
            self.should_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            self._leave()


def _probes_of(
    early: EarlyListener | None,
    views: RequestViews,
    settings: ServerSettings,
    places: Connections,
) -> ProbeServer | None:
    """What takes over the port for health and metrics, if there is one."""
    if early is None or early.metrics is None:
        return None
    return ProbeServer(early.metrics.sock, views, settings, places)


def serve_config(
    config: EngineConfig | Mapping[str, EngineConfig],
    settings: ServerSettings,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    in_thread: bool = False,
    early: EarlyProcess | None = None,
    listener: EarlyListener | None = None,
    read_again: ReadAgain | None = None,
    hangup: Hangup | None = None,
    screen: Screen | None = None,
    presets: Presets = Presets(),  # noqa: B008
) -> None:
    """Bind the address, start the engine and serve. Raises `LoadError` where one of them fails.

    A mapping of names to configs makes an engine for each; see `ModelRouter`. With `in_thread` the
    engine runs in this process, which ends with it; that is for comparisons. `early`: the process
    of the first engine, where it has been started before. `listener`: what answers at the address
    until the server does, where that has been started before. `read_again`, `hangup`, `screen`: see
    `Server`. `presets`: of the models in the folder of models, and aliases.
    """
    _check_combination(
        settings, has_names=not isinstance(config, EngineConfig), in_thread=in_thread
    )
    open_standard_streams()
    with contextlib.ExitStack() as held:
        held.callback(leave_closed_streams)
        held.enter_context(
            log_on_stderr(settings.log_format, settings.log_level, is_quiet=settings.quiet)
        )
        if listener is None:
            listener = held.enter_context(listening(settings, host, port, names_of(config)))
        _check_stores(settings)
        page = Page() if settings.ui else None
        freeze_heap()  # while the engine's process imports; `run` does it again for the rest
        standby = held.enter_context(standing_by(settings.standby and not in_thread))
        if settings.fronts > 1 and isinstance(config, EngineConfig):
            ours = {"read_again": read_again, "hangup": hangup, "screen": screen}
            _serve_by_fronts(config, settings, listener, standby, early, **ours)
            return
        loads = Loads()
        start = _launcher(settings, loads, standby, early, in_thread=in_thread)
        engine: AsyncLLM | ModelRouter
        if isinstance(config, EngineConfig):
            engine = start(_with_seed(config))
        else:
            engine = _router(config, start, settings, loads, listener, presets)
        run(engine, listener.sock, settings, listener, page, read_again, hangup, screen)


def _launcher(
    settings: ServerSettings,
    loads: Loads,
    standby: Standby | None,
    early: EarlyProcess | None,
    *,
    in_thread: bool,
) -> Callable[[EngineConfig], AsyncLLM]:
    """What starts the engines of a model."""
    if in_thread:
        from infer.engine.build.assemble import build_async_llm  # this imports torch

        return build_async_llm
    from infer.replicas.launch import launch

    return functools.partial(
        launch,
        hang_s=settings.hang_s,
        load_timeout_s=settings.load_timeout_s,
        loads=loads,
        standby=standby,
        early=early,
        fleet=fleet_settings(settings),
    )


def _serve_by_fronts(
    config: EngineConfig,
    settings: ServerSettings,
    listener: EarlyListener,
    standby: Standby | None,
    early: EarlyProcess | None,
    **how: Any,
) -> None:
    """Serve one model by several processes that answer HTTP; `how`: see `run_fronts`."""
    from infer.server.front_keeper import run_fronts  # of no use to all other servers
    from infer.server.front_places import front_places

    config = _with_seed(config)
    with front_places(listener, settings) as places:
        engines = launch_engines(
            config,
            num_replicas=settings.replicas,
            num_fronts=settings.fronts,
            hang_s=settings.hang_s,
            load_timeout_s=settings.load_timeout_s,
            standby=standby,
            early=early,
        )
        run_fronts(engines, places, listener, settings, seed=config.seed or 0, **how)


def _router(
    configs: Mapping[str, EngineConfig],
    launch: Callable[[EngineConfig], AsyncLLM],
    settings: ServerSettings,
    loads: Loads,
    listener: EarlyListener,
    presets: Presets,
) -> ModelRouter:
    """Several models, which are loaded from now on or when they are used."""
    launches = {
        name: functools.partial(launch, _with_seed(config)) for name, config in configs.items()
    }
    find = folder = None
    if settings.models_dir is not None:
        folder = ModelsFolder(Path(settings.models_dir))
        find = functools.partial(
            launches_in, folder, lambda config_found: launch(_with_seed(config_found)), presets
        )

    def path_of(name: str) -> Path:
        if name in configs or folder is None:
            return Path(configs[name].model or "").expanduser()
        return folder.path_of(name)

    models = LoadedModels(
        launches,
        functools.partial(create_app, settings=settings, is_inner=True),
        idle_unload_s=settings.idle_unload_s,
        end_loads=loads.end,
        limits=settings.limits,
        find=find,
        aliases=presets.aliases,
        fits=ModelsMemory(path_of, settings.models_memory_bytes).fits,
    )
    router = ModelRouter(
        models,
        unknown_model_statuses=unknown_model_statuses(settings),
        drain_timeout_s=settings.drain_timeout_s,
        waits=settings.when_not_loaded == "wait",
        keep_alive_s=settings.keep_alive_s,
    )
    if not settings.load_on_first_use:
        router.load_all(listener.answers.note)
    return router


def _check_combination(settings: ServerSettings, *, has_names: bool, in_thread: bool) -> None:
    for field in ("load_on_first_use", "idle_unload_s", "models_memory_bytes"):
        if not has_names and getattr(settings, field):
            raise ConfigError(field, "is for models with names: --model NAME=PATH-OR-HUB-ID")
    if in_thread and settings.replicas > 1:
        raise ConfigError("replicas", "need a process each: leave --engine-thread out")
    if settings.fronts > 1:
        _check_fronts(settings, has_names=has_names, in_thread=in_thread)


def _check_fronts(settings: ServerSettings, *, has_names: bool, in_thread: bool) -> None:
    """Raises `ConfigError` for what several processes at one port cannot do; see also
    `ServerSettings`."""
    if not sys.platform.startswith("linux"):
        message = "more than 1 need Linux, which divides a port's connections among processes"
        raise ConfigError("fronts", message)
    if in_thread:
        message = "more than 1 need an engine in a process of its own: leave --engine-thread out"
        raise ConfigError("fronts", message)
    if has_names:
        message = "more than 1 serve one model, without a name: leave NAME= or --fronts out"
        raise ConfigError("fronts", message)
    if settings.sessions is not None and is_in_memory(settings.sessions):
        message = "is in memory, and each of several fronts would have its own: name a file"
        raise ConfigError("sessions", message)


def _check_stores(settings: ServerSettings) -> None:
    """Raises `ConfigError` if the file of keys, the database of sessions or the packages of tracing
    cannot be used: the server needs them when the engine is there, and a large model takes minutes
    to load."""
    if settings.api_keys is not None:
        Keys(Path(settings.api_keys))
    if settings.sessions not in (None, NO_SESSIONS):
        SessionStore(settings.sessions, limits=settings.limits).close()
    elif settings.sessions is None and settings.fronts > 1:
        # So that no two of them make its tables at the same time. One that cannot be made is said
        # when it is used.
        with contextlib.suppress(InferError):
            SessionStore(default_url(), limits=settings.limits).close()
    if settings.tracing:
        check_packages()


def fleet_settings(settings: ServerSettings) -> FleetSettings:
    """How the engines of a model stand in for each other."""
    return FleetSettings(
        replicas=settings.replicas,
        link_timeout_s=settings.link_timeout_s,
        moved_streams=settings.moved_streams,
        routing=settings.routing,
    )


def _with_seed(config: EngineConfig) -> EngineConfig:
    """The config, with a random seed if it has none: unseeded answers differ between runs."""
    return config if config.seed is not None else replace(config, seed=secrets.randbits(62))


def run(
    engine: AsyncLLM | ModelRouter,
    sock: socket.socket,
    settings: ServerSettings | None = None,
    early: EarlyListener | None = None,
    page: Page | None = None,
    read_again: ReadAgain | None = None,
    hangup: Hangup | None = None,
    screen: Screen | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, at the address that `bind` or `unix_socket` has bound; see
    `Server`, also for the rest. `page`: the settings' page, where it has been read before."""
    with sock:
        if page is None and settings is not None and settings.ui:
            page = Page()
        server = Server(
            engine,
            sock,
            settings,
            page=page,
            early=early,
            read_again=read_again,
            hangup=hangup,
            screen=screen or Screen(),
        )
        serve_alone(server)


def serve_alone(server: Server) -> None:
    """Serve, in a process that does nothing else, until that is asked to end."""
    sys.setswitchinterval(0.001)  # the seconds that the event loop waits for a parsing thread
    freeze_heap()
    gc.set_threshold(700, 10, _MAX_COLLECTIONS)  # `on_tick` does the full collections
    server.serve_until_stopped()
