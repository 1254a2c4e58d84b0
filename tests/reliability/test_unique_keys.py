"""Scorecard 31: whatever a client may choose anew with each request is kept for a bounded time."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.support.doubles import make_hash_llm
from tests.support.server_process import Findings
from tests.support.serving import CHAT, COMPLETIONS, App, chat_body, completion_body, with_app
from tests.support.tenants import make

NUM_KEYS = int(os.environ.get("INFER_UNIQUE_KEYS", "20000"))
"""Unique requests of the scorecard's row; the design's number is 10^6."""
MAX_MORE = 2000
"""Entries that all containers together may gain in the second half."""


async def send(app: App, headers: dict[str, str], i: int) -> int:
    """One request of eight kinds, each with something that nobody has sent before."""
    own = {**headers, "x-request-id": f"own-{i}", "user-agent": f"agent-{i}"}
    match i % 8:
        case 0:
            body = completion_body(
                prompt=f"a prompt of its own, number {i}", max_tokens=2, user=f"u{i}"
            )
            return (await app.post(COMPLETIONS, body, headers=own)).status
        case 1:
            body = completion_body(max_tokens=1, stop=[f"stop {i}", f"end {i}"], seed=i)
            return (await app.post(COMPLETIONS, body, headers=own)).status
        case 2:
            body = completion_body(model=f"model-{i}")
            return (await app.post(COMPLETIONS, body, headers=own)).status
        case 3:
            reply = await app.post(COMPLETIONS, {**completion_body(), f"field_{i}": i}, headers=own)
            return reply.status
        case 4:
            return (await app.get(f"/v1/requests/id-{i}", **own)).status
        case 5:
            messages = [{"role": "user", "content": f"message {i}", "name": f"n{i}"}]
            reply = await app.post(CHAT, chat_body(messages=messages, max_tokens=1), headers=own)
            return reply.status
        case 6:
            wrong = {**own, "authorization": f"Bearer wrong-{i}", "origin": f"http://o{i}.example"}
            return (await app.get("/v1/models", **wrong)).status
        case _:
            return (await app.send("GET", f"/path-{i}", headers=own)).status


def entries() -> int:
    """Entries of all dictionaries, lists, sets and queues that the interpreter knows."""
    gc.collect()
    kinds = (dict, list, set, deque)
    return sum(len(each) for each in gc.get_objects() if isinstance(each, kinds))


def series(text: str) -> int:
    return sum(1 for line in text.splitlines() if line and not line.startswith("#"))


async def churn(app: App, headers: dict[str, str], count: int) -> dict[str, Any]:
    async def half(start: int) -> tuple[int, int]:
        for i in range(start, start + count // 2, 16):
            await asyncio.gather(*[send(app, headers, j) for j in range(i, i + 16)])
        await app.idle()
        shown = (await app.get("/metrics", **headers)).body.decode()
        for name in ("own-", "model-", "agent-", "wrong-", "path-", "field_"):
            assert name not in shown, f"a label has a value of a client's: {name}"
        return entries(), series(shown)

    (before, series_before), (after, series_after) = await half(0), await half(count // 2)
    assert series_after == series_before
    assert after - before < MAX_MORE, f"{after - before} entries more"
    return {
        "requests": count,
        "series of /metrics, after each half": (series_before, series_after),
        "entries of all containers, after each half": (before, after),
    }


def run_churn(count: int, folder: Path) -> dict[str, Any]:
    file = folder / "keys.json"
    headers = make(file, "root", admin=True)
    settings = {"api_keys": str(file), "unknown_params": "ignore"}
    return with_app(make_hash_llm(), lambda app: churn(app, headers, count), **settings)


@pytest.mark.slow
def test_unique_keys(tmp_path: Path) -> None:
    load = f"{NUM_KEYS:,} prompts, stops, ids, models, fields, keys, paths, agents, hash model"
    Findings().note(31, "unique-key churn", load, **run_churn(NUM_KEYS, tmp_path))
