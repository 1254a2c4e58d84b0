"""Streams of an OpenAI-compatible server as a client hears them: every choice, and every pause."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LOGPROBS = ("tokens", "token_logprobs", "top_logprobs")


@dataclass
class ChoiceHeard:
    """One choice of a stream."""

    text: str = ""
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)
    """Token, log-probability, and those of others at its place."""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """Name and arguments of each call of a tool."""
    finish_reason: str | None = None


@dataclass
class StreamHeard:
    """One stream."""

    status: int = 0
    choices: dict[int, ChoiceHeard] = field(default_factory=lambda: defaultdict(ChoiceHeard))
    error: dict[str, Any] | None = None
    is_done: bool = False
    times_s: list[float] = field(default_factory=list)
    """When each event came, in seconds of the monotonic clock."""
    session: list[dict[str, Any]] | None = None
    """Messages of the session in which it was a turn, after it."""

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must not depend on other requests or on deaths."""
        return (self.status, self.error, self.is_done, dict(self.choices), self.session)

    def pause_s(self, since_s: float = 0.0) -> float:
        """The longest time between two events of which the second came after `since_s`."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((end - start for start, end in pairs if end >= since_s), default=0.0)


async def stream(port: int, body: Mapping[str, Any], heard: StreamHeard) -> StreamHeard:
    """POST a completion, or a chat if the body has messages, and read its stream to the end."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = json.dumps({**body, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    try:
        headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        heard.status = int(headers.split()[1])
        if "transfer-encoding: chunked" not in headers:
            heard.error = {"body": (await reader.read(1000)).decode(errors="replace")}
            return heard
        async for line in _lines(reader):
            if line.startswith(b"data: "):
                heard.times_s.append(time.monotonic())
                _note(heard, line[6:])
    except (OSError, EOFError) as error:
        heard.error = {"connection": repr(error)}
    finally:
        writer.close()
    return heard


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body in chunks."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line


def _note(heard: StreamHeard, data: bytes) -> None:
    if data.strip() == b"[DONE]":
        heard.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        heard.error = event["error"]
        return
    for choice in event["choices"]:
        its = heard.choices[choice["index"]]
        delta = choice.get("delta") or {"content": choice.get("text")}
        its.text += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            function = call["function"]  # its name comes with the first piece of its arguments
            if call["index"] == len(its.calls):
                its.calls.append((function["name"], ""))
            name, arguments = its.calls[call["index"]]
            its.calls[call["index"]] = (name, arguments + function.get("arguments", ""))
        its.finish_reason = choice["finish_reason"] or its.finish_reason
        if choice.get("logprobs"):
            its.logprobs += zip(*(choice["logprobs"][name] for name in LOGPROBS), strict=True)
