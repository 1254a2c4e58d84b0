"""Scorecard 24: `kill -9` of the engine at random moments; every stream stays exact."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import (
    Findings,
    Heard,
    Served,
    bodies,
    follow,
    hash_server,
    served,
)

HASH_SERVER = hash_server(step_s=0.003, num_pages=3000)
MODEL_SERVER = ["-m", "infer.server", "--port", "0", "--max-seq-len", "512"]


async def kill_under_load(
    server: Served, wanted: list[dict[str, Any]], num_kills: int, pause_s: tuple[float, float]
) -> dict[str, Any]:
    """Every client repeats its own stream until all kills are done."""
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    assert all(heard.is_done for heard in calm)
    is_over = False
    heard_in_storm: list[tuple[int, Heard]] = []

    async def ask(i: int) -> None:
        while not is_over:
            heard_in_storm.append((i, await follow(server.port, wanted[i])))

    clients = [asyncio.create_task(ask(i)) for i in range(len(wanted))]
    dice = random.Random(2)
    restarts_s = []
    for _ in range(num_kills):
        await asyncio.sleep(dice.uniform(*pause_s))
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        await wait(lambda pid=pid: asyncio.to_thread(is_another, server, pid))  # type: ignore[misc]
        restarts_s.append(time.monotonic() - killed_s)
    is_over = True
    await asyncio.gather(*clients)
    wrong = [i for i, heard in heard_in_storm if heard.answer != calm[i].answer]
    errors = Counter(str(heard.error) for _, heard in heard_in_storm if heard.error)
    assert not errors, errors
    assert not wrong, f"{len(wrong)} of {len(heard_in_storm)} streams differ"
    silences = {
        when: tuple(round(max(each), 2) for each in zip(*pairs, strict=True))
        for when, pairs in (
            ("calm", [(h.first_s, h.silence_s) for h in calm]),
            ("storm", [(h.first_s, h.silence_s) for _, h in heard_in_storm]),
        )
    }
    return {
        "streams": len(heard_in_storm),
        "kills": num_kills,
        "streams that differ": 0,
        "longest wait for the first token, and silence after it, undisturbed [s]": silences["calm"],
        "the same under kills [s]": silences["storm"],
        "restart, median and longest [s]": (
            round(sorted(restarts_s)[num_kills // 2], 2),
            round(max(restarts_s), 2),
        ),
    }


def is_another(server: Served, pid: int) -> bool:
    return server.is_ready() and server.engine_pid() not in (None, pid)


async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


def run(arguments: list[str], load: str, tmp_path: Path, *how: Any) -> None:
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(kill_under_load(server, *how))
    text = (tmp_path / "log").read_text()
    assert text.count("has died (SIGKILL)") == counted["kills"]
    assert "is to blame" not in text
    print(counted)
    Findings().note(24, "kill -9 of the engine", load, **counted)


def test_few_streams_and_few_kills(tmp_path: Path) -> None:
    run(HASH_SERVER, "20 streams, hash model", tmp_path, bodies(20, 200), 3, (0.1, 0.5))


@pytest.mark.slow
def test_two_hundred_streams_and_twenty_kills(tmp_path: Path) -> None:
    load = "200 streams, shipped model, kills at random 0.1 to 3 s after the engine is ready"
    run(MODEL_SERVER, load, tmp_path, bodies(200, 200), 20, (0.1, 3.0))
