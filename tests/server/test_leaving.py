"""A client that disconnects frees seat and pages at once: streaming or not, running or queued."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import struct
import time
import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.server.app import create_app
from infer.server.http.error_responses import ClientGone
from infer.server.openai.streaming import all_of, unless_gone
from infer.server.settings import ServerSettings
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    BODIES,
    COMPLETIONS,
    App,
    completion_body,
    is_idle,
    live,
    with_app,
)
from tests.support.waits import until

LONG = {"max_tokens": 400, "ignore_eos": True}


def slow_llm(**settings: Any) -> AsyncLLM:
    return make_hash_llm(step_s=0.02, **settings)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        yield sock


def post(sock: socket.socket, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock.sendall(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)


def settled(engine: AsyncLLM) -> None:
    """Wait until everything is free; assert that no further step is computed."""
    until(lambda: is_idle(engine), timeout_s=30)
    steps = engine.stats()["num_steps"]
    time.sleep(0.05)
    assert engine.stats()["num_steps"] == steps


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_while_it_runs(path: str, stream: bool, how: str) -> None:
    engine = slow_llm()
    with live(engine) as url:
        with connected(url) as sock:
            post(sock, path, BODIES[path](stream=stream, n=3, **LONG))
            until(lambda: engine.stats()["num_running"] == 3)
            if stream:
                assert sock.recv(10).startswith(b"HTTP/1.1 2")
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        settled(engine)
        assert engine.stats()["num_finished_abort"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_the_queue(stream: bool) -> None:
    engine = slow_llm(max_batch_size=1)
    with live(engine) as url, connected(url) as first:
        post(first, COMPLETIONS, completion_body(stream=True, **LONG))
        until(lambda: engine.stats()["num_running"] == 1)
        with connected(url) as second:
            post(second, COMPLETIONS, completion_body(stream=stream, **LONG))
            until(lambda: engine.stats()["num_waiting"] == 1)
        until(lambda: engine.stats()["num_waiting"] == 0)
        assert engine.stats()["num_running"] == 1
        first.close()
        settled(engine)


def test_leaving_in_the_middle_of_the_body() -> None:
    engine = slow_llm()
    with live(engine) as url:
        with connected(url) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
                b'content-type: application/json\r\ncontent-length: 1000\r\n\r\n{"prompt'
            )
            time.sleep(0.05)
        settled(engine)
        assert engine.stats()["num_submitted"] == 0


def test_a_storm_of_leaving_clients_leaves_the_others_alone() -> None:
    engine = make_hash_llm(step_s=0.001, max_batch_size=4, max_waiting_requests=100)
    body = completion_body(max_tokens=60, ignore_eos=True)

    async def use(app: App) -> None:
        alone = (await app.post(COMPLETIONS, body)).json()["choices"]
        survivors = [asyncio.ensure_future(app.post(COMPLETIONS, body)) for _ in range(4)]
        cleanup = []
        for i in range(40):
            gone = asyncio.Event()
            asyncio.get_running_loop().call_later(0.002 * (i % 20), gone.set)
            leaver = completion_body(stream=bool(i % 2), prompt=f"x{i}", **LONG)
            cleanup.append(app.post(COMPLETIONS, leaver, leave=gone))
        await asyncio.gather(*cleanup)
        for reply in await asyncio.gather(*survivors):
            assert reply.json()["choices"] == alone

    with_app(engine, use)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_handler_and_its_tasks(stream: bool) -> None:
    async def use(app: App) -> None:
        before = asyncio.all_tasks()
        gone = asyncio.Event()
        asking = asyncio.ensure_future(
            app.post(COMPLETIONS, completion_body(stream=stream, n=2, **LONG), leave=gone)
        )
        async with asyncio.timeout(60):
            while app.engine.stats()["num_running"] < 2:
                await asyncio.sleep(0.005)
        gone.set()
        reply = await asyncio.wait_for(asking, 60)
        assert asyncio.all_tasks() == before
        assert reply.status == (200 if stream else 0)
        assert not any(b"[DONE]" in write or b"error" in write for write in reply.writes)

    with_app(slow_llm(), use)


def test_a_reader_that_takes_nothing_counts_as_gone() -> None:
    engine = slow_llm()

    async def use(app: App) -> None:
        bodies = [json.dumps(completion_body(stream=True, **LONG)).encode()]
        writes: list[bytes] = []

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            return await asyncio.Future()

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.body":
                writes.append(message["body"])
                await asyncio.sleep(3600)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
        impatient = create_app(engine, ServerSettings(write_stall_s=0.05))
        await asyncio.wait_for(impatient(scope, receive, send), 60)
        assert len(writes) == 1  # no error is written to a client that does not read

    with_app(engine, use)


# ------------------------------------------------------------------------------- waiting


async def _never() -> Any:
    await asyncio.Future()


async def _value(value: int) -> int:
    return value


async def _fails() -> int:
    await asyncio.sleep(0)
    raise KeyError("x")


async def _gone() -> dict[str, str]:
    return {"type": "http.disconnect"}


def test_unless_gone() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        assert await unless_gone(_never, _value(3)) == 3
        with pytest.raises(KeyError):
            await unless_gone(_never, _fails())
        with pytest.raises(ClientGone):
            await unless_gone(_gone, _never())
        outer = asyncio.ensure_future(unless_gone(_never, _never()))
        await asyncio.sleep(0)
        outer.cancel()
        await asyncio.gather(outer, return_exceptions=True)
        assert outer.cancelled()
        assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_all_of() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        assert await all_of(map(_value, range(3))) == [0, 1, 2]
        with pytest.raises(KeyError):
            await asyncio.wait_for(all_of([_never(), _fails(), _never()]), 60)
        assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_what_a_client_has_left_is_gone_without_the_garbage_collector() -> None:
    """Under load the garbage collector runs rarely."""

    class Held:
        pass

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def main() -> None:
        held = Held()
        seen.append(weakref.ref(held))

        async def work() -> None:
            await asyncio.sleep(60)
            assert held

        with contextlib.suppress(ClientGone):
            await unless_gone(receive, work())

    seen: list[weakref.ref[Held]] = []
    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
        assert seen[0]() is None
    finally:
        gc.enable()
