"""A server in a process of its own, and clients that measure, for the tests of reliability.

`served` runs a server and ends it; `Served` finds the engine's process below it. `follow` reads one
streamed completion from a socket and records every token, the longest pause, and the end.
`Findings` collects what each test has counted, for `scorecard.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.raw_http import connect

WORDS = ["Once", "upon", "a", "time", "there", "was", "one", "little", "fox", "and", "an", "owl"]
PAUSE_S = 0.05
"""Seconds between two events of a stream that are noted with their time."""
ROOT = Path(__file__).parents[2]
ENV = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(
        map(str, (ROOT / "src", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])))
    ),
}


OBSERVED = str(Path(__file__).with_name("observed_server.py"))


def hash_server(**settings: Any) -> list[str]:
    """Arguments that start an observed server with a hash model."""
    return [OBSERVED, "hash", json.dumps({"max_seq_len": 1024, "num_pages": 4000, **settings})]


def model_server(*options: str) -> list[str]:
    """Arguments that start an observed server with the shipped model."""
    port = [] if "--uds" in options else ["--port", "0"]
    return [OBSERVED, *port, "--max-seq-len", "512", *options]


def bodies(count: int, longest: int) -> list[dict[str, Any]]:
    """Bodies of completions: greedy and sampled, with penalties, biases, stop strings, minimum
    lengths and log-probabilities."""
    dice = random.Random(1)
    result = []
    for i in range(count):
        body: dict[str, Any] = {
            "prompt": " ".join(dice.choices(WORDS, k=dice.randint(2, 60))),
            "max_tokens": dice.randint(longest // 4, longest),
            "stream": True,
            "seed": i,
            "temperature": dice.choice([0, 0.8]),
            "ignore_eos": bool(i % 2),
        }
        extra: list[dict[str, Any]] = [
            {},
            {"logprobs": 1},
            {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
            {"stop": ["fox", "the end"], "min_tokens": 5},
            {"top_k": 20, "repetition_penalty": 1.1, "logit_bias": {"40": 1.5}, "logprobs": 0},
        ]
        result.append({**body, **extra[i % len(extra)]})
    return result


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


class Served:
    """A running server: its address, its process, and the engine's process below it."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        ending = url.rpartition(":")[2]
        self.port = int(ending) if ending.isdecimal() else 0

    def engine_pid(self) -> int | None:
        """Id of the current engine process; None if there is none."""
        return next(iter(self.engine_pids()), None)

    def engine_pids(self) -> list[int]:
        """Ids of the current engine processes, one for each loaded model."""
        return self._named("infer-engine")

    def front_pids(self) -> list[int]:
        """Ids of the processes that answer HTTP, where there are several."""
        return self._named("infer-front")

    def standby_pid(self) -> int | None:
        """Id of the process that can become the next engine; None if there is none, or if it is
        still importing."""
        return next(iter(self._named("infer-standby")), None)

    def children(self) -> list[int]:
        """Ids of all processes that the server has started."""
        return children_of(self.process.pid)

    def _named(self, name: str) -> list[int]:
        return children_named(self.process.pid, name)

    def settle(self, within_s: float = 60.0) -> None:
        """Wait until the server and all its processes are idle: the standby process has imported
        what it needs, and the cache's memory is prepared."""
        last_s = time.monotonic() + within_s
        used_s, before_s = self._cpu_s(), -1.0
        while used_s - before_s > 0.05:
            assert time.monotonic() < last_s, "the server is still busy"
            time.sleep(0.5)
            used_s, before_s = self._cpu_s(), used_s

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, (self.process.pid, *self.children())))

    def num_restarts(self) -> int:
        """How often its engines have died and were replaced, as the metrics say."""
        pattern = rb"^\w+:engine_restarts_total\{.*\} (\S+)$"
        found = re.findall(pattern, self.get("/metrics")[1], re.MULTILINE)
        assert found
        return int(sum(map(float, found)))

    def is_ready(self) -> bool:
        """Whether /health/ready answers 200."""
        return self.get("/health/ready")[0] == 200

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        import http.client

        connection = http.client.HTTPConnection("localhost", self.port, timeout=10)
        connection.sock = connect(self.url)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    async def stats(self) -> dict[str, Any]:
        """The internal state that `observed_server.py` returns."""
        result: dict[str, Any] = json.loads((await asyncio.to_thread(self.get, "/test/stats"))[1])
        names = ("num_open", "num_requests_finished", "num_requests_cancelled")
        ended = sum(result[name] for name in (*names, "num_requests_failed"))
        assert result["num_requests_admitted"] == ended, f"the counts are wrong: {result}"
        return result

    async def is_back(self, baseline: Mapping[str, Any], within_s: float) -> float:
        """Wait until the server's state is that of `baseline` again; returns the seconds."""
        started_s = time.monotonic()
        while True:
            now = await self.stats()
            busy = [now[f"num_{name}"] for name in ("open", "running", "waiting", "preempted")]
            left = {name: (baseline[name], now[name]) for name in ("fds", "tasks")}
            if (
                not any(busy)
                and now["num_free_pages"] == now["num_pages"]
                and all(is_ <= was for was, is_ in left.values())
            ):
                return time.monotonic() - started_s
            assert time.monotonic() < started_s + within_s, (
                f"left behind: {busy}, {left}, tasks: {now['waiting_at']}"
            )
            await asyncio.sleep(0.05)


def children_of(pid: int) -> list[int]:
    """Ids of all processes that a process has started; one that has just begun may still be a copy
    of its parent."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for path in tasks.glob("*/children") for child in _text(path).split()]


def children_named(pid: int, name: str) -> list[int]:
    """Ids of those that go by a name, which they have taken themselves."""
    names = {child: _text(Path(f"/proc/{child}/comm")).strip() for child in children_of(pid)}
    return sorted(child for child, is_ in names.items() if is_ == name)


def engines_below(pid: int) -> list[int]:
    """Ids of those that are engines or standbys, also while they start."""
    module = "infer.replicas.child"
    return [child for child in children_of(pid) if module in _text(Path(f"/proc/{child}/cmdline"))]


def cpu_s(pid: int) -> float:
    """Seconds of all cores that a process has used; 0 if it has ended."""
    return sum(map(int, _numbers(Path(f"/proc/{pid}"))[11:13])) / os.sysconf("SC_CLK_TCK")


def state_of(folder: Path) -> str:
    """The letter that `/proc` has for the state of a process or of one of its threads; "X" if it
    has ended."""
    return (_numbers(folder) or ["X"])[0]


def _numbers(folder: Path) -> list[str]:
    """What `stat` says after the name, which may have spaces and brackets."""
    return _text(folder / "stat").rpartition(")")[2].split()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


@contextmanager
def stack_limit(stack_bytes: int | None) -> Iterator[None]:
    """Processes that are started meanwhile have threads with stacks of `stack_bytes`; None: as
    usual."""
    limits = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes is not None:
        resource.setrlimit(resource.RLIMIT_STACK, (stack_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, limits)


@contextmanager
def served(
    arguments: list[str], log: Path, descriptors: tuple[int, int] | None = None
) -> Iterator[Served]:
    """Run `python ARGUMENTS`; afterwards check that the server ended with 0 and left no engine.

    `descriptors`: its soft and hard limit of open files."""

    def limit_files() -> None:
        assert descriptors is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)

    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            preexec_fn=limit_files if descriptors else None,
            encoding="utf-8",
        )
        with process:
            try:
                assert process.stdout is not None
                line = process.stdout.readline()
                found = re.findall(r" at (\S+) \(", line)
                assert found, f"{line!r} {log.read_text(encoding='utf-8')}"
                server = Served(process, found[0])
                yield server
                children = server.children()
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, log.read_text(encoding="utf-8")
                ends_s = time.monotonic() + 5
                while left := [pid for pid in children if _text(Path(f"/proc/{pid}/cmdline"))]:
                    assert time.monotonic() < ends_s, f"orphans: {left}"
                    time.sleep(0.01)
            finally:
                process.kill()


@dataclass
class Heard:
    """One stream as its client received it."""

    text: str = ""
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    status_s: float = 0.0
    """Seconds from the connection to the status line."""
    is_done: bool = False
    first_s: float = 0.0
    """Seconds from the status line to the first event: waiting in the queue and prefill."""
    silence_s: float = 0.0
    """Longest time between two events, in seconds."""
    gaps_s: list[float] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When the times between two events began and ended that were longer than `PAUSE_S`, in seconds
    of the monotonic clock."""
    headers: str = ""

    @property
    def num_events(self) -> int:
        """Events received until now."""
        return len(self.gaps_s) + (self.first_s > 0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self.is_done or self.error is not None

    @property
    def answer(self) -> tuple[Any, ...]:
        """The parts that must not depend on other requests or crashes of the engine."""
        return (self.text, self.tokens, self.logprobs, self.finish_reason, self.is_done)


async def follow(port: int, body: Mapping[str, Any], heard: Heard | None = None) -> Heard:
    """POST a completion and read it to its end."""
    heard = heard or Heard()
    started_s = time.monotonic()
    reader, writer = await send(port, body)
    try:
        heard.headers = (await reader.readuntil(b"\r\n\r\n")).decode()
        heard.status = int(heard.headers.split()[1])
        heard.status_s = time.monotonic() - started_s
        last_s = time.monotonic()
        async for line in reader:
            now_s = time.monotonic()
            if not _note_line(heard, line):
                continue
            if heard.first_s:
                heard.silence_s = max(heard.silence_s, now_s - last_s)
                heard.gaps_s.append(now_s - last_s)
                if now_s - last_s > PAUSE_S:
                    heard.pauses.append((last_s, now_s))
            else:
                heard.first_s = now_s - last_s
            last_s = now_s
    finally:
        writer.close()
    return heard


class Recorder(asyncio.Protocol):
    """Records what a client receives and when, to be parsed later. A client that parses at once
    takes CPU time from the server beside it and measures that server as slow."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._started_s = time.monotonic()
        self.pieces: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic() - self._started_s, data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def heard(self) -> Heard:
        """The stream as `follow` returns it, without times between events."""
        heard = Heard()
        whole = b"".join(data for _, data in self.pieces)
        head, _, answer = whole.partition(b"\r\n\r\n")
        if not head:
            return heard
        heard.headers, heard.status_s = head.decode() + "\r\n\r\n", self.pieces[0][0]
        heard.status = int(heard.headers.split()[1])
        for line in answer.split(b"\n"):
            _note_line(heard, line)
        return heard


async def record(port: int, body: Mapping[str, Any]) -> Recorder:
    """POST a completion and receive all of it."""
    request = asked(body)
    _, recorder = await asyncio.get_running_loop().create_connection(
        lambda: Recorder(request), "127.0.0.1", port
    )
    await recorder.ended
    return recorder


async def ask(port: int, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of a plain answer."""
    reader, writer = await send(port, body)
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(answer)


def _note_line(heard: Heard, line: bytes) -> bool:
    """Note what a line of an answer says; whether it is an event of a stream."""
    if line.startswith(b'{"error"'):
        heard.error = json.loads(line)["error"]
    if not line.startswith(b"data: "):
        return False
    _note_event(heard, line.removeprefix(b"data: ").strip())
    return True


def _note_event(heard: Heard, data: bytes) -> None:
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


async def send(port: int, body: Mapping[str, Any], **how: Any) -> tuple[Any, asyncio.StreamWriter]:
    """POST a completion, on `sock` if it is given; the caller reads the answer."""
    address: dict[str, Any] = {} if how else {"host": "127.0.0.1", "port": port}
    reader, writer = await asyncio.open_connection(**address, **how)
    writer.write(asked(body))
    return reader, writer


def asked(body: Mapping[str, Any]) -> bytes:
    """The request for a completion, as bytes."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    head += "content-type: application/json\r\nconnection: close\r\n\r\n"
    return head.encode() + data


def reset(writer: asyncio.StreamWriter) -> None:
    """Close the connection at once, with RST."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def cut(port: int, body: Mapping[str, Any], after_s: float) -> None:
    """POST a completion and close the connection after `after_s` seconds."""
    _, writer = await send(port, body)
    await asyncio.sleep(after_s)
    reset(writer)


class Findings:
    """Writes what tests have counted, for `scorecard.py`: a line of JSON each, if a file is set."""

    def note(self, number: int | str, name: str, load: str, **counted: Any) -> None:
        """Write the counts of one test of a scorecard's row."""
        path = os.environ.get("INFER_RELIABILITY_FINDINGS")
        if path:
            row = {"number": number, "name": name, "load": load, "counted": counted}
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
