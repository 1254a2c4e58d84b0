"""`BoundedProtocol`: uvicorn's HTTP/1.1 with a cap on connections and deadlines on both ways.

A connection above `MAX_CONNECTIONS` is answered at once with 503; one whose request line and
headers are not complete `HEADER_TIMEOUT_S` after they have begun (or after the connection was
opened) with 408; what is not HTTP with 400. All are closed, so neither many nor slow clients take
the place of others. Bodies
have their own deadline in `body` (and whoever has its answer and goes on sending is closed here),
answers theirs in `failures.Edge`; a connection that takes nothing for longer than that is cut here,
because a close would wait until what is left has been read. Used by `serve`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.errors import OverloadedError, RequestError
from infer.server.failures import HttpError, describe, headers_too_large

MAX_CONNECTIONS = 1024
HEADER_TIMEOUT_S = 10.0
READ_BYTES = 32 * 1024
"""at once, so that fifty long bodies do not keep the event loop for long (asyncio: 256 KiB)"""
REFUSED_S = 1.0
"""so long a connection that has been refused may take to send the rest and to read why"""


class BoundedProtocol(H11Protocol):
    """See the module's docstring."""

    _deadline: asyncio.TimerHandle | None = None
    _cut: asyncio.TimerHandle | None = None
    _is_refused = False

    def __init__(self, *arguments: Any, write_stall_s: float, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._write_stall_s = write_stall_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(OverloadedError("the server has too many connections"))
        else:
            self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self._is_refused or self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._unset_deadline()
        elif self._deadline is None:
            self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        # Later than `Edge`, which ends the answer in an orderly way.
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

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing() and (left := self.transport.get_write_buffer_size()):
            self._expect_less_than(left)
        if self._is_sending_in_vain():
            self.loop.call_later(HEADER_TIMEOUT_S, self._close_if_in_vain)

    def _expect_less_than(self, left: int) -> None:
        self.loop.call_later(self._write_stall_s, self._look_again, left)

    def _look_again(self, left: int) -> None:
        now = self.transport.get_write_buffer_size()
        if now >= left:
            self._reset()
        elif now:
            self._expect_less_than(now)

    def _is_sending_in_vain(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _close_if_in_vain(self) -> None:
        if self._is_sending_in_vain():
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unset_deadline()
        if self._cut is not None:
            self._cut.cancel()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self._be_late)

    def _unset_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _be_late(self) -> None:
        message = f"the headers were not complete after {HEADER_TIMEOUT_S:g} s"
        self._refuse(HttpError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """h11 cannot read what comes (uvicorn would say so in plain text)."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # in the middle of an answer, or behind its end
            return
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if getattr(sys.exception(), "error_status_hint", 400) == 431:
            self._refuse(headers_too_large())
        else:
            self._refuse(HttpError(400, "this is not valid HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: RequestError) -> None:
        response = describe(error)
        status = HTTPStatus(response.status_code)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode(), b"connection: close"]
        head += [name + b": " + value for name, value in response.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(response.body)]))
        self._is_refused = True
        if len(self.connections) > 2 * MAX_CONNECTIONS:
            self.transport.close()
        else:  # a close with something unread is a reset, and the client might not see the answer
            if self.transport.can_write_eof():  # TLS cannot
                self.transport.write_eof()
            self.loop.call_later(REFUSED_S, self.transport.close)
