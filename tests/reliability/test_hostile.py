"""Scorecard 16, 18, 32: invalid bodies, huge sizes, unknown paths. The answers are 4xx in OpenAI's
error format, and the server works as before."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infer.engine.client.async_llm import AsyncLLM
from infer.server.openai.chat import ChatBody
from infer.server.openai.completions import CompletionBody
from infer.server.openai.schema import DetokenizeBody, TokenizeBody
from tests.support.doubles import make_hash_llm
from tests.support.engines import ENGINES
from tests.support.server_process import Findings, Served, follow, model_server, percentile, served
from tests.support.serving import App, chat_body, code_at, completion_body, serving

# ---- 16: generated bodies

ROUTES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "/v1/completions": (CompletionBody, completion_body(max_tokens=2)),
    "/v1/chat/completions": (ChatBody, chat_body(max_tokens=2)),
    "/v1/chat/completions/render": (ChatBody, chat_body()),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, 0.0, -0.0, 1e-5, 1e308, 1.0000001]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["", "\x00", "a\x00b", "\u2028", "😀", "<|endoftext|>", "x" * 300]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, Any]:
    """A valid body of a route with one to three fields changed, added or removed."""
    path = draw(st.sampled_from(list(ROUTES)))
    model, valid = ROUTES[path]
    body = dict(valid)
    names = [*model.model_fields, *model.ignored]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(names) | st.text(max_size=10))
        if draw(st.booleans()) or name not in body:
            body[name] = draw(VALUES)
        else:
            del body[name]
    return path, draw(VALUES) if draw(st.integers(0, 20)) == 0 else body


def generate(examples: int) -> None:
    """Each example sends several bodies at once to one server, which must be idle at the end."""
    statuses: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(mutated(), min_size=5, max_size=5))
    def check(cases: list[tuple[str, Any]]) -> None:
        async def main() -> None:
            engine = make_hash_llm(max_seq_len=128)
            async with serving(engine) as app:
                async with asyncio.timeout(20):
                    for path, body in cases:
                        await one(app, path, body)
                await app.idle()

        asyncio.run(main())

    async def one(app: App, path: str, body: Any) -> None:
        reply = await app.post(path, json.dumps(body).encode())
        statuses[f"{reply.status // 100}xx"] += 1
        if reply.status == 200:
            assert b"error" not in reply.body[:8]
            return
        error = reply.error()  # checks the shape
        text = reply.body.decode("ascii")
        if reply.status == 504:  # its own deadline, which may be a millisecond
            assert "timeout" in body
            assert error["code"] == "deadline_exceeded"
            return
        assert 400 <= reply.status < 500, (path, body, reply)
        assert error["type"] == "invalid_request_error"
        assert not any(leak in text for leak in ("Traceback", " at 0x", "/infer/", ".py"))

    check()
    load = f"5 routes, {sum(statuses.values())} bodies by hypothesis, NUL bytes included"
    Findings().note(16, "generated bodies", load, **statuses, server_errors=0)


def test_generated_bodies() -> None:
    generate(40)


@pytest.mark.slow
def test_more_generated_bodies() -> None:
    generate(3000)


# ---- 18: sizes

BOMBS = [
    ("2 MB less one", b'{"prompt": "' + b"x" * (2**21 - 15) + b'"}', {}),
    ("2 MB and one", b'{"prompt": "' + b"x" * 2**21 + b'"}', {}),
    ("10 MB", b'{"prompt": "' + b"x" * 10_000_000 + b'"}', {}),
    ("a million token ids", json.dumps({"prompt": [7] * 600_000}).encode(), {}),
    ("100,000 messages", json.dumps({"messages": [{"role": "user"}] * 49_000}).encode(), {}),
    ("2 MB of digits", b'{"seed": ' + b"9" * 2_000_000 + b"}", {}),
    ("a million strings", json.dumps({"stop": [""] * 500_000}).encode(), {}),
    ("100,000 levels", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}),
    ("a gzip bomb", gzip.compress(b" " * 50_000_000), {"content-encoding": "gzip"}),
    ("chunked without end", b"", {"transfer-encoding": "chunked"}),
]


async def throw(server: Served, parallel: int) -> dict[str, Any]:
    good = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "temperature": 0}
    (calm,) = await asyncio.gather(follow(server.port, good))
    before = await server.stats()
    statuses: Counter[int] = Counter()
    lags, highest, over = [], 0, False

    async def watch() -> None:
        nonlocal highest
        while not over:
            stats = await server.stats()
            lags.append(stats["lag_s"])
            highest = max(highest, stats["memory"])
            await asyncio.sleep(0.05)

    async def one(i: int, may_be_full: bool = False) -> None:
        name, data, headers = BOMBS[i % len(BOMBS)]
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        path = "/v1/chat/completions" if b"messages" in data[:20] else "/v1/completions"
        if not data:
            headers = {"transfer-encoding": "chunked"}
        else:
            headers = {**headers, "content-length": str(len(data))}
        lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
        lines += "content-type: application/json\r\n"
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n"
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n\r\n"))
        writer.write(head.encode() + data)
        try:
            while not data and not answer.done():  # up to a gigabyte
                writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
                await writer.drain()
        except OSError:
            pass
        status = int((await answer).split()[1])
        statuses[status] += 1
        assert status in (400, 413, 415, 422) or (may_be_full and status == 503), (name, status)
        writer.close()

    watching = asyncio.create_task(watch())
    streams = [asyncio.create_task(follow(server.port, good)) for _ in range(4)]
    # Together they are more than all bodies may take, so some may be turned away.
    await asyncio.gather(*(one(i, may_be_full=True) for i in range(parallel)))
    for i in range(len(BOMBS)):
        await one(i)
    over = True
    await watching
    assert all(heard.answer == calm.answer for heard in await asyncio.gather(*streams))
    await server.is_back(before, 20.0)  # the last connections linger for 5 s
    return {
        "statuses": dict(statuses),
        "streams beside, all exact": len(streams),
        "event loop absent, p99 and longest [ms]": tuple(
            round(1000 * percentile(lags, q), 1) for q in (99, 100)
        ),
        "memory above before [MB]": round((highest - before["memory"]) / 1e6, 1),
    }


@pytest.mark.slow
def test_size_bombs(tmp_path: Path) -> None:
    with served(model_server(), tmp_path / "log") as server:
        counted = asyncio.run(throw(server, 50))
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
    Findings().note(
        18, "size bombs", f"50 in parallel, {len(BOMBS)} kinds, 4 streams beside", **counted
    )
    assert counted["event loop absent, p99 and longest [ms]"][1] < 100
    assert counted["memory above before [MB]"] < 200


# ---- 32: routes

OPEN = {
    *(("POST", path) for path in ROUTES),
    *(("POST", f"/v1/responses{end}") for end in ("", "/input_tokens")),
    *(("POST", f"/v1/messages{end}") for end in ("", "/count_tokens")),
    *(("GET", f"/health{end}") for end in ("", "/live", "/ready")),
    *(("GET", path) for path in ("/", "/v1/models", "/v1/models/hash-model", "/tokenizer_info")),
    *(("GET", path) for path in ("/openapi.json", "/v1/engine/events")),
    *(("GET", path) for path in ("/metrics", "/stats", "/v1/requests", "/v1/sessions")),
    *((method, "/v1/requests/{id}") for method in ("GET", "DELETE")),
    *((method, "/v1/sessions/{id}") for method in ("GET", "PATCH", "DELETE")),
    *(("POST", path) for path in ("/v1/requests/{id}/cancel", "/v1/sessions/{id}/fork")),
    *(("POST", path) for path in ("/v1/sessions", "/v1/engine/comparisons")),
    *(("GET", "/v1/mcp/servers"), ("POST", "/v1/mcp/call")),
    *(("POST", f"/v1/models/{action}") for action in ("load", "unload")),
    ("GET", "/v1/requests/{id}/events"),
    *((method, "/v1/responses/{id:response}") for method in ("GET", "DELETE")),
    ("GET", "/v1/responses/{id:response}/input_items"),
    ("POST", "/v1/responses/{id:response}/cancel"),
}
NAMES = ("/v1/models/", "/v1/requests/", "/v1/sessions/", "/v1/responses/")
"""Paths below which any name is possible."""
TRICKS = (
    *("{}/-", "/-{}", "{}%2f", "{}%00", "{}/..", "/x/..{}", "{};x", "{}%20", "/./{}", "{}/%2e%2e"),
    *("{}.json", "{}\\", "http://other{}", "{}@evil"),
)
PRIVATE = (
    "/docs",
    "/metrics/..",
    "/debug/ledger",
    "/test/stats",
    "/.env",
    "/admin",
)


FOREIGN = (403, "host_not_allowed")
OWN_HOSTS = (
    *(None, "127.0.0.1", "127.8.9.1:8000", "LocalHost", "localhost.:8000"),
    *("[::1]", "[::1]:8000", "[::ffff:127.0.0.1]"),
)
FOREIGN_HOSTS = (
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("user@127.0.0.1", "127.0.0.1@evil.example", "x/health?", "", "0.0.0.0", "192.168.0.1"),
    *("127.0.0.1:80:80", "localhost..", "[::1", "[fe80::1]", "2130706433", "127.0.0.1 evil"),
)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_every_route_and_no_other(make_engine: Callable[..., AsyncLLM]) -> None:
    """Routes answer to their method only, and similar paths are refused."""
    statuses: Counter[int] = Counter()

    async def main() -> None:
        async with serving(make_engine()) as app:
            known = {route.path for route in app.app.routes}  # type: ignore[attr-defined]
            sample = {path.replace("{name:model}", "hash-model") for path in known}
            assert sample == {path for _, path in OPEN}, "a route that this test does not know"
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"):
                for path in sample:
                    if (method, path) in OPEN or path.startswith("/v1/models/"):
                        continue
                    reply = await app.send(method, path)
                    statuses[reply.status] += 1
                    assert reply.status == 405, (method, path, reply.status)
                    assert reply.error()["code"] == code_at(path, "method_not_allowed")
            tricky = [trick.format(path) for path in sample - {"/"} for trick in TRICKS]
            for path in (*tricky, *PRIVATE):
                if path in sample or path.startswith(NAMES):
                    continue
                for name in ("localhost", "x/health?"):
                    headers = {"host": name, "content-type": "application/json"}
                    reply = await app.send("GET", path, headers=headers)
                    statuses[reply.status] += 1
                    expected = (404, "not_found") if name == "localhost" else FOREIGN
                    status, code = expected
                    assert (reply.status, reply.error()["code"]) == (status, code_at(path, code))
            gone = asyncio.Event()  # a stream ends at once
            gone.set()
            for method, path in OPEN:
                for host in (*OWN_HOSTS, *FOREIGN_HOSTS):
                    headers = {} if host is None else {"host": host}
                    reply = await app.send(method, path, headers=headers, leave=gone)
                    is_foreign = host in FOREIGN_HOSTS
                    assert (reply.status == 403) is is_foreign, (method, path, host)
                    if is_foreign:
                        statuses[reply.status] += 1
                        assert reply.error()["code"] == code_at(path, "host_not_allowed")
                        assert "--allowed-hosts" in reply.error()["message"]
            await app.idle()

    asyncio.run(main())
    num_hosts = len(OWN_HOSTS) + len(FOREIGN_HOSTS)
    load = f"{len(OPEN)} routes, 8 methods, {len(TRICKS)} path tricks, {num_hosts} Hosts"
    Findings().note(32, "route sweep", load, **{str(k): v for k, v in statuses.items()})
