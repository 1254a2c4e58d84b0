"""Streams that are cut at random, read on from another connection, and exact, also while the engine
is killed: what has an `X-Keep-Answer` loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.killing import is_another
from tests.support.server_process import Findings, Served, bodies, hash_server, reset, served

CHAT = "/v1/chat/completions"
SERVER = hash_server(step_s=0.003, num_pages=3000)


def wanted_answers(count: int) -> list[tuple[str, dict[str, Any]]]:
    """Completions, and every other one as a chat."""
    found = []
    for i, body in enumerate(bodies(count, 150)):
        if i % 2:
            prompt, chat = body["prompt"], {k: v for k, v in body.items() if k != "prompt"}
            if "logprobs" in chat:
                chat["logprobs"], chat["top_logprobs"] = True, chat["logprobs"]
            chat["messages"] = [{"role": "user", "content": prompt}]
            found.append((CHAT, chat))
        else:
            found.append(("/v1/completions", body))
    return found


class Reader:
    """A client that reads an answer over connections that are cut at random."""

    def __init__(self, server: Served, name: str, dice: random.Random) -> None:
        self._server = server
        self._name = name
        self._dice = dice
        self.events: dict[int, bytes] = {}
        self.num_cuts = 0

    @property
    def last(self) -> int:
        return max(self.events, default=0)

    async def read(self, path: str, body: Mapping[str, Any], num_cuts: int) -> None:
        """Ask, and come again after each cut; the last time it reads to the end."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.0\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
        head += "content-type: application/json\r\nx-keep-answer: true\r\n"
        asked = f"{head}x-request-id: {self._name}\r\n\r\n".encode() + data
        while not await self._connect(asked, cut=self.num_cuts < num_cuts):
            at = f"/v1/requests/{self._name}/events?after={self.last}"
            asked = f"GET {at} HTTP/1.0\r\nhost: localhost\r\n\r\n".encode()

    async def _connect(self, asked: bytes, *, cut: bool) -> bool:
        """One connection; returns whether the answer has ended."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write(asked)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            num_left, rest = self._dice.randint(1, 4000) if cut else 1 << 30, b""
            while num_left > 0:
                data = await reader.read(min(num_left, self._dice.randint(1, 2000)))
                num_left -= len(data)
                rest = self._note(rest + data)
                if not data or self.has_ended:
                    assert self.has_ended, (rest[-300:], self.events.get(self.last))
                    return True
            self.num_cuts += 1
            if self._dice.random() < 0.5:
                reset(writer)
            return False
        finally:
            writer.close()

    @property
    def has_ended(self) -> bool:
        return self.events.get(self.last) == b"data: [DONE]"

    def _note(self, data: bytes) -> bytes:
        """Note the events that are whole; returns the rest."""
        *blocks, rest = data.split(b"\n\n")
        for block in blocks:
            if not block.startswith(b":"):
                number, newline, event = block.removeprefix(b"id: ").partition(b"\n")
                assert newline, data[:2000]
                assert int(number) == self.last + 1
                self.events[int(number)] = event
        return rest


def answer_of(events: Mapping[int, bytes]) -> tuple[str, list[Any], list[Any]]:
    """(text, tokens' log-probabilities, finish reasons) that events say together."""
    texts, logprobs, reasons = [], list[Any](), list[Any]()
    for event in events.values():
        line = event.removeprefix(b"data: ")
        if line == b"[DONE]":
            continue
        fields = json.loads(line)
        assert "error" not in fields, fields
        for choice in fields["choices"]:
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
            found = choice["logprobs"] or {}
            logprobs += found.get("token_logprobs") or [
                each["logprob"] for each in found.get("content") or ()
            ]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    return "".join(texts), logprobs, reasons


async def cut_and_killed(
    server: Served, num_answers: int, num_cuts: int, num_kills: int
) -> dict[str, int]:
    """Each answer is cut `num_cuts` times; meanwhile the engine is killed."""
    wanted = wanted_answers(num_answers)
    calm = [Reader(server, f"calm-{i}", random.Random(i)) for i in range(num_answers)]
    work = zip(calm, wanted, strict=True)
    await asyncio.gather(*(reader.read(*asked, 0) for reader, asked in work))
    cut = [Reader(server, f"cut-{i}", random.Random(i)) for i in range(num_answers)]
    work = zip(cut, wanted, strict=True)
    reading = [asyncio.ensure_future(reader.read(*asked, num_cuts)) for reader, asked in work]
    dice, killed, suspects = random.Random(3), 0, list[tuple[asyncio.Future[None], Reader, int]]()
    while killed < num_kills and not all(task.done() for task in reading):
        await asyncio.sleep(dice.uniform(0.05, 0.3))
        # An answer that gets no token between two deaths of its engine is given up.
        while not all(task.done() or each.last > seen for task, each, seen in suspects):
            await asyncio.sleep(0.02)
        for task in reading:
            if task.done():
                task.result()  # what went wrong in it, at once
        pid = server.engine_pid()
        if pid is None:
            continue
        pairs = zip(reading, cut, strict=True)
        suspects = [(task, each, each.last) for task, each in pairs if each.last]
        os.kill(pid, signal.SIGKILL)
        killed += 1
        while not await asyncio.to_thread(is_another, server, pid):
            await asyncio.sleep(0.02)
    await asyncio.gather(*reading)
    for before, after in zip(calm, cut, strict=True):
        assert answer_of(after.events) == answer_of(before.events)
        assert answer_of(after.events)[0]
    return {"cuts": sum(each.num_cuts for each in cut), "kills": killed}


def run(tmp_path: Path, num_answers: int, num_cuts: int, num_kills: int) -> dict[str, int]:
    with served(SERVER, tmp_path / "log") as server:
        counted = asyncio.run(cut_and_killed(server, num_answers, num_cuts, num_kills))
    print(counted)
    load = f"{num_answers} streams, hash model, kill -9 of the engine meanwhile"
    Findings().note("kept", "answers cut and read on", load, **counted)
    return counted


def test_a_few_cuts_and_a_kill(tmp_path: Path) -> None:
    counted = run(tmp_path, 8, 2, 1)
    assert counted["cuts"] >= 8
    assert counted["kills"] == 1


@pytest.mark.slow
def test_two_hundred_cuts_and_ten_kills(tmp_path: Path) -> None:
    counted = run(tmp_path, 50, 6, 10)
    assert counted["cuts"] >= 200
    assert counted["kills"] >= 1
