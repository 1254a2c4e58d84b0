"""Scorecard A4: bodies that are refused, or never end, cost nothing more.

The attackers have no key, or stay within the limits of theirs. The tests measure the effect on
other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import h11
import pytest

from infer.errors import OverloadedError
from infer.server.http import bounded_protocol
from infer.server.http.body_budget import BodyBudget
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.observed_server import memory
from tests.support.raw_http import HEAD, HEALTH, connect, read_all, read_answer
from tests.support.server_process import (
    Findings,
    Served,
    hash_server,
    model_server,
    percentile,
    served,
)
from tests.support.serving import (
    completion_body,
    is_idle,
    live,
)
from tests.support.waits import until


def refusals(url: str) -> dict[str, int]:
    """The numbers of refusals in /metrics, by reason."""
    with connect(url) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        text = read_all(sock).decode()
    found = re.findall(r'infer:protocol_refusals_total\{.*reason="(\w+)"\} (\d+)', text)
    return {reason: int(count) for reason, count in found}


def test_an_error_before_the_whole_body_ends_the_connection() -> None:
    """The client gets the error although it keeps sending; the rest is not parsed."""
    with live(make_hash_llm()) as url, connect(url) as sock:
        wrong = HEAD.replace("application/json", "text/plain")
        sock.sendall(f"{wrong}content-length: 2000000\r\n\r\n".encode())
        for _ in range(20):
            sock.sendall(b" " * 100_000)
        reply = read_all(sock)
        assert reply.startswith(b"HTTP/1.1 415 ")
        assert b"connection: close" in reply.lower()
        assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
        # If the whole body was received, the connection stays open for another request.
        with connect(url) as other:
            for _ in range(2):
                other.sendall(f"{wrong}content-length: 2\r\n\r\n{{}}".encode())
                assert read_answer(other)[0] == 415


@pytest.mark.parametrize(
    ("chunk", "status"),
    [(b"1\r\nx\r\n", 400), (b"00000000000001\r\nx\r\n", 400), (b"9\r\n" + b" " * 9 + b"\r\n", 200)],
)
def test_framing_longer_than_the_body(chunk: bytes, status: int) -> None:
    """Framing longer than the content is refused; small chunks by themselves are not."""
    body = json.dumps(completion_body()).encode()
    whole = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with live(make_hash_llm()) as url, connect(url) as sock:
        sock.sendall(f"{HEAD}transfer-encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            sock.sendall(chunk * 3000 + whole)
        found, answer = read_answer(sock)
        assert found == status, answer
        if status == 400:
            assert b"framing" in answer
            assert sock.recv(1) == b""
            assert refusals(url) == {"chunk_framing": 1}


def test_a_turn_has_an_end() -> None:
    """However much was received, one iteration parses a limited number of chunks."""
    conn = bounded_protocol.BoundedConnection()
    conn.receive_data(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    conn.receive_data(b"9\r\n123456789\r\n" * 500 + b"0\r\n\r\n")
    turns: list[list[Any]] = []
    while not turns or conn.is_behind:
        conn.begin_turn()
        turns.append([])
        while (event := conn.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            turns[-1].append(event)
            if type(event) is h11.EndOfMessage:
                break
    assert len(turns) == 8
    assert {len(turn) for turn in turns[:-1]} == {bounded_protocol.EVENTS_A_TURN}
    data = [event.data for turn in turns for event in turn if type(event) is h11.Data]
    assert b"".join(data) == b"123456789" * 500


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
        (b"GET /\x00 HTTP/1.1\r\n\r\n", 400, "invalid_http"),
        (
            b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 20_000 + b"\r\n\r\n",
            431,
            "headers_too_large",
        ),
    ],
)
def test_refusals_of_the_protocol_are_counted_and_logged(
    request_: bytes, status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    began_s = time.monotonic()
    with live(make_hash_llm()) as url:
        for _ in range(3):
            with connect(url) as sock:
                sock.sendall(request_)
                address = sock.getsockname()[0]
                assert read_answer(sock)[0] == status
        assert refusals(url) == {reason: 3}
    lines = [record for record in caplog.records if "refused" in record.getMessage()]
    assert 1 <= len(lines) <= 1 + time.monotonic() - began_s, "a line a second"
    assert lines[0].fields["reason"] == reason  # type: ignore[attr-defined]
    assert lines[0].fields["client"].startswith(address + ":")  # type: ignore[attr-defined]


def test_a_websocket_is_refused_without_advice(caplog: pytest.LogCaptureFixture) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
    head += b"upgrade: websocket\r\nsec-websocket-key: AAAA\r\nsec-websocket-version: 13\r\n\r\n"
    with live(make_hash_llm()) as url, connect(url) as sock:
        sock.sendall(head)
        assert read_answer(sock)[0] == 200
    assert "WebSocket" not in caplog.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_closes_its_side_gets_its_answer(stream: bool, version: str) -> None:
    """Also one that pipelines; a client that has closed the whole connection is recognised."""
    body = json.dumps(completion_body(max_tokens=30, ignore_eos=True, stream=stream)).encode()
    head = HEAD.replace("HTTP/1.1", f"HTTP/{version}")
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    engine = make_hash_llm(step_s=0.01)
    with live(engine) as url:
        with connect(url) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            reply = read_all(sock)
            assert b"HTTP/1.1 200 " in reply
            assert (b"data: [DONE]" in reply) is stream
            assert (b'"finish_reason":"length"' in reply) is True
        if version == "1.1":
            with connect(url) as sock:
                sock.sendall(HEALTH * 3)
                sock.shutdown(socket.SHUT_WR)
                assert read_all(sock).count(b"HTTP/1.1 200 ") == 3
            with connect(url) as sock:
                sock.sendall(request.replace(b" 30", b"400").replace(b":30", b":400"))
                until(lambda: engine.stats()["num_running"] == 1)
            until(lambda: is_idle(engine), 2)
            assert engine.stats()["num_finished_abort"] == 1


def test_the_budget_of_bodies() -> None:
    budget = BodyBudget(100, uncounted_bytes=10)
    with budget.body() as first, budget.body() as second:
        first(70)
        second(50)
        assert budget.num_bytes == 100
        second(10)
        with pytest.raises(OverloadedError):
            second(51)
        first(110)
    assert budget.num_bytes == 0


async def times_of_health(server: Served, seconds: float) -> list[float]:
    """Times of /health on one kept connection, in seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    took, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        writer.write(HEALTH)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
        assert head.startswith(b"HTTP/1.1 200 ")
        took.append(time.monotonic() - began_s)
        await asyncio.sleep(0.01)
    writer.close()
    return took


FLOOD = """
import os, socket, sys, threading
os.nice(19)  # attackers have machines of their own
def flood(port):
    head = b"POST /v1/completions HTTP/1.1\\r\\nhost: localhost\\r\\n"
    head += b"content-type: application/json\\r\\ntransfer-encoding: chunked\\r\\n\\r\\n"
    while True:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            try:
                sock.sendall(head)
                for _ in range(60):
                    sock.sendall(b"1\\r\\nx\\r\\n" * 200)
                    pause.wait(0.01)
            except OSError:
                pause.wait(0.2)
pause = threading.Event()
for _ in range(int(sys.argv[2])):
    threading.Thread(target=flood, args=(int(sys.argv[1]),), daemon=True).start()
pause.wait(60)
"""


def flooded(server: Served, count: int, seconds: float) -> dict[str, Any]:
    alone = asyncio.run(times_of_health(server, 1))
    attacker = subprocess.Popen([sys.executable, "-c", FLOOD, str(server.port), str(count)])
    try:
        time.sleep(0.5)
        took = asyncio.run(times_of_health(server, seconds))
    finally:
        attacker.kill()
        attacker.wait()
    return {
        "/health P99 alone, beside them [ms]": [
            round(1000 * percentile(part, 99), 1) for part in (alone, took)
        ]
    }


@pytest.mark.slow
def test_chunk_floods_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    Keys(keys, must_exist=False).create("somebody", KeyLimits())
    arguments = model_server("--api-keys", str(keys))
    with served(arguments, tmp_path / "log") as server:
        counted = flooded(server, 64, 8)
    p99_ms = counted["/health P99 alone, beside them [ms]"][1]
    Findings().note("A4", "chunk floods", "64 without a key", **counted)
    assert p99_ms < 50


async def hold_bodies(server: Served, count: int, key: str = "") -> dict[str, Any]:
    """Bodies of 1.9 MB that stop after 0.4 MB, on `count` connections."""
    before = await server.stats()
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = f"{HEAD}{authorization}content-length: 1900000\r\n\r\n".encode()
    statuses: Counter[int] = Counter()
    highest, held = 0, []

    async def hold() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        held.append(writer)
        writer.write(head)
        with contextlib.suppress(OSError):
            for _ in range(4):
                writer.write(b" " * 100_000)
                await writer.drain()
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            line = await asyncio.wait_for(reader.readline(), 60)
            if line:
                statuses[int(line.split()[1])] += 1

    holding = [asyncio.create_task(hold()) for _ in range(count)]
    for _ in range(60):
        await asyncio.sleep(0.2)
        highest = max(highest, memory(server.process.pid))
        if sum(statuses.values()) >= count - 40:
            break
    for task in holding:
        task.cancel()
    await asyncio.gather(*holding, return_exceptions=True)
    for writer in held:
        writer.close()
    await server.is_back(before, 20)
    return {
        "answers": {str(status): n for status, n in sorted(statuses.items())},
        "memory above before [MB]": round((highest - before["memory"]) / 1e6, 1),
    }


@pytest.mark.slow
def test_a_thousand_bodies_that_never_end(tmp_path: Path) -> None:
    with served(hash_server(), tmp_path / "log") as server:
        server.get("/health")
        counted = asyncio.run(hold_bodies(server, 1000))
    Findings().note("A4", "unfinished bodies", "1,000 that stop after 0.4 of 1.9 MB", **counted)
    assert counted["memory above before [MB]"] < 100
    assert counted["answers"]["503"] > 700
