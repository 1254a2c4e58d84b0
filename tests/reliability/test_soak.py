"""Scorecard 30, shortened: mixed load for `INFER_SOAK_MINUTES`, in which nothing grows.

The first third is warm-up. After it all pages of the cache have been used and indexed, the lists of
latest traces and waiting times are full, and so are the interpreter's free lists (2,000 tuples of
each length; the rare lengths fill slowly). From then on the trend of memory is the median of the
slopes between any two windows (Theil and Sen): a single step between two levels does not change it
unless it is in the middle, but continued growth does, whatever the noise. Before the mixed load,
requests without further options make the engine try whether it is faster a step ahead: else the
thread that computes such steps takes its memory at any time.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.server_process import (
    Findings,
    Served,
    bodies,
    cut,
    follow,
    model_server,
    percentile,
    served,
)

CLIENTS = 24
WINDOWS = 40
"""Number of windows in the time after the warm-up; the median of each counts."""
PLAIN = {
    "prompt": "Once upon a time " * 20,
    "max_tokens": 300,
    "temperature": 0.8,
    "top_k": 20,
    "top_p": 0.9,
    "ignore_eos": True,
    "stream": True,
}
"""A request that does not keep steps from going ahead; longer than those of the mixed load."""
TABLE_MB = 2.0
"""Size by which the table of interned strings grows once in the engine's process, about an hour
after the start: `pathlib` interns the parts of the paths that the memory keeper looks at each
second, which uses up the table's entries. The strings in it stay as many, so it keeps that size."""
MEMORY = {"of the server": "memory", "of the engine": "engine_memory"}


async def soak(server: Served, minutes: float) -> dict[str, Any]:
    """20 % of the requests are left early, 5 % are invalid, a third shares a prompt with others."""
    wanted = bodies(60, 80)
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    for count in (CLIENTS, CLIENTS // 2, CLIENTS // 4, CLIENTS // 8):
        heard = await asyncio.gather(*[follow(server.port, PLAIN) for _ in range(count)])
        assert all(one.is_done for one in heard), heard
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
            elif what < 0.6:  # a prompt of its own
                body = {**wanted[i], "prompt": f"{dice.random()} One day"}
                heard = await follow(server.port, body)
                assert (heard.status, heard.is_done) == (200, True), heard
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
    levels = {name: _levels(steady, which) for name, which in MEMORY.items()}
    thirds = [percentile([d for _, d in part], 99) for part in _halves(delays[len(delays) // 3 :])]
    return {
        "minutes": minutes,
        **seen,
        "counts looked at, always exact": len(looks),
        **{
            f"memory {name}, MB, after a third and at the end": (round(a, 2), round(b, 2))
            for name, ((_, a), *_, (_, b)) in levels.items()
        },
        **{f"slope {name} [MB/h]": round(_slope(each), 2) for name, each in levels.items()},
        **{
            f"memory {name} over the time after the first third, MB": tuple(
                round(level, 1) for _, level in each[:: WINDOWS // 10]
            )
            for name, each in levels.items()
        },
        "files, at rest before and after": (baseline["fds"], stats["fds"]),
        "threads": (baseline["threads"], stats["threads"]),
        "tasks": (baseline["tasks"], stats["tasks"]),
        "p99 to the first token, halves [ms]": tuple(round(1000 * x, 1) for x in thirds),
        "back to baseline [s]": round(after_s, 2),
        "restarts": stats["num_restarts"],
    }


def _levels(looks: list[dict[str, Any]], which: str) -> list[tuple[float, float]]:
    """(hours, megabytes) at the middle of each window."""
    parts = np.array_split(
        [(look["at_s"] / 3600, look[which] / 1e6) for look in looks], min(WINDOWS, len(looks))
    )
    return [tuple(np.median(part, axis=0).tolist()) for part in parts]


def _slope(levels: list[tuple[float, float]]) -> float:
    """Slope of the Theil–Sen estimator, in megabytes per hour."""
    pairs = combinations(levels, 2)
    return float(np.median([(b - a) / (later - at) for (at, a), (later, b) in pairs]))


def _halves(values: list[Any]) -> tuple[list[Any], list[Any]]:
    return values[: len(values) // 2], values[len(values) // 2 :]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_soak(tmp_path: Path) -> None:
    minutes = float(os.environ.get("INFER_SOAK_MINUTES", "60"))
    # A small cache, so that it is full of old pages when measuring begins.
    arguments = model_server("--kv-cache-memory-bytes", str(16 << 20))
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(soak(server, minutes))
    load = f"{CLIENTS} clients, 20 % cut, 5 % wrong, shipped model"
    Findings().note(30, "soak, shortened", load, **counted)
    assert counted["restarts"] == 0
    for name in ("files, at rest before and after", "threads", "tasks"):
        before, after = counted[name]
        assert after <= before, name
    for name in MEMORY:
        start, end = counted[f"memory {name}, MB, after a third and at the end"]
        if minutes >= 30:
            assert counted[f"slope {name} [MB/h]"] <= 1.0, name
        table_mb = TABLE_MB if minutes >= 30 and name == "of the engine" else 0.0
        assert end - start <= 2.0 + table_mb, name  # over a few minutes a slope is mostly noise


def test_a_slope_is_that_of_what_goes_on() -> None:
    """With 480 samples in 40 minutes a step or a peak has no slope; a leak has, under noise too."""
    dice = np.random.default_rng(0)
    hours = np.arange(480) / 720

    def slope(megabytes: Any) -> float:
        looks = [
            {"at_s": 3600 * h, "memory": 1e6 * m} for h, m in zip(hours, megabytes, strict=True)
        ]
        return _slope(_levels(looks, "memory"))

    noise = 270 + dice.normal(0, 0.3, 480)
    assert abs(slope(noise)) < 0.3
    assert slope(270 + (hours > 0.1)) < 0.1
    assert slope(270 + 9.0 * ((hours > 0.3) & (hours < 0.35))) < 0.1
    assert 1.7 < slope(noise + 2 * hours) < 2.3
