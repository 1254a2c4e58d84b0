"""Scorecard 24 and B3: `kill -9` of the engine at random moments; every stream stays exact."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.killing import busy_loops, kill_under_load
from tests.support.server_process import (
    Findings,
    bodies,
    hash_server,
    served,
)

HASH_SERVER = hash_server(step_s=0.003, num_pages=3000)
LONGEST_SILENCE_S = {("--standby", 0): 1.5, ("--standby", 2): 2.0, ("--no-standby", 0): 4.0}
"""By option and processes beside it."""
MODEL_SERVER = ["-m", "infer.server", "--port", "0", "--max-seq-len", "512"]


def run(
    arguments: list[str],
    load: str,
    tmp_path: Path,
    *how: Any,
    number: int | str = 24,
    **settings: Any,
) -> dict[str, Any]:
    with served(arguments, tmp_path / "log") as server:
        counted = asyncio.run(kill_under_load(server, *how, **settings))
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert text.count("has died (SIGKILL)") == counted["kills"]
    assert "is to blame" not in text
    print(counted)
    Findings().note(number, "kill -9 of the engine", load, **counted)
    return counted


def test_few_streams_and_few_kills(tmp_path: Path) -> None:
    load = "20 streams, hash model"
    arguments = [*HASH_SERVER, "--standby"]
    run(arguments, load, tmp_path, bodies(20, 200), 3, (0.1, 0.5), spaced=True)


@pytest.mark.slow
def test_two_hundred_streams_and_twenty_kills(tmp_path: Path) -> None:
    load = "200 streams, shipped model, kills at random 0.1 to 3 s after the engine is ready"
    run(MODEL_SERVER, load, tmp_path, bodies(200, 200), 20, (0.1, 3.0))


@pytest.mark.slow
@pytest.mark.parametrize(("option", "num_loops"), LONGEST_SILENCE_S)
def test_the_silence_of_ten_kills(option: str, num_loops: int, tmp_path: Path) -> None:
    """`num_loops`: processes beside it that never wait; with two of them, the clients and the
    server the load is between four and five."""
    load = f"32 streams, shipped model, ten kills, {option}"
    if num_loops:
        load += f", beside {num_loops} processes that never wait"
    streams = [{**body, "max_tokens": 400, "ignore_eos": True} for body in bodies(32, 200)]
    how: Any = {"number": "B3", "has_standby": option == "--standby"}
    with busy_loops(num_loops):
        counted = run([*MODEL_SERVER, option], load, tmp_path, streams, 10, (3.0, 4.0), **how)
    median_s, _ = counted[
        "longest silence of a stream through a kill, median and longest of the kills [s]"
    ]
    limit_s = LONGEST_SILENCE_S[option, num_loops]
    Findings().note("B3", "silence", load, at_most={"median silence [s]": (median_s, limit_s)})
