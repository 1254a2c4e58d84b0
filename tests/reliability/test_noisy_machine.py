"""Scorecard N1: whoever else uses the machine costs time, and no request anything but that.

The engine has a thread for each core. Beside it are processes that never wait, a second server, a
quota that comes while it serves, or a program that takes most of the memory that is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.main_memory import available_bytes
from tests.support.control_groups import JOIN, control_group, set_quota
from tests.support.killing import busy_loops
from tests.support.server_process import Findings, Heard, Served, bodies, follow, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SERVER = ["-m", "infer.server", "--port", "0", "--max-seq-len", "512"]
COMMAND = [*SERVER, "--num-threads", str(CORES)]
STREAMS = [{**body, "max_tokens": 300, "ignore_eos": True} for body in bodies(32, 200)]
ROUNDS = 3
BROWSER = """
import mmap, sys, time
size = int(sys.argv[1])
taken = mmap.mmap(-1, size)
for start in range(0, size, 4096):
    taken[start] = 1
print(size, flush=True)
time.sleep(3)
"""
"""A program that takes memory, writes to all of it, and keeps it for a while."""


@contextlib.contextmanager
def second_server(log: Path) -> Iterator[None]:
    """Another server, whose own streams go on meanwhile and are as they are alone."""
    with served(COMMAND, log) as other, served_all_the_time(other):
        yield


@contextlib.contextmanager
def served_all_the_time(server: Served) -> Iterator[None]:
    """Streams of a server, in a process of their own."""
    program = (
        "import asyncio; from tests.reliability.test_noisy_machine import again;"
        f"asyncio.run(again({server.port}))"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2])
    try:
        yield
        assert process.poll() is None, "streams of the other server differ"
    finally:
        process.kill()
        process.wait()


async def again(port: int) -> None:
    """Ask for the streams again and again; ends when one differs from its first answer."""
    first = await all_streams(port)
    while [heard.answer for heard in await all_streams(port)] == [each.answer for each in first]:
        pass


async def all_streams(port: int) -> list[Heard]:
    return await asyncio.gather(*[follow(port, body) for body in STREAMS])


def measured(server: Served) -> tuple[list[Any], dict[str, Any]]:
    """The answers of the streams, at once, and how fast they came."""
    began_s = time.monotonic()
    heard = asyncio.run(all_streams(server.port))
    took_s = time.monotonic() - began_s
    assert all(each.is_done for each in heard), [each.error for each in heard]
    events = sum(each.num_events for each in heard)
    return [each.answer for each in heard], {
        "events a second": round(events / took_s),
        "longest silence [s]": round(max(each.silence_s for each in heard), 2),
    }


def beside(
    what: str, tmp_path: Path, company: Callable[[], Any], command: list[str] = COMMAND
) -> None:
    log = tmp_path / "log"
    with served(command, log) as server:
        measured(server)  # the engine's choices are made
        wanted, calm = measured(server)
        with company():
            for number in range(ROUNDS):
                answers, noisy = measured(server)
                assert answers == wanted
                load = f"32 streams beside {what}, round {number + 1}"
                told = {**noisy, "alone": calm, "that differ": 0}
                told["load of the last minute"] = round(os.getloadavg()[0], 1)
                Findings().note("N1", "noisy machine", load, **told)
        assert measured(server)[0] == wanted
        assert server.num_restarts() == 0
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text, text[-2000:]


def test_processes_that_never_wait(tmp_path: Path) -> None:
    beside(f"{CORES} processes that never wait", tmp_path, lambda: busy_loops(CORES))


def test_a_second_server(tmp_path: Path) -> None:
    beside("a second server", tmp_path, lambda: second_server(tmp_path / "other"))


@pytest.mark.skipif(CORES < 2, reason="the quota is of more than a core")
def test_a_quota_that_comes_while_it_serves(tmp_path: Path) -> None:
    cores = CORES - 0.5
    with control_group("cpu") as folder:

        @contextlib.contextmanager
        def quota() -> Iterator[None]:
            set_quota(folder, cores)
            yield
            set_quota(folder, CORES)

        joined = ["-c", JOIN, str(folder), *COMMAND]
        beside(f"a quota of {cores:g} cores", tmp_path, quota, joined)


def test_a_program_that_takes_most_of_the_memory(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def browser() -> Iterator[None]:
        size = int(0.6 * available_bytes())
        with subprocess.Popen(
            [sys.executable, "-c", BROWSER, str(size)], stdout=subprocess.PIPE, encoding="utf-8"
        ) as process:
            yield
            told, _ = process.communicate(timeout=120)
        assert (process.returncode, told.strip()) == (0, str(size))

    beside("a program that takes 60 % of the free memory", tmp_path, browser)
