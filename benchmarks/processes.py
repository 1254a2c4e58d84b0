"""The server with its engine in a process of its own, and with its engine in a thread.

`python benchmarks/processes.py [--rounds 5] [--streams 32] [--seconds 8] [SERVER OPTIONS]` starts
both servers on the shipped model. They work in turns, one at a time, in alternating order. The load
is a closed loop of `streams` clients with greedy streams of `tokens` tokens. It prints the tokens a
second of each round, the medians, their ratio, and the CPU time of server and engine for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, aclosing
from pathlib import Path

from infer.bench.client import ServerTarget

KINDS = {"process": [], "thread": ["--engine-thread"]}
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """One of the two servers; it is idle until it gets requests."""

    def __init__(self, options: list[str], stack: ExitStack) -> None:
        command = [sys.executable, "-m", "infer.server", "--port", "0", *options]
        self.process = stack.enter_context(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        )
        stack.callback(self.process.terminate)
        assert self.process.stdout is not None
        (url,) = re.findall(r"http://\S+", self.process.stdout.readline())
        self.target = ServerTarget(url, model=None, api_key=None)

    def cpu_s(self) -> tuple[float, float]:
        """The CPU time of the server's process and of its engine's until now, in seconds."""
        own, below = _cpu_s(self.process.pid), 0.0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            below += sum(
                _cpu_s(int(pid)) for pid in (task / "children").read_text(encoding="utf-8").split()
            )
        return own, below


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def load(target: ServerTarget, streams: int, tokens: int, seconds: float) -> float:
    """The tokens a second of the time in which all streams are busy."""
    names = itertools.count()
    started_s, count = time.monotonic(), 0

    async def client() -> None:
        nonlocal count
        while time.monotonic() < started_s + seconds:
            number = next(names)
            prompt = tuple(7 + (number * 31 + i * 7) % 1000 for i in range(16))
            async with aclosing(target.send(prompt, tokens)) as pieces:
                async for piece in pieces:
                    if time.monotonic() < started_s + seconds:
                        count += piece.num_tokens

    await asyncio.gather(*[client() for _ in range(streams)])
    return count / seconds


async def measure(servers: dict[str, Server], arguments: argparse.Namespace) -> None:
    speeds: dict[str, list[float]] = {kind: [] for kind in servers}
    how = (arguments.streams, arguments.tokens)
    for server in servers.values():
        await server.target.connect()
        await load(server.target, *how, 2.0)
    for i in range(arguments.rounds):
        for kind in list(servers)[:: 1 if i % 2 else -1]:
            before = servers[kind].cpu_s()
            speed = await load(servers[kind].target, *how, arguments.seconds)
            used = [b - a for a, b in zip(before, servers[kind].cpu_s(), strict=True)]
            speeds[kind].append(speed)
            a_token = [f"{1e6 * each / (speed * arguments.seconds):.0f}" for each in used]
            print(f"{kind:8} {speed:8.0f} tok/s   CPU µs a token, server + engine: {a_token}")
    medians = {kind: statistics.median(each) for kind, each in speeds.items()}
    ratio = medians["process"] / medians["thread"]
    print(f"medians: {medians}; process / thread = {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rounds", 5), ("streams", 32), ("tokens", 128), ("seconds", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments, options = parser.parse_known_args()
    with ExitStack() as stack:
        servers = {kind: Server([*extra, *options], stack) for kind, extra in KINDS.items()}
        asyncio.run(measure(servers, arguments))


if __name__ == "__main__":
    main()
