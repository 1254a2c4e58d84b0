"""Scorecard A7: web pages of other sites, by their Origin and Host."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from infer.errors import ConfigError
from infer.server.app import create_app
from infer.server.http.hosts import HostGuard
from infer.server.route_table import EVENTS_PATH
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from infer.server.viewers import MAX_VIEWERS
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
    expected = {"x-request-id", "request-id", "x-warning", "retry-after"}
    assert expected <= set(shown.split(", "))

    async def ask_first(app: App) -> dict[str, str]:
        heard: dict[str, str] = {}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                assert message["status"] == 204
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


PATHS = sorted(
    {
        route.path_format.replace("{name}", "hash-model").replace("{id}", "x")
        for route in create_app(make_hash_llm(), ServerSettings(sessions="sqlite://")).routes
        if isinstance(route, Route)
    }
    | {"/ui/main.js", "/ui/index.html", "/nothing"}
)
IMAGE = {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
TAB = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
FRAME = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_what_a_foreign_page_asks_for_without_an_origin(site: str) -> None:
    """Browsers send no Origin with images, scripts, frames and no-cors GETs."""
    gone = asyncio.Event()  # a stream ends at once
    gone.set()
    foreign = {"host": "localhost:8000", "sec-fetch-site": site}

    async def use(app: App) -> None:
        for path in PATHS:
            for method in ("GET", "HEAD", "POST"):
                for more in ({}, IMAGE, FRAME, TAB):
                    headers = {**foreign, **more, "accept": "text/html"}
                    reply = await app.send(method, path, headers=headers, leave=gone)
                    may = more is TAB and method == "GET"
                    may = may and (path == "/" or path.startswith("/ui/"))
                    assert (reply.status == 403) != may, (method, path, more)
                    if not may:
                        assert "--cors-origins" in reply.error()["message"] or method == "HEAD"
            own = {"host": "localhost:8000", "sec-fetch-site": "same-origin", **IMAGE}
            typed = {**own, "sec-fetch-site": "none", **TAB}
            allowed = {**foreign, "origin": "https://app.example", "sec-fetch-mode": "cors"}
            for headers in (own, typed, allowed):
                reply = await app.send("GET", path, headers=headers, leave=gone)
                assert reply.status != 403, (path, headers)

    with_app(make_hash_llm(), use, sessions="sqlite://", cors_origins="https://app.example")


def test_a_foreign_page_takes_no_place_of_a_viewer() -> None:
    async def use(app: App) -> None:
        foreign = {"host": "localhost:8000", "sec-fetch-site": "cross-site", **IMAGE}
        for _ in range(MAX_VIEWERS + 1):
            assert (await app.send("GET", EVENTS_PATH, headers=foreign)).status == 403
        leave = asyncio.Event()
        watching = asyncio.ensure_future(app.send("GET", EVENTS_PATH, leave=leave))
        await asyncio.sleep(0.02)
        leave.set()
        assert (await watching).status == 200

    with_app(make_hash_llm(), use)


def test_where_there_are_keys_the_key_decides(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    token = Keys(keys, must_exist=False).create("a", KeyLimits())
    foreign = {"host": "models.example", "sec-fetch-site": "cross-site", "x-api-key": token}
    assert sent(foreign, api_keys=str(keys)).status == 200


@pytest.mark.parametrize("hosts", ["http://a.example", "a.example:80", "a b", "*"])
def test_hosts_that_are_none(hosts: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerSettings(allowed_hosts=hosts)
