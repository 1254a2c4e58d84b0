"""Scorecard 19 over HTTP: of many requests only the poisonous ones fail, each with its error."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from infer.schedule.sequence import NOT_FINITE
from tests.support.server_process import (
    ENV,
    Findings,
    Served,
    ask,
    bodies,
    follow,
    model_server,
    served,
)

EVERY = 100
"""Number of requests of which one is poisonous."""


async def poison(server: Served, count: int, message: str) -> dict[str, Any]:
    """Streams and plain answers in turn; they are greedy, so the seed only marks the poisonous."""
    wanted = [{**body, "temperature": 0, "ignore_eos": True} for body in bodies(40, 40)]
    for body in wanted:
        body.pop("stop", None)
    calm = await asyncio.gather(*[follow(server.port, {**body, "seed": 1}) for body in wanted])
    pid, free = server.engine_pid(), asyncio.Semaphore(64)
    seen: Counter[str] = Counter()

    async def one(i: int) -> None:
        body, undisturbed = {**wanted[i % 40], "seed": i}, calm[i % 40]
        async with free:
            if i % 3:
                heard = await follow(server.port, body)
                error, text = heard.error, heard.text
                assert heard.status == 200
                assert heard.is_done is (error is None)
            else:
                status, answer = await ask(server.port, {**body, "stream": False})
                error = answer.get("error")
                text = "" if error else answer["choices"][0]["text"]
                assert status == (500 if error else 200), answer
        assert (error is not None) is (i % EVERY == 0), (i, error)
        if error is None:
            assert text == undisturbed.text, i
            assert not i % 3 or heard.answer == undisturbed.answer, i
            seen["exact"] += 1
        else:
            assert (error["type"], error["code"]) == ("server_error", "engine_error")
            assert error["message"] == message
            assert undisturbed.text.startswith(text)
            seen["plain answer: 500" if i % 3 == 0 else "error in the stream"] += 1

    await asyncio.gather(*map(one, range(count)))
    stats = await server.stats()
    assert stats["num_requests_failed"] == stats["num_finished_error"] == count // EVERY
    assert (stats["num_restarts"], server.engine_pid()) == (0, pid)
    return {"requests": count, **seen, "restarts": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", "the engine failed while computing this request"),
        ("nan", NOT_FINITE),
    ],
)
def test_exactly_the_poisonous_ones_fail(
    kind: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENV, "INFER_WRAP_CORE", "tests.support.faults:wrapped")
    monkeypatch.setitem(ENV, "INFER_FAULT_SEEDS", f"{EVERY}:{kind}")
    with served(model_server(), tmp_path / "log") as server:
        counted = asyncio.run(poison(server, 2500, message))
    load = f"1 % fail in the third token ({kind}), over HTTP, shipped model, bfloat16"
    Findings().note(19, "poison requests", load, **counted)
