"""A full queue, an engine that fails or is closed, and what an unexpected exception may tell."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from serving import (
    BODIES,
    COMPLETIONS,
    App,
    Reply,
    ask,
    completion_body,
    scripted,
    serving,
    with_app,
)

from doubles import make_hash_llm
from infer.errors import EngineDeadError, EngineError


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(path: str, stream: bool) -> None:
    """One seat, one place to wait: the third is told when to come again, and nothing is lost."""

    async def use(app: App) -> None:
        body = BODIES[path](max_tokens=40, stream=stream, ignore_eos=True)
        first = [asyncio.ensure_future(app.post(path, body)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused = await app.post(path, body)
        error = refused.error()
        assert (refused.status, error["type"]) == (503, "overloaded_error")
        assert (error["param"], error["code"]) == (None, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert [reply.status for reply in await asyncio.gather(*first)] == [200, 200]
        assert (await app.post(path, body)).status == 200

    with_app(make_hash_llm(max_batch_size=1, max_waiting_requests=1, step_s=0.005), use)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_choices_that_do_not_all_fit_leave_nothing(path: str, stream: bool) -> None:
    engine = make_hash_llm(max_batch_size=2, max_waiting_requests=0, step_s=0.002)
    reply = ask(engine, path, BODIES[path](n=3, max_tokens=100, stream=stream))
    assert reply.status == 503
    assert "retry-after" in reply.headers


class Broken:
    """A runner that works for a while."""

    def __init__(self, good_steps: int) -> None:
        self.left = good_steps

    def execute(self, plan: Any) -> Any:
        if not self.left:
            raise RuntimeError("secret: /etc/passwd at 0x7f00")
        self.left -= 1
        return scripted([33])._worker._core.runner.execute(plan)


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_error(path: str) -> None:
    reply = ask(scripted([], runner=Broken(3)), path, BODIES[path]())
    error = reply.error()
    assert (reply.status, error["type"]) == (500, "server_error")
    assert (error["param"], error["code"]) == (None, "engine_error")
    assert b"secret" not in reply.body


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("form", ["openai", "events"])
def test_an_engine_error_in_a_stream(path: str, choices: int, form: str) -> None:
    if form == "events":
        choices = 1
    body = BODIES[path](stream=True, n=choices, stream_format=form)
    reply = ask(scripted([], runner=Broken(3)), path, body)
    assert reply.status == 200
    assert b"[DONE]" not in reply.body
    assert b"event: done" not in reply.body
    name, _, data = reply.writes[-1].decode().rstrip("\n").rpartition("data: ")
    assert name == ("event: error\n" if form == "events" else "")
    assert json.loads(data)["error"] == {
        "message": "the engine failed while computing this request",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }
    assert b"secret" not in reply.body
    assert sum(b"error" in write for write in reply.writes) == 1


SECRET = "0x7f12 /home/somebody/prompt.txt"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("raised", "status", "code", "told"),
    [
        (RuntimeError(SECRET), 500, "internal_error", False),
        (ValueError(SECRET), 500, "internal_error", False),
        (KeyError(SECRET), 500, "internal_error", False),
        (RecursionError(SECRET), 500, "internal_error", False),
        (EngineError("it was too hot"), 500, "engine_error", True),
        (EngineDeadError("it is gone"), 503, "engine_unavailable", True),
    ],
)
def test_what_an_exception_tells(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    raised: Exception,
    status: int,
    code: str,
    told: bool,
) -> None:
    """Our own words are passed on; those of any other exception never are."""
    engine = make_hash_llm()

    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(engine, "make_request", fail)
    reply = ask(engine, path, BODIES[path]())
    error = reply.error()
    assert (reply.status, error["type"], error["code"]) == (status, "server_error", code)
    assert (str(raised) in error["message"]) == told
    assert ("retry-after" in reply.headers) == (status == 503)
    assert SECRET.encode() not in reply.body
    assert reply.headers["x-request-id"]


@pytest.mark.parametrize("path", BODIES)
def test_an_engine_that_was_closed(path: str) -> None:
    async def main() -> Reply:
        async with serving(make_hash_llm()) as app:
            await app.engine.close()
            return await app.post(path, BODIES[path](stream=True))

    reply = asyncio.run(main())
    assert reply.status == 503
    assert reply.error()["code"] == "engine_unavailable"
    assert "retry-after" in reply.headers


@pytest.mark.parametrize("stream", [False, True])
def test_closing_ends_what_runs_with_an_error(stream: bool) -> None:
    async def main() -> Reply:
        async with serving(make_hash_llm(step_s=0.01)) as app:
            asking = asyncio.ensure_future(
                app.post(
                    COMPLETIONS, completion_body(max_tokens=400, stream=stream, ignore_eos=True)
                )
            )
            await asyncio.sleep(0.1)
            await app.engine.close()
            return await asking

    reply = asyncio.run(main())
    last = json.loads(reply.writes[-1].decode().removeprefix("data: "))
    assert "shutting down" in last["error"]["message"]
    assert reply.status == (200 if stream else 500)
