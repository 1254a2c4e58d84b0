"""Scorecard 1, 20, 21, 23: more work than there is room for; admitted requests lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import (
    Findings,
    Heard,
    Recorder,
    Served,
    ask,
    bodies,
    follow,
    hash_server,
    model_server,
    percentile,
    record,
    send,
    served,
)

# ---- 1: the counters add up


async def mixed_load(server: Served, count: int, width: int) -> dict[str, Any]:
    """Streams and plain answers, one to four choices, some refused, some left; counted exactly."""
    dice = random.Random(5)
    await server.stats()
    baseline = await server.stats()
    seen: Counter[str] = Counter()
    free = asyncio.Semaphore(width)
    done = False

    async def scrape() -> int:
        looks = 0
        while not done:
            await server.stats()  # asserts that the counters add up
            looks += 1
            await asyncio.sleep(0.1)
        return looks

    async def one(i: int) -> None:
        n, num_tokens = dice.choice([1, 1, 2, 4]), dice.choice([1, 5, 30, 100])
        body = {"prompt": f"x{i}", "max_tokens": num_tokens, "n": n, "ignore_eos": True, "seed": i}
        async with free:
            if i % 10 == 0:
                status, answer = await ask(server.port, {**body, "temperature": -1})
                assert (status, answer["error"]["param"]) == (422, "temperature")
                seen["bad requests"] += 1
            elif i % 2:
                status, answer = await ask(server.port, body)
                assert status == 200, answer
                assert answer["usage"]["completion_tokens"] == n * num_tokens
                assert len(answer["choices"]) == n
                seen["choices"] += n
            else:
                options = {"stream": True, "stream_options": {"include_usage": True}}
                reader, writer = await send(server.port, {**body, **options})
                *_, usage, last = (await reader.read()).split(b"\n\n")[:-1]
                writer.close()
                assert last.endswith(b"data: [DONE]") or b"[DONE]" in last, last
                counted = json.loads(usage.rpartition(b"data: ")[2])["usage"]
                assert counted["completion_tokens"] == n * num_tokens
                seen["choices"] += n

    scraping = asyncio.create_task(scrape())
    await asyncio.gather(*map(one, range(count)))
    done = True
    looks = await scraping
    await server.is_back(baseline, 3.0)
    stats = await server.stats()
    assert stats["num_requests_finished"] == stats["num_requests_admitted"] == seen["choices"]
    assert stats["num_requests_failed"] == stats["num_requests_cancelled"] == 0
    return {"requests": count, **seen, "counts looked at": looks, "lost": 0}


def run_mixed_load(count: int, tmp_path: Path) -> None:
    arguments = hash_server(max_batch_size=64, max_waiting_requests=5000, num_pages=8000)
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(mixed_load(server, count, 1000))
    load = "1,000 at a time, streamed and not, 1 to 4 choices, hash model"
    Findings().note(1, "the counts under load", load, **counted)


@pytest.mark.slow
def test_every_request_is_counted(tmp_path: Path) -> None:
    run_mixed_load(1000, tmp_path)


@pytest.mark.slow
def test_every_request_is_counted_for_longer(tmp_path: Path) -> None:
    run_mixed_load(40_000, tmp_path)


# ---- 20: ten times the capacity


CONTROL = """
import asyncio

async def refuse(reader, writer):
    await reader.readuntil(b"}")
    writer.write(b"HTTP/1.1 503 no\\r\\nconnection: close\\r\\n\\r\\n")
    writer.close()

async def main():
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
"""A server that only refuses, to measure the time of that on this machine under the same load."""


@contextlib.contextmanager
def control() -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", CONTROL], stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


OVERLOADED_S, SPARED_S = 15.0, 6.0
"""Lengths in seconds of the periods in which all requests go to the server, or to the bare one."""


async def measured_capacity(server: Served, wanted: list[dict[str, Any]]) -> float:
    """Requests a second with as many clients as there are seats, each sending its next at once."""
    finished, started_s = 0, time.monotonic()

    async def client(i: int) -> None:
        nonlocal finished
        while time.monotonic() < started_s + 12:
            await record(server.port, wanted[i])
            finished += 1

    await asyncio.gather(*[client(i) for i in range(32)])
    # All end at about the same time, so a count within a fixed time would be off by a round of 32.
    return finished / (time.monotonic() - started_s)


async def overload(server: Served, control_port: int, seconds: float) -> dict[str, Any]:
    """Send ten times the capacity for `seconds`.

    In between, for a few seconds at a time, a bare server gets the same requests and refuses them.
    The queue of the server keeps all seats taken meanwhile, so the tokens a second of these
    periods are what the engine can do beside such clients, which share its cores.
    """
    wanted = [{**body, "max_tokens": 256, "ignore_eos": True} for body in bodies(32, 256)]
    for body in wanted:
        body.pop("stop", None)
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    capacity = await measured_capacity(server, wanted)
    await asyncio.sleep(1)
    baseline = await server.stats()
    received: list[tuple[int, Recorder]] = []
    """(number of a request, recorder of its answer)."""
    tasks: set[asyncio.Task[None]] = set()
    highest, memory = 0, []
    inside: list[float] = []
    by_control: list[float] = []
    number = 0

    async def one(i: int) -> None:
        if i % 10 == 0:
            by_control.append((await record(control_port, wanted[0])).pieces[0][0])
        recorder = await record(server.port, wanted[i % 32])
        received.append((i % 32, recorder))

    async def refused_elsewhere(i: int) -> None:
        await record(control_port, wanted[i % 32])

    async def send(period_s: float, request: Callable[[int], Coroutine[Any, Any, None]]) -> float:
        """Send to a server for so long; returns the tokens a second of the engine meanwhile."""
        nonlocal number, highest
        before = await server.stats()
        started_s, sent, looked_s = time.monotonic(), 0, 0.0
        while (now_s := time.monotonic() - started_s) < period_s:
            while sent < now_s * 10 * capacity:
                task = asyncio.create_task(request(number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                number, sent = number + 1, sent + 1
            if now_s > looked_s + 1:
                stats = await server.stats()
                highest = max(highest, stats["num_open"])
                inside.extend(stats["refused_s"])
                memory.append(stats["memory"] + stats["engine_memory"])
                looked_s = now_s
            await asyncio.sleep(0.005)
        after, took_s = await server.stats(), time.monotonic() - started_s
        inside.extend(after["refused_s"])
        return (after["num_sampled_tokens"] - before["num_sampled_tokens"]) / took_s

    # The queue of 256 must not end within a period that spares the server.
    spared_s = min(SPARED_S, 128 / capacity)
    overloaded, spared = [], []
    await send(3, one)  # until the queue is full
    for _ in range(max(1, round(seconds / OVERLOADED_S))):
        overloaded.append(await send(OVERLOADED_S, one))
        spared.append(await send(spared_s, refused_elsewhere))
        assert (await server.stats())["num_open"] > 32, "seats were empty: nothing was compared"
    overloaded.append(await send(OVERLOADED_S, one))
    while tasks:
        await asyncio.sleep(0.1)
    await server.is_back(baseline, 3.0)
    lag_s = (await server.stats())["lag_s"]
    heard_all = [(i, recorder.heard()) for i, recorder in received]
    admitted = [(i, heard) for i, heard in heard_all if heard.status == 200]
    refused = [heard for _, heard in heard_all if heard.status != 200]
    assert all(heard.answer == calm[i].answer for i, heard in admitted), "one differs"
    assert {heard.status for heard in refused} <= {429, 503}
    assert all("retry-after: " in heard.headers for heard in refused)
    late = [heard.status_s for heard in refused]
    # A machine's speed drifts by a fifth within a minute: each is compared with its neighbours.
    sides = itertools.pairwise(overloaded)
    ratios = [sum(both) / 2 / rate for both, rate in zip(sides, spared, strict=True)]
    quarter = len(memory) // 4
    growth = (max(memory[-quarter:]) - max(memory[quarter : 2 * quarter])) / 1e6
    assert highest <= 32 + 256
    return {
        "capacity [requests/s]": round(capacity, 1),
        "sent, in all periods [requests/s]": round(10 * capacity, 1),
        "seconds of overload": round(3 + OVERLOADED_S * len(overloaded)),
        "admitted, all exact": len(admitted),
        "refused, all with Retry-After": len(refused),
        "refused after, median / p99 / longest [ms]": _times_ms(late),
        "the same without the way to and from the server [ms]": _times_ms(inside),
        "a bare server that does nothing else, under the same load [ms]": _times_ms(by_control),
        "tokens a second, median": round(statistics.median(overloaded)),
        "the same while the bare server refuses, median": round(statistics.median(spared)),
        "ratio of the two, median / least / most": (
            round(statistics.median(ratios), 3),
            round(min(ratios), 3),
            round(max(ratios), 3),
        ),
        "most in flight": highest,
        "memory, last quarter above second [MB]": round(growth, 2),
        "longest absence of the event loop in the last second [ms]": round(1000 * lag_s, 1),
    }


def _times_ms(times_s: list[float]) -> tuple[float, ...]:
    return tuple(round(1000 * percentile(times_s, q), 1) for q in (50, 99, 100))


@pytest.mark.slow
def test_ten_times_too_much(tmp_path: Path) -> None:
    seconds = float(os.environ.get("INFER_OVERLOAD_S", "120"))
    with served(model_server(), tmp_path / "log") as server, control() as port:
        gc.disable()  # else the client stops for 40 ms or more and measures the server as slow
        try:
            counted = asyncio.run(overload(server, port, seconds))
        finally:
            gc.enable()
    load = "open loop, 256 tokens each, shipped model, queue of 256"
    Findings().note(20, "ten times too much", load, **counted)
    assert counted["refused after, median / p99 / longest [ms]"][1] < 50
    assert counted["ratio of the two, median / least / most"][0] >= 0.95
    assert counted["memory, last quarter above second [MB]"] < 4


# ---- 21: all at once


async def burst(server: Served, count: int, cap: int) -> dict[str, Any]:
    await server.stats()
    baseline = await server.stats()
    body = {"prompt": "Once upon a time", "max_tokens": 100, "stream": True, "temperature": 0}
    highest, done = 0, False

    async def watch() -> None:
        nonlocal highest
        while not done:
            with contextlib.suppress(KeyError, OSError):  # this may get no connection either
                highest = max(highest, (await server.stats())["num_open"])
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())

    async def ask_once() -> Heard:
        try:
            return await follow(server.port, body)
        except (OSError, asyncio.IncompleteReadError):
            return Heard()  # above twice the allowed connections they are closed without an answer

    heard = await asyncio.gather(*[ask_once() for _ in range(count)])
    done = True
    await watching
    await server.is_back(baseline, 60.0)
    stats = await server.stats()
    statuses = Counter(each.status for each in heard)
    assert set(statuses) <= {200, 503, 0}
    assert not statuses[0] or count > 2048
    answers = [each.answer for each in heard if each.is_done]  # the first may have been refused
    assert answers
    assert all(answer == answers[0] for answer in answers)
    assert sum(each.is_done for each in heard) == statuses[200]
    assert stats["num_requests_admitted"] - baseline["num_requests_admitted"] == statuses[200]
    assert stats["num_requests_refused"] + statuses[200] <= count  # the rest had no connection
    assert highest <= cap
    return {
        "at once": count,
        "admitted, all exact": statuses[200],
        "refused before tokenising": stats["num_requests_refused"],
        "refused as connections with 503": statuses[503] - stats["num_requests_refused"],
        "reset above 2,048 connections": statuses[0],
        "most in flight": highest,
        "cap": cap,
    }


def run_burst(count: int, tmp_path: Path) -> None:
    arguments = hash_server(
        step_s=0.002, max_batch_size=32, max_waiting_requests=96, num_pages=8000
    )
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(burst(server, count, 128))
    Findings().note(21, "burst admission race", f"{count} at once, hash model", **counted)


def test_a_small_burst(tmp_path: Path) -> None:
    run_burst(400, tmp_path)


@pytest.mark.slow
def test_a_burst(tmp_path: Path) -> None:
    run_burst(5000, tmp_path)


# ---- 23: what never fits, and what just does


async def exhausted(server: Served) -> dict[str, Any]:
    await server.stats()
    baseline = await server.stats()
    impossible = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True}
    longest = {"prompt": "Once", "max_tokens": 380, "ignore_eos": True, "stream": True}
    never = [ask(server.port, impossible) for _ in range(50)]
    fits = [follow(server.port, {**longest, "seed": i, "temperature": 1}) for i in range(60)]
    async with asyncio.timeout(60):
        refusals, heard = await asyncio.gather(asyncio.gather(*never), asyncio.gather(*fits))
    assert {status for status, _ in refusals} == {400}
    assert all(each.is_done and each.finish_reason == "length" for each in heard)
    await server.is_back(baseline, 2.0)
    stats = await server.stats()
    assert stats["num_preemptions"] > 50
    return {
        "impossible, refused with 400": len(refusals),
        "longest possible, all finished": len(heard),
        "preemptions": stats["num_preemptions"],
    }


@pytest.mark.slow
def test_a_cache_that_is_too_small_for_ever(tmp_path: Path) -> None:
    """A pool for two of the longest requests, and eight seats; a request larger than the pool is
    refused.

    A step has a minimum length, so that running requests overlap on every machine. Without it a
    fast engine finished each request before the next arrived.
    """
    arguments = hash_server(num_pages=200, max_batch_size=8, max_seq_len=4096, step_s=0.0005)
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(exhausted(server))
    load = "8 seats, a pool for 2 of the longest requests, hash model"
    Findings().note(23, "KV cache exhausted for ever", load, **counted)
