"""Models that are loaded and unloaded while the server runs, by whoever may, and under load."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.engine.build.memory_ledger import MemoryLedger
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import LoadError
from infer.server.models_memory import BESIDE_WEIGHTS, ModelsMemory
from infer.server.multi_model import ModelRouter
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.server.test_models import LONG, broken, reasons, statuses, used
from tests.support.doubles import make_hash_llm
from tests.support.serving import COMPLETIONS, App, check_refused, completion_body, with_app

LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"


class Launches:
    """Counts what is loaded; a model can be made to fail."""

    def __init__(self, names: str = "ab", **settings: Any) -> None:
        self.loads: list[str] = []
        self.failing: set[str] = set()
        self._settings = settings
        self.all: dict[str, Callable[[], AsyncLLM]] = {
            name: partial(self.launch, name) for name in names
        }

    def launch(self, name: str) -> AsyncLLM:
        self.loads.append(name)
        if name in self.failing:
            raise LoadError(f"/secret/{name}: is no checkpoint")
        return make_hash_llm(**self._settings)


async def running(app: App, models: ModelRouter, name: str) -> asyncio.Task[Any]:
    """A request that runs on a model."""
    before = models.num_open
    task = asyncio.create_task(app.post(COMPLETIONS, completion_body(model=name, **LONG)))
    async with asyncio.timeout(60):
        while models.num_open == before:
            await asyncio.sleep(0.002)
    return task


def test_loaded_and_unloaded_when_somebody_asks() -> None:
    launches = Launches()

    async def body(app: App, models: ModelRouter) -> None:
        for _ in range(2):  # what is loaded stays so
            reply = await app.post(LOAD, {"model": "b"})
            assert (reply.status, reply.json()["id"], reply.json()["status"]) == (
                200,
                "b",
                "loaded",
            )
        assert launches.loads == ["b"]
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 200
        (engine,) = models.engines()
        for _ in range(2):
            reply = await app.post(UNLOAD, {"model": "b"})
            assert (reply.status, reply.json()["status"]) == (200, "unloaded")
            assert not engine.is_alive
        assert await statuses(app) == {"a": "unloaded", "b": "unloaded"}
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 200
        assert launches.loads == ["b", "b"]

    used(body, launches.all, load=False)


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_wrong_bodies(path: str) -> None:
    async def body(app: App, _: ModelRouter) -> None:
        check_refused(
            await app.post(path, {"model": "c"}), 404, "model", "model_not_found", "has a, b"
        )
        check_refused(
            await app.post(path, {}), 400, "model", "missing_required_parameter", "is required"
        )
        assert (await app.post(path, {"model": 3})).error()["param"] == "model"
        assert (await app.post(path, b"[]")).status == 400
        assert (await app.send("GET", path)).status == 405

    used(body, Launches().all, load=False)


def test_a_load_that_fails_keeps_its_reason_and_is_tried_again_at_once() -> None:
    launches = Launches()
    launches.failing = {"b"}

    async def body(app: App, _: ModelRouter) -> None:
        reply = await app.post(LOAD, {"model": "b"})
        assert reply.status == 503
        assert "'b' could not be loaded: b: is no checkpoint" in reply.error()["message"]
        assert await reasons(app) == {"a": None, "b": "b: is no checkpoint"}
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 503
        assert launches.loads == ["b"], "not for a request, so soon"
        launches.failing.clear()
        assert (await app.post(LOAD, {"model": "b"})).json()["reason"] is None
        assert launches.loads == ["b", "b"]

    used(body, launches.all, load=False)


def test_an_unload_of_a_model_with_streams() -> None:
    """409; by force they go on to their end, and who comes meanwhile waits and has it loaded."""
    launches = Launches(step_s=0.002)

    async def body(app: App, models: ModelRouter) -> None:
        stream = await running(app, models, "a")
        refused = await app.post(UNLOAD, {"model": "a"})
        check_refused(refused, 409, "model", "model_busy", "works on 1 requests")
        (engine,) = models.engines()
        unloading = asyncio.create_task(app.post(UNLOAD, {"model": "a", "force": True}))
        async with asyncio.timeout(60):
            while (await statuses(app))["a"] != "unloading":
                await asyncio.sleep(0.002)
        check_refused(
            await app.post(UNLOAD, {"model": "a"}), 409, "model", "model_busy", "is unloading now"
        )
        newcomer = asyncio.create_task(app.post(COMPLETIONS, completion_body(model="a")))
        assert (await stream).json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert (await unloading).status == 200
        assert (await newcomer).status == 200
        assert not engine.is_alive
        assert launches.loads == ["a", "a"]

    used(body, launches.all, load=False)


def test_what_does_not_end_in_time_gets_an_error() -> None:
    launches = Launches(step_s=0.02)

    async def body(app: App, models: ModelRouter) -> None:
        stream = await running(app, models, "a")
        assert (await app.post(UNLOAD, {"model": "a", "force": True})).status == 200
        assert (await stream).status == 503
        assert await statuses(app) == {"a": "unloaded", "b": "unloaded"}

    used(body, launches.all, load=False, drain_timeout_s=0.05)


def test_nothing_is_lost_under_load() -> None:
    """Requests for two models, while both are loaded and unloaded all the time."""
    launches = Launches()

    async def body(app: App, models: ModelRouter) -> None:
        async def ask(name: str) -> list[int]:
            return [
                (await app.post(COMPLETIONS, completion_body(model=name))).status for _ in range(20)
            ]

        async def unload(name: str) -> list[int]:
            found = []
            for i in range(10):
                found.append((await app.post(UNLOAD, {"model": name, "force": i % 2 == 0})).status)
                await asyncio.sleep(0.005)
            return found

        asking = [ask(name) for name in "abab"]
        answers = await asyncio.gather(*asking, *[unload(name) for name in "ab"])
        assert {status for each in answers[:4] for status in each} == {200}
        assert {status for each in answers[4:] for status in each} <= {200, 409}
        assert len(launches.loads) > 2

    used(body, launches.all, load=False)


@pytest.mark.parametrize("num_ticks", range(16))
def test_an_unload_just_when_a_model_is_loaded_loses_no_stream(num_ticks: int) -> None:
    """Whatever turn of the event loop it comes in, a stream that has waited has the model loaded
    again."""
    statuses = {COMPLETIONS: 404}
    asked: list[asyncio.Task[Any]] = []
    loads = 0

    async def body(app: App, _: ModelRouter) -> None:
        loop = asyncio.get_running_loop()

        def unload() -> None:
            asked.append(asyncio.ensure_future(app.post(UNLOAD, {"model": "a", "force": True})))

        def later(ticks: int) -> None:
            if ticks:
                loop.call_soon(later, ticks - 1)
            else:
                unload()

        class Started(AsyncLLM):
            async def start(self) -> None:
                await super().start()
                later(num_ticks)

        def launch() -> AsyncLLM:
            nonlocal loads
            loads += 1
            engine = make_hash_llm()
            if loads == 1:
                engine.__class__ = Started
            return engine

        launches["a"] = launch
        reply = await app.post(COMPLETIONS, completion_body(model="a", stream=True))
        assert reply.status == 200
        assert b"error" not in reply.body, reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n")
        (unloading,) = asked
        assert (await unloading).status == 200

    launches: dict[str, Callable[[], AsyncLLM]] = {}

    def late() -> AsyncLLM:
        return launches["a"]()

    used(body, {"a": late}, load=False, unknown_model_statuses=statuses)


def test_it_is_ready_while_a_model_is_loaded_or_unloaded() -> None:
    """Requests wait for it, so proxies must not leave. Where they are refused it is not ready."""
    may_load, is_over = threading.Event(), threading.Event()

    def launch() -> AsyncLLM:
        assert may_load.wait(60)
        return make_hash_llm(step_s=0.002)

    async def body(app: App, models: ModelRouter, waits: bool) -> None:
        async def is_ready() -> bool:
            return (await app.get("/health/ready")).status == 200

        async def come_to(status: str) -> None:
            async with asyncio.timeout(60):
                while (await statuses(app))["a"] != status:
                    await asyncio.sleep(0.002)

        loading = asyncio.create_task(app.post(LOAD, {"model": "a"}))
        await come_to("loading")
        assert await is_ready() is waits
        may_load.set()
        assert (await loading).status == 200
        stream = await running(app, models, "a")
        unloading = asyncio.create_task(app.post(UNLOAD, {"model": "a", "force": True}))
        await come_to("unloading")
        assert await is_ready() is waits
        assert (await stream).status == 200
        assert (await unloading).status == 200
        assert await is_ready()
        is_over.set()

    for waits in (True, False):
        may_load.clear()
        used(partial(body, waits=waits), {"a": launch}, load=False, waits=waits)
    assert is_over.is_set()


def test_only_an_admin_may(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one = Keys(file, must_exist=False).create("one", KeyLimits())
    admin = Keys(file).create("admin", KeyLimits(admin=True))

    async def body(app: App, _: ModelRouter) -> None:
        for path in (LOAD, UNLOAD):
            for token, status in ((one, 403), ("no", 401), (admin, 200)):
                headers = {"authorization": f"Bearer {token}"}
                assert (await app.post(path, {"model": "a"}, headers=headers)).status == status

    used(body, Launches().all, load=False, keys=str(file))


def test_the_only_model_stays() -> None:
    async def body(app: App) -> None:
        assert (await app.post(LOAD, {"model": "hash-model"})).json()["id"] == "hash-model"
        refused = await app.post(UNLOAD, {"model": "hash-model"})
        check_refused(refused, 409, "model", "only_model", "stays loaded")
        for path in (LOAD, UNLOAD):
            assert (await app.post(path, {"model": "x"})).error()["code"] == "model_not_found"

    with_app(make_hash_llm(), body)


def test_one_that_cannot_be_loaded_can_be_unloaded() -> None:
    async def body(app: App, _: ModelRouter) -> None:
        assert (await app.post(LOAD, {"model": "bad"})).status == 503
        assert (await app.post(UNLOAD, {"model": "bad"})).json()["status"] == "failed"

    used(body, {"bad": broken}, load=False)


def few(num: int) -> Callable[[str, Sequence[str]], bool]:
    """Memory for so many models at a time."""
    return lambda name, loaded: len(loaded) < num


def test_the_least_recently_used_idle_one_makes_room() -> None:
    launches = Launches("abc")

    async def body(app: App, models: ModelRouter) -> None:
        for name in "abac":
            assert (await app.post(COMPLETIONS, completion_body(model=name))).status == 200
        assert await statuses(app) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert (await app.post(LOAD, {"model": "b"})).status == 200
        assert await statuses(app) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert launches.loads == ["a", "b", "c", "b"]

    used(body, launches.all, load=False, fits=few(2))


def test_what_is_in_use_stays() -> None:
    launches = Launches("abc", step_s=0.002)

    async def body(app: App, models: ModelRouter) -> None:
        streams = [await running(app, models, name) for name in "ab"]
        reply = await app.post(COMPLETIONS, completion_body(model="c"))
        assert (reply.status, reply.error()["code"]) == (503, "overloaded")
        assert "'c' does not fit into memory beside" in reply.error()["message"]
        assert reply.headers["retry-after"]
        assert await reasons(app) == {"a": None, "b": None, "c": None}
        for stream in streams:
            assert (await stream).json()["usage"]["completion_tokens"] == LONG["max_tokens"]
        assert (await app.post(COMPLETIONS, completion_body(model="c"))).status == 200
        assert launches.loads == ["a", "b", "c"]

    used(body, launches.all, load=False, fits=few(2))


def test_those_that_are_loaded_at_the_same_time_see_each_other() -> None:
    """Never more than fit, though all are asked for at once."""
    launches, most = Launches("abcd"), 0

    async def body(app: App, models: ModelRouter) -> None:
        nonlocal most

        async def ask(name: str) -> int:
            nonlocal most
            reply = await app.post(LOAD, {"model": name})
            most = max(most, len(models.engines()))
            return reply.status

        assert set(await asyncio.gather(*map(ask, "abcdabcd"))) == {200}
        assert most == 2
        assert len(models.engines()) == 2

    used(body, launches.all, load=False, fits=few(2))


def test_alone_a_model_is_tried_whatever_its_size() -> None:
    """Its engine says better what does not fit, and what would."""

    async def body(app: App, _: ModelRouter) -> None:
        assert (await app.post(LOAD, {"model": "a"})).status == 200

    used(body, Launches().all, load=False, fits=few(0))


def test_where_requests_do_not_wait_they_are_told_when_to_come_again() -> None:
    launches = Launches()
    launches.failing = {"b"}

    async def body(app: App, models: ModelRouter) -> None:
        replies = [app.post(COMPLETIONS, completion_body(model="a")) for _ in range(5)]
        for reply in await asyncio.gather(*replies):
            assert (reply.status, reply.error()["code"]) == (503, "model_loading")
            assert reply.headers["retry-after"] == "5"
        async with asyncio.timeout(60):
            while not models.engines():
                await asyncio.sleep(0.002)
        assert (await app.post(COMPLETIONS, completion_body(model="a"))).status == 200
        assert launches.loads == ["a"]
        assert (await app.post(COMPLETIONS, completion_body(model="b"))).status == 503
        async with asyncio.timeout(60):
            while (await statuses(app))["b"] != "failed":
                await asyncio.sleep(0.002)
        reply = await app.post(COMPLETIONS, completion_body(model="b"))
        assert "'b' could not be loaded: b: is no checkpoint" in reply.error()["message"]
        assert launches.loads == ["a", "b"]

    used(body, launches.all, load=False, waits=False)


@pytest.mark.parametrize(
    ("budget", "free", "fits"),
    [(None, 10, True), (300, 10, True), (299, 10, False), (None, 0, False), (300, 0, False)],
)
def test_a_model_fits_into_the_budget_and_what_the_ledger_leaves(
    budget: int | None, free: int, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/1.safetensors", "a/2.safetensors", "b.gguf"):
        (tmp_path / name).write_bytes(b"x" * 100)
    (tmp_path / "a" / "notes.txt").write_bytes(b"x" * 1000)
    places = {"a": tmp_path / "a", "b": tmp_path / "b.gguf"}
    (tmp_path / "ledger").mkdir()
    memory = ModelsMemory(
        places.__getitem__,
        budget,
        ledger=MemoryLedger(tmp_path / "ledger"),
        available=lambda: BESIDE_WEIGHTS + 200 if free else BESIDE_WEIGHTS,
    )
    assert memory.fits("a", ["b"]) is fits
    assert memory.fits("unknown", ["b"]), "its engine says what it is"


def test_what_other_engines_cannot_do_without_is_not_free(tmp_path: Path) -> None:
    file = tmp_path / "b.gguf"
    file.write_bytes(b"x" * 100)
    (tmp_path / "ledger").mkdir()
    other = MemoryLedger(tmp_path / "ledger")
    room = BESIDE_WEIGHTS + 100
    mine = MemoryLedger(tmp_path / "ledger")
    memory = ModelsMemory(lambda name: file, ledger=mine, available=lambda: room)
    assert memory.fits("b", [])
    with other.planning():
        other.enter(promised=1 << 45, least=1 << 45)
    assert not memory.fits("b", [])
    other.leave()
    assert memory.fits("b", [])


@pytest.mark.parametrize("outcome", ["answer", "error", "refusal"])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/messages"])
def test_a_stream_that_waits_for_its_model_is_told_that_it_lives(path: str, outcome: str) -> None:
    may_load, comments = threading.Event(), 0

    def launch() -> AsyncLLM:
        assert may_load.wait(60)
        return make_hash_llm() if outcome != "error" else broken()

    def wrote(data: bytes) -> None:
        nonlocal comments
        comments += data == b": the model a is being loaded\n\n"
        if comments == 3:
            may_load.set()

    async def body(app: App, models: ModelRouter) -> None:
        if path == COMPLETIONS:
            sent: dict[str, Any] = completion_body(model="a", stream=True, max_tokens=3)
        else:
            messages = [{"role": "user", "content": "a"}]
            sent = {"model": "a", "stream": True, "max_tokens": 3, "messages": messages}
        if outcome == "refusal":
            sent["temperature"] = "warm"
        reply = await app.post(path, sent, on_write=wrote)
        assert (reply.status, reply.headers["content-type"]) == (
            200,
            "text/event-stream; charset=utf-8",
        )
        assert comments >= 3
        *_, last = [each for each in reply.body.decode().split("\n\n") if each]
        if outcome == "answer":
            assert "error" not in last
            assert last.endswith("[DONE]") or "message_stop" in last
        else:
            event, data = last.split("\n")
            assert event == "event: error"
            error = json.loads(data.removeprefix("data: "))
            assert (error.get("type") == "error") is (path != COMPLETIONS)
            said = "temperature" if outcome == "refusal" else "could not be loaded: path: no such"
            assert said in error["error"]["message"]

    statuses = {path: 404}
    used(body, {"a": launch}, load=False, keep_alive_s=0.005, unknown_model_statuses=statuses)


def test_a_load_goes_on_though_its_stream_is_gone() -> None:
    may_load, leave = threading.Event(), asyncio.Event()
    loads = []

    def launch() -> AsyncLLM:
        assert may_load.wait(60)
        loads.append("a")
        return make_hash_llm()

    async def body(app: App, models: ModelRouter) -> None:
        sent = completion_body(model="a", stream=True)
        how: dict[str, Any] = {"leave": leave, "on_write": lambda data: leave.set()}
        await app.post(COMPLETIONS, sent, **how)
        assert await statuses(app) == {"a": "loading"}
        may_load.set()
        assert (await app.post(COMPLETIONS, completion_body(model="a"))).status == 200
        assert loads == ["a"]

    used(
        body,
        {"a": launch},
        load=False,
        keep_alive_s=0.005,
        unknown_model_statuses={COMPLETIONS: 404},
    )
