"""A few of the requests that `endpoints` makes: each is answered, and what is refused is typed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from call import Call
from endpoints import calls
from hypothesis import HealthCheck, given, settings
from serving import App, serving

from doubles import make_hash_llm
from infer.server.keys import Keys, Limits

QUICK = settings(
    max_examples=120,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


async def sent(app: App, call: Call, key: str | None) -> int:
    """The status, after a look at the answer."""
    headers = {name.lower(): value for name, value in call.sent_headers.items()}
    if key is not None:
        headers.setdefault("authorization", f"Bearer {key}")
    content = call.content
    headers.setdefault("content-length", str(len(content)))
    reply = await app.send(call.method, call.path, content, headers)
    if reply.status >= 500:
        assert reply.status == 503, (call, reply.body)
        assert "retry-after" in reply.headers
    if reply.status >= 400 and call.method != "HEAD":
        assert reply.error()["type"], call
    return reply.status


@pytest.mark.parametrize("has_key", [False, True])
def test_every_request_has_an_answer(has_key: bool, tmp_path: Path) -> None:
    how = {"sessions": f"sqlite:///{tmp_path}/s.db"}
    key: str | None = None
    if has_key:
        file = tmp_path / "keys"
        key = Keys(file, must_exist=False).create("a", Limits(tokens_per_minute=100_000))
        how["api_keys"] = str(file)
    statuses: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        opened = serving(make_hash_llm(max_seq_len=64), **how)
        app = runner.run(opened.__aenter__())

        @QUICK
        @given(calls())
        def check(call: Call) -> None:
            statuses[runner.run(sent(app, call, key))] += 1

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))
    assert statuses[200] > 10
    assert len(statuses) > 4
