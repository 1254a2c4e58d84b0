"""Scorecard 13: clients behind a network that delays, resets, cuts and forgets connections."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_network import BadNetwork
from tests.support.server_process import (
    Findings,
    Heard,
    Served,
    bodies,
    follow,
    hash_server,
    served,
)

NUM_SECONDS = float(os.environ.get("INFER_BAD_NETWORK_S", "60"))
"""Seconds of the scorecard's row; the design's number is an hour."""


async def disturb(server: Served, clients: int, for_s: float, timeout_s: float) -> dict[str, Any]:
    """`timeout_s`: seconds after which a client gives up."""
    wanted = bodies(clients, 60)
    calm = [await follow(server.port, body) for body in wanted]
    await asyncio.sleep(0.5)
    baseline = await server.stats()
    before = baseline["num_requests_admitted"]
    seen: Counter[str] = Counter()
    ends_s = time.monotonic() + for_s

    async def client(i: int, port: int) -> None:
        while time.monotonic() < ends_s:
            heard = Heard()
            try:
                async with asyncio.timeout(timeout_s):
                    await follow(port, wanted[i], heard)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                seen[f"transport: {type(error).__name__}"] += 1
                assert calm[i].text.startswith(heard.text)
                continue
            assert calm[i].text.startswith(heard.text), i
            if heard.is_done:
                assert heard.answer == calm[i].answer, i
                seen["whole and exact"] += 1
            else:
                seen["typed error" if heard.error else "cut by the network"] += 1

    async with BadNetwork(server.port, 5) as network:
        await asyncio.gather(*[client(i, network.port) for i in range(clients)])
        connections = sum(network.seen.values())
    back_s = await server.is_back(baseline, 40.0)
    stats = await server.stats()
    assert stats["num_restarts"] == 0
    assert seen["whole and exact"] > connections / 5, seen
    return {
        "connections": connections,
        "of which": dict(network.seen),
        "clients heard": dict(seen),
        "admitted, each with one end": stats["num_requests_admitted"] - before,
        "lost by the server": 0,
        "back to baseline after [s]": round(back_s, 2),
    }


def run(clients: int, for_s: float, timeout_s: float, folder: Path) -> dict[str, Any]:
    with served(hash_server(step_s=0.002), folder / "log") as server:
        return asyncio.run(disturb(server, clients, for_s, timeout_s))


@pytest.mark.slow
def test_a_bad_network(tmp_path: Path) -> None:
    run(8, 1.0, 1.0, tmp_path)


@pytest.mark.slow
def test_a_bad_network_for_longer(tmp_path: Path) -> None:
    load = f"{NUM_SECONDS:g} s, 32 clients; up to 0.3 s of latency a piece, resets, half-open, cuts"
    Findings().note(13, "bad network", load, **run(32, NUM_SECONDS, 8.0, tmp_path))
