"""Scorecard 33: two tenants with the same beginnings of prompts learn nothing of each other."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from tests.support.doubles import make_hash_llm
from tests.support.server_process import Findings
from tests.support.serving import COMPLETIONS, App, Reply, completion_body, with_app
from tests.support.tenants import cached, make

NUM_REQUESTS = int(os.environ.get("INFER_TENANT_REQUESTS", "10000"))
"""Requests of the scorecard's row."""
NUM_TIMED = 500
"""Timed requests of each kind."""
CANARY = "CANARY-of-%s-"
BEGINNING = "%c the same long beginning of both tenants' prompts, " + "word " * 12
"""Its first page differs with the number."""


def beginning(number: int) -> str:
    return BEGINNING % (0x4E00 + number)  # three bytes in UTF-8, so three tokens


def engine(**settings: Any) -> AsyncLLM:
    return make_hash_llm(num_pages=3000, max_batch_size=32, max_waiting_requests=256, **settings)


async def cross(app: App, keys: dict[str, dict[str, str]], count: int) -> dict[str, Any]:
    """Pairs of prompts with one beginning, one of each tenant, at the same time and one after the
    other, and then one more of the first."""
    seen: Counter[str] = Counter()
    free = asyncio.Semaphore(16)

    async def ask(name: str, number: int) -> Reply:
        prompt = beginning(number) + CANARY % name + str(number)
        body = completion_body(prompt=prompt, max_tokens=4, echo=True)
        reply = await app.post(COMPLETIONS, body, headers=keys[name])
        assert reply.status == 200, reply.body
        assert (CANARY % name).encode() in reply.body
        assert (CANARY % "ab".replace(name, "")).encode() not in reply.body
        seen["requests"] += 1
        return reply

    async def pair(number: int) -> None:
        async with free:
            if number % 2:
                both = list(await asyncio.gather(ask("a", number), ask("b", number)))
            else:
                both = [await ask("a", number), await ask("b", number)]
            seen["cached across tenants"] += sum(map(cached, both))
            again = await ask("a", number)
            seen["cached for the same tenant"] += cached(again)

    await asyncio.gather(*map(pair, range(count // 3)))
    for name, headers in keys.items():
        for path in ("/v1/requests", "/stats", "/metrics"):
            shown = (await app.get(path, **headers)).body
            assert b"CANARY" not in shown, (path, name)
    return dict(seen)


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, dict[str, dict[str, str]]]:
    file = tmp_path / "keys.json"
    return file, {name: make(file, name) for name in "ab"}


def run_cross(keys: Any, count: int, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    file, headers = keys
    with caplog.at_level(logging.DEBUG):
        seen = with_app(engine(), lambda app: cross(app, headers, count), api_keys=str(file))
    assert "CANARY" not in caplog.text
    assert seen.get("cached across tenants", 0) == 0, seen
    assert seen["cached for the same tenant"] > 20 * seen["requests"] / 3, "no cache was at work"
    return {**seen, "canaries seen by the other tenant or in logs": 0}


def test_two_tenants(keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    run_cross(keys, 90, caplog)


def mann_whitney(first: list[float], second: list[float]) -> float:
    """The probability that two samples of one distribution differ so much (Mann and Whitney 1947,
    doi:10.1214/aoms/1177730491; normal approximation, two-sided)."""
    ranked = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    ranks = sum(rank for rank, (_, which) in enumerate(ranked, 1) if which == 0)
    n, m = len(first), len(second)
    u = ranks - n * (n + 1) / 2
    z = (u - n * m / 2) / math.sqrt(n * m * (n + m + 1) / 12)
    return math.erfc(abs(z) / math.sqrt(2))


def test_the_statistic() -> None:
    numbers = [float(i * 37 % 101) for i in range(100)]
    assert mann_whitney(numbers, [n + 0.1 for n in reversed(numbers)]) > 0.5
    assert mann_whitney(numbers, [n + 40 for n in numbers]) < 1e-9


async def timed(app: App, keys: dict[str, dict[str, str]], count: int) -> tuple[float, float]:
    """(p of a tenant's times with a beginning that the other has cached, against new ones; the same
    with a beginning that the tenant itself has cached)."""
    times: dict[str, list[float]] = {"other's": [], "new": [], "own": []}

    async def ask(name: str, prompt: str) -> float:
        started_s = time.perf_counter()
        body = completion_body(prompt=prompt, max_tokens=1)
        assert (await app.post(COMPLETIONS, body, headers=keys[name])).status == 200
        return time.perf_counter() - started_s

    for number in range(count):
        shared, fresh = beginning(number) * 3, beginning(number + 10_000) * 3
        await ask("a", shared)
        order = [("other's", shared), ("new", fresh)][:: 1 if number % 2 else -1]
        for kind, prompt in order:
            times[kind].append(await ask("b", prompt))
        times["own"].append(await ask("b", shared))
    return (
        mann_whitney(times["other's"], times["new"]),
        mann_whitney(times["own"], times["new"]),
    )


def run_timed(keys: Any, count: int) -> dict[str, Any]:
    file, headers = keys
    llm = engine(step_s=0.001, max_num_batched_tokens=64)
    across, own = with_app(llm, lambda app: timed(app, headers, count), api_keys=str(file))
    assert own < 1e-6, "a hit of the cache cannot be told by its time, so this shows nothing"
    assert across > 0.01
    return {
        "p, other's beginning against a new one": round(across, 3),
        "p, own beginning against a new one": f"{own:.0e}",
    }


@pytest.mark.slow
def test_two_tenants_for_longer(keys: Any, caplog: pytest.LogCaptureFixture) -> None:
    load = f"{NUM_REQUESTS:,} requests of two keys, the same beginnings, hash model"
    Findings().note(33, "canaries", load, **run_cross(keys, NUM_REQUESTS, caplog))


@pytest.mark.slow
def test_times_for_longer(keys: Any) -> None:
    load = f"times to an answer, {NUM_TIMED} against {NUM_TIMED}, Mann-Whitney"
    Findings().note(33, "times", load, **run_timed(keys, NUM_TIMED))
