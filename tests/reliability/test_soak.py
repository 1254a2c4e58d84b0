"""Scorecard 30, shortened: mixed load for `INFER_SOAK_MINUTES`, and nothing that grows."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from load import Findings, Served, bodies, cut, follow, model_server, percentile, served

CLIENTS = 24


async def soak(server: Served, minutes: float) -> dict[str, Any]:
    """20 % of the requests are cut, 5 % are wrong, a third shares a prompt with others."""
    wanted = bodies(60, 80)
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    await server.stats()
    await asyncio.sleep(1)
    baseline = await server.stats()
    seen: Counter[str] = Counter()
    ends_s = time.monotonic() + 60 * minutes
    delays: list[tuple[float, float]] = []

    async def client(number: int) -> None:
        dice = random.Random(number)
        while time.monotonic() < ends_s:
            i, what = dice.randrange(len(wanted)), dice.random()
            if what < 0.20:
                await cut(server.port, {**wanted[i], "max_tokens": 300}, dice.uniform(0, 0.2))
                seen["cut"] += 1
            elif what < 0.25:
                heard = await follow(server.port, {**wanted[i], "top_p": 7})
                assert heard.status == 422
                seen["wrong"] += 1
            elif what < 0.6:  # a prompt that nobody else has
                await follow(server.port, {**wanted[i], "prompt": f"{dice.random()} One day"})
                seen["own prompt"] += 1
            else:
                heard = await follow(server.port, wanted[i])
                assert heard.answer == calm[i].answer, (heard.error, i)
                delays.append((time.monotonic(), heard.status_s + heard.first_s))
                seen["compared, all exact"] += 1

    looks: list[dict[str, Any]] = []

    async def look() -> None:
        while time.monotonic() < ends_s:
            looks.append({**await server.stats(), "at_s": time.monotonic()})
            await asyncio.sleep(min(5.0, 60 * minutes / 40))

    await asyncio.gather(look(), *map(client, range(CLIENTS)))
    after_s = await server.is_back(baseline, 5.0)
    stats = await server.stats()
    steady = looks[len(looks) // 3 :]
    slopes = {
        which: round(_slope([x["at_s"] for x in steady], [x[which] for x in steady]), 2)
        for which in ("memory", "engine_memory")
    }
    thirds = [percentile([d for _, d in part], 99) for part in _halves(delays[len(delays) // 3 :])]
    return {
        "minutes": minutes,
        **seen,
        "ledger looked at, always exact": len(looks),
        "memory of the server, MB: after a third, end": _pair(steady, "memory"),
        "of the engine": _pair(steady, "engine_memory"),
        "slopes [MB/h]": tuple(slopes.values()),
        "files, at rest before and after": (baseline["fds"], stats["fds"]),
        "threads": (baseline["threads"], stats["threads"]),
        "tasks": (baseline["tasks"], stats["tasks"]),
        "p99 to the first token, halves [ms]": tuple(round(1000 * x, 1) for x in thirds),
        "back to baseline [s]": round(after_s, 2),
        "restarts": stats["num_restarts"],
    }


def _slope(at_s: list[float], size: list[int]) -> float:
    return float(np.polyfit(np.array(at_s) / 3600, np.array(size) / 1e6, 1)[0])


def _pair(looks: list[dict[str, Any]], name: str) -> tuple[float, float]:
    return (round(looks[0][name] / 1e6, 2), round(looks[-1][name] / 1e6, 2))


def _halves(values: list[Any]) -> tuple[list[Any], list[Any]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_soak(tmp_path: Path) -> None:
    minutes = float(os.environ.get("INFER_SOAK_MINUTES", "60"))
    # A small cache, so that it is full of old pages before the measuring begins.
    arguments = model_server("--kv-cache-memory-bytes", str(16 << 20))
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(soak(server, minutes))
    load = f"{CLIENTS} clients, 20 % cut, 5 % wrong, shipped model"
    Findings().note(30, "soak, shortened", load, **counted)
    assert counted["restarts"] == 0
    for name in ("files, at rest before and after", "threads", "tasks"):
        before, after = counted[name]
        assert after <= before, name
    # In a few minutes a slope is mostly noise, so there it is the growth that is bounded.
    hours = minutes / 60
    for name in ("memory of the server, MB: after a third, end", "of the engine"):
        start, end = counted[name]
        assert end - start <= max(8.0, 1.0 * hours), name
    if minutes >= 30:
        assert max(counted["slopes [MB/h]"]) <= 1.0
