"""A table of all routes, made from the app: what HEAD, OPTIONS and other methods get, which bodies
are taken, and the content type of each answer"""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from infer.server.app import create_app
from infer.server.openai.openapi import each
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import connect, read_all
from tests.support.serving import (
    JSON,
    App,
    Reply,
    chat_body,
    code_at,
    completion_body,
    live,
    with_app,
)

SESSIONS = "sqlite://"
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
ROUTES = [
    route
    for route in create_app(make_hash_llm(), ServerSettings(sessions=SESSIONS)).routes
    if isinstance(route, Route)
]
KNOWN: dict[str, set[str]] = {}
"""Path → the methods of all its routes."""
for one in ROUTES:
    KNOWN.setdefault(one.path_format, set()).update(one.methods or ())
ROWS = [(method, route.path_format, route) for method, route, _ in each(ROUTES)]
BODIES: dict[str, Any] = {
    "/v1/completions": completion_body(max_tokens=1),
    "/v1/chat/completions": chat_body(max_tokens=1),
    "/v1/chat/completions/render": chat_body(),
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/sessions/{id}": {"title": "x"},
    "/v1/models/load": {"model": "hash-model"},
    "/v1/models/unload": {"model": "hash-model"},
}
"""Bodies of the endpoints that want more than an empty object."""
RUNNING: list[asyncio.Future[Reply]] = []
REFUSED = {"/v1/models/unload": 409}
"""Statuses of what a server with one model does not do."""
SLOW = {"/v1/engine/comparisons", "/v1/mcp/call"}
"""Endpoints that start a process, or ask another server."""


async def address_of(app: App, path: str) -> str:
    """A path with a session, response or request that there is."""
    if path.endswith("responses/{id}/cancel"):
        return path.replace("{id}", await running_response(app))
    if "/responses/" in path:
        found = (await app.post("/v1/responses", {"input": "a"})).json()["id"]
    elif "/sessions/" in path:
        found = (await app.post("/v1/sessions", {})).json()["id"]
    else:
        body = completion_body(max_tokens=1, stream=True)
        made = await app.post("/v1/completions", body, headers={"x-keep-answer": "true"})
        found = made.headers["x-request-id"]
    return path.replace("{name}", "hash-model").replace("{id}", found)


async def running_response(app: App) -> str:
    """The id of a response that runs, whose client does not wait for it."""
    body = {"input": "a", "stream": True, "max_output_tokens": 400}
    begun, headers = asyncio.Event(), {"x-keep-answer": "true"}
    how: dict[str, Any] = {"leave": begun, "on_write": lambda data: begun.set()}
    RUNNING.append(asyncio.ensure_future(app.post("/v1/responses", body, headers=headers, **how)))
    await begun.wait()
    listed = (await app.get("/v1/requests")).json()["data"]
    return str(next(each["id"] for each in listed if each["id"].startswith("resp_")))


async def send(app: App, method: str, path: str, **how: Any) -> Reply:
    gone = asyncio.Event()  # a stream ends at once
    gone.set()
    return await app.send(method, path, leave=gone, **how)


@pytest.mark.parametrize("path", KNOWN)
def test_methods(path: str, tmp_path: Path) -> None:
    """HEAD has the status and the headers of GET. What a path does not know is a 405 with all that
    it knows."""

    async def use(app: App) -> None:
        at = await address_of(app, path)
        for method in METHODS:
            if method in KNOWN[path] and method != "HEAD":
                continue
            reply = await send(app, method, at)
            if method != "HEAD" or "GET" not in KNOWN[path]:
                assert reply.status == 405, method
                assert set(reply.headers["allow"].split(", ")) == KNOWN[path]
                assert reply.error()["code"] == code_at(path, "method_not_allowed")
        if "GET" in KNOWN[path]:
            assert "HEAD" in KNOWN[path]
            head, get = await send(app, "HEAD", at), await send(app, "GET", at)
            assert (head.status, get.status) == (200, 200)
            assert head.headers["content-type"] == get.headers["content-type"]
            assert head.headers.keys() ^ get.headers.keys() <= {"content-length"}

    with_app(make_hash_llm(), use, sessions=f"sqlite:///{tmp_path}/s.db")


@pytest.mark.parametrize(("method", "path", "route"), ROWS)
def test_content_types(method: str, path: str, route: Route, tmp_path: Path) -> None:
    """Each answer has a type that its route documents. A body of another type is a 415, and so is
    one in another charset or compressed."""
    bodies, _, answers = getattr(route.endpoint, "described", ((), (), ("application/json",)))
    takes_body = bool(bodies)

    async def use(app: App) -> None:
        at = await address_of(app, path)
        if path not in SLOW:
            body = BODIES.get(path, {})
            data = json.dumps(body).encode() if takes_body else b""
            ask = app.send if takes_body else partial(send, app)
            reply = await ask(method, at, body=data)
            problem = f"{path} takes no {body} of BODIES: {reply.body!r}"
            assert reply.status == REFUSED.get(path, 200), problem
            assert reply.headers["content-type"].partition(";")[0] in answers
            assert reply.headers["x-content-type-options"] == "nosniff"
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            if takes_body:
                refused = await app.send(method, at, b"{}", {"content-type": kind} if kind else {})
                code = code_at(path, "unsupported_media_type")
                assert (refused.status, refused.error()["code"]) == (415, code)
        if takes_body:
            for wrong in (
                {"content-type": "application/json; charset=latin-1"},
                {**JSON, "content-encoding": "gzip"},
            ):
                assert (await app.send(method, at, b"{}", wrong)).status == 415
            right = {"content-type": "Application/JSON; charset=UTF-8"}
            wrong_type = (await app.send(method, at, b"[]", right)).error()
            assert wrong_type["code"] == code_at(path, "invalid_type")

    with_app(make_hash_llm(), use, sessions=f"sqlite:///{tmp_path}/s.db")


def test_no_answer_to_head_has_a_body() -> None:
    with live(make_hash_llm()) as url:
        for path in KNOWN:
            at = path.replace("{name}", "hash-model").replace("{id}", "x")
            with connect(url) as sock:
                head = f"HEAD {at} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
                sock.sendall(head.encode())
                assert read_all(sock).partition(b"\r\n\r\n")[2] == b"", path


@pytest.mark.parametrize("path", KNOWN)
def test_with_keys_every_method_wants_one(path: str, tmp_path: Path) -> None:
    """Whether a path knows a method is told to those with a key only, except on open paths."""
    file = tmp_path / "keys.json"
    Keys(file, must_exist=False).create("a", KeyLimits())
    at = path.replace("{name}", "hash-model").replace("{id}", "x")

    async def use(app: App) -> None:
        statuses = {method: (await send(app, method, at)).status for method in METHODS}
        if statuses["GET"] == 401:
            assert set(statuses.values()) == {401}
        else:
            assert statuses["HEAD"] == statuses["GET"] == 200

    with_app(make_hash_llm(), use, api_keys=str(file), sessions=f"sqlite:///{tmp_path}/s.db")
