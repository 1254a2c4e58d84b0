"""A database of sessions that is locked, read-only or gone: a 503, and no other request waits."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infer.server.sessions.store import SessionStore
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.serving import CHAT, App, chat_body, with_app


def check(reply: object) -> None:
    assert reply.status == 503, reply  # type: ignore[attr-defined]
    error = reply.json()["error"]  # type: ignore[attr-defined]
    assert (error["code"], error["type"]) == ("database_unavailable", "server_error")
    assert int(reply.headers["retry-after"]) > 0  # type: ignore[attr-defined]
    assert "sqlite" not in error["message"].lower()


def test_a_locked_database_delays_nobody(tmp_path: Path) -> None:
    """Who waits for it could wait for an hour; others are answered, and those are when it is free.
    Further calls than may wait are refused at once."""
    file = tmp_path / "sessions.db"

    async def use(app: App) -> None:
        assert (await app.get("/v1/sessions")).status == 200
        with sqlite3.connect(file, isolation_level=None) as other:
            other.execute("begin exclusive")
            waiting = [
                asyncio.ensure_future(app.post("/v1/sessions", {"title": str(i)}))
                for i in range(12)
            ]
            await asyncio.sleep(0.2)
            assert (await app.get("/openapi.json")).status == 200  # made in a thread, too
            check(await app.get("/v1/sessions"))
            assert not any(each.done() for each in waiting)
            other.execute("rollback")
            assert {(await each).status for each in waiting} == {200}

    limits = ServerLimits(database_busy_s=3600, max_database_calls=12)
    with_app(make_hash_llm(), use, sessions=f"sqlite:///{file}", limits=limits)


def test_a_locked_database_is_a_503(tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"

    async def use(app: App) -> None:
        session = (await app.post("/v1/sessions", {})).json()["id"]
        with sqlite3.connect(file, isolation_level=None) as other:
            other.execute("begin exclusive")
            waiting = [
                asyncio.ensure_future(app.post("/v1/sessions", {"title": str(i)}))
                for i in range(12)
            ]
            for each in waiting:
                check(await each)
            check(await app.post(CHAT, chat_body(session_id=session)))
            other.execute("rollback")
        # Locked while the answer is generated, so the turn cannot be written.
        chat = app.post(CHAT, chat_body(session_id=session, stream=True, max_tokens=40))
        asking = asyncio.ensure_future(chat)
        await asyncio.sleep(0.1)
        with sqlite3.connect(file, isolation_level=None) as other:
            other.execute("begin exclusive")
            # The answer is whole: its end comes, then the error, then the end of the stream.
            *_, end, last, done, rest = (await asking).body.decode().split("\n\n")
            (choice,) = json.loads(end.removeprefix("data: "))["choices"]
            assert choice["finish_reason"] == "length"
            error = json.loads(last.removeprefix("data: "))["error"]
            assert error["code"] == "database_unavailable"
            assert (done, rest) == ("data: [DONE]", "")
            other.execute("rollback")
        found = await app.get(f"/v1/sessions/{session}")
        assert (found.status, found.json()["messages"]) == (200, [])

    limits = ServerLimits(database_busy_s=0.5)
    with_app(make_hash_llm(step_s=0.02), use, sessions=f"sqlite:///{file}", limits=limits)


@pytest.mark.parametrize("cause", ["read-only", "no place"])
def test_a_database_that_cannot_be_written_is_a_503(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "sessions.db"
    sessions: str | None = f"sqlite:///{file}"
    if cause == "read-only":
        SessionStore(str(sessions)).close()
        sessions = f"sqlite:///file:{file}?mode=ro&uri=true"
    else:
        (tmp_path / "state").write_text("no folder", encoding="utf-8")
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        sessions = None

    async def use(app: App) -> None:
        check(await app.post("/v1/sessions", {}))

    with_app(make_hash_llm(), use, sessions=sessions)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_one_for_all_threads(url: str) -> None:
    store = SessionStore(url)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: store.create("owner")["id"], range(32)))
        found = list(threads.map(lambda _: {each["id"] for each in store.all("owner")}, range(8)))
    assert found == [set(made)] * 8
