"""Sessions: a client sends only what is new and gets what it would have got with the whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from serving import CHAT, App, Reply, chat_body, with_app

from doubles import make_hash_llm
from infer.errors import ConfigError
from infer.server.keys import Keys, Limits
from infer.server.settings import ServerSettings

ASKED = ["Tell me of the fox and the river", "And then?", "Why?"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'sessions.db'}"


async def call(app: App, method: str, path: str, body: Any = None, **headers: str) -> Any:
    data = json.dumps(body or {}).encode()
    headers = {"content-type": "application/json", **headers}
    reply = await app.send(method, f"/v1/sessions{path}", data, headers)
    assert reply.status == 200, reply.body
    return reply.json()


def question(text: str, **changes: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": text}], ignore_eos=True, **changes)


def answer_of(reply: Reply, form: str) -> tuple[str, int]:
    """Text and cached tokens."""
    if form == "whole":
        body = reply.json()
        text = body["choices"][0]["message"]["content"]
        return text, body["usage"]["prompt_tokens_details"]["cached_tokens"]
    if form == "events":
        lines = reply.body.decode().splitlines()
        data = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        cached = data[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]
        return "".join(chunk.get("token", "") for chunk in data), cached
    *chunks, last = reply.events()
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return text, last["usage"]["prompt_tokens_details"]["cached_tokens"]


FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "events": {"stream": True, "stream_format": "events"},
}


@pytest.mark.parametrize("form", FORMS)
def test_only_the_new_message_is_sent(form: str, url: str) -> None:
    async def use(app: App) -> None:
        session = (await call(app, "POST", "", {"title": "fox"}))["id"]
        history: list[dict[str, Any]] = []
        for turn, text in enumerate(ASKED):
            body = question(text, session_id=session, **FORMS[form])
            answer, cached = answer_of(await app.post(CHAT, body), form)
            assert answer
            history.append({"role": "user", "content": text})
            whole = await app.post(CHAT, {**question(text), "messages": history})
            assert answer == answer_of(whole, "whole")[0]
            history.append({"role": "assistant", "content": answer})
            assert cached > 20 if turn else cached == 0
        found = await call(app, "GET", f"/{session}")
        assert found["messages"] == history
        assert found["title"] == "fox"

    with_app(make_hash_llm(), use, sessions=url)


def test_what_can_be_done_with_sessions(url: str) -> None:
    async def use(app: App) -> None:
        first = (await call(app, "POST", ""))["id"]
        for text in ASKED[:2]:
            assert (await app.post(CHAT, question(text, session_id=first))).status == 200
        whole = (await call(app, "GET", f"/{first}"))["messages"]
        assert (await call(app, "PATCH", f"/{first}", {"title": "new"}))["title"] == "new"
        fork = await call(app, "POST", f"/{first}/fork", {"at": 2})
        assert fork["title"] == "new"
        assert (await app.post(CHAT, question("No.", session_id=fork["id"]))).status == 200
        forked = (await call(app, "GET", f"/{fork['id']}"))["messages"]
        assert forked[:2] == whole[:2]
        assert forked[2]["content"] == "No."
        assert (await call(app, "GET", f"/{first}"))["messages"] == whole
        listed = (await call(app, "GET", ""))["data"]
        assert {entry["id"] for entry in listed} == {first, fork["id"]}
        assert (await call(app, "DELETE", f"/{first}"))["deleted"] is True
        assert (await app.get(f"/v1/sessions/{first}")).status == 404
        seeded = await call(app, "POST", "", {"messages": whole})
        assert (await call(app, "GET", f"/{seeded['id']}"))["messages"] == whole

    async def later(app: App) -> None:
        assert len((await call(app, "GET", ""))["data"]) == 2

    with_app(make_hash_llm(), use, sessions=url)
    with_app(make_hash_llm(), later, sessions=url)  # another server on the same file


def test_a_session_is_its_owners(url: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    tokens = [Keys(file, must_exist=False).create(name, Limits()) for name in "ab"]
    a, b = ({"authorization": f"Bearer {token}"} for token in tokens)

    async def use(app: App) -> None:
        name = (await call(app, "POST", "", {"title": "mine"}, **a))["id"]
        path = f"/v1/sessions/{name}"
        body = json.dumps({"title": "x"}).encode()
        for headers, status in ((b, 404), (a, 200)):
            headers = {"content-type": "application/json", **headers}
            for method in ("GET", "PATCH"):
                reply = await app.send(method, path, body, headers)
                assert reply.status == status, method
            reply = await app.send("POST", f"{path}/fork", b"{}", headers)
            assert reply.status == status
            asked = await app.post(CHAT, question("?", session_id=name), headers=headers)
            assert asked.status == status
        assert (await app.send("DELETE", path, headers=b)).status == 404
        assert (await call(app, "GET", "", **b))["data"] == []
        assert len((await call(app, "GET", "", **a))["data"]) == 2

    with_app(make_hash_llm(), use, sessions=url, api_keys=str(file))


def test_an_answer_that_breaks_off_is_not_kept(url: str) -> None:
    async def use(app: App) -> None:
        name = (await call(app, "POST", ""))["id"]
        for stream in (False, True):
            leave = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05, leave.set)
            body = question("?", session_id=name, max_tokens=300, stream=stream)
            await app.post(CHAT, body, leave=leave)
            limited = await app.post(CHAT, {**body, "timeout": 0.05})
            assert b"deadline_exceeded" in limited.body
        assert (await call(app, "GET", f"/{name}"))["messages"] == []
        both = [app.post(CHAT, question("?", session_id=name, max_tokens=20)) for _ in range(2)]
        replies = sorted(await asyncio.gather(*both), key=lambda reply: reply.status)
        assert [reply.status for reply in replies] == [200, 409]
        assert replies[1].error()["code"] == "session_busy"
        assert len((await call(app, "GET", f"/{name}"))["messages"]) == 2

    with_app(make_hash_llm(step_s=0.005), use, sessions=url)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"session_id": "sess-nix"}, 404, "session_id"),
        ({"session_id": ""}, 404, "session_id"),
        ({"session_id": 7}, 400, "session_id"),
        ({"n": 2}, 422, "n"),
        ({"messages": 3}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], status: int, param: str, url: str) -> None:
    async def use(app: App) -> None:
        name = (await call(app, "POST", ""))["id"]
        reply = await app.post(CHAT, {**question("?", session_id=name), **changes})
        assert (reply.status, reply.error()["param"]) == (status, param)
        for path, body in (
            ("/nix/fork", {}),
            (f"/{name}/fork", {"at": 1}),
            ("", {"title": "x" * 201}),
        ):
            reply = await app.post(f"/v1/sessions{path}", body)
            assert reply.status in (404, 422)
        assert (await app.post("/v1/sessions", {"messages": [{"role": "x"}]})).status == 422

    with_app(make_hash_llm(), use, sessions=url)


def test_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("nonsense", "nosuch://x", f"sqlite:///{tmp_path}/no/such/folder.db"):
        with pytest.raises(ConfigError, match="sessions: the database cannot be used"):
            App(make_hash_llm(), sessions=wrong)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def use(app: App) -> None:
        assert not (tmp_path / "infer").exists()  # nothing is made before it is wanted
        await call(app, "POST", "")

    with_app(make_hash_llm(), use)
    assert (tmp_path / "infer" / "sessions.db").exists()
    assert ServerSettings().sessions is None
