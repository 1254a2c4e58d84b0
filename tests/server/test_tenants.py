"""Keys: authentication, limits of a key, and isolation between keys."""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from infer.cli.main import app as command
from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import ConfigError, RequestError
from infer.requests.state import RequestState
from infer.server import serve
from infer.server.http.context import RequestContext
from infer.server.observe.request_trace import ChoiceTrace, RequestTrace
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Key, KeyLimits, Keys
from infer.server.tenancy.limits import OPEN_PATHS, Tenant
from infer.server.tenancy.local_limits import LocalLimits
from infer.server.tenancy.token_bucket import Bucket
from infer.types import Request, SamplingParams
from infer.types.server_limits import ServerLimits
from tests.support.checkpoints import END_ID
from tests.support.command_line import CliRunner
from tests.support.doubles import held_runner, make_hash_llm
from tests.support.engines import ENGINES
from tests.support.server_process import Findings
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    all_open,
    code_at,
    completion_body,
    scripted,
    spelled,
    with_app,
)
from tests.support.tenants import (
    cached,
    make,
)

LONG = "a long long way to go " * 6


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.mark.parametrize("make_engine", ENGINES)
def test_every_route_needs_a_key(file: Path, make_engine: Callable[..., AsyncLLM]) -> None:
    key = make(file, "a")
    wrong = [{}, {"authorization": "Bearer no"}, {"authorization": "Bearer "}]
    wrong += [{"authorization": key["authorization"][:-1]}, {"authorization": "Basic x"}]
    wrong += [{"host": "x/health/live?"}, {"x-api-key": key["authorization"]}]

    async def use(app: App) -> None:
        for route in app.app.routes:
            assert isinstance(route, Route)
            for method in route.methods or ():
                path = route.path.replace("{name:path}", "x").replace("{id}", "x")
                for headers in wrong:
                    reply = await app.send(method, path, headers=headers)
                    assert (reply.status == 401) is (path not in OPEN_PATHS), path
                    if reply.status == 401 and method != "HEAD":
                        error, sent = reply.error(), "host" not in headers and bool(headers)
                        assert error["code"] == code_at(path, "invalid_api_key")
                        # LiteLLM recognises this text and takes any other for a bad request.
                        known = "Incorrect API key provided"
                        assert error["message"].startswith(known) is sent
        for path in ("//v1/models", "/health/live/../../v1/models", "/v1/models?/health"):
            assert (await app.get(path)).status == 401
        assert (await app.get("//health/live")).status == 200  # the same path, which is open
        assert (await app.get("/v1/models", **key)).status == 200
        bare = {"x-api-key": key["authorization"].removeprefix("Bearer ")}
        assert (await app.get("/v1/models", **bare)).status == 200
        assert (await app.get("/v1/models", **bare, authorization="Bearer no")).status == 401
        assert (await app.get("/v1/models", **key, **{"x-api-key": "no"})).status == 200
        for path in ("/metrics", "/stats"):
            assert (await app.get(path, **key)).status == 403
            assert (await app.get(path, **admin)).status == 200
        Keys(file).revoke("a")
        assert (await app.get("/v1/models", **key)).status == 401
        file.write_text("{", encoding="utf-8")
        assert (await app.get("/v1/models", **admin)).status == 503

    admin = make(file, "root", admin=True)
    with_app(make_engine(), use, api_keys=str(file))


@pytest.mark.parametrize("make_engine", ENGINES)
def test_nothing_crosses_from_one_key_to_another(
    file: Path, make_engine: Callable[..., AsyncLLM]
) -> None:
    keys = {name: make(file, name) for name in "ab"}
    friends = {name: make(file, name, share_cache="docs") for name in "cd"}
    admin = make(file, "root", admin=True)

    async def use(app: App) -> None:
        def post(headers: dict[str, str]) -> Any:
            return app.post(COMPLETIONS, completion_body(prompt=LONG), headers=headers)

        first = await post(keys["a"])
        assert [cached(first), cached(await post(keys["a"]))] == [0, 132]
        assert cached(await post(keys["b"])) == 0
        assert [cached(await post(friends["c"])), cached(await post(friends["d"]))] == [0, 132]
        name = first.json()["id"]
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            path = f"/v1/requests/{name}{tail}"
            assert (await app.send(method, path, headers=keys["b"])).status == 404
            assert (await app.send(method, path, headers=keys["a"])).status == 200
            assert (await app.send(method, path, headers=admin)).status == 200
        listed = (await app.get("/v1/requests", **keys["b"])).json()["data"]
        assert len(listed) == 1
        assert name not in json.dumps(listed)
        assert len((await app.get("/v1/requests", **admin)).json()["data"]) == 5
        told = (await app.get("/stats", **admin)).json()["keys"]
        assert told["a"]["cached_tokens"] == 132
        assert told["b"]["prompt_tokens"] == told["a"]["prompt_tokens"] / 2
        shown = (await app.get("/metrics", **admin)).body.decode()
        assert 'infer:key_generation_tokens_total{key="a",model_name="hash-model"} 16' in shown

    with_app(make_engine(), use, api_keys=str(file))


def test_what_a_key_has_used_outlives_the_server(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, admin = {name: make(file, name) for name in "ab"}, make(file, "root", admin=True)
    usage = file.with_name("keys.json.usage")

    async def use(app: App) -> dict[str, Any]:
        for headers in (keys["a"], keys["a"], keys["b"]):
            reply = await app.post(COMPLETIONS, completion_body(ignore_eos=True), headers=headers)
            assert reply.status == 200
        told: dict[str, Any] = (await app.get("/stats", **admin)).json()["keys"]
        return told

    first = with_app(make_hash_llm(), use, api_keys=str(file))
    assert {name: counts["generation_tokens"] for name, counts in first.items()} == {
        "a": 16,
        "b": 8,
    }
    assert json.loads(usage.read_text(encoding="utf-8")) == {"hash-model": first}
    assert usage.stat().st_mode & 0o77 == 0
    second = with_app(make_hash_llm(), use, api_keys=str(file))
    for name, counts in second.items():
        assert counts["requests"] == 2 * first[name]["requests"]
        assert counts["generation_tokens"] == 2 * first[name]["generation_tokens"]
    # A server that is killed loses what was not written; one that cannot write logs it and works.
    before = usage.read_text(encoding="utf-8")

    async def die(app: App) -> None:
        await use(app)
        assert usage.read_text(encoding="utf-8") != before
        usage.write_text("{", encoding="utf-8")
        assert await use(app)

    with_app(make_hash_llm(), die, api_keys=str(file), limits=ServerLimits(save_usage_s=0))
    assert "the usage of the keys is not saved" in caplog.text
    with pytest.raises(ConfigError, match=r"keys\.json\.usage holds no usage"):
        App(make_hash_llm(), api_keys=str(file))


def test_the_trace_does_not_name_others(file: Path) -> None:
    a, b = make(file, "a"), make(file, "b")
    runner, arrived, opened = held_runner()

    async def use(app: App) -> None:
        body = completion_body(max_tokens=40, ignore_eos=True)
        works = []
        for number, key in enumerate((a, a, b), 1):
            works.append(asyncio.ensure_future(app.post(COMPLETIONS, body, headers=key)))
            await all_open(app, number)
            assert await asyncio.to_thread(arrived.wait, 30)
        opened.set()
        replies = [reply.json()["id"] for reply in await asyncio.gather(*works)]
        trace = (await app.get(f"/v1/requests/{replies[2]}", **b)).json()
        assert trace["events"][1]["behind"] == ["somebody else's"]
        assert not any(reply in json.dumps(trace) for reply in replies[:2])

    with_app(make_hash_llm(max_batch_size=1, runner=runner), use, api_keys=str(file))


def test_traces_of_one_key_do_not_push_out_those_of_another(file: Path) -> None:
    keys = {name: make(file, name) for name in "abc"}

    async def use(app: App) -> None:
        async def post(name: str) -> str:
            reply = await app.post(COMPLETIONS, completion_body(), headers=keys[name])
            return str(reply.json()["id"])

        async def ids(name: str) -> list[str]:
            listed = (await app.get("/v1/requests", **keys[name])).json()["data"]
            return [each["id"] for each in listed]

        first = await post("a")
        own = [await post("b") for _ in range(8)]
        assert await ids("a") == [first]
        assert await ids("b") == own[:2:-1]
        others = [await post("c") for _ in range(5)]  # these would be eleven together
        assert await ids("a") == [first]
        assert len(await ids("b")) + len(await ids("c")) == 8
        assert others[-1] in await ids("c")

    limits = ServerLimits(max_traces_of_owner=5, max_traces=9)
    with_app(make_hash_llm(), use, api_keys=str(file), limits=limits)


@pytest.mark.parametrize("make_engine", ENGINES)
def test_limits(file: Path, make_engine: Callable[..., AsyncLLM]) -> None:
    key = make(file, "a", max_concurrent=2)
    few = make(file, "b", requests_per_minute=2)
    small = make(file, "c", tokens_per_minute=1000)
    alone = make(file, "d", max_queued=0)

    async def use(app: App) -> None:
        async def post(headers: dict[str, str], **changes: Any) -> Reply:
            return await app.post(COMPLETIONS, completion_body(**changes), headers=headers)

        replies = await asyncio.gather(*(post(key, max_tokens=50) for _ in range(4)))
        assert sorted(reply.status for reply in replies) == [200, 200, 429, 429]
        assert (await post(key)).status == 200
        replies = [await post(few) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        assert left == ["1", "0", "0"]
        refused = replies[2]
        assert refused.error()["code"] == "rate_limit_exceeded"
        assert 25 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-limit-requests"] == "2"
        assert (await post(small, max_tokens=300, ignore_eos=True)).status == 200
        rest = (await post(small, max_tokens=1)).headers["x-ratelimit-remaining-tokens"]
        assert 600 < int(rest) < 720
        assert (await post(small, max_tokens=450, n=2)).status == 429
        busy = [asyncio.ensure_future(post(key, max_tokens=200, n=8)) for _ in range(2)]
        await asyncio.sleep(0.02)
        waiting = [asyncio.ensure_future(post(alone)) for _ in range(3)]
        assert [(await each).status for each in waiting] == [429] * 3
        await asyncio.gather(*busy)
        assert (await post(alone, n=2)).status == 200  # no request has to wait
        refused = await post(alone, n=3)
        assert (refused.status, refused.error()["code"]) == (400, "too_many_choices")

    with_app(make_engine(step_s=0.001, max_batch_size=2), use, api_keys=str(file))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_what_an_agent_asks_for_does_not_count_but_what_it_uses(file: Path, path: str) -> None:
    """Agents send 32,000 in each request, several at once, of a key with 100 tokens a minute."""
    key = make(file, "a", tokens_per_minute=100)
    messages = [{"role": "user", "content": "Hi"}]
    field = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "hash-model", field: messages, limit: 32_000}

    async def use(app: App) -> None:
        both = await asyncio.gather(*(app.post(path, body, headers=key) for _ in range(2)))
        assert [reply.status for reply in both] == [200, 200], both[0].body
        left = int(
            (await app.post(path, body, headers=key)).headers["x-ratelimit-remaining-tokens"]
        )
        assert 0 <= left < 90  # what the two have used is gone

    with_app(scripted([*spelled("Hello."), END_ID]), use, api_keys=str(file))


@pytest.mark.slow
@pytest.mark.parametrize("make_engine", ENGINES)
def test_a_flood_beside_a_key_with_single_requests(
    file: Path, make_engine: Callable[..., AsyncLLM]
) -> None:
    """A request of a quiet key waits for the next seat, not for all that the other key has queued:
    64 requests on 8 seats, which would be eight rounds of 32 tokens."""
    step_s, num_flood = 0.005, 64
    noisy = make(file, "noisy", max_concurrent=num_flood, max_queued=num_flood)
    quiet = make(file, "quiet")

    async def use(app: App) -> None:
        async def ask(key: dict[str, str], number: int, **changes: Any) -> float:
            body = completion_body(prompt=f"{number} {LONG}", ignore_eos=True, **changes)
            reply = await app.post(COMPLETIONS, body, headers=key)
            assert reply.status == 200
            name = reply.json()["id"]
            trace = (await app.get(f"/v1/requests/{name}", **key)).json()
            return float(trace["first_token_ms"]) / (1000 * step_s)

        async def flood(number: int) -> int:
            count = 0
            while not over.is_set():
                await ask(noisy, number, max_tokens=32)
                count += 1
            return count

        async def ask_singly() -> list[float]:
            return [await ask(quiet, 1000 + i, max_tokens=2) for i in range(20)]

        over = asyncio.Event()
        alone = await ask_singly()
        flooding = [asyncio.ensure_future(flood(number)) for number in range(num_flood)]
        await asyncio.sleep(100 * step_s)
        beside = await ask_singly()
        over.set()
        counts = [await each for each in flooding]
        Findings().note(
            22,
            "noisy neighbour",
            f"{num_flood} requests of one key always open, single ones of another; 8 seats, hash"
            f" model, {len(app.engine.stats_of_replicas()) or 1} engine(s)",
            **{
                "first token of the quiet key, alone, p50 and longest [steps]": (
                    round(statistics.median(alone), 1),
                    round(max(alone), 1),
                ),
                "beside the flood [steps]": (
                    round(statistics.median(beside), 1),
                    round(max(beside), 1),
                ),
                "answers of the flood": sum(counts),
            },
        )
        assert max(beside) < 3 * 32

    engine = make_engine(step_s=step_s, max_batch_size=8, num_pages=2000)
    with_app(engine, use, api_keys=str(file), limits=ServerLimits(max_traces_of_owner=500))


def test_a_bucket() -> None:
    now = [0.0]
    bucket = Bucket(60, lambda: now[0])
    bucket.take(60)
    assert bucket.wait_s(1) == 1.0
    now[0] = 2.0
    assert bucket.wait_s(1) == 0.0
    bucket.take(10)  # more than the bucket has
    assert bucket.level() == -8.0
    bucket.take(-1000)
    assert bucket.level() == 60.0


def test_what_was_reserved_and_not_used_is_given_back() -> None:
    key = Key(id="k", name="n", sha256="", limits=KeyLimits(tokens_per_minute=1000))
    tenant, context = Tenant(key, LocalLimits(lambda: 0.0)), RequestContext()
    trace = RequestTrace("r", "k", context, 100, 700)
    trace.choices["r-0"] = ChoiceTrace(trace, 0, RequestState("r-0", 1, num_output=30))

    async def acquire(tenant: Tenant, max_tokens: int, *, uses: bool) -> None:
        request = Request("r", (1,) * 100, SamplingParams(), 0, max_tokens)
        async with tenant.acquire([request], context) as grant:
            if uses:
                grant.use(context, trace)

    async def use() -> None:
        await acquire(tenant, 700, uses=False)
        assert tenant.level("tokens") == 1000
        await acquire(tenant, 700, uses=True)
        assert tenant.level("tokens") == 200
        with pytest.raises(RequestError, match="tokens a minute"):
            await acquire(tenant, 700, uses=False)
        context.cleanup.close()
        assert tenant.level("tokens") == 870
        # What may be more than a minute has reserves a part; else it could never be served.
        await acquire(tenant, 10**6, uses=False)
        assert tenant.level("tokens") == 870
        await acquire(Tenant(key), 10**6, uses=False)

    asyncio.run(use())


def test_a_refused_request_leaves_nothing() -> None:
    tenant = Tenant(Key(id="k", name="n", sha256="", limits=KeyLimits(requests_per_minute=1)))
    contexts = [RequestContext(), RequestContext()]
    asyncio.run(tenant.enter(contexts[0]))
    with pytest.raises(RequestError, match="requests a minute"):
        asyncio.run(tenant.enter(contexts[1]))
    assert tenant.num_open == 1
    for context in contexts:
        context.cleanup.close()
    assert tenant.num_open == 0


def test_the_command(file: Path) -> None:
    def run(*arguments: str) -> Any:
        return CliRunner().invoke(command, ["keys", *arguments, "--file", str(file)])

    token = run("create", "alice", "--max-concurrent", "3", "--admin").stdout.strip()
    assert len(token) > 40
    assert token not in file.read_text(encoding="utf-8")
    assert file.stat().st_mode & 0o777 == 0o600
    found = Keys(file).find(token)
    assert found is not None
    assert found.limits == KeyLimits(max_concurrent=3, admin=True)
    assert "max_concurrent=3" in run("list").stdout
    assert isinstance(run("create", "alice").exception, ConfigError)
    assert isinstance(run("create", "x\ny").exception, ConfigError)
    assert run("revoke", "alice").exit_code == 0
    assert Keys(file).find(token) is None
    assert isinstance(run("revoke", "alice").exception, ConfigError)
    file.write_text('{"keys": [{"id": 1, "bad": 2}]}', encoding="utf-8")
    assert isinstance(run("list").exception, ConfigError)


@pytest.mark.parametrize(("host", "refused"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_without_keys_only_this_machine(
    host: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr("infer.replicas.launch.launch", lambda config, **_: make_hash_llm())
    monkeypatch.setattr(serve, "run", lambda *arguments, **how: ran.append(how))
    serve.serve_config(EngineConfig(), ServerSettings(insecure=True), host, 0)
    assert len(ran) == 1
    if refused:
        with pytest.raises(ConfigError, match="--api-keys"):
            serve.serve_config(EngineConfig(), ServerSettings(), host, 0)
    else:
        serve.serve_config(EngineConfig(), ServerSettings(), host, 0)


def test_a_server_draws_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers without a seed differ after each start, unless the server has a seed."""
    seeds: list[int | None] = []

    def launch(config: EngineConfig, **_: Any) -> Any:
        seeds.append(config.seed)
        return make_hash_llm()

    monkeypatch.setattr("infer.replicas.launch.launch", launch)
    monkeypatch.setattr(serve, "run", lambda *_, **__: None)
    for config in (EngineConfig(), EngineConfig(), EngineConfig(seed=7)):
        serve.serve_config(config, ServerSettings(), port=0)
    assert None not in seeds
    assert len(set(seeds)) == 3
    assert seeds[2] == 7
