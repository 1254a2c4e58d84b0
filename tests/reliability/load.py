"""A server in a process of its own, and streams that measure: what the reliability tests share.

`Served` starts a command that prints the server's line, finds the engine's process below it, and
ends both. `follow` reads one streamed completion off a socket and notes every token, the longest
silence, and how it ended. `Findings` gathers what each test saw; `report.py` prints it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "tests", "tests/engine")),
}


class Served:
    """A running server: its URL's port, its process, and the engine's process below it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def engine_pid(self) -> int | None:
        """The engine process that is there now."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        for children in tasks.glob("*/children"):
            for pid in children.read_text().split():
                if "infer.engine.child" in _text(Path(f"/proc/{pid}/cmdline")):
                    return int(pid)
        return None

    def is_ready(self) -> bool:
        """What /health/ready says."""
        return self.get("/health/ready")[0] == 200

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def num_fds(self) -> int:
        """Open files of the API process."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@contextmanager
def served(arguments: list[str], log: Path) -> Iterator[Served]:
    """Run `python ARGUMENTS`; afterwards the server has ended with 0 and left no engine behind."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        with process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.findall(r":(\d+) ", line)
                assert found, f"{line!r} {log.read_text()}"
                server = Served(process, int(found[0]))
                yield server
                engine = server.engine_pid()
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text()
                assert engine is None or not _text(Path(f"/proc/{engine}/cmdline")), "an orphan"
            finally:
                process.kill()


@dataclass
class Heard:
    """One stream as its client saw it."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    is_done: bool = False
    first_s: float = 0.0
    """from the status line to the first event: the queue, and the prompt"""
    silence_s: float = 0.0
    """the longest time between two events"""
    headers: str = ""

    @property
    def answer(self) -> tuple[Any, ...]:
        """What must not depend on anything that happened."""
        return (self.text, self.tokens, self.logprobs, self.finish_reason, self.is_done)


async def follow(port: int, body: Mapping[str, Any], heard: Heard | None = None) -> Heard:
    """POST a completion and read it to its end."""
    heard = heard or Heard()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    writer.write(f"{head}content-type: application/json\r\nconnection: close\r\n\r\n".encode())
    writer.write(data)
    try:
        heard.headers = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.status = int(heard.headers.split()[1])
        last_s = time.monotonic()
        async for line in reader:
            now_s = time.monotonic()
            if line.startswith(b'{"error"'):
                heard.error = json.loads(line)["error"]
            if not line.startswith(b"data: "):
                continue
            if heard.first_s:
                heard.silence_s = max(heard.silence_s, now_s - last_s)
            else:
                heard.first_s = now_s - last_s
            last_s = now_s
            _note(heard, line.removeprefix(b"data: ").strip())
    finally:
        writer.close()
    return heard


def _note(heard: Heard, data: bytes) -> None:
    if data == b"[DONE]":
        heard.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        heard.error = event["error"]
        return
    (choice,) = event["choices"]
    heard.text += choice["text"]
    heard.finish_reason = choice["finish_reason"]
    if choice.get("logprobs"):
        heard.tokens += choice["logprobs"]["tokens"]
        heard.logprobs += choice["logprobs"]["token_logprobs"]


class Findings:
    """What the tests counted, for `report.py`: a line of JSON for each, if a file is asked for."""

    def note(self, number: int, name: str, load: str, **counted: Any) -> None:
        """One test has seen this (and passed, if nothing follows)."""
        path = os.environ.get("INFER_RELIABILITY_FINDINGS")
        if path:
            row = {"number": number, "name": name, "load": load, "counted": counted}
            with Path(path).open("a") as file:
                file.write(json.dumps(row) + "\n")
