"""A place is taken before tokenising; an answer has a deadline; the counters add up."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.server.app import create_app
from infer.server.settings import ServerSettings
from infer.types.server_limits import ServerLimits
from tests.support.doubles import held_runner, make_hash_llm
from tests.support.serving import (
    BODIES,
    COMPLETIONS,
    App,
    check_refused,
    completion_body,
    serving,
    with_app,
)


def counts_of(engine: AsyncLLM) -> dict[str, int | float]:
    stats = engine.stats()
    names = ("admitted", "refused", "finished", "cancelled", "failed")
    counts = {name: stats[f"num_requests_{name}"] for name in names}
    ended = sum(counts[name] for name in names[2:])
    assert counts["admitted"] == stats["num_open"] + ended
    return counts


@pytest.mark.parametrize("length", [10, 50_000])
def test_a_refused_request_costs_no_tokenising(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = InputProcessor.tokenize

    def tokenize(self: InputProcessor, prompt: Any) -> tuple[int, ...]:
        made.append(len(prompt))
        return real(self, prompt[:10])

    monkeypatch.setattr(InputProcessor, "tokenize", tokenize)
    body = completion_body(prompt="x" * length, max_tokens=20, stream=True, ignore_eos=True)
    held, _, opened = held_runner()
    engine = make_hash_llm(max_batch_size=4, max_waiting_requests=4, runner=held)

    async def use(app: App) -> None:
        asked = [asyncio.ensure_future(app.post(COMPLETIONS, body)) for _ in range(50)]
        while sum(each.done() for each in asked) < 42:  # however long a busy machine takes
            await asyncio.sleep(0.01)
        opened.set()
        replies = await asyncio.gather(*asked)
        assert sorted(reply.status for reply in replies) == [200] * 8 + [503] * 42
        assert len(made) == 8
        counts = dict(zip(("admitted", "refused", "finished"), (8, 42, 8), strict=True))
        assert counts_of(engine) == {**counts, "cancelled": 0, "failed": 0}

    with_app(engine, use)


def test_a_place_is_held_while_the_tokens_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long body is tokenised in a thread, no other request can take its place."""
    engine = make_hash_llm(max_batch_size=1, max_waiting_requests=0)
    started, real = threading.Event(), InputProcessor.tokenize

    def tokenize(self: InputProcessor, prompt: Any) -> tuple[int, ...]:
        if len(prompt) > 100:
            started.set()
            time.sleep(0.1)
        return real(self, prompt)

    monkeypatch.setattr(InputProcessor, "tokenize", tokenize)

    async def use(app: App) -> None:
        long = asyncio.ensure_future(app.post(COMPLETIONS, completion_body(prompt="x" * 400)))
        await asyncio.to_thread(started.wait, 5)
        short = await app.post(COMPLETIONS, completion_body())
        assert (short.status, (await long).status) == (503, 200)
        wrong = completion_body(prompt="x" * 400, min_tokens=10**6)
        assert (await app.post(COMPLETIONS, wrong)).status == 422
        assert (await app.post(COMPLETIONS, completion_body())).status == 200

    with_app(engine, use, limits=ServerLimits(long_body_bytes=200))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(path: str, stream: bool) -> None:
    engine = make_hash_llm(step_s=0.01)

    async def main() -> None:
        async with serving(engine) as app:
            body = BODIES[path](max_tokens=400, ignore_eos=True, stream=stream)
            app.app = create_app(engine, ServerSettings(request_timeout_s=0.2))
            reply = await app.post(path, body)
            assert reply.status == (200 if stream else 504)
            assert b'"code":"deadline_exceeded"' in reply.body
            assert b"[DONE]" not in reply.body
            await app.idle()
            counts = {"admitted": 1, "refused": 0, "finished": 0, "cancelled": 1, "failed": 0}
            assert counts_of(engine) == counts

    asyncio.run(main())


def test_a_text_that_can_never_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_hash_llm(max_seq_len=64)
    limit = 4 * 64 * engine.tokenizer.max_token_chars
    real, made = type(engine.tokenizer).encode, []

    def encode(self: Any, text: str, **how: Any) -> list[int]:
        made.append(len(text))
        return real(self, text, **how)

    monkeypatch.setattr(type(engine.tokenizer), "encode", encode)

    async def use(app: App) -> None:
        for length in (limit, limit + 1):
            reply = await app.post(COMPLETIONS, completion_body(prompt="x" * length))
            check_refused(reply, 400, "prompt", "context_length_exceeded", "length is 64 tokens")

    with_app(engine, use)
    assert made == [limit]
