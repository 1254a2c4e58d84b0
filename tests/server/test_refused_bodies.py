"""Bodies, media types, sizes, routes and methods that are refused before any field is read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from infer.server.http.json_body import MAX_BODY_BYTES
from infer.text.tokenizer import Tokenizer
from infer.types.server_limits import ServerLimits
from tests.support.cases import timed
from tests.support.checkpoints import write_tokenizer
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ask,
    chat_body,
    check_refused,
    completion_body,
    with_app,
)

DEEP = b'{"prompt": "x", "messages": [], "metadata": '
RAW_BODIES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "empty"),
    ("blank", b" \n", "empty"),
    ("no json", b"{", "not valid JSON"),
    ("trailing comma", b'{"n": 1,}', "not valid JSON"),
    ("two values", b"{} {}", "not valid JSON"),
    ("single quotes", b"{'n': 1}", "not valid JSON"),
    ("control character", b'{"prompt": "a\nb"}', "not valid JSON"),
    ("not UTF-8", b'{"prompt": "\xff"}', "UTF-8"),
    ("overlong UTF-8", b'{"prompt": "\xc0\xaf"}', "UTF-8"),
    ("UTF-8 surrogate", b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
    ("BOM", b'\xef\xbb\xbf{"prompt": "x"}', "byte-order mark"),
    ("UTF-16", '{"prompt": "x"}'.encode("utf-16"), "UTF-8"),
    ("UTF-16 without BOM", '{"prompt": "x"}'.encode("utf-16-le"), "not valid JSON"),
    ("high surrogate", b'{"prompt": "\\ud800"}', "surrogate"),
    ("low surrogate", b'{"user": "\\udc00x"}', "surrogate"),
    ("surrogate in a key", b'{"logit_bias": {"\\uD800": 1}}', "surrogate"),
    ("surrogate in a list", b'{"stop": ["a", "\\udbff"]}', "surrogate"),
    ("NaN", b'{"temperature": NaN}', "NaN"),
    ("Infinity", b'{"top_p": Infinity}', "Infinity"),
    ("-Infinity", b'{"logit_bias": {"1": -Infinity}}', "Infinity"),
    ("1e400", b'{"temperature": 1e400}', "too large"),
    ("-1e400", b'{"min_p": -1e400}', "too large"),
    ("21 digits", b'{"max_tokens": 100000000000000000000}', "digits"),
    ("5000 digits", b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
    ("key twice", b'{"n": 1, "n": 1}', '"n"'),
    ("key twice, spelled otherwise", b'{"n": 1, "\\u006e": 2}', '"n"'),
    ("inner key twice", b'{"logit_bias": {"1": 1, "1": 2}}', '"1"'),
    ("depth 65", DEEP + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
    ("depth 1000", DEEP + b'{"a":' * 1000 + b"1" + b"}" * 1001, "deeper than 64"),
    ("depth 100000", b"[" * 100_000, "deeper than 64"),
    ("a million brackets", b"[" + b"[]," * 600_000 + b"[]]", "objects and arrays"),
    ("2 MB of digits", b'{"seed": ' + b"9" * 2_000_000 + b"}", "digits"),
    ("2 MB of digits in an exponent", b'{"seed": 1e' + b"9" * 2_000_000 + b"}", "too large"),
    ("a million numbers without end", b'{"seed": ' + b"1." * 1_000_000, "not valid JSON"),
    ("20 digits again and again", b'{"seed": ' + (b"9" * 20 + b".") * 95_000, "not valid JSON"),
    ("many quotes", b'{"a": "' + b'\\"' * 490_000, "not valid JSON"),
    ("a million quotes", b'{"a": "' + b'\\"' * 900_000, "quotation marks"),
    ("quotes that end in a backslash", b'{"a": "' + b'\\"' * 490_000 + b"\\", "not valid JSON"),
]


@timed(3)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("body", "word"), [row[1:] for row in RAW_BODIES], ids=[row[0] for row in RAW_BODIES]
)
def test_bytes_that_are_no_json_we_take(path: str, body: bytes, word: str, most_s: float) -> None:
    started = time.perf_counter()
    check_refused(ask(make_hash_llm(), path, body), 400, None, "invalid_json", word)
    assert time.perf_counter() - started < most_s


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("body", [b"[]", b"5", b'"x"', b"null", b"true"])
def test_a_body_that_is_no_object(path: str, body: bytes) -> None:
    check_refused(ask(make_hash_llm(), path, body), 400, None, "invalid_type", "object")


def test_depth_64_and_brackets_in_strings_are_fine() -> None:
    nested: Any = "x"
    for _ in range(63):
        nested = [nested]
    reply = ask(make_hash_llm(), COMPLETIONS, completion_body(metadata=nested))
    check_refused(reply, 400, "metadata", None, "strings")  # read, and refused as a field
    prompt = '"' + "[{" * 100 + "\\"
    assert ask(make_hash_llm(), COMPLETIONS, completion_body(prompt=prompt)).status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({"content-type": "text/plain"}, "application/json"),
        ({"content-type": ""}, "application/json"),
        ({"content-type": "application/x-www-form-urlencoded"}, "application/json"),
        ({"content-type": "multipart/form-data; boundary=x"}, "application/json"),
        ({"content-type": "application/jsonl"}, "application/json"),
        ({"content-type": "application/json; charset=utf-16"}, "UTF-8"),
        ({"content-encoding": "gzip"}, "compressed"),
    ],
)
def test_other_media_types(path: str, headers: dict[str, str], word: str) -> None:
    reply = ask(make_hash_llm(), path, BODIES[path](), headers=headers)
    check_refused(reply, 415, None, "unsupported_media_type", word)


@pytest.mark.parametrize("kind", ["Application/JSON", 'application/json; charset="UTF-8"'])
def test_spellings_of_the_media_type(kind: str) -> None:
    reply = ask(make_hash_llm(), CHAT, chat_body(), headers={"content-type": kind})
    assert reply.status == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("declared", ["honest", "absent", "a lie"])
def test_a_body_over_the_limit(path: str, declared: str) -> None:
    async def use(app: App) -> Reply:
        body = b" " * (MAX_BODY_BYTES + 1)
        length = {"honest": str(len(body)), "a lie": "10"}.get(declared)
        headers = {"content-type": "application/json"}
        if length is not None:
            headers["content-length"] = length
        return await app.send("POST", path, body, headers, pieces=40)

    check_refused(
        with_app(make_hash_llm(), use), 413, None, "request_too_large", str(MAX_BODY_BYTES)
    )


def test_a_body_at_the_limit_is_read() -> None:
    body = json.dumps(completion_body()).encode()
    body += b" " * (MAX_BODY_BYTES - len(body))
    assert ask(make_hash_llm(), COMPLETIONS, body, pieces=40).status == 200


def test_a_body_that_does_not_come() -> None:
    async def use(app: App) -> Reply:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(3600)
            return {}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(dict(message))

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers}
        await app.app(scope, receive, send)
        found = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Reply(sent[0]["status"], found, [sent[1]["body"]])

    reply = with_app(make_hash_llm(), use, limits=ServerLimits(body_timeout_s=0.02))
    check_refused(reply, 408, None, "request_timeout", "complete")


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/v1/nothing", 404, "not_found", None),
        ("POST", "/v1/completions/x", 404, "not_found", None),
        ("POST", "/v1//completions/x", 404, "not_found", None),
        ("GET", "/docs", 404, "not_found", None),
        ("GET", COMPLETIONS, 405, "method_not_allowed", "POST"),
        ("DELETE", CHAT, 405, "method_not_allowed", "POST"),
        ("GET", "/v1/sessions/x/fork", 405, "method_not_allowed", "POST"),
        ("OPTIONS", "/v1/sessions/x", 405, "method_not_allowed", "GET, HEAD, PATCH, DELETE"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
        ("POST", "/health", 405, "method_not_allowed", "GET, HEAD"),
        ("TRACE", "/", 405, "method_not_allowed", "GET, HEAD"),
    ],
)
def test_routes_and_methods(
    method: str, path: str, status: int, code: str, allow: str | None
) -> None:
    reply = with_app(make_hash_llm(), lambda app: app.send(method, path))
    check_refused(reply, status, None, code, "route")
    assert set(reply.headers.get("allow", "").split(", ")) == set((allow or "").split(", "))


def test_a_model_that_is_not_there() -> None:
    reply = with_app(make_hash_llm(), lambda app: app.get("/v1/models/gpt/4"))
    check_refused(reply, 404, "model", "model_not_found", "no such model")


def test_a_base_model_does_not_chat(tmp_path: Path) -> None:
    base = Tokenizer.from_folder(write_tokenizer(tmp_path, chat=False))
    reply = ask(make_hash_llm(tokenizer=base), CHAT, chat_body())
    error = reply.error()
    assert (reply.status, error["type"], error["param"]) == (
        400,
        "invalid_request_error",
        "messages",
    )
    assert "/v1/completions" in error["message"]
    assert ask(make_hash_llm(tokenizer=base), COMPLETIONS, completion_body()).status == 200
