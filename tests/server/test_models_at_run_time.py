"""Models that are loaded and unloaded while the server runs, by whoever may, and under load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import LoadError
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
