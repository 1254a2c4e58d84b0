"""A silent stream says why: by events where its client asks for them, else by comments"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    all_open,
    chat_body,
    completion_body,
    with_app,
)

QUICK = ServerLimits(status_s=0.005)
ASKED = {"stream": True, "stream_options": {"include_status": True}}
LONG = completion_body(max_tokens=400, ignore_eos=True, stream=True)
PROMPT = "x" * 200
FIELDS = {"object", "id", "choices", "state", "text", "queued_behind", "prompt_tokens_done"}
FIELDS |= {"prompt_tokens"}


def statuses(data: bytes) -> list[dict[str, Any]]:
    """The statuses of a stream; what follows them must be what it would be without them."""
    found = []
    for block in data.split(b"\n\n"):
        name, _, line = block.partition(b"\n")
        if name == b"event: infer.status":
            told = json.loads(line.removeprefix(b"data: "))
            assert set(told) == FIELDS
            assert (told["object"], told["choices"]) == ("infer.status", [])
            found.append(told)
    return found


def comments(data: bytes) -> list[str]:
    return [block[2:].decode() for block in data.split(b"\n\n") if block.startswith(b": ")]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("is_kept", [False, True])
def test_who_waits_is_told_for_how_many(path: str, is_kept: bool) -> None:
    bodies = {COMPLETIONS: completion_body(**ASKED), CHAT: chat_body(**ASKED)}

    async def use(app: App) -> None:
        first = asyncio.ensure_future(app.post(COMPLETIONS, {**LONG, "max_tokens": 60}))
        await all_open(app, 1)
        second = asyncio.ensure_future(app.post(COMPLETIONS, {**LONG, "max_tokens": 100}))
        await all_open(app, 2)
        headers = {"x-keep-answer": "true"} if is_kept else {}
        reply = await app.post(path, bodies[path], headers=headers)
        told = [each for each in statuses(reply.body) if each["text"] != "queued"]
        assert told[0]["id"].endswith(reply.headers["x-request-id"])
        assert (told[0]["state"], told[0]["queued_behind"]) == ("queued", 1)
        assert told[0]["text"] == "queued behind 1"
        assert {"queued behind 1", "next in the queue"} <= {each["text"] for each in told}
        assert not statuses((await first).body)
        assert not statuses((await second).body)

    with_app(make_hash_llm(step_s=0.003, max_batch_size=1), use, limits=QUICK)


def test_a_prompt_that_is_read_is_counted() -> None:
    async def use(app: App) -> None:
        body = completion_body(**ASKED, prompt=PROMPT)
        told = statuses((await app.post(COMPLETIONS, body)).body)
        read = [each for each in told if each["state"] == "reading"]
        done = [each["prompt_tokens_done"] for each in read]
        assert done == sorted(set(done))
        assert len(done) > 3
        for each in read:
            assert each["prompt_tokens"] >= len(PROMPT)
            words = f"reading the prompt {each['prompt_tokens_done']} of {each['prompt_tokens']}"
            assert each["text"] == words

    with_app(make_hash_llm(step_s=0.02, max_num_batched_tokens=16), use, limits=QUICK)


def test_a_death_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_hash_llm(step_s=0.05)

    async def use(app: App) -> None:
        asking = asyncio.ensure_future(app.post(COMPLETIONS, completion_body(**ASKED)))
        await all_open(app, 1)
        kind = type(engine.engine_client)
        with monkeypatch.context() as patched:
            patched.setattr(kind, "is_ready", property(lambda _: False))
            await asyncio.sleep(0.1)
        told = statuses((await asking).body)
        found = [each for each in told if each["state"] == "restarting"]
        assert found
        assert found[0]["text"] == "another engine is starting, this answer goes on"

    with_app(engine, use, limits=QUICK)


def test_two_streams_are_the_same_without_the_statuses() -> None:
    async def use(app: App) -> None:
        plain = await app.post(COMPLETIONS, completion_body(stream=True))
        told = await app.post(COMPLETIONS, completion_body(**ASKED))
        assert len(statuses(told.body)) > 1
        text = "".join(event["choices"][0]["text"] for event in plain.events())
        chunks = [block for block in told.body.split(b"\n\n") if block.startswith(b"data: {")]
        pieces = [json.loads(block.removeprefix(b"data: ")) for block in chunks]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == text

    with_app(make_hash_llm(step_s=0.03), use, limits=QUICK)


def slow_reader() -> AsyncLLM:
    return make_hash_llm(step_s=0.02, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("path", "body", "lives"),
    [
        (COMPLETIONS, completion_body(stream=True, prompt=PROMPT), b'"text":""'),
        (
            CHAT,
            chat_body(stream=True, messages=[{"role": "user", "content": PROMPT}]),
            b'"delta":{}',
        ),
        ("/v1/responses", {"stream": True, "input": PROMPT}, b"response.in_progress"),
        (
            "/v1/messages",
            {"stream": True, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5},
            b"event: ping",
        ),
    ],
)
def test_comments_say_it_in_every_api(path: str, body: dict[str, Any], lives: bytes) -> None:
    """Each stands before what the API's own clients count."""

    async def use(app: App) -> None:
        reply = await app.post(path, body)
        found = [text for text in comments(reply.body) if text.startswith("reading the prompt")]
        assert len(found) > 2
        first = reply.writes.index(f": {found[0]}\n\n".encode())
        assert lives in reply.writes[first + 1]

    with_app(slow_reader(), use, keep_alive_s=0.005)


@pytest.mark.parametrize("wrong", ["yes", 1, {}])
def test_the_wish_is_a_boolean(wrong: Any) -> None:
    async def use(app: App) -> None:
        body = completion_body(stream=True, stream_options={"include_status": wrong})
        refused = await app.post(COMPLETIONS, body)
        assert refused.status == 400
        assert refused.error()["param"] == "stream_options.include_status"

    with_app(make_hash_llm(), use)
