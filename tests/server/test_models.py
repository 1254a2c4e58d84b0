"""Several models behind one address: routing, loading, unloading, and failures of one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai.types import Model as OpenAIModel

from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import ConfigError, LoadError
from infer.server.app import create_app, layers
from infer.server.loaded_models import LoadedModels, public_reason
from infer.server.multi_model import ModelRouter
from infer.server.observe.logs import log_on_stderr
from infer.server.route_table import EVENTS_PATH
from infer.server.served_models import configs_of
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from infer.types.sampling_defaults import SamplingDefaults
from infer.types.server_limits import ServerLimits
from tests.support.doubles import launch_hash_llm, make_hash_llm, pid_of
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    JSON,
    App,
    chat_body,
    check_refused,
    completion_body,
)
from tests.support.waits import until

LONG = {"max_tokens": 400, "ignore_eos": True}
OF_ROUTER = {"waits", "drain_timeout_s", "keep_alive_s", "unknown_model_statuses"}
"""Arguments of `ModelRouter`; others are those of `LoadedModels`."""


def broken() -> AsyncLLM:
    raise LoadError("/secret/path: no such file")


def used(
    body: Callable[[App, ModelRouter], Coroutine[Any, Any, None]],
    launches: dict[str, Callable[[], AsyncLLM]],
    *,
    load: bool = True,
    keys: str | None = None,
    **how: Any,
) -> None:
    """Run `body` with an app over these models; at the end every engine must have ended."""

    async def main() -> None:
        settings = ServerSettings(api_keys=keys)
        of_router = {name: how.pop(name) for name in OF_ROUTER & how.keys()}
        make_app = partial(create_app, settings=settings, is_inner=True)
        models = ModelRouter(LoadedModels(launches, make_app, **how), **of_router)
        if load:
            await asyncio.to_thread(models.load_all)
        app = App.__new__(App)
        app.app = models.make_app(layers(settings, (models.seen,)))
        async with app.app.router.lifespan_context(app.app):
            await body(app, models)
        assert not any(engine.is_alive for engine in models.engines())

    asyncio.run(main())


async def reasons(app: App) -> dict[str, str | None]:
    data = (await app.get("/v1/models")).json()["data"]
    assert all(OpenAIModel.model_validate(each).id for each in data)
    return {each["id"]: each["reason"] for each in data}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/a/b is neither a folder here nor a hub id of the form owner/name",
         "b is neither a folder here nor a hub id of the form owner/name"),
        ("/a/b/config.json: cannot be read", "config.json: cannot be read"),
        ("~/x/y, and\nC:\\Users\\me\\m.gguf ('/z/w')", "y, and m.gguf ('w')"),
        ("x" * 1000, "x" * 300),
    ],
)  # fmt: skip
def test_a_reason_has_no_folders_of_this_machine(message: str, shown: str) -> None:
    assert public_reason(LoadError(message)) == shown


async def statuses(app: App) -> dict[str, str]:
    data = (await app.get("/v1/models")).json()["data"]
    return {each["id"]: each["status"] for each in data}


def test_the_name_says_who_answers() -> None:
    """The engines are told apart by the number of tokens that they serve."""

    async def body(app: App, _: ModelRouter) -> None:
        for name, size in (("small", 64), ("big", 128), (None, 64)):
            reply = await app.post(COMPLETIONS, completion_body(model=name, stream=False))
            assert (reply.status, reply.json()["model"]) == (200, name or "small")
            assert len(reply.headers["x-request-id"]) == 32
            long = [{"role": "user", "content": "x" * 200}]
            refused = await app.post(CHAT, chat_body(model=name, messages=long))
            check_refused(
                refused, 400, "messages", "context_length_exceeded", f"length is {size} tokens"
            )
            stream = await app.post(CHAT, chat_body(model=name, stream=True))
            assert {event["model"] for event in stream.events()} == {name or "small"}
            tokens = await app.post("/tokenize", {"prompt": "x", "model": name})
            assert tokens.json()["max_model_len"] == size
            assert (await app.get(f"/v1/models/{name or 'small'}")).json()["max_model_len"] == size
        for wrong in ("huge", "", 3, ["small"]):
            reply = await app.post(COMPLETIONS, completion_body(model=wrong))
            check_refused(reply, 404, "model", "model_not_found", "this server has small, big")
        assert (await app.get("/v1/models/huge")).status == 404
        assert (await app.get("/nowhere")).status == 404
        assert (await app.post(COMPLETIONS, b"{")).status == 400
        assert (await app.get("/tokenizer_info?model=big")).status == 200
        assert await statuses(app) == {"small": "loaded", "big": "loaded"}

    sizes = {"small": 64, "big": 128}
    used(body, {name: partial(make_hash_llm, max_seq_len=size) for name, size in sizes.items()})


def test_requests_and_numbers_are_those_of_all() -> None:
    async def body(app: App, models: ModelRouter) -> None:
        replies = [
            await app.post(COMPLETIONS, completion_body(model=name, max_tokens=3))
            for name in ("a", "b", "b")
        ]
        ids = [reply.json()["id"] for reply in replies]
        listed = (await app.get("/v1/requests")).json()["data"]
        assert sorted(each["id"] for each in listed) == sorted(ids)
        of_b = (await app.get("/v1/requests?model=b")).json()["data"]
        assert [each["id"] for each in of_b] == ids[:0:-1]
        for name in ids:
            assert (await app.get(f"/v1/requests/{name}")).json()["id"] == name
        assert (await app.get("/v1/requests/cmpl-x")).error()["code"] == "request_not_found"
        # A request without a body, with and without a media type.
        running = asyncio.ensure_future(app.post(COMPLETIONS, completion_body(model="b", **LONG)))
        await asyncio.to_thread(until, lambda: models.num_open == 1)
        name = (await app.get("/v1/requests")).json()["data"][0]["id"]
        for method, path, headers in (
            ("POST", f"/v1/requests/{name}/cancel", JSON),
            ("POST", f"/v1/requests/{name}/cancel", {}),
            ("DELETE", f"/v1/requests/{name}", {}),
        ):
            reply = await app.send(method, path, headers=headers)
            assert (reply.status, reply.json()["id"]) == (200, name)
        assert (await running).status == 499
        shown = (await app.get("/metrics")).body.decode()
        for model, count in (("a", 1), ("b", 2)):
            line = f'infer:request_success_total{{finished_reason="length",model_name="{model}"}}'
            assert f"{line} {count}.0" in shown
        assert shown.count("# TYPE infer:generation_tokens_total ") == 1
        stats = (await app.get("/stats")).json()["models"]
        counts = [stats[model]["engine"]["num_requests_admitted"] for model in "ab"]
        assert counts == [1, 3]
        one = (await app.get("/stats?model=b")).json()
        assert one["engine"]["num_requests_admitted"] == 3
        for query, model in (("", "a"), ("?model=b", "b")):
            gone = asyncio.Event()
            watching = asyncio.ensure_future(app.send("GET", EVENTS_PATH + query, leave=gone))
            await asyncio.sleep(0.02)
            gone.set()
            assert f'"model":"{model}"' in (await watching).body.decode()
        assert (await app.get(f"{EVENTS_PATH}?model=c")).error()["code"] == "model_not_found"

    engines: dict[str, Callable[[], AsyncLLM]] = {
        name: partial(make_hash_llm, step_s=0.002) for name in "ab"
    }
    used(body, engines)


def test_watching_loads_no_model() -> None:
    loads: list[str] = []

    def launch(name: str) -> AsyncLLM:
        loads.append(name)
        return make_hash_llm()

    async def body(app: App, models: ModelRouter) -> None:
        refused = await app.get(f"{EVENTS_PATH}?model=b")
        assert refused.status == 503
        assert "'b' is not loaded" in refused.error()["message"]
        assert loads == []

    used(body, {name: partial(launch, name) for name in "ab"}, load=False)


def test_loaded_on_first_use_and_unloaded_when_idle() -> None:
    loads: list[str] = []

    def launch(name: str) -> AsyncLLM:
        loads.append(name)
        return make_hash_llm(step_s=0.002)

    async def body(app: App, models: ModelRouter) -> None:
        assert await statuses(app) == {"a": "unloaded", "b": "unloaded"}
        assert (await app.get("/health/ready")).status == 200
        many = [app.post(COMPLETIONS, completion_body(model="b")) for _ in range(10)]
        assert {reply.status for reply in await asyncio.gather(*many)} == {200}
        assert (loads, await statuses(app)) == (["b"], {"a": "unloaded", "b": "loaded"})
        (engine,) = models.engines()
        long = await app.post(COMPLETIONS, completion_body(model="b", **LONG))  # 0.8 s
        assert (long.status, loads) == (200, ["b"])
        async with asyncio.timeout(60):
            while models.engines():
                await asyncio.sleep(0.02)
        assert not engine.is_alive
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 200
        assert loads == ["b", "b"]

    launches: dict[str, Callable[[], AsyncLLM]] = {name: partial(launch, name) for name in "ab"}
    used(body, launches, load=False, idle_unload_s=0.3)


def test_one_that_cannot_be_loaded_is_nothing_to_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_repaired = False

    def repaired() -> AsyncLLM:
        return make_hash_llm() if is_repaired else broken()

    async def body(app: App, models: ModelRouter) -> None:
        for _ in range(2):
            reply = await app.post(COMPLETIONS, completion_body(model="bad"))
            assert (reply.status, reply.error()["code"]) == (503, "engine_unavailable")
            assert "'bad' could not be loaded: path: no such file" in reply.error()["message"]
            assert "secret" not in reply.body.decode()
            assert reply.headers["retry-after"]
        assert (await app.post(COMPLETIONS, completion_body(model="good"))).status == 200
        assert await statuses(app) == {"bad": "failed", "good": "loaded"}
        assert await reasons(app) == {"bad": "path: no such file", "good": None}
        assert models.announcement == ("good", "; not bad (path: no such file)")
        assert (await app.get("/health/ready")).status == 200
        nonlocal is_repaired
        is_repaired = True
        await asyncio.sleep(0.3)
        assert await statuses(app) == {"bad": "failed", "good": "loaded"}, "until it is tried again"
        assert (await app.post(COMPLETIONS, completion_body(model="bad"))).status == 200
        assert await reasons(app) == {"bad": None, "good": None}
        assert models.announcement == ("bad, good", "")

    used(body, {"bad": repaired, "good": make_hash_llm}, limits=ServerLimits(retry_load_s=0.3))
    assert "/secret/path" in caplog.text
    with pytest.raises(LoadError, match="no such file"):
        used(body, {"bad": broken, "worse": broken})


def test_a_crash_of_one_is_nothing_to_the_others() -> None:
    async def body(app: App, models: ModelRouter) -> None:
        tasks = [
            asyncio.create_task(app.post(COMPLETIONS, completion_body(model=name, **LONG)))
            for name in "ab"
        ]
        a, b = models.engines()
        async with asyncio.timeout(60):
            while not (a.stats()["num_running"] and b.stats()["num_running"]):
                await asyncio.sleep(0.005)
        os.kill(pid_of(a), signal.SIGKILL)
        async with asyncio.timeout(60):
            while a.is_ready:
                await asyncio.sleep(0.002)
        assert await statuses(app) == {"a": "restarting", "b": "loaded"}
        assert (await app.get("/health/ready")).status == 200
        first, second = [(await task).json() for task in tasks]
        assert first["choices"] == second["choices"]
        assert (a.stats()["num_restarts"], b.stats()["num_restarts"]) == (1, 0)

    used(body, dict.fromkeys("ab", partial(launch_hash_llm, step_s=0.004)))


def test_json_lines_of_the_log_carry_the_model(capfd: pytest.CaptureFixture[str]) -> None:
    async def body(app: App, models: ModelRouter) -> None:
        for name in ("a", "b", "c", None):
            await app.post(COMPLETIONS, completion_body(model=name))
        _, b = models.engines()
        os.kill(pid_of(b), signal.SIGKILL)
        async with asyncio.timeout(10):
            while not b.stats()["num_restarts"] or not b.is_ready:
                await asyncio.sleep(0.005)

    with log_on_stderr("json"):
        used(body, {name: partial(launch_hash_llm, served_model_name=name) for name in "ab"})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    requests = [line["model"] for line in lines if line["message"] == "request"]
    assert requests == ["a", "b", None, "a"]
    (died,) = [line for line in lines if "the engine process has died" in line["message"]]
    (again,) = [line for line in lines if "another engine process" in line["message"]]
    assert (died["model"], again["model"]) == ("b", "b")


def test_each_counts_what_it_was_asked(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    few = Keys(file, must_exist=False).create("few", KeyLimits(requests_per_minute=2))
    admin = Keys(file).create("admin", KeyLimits(admin=True))

    async def body(app: App, _: ModelRouter) -> None:
        for token, expected in ((few, 200), (few, 200), (few, 429), ("no", 401)):
            headers = {"authorization": f"Bearer {token}"}
            reply = await app.post(COMPLETIONS, completion_body(model="b"), headers=headers)
            assert reply.status == expected
        shown = []
        for name in "ab":
            path = f"/metrics?model={name}"
            reply = await app.send("GET", path, headers={"authorization": f"Bearer {admin}"})
            lines = reply.body.decode().splitlines()
            shown.append([line for line in lines if line.startswith("infer:admission_rejections")])
        (refused, too_many), of_b = map(sorted, shown)
        assert 'reason="401"' in refused  # without a model's name: the body was not read
        assert 'reason="429"' in too_many
        assert all(line.endswith(" 1.0") for line in (refused, too_many))
        assert of_b == []

    used(body, {"a": make_hash_llm, "b": make_hash_llm}, keys=str(file))

    async def later(app: App, _: ModelRouter) -> None:
        """The tokens that a key has used are still counted after a restart of the server."""
        for name, expected in (("a", {}), ("b", 2)):
            path = f"/stats?model={name}"
            reply = await app.send("GET", path, headers={"authorization": f"Bearer {admin}"})
            keys = reply.json()["keys"]
            assert (keys["few"]["requests"] if keys else keys) == expected

    used(later, {"a": make_hash_llm, "b": make_hash_llm}, keys=str(file))


def test_what_nobody_expected_reaches_the_edge(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No handler before it answers: a disconnect is no error, and errors have our format."""

    async def body(app: App, models: ModelRouter) -> None:
        leave = asyncio.Event()
        asking = asyncio.create_task(
            app.post(COMPLETIONS, completion_body(model="a", **LONG), leave=leave)
        )
        (engine,) = models.engines()
        async with asyncio.timeout(60):
            while not engine.stats()["num_running"]:
                await asyncio.sleep(0.002)
        leave.set()
        assert (await asking).status == 0
        (trace,) = (await app.get("/v1/requests")).json()["data"]
        assert trace["outcome"] == "disconnected"
        monkeypatch.setattr(engine.tokenizer, "decode", None)
        reply = await app.post("/detokenize", {"tokens": [1]})
        assert (reply.status, reply.error()["code"]) == (500, "internal_error")

    used(body, {"a": partial(make_hash_llm, step_s=0.004)})
    assert "TypeError" in caplog.text


def test_a_server_that_drains_loads_nothing() -> None:
    async def body(app: App, models: ModelRouter) -> None:
        models.drain()
        for name in "ab":
            reply = await app.post(COMPLETIONS, completion_body(model=name))
            assert (reply.status, reply.error()["code"]) == (503, "engine_unavailable")
        assert (await app.get("/health/ready")).status == 503
        assert (await app.get("/health/live")).status == 200

    used(body, {"a": make_hash_llm, "b": make_hash_llm})
    used(body, {"a": make_hash_llm, "b": make_hash_llm}, load=False)


def test_what_model_options_mean() -> None:
    assert configs_of([], {"seed": 3}) == EngineConfig(seed=3)
    for one in ("org/name", "./a=b", "/a/b=c"):
        assert configs_of([one], {}) == EngineConfig(model=one)
    assert configs_of(["a=org/name", "b-1=/x=y"], {"seed": 3}) == {
        name: EngineConfig(model=model, served_model_name=name, seed=3, gpu_memory_utilization=0.5)
        for name, model in {"a": "org/name", "b-1": "/x=y"}.items()
    }
    settings = {"gpu_memory_utilization": 0.2}
    made = configs_of(["a=x", "b=y"], settings)
    assert isinstance(made, dict)
    assert made["b"].gpu_memory_utilization == 0.2
    wrong: list[tuple[list[str], dict[str, Any], str]] = [
        (
            ["a=x"],
            {"gpu_memory_utilization": 1.5},
            "gpu_memory_utilization: must be between 0.01 and 1",
        ),
        (["a=x", "y"], {}, "each is NAME=PATH-OR-HUB-ID; not 'y'"),
        (["a=x", "a=y"], {}, "'a' is given twice"),
        (["a=x", "b="], {}, "not 'b='"),
        (["a=x"], {"served_model_name": "z"}, "served_model_name: "),
    ]
    for models, given, message in wrong:
        with pytest.raises(ConfigError, match=message):
            configs_of(models, given)


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    """Two names for the shipped model, one of whose paths does not exist at the start."""
    import infer

    demo = Path(infer.__file__).parent / "demo_model"
    arguments = ["serve", "--port", "0", "--max-seq-len", "128", "--idle-unload-s", "60"]
    arguments += ["--model", f"tiny={demo}", "--model", "none=/no/such/folder"]
    command = [sys.executable, "-m", "infer.cli.main", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as p:
        try:
            assert p.stdout is not None
            line = p.stdout.readline()
            assert "infer serves tiny at http://" in line
            assert "; not none (" in line
            assert "/no/such" not in line
            url = line.split(" at ")[1].split()[0]
            body = json.dumps({"model": "tiny", "prompt": "One day", "max_tokens": 3}).encode()
            headers = {"content-type": "application/json"}
            request = urllib.request.Request(url + COMPLETIONS, body, headers)
            with urllib.request.urlopen(request, timeout=20) as answer:
                assert json.load(answer)["model"] == "tiny"
            p.send_signal(signal.SIGTERM)
            until(lambda: p.poll() == 0, 15)
            assert p.stderr is not None
            assert "the model 'none' cannot be loaded" in p.stderr.read()
        finally:
            p.kill()


def test_each_model_has_defaults_of_its_own() -> None:
    greedy = SamplingDefaults(source="generation_config.json", temperature=0.0)

    async def body(app: App, _: ModelRouter) -> None:
        for name, number in (("greedy", 1), ("free", 3)):
            texts = set()
            for seed in (1, 2, 3):
                reply = await app.post(COMPLETIONS, completion_body(model=name, seed=seed))
                texts.add(reply.json()["choices"][0]["text"])
            assert len(texts) == number
            document = (await app.get(f"/openapi.json?model={name}")).json()
            field = document["components"]["schemas"]["ChatBody"]["properties"]["temperature"]
            assert ("description" in field) is (name == "greedy")
        models = {each["id"]: each for each in (await app.get("/v1/models")).json()["data"]}
        assert models["greedy"]["sampling_defaults"]["temperature"] == 0
        assert models["free"]["sampling_defaults"] == {"source": None}

    used(body, {"greedy": partial(make_hash_llm, defaults=greedy), "free": make_hash_llm})
