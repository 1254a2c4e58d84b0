"""`EarlyListener`: answers at the server's address from the start of its process until it serves"""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
import selectors
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus

from infer.errors import ConfigError, EngineDeadError, OverloadedError, RequestError
from infer.server.address import bind, check_certificate, check_reach, listen, place
from infer.server.http.anthropic_errors import is_anthropic, reformed_body
from infer.server.http.connections import (
    PROBE_PATHS,
    ConnectionLimits,
    Connections,
    Use,
    early_limits,
)
from infer.server.http.host_rules import HostRules
from infer.server.http.http_errors import (
    MAX_HEADER_BYTES,
    ErrorAnswer,
    HttpError,
    answer_to,
    headers_too_large,
)
from infer.server.http.request_head import RequestHead, end_of_head, read_head
from infer.server.settings import ServerSettings
from infer.threads import BackgroundThread
from infer.types.server_limits import ServerLimits

log = logging.getLogger("infer.server")

LIVE_PATH = "/health/live"
READ_BYTES = 8 * 1024
"""Bytes per read."""
LINGER_S = 1.0
"""Seconds for which a client without a body may read its answer."""
LINGER_BYTES = 4 * 1024 * 1024
"""Bytes of a body after which nothing more is read."""
TICK_S = 0.05
"""Seconds between two looks at which connections have had their time."""
PAUSE_S = 0.1
"""Seconds without accepting where the process may open no further file."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class EarlyAnswers:
    """What is answered while models are being loaded: pure functions of a request's head."""

    def __init__(self, settings: ServerSettings, models: Sequence[str]) -> None:
        """`models`: their names."""
        has_keys = settings.api_keys is not None
        self._rules = HostRules(has_keys=has_keys, hosts=settings.hosts, origins=settings.origins)
        self._statuses: Mapping[str, str] = dict.fromkeys(models, "loading")
        """What `/v1/models` will say of each model; replaced as a whole, by any thread."""

    def note(self, model: str, status: str) -> None:
        """Say from now on that a model has this status, as in `/v1/models`."""
        self._statuses = {**self._statuses, model: status}

    def to(self, head: RequestHead, address: str) -> tuple[ErrorAnswer, str]:
        """The answer to a request that has arrived at `address`, and why it is refused: `host`,
        `origin`, or empty."""
        refused = self._rules.refusal(address, head.method, head.path, head.headers)
        if refused is not None:
            return answer_to(refused[1]), refused[0]
        is_probe = head.path in PROBE_PATHS and head.method in ("GET", "HEAD")
        if is_probe and head.path == LIVE_PATH:
            return ErrorAnswer(200, {}, b'{"status":"ok"}'), ""
        statuses = self._statuses
        loading = [name for name, status in statuses.items() if status == "loading"]
        what = f": it loads {', '.join(loading)}" if loading else ""
        error = EngineDeadError(f"the server is starting{what}")
        more = {"status": "loading", "models": dict(statuses)} if is_probe else None
        return answer_to(error, more=more), ""


def as_bytes(answer: ErrorAnswer, head: RequestHead | None) -> bytes:
    """An answer as HTTP/1.1, the last of its connection. `head`: that of the request, if it could
    be read."""
    request_id = (head and head.client_id) or secrets.token_hex(16)
    status, body = answer.status, answer.body
    if head is not None and status >= 400 and is_anthropic(head.path, head.headers):
        status, body = reformed_body(status, body, request_id)
    headers = {
        "date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
        "x-request-id": request_id,
        "request-id": request_id,
        "x-content-type-options": "nosniff",
        "connection": "close",
    }
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    sent = b"" if head is not None and head.method == "HEAD" else body
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + sent


class EarlyConnection:
    """A connection that gets one answer."""

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext | None,
        answers: EarlyAnswers,
        places: Connections,
        limits: ServerLimits,
        on_close: Callable[[EarlyConnection], None],
    ) -> None:
        """`context`: for TLS. `on_close`: called before its descriptor is given back."""
        self.sock = sock
        self.fileno = sock.fileno()
        self._on_close = on_close
        self._context = context
        self._answers, self._places, self._limits = answers, places, limits
        self.use = Use.HEAD if context is None else Use.HANDSHAKE
        self.is_silent = True
        """Whether nothing has come, so that the server can have it as if it were new."""
        self.ends_s = time.monotonic() + limits.header_timeout_s
        """When its present state ends at the latest, on the monotonic clock."""
        self._received = bytearray()
        self._unsent = b""
        self._has_body = False
        self._num_discarded = 0
        self._client: tuple[str, int] | None = None
        if sock.family != getattr(socket, "AF_UNIX", None):
            self._client = sock.getpeername()[:2]

    def advance(self) -> int:
        """Go on as far as possible; returns the events that it waits for, 0 where it is closed."""
        self.is_silent = False
        try:
            if self.use is Use.HANDSHAKE:
                self._shake_hands()
            if self.use is Use.HEAD:
                self._read()
            self._write()
            self._discard()
        except ssl.SSLWantWriteError:
            return selectors.EVENT_WRITE
        except (BlockingIOError, ssl.SSLWantReadError):
            return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ
        except OSError as error:
            if isinstance(error, ssl.SSLError) and self.use is Use.HANDSHAKE:
                self._places.refusals.note("tls_handshake", self._client)
            self.close()
            return 0
        return selectors.EVENT_READ

    def _shake_hands(self) -> None:
        assert self._context is not None
        if not isinstance(self.sock, ssl.SSLSocket):
            self.sock = self._context.wrap_socket(
                self.sock, server_side=True, do_handshake_on_connect=False
            )
        self.sock.do_handshake()
        self._enter(Use.HEAD, self._limits.header_timeout_s)

    def _read(self) -> None:
        received = self._received
        try:
            while self.use is Use.HEAD:
                num_seen = len(received)
                if not (data := self.sock.recv(READ_BYTES)):
                    raise ConnectionResetError
                received += data
                end = end_of_head(received, num_seen)
                if (len(received) if end is None else end) > MAX_HEADER_BYTES:
                    raise headers_too_large()
                if end is not None:
                    self._answer(read_head(bytes(received[:end])))
        except HttpError as error:
            reason = "headers_too_large" if error.status == 431 else "invalid_http"
            self._refuse(error, reason, LINGER_S)

    def _answer(self, head: RequestHead) -> None:
        address = self.sock.getsockname()
        answer, reason = self._answers.to(head, address[0] if self._client else "")
        if reason:
            self._places.refusals.note(reason, self._client)
        self._unsent = as_bytes(answer, head)
        self._has_body = head.has_body
        self._enter(Use.REFUSED, self._limits.linger_s if head.has_body else LINGER_S)

    def _refuse(self, error: RequestError, reason: str, linger_s: float) -> None:
        self._places.refusals.note(reason, self._client)
        self._unsent = as_bytes(answer_to(error), None)
        self._enter(Use.REFUSED, linger_s)

    def _enter(self, use: Use, timeout_s: float) -> None:
        self.use = use
        self.ends_s = time.monotonic() + timeout_s
        self._places.note(self, use)

    def _write(self) -> None:
        if not self._unsent:
            return
        self._unsent = self._unsent[self.sock.send(self._unsent) :]
        if self._unsent:
            raise BlockingIOError
        if not isinstance(self.sock, ssl.SSLSocket):
            self.sock.shutdown(socket.SHUT_WR)
        elif not self._has_body:  # TLS would take the rest of it for an error
            with contextlib.suppress(ssl.SSLError):  # the client need not agree to the end
                self.sock.unwrap()

    def _discard(self) -> None:
        """Read what comes after the answer: closing a socket with unread data resets the
        connection, and the client might not see the answer."""
        data = self.sock.recv(READ_BYTES)
        self._num_discarded += len(data)
        if not data or self._num_discarded > LINGER_BYTES:
            raise ConnectionResetError

    def expire(self) -> int:
        """End the present state, whose time is over; returns as `advance` does."""
        if self.use is Use.HEAD:
            message = f"the headers were not complete after {self._limits.header_timeout_s:g} s"
            error = HttpError(408, message, code="request_timeout")
            self._refuse(error, "header_timeout", LINGER_S)
            return self.advance()
        if self.use is Use.HANDSHAKE:
            self._places.refusals.note("handshake_timeout", self._client)
        self.close()
        return 0

    def turn_away(self) -> None:
        """Close it, because there is no place for it; a client without TLS is told so."""
        self._places.refusals.note("connections", self._client)
        self.give_way()

    def give_way(self) -> None:
        """See `Connection`."""
        if self.use is Use.HEAD:
            error = OverloadedError("the server has too many connections")
            with contextlib.suppress(OSError):
                self.sock.send(as_bytes(answer_to(error), None))
        self.close()

    def close(self) -> None:
        """Close it and give its place back."""
        self._on_close(self)
        self._places.remove(self)
        self.sock.close()


class EarlyListener:
    """Importing the server takes a second and loading a model up to minutes. Meanwhile a thread
    listens: `/health/live` is 200, `/health/ready` and `/health` are 503 and name what is being
    loaded, and everything else is a 503 that may be asked again. Each answer is the last of its
    connection. Then the socket is handed over, with the connections that have sent nothing yet;
    those that have are answered here. What waits to be accepted stays in the system's queue, so
    nobody is refused.

    A client cannot cost more than one of the server can: the same `Connections` give places, heads
    have the same size and the same time, refusals the same log lines, hosts the same rules. The
    standard library only, besides our own small modules, because this comes before all other
    imports.
    """

    def __init__(
        self,
        sock: socket.socket,
        settings: ServerSettings,
        models: Sequence[str],
        context: ssl.SSLContext | None = None,
        answers: EarlyAnswers | None = None,
        metrics: EarlyListener | None = None,
    ) -> None:
        """`sock` listens, and belongs to the caller; `models`: names of what is being loaded;
        `context`: for TLS. `answers`: default: those of these settings and models. `metrics`: that
        of the port for health and metrics, if there is one."""
        self.sock = sock
        """Where the server will listen."""
        self.metrics = metrics
        self.answers = answers or EarlyAnswers(settings, models)
        self._context = context
        self._limits = limits = settings.limits
        most = ConnectionLimits(settings.max_connections, limits.probe_connections)
        self._places = Connections(early_limits(most))
        self._connections: set[EarlyConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake_end = socket.socketpair()
        self._wake_end.setblocking(False)
        self._is_handing = self._is_handed = self._is_stopping = False
        self._silent: list[socket.socket] = []
        """Connections that go to the server."""
        self._has_handed = threading.Event()
        self._accepts_from_s = 0.0
        """When accepting goes on after a pause; 0: there is none."""
        self._looks_s = 0.0
        """When `ends_s` of all connections is looked at."""
        self._thread = BackgroundThread(self._run, self._end, "infer-early")

    def start(self) -> None:
        """Answer; may be called once."""
        sys.setswitchinterval(0.001)  # the seconds that an answer waits for a thread that imports
        self.sock.setblocking(False)
        self._selector.register(self.sock, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread.start()

    def hand_over(self) -> list[socket.socket]:
        """Accept nothing more, and return the connections that have sent nothing. The others are
        answered, as long as this object has not been stopped."""
        self._is_handing = True
        self._wake()
        self._has_handed.wait()
        silent, self._silent = self._silent, []
        return silent

    def stop(self) -> None:
        """End the thread and what it still answers."""
        self._thread.stop()

    def _end(self) -> None:
        self._is_stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or has ended
            self._wake_end.send(b"w")

    def _run(self) -> None:
        try:
            while not self._is_stopping and not (self._is_handed and not self._connections):
                self._turn()
        except Exception:
            log.exception("nobody answers until the server listens")
        finally:
            self._has_handed.set()
            for connection in list(self._connections):
                connection.close()
            self._selector.close()
            self._woken.close()
            self._wake_end.close()

    def _turn(self) -> None:
        is_waiting = self._connections or self._accepts_from_s
        ready = self._selector.select(TICK_S if is_waiting else None)
        for key, _ in ready:
            if key.fileobj is self.sock:
                self._accept()
            elif key.fileobj is self._woken:
                self._woken.recv(64)
            elif key.data in self._connections:  # no other has taken its place
                self._go_on(key.data, key.data.advance())
        now_s = time.monotonic()
        if now_s >= self._looks_s:
            self._looks_s = now_s + TICK_S
            for connection in [held for held in self._connections if held.ends_s <= now_s]:
                self._go_on(connection, connection.expire())
        if self._is_handing and not self._is_handed:
            self._hand()
        elif self._accepts_from_s and now_s >= self._accepts_from_s:
            self._accepts_from_s = 0.0
            self._selector.register(self.sock, selectors.EVENT_READ)

    def _accept(self) -> None:
        for _ in range(self._places.limits.accepted_at_once):
            try:
                sock, _ = self.sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._selector.unregister(self.sock)
                    self._accepts_from_s = time.monotonic() + PAUSE_S
                    return
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            connection = EarlyConnection(
                sock, self._context, self.answers, self._places, self._limits, self._forget
            )
        except OSError:  # it has gone
            sock.close()
            return
        if not self._places.add(connection, connection.use):
            connection.turn_away()
            return
        self._connections.add(connection)
        self._selector.register(connection.fileno, selectors.EVENT_READ, connection)

    def _go_on(self, connection: EarlyConnection, events: int) -> None:
        """Wait for the events of a connection, unless it is closed."""
        if events and self._selector.get_key(connection.fileno).events != events:
            self._selector.modify(connection.fileno, events, connection)

    def _forget(self, connection: EarlyConnection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.fileno)

    def _hand(self) -> None:
        if not self._accepts_from_s:
            self._selector.unregister(self.sock)
        self._accepts_from_s = 0.0
        for connection in [held for held in self._connections if held.is_silent]:
            self._forget(connection)
            self._places.remove(connection)
            self._silent.append(connection.sock)
        self._is_handed = True
        self._has_handed.set()


@contextlib.contextmanager
def listening(
    settings: ServerSettings, host: str, port: int, models: Sequence[str]
) -> Iterator[EarlyListener]:
    """Bind the address that the settings, `host` and `port` name, and answer there; `models`: names
    of what is being loaded. Raises `ConfigError` where it cannot be used."""
    context = check_certificate(settings)
    with place(settings, host, port) as sock:
        if not settings.uds:
            check_reach(host, sock, settings)
        listen(sock)
        answers, metrics = EarlyAnswers(settings, models), None
        with contextlib.ExitStack() as held:
            if settings.metrics_port is not None:
                metrics = held.enter_context(_listening_for_probes(settings, host, answers))
            listener = EarlyListener(sock, settings, models, context, answers, metrics)
            listener.start()
            try:
                yield listener
            finally:
                listener.stop()


@contextlib.contextmanager
def _listening_for_probes(
    settings: ServerSettings, host: str, answers: EarlyAnswers
) -> Iterator[EarlyListener]:
    """Answer at the port for health and metrics."""
    assert settings.metrics_port is not None
    try:
        place_of_probes = bind(host, settings.metrics_port, settings.write_stall_s, settings.limits)
    except ConfigError as error:
        if error.field != "port":
            raise
        problem = str(error).removeprefix("port: ").replace("--port", "--metrics-port")
        raise ConfigError("metrics_port", problem) from None
    with place_of_probes as sock:
        listen(sock)
        listener = EarlyListener(sock, settings, (), answers=answers)
        listener.start()
        try:
            yield listener
        finally:
            listener.stop()
