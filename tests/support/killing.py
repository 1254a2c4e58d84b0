"""A server whose engine is killed under load, and what its clients have heard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from tests.support.server_process import (
    Heard,
    Served,
    follow,
)


async def kill_under_load(
    server: Served,
    wanted: list[dict[str, Any]],
    num_kills: int,
    pause_s: tuple[float, float],
    *,
    has_standby: bool = False,
    spaced: bool = False,
) -> dict[str, Any]:
    """Every client repeats its own stream until all kills are done. `has_standby`: before each
    kill, after the pause, a standby is waited for. `spaced`: every stream that the kill before met
    has sampled since; two kills in a row that meet the same one alone in its step end it."""
    calm = await asyncio.gather(*[follow(server.port, body) for body in wanted])
    assert all(heard.is_done for heard in calm)
    is_over = False
    heard_in_storm: list[tuple[int, Heard]] = []
    open_now: dict[int, Heard] = {}

    async def ask(i: int) -> None:
        while not is_over:
            open_now[i] = Heard()
            heard_in_storm.append((i, await follow(server.port, wanted[i], open_now[i])))

    clients = [asyncio.create_task(ask(i)) for i in range(len(wanted))]
    dice = random.Random(2)
    restarts_s, kills_s = [], []
    suspects: list[tuple[Heard, int]] = []
    for _ in range(num_kills):
        await asyncio.sleep(dice.uniform(*pause_s))
        if spaced:
            await wait(lambda suspects=suspects: _have_sampled(suspects))  # type: ignore[misc]
        if has_standby:
            await wait(lambda: asyncio.to_thread(_has_standby, server))
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        kills_s.append(killed_s)
        await wait(lambda pid=pid: asyncio.to_thread(is_another, server, pid))  # type: ignore[misc]
        restarts_s.append(time.monotonic() - killed_s)
        suspects = [(heard, heard.num_events) for heard in open_now.values()]
    is_over = True
    await asyncio.gather(*clients)
    wrong = [i for i, heard in heard_in_storm if heard.answer != calm[i].answer]
    errors = Counter(str(heard.error) for _, heard in heard_in_storm if heard.error)
    assert not errors, errors
    assert not wrong, f"{len(wrong)} of {len(heard_in_storm)} streams differ"
    pauses = [pause for _, heard in heard_in_storm for pause in heard.pauses]
    longest = sorted(
        max((end_s - start_s for start_s, end_s in pauses if start_s <= kill_s <= end_s), default=0)
        for kill_s in kills_s
    )
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
        "longest silence of a stream through a kill, median and longest of the kills [s]": (
            round(longest[num_kills // 2], 2),
            round(longest[-1], 2),
        ),
        "restart, median and longest [s]": (
            round(sorted(restarts_s)[num_kills // 2], 2),
            round(max(restarts_s), 2),
        ),
    }


@contextlib.contextmanager
def busy_loops(num_loops: int) -> Iterator[None]:
    """Processes that never wait, beside what the block does."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_loops)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


async def _have_sampled(suspects: list[tuple[Heard, int]]) -> bool:
    return all(heard.is_over or heard.num_events > before for heard, before in suspects)


def _has_standby(server: Served) -> bool:
    return server.standby_pid() is not None


def is_another(server: Served, pid: int) -> bool:
    return server.is_ready() and server.engine_pid() not in (None, pid)


async def wait(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)
