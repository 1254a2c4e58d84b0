"""Scorecard A1, A2, A8: grammars that crash processes, fail in the engine, or take too much.

They run against a real server with the shipped model, whose processes are compared before and
after.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.frozen_heap import frozen_heap
from tests.support.server_process import (
    Findings,
    Served,
    follow,
    model_server,
    percentile,
    served,
    stack_limit,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@contextmanager
def counting(row: str, load: str) -> Iterator[dict[str, Any]]:
    """Yields a dict; what the test puts into it becomes the row's finding if nothing fails."""
    counted: dict[str, Any] = {}
    yield counted
    Findings().note(int(row[1:]), row, load, **counted)


def chain(count: int) -> str:
    rules = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "b"'])


def references(count: int, how: str) -> dict[str, Any]:
    def step(name: str) -> Any:
        ref = {"$ref": f"#/$defs/{name}"}
        return {how: ref if how == "items" else [ref]}

    links = {f"a{i}": step(f"a{i - 1}") for i in range(1, count)}
    return {"$defs": {"a0": {"type": "string"}, **links}, "$ref": f"#/$defs/a{count - 1}"}


def forced(schema: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    messages = [{"role": "user", "content": "a"}]
    return {"messages": messages, "max_tokens": 3, "tools": [tool], "tool_choice": "required"}


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 3, **fields}


SHORT_RULES = "start:r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(100_000)) + 'r100000:"b"'
SHORT_REFS = {"a": [{"$ref": f"#/a/{i + 1}"} for i in range(100_000)]}
"""Chains of 100,000 that are short enough for a body of 2 MiB."""
REPRODUCERS = {
    "rules": (COMPLETIONS, completion(guided_grammar=chain(3000))),
    "$ref by items": (COMPLETIONS, completion(guided_json=references(1200, "items"))),
    "$ref by anyOf": (COMPLETIONS, completion(guided_json=references(1100, "anyOf"))),
    "a forced tool": (CHAT, forced(references(1200, "items"))),
    "$ref by allOf": (COMPLETIONS, completion(guided_json=references(1100, "allOf"))),
    "40,000 rules": (COMPLETIONS, completion(guided_grammar=chain(40_000))),
    "40,000 $refs": (COMPLETIONS, completion(guided_json=references(40_000, "items"))),
    "100,000 short rules": (COMPLETIONS, completion(guided_grammar=SHORT_RULES)),
    "100,000 short $refs": (COMPLETIONS, completion(guided_json=SHORT_REFS)),
    "100,000 short $refs of a tool": (CHAT, forced(SHORT_REFS)),
    "rules of more than 2 MiB": (COMPLETIONS, completion(guided_grammar=chain(100_000))),
    "$refs of more than 2 MiB": (COMPLETIONS, completion(guided_json=references(100_000, "items"))),
}
MAX_REFUSAL_MS = 100


def encoded(body: Any) -> bytes:
    return json.dumps({"model": "infer-demo", **body}, separators=(",", ":")).encode()


def ask(server: Served, path: str, body: Any) -> tuple[int, dict[str, Any], float]:
    """Status, answer, and seconds since the last byte was sent."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        data = body if isinstance(body, bytes) else encoded(body)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        sent_s = time.monotonic()
        response = connection.getresponse()
        text = response.read()
        return response.status, json.loads(text), time.monotonic() - sent_s
    finally:
        connection.close()


def pids(server: Served) -> tuple[int | None, int | None]:
    """Process ids of the server (None if it has ended) and of its engine."""
    assert server.process.poll() is None, "the server has ended"
    return server.process.pid, server.engine_pid()


@contextmanager
def a_server(log: Path, *options: str, stack_bytes: int | None = None) -> Iterator[Served]:
    """Run a server; `stack_bytes` is the default stack size of its threads."""
    small = ("--max-batch-size", "8", "--no-standby", "--kv-cache-memory-bytes", str(32 << 20))
    running = served(model_server(*small, *options), log)
    with stack_limit(stack_bytes):
        server = running.__enter__()
    try:
        yield server
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with a_server(tmp_path_factory.mktemp("grammars") / "log") as server:
        yield server


# ---- A1


@frozen_heap()
def refused_deep(server: Served) -> dict[str, float]:
    """Send all reproducers; returns the milliseconds for each, the shorter of two times."""
    before = pids(server)
    took_ms: dict[str, float] = {}
    for name, (path, body) in REPRODUCERS.items():
        tries = [ask(server, path, body) for _ in range(2)]
        status, answer, _ = tries[0]
        took_ms[name] = round(1000 * min(took_s for _, _, took_s in tries))
        # A grammar larger than any request's body is not read, so its status is not 400.
        assert status == (413 if name.endswith("than 2 MiB") else 400), (name, answer)
        if "000" not in name and status == 400:  # the others are refused because of their length
            assert "nested too deeply" in answer["error"]["message"]
    assert pids(server) == before
    return took_ms


def test_chains_are_refused(server: Served) -> None:
    with counting("A1", "chains of rules and references") as counted:
        took_ms = refused_deep(server)
        counted["refused in ms"] = took_ms
        counted["at_most"] = {"slowest, ms": (max(took_ms.values()), MAX_REFUSAL_MS)}


@pytest.mark.slow
def test_chains_are_refused_on_small_stacks(tmp_path: Path) -> None:
    with (
        counting("A1", "the same where threads have stacks of 1 MiB") as counted,
        a_server(tmp_path / "log", stack_bytes=1 << 20) as server,
    ):
        counted["refused in ms"] = took_ms = refused_deep(server)
        counted["at_most"] = {"slowest, ms": (max(took_ms.values()), MAX_REFUSAL_MS)}
        deepest = completion(guided_grammar=chain(490), max_tokens=40)
        assert ask(server, COMPLETIONS, deepest)[0] == 200
        deepest = completion(guided_json=references(450, "items"), max_tokens=40)
        assert ask(server, COMPLETIONS, deepest)[0] == 200
        assert server.num_restarts() == 0


# ---- A2


def test_failing_requests_never_restart_the_engine(server: Served) -> None:
    before = pids(server)
    failing = completion(
        structured_outputs={"choice": ["yes"]}, allowed_token_ids=[5], bad_words=["yes"]
    )
    statuses: Counter[int] = Counter()
    with counting("A2", "requests in a row that fail, nobody else there") as counted:
        for _ in range(100):
            status, answer, _ = ask(server, COMPLETIONS, failing)
            statuses[status] += 1
            assert "no token is left" in answer["error"]["message"]
        assert statuses == {400: 100}
        assert server.num_restarts() == 0
        assert pids(server) == before
        counted["statuses"] = {str(status): n for status, n in statuses.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"choice": [f"{i:04d}" for i in range(2001)]}},
        {"guided_choice": [f"{i:05d}" for i in range(6000)]},
        {"guided_json": {"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}},
        {"guided_regex": "a?" * 8000 + "a" * 1400},
        {"guided_regex": "(a?){1000}" * 9},
    ],
)
def test_large_grammars_work_or_are_refused(server: Served, fields: dict[str, Any]) -> None:
    before = pids(server)
    for _ in range(2):
        status, answer, _ = ask(server, COMPLETIONS, completion(**fields))
        assert status in (200, 400), answer
    assert pids(server) == before
    assert server.num_restarts() == 0


# ---- A8


def unique_grammar(number: int) -> dict[str, Any]:
    """A grammar of about 60 KiB, in one of three forms."""
    if number % 3 == 0:
        return {"guided_choice": [f"{number} {i:05d}" for i in range(4000)]}
    if number % 3 == 1:
        names = {f"p{number}_{i}": {"type": "integer"} for i in range(1500)}
        return {"guided_json": {"type": "object", "properties": names, "required": list(names)[:9]}}
    return {"guided_grammar": f'start: "{number}" r\nr: ' + " | ".join(
        f'"{i:05d}" r' for i in range(3500)) + ' | "."'}  # fmt: skip


def gaps_beside(server: Served, seconds: float, work: Any) -> list[float]:
    """Gaps between the tokens of a stream while `work` runs in a thread for `seconds`."""
    import asyncio
    import threading

    stop = threading.Event()
    thread = threading.Thread(target=work, args=(stop,))
    gaps: list[float] = []

    async def read() -> None:
        while not stop.is_set():
            body = {"prompt": "One day", "max_tokens": 200, "ignore_eos": True, "stream": True}
            gaps.extend((await follow(server.port, body)).gaps_s)

    thread.start()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    asyncio.run(read())
    timer.cancel()
    thread.join()
    return gaps


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_unique_grammars(tmp_path: Path) -> None:
    """Memory is bounded, and another stream is not delayed."""
    num_grammars = int(os.environ.get("INFER_ATTACK_GRAMMARS", "1000"))
    with (
        counting("A8", f"{num_grammars:,} different grammars of 60 KiB") as counted,
        a_server(tmp_path / "log") as server,
    ):
        for i in range(12):
            ask(server, COMPLETIONS, completion(guided_choice=[str(i)]))

        async def memory() -> tuple[int, int]:
            stats = await server.stats()
            return stats["memory"], stats["engine_memory"]

        import asyncio

        before = asyncio.run(memory())
        statuses: Counter[str] = Counter()
        alone = gaps_beside(server, 20, lambda stop: stop.wait())
        # Made before: the reader of the stream would wait for this process to make them.
        bodies = [encoded(completion(**unique_grammar(i))) for i in range(num_grammars)]

        def send(stop: Any) -> None:
            for body in bodies:
                status, _, _ = ask(server, COMPLETIONS, body)
                statuses[str(status)] += 1
            stop.set()

        beside = gaps_beside(server, 3600, send)
        after = asyncio.run(memory())
        grown = [(is_ - was) >> 20 for is_, was in zip(after, before, strict=True)]
        counted["statuses"] = dict(statuses)
        counted["more MiB, API and engine"] = grown
        p99_ms = [round(1000 * percentile(gaps, 99), 1) for gaps in (alone, beside)]
        medians_ms = [round(1000 * percentile(gaps, 50), 1) for gaps in (alone, beside)]
        counted["its median gap in ms, alone and beside"] = medians_ms
        counted["the neighbour's P99 gap in ms, alone and beside"] = p99_ms
        counted["at_most"] = {"P99 beside": (p99_ms[1], 2 * p99_ms[0])}
        print(counted)
        assert statuses == {"200": num_grammars}
        assert grown[1] < 300
        assert grown[0] < 100
        assert server.num_restarts() == 0


# ---- generated grammars


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("stack_bytes", [None, 1 << 20], ids=["usual stacks", "stacks of 1 MiB"])
def test_ten_thousand_generated_grammars_leave_every_process(stack_bytes: int | None) -> None:
    from tests.fuzz.run import run

    stacks = "" if stack_bytes is None else ", threads with stacks of 1 MiB"
    with counting("A1", f"10,000 generated grammars{stacks}") as counted:
        found = run(["grammars"], 240, 1, max_calls=10_000, stack_bytes=stack_bytes)
        counted.update(found)
        assert found["findings"] == []
        assert (found["exits"], found["restarts"]) == (0, 0)
