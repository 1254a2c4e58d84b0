"""Each value of a body that an agent sends becomes something else: it is answered or refused.

The bodies have most of what the APIs give a meaning to, and every field in the OpenAPI document is
put beside it. The templates bring a history into other forms.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.server.test_openapi import bodies
from tests.support.cases import slow_but
from tests.support.doubles import LastingTokenizer, make_hash_llm, small_text_files
from tests.support.json_changes import changes_of
from tests.support.serving import App, documented, with_app
from tests.support.tool_conversations import OWN
from tests.support.whole_bodies import BODIES

TEMPLATES = ["strict", "llama32", "nine", "qwen3"]
MET_ELSEWHERE = {"/v1/engine/comparisons"}
"""Each of them is an engine's work for seconds: `tests/fuzz` has them."""
ANSWERED = BODIES.keys() - {"/v1/models/load", "/v1/models/unload", "/v1/mcp/call"}
"""Paths whose bodies are answered as they are here, where there is one model and no MCP server."""
ENDED = (b'"server_error"', b'"api_error"')
LONGEST_S = 60.0


def fields_of(path: str) -> list[str]:
    """All fields of a path's bodies."""
    schemas = [schema for _, at, schema in bodies(documented()) if at == path]
    return sorted({name for schema in schemas for name in schema["properties"]})


def method_of(path: str) -> str:
    return "PATCH" if path == "/v1/sessions/{id}" else "POST"


def test_every_body_is_here() -> None:
    of_document = {(method, path) for method, path, _ in bodies(documented())}
    assert of_document == {(method_of(path), path) for path in {*BODIES, *MET_ELSEWHERE}}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("template", slow_but(TEMPLATES[:2], TEMPLATES))
def test_a_changed_body_is_answered_or_refused(template: str, every: int) -> None:
    texts = replace(small_text_files(), templates={"default": OWN[template][0]})
    engine = make_hash_llm(tokenizer=LastingTokenizer(texts), max_seq_len=8192, num_pages=8192)

    async def sent(app: App, path: str, body: Any, session_id: str) -> int:
        async with asyncio.timeout(LONGEST_S):
            here = path.replace("{id}", session_id)
            reply = await app.post(here, body, method=method_of(path))
        told = f"{path} {json.dumps(body)}: {reply.status} {reply.body!r:.300}"
        assert reply.status < 500, told
        assert not any(mark in reply.body for mark in ENDED), told
        if path == "/v1/sessions" and reply.status == 201:  # or there would be too many
            await app.send("DELETE", f"{path}/{reply.json()['id']}")
        return reply.status

    async def use(app: App) -> None:
        session = await app.post("/v1/sessions", BODIES["/v1/sessions"][0])
        session_id = session.json()["id"]
        for path, known in BODIES.items():
            for body in known:
                status = await sent(app, path, body, session_id)
                assert status in (200, 201) or path not in ANSWERED, (path, body)
            made = [change for body in known for change in changes_of(body, fields_of(path))]
            for body in made[len(path) % every :: every]:
                await sent(app, path, body, session_id)

    with_app(engine, use, sessions="sqlite://")
