"""Responses that are stored: read again, gone on from, listed, deleted, cancelled, by their key"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from infer.server.http.error_responses import HttpError
from infer.server.sessions.store import MAX_SESSION_BYTES, Quota, SessionStore, StoredResponse
from tests.support.doubles import make_hash_llm
from tests.support.serving import CHAT, App, check_refused, with_app
from tests.support.tenants import make

RESPONSES = "/v1/responses"
HERE: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def _database(tmp_path: Path) -> None:
    HERE["sessions"] = f"sqlite:///{tmp_path}/sessions.db"


def body(text: Any = "Hello", **more: Any) -> dict[str, Any]:
    return {"input": text, "max_output_tokens": 8, "temperature": 0, **more}


def completed(data: bytes) -> dict[str, Any]:
    """The response that a stream ends with."""
    last = data.decode().split("\n\n")[-2].split("\n")[1]
    fields = json.loads(last.removeprefix("data: "))
    assert fields["type"] in ("response.completed", "response.incomplete")
    return dict(fields["response"])


async def prompt_of(app: App, name: str) -> int:
    return int((await app.get(f"/v1/requests/{name}")).json()["prompt_tokens"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_read_again_as_it_was(stream: bool) -> None:
    async def use(app: App) -> None:
        reply = await app.post(RESPONSES, body(stream=stream))
        made = completed(reply.body) if stream else reply.json()
        assert made["store"] is True
        again = await app.get(f"{RESPONSES}/{made['id']}")
        assert (again.status, again.json()) == (200, made)

    with_app(make_hash_llm(), use, **HERE)


def test_going_on_is_sending_the_whole_conversation() -> None:
    """Three turns, each with the items of all before it; and a branch from the first."""

    async def use(app: App) -> None:
        items: list[Any] = []
        name, first = None, ""
        for i, text in enumerate(("Hello", [{"role": "user", "content": "More"}], "Again")):
            asked = [{"role": "user", "content": text}] if isinstance(text, str) else text
            more: dict[str, Any] = {"previous_response_id": name} if name else {}
            made = (await app.post(RESPONSES, body(text, **more))).json()
            whole = (await app.post(RESPONSES, body([*items, *asked], store=False))).json()
            assert texts(made) == texts(whole)
            assert made["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
            assert made["previous_response_id"] == name
            counted = await app.post(f"{RESPONSES}/input_tokens", {"input": text, **more})
            assert counted.json()["input_tokens"] == made["usage"]["input_tokens"]
            items += [*asked, *made["output"]]
            name, first = made["id"], first or made["id"]
            listed = (await app.get(f"{RESPONSES}/{name}/input_items")).json()["data"]
            assert len(listed) == 1, i
        branch = (await app.post(RESPONSES, body("Else", previous_response_id=first))).json()
        assert branch["usage"]["input_tokens"] < made["usage"]["input_tokens"]
        # The first is deleted; those that go on from it stay.
        gone = await app.send("DELETE", f"{RESPONSES}/{first}")
        assert gone.json() == {"id": first, "object": "response", "deleted": True}
        assert (await app.post(RESPONSES, body(previous_response_id=name))).status == 200
        refused = await app.post(RESPONSES, body(previous_response_id=first))
        param, code = "previous_response_id", "previous_response_not_found"
        check_refused(refused, 404, param, code, "no such response")

    with_app(make_hash_llm(num_pages=512), use, **HERE)


def texts(made: dict[str, Any]) -> list[str]:
    return [part["text"] for item in made["output"] for part in item["content"]]


def test_what_is_not_stored_is_not_found() -> None:
    async def use(app: App) -> None:
        made = (await app.post(RESPONSES, body(store=False))).json()
        assert made["store"] is False
        names = [made["id"], "resp_x", "x", "sess-1", "resp_%00", "resp_" + "a" * 5000]
        names.append((await app.post("/v1/sessions", {})).json()["id"])
        for name in names:
            for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                reply = await app.send(method, f"{RESPONSES}/{name}{tail}")
                assert (reply.status, reply.error()["code"]) == (404, "response_not_found")
            if "%" not in name:
                reply = await app.post(RESPONSES, body(previous_response_id=name))
                assert (reply.status, reply.error()["code"]) == (404, "previous_response_not_found")
        refused = await app.post(RESPONSES, body(previous_response_id="a\0b"))
        assert refused.status == 404
        wrong: Any
        for wrong in (5, ["x"], {}, True):
            refused = await app.post(RESPONSES, body(previous_response_id=wrong))
            assert (refused.status, refused.error()["param"]) == (400, "previous_response_id")
        for wrong in ("yes", 1, []):
            refused = await app.post(RESPONSES, body(store=wrong))
            assert (refused.status, refused.error()["param"]) == (400, "store")
        assert (await app.post(RESPONSES, body(background=True))).status == 400

    with_app(make_hash_llm(), use, **HERE)


def test_a_response_is_no_session() -> None:
    async def use(app: App) -> None:
        name = (await app.post(RESPONSES, body())).json()["id"]
        assert (await app.get("/v1/sessions")).json()["data"] == []
        said = {"messages": [{"role": "user", "content": "x"}], "session_id": name}
        for reply in (
            await app.get(f"/v1/sessions/{name}"),
            await app.send("DELETE", f"/v1/sessions/{name}"),
            await app.post(f"/v1/sessions/{name}/fork", {}),
            await app.post(CHAT, said),
        ):
            assert (reply.status, reply.error()["code"]) == (404, "session_not_found")
        assert (await app.get(f"{RESPONSES}/{name}")).status == 200

    with_app(make_hash_llm(), use, **HERE)


def test_another_keys_response_is_not_found(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    alice, bob = make(file, "alice"), make(file, "bob")

    async def use(app: App) -> None:
        name = (await app.post(RESPONSES, body(), headers=alice)).json()["id"]
        for method, tail in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            reply = await app.send(method, f"{RESPONSES}/{name}{tail}", headers=bob)
            assert (reply.status, reply.error()["code"]) == (404, "response_not_found")
        reply = await app.post(RESPONSES, body(previous_response_id=name), headers=bob)
        assert (reply.status, reply.error()["code"]) == (404, "previous_response_not_found")
        reply = await app.post(f"{RESPONSES}/{name}/cancel", {}, headers=bob)
        assert reply.status == 404
        assert (await app.get(f"{RESPONSES}/{name}", **alice)).status == 200

    with_app(make_hash_llm(), use, api_keys=str(file), **HERE)


def test_the_oldest_make_room_and_sessions_do_not() -> None:
    async def use(app: App) -> None:
        sessions = [(await app.post("/v1/sessions", {})).json()["id"] for _ in range(2)]
        names = [(await app.post(RESPONSES, body())).json()["id"] for _ in range(6)]
        found = [(await app.get(f"{RESPONSES}/{name}")).status for name in names]
        assert sorted(found) == [200, 200, 200, 404, 404, 404]
        assert (await app.get(f"{RESPONSES}/{names[-1]}")).status == 200
        sessions += [(await app.post("/v1/sessions", {})).json()["id"] for _ in range(3)]
        for name in sessions:
            assert (await app.get(f"/v1/sessions/{name}")).status == 200
        full = (await app.post(RESPONSES, body())).json()
        assert full["status"] == "incomplete"  # max_output_tokens
        assert full["store"] is False
        streamed = completed((await app.post(RESPONSES, body(stream=True))).body)
        assert streamed["store"] is False
        assert (await app.post("/v1/sessions", {})).status == 429

    with_app(make_hash_llm(), use, max_sessions=5, **HERE)


@pytest.mark.parametrize("sessions", ["off", "default"])
def test_a_server_without_sessions_answers_all_the_same(
    sessions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    given = {"sessions": sessions} if sessions == "off" else {}

    async def use(app: App) -> None:
        for more in ({}, {"store": True}):
            made = await app.post(RESPONSES, body(**more))
            assert (made.status, made.json()["store"]) == (200, False)
        refused = await app.post(RESPONSES, body(previous_response_id="resp_1"))
        assert refused.status == (404 if sessions == "off" else 503)

    with_app(make_hash_llm(), use, **given)


def test_a_running_response_is_cancelled() -> None:
    async def use(app: App) -> None:
        asking = asyncio.ensure_future(
            app.post(RESPONSES, body(stream=True, max_output_tokens=400))
        )
        while not (found := (await app.get("/v1/requests")).json()["data"]):
            await asyncio.sleep(0.001)
        name = found[0]["id"]
        assert (await app.get(f"{RESPONSES}/{name}")).status == 404  # not whole yet
        done = (await app.post(f"{RESPONSES}/{name}/cancel", {})).json()
        assert (done["id"], done["status"], done["object"]) == (name, "cancelled", "response")
        assert b"response.failed" in (await asking).body
        assert (await app.get(f"{RESPONSES}/{name}")).status == 404
        again = await app.post(f"{RESPONSES}/{name}/cancel", {})
        assert (again.status, again.error()["code"]) == (400, "response_not_running")
        chat = await app.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        for other in (chat.json()["id"], "x", "resp_x"):
            assert (await app.post(f"{RESPONSES}/{other}/cancel", {})).status == 404

    with_app(make_hash_llm(step_s=0.005, num_pages=512), use, **HERE)


def test_input_items_come_in_pages() -> None:
    async def use(app: App) -> None:
        given: list[dict[str, Any]] = [{"role": "user", "content": f"m{i}"} for i in range(7)]
        given[3] = {"type": "message", "id": "mine", "role": "user", "content": []}
        name = (await app.post(RESPONSES, body(given, instructions="Be brief."))).json()["id"]
        at = f"{RESPONSES}/{name}/input_items"
        whole = (await app.get(f"{at}?order=asc&limit=100")).json()
        assert [each["role"] for each in whole["data"]] == ["user"] * 7
        assert whole["data"][0]["content"] == [{"type": "input_text", "text": "m0"}]
        assert whole["data"][3]["id"] == "mine"
        assert whole["has_more"] is False
        found: list[Any] = []
        while True:
            after = f"&after={found[-1]['id']}" if found else ""
            page = (await app.get(f"{at}?limit=3{after}")).json()
            found += page["data"]
            assert page["last_id"] == found[-1]["id"]
            if not page["has_more"]:
                break
        assert found == whole["data"][::-1]
        for wrong in ("limit=0", "limit=101", "limit=x", "limit=-1", "limit=%D9%A1", "order=up"):
            assert (await app.get(f"{at}?{wrong}")).error()["param"] == wrong.partition("=")[0]
        assert (await app.get(f"{at}?after=none")).error()["param"] == "after"

    with_app(make_hash_llm(), use, **HERE)


def test_one_that_is_too_long_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    store = SessionStore(HERE["sessions"])
    small = StoredResponse({"id": "resp_1", "output": []}, [], [{"content": "x"}])
    store.put_response("a", small)
    huge = StoredResponse({"id": "resp_2"}, [{"content": "x" * MAX_SESSION_BYTES}], [])
    with pytest.raises(HttpError) as refused:
        store.put_response("a", huge)
    assert (refused.value.status, refused.value.code) == (413, "response_too_long")
    found = store.read_response("a", "resp_1")
    assert found is not None
    assert found[0] == small
    store.close()

    tight = SessionStore(HERE["sessions"], Quota(5, 5, 100_000))
    with pytest.raises(HttpError) as refused:
        tight.put_response("a", StoredResponse({"id": "resp_3"}, [{}] * 10, []))
    assert refused.value.code == "session_quota_exceeded"
    assert tight.read_response("a", "resp_1") == found  # nothing was deleted for it
    tight.close()
