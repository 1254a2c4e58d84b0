"""Runs an app under uvicorn: binds the address, says when it listens, drains at the end.

The port is bound before the engine is loaded, so that a port in use is known at once and not after
minutes. At SIGINT, SIGTERM or SIGHUP running requests may finish, and new ones are refused (503).
The port and the engine are closed when nothing runs any more, after `drain_timeout_s`, or at a
second signal; that ends every remaining stream with a typed error. A third signal waits for
nothing. A terminal that is closed may send SIGHUP several times, so only the first one counts; a
server that was started with `nohup` ignores it. SIGUSR1 writes the stacks of all threads to stderr,
SIGUSR2 does nothing; log rotation tools send them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import faulthandler
import functools
import gc
import ipaddress
import logging
import os
import secrets
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from infer.config import DEFAULT_HOST, DEFAULT_PORT, EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.loop import freeze_heap
from infer.engine.process.launch import FleetSettings, Loads, standing_by
from infer.engine.process.spawned import EarlyProcess
from infer.errors import ConfigError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.server.app import create_app, layers
from infer.server.http.bounded_protocol import BoundedProtocol
from infer.server.http.connections import ConnectionLimits, Connections, connection_limits
from infer.server.http.tls_connection import accept_tls
from infer.server.multi_model import ModelRouter
from infer.server.observe.logs import JsonLines, LogWriter, access, log_request
from infer.server.observe.spans import check_packages
from infer.server.route_table import unknown_model_statuses
from infer.server.sessions import NO_SESSIONS
from infer.server.sessions.store import SessionStore
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Keys
from infer.server.turn_away import TurnAway
from infer.server.ui.page import Page
from infer.signals import ENDING
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

log = logging.getLogger("infer.server")

KEEP_ALIVE_S = 75
MAX_WAITING_CONNECTIONS = 2048
"""The most connections that the system has opened and the event loop has not accepted yet."""
_LAST_WORDS_S = 5
"""The seconds between the end of the engine and that of uvicorn, in which streams send their
error."""
_COLLECT_S = 2.0
"""The seconds between full garbage collections while nobody is connected. With n connections (300
objects each) it is 1 + (n / 16)² times as long, because they make a collection longer: 50 ms with
hundreds of them."""
_MAX_COLLECTIONS = 300
"""The number of collections of young objects (one for 7,000 new ones) that force a full one."""


def bind(
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    write_stall_s: float = ServerSettings.write_stall_s,
    limits: ServerLimits = SERVER_LIMITS,
) -> socket.socket:
    """A socket that holds the port and does not listen yet; port 0 = any free port.

    Raises `ConfigError` where the address cannot be used. Where the system can do it, a connection
    is dropped whose reader has not acknowledged what was sent after `write_stall_s` seconds.
    """
    if not 0 <= port <= 65535:
        raise ConfigError("port", f"must be between 0 and 65535, not {port}")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError("host", f"{host!r} is not an address or name of this machine") from None
    sock = socket.socket(family, kind, proto)
    try:
        # Accepted connections inherit it. Without it each answer on a kept connection waits 40 ms
        # for the client's acknowledgement of its head, and tokens come in bursts.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            stall_ms = min(int(write_stall_s * 1000), 2**31 - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise _no_address(error, host, port) from None
    return sock


def _no_address(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        advice = "stop what runs there or choose another --port"
        return ConfigError("port", f"{port} is in use on {host}; {advice}")
    if error.errno == errno.EACCES:
        return ConfigError("port", f"{port} may not be used by this user")
    return ConfigError("host", f"cannot listen on {host!r}: {error.strerror}")


@contextlib.contextmanager
def unix_socket(path: str) -> Iterator[socket.socket]:
    """A Unix socket at `path`, which only this user may use, and which does not listen yet.

    The file that a dead server left is replaced. The file is removed at the end of the block.
    Raises `ConfigError` where a server listens at the path, or another kind of file is there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _remove_stale(path)
            mask = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(mask)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SERVER_LIMITS.send_buffer_bytes)
            ours = os.stat(path)
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise ConfigError("uds", f"cannot listen at {path!r}: {reason}") from None
        try:
            yield sock
        finally:
            with contextlib.suppress(OSError):
                now = os.stat(path)
                if (now.st_dev, now.st_ino) == (ours.st_dev, ours.st_ino):
                    os.unlink(path)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError("uds", f"{path!r} is there and is no socket; choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except TimeoutError:
            pass  # a server listens and does not answer
    raise ConfigError("uds", f"a server listens at {path!r} already")


def check_certificate(settings: ServerSettings) -> None:
    """Raises `ConfigError` if the certificate or its private key cannot be used."""
    if settings.ssl_certfile is None:
        return
    for field in ("ssl_certfile", "ssl_keyfile"):
        name = getattr(settings, field)
        try:
            if name is not None and not read_text(Path(name).expanduser(), MAX_CONFIG_BYTES):
                raise ConfigError(field, f"{name!r} is empty")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not PEM"
            raise ConfigError(field, f"{name!r} cannot be read: {reason}") from None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(
            settings.ssl_certfile,
            settings.ssl_keyfile,
            password=lambda: "",  # else OpenSSL asks for one on the terminal
        )
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        key = settings.ssl_keyfile or settings.ssl_certfile
        message = f"{settings.ssl_certfile!r} and the key in {key!r} cannot be used: {reason}"
        if "MISMATCH" in str(reason):
            message += "; the key is another certificate's"
        raise ConfigError("ssl_certfile", message) from None


def url_of(sock: socket.socket, *, is_tls: bool = False) -> str:
    """The address at which a client on this machine finds the server."""
    if sock.family == getattr(socket, "AF_UNIX", None):
        return f"unix:{sock.getsockname()}"
    scheme = "https" if is_tls else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
    ) -> None:
        settings = settings or ServerSettings()
        most = settings.limits
        limits = connection_limits(ConnectionLimits(most.max_connections, most.probe_connections))
        self._places = places = Connections(limits)
        self._limits = most
        turn_away: TurnAway | None = None
        if isinstance(engine, ModelRouter):
            outer = layers(settings, (engine.seen,), page=page)
            app = engine.make_app(outer, settings.status_when_full)
        else:
            app = create_app(engine, settings, page=page)
            if settings.api_keys is None:
                on_end = (app.state.metrics.seen, log_request)
                turn_away = TurnAway(
                    engine, app.state.generating_paths, on_end, settings.status_when_full
                )
        super().__init__(
            uvicorn.Config(
                app,
                http=functools.partial(  # type: ignore[arg-type]
                    BoundedProtocol,
                    write_stall_s=settings.write_stall_s,
                    places=places,
                    turn_away=turn_away,
                    overload_status=settings.status_when_full,
                    limits=settings.limits,
                ),
                loop="asyncio",  # whose transports BoundedProtocol knows; uvloop comes with Ray
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=limits.accepted_at_once,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=settings.ssl_certfile,
                ssl_keyfile=settings.ssl_keyfile,
                timeout_graceful_shutdown=int(settings.drain_timeout_s + _LAST_WORDS_S),
            )
        )
        self._engine = engine
        self._sock = sock
        self._drain_timeout_s = settings.drain_timeout_s
        self._announce = announce
        self._drain_ends_s: float | None = None
        self._quiet_s = 0.0
        """The time since the last full garbage collection, in seconds; it counts less the more
        connections there are."""
        self._hurry = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def serve_until_stopped(self) -> None:
        """Serve; returns after a signal, or when `should_exit` is set."""
        self.run(sockets=[self._sock])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        url = url_of(self._sock, is_tls=self.config.is_ssl)
        if self.config.ssl is not None:  # asyncio would count no connection before its handshake
            make: Any = self.config.http_protocol_class
            rest = (self.config.ssl, self._places, self._limits)
            accept = functools.partial(accept_tls, make, *rest)
            self.config.http_protocol_class = accept  # type: ignore[assignment]
            self.config.ssl = None
        try:
            await super().startup(sockets)
        except OSError as error:  # SO_REUSEADDR lets two hold a port, and only one listen
            await self.lifespan.shutdown()
            if url.startswith("unix:"):
                raise ConfigError("uds", f"cannot listen: {error.strerror}") from None
            host, port = self._sock.getsockname()[:2]
            raise _no_address(error, host, port) from None
        # asyncio accepts as many connections in a turn as may wait. More of them may wait.
        self._sock.listen(MAX_WAITING_CONNECTIONS)
        if self._announce is not None:
            engine = self._engine
            names, more = engine.model_name, ""
            if isinstance(engine, ModelRouter):
                names, more = engine.announcement
            self._announce(f"infer serves {names} at {url} (Ctrl+C to stop){more}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_what_still_runs())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        self._quiet_s += 0.1 / (1 + (len(self.server_state.connections) / 16) ** 2)
        if self._quiet_s > _COLLECT_S:
            self._quiet_s = 0.0
            gc.collect()
        if self._drain_ends_s is None:
            return False
        return self._engine.num_open == 0 or time.monotonic() >= self._drain_ends_s

    def _drain(self) -> None:
        self._engine.drain()
        self._drain_ends_s = time.monotonic() + self._drain_timeout_s

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
        _answer_users()
        signals = [each for each in ENDING if signal.getsignal(each) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, former in before.items():
                signal.signal(number, former)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        is_hangup = sig == getattr(signal, "SIGHUP", None)
        if is_hangup and self._drain_ends_s is not None:
            return
        if self._loop is None or self._drain_ends_s is not None:
            self.force_exit = self._hurry.is_set()
            self.should_exit = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._hurry.set)
        else:
            self._drain()


def _answer_users() -> None:
    """Have SIGUSR1 write the stacks of all threads to stderr, and SIGUSR2 do nothing; by default
    both end a process. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return
    signal.signal(signal.SIGUSR1, _write_stacks)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _write_stacks(_number: int, _frame: object) -> None:
    # `faulthandler.register` would not wait for the lock of the interpreter, and ends the process
    # if another thread changes its stack meanwhile.
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):  # no stderr
        faulthandler.dump_traceback(all_threads=True)


@contextlib.contextmanager
def log_on_stderr(log_format: str) -> Iterator[None]:
    """Writes logs to stderr: those of `infer`, and warnings of the libraries it stands on.

    Does nothing where the program has set up logging.
    """
    logger = logging.getLogger("infer")
    if logger.handlers:
        yield
        return
    handler = LogWriter()
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter("%(message)s"))
    loggers = [logger, *(logging.getLogger(name) for name in ("uvicorn", "asyncio", "py.warnings"))]
    for each in loggers:
        each.addHandler(handler)
    logging.captureWarnings(True)
    logger.setLevel(logging.INFO)
    access.setLevel(logging.INFO if log_format == "json" else logging.WARNING)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for each in loggers:
            each.removeHandler(handler)
        handler.close()
        access.setLevel(logging.NOTSET)


def _announce(text: str) -> None:
    """Print to stdout, or log where stdout cannot be written."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:  # a name that the locale has no letters for
        print(text.encode("ascii", "backslashreplace").decode(), flush=True)
    except (OSError, ValueError) as error:  # it is full, or closed
        log.info("%s", text)
        log.warning("stdout cannot be written (%s)", error)
        # At its end the interpreter would try to write the rest of the buffer, and fail.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _open_standard_streams() -> None:
    """Open the standard streams that are closed; else a connection would become one of them. From
    now on signals of users may come, which write there."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    _answer_users()


def _check_reach(host: str, sock: socket.socket, settings: ServerSettings) -> None:
    """Raises `ConfigError` where other machines could use a server without keys.

    Logs a warning where keys travel without encryption.
    """
    address = ipaddress.ip_address(sock.getsockname()[0].partition("%")[0])
    if address.is_loopback:
        return
    if not (settings.api_keys or settings.insecure):
        message = f"{host!r} can be reached from other machines: give --api-keys a file of keys"
        raise ConfigError("host", f"{message}, or allow it with --insecure")
    if settings.api_keys and not settings.ssl_certfile:
        log.warning(
            "keys and texts travel to %s in clear text: give --ssl-certfile and --ssl-keyfile, or"
            " listen on 127.0.0.1 or --uds behind a proxy that speaks TLS",
            host,
        )


def _place(
    settings: ServerSettings, host: str, port: int
) -> contextlib.AbstractContextManager[socket.socket]:
    """The socket at which the server will listen."""
    if settings.uds:
        return unix_socket(settings.uds)
    return bind(host, port, settings.write_stall_s, settings.limits)


def serve_config(
    config: EngineConfig | Mapping[str, EngineConfig],
    settings: ServerSettings,
    host: str = DEFAULT_HOST,
    port: int = DEFAULT_PORT,
    *,
    in_thread: bool = False,
    early: EarlyProcess | None = None,
) -> None:
    """Bind the address, start the engine and serve. Raises `LoadError` where one of them fails.

    A mapping of names to configs makes an engine for each; see `ModelRouter`. With `in_thread` the
    engine runs in this process, which ends with it; that is for comparisons. `early`: the process
    of the first engine, where it has been started before.
    """
    _check_combination(
        settings, has_names=not isinstance(config, EngineConfig), in_thread=in_thread
    )
    _open_standard_streams()
    check_certificate(settings)
    _check_stores(settings)
    with (
        log_on_stderr(settings.log_format),
        _place(settings, host, port) as sock,
        standing_by(settings.standby and not in_thread) as standby,
    ):
        if not settings.uds:
            _check_reach(host, sock, settings)
        launch: Callable[[EngineConfig], AsyncLLM]
        loads = Loads()
        if in_thread:
            from infer.engine.build.assemble import build_async_llm as launch  # this imports torch
        else:
            from infer.engine.process.launch import launch as launch_process

            launch = functools.partial(
                launch_process,
                hang_s=settings.hang_s,
                load_timeout_s=settings.load_timeout_s,
                loads=loads,
                standby=standby,
                early=early,
                fleet=_fleet(settings),
            )
        engine: AsyncLLM | ModelRouter
        if isinstance(config, EngineConfig):
            engine = launch(_with_seed(config))
        else:
            engine = _router(config, launch, settings, loads)
        run(engine, sock, settings)


def _router(
    configs: Mapping[str, EngineConfig],
    launch: Callable[[EngineConfig], AsyncLLM],
    settings: ServerSettings,
    loads: Loads,
) -> ModelRouter:
    """Several models, which are loaded from now on or when they are used."""
    launches = {name: functools.partial(launch, _with_seed(each)) for name, each in configs.items()}
    router = ModelRouter(
        launches,
        functools.partial(create_app, settings=settings, is_inner=True),
        idle_unload_s=settings.idle_unload_s,
        end_loads=loads.end,
        limits=settings.limits,
        unknown_model_statuses=unknown_model_statuses(settings),
    )
    if not settings.load_on_first_use:
        router.load_all()
    return router


def _check_combination(settings: ServerSettings, *, has_names: bool, in_thread: bool) -> None:
    for field in ("load_on_first_use", "idle_unload_s"):
        if not has_names and getattr(settings, field):
            raise ConfigError(field, "is for models with names: --model NAME=PATH-OR-HUB-ID")
    if in_thread and settings.replicas > 1:
        raise ConfigError("replicas", "need a process each: leave --engine-thread out")


def _check_stores(settings: ServerSettings) -> None:
    """Raises `ConfigError` if the file of keys, the database of sessions or the packages of tracing
    cannot be used: the server needs them when the engine is there, and a large model takes minutes
    to load."""
    if settings.api_keys is not None:
        Keys(Path(settings.api_keys))
    if settings.sessions not in (None, NO_SESSIONS):
        SessionStore(settings.sessions, limits=settings.limits).close()
    if settings.tracing:
        check_packages()


def _fleet(settings: ServerSettings) -> FleetSettings:
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
    engine: AsyncLLM | ModelRouter, sock: socket.socket, settings: ServerSettings | None = None
) -> None:
    """Serve until SIGINT or SIGTERM, at the address that `bind` or `unix_socket` has bound."""
    sys.setswitchinterval(0.001)  # the seconds that the event loop waits for a parsing thread
    with sock:
        page = Page() if settings is not None and settings.ui else None
        server = Server(engine, sock, settings, announce=_announce, page=page)
        freeze_heap()
        gc.set_threshold(700, 10, _MAX_COLLECTIONS)  # `on_tick` does the full collections
        server.serve_until_stopped()
