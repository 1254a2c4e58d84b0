"""While one key floods a resource, two others do one of everything in twice their time and 0.5 s.

One server of the hash model (text, HTTP, sessions and checks are real); a flood for each row of
`shared_resources.LIMITED`. `tests/server/test_shared_resources.py` counts the same without a clock.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.server_process import Findings, hash_server, percentile, served
from tests.support.serving import CHAT, COMPLETIONS, chat_body, completion_body
from tests.support.shared_resources import LIMITED
from tests.support.tenants import make

NUM_ROUNDS = 10
NUM_LOOPS = 24
"""Requests that the flooder has open all the time."""
PAUSE_S = 0.02
"""Time after which the flooder sends the next one; it runs on the server's machine."""
SETTLE_S = 1.0
"""Time of a flood before others are measured."""
SESSIONS, EVENTS = "/v1/sessions", "/v1/engine/events"
COMPARISONS = "/v1/engine/comparisons"
_numbers = itertools.count(1)


class Answer(NamedTuple):
    status: int
    body: bytes


class Client:
    """Plain requests with one key, each over a connection of its own."""

    def __init__(self, port: int, headers: Mapping[str, str]) -> None:
        self._port = port
        self._headers = headers

    @asynccontextmanager
    async def sent(
        self, method: str, path: str, body: bytes = b"", missing: int = 0
    ) -> AsyncIterator[asyncio.StreamReader]:
        """A request whose body lacks `missing` bytes at its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        headers = {
            **{"host": "127.0.0.1", "connection": "close", "content-type": "application/json"},
            **{"content-length": str(len(body) + missing), **self._headers},
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items()), "", ""]
        try:
            writer.write("\r\n".join(lines).encode() + body)
            yield reader
        finally:
            writer.close()

    async def ask(self, method: str, path: str, body: Any = None) -> Answer:
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        async with self.sent(method, path, data) as reader:
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            return Answer(int(head.split(b" ", 2)[1]), answer)

    async def hold(self, method: str, path: str, body: bytes = b"", missing: int = 0) -> None:
        """Send a request and read for ever."""
        async with self.sent(method, path, body, missing) as reader:
            while await reader.read(1 << 16):
                pass
            await asyncio.Event().wait()


# ---- what two keys do


def with_schema(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"n{number}": {"type": "integer"}}}
    return chat_body(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )


async def use_session(client: Client) -> Answer:
    made = await client.ask("POST", SESSIONS, {"title": "x"})
    assert made.status == 200, made
    path = f"{SESSIONS}/{json.loads(made.body)['id']}"
    await client.ask("POST", CHAT, chat_body(session_id=path.rpartition("/")[2]))
    assert (await client.ask("GET", path)).status == 200
    return await client.ask("DELETE", path)


async def watch(client: Client) -> Answer:
    async with client.sent("GET", EVENTS) as reader:
        data = await reader.readuntil(b"event: hello")
        return Answer(int(data.split(b" ", 2)[1]), data)


EVERYTHING: Mapping[str, Callable[[Client], Awaitable[Answer]]] = {
    "health": lambda it: it.ask("GET", "/health"),
    "models": lambda it: it.ask("GET", "/v1/models"),
    "completion": lambda it: it.ask("POST", COMPLETIONS, completion_body()),
    "chat": lambda it: it.ask("POST", CHAT, chat_body()),
    "schema": lambda it: it.ask("POST", CHAT, with_schema(next(_numbers))),
    "long text": lambda it: it.ask("POST", "/tokenize", {"prompt": "word " * 8000}),
    "session": use_session,
    "requests": lambda it: it.ask("GET", "/v1/requests"),
    "viewer": watch,
}
COMPARISON: Callable[[Client], Awaitable[Answer]] = lambda it: it.ask(  # noqa: E731
    "POST", COMPARISONS, {"num_requests": 1, "seats": 1}
)


async def times_of(client: Client, uses: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for name, use in uses.items():
            began_s = time.monotonic()
            answer = await use(client)
            found[name].append(time.monotonic() - began_s)
            assert answer.status == 200, (name, answer)
    return found


async def p99_of(clients: list[Client], uses: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Seconds for each use, of two keys at the same time."""
    both = await asyncio.gather(*[times_of(client, uses, rounds) for client in clients])
    return {name: percentile([s for found in both for s in found[name]], 99) for name in uses}


# ---- what one key does


def hard_schema() -> dict[str, Any]:
    schema = {"type": "integer", "multipleOf": 20_011 + 2 * next(_numbers)}
    return chat_body(
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )


def large_grammar() -> dict[str, Any]:
    """A grammar of its own that takes some 10 MiB when it is compiled."""
    number = {"type": "integer", "multipleOf": 20_011 + 2 * next(_numbers)}
    parts = [number, {"type": "number"}] * 40
    return completion_body(guided_json={"type": "array", "prefixItems": parts, "items": False})


LONG_JSON = json.dumps({"prompt": "x", "ignored": [0] * 300_000}).encode()
LONG_TEXT = json.dumps({"prompt": "some words " * 90_000}).encode()
FLOODS: Mapping[str, Callable[[Client], Awaitable[object]]] = {
    "open requests": lambda it: it.hold("POST", COMPLETIONS, b"{", missing=9),
    "requests and tokens a minute": lambda it: it.ask("POST", "/tokenize", {"prompt": "x"}),
    "bytes of bodies that are read": lambda it: it.hold(
        "POST", COMPLETIONS, b" " * 2_000_000, missing=9
    ),
    "parser of long bodies": lambda it: it.ask("POST", "/tokenize", LONG_JSON),
    "threads for texts": lambda it: it.ask("POST", "/tokenize", LONG_TEXT),
    "processes for untrusted text": lambda it: it.ask("POST", CHAT, hard_schema()),
    "places in the queue of an engine": lambda it: it.ask(
        "POST", COMPLETIONS, completion_body(max_tokens=200)
    ),
    "seats and pages of an engine": lambda it: it.ask(
        "POST", COMPLETIONS, completion_body(prompt="y" * 400, max_tokens=500)
    ),
    "memory of compiled grammars": lambda it: it.ask("POST", COMPLETIONS, large_grammar()),
    "threads of the sessions' database": lambda it: it.ask("GET", SESSIONS),
    "stored sessions": lambda it: it.ask("POST", SESSIONS, {"title": "x"}),
    "viewers of an engine": lambda it: it.hold("GET", EVENTS),
    "comparisons of the modes": COMPARISON,
    "traces of requests that have ended": lambda it: it.ask(
        "POST", COMPLETIONS, completion_body(max_tokens=1)
    ),
}


@asynccontextmanager
async def flooding(
    client: Client, use: Callable[[Client], Awaitable[object]]
) -> AsyncIterator[None]:
    async def again() -> None:
        while True:
            with suppress(OSError, IndexError):  # turned away
                await use(client)
            await asyncio.sleep(PAUSE_S)

    tasks = [asyncio.ensure_future(again()) for _ in range(NUM_LOOPS)]
    await asyncio.sleep(SETTLE_S)
    yield
    assert not any(task.done() for task in tasks), [task.result() for task in tasks if task.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[list[Client]]:
    """The flooder and two others."""
    file = tmp_path / "keys.json"
    headers = [make(file, name, admin=name != "a") for name in "abc"]
    headers[0] = make(file, "admin", admin=True)  # who may flood with comparisons
    settings = {"api_keys": str(file), "sessions": f"sqlite:///{tmp_path}/s.db"}
    server = hash_server(max_batch_size=8, step_s=0.001, **settings)
    with served(server, tmp_path / "log") as found:
        yield [Client(int(found.url.rpartition(":")[2]), each) for each in headers]


def test_each_resource_is_flooded() -> None:
    needs_others = {"questions to other fronts", "calls of MCP servers", "answers that are kept"}
    assert {*FLOODS} | needs_others == {row.name for row in LIMITED}


@pytest.mark.timing
@pytest.mark.timeout(600)
def test_two_keys_are_served_while_another_floods(clients: list[Client]) -> None:
    async def main() -> None:
        flooder, *others = clients
        await p99_of(others, EVERYTHING, 2)  # processes and caches are warm
        alone = await p99_of(others, EVERYTHING, NUM_ROUNDS)
        alone |= await p99_of(others, {"comparison": COMPARISON}, 1)
        late = []
        for name, use in FLOODS.items():
            async with flooding(flooder, use):
                found = await p99_of(others, EVERYTHING, NUM_ROUNDS)
                if name == "comparisons of the modes":
                    found |= await p99_of(others, {"comparison": COMPARISON}, 1)
            worst = max(found, key=lambda it: found[it] - 2 * alone[it])
            figures = {it: (round(alone[it], 3), round(found[it], 3)) for it in found}
            print(f"{name}: {figures}")
            Findings().note("A6", "others beside a flood", name, **{worst: round(found[worst], 3)})
            late += [(name, it) for it in found if found[it] > 2 * alone[it] + 0.5]
        assert late == []

    asyncio.run(main())
