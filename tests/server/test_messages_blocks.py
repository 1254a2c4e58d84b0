"""`/v1/messages`: what blocks and fields become, and the form of errors at shared paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infer.server.anthropic.messages_body import BILLING, CountTokensBody
from infer.server.early_listener import as_bytes
from infer.server.http.http_errors import HttpError, answer_to
from infer.server.http.request_head import read_head
from infer.server.openai.chat import plain_messages
from infer.server.openai.schema_base import read
from tests.server.test_agents_apis import MESSAGES, QWEN, body_for, events_of, message_of
from tests.server.test_tool_loops import saying, script_of, tokenizer_of
from tests.support.doubles import make_hash_llm
from tests.support.serving import App, with_app
from tests.support.tenants import make

VERSION = {"anthropic-version": "2026-10-21"}
TEXT = {"type": "text", "text": "Inner."}
NO_TEXT = "[document: this server reads text only]"
BLOCKS: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": {"type": "text", "data": "D"}}, "D"),
    ({"type": "document", "title": "T", "context": "C",
      "source": {"type": "text", "media_type": "text/plain", "data": "D"}}, "T\n\nC\n\nD"),
    ({"type": "document", "source": {"type": "content", "content": "D"}}, "D"),
    ({"type": "document", "title": None, "source": {"type": "content", "content": [TEXT, TEXT]}},
     "Inner.\n\nInner."),
    ({"type": "document", "source": {"type": "content", "content": [
        {"type": "image", "source": {"type": "url", "url": "x"}}]}},
     "[image: this model reads text only]"),
    ({"type": "document", "title": "T", "source": {"type": "base64", "data": "JVBE"}},
     f"T\n\n{NO_TEXT}"),
    ({"type": "document", "source": {"type": "url", "url": "x"}}, NO_TEXT),
    ({"type": "document", "source": {"type": "file", "file_id": "x"}}, NO_TEXT),
    ({"type": "document"}, NO_TEXT),
    ({"type": "search_result", "source": "http://x", "title": "T", "content": [TEXT],
      "citations": {"enabled": True}}, "T\n\nhttp://x\n\nInner."),
    ({"type": "compaction", "content": "Before: a, b."}, "Before: a, b."),
]  # fmt: skip


def prompt_of(**body: Any) -> list[dict[str, Any]]:
    return plain_messages(read(CountTokensBody, body, []).chat)


@pytest.mark.parametrize(("block", "text"), BLOCKS, ids=lambda each: str(each)[:60])
def test_the_text_of_a_block_is_in_the_prompt(block: dict[str, Any], text: str) -> None:
    marked = {**block, "cache_control": {"type": "ephemeral"}}
    assert prompt_of(messages=[{"role": "user", "content": [marked]}])[0]["content"] == text
    result = {"type": "tool_result", "tool_use_id": "c", "content": [marked]}
    assert prompt_of(messages=[{"role": "user", "content": [result]}])[0]["content"] == text


def test_a_compaction_that_failed_is_nothing() -> None:
    blocks = [{"type": "compaction", "content": None}, {"type": "text", "text": "Hi"}]
    assert prompt_of(messages=[{"role": "user", "content": blocks}])[0]["content"] == "Hi"


@pytest.mark.parametrize(
    "system",
    [
        f"{BILLING} cc_version=1; cch=5;\nBe brief.",
        f"{BILLING} cc_version=2;\n\nBe brief.",
        [{"type": "text", "text": f"{BILLING} a"}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": f"{BILLING} a\nBe brief."}],
    ],
)
def test_a_billing_line_takes_no_rules_with_it(system: Any) -> None:
    """A gateway may have joined the blocks of the system prompt to one text."""
    question = {"role": "user", "content": "Hi"}
    assert prompt_of(system=system, messages=[question])[0]["content"] == "Be brief."
    late = {"role": "system", "content": system}
    assert prompt_of(messages=[question, late])[1]["content"] == "Be brief."


def test_thinking_between_tools_is_no_thinking() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    made = [
        read(CountTokensBody, {**body, "thinking": {"type": kind}}, []).chat.template_arguments
        for kind in ("between_tools", "disabled")
    ]
    assert made[0] == made[1]
    assert made[0]["enable_thinking"] is False


def test_the_usage_says_how_much_was_thought() -> None:
    tokenizer = tokenizer_of(QWEN)
    engine = saying(script_of(tokenizer, "<think>\nHm.\n</think>\n\nHi"), tokenizer)

    async def use(app: App) -> None:
        whole = (await app.post(MESSAGES, body_for(MESSAGES))).json()["usage"]
        assert whole["output_tokens_details"] == {"thinking_tokens": len("\nHm.\n")}
        events = events_of(await app.post(MESSAGES, body_for(MESSAGES, stream=True)))
        assert events[0][1]["message"]["usage"]["output_tokens_details"] == {"thinking_tokens": 0}
        counted = message_of(events)["usage"]
        assert counted["output_tokens_details"] == whole["output_tokens_details"]

    with_app(engine, use)


def test_errors_have_the_form_of_the_client_that_has_asked(tmp_path: Path) -> None:
    """Where both APIs have a path, the header of Anthropic's clients decides."""
    keys = tmp_path / "keys.json"
    key = make(keys, "alice")

    async def use(app: App) -> None:
        for method, path, headers, status, kind in (
            ("GET", "/v1/models/none", key, 404, "not_found_error"),
            ("GET", "/v1/models", {}, 401, "authentication_error"),
            ("GET", "/v1/files", key, 404, "not_found_error"),
            ("DELETE", "/v1/models", key, 405, "invalid_request_error"),
        ):
            sent = {**headers, **VERSION}
            reply = await app.send(method, path, headers=sent)
            assert (reply.status, reply.json()["type"]) == (status, "error"), path
            assert reply.json()["error"]["type"] == kind
            assert reply.json()["request_id"] == reply.headers["request-id"]
            assert int(reply.headers["content-length"]) == len(reply.body)
            plain = await app.send(method, path, headers=headers)
            assert "code" in plain.json()["error"]
        assert (await app.send("GET", "/v1/models", headers={**key, **VERSION})).status == 200

    with_app(make_hash_llm(), use, api_keys=str(keys))


def test_an_early_error_has_the_form_of_the_client_that_has_asked() -> None:
    error = answer_to(HttpError(404, "none", code="not_found"))
    line = b"GET /v1/models/x HTTP/1.1\r\nHost: x\r\n"
    anthropic = as_bytes(error, read_head(line + b"Anthropic-Version: 2023-06-01\r\n\r\n"))
    assert b'"type":"not_found_error"' in anthropic
    assert b'"code":"not_found"' in as_bytes(error, read_head(line + b"\r\n"))
