"""`EarlyStream`: a stream that begins before its answer does, as its model has yet to be loaded"""

from __future__ import annotations

from starlette.types import Message, Send

from infer.server.http.anthropic_errors import reformed_body
from infer.server.openai.streaming import STREAM_HEADERS


class EarlyStream:
    """While it waits, comments tell clients and proxies that it lives. So its status is 200 already
    when the answer begins; if that is an error, it becomes the last event. It is the `send` of the
    app that answers."""

    def __init__(self, send: Send, request_id: str, *, is_anthropic: bool) -> None:
        self._send = send
        self._id = request_id
        self._is_anthropic = is_anthropic
        self.has_begun = False
        self._status = 200
        """That of the answer, once it has begun."""
        self._error = b""

    async def mention(self, comment: str) -> None:
        """Send a comment, of one line."""
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]}
            await self._send(start)
        await self._put(f": {comment}\n\n".encode())

    async def fail(self, status: int, error: bytes) -> None:
        """End the stream with an error; `error`: its body."""
        if self._is_anthropic:
            _, error = reformed_body(status, error, self._id)
        await self._put(b"event: error\ndata: " + error + b"\n\n", more=False)

    async def __call__(self, message: Message) -> None:
        """Send a message of the answer."""
        if not self.has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body"):
                await self.fail(self._status, self._error)

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
