"""Scorecard 9, 10, 11, 12: many clients that disconnect, read slowly or send slowly."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import COMMANDS
from tests.support.server_process import (
    Findings,
    Served,
    bodies,
    cut,
    follow,
    hash_server,
    model_server,
    percentile,
    reset,
    send,
    served,
)


async def storm(server: Served, streams: int, waves: int, within_s: float) -> dict[str, Any]:
    wanted = bodies(streams // 10, 120)
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    assert all(heard.is_done for heard in calm)
    await asyncio.sleep(0.5)
    baseline = await server.stats()
    assert baseline["num_open"] == 0
    dice = random.Random(3)
    back_s = []
    for _ in range(waves):
        cleanup = [
            cut(server.port, {**dice.choice(wanted), "max_tokens": 400}, dice.uniform(0, 0.05))
            for _ in range(streams - len(wanted))
        ]
        staying = [follow(server.port, body) for body in wanted]
        results = await asyncio.gather(*staying, *cleanup)
        for heard, expected in zip(results, calm, strict=False):
            assert heard is not None
            assert heard.answer == expected.answer, (heard, expected)
        back_s.append(await server.is_back(baseline, within_s))
    stats = await server.stats()
    return {
        "waves": waves,
        "cut": waves * (streams - len(wanted)),
        "survivors, all exact": waves * len(wanted),
        "cancelled in the engine": stats["num_requests_cancelled"],
        "back to baseline, longest [s]": round(max(back_s), 2),
        "tasks before, after": (baseline["tasks"], stats["tasks"]),
        "files before, after": (baseline["fds"], stats["fds"]),
    }


def note_storm(arguments: list[str], load: str, tmp_path: Path, *how: Any) -> None:
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(storm(server, *how))
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
    Findings().note(9, "disconnect storm", load, **counted)


def test_a_small_storm(tmp_path: Path) -> None:
    arguments = hash_server(step_s=0.001, max_waiting_requests=600, num_pages=8000)
    note_storm(
        arguments, "100 streams, 90 % reset within 50 ms, hash model", tmp_path, 100, 2, 60.0
    )


@pytest.mark.slow
@COMMANDS
def test_a_storm(tmp_path: Path, options: list[str]) -> None:
    arguments = model_server("--max-waiting-requests", "600", *options)
    load = " ".join(["500 streams, 90 % reset within 50 ms, shipped model", *options])
    note_storm(arguments, load, tmp_path, 500, 20, 2.0)


async def leave_plain_requests(server: Served, count: int) -> dict[str, Any]:
    await follow(server.port, {"prompt": "x", "max_tokens": 1, "stream": True})
    baseline = await server.stats()
    dice = random.Random(4)
    plain = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True, "seed": 1}
    slowest_s = 0.0
    for _ in range(count // 50):
        await asyncio.gather(*[cut(server.port, plain, dice.uniform(0.1, 0.4)) for _ in range(50)])
        slowest_s = max(slowest_s, await server.is_back(baseline, 1.0))
    stats = await server.stats()
    return {
        "closed": count,
        "cancelled": stats["num_requests_cancelled"],
        "finished before": stats["num_requests_finished"] - baseline["num_requests_finished"],
        "until the last had stopped, longest [s]": round(slowest_s, 2),
    }


@pytest.mark.slow
def test_plain_requests_that_are_closed(tmp_path: Path) -> None:
    with served(hash_server(step_s=0.003, max_batch_size=64), tmp_path / "log") as server:
        counted = asyncio.run(leave_plain_requests(server, 500))
    assert counted["cancelled"] == 500
    Findings().note(10, "plain requests closed while they run", "500, 50 at a time", **counted)


# ---- slow readers


async def read_slowly(
    port: int, body: dict[str, Any], bytes_per_s: int, over: asyncio.Event
) -> None:
    """Read a limited number of bytes per second. Whether the server has cut the connection is seen
    at the server: a system that gives up on a connection does not inform the other side."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    _, writer = await send(port, body, sock=sock)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    while not over.is_set():
        await asyncio.sleep(1.0)
        with contextlib.suppress(OSError):
            sock.recv(bytes_per_s)
    reset(writer)


async def slow_readers(server: Served, slow: int, zero: int, normal: int) -> dict[str, Any]:
    heavy = {
        **{"prompt": "Once upon a time", "max_tokens": 480, "stream": True, "logprobs": 20},
        **{"ignore_eos": True, "temperature": 0},
    }
    light = {**heavy, "logprobs": None}
    # The same load with clients that read normally.
    calm = await asyncio.gather(
        *[follow(server.port, light) for _ in range(normal)],
        *[follow(server.port, heavy) for _ in range(slow + zero)],
    )
    baseline = await server.stats()
    over, started_s = asyncio.Event(), time.monotonic()
    readers = [
        asyncio.create_task(read_slowly(server.port, heavy, 10 if i < slow else 0, over))
        for i in range(slow + zero)
    ]
    among = await asyncio.gather(*[follow(server.port, light) for _ in range(normal)])
    assert all(heard.answer == calm[0].answer for heard in among)
    memory: list[int] = []
    closed_s: list[float] = []
    while len(closed_s) < slow + zero:
        stats = await server.stats()
        memory.append(stats["memory"])
        now_s = time.monotonic() - started_s
        closed_s += [now_s] * (slow + zero - (stats["fds"] - baseline["fds"]) - len(closed_s))
        assert now_s < 60, f"{stats['fds'] - baseline['fds']} connections are still held"
        await asyncio.sleep(0.5)
    over.set()
    await asyncio.gather(*readers)
    await server.is_back(baseline, 5.0)
    gaps = [percentile([g for h in part for g in h.gaps_s], 99) for part in (calm[:normal], among)]
    return {
        "closed by the server": len(closed_s),
        "after, first and last [s]": (round(min(closed_s), 1), round(max(closed_s), 1)),
        "normal readers, all exact": normal,
        "their p99 between tokens, all read / some do not [ms]": tuple(
            round(1000 * gap, 1) for gap in gaps
        ),
        "memory above the load's before [MB]": round((max(memory) - baseline["memory"]) / 1e6, 1),
    }


@pytest.mark.slow
@COMMANDS
def test_slow_readers(tmp_path: Path, options: list[str]) -> None:
    arguments = model_server("--max-batch-size", "256", "--write-stall-s", "30", *options)
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(slow_readers(server, 100, 50, 50))
    load = "100 readers of 10 B/s, 50 of nothing, 50 normal, shipped model, log-probabilities"
    load = " ".join([load, *options])
    Findings().note(11, "slow readers", load, **counted)
    before, after = counted["their p99 between tokens, all read / some do not [ms]"]
    assert after <= 1.2 * before
    assert counted["memory above the load's before [MB]"] < 100


# ---- slow senders


async def drip(port: int, head: bytes, every_s: float) -> float:
    """Send one byte at a time until the server closes; returns the seconds."""
    started_s = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.ensure_future(reader.read())
    with contextlib.suppress(OSError):
        for byte in head:
            writer.write(bytes([byte]))
            await asyncio.wait([closed], timeout=every_s)
            if closed.done():
                break
    answer = await closed
    writer.close()
    assert b" 408 " in answer.splitlines()[0], answer
    return time.monotonic() - started_s


async def slowloris(server: Served, count: int) -> dict[str, Any]:
    good = {"prompt": "Once upon a time", "max_tokens": 100, "stream": True, "temperature": 0}

    async def traffic(seconds: float) -> list[Any]:
        heard, until_s = [], time.monotonic() + seconds
        while time.monotonic() < until_s:
            heard += await asyncio.gather(*[follow(server.port, good) for _ in range(4)])
        return heard

    before = await traffic(5)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    slow_body = head + b'content-length: 1000\r\n\r\n{"prompt'

    async def slow_in_the_body() -> float:
        started_s = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(slow_body)
        answer = await reader.read()
        writer.close()
        assert b" 408 " in answer.splitlines()[0], answer
        return time.monotonic() - started_s

    async with asyncio.TaskGroup() as group:
        headers = [group.create_task(drip(server.port, head, 5.0)) for _ in range(count // 2)]
        slow = [group.create_task(slow_in_the_body()) for _ in range(count // 2)]
        among = group.create_task(traffic(33))
    during = among.result()
    assert all(heard.answer == before[0].answer for heard in during)
    p99 = [percentile([h.first_s + h.status_s for h in part], 99) for part in (before, during)]
    return {
        "closed in the headers, last after [s]": round(max(t.result() for t in headers), 1),
        "closed in the body, last after [s]": round(max(t.result() for t in slow), 1),
        "good requests, all exact": len(during),
        "their p99 to the first token, before / during [ms]": tuple(
            round(1000 * value, 1) for value in p99
        ),
    }


@pytest.mark.slow
def test_slowloris(tmp_path: Path) -> None:
    with served(model_server(), tmp_path / "log") as server:
        counted = asyncio.run(slowloris(server, 1000))
    load = "1,000 connections, half with a byte of headers in 5 s, half with a body that stops"
    Findings().note(12, "slow senders", load, **counted)
    assert counted["closed in the headers, last after [s]"] < 12
    assert counted["closed in the body, last after [s]"] < 33
