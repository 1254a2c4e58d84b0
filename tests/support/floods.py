"""Floods of what keys share: one key takes all of a resource that it gets, while others use it."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.requests import Request

from infer.errors import RequestError
from infer.server.comparisons import ComparisonBody, Comparisons
from infer.server.fronts import FrontQueries, SeveralFronts
from infer.server.http.body_budget import MAX_BYTES_OF_KEY, UNCOUNTED_BYTES, BodyBudget
from infer.server.http.context import RequestContext
from infer.server.http.json_body import MAX_BODY_BYTES
from infer.server.offload import Offload
from infer.server.sessions.database_threads import DatabaseThreads
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.tenancy.keys import Key, KeyLimits
from infer.server.tenancy.limits import Tenant
from infer.server.tenancy.open_grammars import OpenGrammars
from infer.server.viewers import EngineViewers
from infer.text.untrusted.workers import Answer, Steps, UntrustedWorkers
from infer.types import Request as EngineRequest
from infer.types.grammar import Grammar
from infer.types.sampling import Sampling
from infer.types.server_limits import SERVER_LIMITS, ServerLimits
from tests.support.doubles import held_runner, make_hash_llm
from tests.support.mcp_servers import Asked, Said, result, scripted_mcp, text
from tests.support.serving import COMPLETIONS, App, completion_body, serving
from tests.support.tenants import make

FULL = {429, 503}
"""Statuses of a use that was refused."""


@dataclass
class Flood:
    """`FLOODS` has one for each row of `shared_resources.LIMITED`, by the row's name. The uses of
    keys whose name begins with `a` (the flooders) do not end before `Flood.release`, where the
    resource is one that is held; those of other keys end at once. A use is one request, or what a
    request does."""

    use: Callable[[str], Awaitable[int]]
    """One use by a key; its status."""
    num_uses: int
    """How often the flooder tries."""
    num_allowed: int
    """How often one key may have it at the same time."""
    release: Callable[[], object] = lambda: None
    turns: int = 0
    """The most of the flooder's uses that may end before those of two others; 0 with resources
    that are held: the others get theirs while the flooder keeps all of its own."""
    num_keys: int = 0
    """Number of flooding keys who could take all, if a key did not always get one; 0: they could
    not, or what they have ends by itself."""
    has_turns: bool = False
    """Whether others then wait in turn for the end of a use, and are not refused."""
    check: Callable[[], Awaitable[object]] | None = None
    """Looks at what is left to the others afterwards."""


def is_flooder(key: str) -> bool:
    return key.startswith("a")


async def status_of(use: Awaitable[object]) -> int:
    """The status of a use of a part of the server."""
    try:
        await use
    except RequestError as error:
        return error.status
    return 200


def http_of(key: str, body: bytes = b"") -> Request:
    """A request of a key without limits of its own, to be worked on by an `Offload`."""
    limits = KeyLimits(max_concurrent=10_000)
    pieces = [body]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": pieces.pop(), "more_body": False}

    headers = [(b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    RequestContext.of(scope).tenant = Tenant(Key(id=key, name=key, sha256="", limits=limits))
    return Request(scope, receive)


class Clients:
    """Keys of an app with the limits that they were made with, and their requests."""

    def __init__(self, app: App, headers: Mapping[str, Mapping[str, str]]) -> None:
        self._app = app
        self._headers = headers

    async def post(self, key: str, path: str, body: Any) -> int:
        return (await self._app.post(path, body, headers=self._headers[key])).status

    async def keep(self, key: str) -> tuple[int, str]:
        """Let an answer be kept; (status, name of the request)."""
        headers = {**self._headers[key], "x-keep-answer": "true"}
        body = completion_body(stream=True, max_tokens=60, stream_format="events")
        reply = await self._app.post(COMPLETIONS, body, headers=headers)
        return reply.status, reply.headers["x-request-id"]

    async def is_kept(self, key: str, name: str) -> bool:
        """Whether it still is."""
        reply = await self._app.get(f"/v1/requests/{name}/events", **self._headers[key])
        return reply.status == 200

    async def num_listed(self, key: str) -> int:
        reply = await self._app.get("/v1/requests", **self._headers[key])
        return len(reply.json()["data"])


@asynccontextmanager
async def clients(
    folder: Path, engine: dict[str, Any], flooder: dict[str, Any], **settings: Any
) -> AsyncIterator[Clients]:
    """An app with the keys a and a0 to a3 (flooders, with these limits), b and c."""
    file = folder / "keys.json"
    names = ("a", "a0", "a1", "a2", "a3", "b", "c")
    headers = {key: make(file, key, **(flooder if is_flooder(key) else {})) for key in names}
    async with serving(make_hash_llm(**engine), api_keys=str(file), **settings) as app:
        yield Clients(app, headers)


@asynccontextmanager
async def open_requests(folder: Path) -> AsyncIterator[Flood]:
    runner, _, opened = held_runner()
    engine = {"runner": runner, "max_batch_size": 64}
    async with clients(folder, engine, {"max_concurrent": 6}) as keys:

        def use(key: str) -> Awaitable[int]:
            if is_flooder(key):
                return keys.post(key, COMPLETIONS, completion_body())
            return keys.post(key, "/tokenize", {"prompt": "x"})

        yield Flood(use, 10, 6, opened.set)


@asynccontextmanager
async def requests_a_minute(folder: Path) -> AsyncIterator[Flood]:
    async with clients(folder, {}, {"requests_per_minute": 5}) as keys:
        yield Flood(lambda key: keys.post(key, "/tokenize", {"prompt": "x"}), 20, 5)


@asynccontextmanager
async def bytes_of_bodies(_: Path) -> AsyncIterator[Flood]:
    counted = MAX_BODY_BYTES - 64 * 1024 - UNCOUNTED_BYTES
    allowed = MAX_BYTES_OF_KEY // counted
    # Two keys leave less than a further body takes.
    budget, opened = BodyBudget(2 * allowed * counted + 50_000), asyncio.Event()

    async def send(key: str) -> None:
        with budget.body(key) as grow_to:
            for length in range(0, MAX_BODY_BYTES, 64 * 1024) if is_flooder(key) else [100_000]:
                grow_to(length)
            if is_flooder(key):
                await opened.wait()

    yield Flood(lambda key: status_of(send(key)), 16, allowed, opened.set, num_keys=3)


@asynccontextmanager
async def parser(_: Path) -> AsyncIterator[Flood]:
    offload = Offload()
    long, short = (b'{"a": [%s0]}' % (b"0," * count) for count in (200_000, 20_000))
    try:
        yield Flood(
            lambda key: status_of(
                offload.read_object(http_of(key, long if is_flooder(key) else short))
            ),
            *(40, SERVER_LIMITS.max_long_bodies_of_key),
            turns=6,
        )
    finally:
        offload.close()


@asynccontextmanager
async def text_threads(_: Path) -> AsyncIterator[Flood]:
    offload, opened = Offload(), threading.Event()

    def work(key: str) -> None:
        assert not is_flooder(key) or opened.wait(60)

    try:
        yield Flood(
            lambda key: status_of(offload.run(http_of(key), work, key, heavy=True)),
            *(40, SERVER_LIMITS.max_long_bodies_of_key, opened.set),
            num_keys=8,
            has_turns=True,
        )
    finally:
        opened.set()
        offload.close()


@asynccontextmanager
async def untrusted_text(_: Path) -> AsyncIterator[Flood]:
    offload, opened = Offload(), threading.Event()
    workers = UntrustedWorkers("template", lambda: "{{ messages }}")

    def recalled(key: str) -> Answer:
        assert not is_flooder(key) or opened.wait(60)
        return Answer.of(key)

    def steps(key: str) -> Steps[None]:
        yield workers.job(key, 1, recall=lambda: recalled(key))

    try:
        yield Flood(
            lambda key: status_of(offload.run_steps(http_of(key), steps, key)),
            *(200, SERVER_LIMITS.max_jobs_of_key, opened.set),
            num_keys=10,
            has_turns=True,
        )
    finally:
        opened.set()
        workers.close()
        offload.close()


@asynccontextmanager
async def queue_of_engine(folder: Path) -> AsyncIterator[Flood]:
    runner, _, opened = held_runner()
    engine = {"runner": runner, "max_batch_size": 2, "max_waiting_requests": 40}
    async with clients(folder, engine, {"max_concurrent": 64, "max_queued": 20}) as keys:
        yield Flood(
            lambda key: keys.post(key, COMPLETIONS, completion_body()),
            *(40, 22, opened.set),
            turns=4,
            num_keys=4,
        )


@asynccontextmanager
async def seats_and_pages(folder: Path) -> AsyncIterator[Flood]:
    runner, _, opened = held_runner()
    engine = {"runner": runner, "max_batch_size": 4, "num_pages": 80}
    async with clients(folder, engine, {"max_concurrent": 64}) as keys:

        def use(key: str) -> Awaitable[int]:
            max_tokens = 120 if is_flooder(key) else 8
            return keys.post(key, COMPLETIONS, completion_body(max_tokens=max_tokens))

        yield Flood(use, 20, 20, opened.set, turns=4)


@asynccontextmanager
async def grammars_in_use(_: Path) -> AsyncIterator[Flood]:
    """Each request has a grammar of its own that takes 32 MiB when it is compiled."""
    grammars, opened, numbers = OpenGrammars(SERVER_LIMITS), asyncio.Event(), itertools.count()

    async def use(key: str) -> None:
        sampling = Sampling(grammar=Grammar.regex(f"{next(numbers)}"))
        request = EngineRequest(
            "id", (1,), sampling, seed=1, max_tokens=1, grammar_bytes=(32 << 20) + 5
        )
        with ExitStack() as cleanup:
            grammars.enter(key, [request, request], cleanup)
            if is_flooder(key):
                await opened.wait()

    most = SERVER_LIMITS.max_grammar_mib_of_key // 32
    yield Flood(lambda key: status_of(use(key)), 10, most, opened.set, num_keys=4)


@asynccontextmanager
async def database(_: Path) -> AsyncIterator[Flood]:
    threads, opened = DatabaseThreads(), threading.Event()

    def work(key: str) -> None:
        assert not is_flooder(key) or opened.wait(60)

    try:
        yield Flood(
            lambda key: status_of(threads.call(key, work, key)),
            *(200, SERVER_LIMITS.max_database_calls_of_key, opened.set),
            num_keys=8,
            has_turns=True,
        )
    finally:
        opened.set()
        threads.close()


@asynccontextmanager
async def stored_sessions(folder: Path) -> AsyncIterator[Flood]:
    async with clients(folder, {}, {}, sessions=f"sqlite:///{folder}/s.db", max_sessions=3) as keys:
        yield Flood(lambda key: keys.post(key, "/v1/sessions", {}), 8, 3)


@asynccontextmanager
async def viewers(_: Path) -> AsyncIterator[Flood]:
    engine = make_hash_llm()
    async with serving(engine) as app:
        viewers = EngineViewers(engine, app.app.state.traces)
        watching = []

        async def watch(key: str) -> None:
            watching.append(viewers.join(key, key))

        yield Flood(lambda key: status_of(watch(key)), 10, 4)
        for viewer in watching:
            viewers.leave(viewer)


@asynccontextmanager
async def comparisons(folder: Path) -> AsyncIterator[Flood]:
    end = folder / "end"
    code = f"import os, sys, time\nwhile sys.argv[3] == '128' and not os.path.exists({str(end)!r}):"
    command = (sys.executable, "-c", f"{code}\n    time.sleep(0.01)")
    async with make_hash_llm() as engine:
        comparisons = Comparisons(engine, command=command)

        def use(key: str) -> Awaitable[int]:
            body = ComparisonBody(num_requests=128 if is_flooder(key) else 1)
            return status_of(comparisons.run(body, key))

        yield Flood(use, 4, 1, end.touch)


@asynccontextmanager
async def mcp_calls(folder: Path) -> AsyncIterator[Flood]:
    opened = asyncio.Event()
    async with scripted_mcp() as server:

        async def held(asked: Asked) -> Said:
            if "a" in asked.arguments.get("key", ""):
                await opened.wait()
            return result(text("done"))

        server.tool = held
        limits = ServerLimits(max_mcp_calls=10)
        settings = {"mcp_server": f"docs={server.url}", "limits": limits}
        async with clients(folder, {}, {}, **settings) as keys:

            def use(key: str) -> Awaitable[int]:
                body = {"server": "docs", "tool": "find", "arguments": {"key": key}}
                return keys.post(key, "/v1/mcp/call", body)

            yield Flood(use, 10, 4, opened.set, num_keys=4)


@asynccontextmanager
async def questions(_: Path) -> AsyncIterator[Flood]:
    opened, numbers = asyncio.Event(), itertools.count()

    class Silent:
        async def ask(self, question: bytes, timeout_s: float) -> Mapping[str, bytes | None]:
            if b"a-flooder" in question:
                await opened.wait()
            return {}

    async def carry(said: bytes) -> bytes:
        raise AssertionError("nobody asks for limits")

    async with serving(make_hash_llm()) as app:
        state = app.app.state
        fronts = SeveralFronts("front-0a", FrontLimits("front-0a", 2, carry), Silent())
        queries = FrontQueries(state.served, fronts)

        def use(key: str) -> Awaitable[int]:
            owner = f"a-flooder-{key}" if is_flooder(key) else key
            scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/"}
            scope["headers"] = []
            scope["path_params"] = {"id": f"name-{next(numbers)}"}
            own = Key(id=owner, name=owner, sha256="", limits=KeyLimits())
            RequestContext.of(scope).tenant = Tenant(own)
            return status_of(queries.request(Request(scope)))

        yield Flood(use, 10, 4, opened.set, num_keys=12)


@asynccontextmanager
async def traces(folder: Path) -> AsyncIterator[Flood]:
    limits = ServerLimits(max_traces=12, max_traces_of_owner=4)
    async with clients(folder, {}, {}, limits=limits) as keys:

        def use(key: str) -> Awaitable[int]:
            return keys.post(key, COMPLETIONS, completion_body())

        async def check() -> None:
            assert [await keys.num_listed(key) for key in "abc"] == [4, 2, 2]

        for key in "bc":
            assert await use(key) == 200
        yield Flood(use, 30, 30, turns=30, check=check)  # it is looked at what is kept


@asynccontextmanager
async def kept_answers(folder: Path) -> AsyncIterator[Flood]:
    limits = ServerLimits(max_kept_bytes=300_000, max_kept_bytes_of_key=90_000)
    async with clients(folder, {}, {}, limits=limits) as keys:
        made: dict[str, list[str]] = {}

        async def use(key: str) -> int:
            status, name = await keys.keep(key)
            made.setdefault(key, []).append(name)
            return status

        async def check() -> None:
            for key in "bc":
                assert [await keys.is_kept(key, name) for name in made[key]] == [True, True]
            kept = [await keys.is_kept("a", name) for name in made["a"]]
            assert 0 < sum(kept) < len(kept)

        for key in "bc":
            assert await use(key) == 200
        yield Flood(use, 30, 30, turns=30, check=check)  # it is looked at what is kept


FLOODS: Mapping[str, Callable[[Path], AbstractAsyncContextManager[Flood]]] = {
    "open requests": open_requests,
    "requests and tokens a minute": requests_a_minute,
    "bytes of bodies that are read": bytes_of_bodies,
    "parser of long bodies": parser,
    "threads for texts": text_threads,
    "processes for untrusted text": untrusted_text,
    "places in the queue of an engine": queue_of_engine,
    "seats and pages of an engine": seats_and_pages,
    "memory of compiled grammars": grammars_in_use,
    "threads of the sessions' database": database,
    "stored sessions": stored_sessions,
    "viewers of an engine": viewers,
    "comparisons of the modes": comparisons,
    "calls of MCP servers": mcp_calls,
    "questions to other fronts": questions,
    "traces of requests that have ended": traces,
    "answers that are kept": kept_answers,
}
