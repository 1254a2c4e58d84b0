"""`BoundedProtocol`: uvicorn's HTTP/1.1 with bounds on what a connection may cost"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import h11
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from infer.errors import OverloadedError, RequestError
from infer.server.http.connections import KEY, PROBE_PATHS, Connection, Connections, Use
from infer.server.http.error_responses import (
    MAX_HEADER_BYTES,
    HttpError,
    describe,
    headers_too_large,
)
from infer.server.http.paths import canonical_path
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

READ_BYTES = 8 * 1024
"""Bytes per read: few, so that many bodies neither block the event loop for long nor fill the
memory before they are counted (asyncio reads 256 KiB)."""
_DISCARD_BYTES = 64 * 1024
"""Bytes per read of data that is discarded."""
EVENTS_A_TURN = 64
"""Requests and chunks of one connection that one iteration of the event loop parses; each takes
10 µs, and 1,300 of 6 bytes fit into `READ_BYTES`."""
MAX_FRAMING_BYTES = 4096
"""Bytes by which a chunked body's framing may exceed twice its content's length."""
MAX_EMPTY_LINES = 8
"""Empty lines before a request line that are skipped; clients of old send one after a body."""
REFUSED_S = 1.0
"""Seconds for which a refused connection may send the rest of its request and read the answer."""
LINGER_BYTES = 4 * 1024 * 1024
"""Bytes of such a body after which nothing more is read."""
POLL_CLIENT_S = 0.05
"""Interval in seconds at which a half-closed connection is checked for a client that is gone."""
PROBE_CLIENT_S = 5.0
"""Interval in seconds at which data is sent to it, so that a client that is gone resets it."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ESTABLISHED, _CLOSE_WAIT = 1, 8  # states in Linux's `tcp_info`

_uvicorn_log = logging.getLogger("infer.server.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)  # its warnings name no client; those of `Refusals` do


class BoundedConnection(h11.Connection):
    """h11's parser with a limit on events per turn and on the framing of chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.is_behind = False
        """Whether the limit of this turn was reached, so that data may be left to parse."""
        self._num_events = 0
        self._num_received = 0
        self._num_payload = 0
        self._num_empty_lines = 0

    def begin_turn(self) -> None:
        """Allow another `EVENTS_A_TURN` events."""
        self.is_behind = False
        self._num_events = 0

    def receive_data(self, data: bytes) -> None:
        """See h11."""
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """See h11; at the end of a turn it returns NEED_DATA, as if no data were left. Empty lines
        before a request are skipped, as HTTP/1.1 recommends; h11 would refuse them."""
        if self.their_state is h11.IDLE and self._skip_empty_lines() == b"\r":
            return h11.NEED_DATA  # a line may end here
        if self._num_events >= EVENTS_A_TURN:
            self.is_behind = True
            self._check_framing()
            return h11.NEED_DATA
        self._num_events += 1
        event = super().next_event()
        if type(event) is h11.Data:
            self._num_payload += len(event.data)
        elif type(event) is h11.Request:
            self._num_empty_lines = 0
            self._num_received, self._num_payload = len(self.trailing_data[0]), 0
        elif event is h11.NEED_DATA:
            self._check_framing()
        return event

    def _skip_empty_lines(self) -> bytes:
        """Drop the empty lines with which the data begins; returns the two bytes after them."""
        while True:
            start = self.trailing_data[0][:2]
            num_bytes = 2 if start == b"\r\n" else 1 if start[:1] == b"\n" else 0
            if not num_bytes or self._num_empty_lines == MAX_EMPTY_LINES:
                return start
            self._receive_buffer.maybe_extract_at_most(num_bytes)
            self._num_empty_lines += 1

    def _check_framing(self) -> None:
        if self.their_state is not h11.SEND_BODY:
            return
        parsed = self._num_received - len(self.trailing_data[0])
        if parsed > 2 * self._num_payload + MAX_FRAMING_BYTES:
            raise h11.RemoteProtocolError("the framing of the chunks is longer than the body")


class BoundedProtocol(H11Protocol):
    """`Connections` decides which connection has a place. A connection is answered with 408 if its
    request line and headers are not complete `header_timeout_s` after they began (or after it was
    opened), and with 400 for anything that is not HTTP and for chunks whose framing is longer than
    their content.

    An answer to a request whose body has not been read is the connection's last. The rest of the
    body is read for `linger_s` and discarded unparsed, because closing a socket with unread data
    resets the connection, and the client might not see the answer.

    One iteration of the event loop parses at most `EVENTS_A_TURN` pieces of a connection. Bodies
    have a deadline in `Offload`, answers one in `RequestBoundary`. A connection whose client reads
    nothing for longer than that is reset here, because a close would wait until the rest is read. A
    client that closes its sending side after a whole request gets its answer.

    A request for which the server has no room is refused when its headers have been parsed, without
    a task and without the app. Under overload most requests end so, and each iteration of the event
    loop takes as long as writing all streams' tokens. Used by `serve`.
    """

    def __init__(
        self,
        *arguments: Any,
        write_stall_s: float,
        places: Connections,
        turn_away: Callable[[Scope], Response | None] | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        overload_status: int = OverloadedError.status,
        handshake: Connection | None = None,
        **named: Any,
    ) -> None:
        """`write_stall_s`: seconds after which a client that reads nothing is cut off. `turn_away`:
        the refusal of a request by its headers; None if the app is to answer it.
        `overload_status`: see `describe`. `handshake`: what has this connection's place until it is
        made, during a TLS handshake."""
        super().__init__(*arguments, **named)
        self._turn_away = turn_away
        self._overload_status = overload_status
        self._refusal: Response | None = None
        self.logger = _uvicorn_log
        self.conn: BoundedConnection = BoundedConnection()
        self._app = self.app
        self.app = self._answer
        self._write_stall_s = write_stall_s
        self._limits = limits
        self._places = places
        self._handshake = handshake
        self._deadline: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._num_discarded = 0
        self._will_continue = False
        self._is_half_closed = False

    # ---- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if self._handshake is not None:
            self._places.hand_over(self._handshake, self)
            self._handshake = None
            self._set_deadline()
        elif self._places.add(self):
            self._set_deadline()
            self._read_at_once()
        else:
            self._refuse(OverloadedError("the server has too many connections"), "connections", 0)

    def _read_at_once(self) -> None:
        """Read the first bytes now: most clients send a request as soon as they are connected, and
        waiting for asyncio to see it costs an iteration of the event loop."""
        if self.scheme == "https":
            return
        with contextlib.suppress(OSError):  # no data yet, or an error that asyncio will see
            sock = self.transport.get_extra_info("socket")
            if data := os.read(sock.fileno(), READ_BYTES):
                self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            self._discard(data)
        elif not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        self.conn.begin_turn()
        super().handle_events()
        if self._is_refused or self.transport.is_closing():
            return
        if self.conn.is_behind and not self._will_continue:
            self._will_continue = True
            self.transport.pause_reading()
            self.loop.call_soon(self._continue_parsing)
        self._note_use()

    def _continue_parsing(self) -> None:
        self._will_continue = False
        if self._is_refused or self.transport.is_closing():
            return
        self.handle_events()
        if not (self._will_continue or self._is_refused or self.flow.read_paused):
            self.transport.resume_reading()

    def _should_upgrade(self) -> bool:
        """Ask `turn_away` for a refusal. uvicorn calls this between parsing the headers and making
        the task; a real upgrade need not be answered and is ignored."""
        self._refusal = None
        if self._turn_away is not None:
            self._refusal = self._turn_away(cast(Scope, self.scope))
        return self._refusal is not None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Send the refusal of `_should_upgrade`; this is never an upgrade."""
        refusal, self._refusal = self._refusal, None
        assert refusal is not None
        self._write_last(refusal.status_code, refusal.raw_headers, bytes(refusal.body))
        self._linger(REFUSED_S)

    def _note_use(self) -> None:
        """Report the connection's state to `Connections`; the deadline runs in state HEAD."""
        if self.conn.their_state is not h11.IDLE:
            use = Use.REQUEST
        elif self.conn.trailing_data[0] or self.cycle is None:
            use = Use.HEAD
        else:
            use = Use.IDLE
        self._places.note(self, use)
        if use is Use.IDLE and self.timeout_keep_alive_task is None:  # empty lines have ended it
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        if use is not Use.HEAD:
            self._unset_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._limits.header_timeout_s, self._refuse_late_head)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse_late_head(self) -> None:
        message = f"the headers were not complete after {self._limits.header_timeout_s:g} s"
        self._refuse(HttpError(408, message, code="request_timeout"), "header_timeout")

    # ---- answering

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app; if it answers before the body has been read, make that the last answer."""
        scope[KEY] = self._places
        if not self._places.admit(self):
            if canonical_path(scope["path"]) not in PROBE_PATHS:
                error = OverloadedError("the server has too many connections")
                self._refuse(error, "connections")
                return
            scope["headers"].append(CLOSE_HEADER)
        elif self._places.is_leaving:
            scope["headers"].append(CLOSE_HEADER)
        beginning: Message | None = None

        async def send_or_end(message: Message) -> None:
            nonlocal beginning
            if message["type"] == "http.response.start" and self._has_unread_body():
                beginning = message
                return
            if beginning is not None:
                started, beginning = beginning, None
                if not message.get("more_body", False):
                    body = b"" if scope["method"] == "HEAD" else message.get("body", b"")
                    self._write_last(started["status"], started["headers"], body)
                    self._linger(self._limits.linger_s)
                    return
                await send(started)
            await send(message)

        await self._app(scope, receive, send_or_end)

    def _has_unread_body(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and not self._is_refused

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_refused:
            return
        if self.transport.is_closing():
            if left := self.transport.get_write_buffer_size():
                self._schedule_progress_check(left)
        elif self._has_unread_body():
            self._linger(self._limits.linger_s)
        else:
            self._note_use()
            if self._is_half_closed and self.conn.their_state is h11.IDLE:
                self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Later than `RequestBoundary`, which ends the request first.
        self._stall_timer = self.loop.call_later(self._write_stall_s + 1, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()

    def _reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        # Without this the kernel would keep trying to deliver the data it has.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _schedule_progress_check(self, left: int) -> None:
        self.loop.call_later(self._write_stall_s, self._check_progress, left)

    def _check_progress(self, left: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= left:
            self._reset()
        elif now:
            self._schedule_progress_check(now)

    # ---- refusing

    def send_400_response(self, msg: str) -> None:
        """Answer data that h11 cannot parse with our JSON error; uvicorn's is plain text."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._places.refusals.note("invalid_http", self.client)
            self.transport.close()  # during an answer or after it
            return
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(headers_too_large(), "headers_too_large")
        elif self.conn.their_state is h11.ERROR:
            message = "this is not valid HTTP/1.1"
            self._refuse(HttpError(400, message, code="invalid_http"), "invalid_http")
        else:
            message = "the chunks of the body are so short that their framing is longer than the"
            message += " body; send larger chunks, or Content-Length"
            self._refuse(HttpError(400, message, code="invalid_http"), "chunk_framing")

    def _refuse(self, error: RequestError, reason: str, linger_s: float = REFUSED_S) -> None:
        self._places.refusals.note(reason, self.client)
        response = describe(error, self._overload_status)
        self._write_last(response.status_code, response.raw_headers, bytes(response.body))
        self._linger(linger_s)

    def _write_last(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Write the connection's last answer without h11, which could not in each of its states."""
        head = [b"HTTP/1.1 %d " % status + STATUS_PHRASES[status], b"connection: close"]
        headers = (*self.server_state.default_headers, *headers)
        head += [name + b": " + value for name, value in headers if name != b"connection"]
        self.transport.write(b"\r\n".join([*head, b"", body]))

    def _linger(self, seconds: float) -> None:
        """Parse and answer nothing more, and close the connection after `seconds`."""
        self._is_refused = True
        self._unset_deadline()
        self._unset_keepalive_if_required()
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
            self.cycle.body = bytearray()
            self.cycle = None  # type: ignore[assignment]
        self.conn = BoundedConnection()  # frees the old one's buffers
        self._places.note(self, Use.REFUSED)
        if seconds == 0:
            self._close_at_once()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.max_size = _DISCARD_BYTES  # type: ignore[attr-defined]
        self.transport.resume_reading()
        self._deadline = self.loop.call_later(seconds, self.transport.close)

    def _discard(self, data: bytes) -> None:
        self._num_discarded += len(data)
        if self._num_discarded > LINGER_BYTES:
            self.transport.pause_reading()

    def give_way(self) -> None:
        """Close for another connection; a client that may have sent something gets a 503."""
        if not self._is_refused and (self.cycle is None or self.conn.trailing_data[0]):
            error = OverloadedError("the server has too many connections")
            self._refuse(error, "connections", 0)
        else:
            self._close_at_once()

    def _close_at_once(self) -> None:
        """Give the file descriptor back. TLS would wait for the client to agree to the end."""
        if self.scheme == "https":
            self.transport.abort()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """See uvicorn."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    # ---- the end

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data; True keeps the connection open to answer it.

        A client that has closed the whole connection looks the same, but its system resets the
        connection when data arrives there. Before an answer begins, that data is a `100 Continue`,
        which every client ignores. If the state cannot be read, or the request is incomplete, the
        client counts as gone.
        """
        cycle = self.cycle
        if self._is_refused or cycle is None or cycle.response_complete or self.scheme == "https":
            return None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self._is_gone():
            return None
        if not self._is_half_closed:
            self._is_half_closed = True
            self._poll_client(0.0)
        return True

    def _is_gone(self) -> bool:
        if sys.platform != "linux":
            return True
        try:
            sock = self.transport.get_extra_info("socket")
            state = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        except OSError:
            return True
        return state not in (_ESTABLISHED, _CLOSE_WAIT)

    def _poll_client(self, asked_s: float) -> None:
        cycle = self.cycle
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_gone():
            self.transport.abort()
            return
        now_s = self.loop.time()
        if cycle.response_started or cycle.response_complete:
            pass  # the answer itself causes the reset
        elif now_s - asked_s >= PROBE_CLIENT_S:
            if cycle.scope["http_version"] == "1.0" and asked_s:  # 1.0 has no 100 Continue
                self.transport.abort()
                return
            if cycle.scope["http_version"] != "1.0":
                self.transport.write(_CONTINUE)
            asked_s = now_s
        self.loop.call_later(POLL_CLIENT_S, self._poll_client, asked_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.remove(self)
        self._unset_deadline()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().connection_lost(exc)
        # Bound methods of their own would keep this object and asyncio's transport until a full
        # collection, which does not come while the server is busy: under overload that is 0.4 MB
        # a second.
        self.app = self._app
        if hasattr(self.transport, "_read_ready_cb"):
            self.transport._read_ready_cb = None
