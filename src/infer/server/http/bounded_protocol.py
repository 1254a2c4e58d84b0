"""`BoundedProtocol`: uvicorn's HTTP/1.1 with bounds on what a connection may cost.

Who has a place is decided by `Connections`. One whose request line and headers are not complete
`HEADER_TIMEOUT_S` after they have begun (or after the connection was opened) is answered with 408;
what is not HTTP with 400, as are chunks whose framing is longer than what they hold. An answer to
a request whose body has not been read is the connection's last one: what still comes is read for
`LINGER_S` and thrown away unparsed, because a close with something unread is a reset, and the
client might not see the answer. A turn of the event loop parses at most `EVENTS_A_TURN` pieces of
a connection. Bodies have their own deadline in `body`, answers theirs in `failures.Edge`; a
connection that takes nothing for longer than that is cut here, because a close would wait until
what is left has been read. A client that closes its side after a whole request gets its answer.
A request that the server has no room for is refused as soon as its head has been parsed, without a
task and without the app: under overload most requests end so, and each pass through the event loop
costs as long as it takes to write everybody's tokens. Used by `serve`.
"""

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
from infer.server.http.connections import KEY, PROBE_PATHS, Connections, Use
from infer.server.http.error_responses import (
    MAX_HEADER_BYTES,
    HttpError,
    describe,
    headers_too_large,
)

HEADER_TIMEOUT_S = 10.0
READ_BYTES = 8 * 1024
"""at once, so that many bodies neither keep the event loop for long nor fill the memory before they
are counted (asyncio: 256 KiB)"""
_DISCARD_BYTES = 64 * 1024
"""at once, of what is thrown away"""
EVENTS_A_TURN = 64
"""requests and chunks of one connection: 10 µs each, 1,300 of 6 bytes fit into `READ_BYTES`"""
MAX_FRAMING_BYTES = 4096
"""of a chunked body, above the length of what the chunks hold"""
REFUSED_S = 1.0
"""so long a connection that has been refused may take to send the rest and to read why"""
LINGER_S = 5.0
"""the same where it was the answer to a request whose body still comes"""
LINGER_BYTES = 4 * 1024 * 1024
"""of such a body; then nothing more is read"""
LOOK_S = 0.05
"""between two looks whether a client that has closed its side is still there"""
ASK_S = 5.0
"""between two lines that make its system tell"""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_ESTABLISHED, _CLOSE_WAIT = 1, 8  # as Linux has it in `tcp_info`

_uvicorn_log = logging.getLogger("infer.server.uvicorn")
_uvicorn_log.setLevel(logging.ERROR)  # its warnings name no client; `Refusals` does


class BoundedConnection(h11.Connection):
    """h11's parser, which parses so much a turn and measures the framing of chunks."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.is_behind = False
        """there may be more to parse than this turn allows"""
        self._num_events = 0
        self._num_received = 0
        self._num_payload = 0

    def begin_turn(self) -> None:
        """The next `EVENTS_A_TURN` events may be parsed."""
        self.is_behind = False
        self._num_events = 0

    def receive_data(self, data: bytes) -> None:
        """See h11."""
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> Any:
        """See h11; the end of a turn looks like the end of what has come."""
        if self._num_events >= EVENTS_A_TURN:
            self.is_behind = True
            self._check_framing()
            return h11.NEED_DATA
        self._num_events += 1
        event = super().next_event()
        if type(event) is h11.Data:
            self._num_payload += len(event.data)
        elif type(event) is h11.Request:
            self._num_received, self._num_payload = len(self.trailing_data[0]), 0
        elif event is h11.NEED_DATA:
            self._check_framing()
        return event

    def _check_framing(self) -> None:
        if self.their_state is not h11.SEND_BODY:
            return
        parsed = self._num_received - len(self.trailing_data[0])
        if parsed > 2 * self._num_payload + MAX_FRAMING_BYTES:
            raise h11.RemoteProtocolError("the framing of the chunks is longer than the body")


class BoundedProtocol(H11Protocol):
    """See the module's docstring."""

    def __init__(
        self,
        *arguments: Any,
        write_stall_s: float,
        places: Connections,
        turn_away: Callable[[Scope], Response | None] | None = None,
        **named: Any,
    ) -> None:
        """`turn_away`: the refusal of a request of which only the head is known; None where the app
        is to answer it."""
        super().__init__(*arguments, **named)
        self._turn_away = turn_away
        self._refusal: Response | None = None
        self.logger = _uvicorn_log
        self.conn: BoundedConnection = BoundedConnection()
        self._app = self.app
        self.app = self._answer
        self._write_stall_s = write_stall_s
        self._places = places
        self._deadline: asyncio.TimerHandle | None = None
        self._cut: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._num_discarded = 0
        self._goes_on = False
        self._is_half_closed = False

    # ---- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if self._places.add(self):
            self._set_deadline()
            self._read_at_once()
        else:
            self._refuse(OverloadedError("the server has too many connections"), "connections", 0)

    def _read_at_once(self) -> None:
        """Most clients send their request right behind the connection: reading it here saves the
        pass through the event loop in which asyncio would find out."""
        if self.scheme == "https":
            return
        with contextlib.suppress(OSError):  # nothing has come yet, or asyncio will see the error
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
        if self.conn.is_behind and not self._goes_on:
            self._goes_on = True
            self.transport.pause_reading()
            self.loop.call_soon(self._go_on)
        self._note_use()

    def _go_on(self) -> None:
        self._goes_on = False
        if self._is_refused or self.transport.is_closing():
            return
        self.handle_events()
        if not (self._goes_on or self._is_refused or self.flow.read_paused):
            self.transport.resume_reading()

    def _should_upgrade(self) -> bool:
        """An upgrade is an offer, which may be left unanswered. uvicorn asks for it between a
        request's head and its task: here is the place to refuse."""
        self._refusal = None
        if self._turn_away is not None:
            self._refusal = self._turn_away(cast(Scope, self.scope))
        return self._refusal is not None

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Never an upgrade: see `_should_upgrade`."""
        refusal, self._refusal = self._refusal, None
        assert refusal is not None
        self._write_last(refusal.status_code, refusal.raw_headers, bytes(refusal.body))
        self._linger(REFUSED_S)

    def _note_use(self) -> None:
        """What the connection is doing now; the deadline belongs to one of these."""
        if self.conn.their_state is not h11.IDLE:
            use = Use.REQUEST
        elif self.conn.trailing_data[0] or self.cycle is None:
            use = Use.HEAD
        else:
            use = Use.IDLE
        self._places.note(self, use)
        if use is not Use.HEAD:
            self._unset_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._be_late)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _be_late(self) -> None:
        message = f"the headers were not complete after {HEADER_TIMEOUT_S:g} s"
        self._refuse(HttpError(408, message, code="request_timeout"), "header_timeout")

    # ---- answering

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The app, with the answer to a request that nobody reads to its end made the last one."""
        scope[KEY] = self._places
        if not self._places.admit(self):
            if scope["path"] not in PROBE_PATHS:
                error = OverloadedError("the server has too many connections")
                self._refuse(error, "connections")
                return
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
                    self._linger(LINGER_S)
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
                self._expect_less_than(left)
        elif self._has_unread_body():
            self._linger(LINGER_S)
        else:
            self._note_use()
            if self._is_half_closed and self.conn.their_state is h11.IDLE:
                self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Later than `RequestBoundary`, which ends the answer in an orderly way.
        self._cut = self.loop.call_later(self._write_stall_s + 1, self._reset)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._cut is not None:
            self._cut.cancel()

    def _reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        # Without this the kernel would go on trying to deliver what it has.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _expect_less_than(self, left: int) -> None:
        self.loop.call_later(self._write_stall_s, self._look_again, left)

    def _look_again(self, left: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= left:
            self._reset()
        elif now:
            self._expect_less_than(now)

    # ---- refusing

    def send_400_response(self, msg: str) -> None:
        """h11 cannot read what comes (uvicorn would say so in plain text)."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._places.refusals.note("invalid_http", self.client)
            self.transport.close()  # in the middle of an answer, or behind its end
            return
        error = sys.exception()
        if getattr(error, "error_status_hint", 400) == 431:
            self._refuse(headers_too_large(), "headers_too_large")
        elif self.conn.their_state is h11.ERROR:
            message = "this is not valid HTTP/1.1"
            self._refuse(HttpError(400, message, code="invalid_http"), "invalid_http")
        else:
            message = "the chunks of the body are so short that their framing is longer than it"
            message += "; send larger chunks, or Content-Length"
            self._refuse(HttpError(400, message, code="invalid_http"), "chunk_framing")

    def _refuse(self, error: RequestError, reason: str, linger_s: float = REFUSED_S) -> None:
        self._places.refusals.note(reason, self.client)
        response = describe(error)
        self._write_last(response.status_code, response.raw_headers, bytes(response.body))
        self._linger(linger_s)

    def _write_last(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """An answer past h11, which could not say it in each of its states; then nothing more."""
        head = [b"HTTP/1.1 %d " % status + STATUS_PHRASES[status], b"connection: close"]
        headers = (*self.server_state.default_headers, *headers)
        head += [name + b": " + value for name, value in headers if name != b"connection"]
        self.transport.write(b"\r\n".join([*head, b"", body]))

    def _linger(self, seconds: float) -> None:
        """Nothing more is parsed or answered; the connection is closed after so long."""
        self._is_refused = True
        self._unset_deadline()
        self._unset_keepalive_if_required()
        if self.cycle is not None:
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
            self.cycle.body = bytearray()
            self.cycle = None  # type: ignore[assignment]
        self.conn = BoundedConnection()  # what the old one holds is freed
        self._places.note(self, Use.REFUSED)
        if seconds == 0:
            self.transport.close()
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
        """Close for the sake of another connection; who may have sent something is told."""
        if not self._is_refused and (self.cycle is None or self.conn.trailing_data[0]):
            error = OverloadedError("the server has too many connections")
            self._refuse(error, "connections", 0)
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
        """The client sends nothing more; True = the connection stays open to answer it.

        Whoever has closed the whole connection looks the same, but its system resets the
        connection when something arrives there. Before an answer that is a line that each client
        passes over. Where this cannot be seen, and after half a request, the client counts as gone.
        """
        cycle = self.cycle
        if self._is_refused or cycle is None or cycle.response_complete or self.scheme == "https":
            return None
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self._is_gone():
            return None
        if not self._is_half_closed:
            self._is_half_closed = True
            self._look_for_client(0.0)
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

    def _look_for_client(self, asked_s: float) -> None:
        cycle = self.cycle
        if self._is_refused or self.transport.is_closing():
            return
        if self._is_gone():
            self.transport.abort()
            return
        now_s = self.loop.time()
        if cycle.response_started or cycle.response_complete:
            pass  # what is written tells
        elif now_s - asked_s >= ASK_S:
            if cycle.scope["http_version"] == "1.0" and asked_s:  # it does not know such lines
                self.transport.abort()
                return
            if cycle.scope["http_version"] != "1.0":
                self.transport.write(_CONTINUE)
            asked_s = now_s
        self.loop.call_later(LOOK_S, self._look_for_client, asked_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.remove(self)
        self._unset_deadline()
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)
