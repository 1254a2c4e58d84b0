"""Scorecard A7: web pages of other sites, by their Origin and Host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.server.http.hosts import HostGuard
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    App,
    Reply,
    with_app,
)


def sent(headers: dict[str, str], method: str = "GET", **settings: Any) -> Reply:
    return with_app(
        make_hash_llm(), lambda app: app.send(method, "/v1/models", b"", headers), **settings
    )


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://evil.example", "localhost:8000", 403),
        ("null", "localhost:8000", 403),
        ("http://localhost:3000", "localhost:8000", 403),
        ("http://localhost.evil.example:8000", "localhost:8000", 403),
        ("https://app.example", "localhost:8000", 200),
        ("app://desk", "localhost:8000", 200),
        ("http://localhost:8000", "localhost:8000", 200),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", 200),
        ("http://evil.example", "evil.example", 403),
        ("http://models.example", "models.example", 200),
    ],
)
def test_origins(origin: str, host: str, status: int) -> None:
    """An origin is accepted if it is this host's own or one that the operator has named."""
    headers = {"origin": origin, "host": host}
    allowed = {"cors_origins": "https://app.example,app://desk", "allowed_hosts": "models.example"}
    reply = sent(headers, **allowed)
    assert reply.status == status
    if status == 403:
        host_is_known = not host.startswith("evil")
        expected = "origin_not_allowed" if host_is_known else "host_not_allowed"
        assert reply.error()["code"] == expected
        assert ("--cors-origins" in reply.error()["message"]) is host_is_known
    shown = reply.headers.get("access-control-allow-origin")
    assert shown == (origin if origin.startswith(("https", "app")) else None)


def test_hosts_where_there_are_keys_or_others_may_come(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    token = Keys(keys, must_exist=False).create("a", KeyLimits())
    foreign = {"host": "models.example", "origin": "http://models.example"}
    assert sent(foreign, api_keys=str(keys)).status == 401
    with_key = {**foreign, "x-api-key": token}
    assert sent(with_key, api_keys=str(keys)).status == 200
    reached = {"type": "http", "server": ("192.0.2.1", 80), "headers": [(b"host", b"x")]}
    called = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        called.append(scope["server"])

    guard = HostGuard(inner, has_keys=False, hosts=[], origins=[])
    asyncio.run(guard(reached, None, None))  # type: ignore[arg-type]
    assert called == [("192.0.2.1", 80)]


def test_what_pages_may_send_and_see() -> None:
    """PATCH renames a session; `x-api-key` is the other header for a key."""
    asked = {"origin": "https://app.example", "host": "localhost"}
    preflight = {
        **asked,
        "access-control-request-method": "PATCH",
        "access-control-request-headers": "x-api-key,content-type",
    }
    settings = {"cors_origins": "https://app.example"}
    reply = sent(asked, **settings)
    shown = reply.headers["access-control-expose-headers"].lower()
    assert {"x-request-id", "x-warning", "retry-after"} <= set(shown.split(", "))

    async def ask_first(app: App) -> dict[str, str]:
        heard: dict[str, str] = {}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 200
                heard.update({k.decode(): v.decode() for k, v in message["headers"]})

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            **{"type": "http", "method": "OPTIONS", "path": "/v1/sessions/x", "query_string": b""},
            **{"raw_path": b"/v1/sessions/x", "server": ("127.0.0.1", 1), "http_version": "1.1"},
            "headers": [(k.encode(), v.encode()) for k, v in preflight.items()],
        }
        await app.app(scope, receive, send)
        return heard

    heard = with_app(make_hash_llm(), ask_first, **settings)
    assert "PATCH" in heard["access-control-allow-methods"]
    assert "x-api-key" in heard["access-control-allow-headers"]


@pytest.mark.parametrize("hosts", ["http://a.example", "a.example:80", "a b", "*"])
def test_hosts_that_are_none(hosts: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=hosts)
