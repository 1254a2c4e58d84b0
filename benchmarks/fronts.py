"""What one and several API processes stream: tokens a second and CPU time of each process.

`python benchmarks/fronts.py [--fronts 1 2] [--streams 64] [--tokens 900] [--step-ms 2] [--turns 3]`
runs servers with the hash model, one after the other in turns. Their steps take `--step-ms`, so the
streams divided by that is the rate that is asked for. The client counts what it receives and parses
nothing. On a machine with few cores client, engine and API processes share them; then the CPU time
for a token says what more cores would give.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.server_process import Served, asked, cpu_s, hash_server, served


class Counting(asyncio.Protocol):
    """Asks for one stream and counts its events."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self.num_events = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(asked(self._body))

    def data_received(self, data: bytes) -> None:
        self.num_events += data.count(b"data: ")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(None)


async def streamed(port: int, num_streams: int, num_tokens: int) -> int:
    """Events of all streams."""
    loop = asyncio.get_running_loop()
    body = {"prompt": "a", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    made = [
        await loop.create_connection(lambda: Counting(body), "127.0.0.1", port)
        for _ in range(num_streams)
    ]
    await asyncio.gather(*(each.ended for _, each in made))
    return sum(each.num_events for _, each in made)


def used(server: Served) -> dict[str, float]:
    """CPU seconds: of the API processes, of the one that has started them, and of the engine."""
    fronts = server.front_pids()
    own = cpu_s(server.process.pid)
    engine = sum(map(cpu_s, server.engine_pids()))
    if not fronts:
        return {"API": own, "keeper": 0.0, "engine": engine}
    return {"API": sum(map(cpu_s, fronts)), "keeper": own, "engine": engine}


def measured(num_fronts: int, num_streams: int, num_tokens: int, step_s: float) -> dict[str, float]:
    """Tokens a second, events a second (where a front is late, an event has several tokens), and
    CPU microseconds for each token."""
    arguments = hash_server(
        fronts=num_fronts,
        max_batch_size=num_streams,
        num_pages=num_streams * 80,
        step_s=step_s,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        served(arguments, Path(folder) / "log") as server,
    ):
        asyncio.run(streamed(server.port, num_streams, 50))
        before, started_s = used(server), time.monotonic()
        num_events = asyncio.run(streamed(server.port, num_streams, num_tokens))
        took_s, after = time.monotonic() - started_s, used(server)
    count = num_streams * num_tokens
    cpu = {name: 1e6 * (after[name] - before[name]) / count for name in after}
    return {"tok/s": count / took_s, "events/s": num_events / took_s, **cpu}


def main() -> None:
    """Print a row for each number of fronts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fronts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    rows: dict[int, list[dict[str, float]]] = {count: [] for count in given.fronts}
    for _ in range(given.turns):
        for count in given.fronts:
            rows[count].append(measured(count, given.streams, given.tokens, given.step_ms / 1000))
            print(count, {name: round(value, 1) for name, value in rows[count][-1].items()})
    for count, found in rows.items():
        middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
        print(count, "median", {name: round(value, 1) for name, value in middle.items()})


if __name__ == "__main__":
    main()
