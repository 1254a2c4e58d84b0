"""Sessions: a client sends only new messages and gets the answer to the whole conversation."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError
from infer.server.sessions import store
from infer.server.sessions.database_threads import DatabaseThreads
from infer.server.sessions.leases import SessionLeases
from infer.server.sessions.store import LEASE_S, SessionStore
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.postgresql import pooled, postgresql, run_sql
from tests.support.serving import CHAT, App, Reply, chat_body, scripted, spelled, with_app
from tests.support.several_fronts import FrontOfSeveral, SharedByFronts, with_several_fronts

ASKED = ["Tell me of the fox and the river", "And then?", "Why?"]


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """URL of PostgreSQL, without the name of a database."""
    with postgresql() as url:
        yield url


@pytest.fixture(scope="module")
def pool(postgres: str) -> Iterator[str]:
    """URL of a pool before it."""
    with pooled(postgres) as url:
        yield url


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.peer),
        pytest.param("pool", marks=pytest.mark.peer),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sessions.db'}"
    urls: str = request.getfixturevalue(request.param)
    name = f"t{secrets.token_hex(8)}"
    run_sql(request.getfixturevalue("postgres") % "postgres", f"CREATE DATABASE {name}")
    return urls % name


async def call(app: App, method: str, path: str, body: Any = None, **headers: str) -> Any:
    data = json.dumps(body or {}).encode()
    headers = {"content-type": "application/json", **headers}
    reply = await app.send(method, f"/v1/sessions{path}", data, headers)
    assert reply.status == 200, reply.body
    return reply.json()


def question(text: str, **changes: Any) -> dict[str, Any]:
    return chat_body(messages=[{"role": "user", "content": text}], ignore_eos=True, **changes)


def answer_of(reply: Reply, form: str) -> tuple[str, int]:
    """Text and number of cached tokens."""
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


def test_a_call_that_was_cut_does_not_spoil_the_session(url: str) -> None:
    """Its arguments are not JSON, so nobody can answer it."""
    head, arguments = '<tool_call>\n{"name": "f", "arguments": ', '{"a": "b'
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": function}]
    body = {"tools": tools, "tool_choice": "required", "max_tokens": len(head + arguments)}

    async def use(app: App) -> None:
        session = (await call(app, "POST", ""))["id"]
        for _ in range(2):
            reply = await app.post(CHAT, question("Hi", session_id=session, **body))
            assert reply.status == 200, reply.body
            [choice] = reply.json()["choices"]
            [made] = choice["message"]["tool_calls"]
            assert (made["function"]["arguments"], choice["finish_reason"]) == (arguments, "length")
        found = (await call(app, "GET", f"/{session}"))["messages"]
        kept = {"role": "assistant", "content": '{"name": "f", "arguments": {"a": "b'}
        assert found == [{"role": "user", "content": "Hi"}, kept] * 2

    engine = scripted(spelled(head + arguments), max_seq_len=2048, num_pages=2048)
    with_app(engine, use, sessions=url)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_kept_whole_however_it_was_sent(url: str, stream: bool) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "b"}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]

    async def use(app: App) -> None:
        session = (await call(app, "POST", ""))["id"]
        body = question("Hi", session_id=session, tools=tools, stream=stream, max_tokens=len(text))
        assert (await app.post(CHAT, body)).status == 200
        [_, kept] = (await call(app, "GET", f"/{session}"))["messages"]
        [made] = kept["tool_calls"]
        assert made["function"] == {"name": "f", "arguments": '{"a": "b"}'}
        assert (kept["content"], made["type"], "index" in made) == (None, "function", False)

    engine = scripted(spelled(text), max_seq_len=2048, num_pages=2048)
    with_app(engine, use, sessions=url)


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


def test_the_prompt_of_a_turn_can_be_looked_at(url: str) -> None:
    """With the session's messages, and without a turn."""

    async def use(app: App) -> None:
        session = (await call(app, "POST", ""))["id"]
        await app.post(CHAT, question("Hi", session_id=session))
        history = (await call(app, "GET", f"/{session}"))["messages"]
        body = question("And?", session_id=session)
        shown = (await app.post(f"{CHAT}/render", body)).json()
        whole = {**question("And?"), "messages": [*history, *body["messages"]]}
        assert shown == (await app.post(f"{CHAT}/render", whole)).json()
        last = {"role": "assistant", "content": history[-1]["content"]}
        longer = {"messages": [last], "session_id": session, "continue_final_message": True}
        shown = (await app.post(f"{CHAT}/render", longer)).json()
        whole = {"messages": history, "continue_final_message": True}
        assert shown == (await app.post(f"{CHAT}/render", whole)).json()
        assert (await call(app, "GET", f"/{session}"))["messages"] == history
        missing = await app.post(f"{CHAT}/render", question("?", session_id="sess-1"))
        assert (missing.status, missing.error()["code"]) == (404, "session_not_found")

    with_app(make_hash_llm(), use, sessions=url)


def test_an_answer_goes_on_in_its_place(url: str) -> None:
    """Of a session: its last answer, or one that the client has and the session does not."""

    async def use(app: App) -> None:
        session = (await call(app, "POST", ""))["id"]
        goes_on = {"session_id": session, "continue_final_message": True, "max_tokens": 7}
        await app.post(CHAT, question("Hi", session_id=session, max_tokens=5))
        asked, begun = (await call(app, "GET", f"/{session}"))["messages"]
        body = {**question(""), **goes_on, "messages": [begun]}
        added = answer_of(await app.post(CHAT, body), "whole")[0]
        alone = {**body, "messages": [asked, begun]}
        del alone["session_id"]
        assert added == answer_of(await app.post(CHAT, alone), "whole")[0]
        longer = {"role": "assistant", "content": begun["content"] + added}
        assert (await call(app, "GET", f"/{session}"))["messages"] == [asked, longer]
        more = [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Sure, "}]
        added = answer_of(await app.post(CHAT, {**body, "messages": more}), "whole")[0]
        found = (await call(app, "GET", f"/{session}"))["messages"]
        end = {"role": "assistant", "content": "Sure, " + added}
        assert found == [asked, longer, more[0], end]
        sizes.append((session, sum(len(json.dumps(each)) for each in found)))

    sizes: list[tuple[str, int]] = []
    with_app(make_hash_llm(), use, sessions=url)
    [(session, num_bytes)] = sizes
    store = SessionStore(url)
    assert store.num_bytes("", session) == num_bytes
    store.close()


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
    tokens = [Keys(file, must_exist=False).create(name, KeyLimits()) for name in "ab"]
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


def test_a_second_turn_at_another_front_is_refused_before_it_computes(url: str) -> None:
    async def use(shared: SharedByFronts, fronts: list[FrontOfSeveral], apps: list[App]) -> None:
        name = (await call(apps[0], "POST", ""))["id"]
        body = question("?", session_id=name, max_tokens=200)
        asking = asyncio.ensure_future(apps[0].post(CHAT, body))
        while not apps[0].engine.num_open:
            await asyncio.sleep(0.01)
        second = await apps[1].post(CHAT, body)
        assert (second.status, second.error()["code"]) == (409, "session_busy")
        assert len((await apps[1].get("/v1/requests")).json()["data"]) == 1  # no engine saw it
        assert (await asking).status == 200
        for app in reversed(apps):  # the lease has ended with its turn, at once
            assert (await app.post(CHAT, {**body, "max_tokens": 5})).status == 200
        leave = asyncio.Event()
        asyncio.get_running_loop().call_later(0.1, leave.set)
        await apps[0].post(CHAT, body, leave=leave)  # a turn that breaks off
        await asyncio.sleep(0.2)
        assert (await apps[1].post(CHAT, {**body, "max_tokens": 5})).status == 200
        assert len((await call(apps[1], "GET", f"/{name}"))["messages"]) == 8

    with_several_fronts(use, lambda: make_hash_llm(step_s=0.005), 2, sessions=url)


def test_a_lease_ends_with_its_front(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its renewals, which hold it for as long as a turn lasts."""
    sessions, other = SessionStore(url), SessionStore(url)
    name = sessions.create("me")["id"]
    now_s = [1000.0]
    monkeypatch.setattr(store, "database_clock", lambda db: now_s[0])
    sessions.lease("me", name, "turn-1")
    for _ in range(5):
        now_s[0] += 0.9 * LEASE_S
        with pytest.raises(HttpError, match="another turn"):
            other.lease("me", name, "turn-2")
        sessions.renew_leases(["turn-1"])
    now_s[0] += 1.1 * LEASE_S
    other.lease("me", name, "turn-2")
    sessions.end_lease("turn-1")  # has it no more
    with pytest.raises(HttpError, match="another turn"):
        sessions.lease("me", name, "turn-3")
    with pytest.raises(HttpError, match="no such session"):
        sessions.lease("you", name, "turn-3")
    other.add_turn("me", name, 0, [{"role": "user", "content": "?"}], 0, "turn-2")
    sessions.lease("me", name, "turn-3")
    sessions.delete("me", name)
    with pytest.raises(HttpError, match="no such session"):
        sessions.lease("me", name, "turn-4")
    sessions.close()
    other.close()


def test_a_request_that_ends_while_it_waits_for_its_lease_leaves_none(url: str) -> None:
    sessions = SessionStore(url)
    name = sessions.create("me")["id"]

    def call_store(method: str, *arguments: Any) -> Any:
        if method == "lease":
            time.sleep(0.2)
        return getattr(sessions, method)(*arguments)

    async def end_early() -> None:
        leases, context = SessionLeases(threads := DatabaseThreads(), call_store), RequestContext()
        taking = asyncio.ensure_future(leases.take("me", name, context))
        await asyncio.sleep(0.05)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        context.cleanup.close()
        await leases.close()
        threads.close()

    asyncio.run(end_early())
    time.sleep(0.3)  # also what would still be under way has ended
    sessions.lease("me", name, "turn-2")
    sessions.close()


def test_a_server_without_sessions() -> None:
    async def use(app: App) -> None:
        for reply in (
            await app.post("/v1/sessions", {}),
            await app.get("/v1/sessions"),
            await app.post(CHAT, question("?", session_id="sess-1")),
        ):
            assert (reply.status, reply.error()["code"]) == (404, "sessions_off")
        assert (await app.post(CHAT, question("?"))).status == 200

    with_app(make_hash_llm(), use, sessions="off")


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


def test_characters_that_databases_dislike(url: str) -> None:
    odd = "a\x00b \u2028 \U0001f98a ' \\u0000 \x1b"

    async def use(app: App) -> None:
        messages = [{"role": "user", "content": odd}, {"role": "assistant", "content": "\x00"}]
        name = (await call(app, "POST", "", {"title": odd[3:], "messages": messages}))["id"]
        found = await call(app, "GET", f"/{name}")
        assert (found["title"], found["messages"]) == (odd[3:], messages)
        for path, method in (("", "POST"), (f"/{name}", "PATCH")):
            reply = await app.post(f"/v1/sessions{path}", {"title": odd}, method=method)
            assert (reply.status, reply.error()["param"]) == (422, "title")
        for wrong in ("\x00", f"{name}\x00", "x" * 5000, "'; DROP TABLE sessions; --"):
            assert (await app.get(f"/v1/sessions/{wrong}")).status == 404
            assert (await app.post(CHAT, question("?", session_id=wrong))).status == 404

    with_app(make_hash_llm(), use, sessions=url)


def test_two_servers_write_a_turn_at_the_same_time(url: str) -> None:
    """One of them succeeds; the other gets the same error as with a single server."""
    servers = [SessionStore(url) for _ in range(2)]
    name = servers[0].create("me")["id"]
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]

    def write(server: SessionStore, num_before: int) -> int:
        try:
            server.add_turn("me", name, num_before, turn)
        except HttpError as error:
            return error.status
        return 200

    with ThreadPoolExecutor(2) as threads:
        for i in range(30):
            statuses = threads.map(write, servers, [2 * i, 2 * i])
            assert sorted(statuses) == [200, 409]
    assert servers[0].read("me", name)["messages"] == turn * 30
    for server in servers:
        server.close()


def test_a_connection_that_is_gone_is_made_again(url: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("a file has no connection")
    sessions = SessionStore(url)
    name = sessions.create("me")["id"]
    others = "pg_stat_activity WHERE pid != pg_backend_pid() AND datname = current_database()"
    run_sql(url, f"SELECT pg_terminate_backend(pid) FROM {others}")
    assert sessions.read("me", name)["id"] == name
    sessions.close()


def test_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("nonsense", "nosuch://x", f"sqlite:///{tmp_path}/no/such/folder.db"):
        with pytest.raises(ConfigError, match="sessions: the database cannot be used"):
            App(make_hash_llm(), sessions=wrong)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def use(app: App) -> None:
        assert not (tmp_path / "infer").exists()  # not made before the first use
        await call(app, "POST", "")

    with_app(make_hash_llm(), use)
    assert (tmp_path / "infer" / "sessions.db").exists()
    assert ServerSettings().sessions is None
