"""A full queue, an engine that fails or is closed, and what an unexpected exception may reveal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from typing import Any

import pytest

from infer.errors import (
    EngineDeadError,
    EngineError,
    OverloadedError,
    RequestError,
    UnprocessableError,
)
from infer.server.openai.answer_parts import ChunkWriter, TokenUsage
from infer.types import ErrorRecord
from tests.support.doubles import core_of, held_runner, make_hash_llm
from tests.support.serving import (
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


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(path: str, stream: bool) -> None:
    """One seat and one waiting place: the third request gets Retry-After, the others finish."""

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
    """A runner that raises after `good_steps` steps."""

    def __init__(self, good_steps: int) -> None:
        self.left = good_steps

    def execute(self, plan: Any) -> Any:
        if not self.left:
            raise RuntimeError("secret: /etc/passwd at 0x7f00")
        self.left -= 1
        return core_of(scripted([33])).runner.execute(plan)


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
    assert sum(b'"error":{' in write for write in reply.writes) == 1
    if form == "openai":  # some clients ask again without end where a choice has none
        chunks = [json.loads(write.removeprefix(b"data: ")) for write in reply.writes[:-1]]
        ends = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert ends == list(range(choices))
        assert {each["choices"][0]["finish_reason"] for each in chunks[-choices:]} == {"error"}


def test_a_broken_stream_ends_the_choices_that_have_not_ended() -> None:
    chunks = ChunkWriter({"id": "x"}, 3, None, TokenUsage([], 3))
    chunks.chunk(1, '"text":""', reason='"stop"')
    *ends, error = chunks.failure('"text":""', '{"error":{}}')
    told = [json.loads(end.removeprefix(b"data: "))["choices"][0] for end in ends]
    assert [(each["index"], each["finish_reason"]) for each in told] == [(0, "error"), (2, "error")]
    assert error == b'data: {"error":{}}\n\n'


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
def test_what_an_exception_says(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    raised: Exception,
    status: int,
    code: str,
    told: bool,
) -> None:
    """Messages of our own exceptions are passed on; those of any other exception never are."""
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
    assert last["error"]["code"] == "engine_unavailable"
    assert reply.status == (200 if stream else 503)
    assert ("retry-after" in reply.headers) != stream


# ---- what the engine's own thread refuses, and its death -------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind", "param", "code"),
    [
        (RequestError("no", param="prompt"), 400, "invalid_request_error", "prompt", None),
        (
            UnprocessableError("no", param="max_tokens", code="context_length_exceeded"),
            *(422, "invalid_request_error", "max_tokens", "context_length_exceeded"),
        ),
        (OverloadedError("no"), 503, "overloaded_error", None, "overloaded"),
    ],
)
def test_a_refusal_of_the_engines_thread(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    stream: bool,
    refusal: RequestError,
    status: int,
    kind: str,
    param: str | None,
    code: str | None,
) -> None:
    """A refusal by the scheduler looks to the client like one by the input processor."""
    engine = make_hash_llm()

    def refuse(request: Any, sent_s: float) -> None:
        raise refusal

    monkeypatch.setattr(core_of(engine), "add", refuse)
    reply = ask(engine, path, BODIES[path](stream=stream))
    if stream:  # the status line was sent before the engine refused
        assert reply.status == 200
        error = json.loads(reply.writes[-1].decode().removeprefix("data: "))["error"]
        assert b"[DONE]" not in reply.body
    else:
        assert reply.status == status
        error = reply.error()
        assert ("retry-after" in reply.headers) == (status == 503)
    assert error == {"message": "no", "type": kind, "param": param, "code": code}


def test_errors_that_cross_a_boundary_are_plain_data() -> None:
    class Narrower(UnprocessableError):
        """A class that the other process does not have."""

    for error in (
        RequestError("a", param="p", code="c"),
        Narrower("b", param="p"),
        OverloadedError("c", code="full"),
        EngineError("d"),
        EngineDeadError("e"),
    ):
        record = pickle.loads(pickle.dumps(ErrorRecord.of(error)))
        assert json.loads(json.dumps(dataclasses.astuple(record)))
        again = record.exception()
        known = UnprocessableError if type(error) is Narrower else type(error)
        assert (type(again), str(again)) == (known, str(error))
        names = ("status", "type", "param", "code")
        assert [getattr(again, name, 0) for name in names] == [
            getattr(error, name, 0) for name in names
        ]


async def health(app: App) -> Reply:
    return await app.get("/health")


def test_health_follows_the_engine() -> None:
    async def main() -> None:
        engine = make_hash_llm()
        assert not engine.is_alive
        async with serving(engine) as app:
            assert engine.is_alive
            assert ((await health(app)).status, (await health(app)).json()) == (
                200,
                {"status": "ok"},
            )
            await engine.close()
            await check_dead(app)

    asyncio.run(main())


def test_an_engine_that_is_being_closed_takes_nothing() -> None:
    """Its last step may take long, and a request accepted now would never be answered."""

    async def main() -> None:
        runner, arrived, opened = held_runner()
        async with serving(make_hash_llm(runner=runner)) as app:
            asking = asyncio.ensure_future(app.post(COMPLETIONS, completion_body()))
            await asyncio.to_thread(arrived.wait, 30)
            closing = asyncio.ensure_future(app.engine.close())
            await asyncio.sleep(0)
            assert app.engine.engine_client.is_alive
            await check_dead(app)
            opened.set()
            assert (await asking).status == 503
            await closing

    asyncio.run(main())


async def check_dead(app: App) -> None:
    assert not app.engine.is_alive
    for reply in (await health(app), await app.post(COMPLETIONS, completion_body())):
        error = reply.error()
        assert (reply.status, error["type"]) == (503, "server_error")
        assert (error["param"], error["code"]) == (None, "engine_unavailable")
        assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stream", [False, True])
def test_no_caller_waits_for_an_engine_that_has_died(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """An exception outside of a step ends the thread, and all requests get an error."""

    async def main() -> Reply:
        async with serving(make_hash_llm(step_s=0.01)) as app:
            body = completion_body(max_tokens=400, stream=stream, ignore_eos=True)
            asking = asyncio.ensure_future(app.post(COMPLETIONS, body))
            await asyncio.sleep(0.05)
            monkeypatch.setattr(core_of(app.engine), "wait_s", lambda: 1 // 0)
            async with asyncio.timeout(60):
                reply = await asking
            await check_dead(app)
            return reply

    reply = asyncio.run(main())
    last = json.loads(reply.writes[-1].decode().removeprefix("data: "))
    assert last["error"]["code"] == "engine_unavailable"
    assert "died" in last["error"]["message"]
    assert reply.status == (200 if stream else 503)
    assert "the engine has died" in caplog.text
