"""Several fronts of one cluster, in one process: what one knows, all answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from infer.engine.client.async_llm import AsyncLLM, Reservation
from infer.errors import OverloadedError
from infer.server.front_identity import seed_of_front
from infer.types import Request
from tests.support.doubles import make_hash_llm
from tests.support.serving import COMPLETIONS, App, completion_body, with_app
from tests.support.several_fronts import FrontOfSeveral, SharedByFronts, with_several_fronts
from tests.support.tenants import make

Fronts = list[FrontOfSeveral]
LONG = completion_body(max_tokens=400, ignore_eos=True)


def slow_llm() -> AsyncLLM:
    return make_hash_llm(step_s=0.01, num_pages=2048)


async def running(app: App) -> dict[str, Any]:
    """The only request that runs, as a front lists it."""
    while True:
        listed = (await app.get("/v1/requests")).json()["data"]
        found = [each for each in listed if each["state"] == "running"]
        if found:
            [one] = found
            return dict(one)
        await asyncio.sleep(0.01)


def test_any_front_knows_of_all_requests() -> None:
    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        made = [(await app.post(COMPLETIONS, completion_body())).json()["id"] for app in apps]
        for name, front in zip(made, fronts, strict=True):
            assert name.startswith(f"cmpl-{front.tag}")
        for app in apps:
            listed = (await app.get("/v1/requests")).json()
            assert {each["id"] for each in listed["data"]} == set(made)
            assert listed["missing_fronts"] == []
            for name in made:
                shown = (await app.get(f"/v1/requests/{name}")).json()
                assert (shown["id"], shown["outcome"]) == (name, "length")
                by_key = name.removeprefix("cmpl-")
                assert (await app.get(f"/v1/requests/{by_key}")).json()["id"] == name
            for wrong in ("cmpl-x", f"cmpl-{fronts[1].tag}{24 * '0'}", f"cmpl-{32 * '0'}"):
                refused = await app.get(f"/v1/requests/{wrong}")
                assert (refused.status, refused.error()["code"]) == (404, "request_not_found")

        asking = asyncio.ensure_future(apps[0].post(COMPLETIONS, LONG))
        name = (await running(apps[2]))["id"]
        done = await apps[1].send("DELETE", f"/v1/requests/{name}")
        assert done.json() == {"id": name, "object": "request.cancel", "cancelled": True}
        assert (await asking).error()["code"] == "request_cancelled"
        assert (await apps[1].post(f"/v1/requests/{name}/cancel", {})).json()["cancelled"] is False

        stats = (await apps[0].get("/stats")).json()
        assert set(stats["fronts"]) == {front.name for front in fronts}
        assert stats["queue_depth"] == 0
        text = (await apps[1].get("/metrics")).body.decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
        assert len(names) == len(set(names)) > 40
        by_front = {
            sample.labels["front"]: sample.value
            for sample in families["infer:generation_tokens"].samples
            if sample.name.endswith("_total")
        }
        assert set(by_front) == {front.name for front in fronts}
        assert by_front[fronts[1].name] == 8

    with_several_fronts(use, slow_llm, 3)


def test_a_front_that_does_not_answer_is_named() -> None:
    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        made = [(await app.post(COMPLETIONS, completion_body())).json()["id"] for app in apps]
        await apps[0].get("/v1/requests")
        fronts[2].freeze()
        listed, stats, metrics, shown = await asyncio.gather(
            *(apps[0].get(path) for path in ("/v1/requests", "/stats", "/metrics")),
            apps[0].get(f"/v1/requests/{made[2]}"),
        )
        assert listed.json()["missing_fronts"] == stats.json()["missing_fronts"] == [fronts[2].name]
        assert {each["id"] for each in listed.json()["data"]} == set(made[:2])
        assert f'infer:front_up{{front="{fronts[2].name}"}} 0.0' in metrics.body.decode()
        assert f'infer:front_up{{front="{fronts[1].name}"}} 1.0' in metrics.body.decode()
        assert (shown.status, shown.error()["code"]) == (503, "front_unavailable")
        assert fronts[2].name in shown.error()["message"]
        shared.has_gone = True  # nobody can be asked; what is here is answered
        listed = (await apps[0].get("/v1/requests")).json()
        assert listed["missing_fronts"] == sorted(front.name for front in fronts[1:])
        assert [each["id"] for each in listed["data"]] == made[:1]
        shared.renew()  # the new one knows nobody yet, and who does not come is still missing
        listed = (await apps[0].get("/v1/requests")).json()
        assert fronts[2].name in listed["missing_fronts"]
        assert (await apps[0].get(f"/v1/requests/{made[0]}")).status == 200

    with_several_fronts(use, slow_llm, 3)


def test_questions_of_one_key_leave_room_for_others() -> None:
    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        ids = [f"cmpl-{fronts[1].tag}{number:024x}" for number in range(50)]
        replies = await asyncio.gather(*(apps[0].get(f"/v1/requests/{name}") for name in ids))
        assert [reply.status for reply in replies] == [404] * 50  # each waited for its turn
        fronts[1].freeze()
        replies = await asyncio.gather(*(apps[0].get(f"/v1/requests/{name}") for name in ids[:8]))
        codes = [reply.error()["code"] for reply in replies]
        assert codes == ["front_unavailable"] * 4 + ["overloaded"] * 4
        same = await asyncio.gather(*(apps[0].get("/stats") for _ in range(8)))
        assert [reply.status for reply in same] == [200] * 8

    with_several_fronts(use, slow_llm, 2)


def test_a_key_sees_its_own_requests_at_all_fronts(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = make(file, "alice"), make(file, "bob")
    admin = make(file, "root", admin=True)

    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        asking = asyncio.ensure_future(apps[0].post(COMPLETIONS, LONG, headers=alice))
        while not (listed := (await apps[1].get("/v1/requests", **alice)).json()["data"]):
            await asyncio.sleep(0.01)
        name = listed[0]["id"]
        assert (await apps[1].get("/v1/requests", **bob)).json()["data"] == []
        assert (await apps[1].get(f"/v1/requests/{name}", **bob)).status == 404
        refused = await apps[1].post(f"/v1/requests/{name}/cancel", {}, headers=bob)
        assert refused.status == 404
        for path in ("/stats", "/metrics"):
            assert (await apps[1].get(path, **bob)).status == 403
            assert (await apps[1].get(path, **admin)).status == 200
        assert (await apps[1].get("/v1/requests")).status == 401
        assert (await apps[1].get(f"/v1/requests/{name}", **admin)).json()["id"] == name
        await apps[1].post(f"/v1/requests/{name}/cancel", {}, headers=alice)
        assert (await asking).error()["code"] == "request_cancelled"

    with_several_fronts(use, slow_llm, 2, api_keys=str(file))


def test_a_keys_limits_are_those_of_all_fronts(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alone = make(file, "alone", max_concurrent=1)
    few = make(file, "few", requests_per_minute=3)
    small = make(file, "small", tokens_per_minute=60)

    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        body = completion_body(prompt="abcd", max_tokens=15)
        asking = asyncio.ensure_future(apps[0].post(COMPLETIONS, LONG, headers=alone))
        while not apps[0].engine.num_open:
            await asyncio.sleep(0.01)
        second = await apps[1].post(COMPLETIONS, body, headers=alone)
        assert (second.status, second.error()["message"]) == (
            429,
            "this key may have 1 requests open",
        )
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        replies = [await apps[i % 2].post(COMPLETIONS, body, headers=few) for i in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        left = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
        assert left == ["2", "1", "0", "0"]
        assert 1 <= int(replies[3].headers["retry-after"]) <= 21

        replies = [await apps[i % 2].post(COMPLETIONS, body, headers=small) for i in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        refused = await apps[1].post(COMPLETIONS, {**body, "prompt": "a" * 300}, headers=small)
        assert (refused.status, refused.error()["code"]) == (400, "tokens_per_minute_exceeded")

        shared.has_gone = True  # a front gives its share, here the half of one request
        while any(front.limits.is_connected for front in fronts):
            await asyncio.sleep(0.05)
        replies = [await app.post(COMPLETIONS, body, headers=alone) for app in apps]
        assert [reply.status for reply in replies] == [200, 200]
        assert (await apps[0].post(COMPLETIONS, body, headers=few)).status == 429

    with_several_fronts(use, slow_llm, 2, api_keys=str(file))


def test_what_was_granted_and_not_used_is_given_back(tmp_path: Path) -> None:
    """The tokens of a request that the engine has no room for, after its key's limits let it in."""
    file = tmp_path / "keys.json"
    key = make(file, "key", tokens_per_minute=100)

    def full(reservation: Reservation, requests: Sequence[Request]) -> None:
        raise OverloadedError("there is no room")

    async def use(shared: SharedByFronts, fronts: Fronts, apps: list[App]) -> None:
        body = completion_body(prompt="abcd", max_tokens=80)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Reservation, "check", full)
            for _ in range(3):
                refused = await apps[0].post(COMPLETIONS, body, headers=key)
                assert refused.error()["message"] == "there is no room"
                await asyncio.sleep(0.1)
        assert (await apps[1].post(COMPLETIONS, body, headers=key)).status == 200
        assert (await apps[0].post(COMPLETIONS, body, headers=key)).status == 429

    with_several_fronts(use, slow_llm, 2, api_keys=str(file))


def test_a_retry_with_the_same_seed_at_another_front_has_the_same_tokens() -> None:
    body = completion_body(max_tokens=30, temperature=1.5, ignore_eos=True)
    unseeded = {name: value for name, value in body.items() if name != "seed"}
    texts: dict[str, list[str]] = {"seed": [], "none": []}

    async def use(app: App) -> None:
        for name, each in (("seed", body), ("none", unseeded), ("none", unseeded)):
            reply = (await app.post(COMPLETIONS, each)).json()
            texts[name].append(reply["choices"][0]["text"])

    for front in ("front-00000001", "front-00000002"):
        with_app(make_hash_llm(seed=seed_of_front(7, front)), use)
    assert len(set(texts["seed"])) == 1
    assert len(set(texts["none"])) == 4
