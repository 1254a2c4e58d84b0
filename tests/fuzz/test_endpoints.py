"""A few of the requests that `endpoints` makes: each is answered, and what is refused is typed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from infer.server.tenancy.keys import KeyLimits, Keys
from tests.fuzz.call import Call
from tests.fuzz.endpoints import allowed, calls, the_document
from tests.support.doubles import make_hash_llm
from tests.support.serving import CHAT, COMPLETIONS, App, chat_body, completion_body, serving

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
        key = Keys(file, must_exist=False).create("a", KeyLimits(tokens_per_minute=100_000))
        how["api_keys"] = str(file)
    statuses: Counter[int] = Counter()
    with asyncio.Runner() as runner:
        opened = serving(make_hash_llm(max_seq_len=64), **how)
        app = runner.run(opened.__aenter__())

        @QUICK
        @given(calls())
        def check(call: Call) -> None:
            # A comparison computes for seconds: `tests/server/test_comparisons.py` has its bodies.
            assume("/comparisons" not in call.path or not call.content.strip().startswith(b"{"))
            statuses[runner.run(sent(app, call, key))] += 1

        try:
            check()
        finally:
            runner.run(opened.__aexit__(None, None, None))
    assert statuses[200] > 10
    assert len(statuses) > 4


NEEDS: dict[str, dict[str, Any]] = {
    "max_completion_tokens": {"max_tokens": None},
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "stream_format": {"stream": True},
}
OTHERWISE = {"model", "session_id", "response_format", "structured_outputs", "at", "messages"} | {
    *("guided_json", "guided_regex", "guided_grammar", "tokens", "prompt", "timeout", "tools")
}
"""What depends on the model, on what is stored, or on more than the document can say."""


def test_what_the_document_allows_is_accepted(tmp_path: Path) -> None:
    """Each field alone, on a body that is right otherwise."""
    starts = {COMPLETIONS: completion_body(max_tokens=1), CHAT: chat_body(max_tokens=1)}
    starts |= {"/v1/sessions": {}, f"{CHAT}/render": chat_body()}
    components = the_document()["components"]["schemas"]
    names = {COMPLETIONS: "CompletionBody", "/v1/sessions": "SessionBody"}
    num_tried = 0
    refused: list[Any] = []

    async def tried(app: App, path: str, name: str, values: list[Any]) -> None:
        for value in values:
            body = {**starts[path], **NEEDS.get(name, {}), name: value}
            if (path, name, value) == (COMPLETIONS, "max_tokens", 0):
                body["echo"] = True  # else there is nothing to look at
            reply = await app.post(path, body)
            if reply.status != 200:  # ids and lengths of this model, which no document knows
                message = reply.error()["message"]
                known = (
                    "outside the vocabulary",
                    "context length",
                    "room for",
                    "exceed max_tokens",
                    "of the tools",
                )
                if not any(words in message for words in known):
                    refused.append((path, name, value, message))

    async def main() -> None:
        nonlocal num_tried
        url = f"sqlite:///{tmp_path}/s.db"
        async with serving(make_hash_llm(max_seq_len=256), sessions=url) as app:
            for path in starts:
                fields = components[names.get(path, "ChatBody")]["properties"]
                for name in sorted(fields.keys() - OTHERWISE):
                    values = drawn(allowed(fields[name]))
                    num_tried += len(values)
                    await tried(app, path, name, values)

    asyncio.run(main())
    assert not refused, "\n".join(map(str, refused))
    assert num_tried > 200


def drawn(values: st.SearchStrategy[Any]) -> list[Any]:
    """A few of them, always the same."""
    found: list[Any] = []

    @settings(QUICK, max_examples=3)
    @given(values)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found
