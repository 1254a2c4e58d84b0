"""What clients get wrong before the body: paths, base URLs, preflights, empty lines, and the id by
which they look for a request"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from infer.server.app import create_app
from infer.server.http.bounded_protocol import MAX_EMPTY_LINES
from infer.server.http.paths import path_of
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.cases import over
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import HEAD, HEALTH, connect, read_all, read_answer
from tests.support.serving import (
    BODIES,
    COMPLETIONS,
    JSON,
    App,
    all_open,
    completion_body,
    live,
    with_app,
)
from tests.support.several_fronts import FrontOfSeveral, SharedByFronts, with_several_fronts
from tests.support.tenants import make

ROUTES = sorted(
    {
        route.path_format.replace("{name}", "hash-model").replace("{id}", "x")
        for route in create_app(make_hash_llm(), ServerSettings(sessions="sqlite://")).routes
        if isinstance(route, Route)
    }
)
V1 = [path for path in ROUTES if path.startswith("/v1/")]

# ---- paths

HOST = "localhost:8000"
HEADERS = {**JSON, "host": HOST}


def other_ways(path: str) -> Iterator[str]:
    """The ways in which a client may write a path: with slashes too many, or as a whole URL."""
    yield from (f"/{path}", f"//{path}/", path.replace("/", "//"))
    yield from (f"http://{HOST}{path}", f"HTTPS://{HOST.upper()}/{path}")
    if path != "/":
        yield from (f"{path}/", f"{path}//")


@pytest.mark.parametrize("path", ROUTES)
def test_how_a_path_is_written_changes_nothing(path: str) -> None:
    """No redirect: it would lose the body of a POST."""
    gone = asyncio.Event()  # a stream ends at once
    gone.set()

    async def use(app: App) -> None:
        for method in ("GET", "POST", "DELETE", "PATCH"):
            body = json.dumps(BODIES[path]() if path in BODIES else {}).encode()
            right = await app.send(method, path, body, HEADERS, leave=gone)
            for written in other_ways(path):
                assert path_of(written, HOST) == path
                other = await app.send(method, written, body, HEADERS, leave=gone)
                assert other.status == right.status, (method, written)
                assert set(other.headers) == set(right.headers)

    with_app(make_hash_llm(), use, sessions="sqlite://")


def test_a_path_in_another_form_needs_a_key_all_the_same(tmp_path: Path) -> None:
    async def use(app: App) -> None:
        for path in ROUTES:
            plain = (await app.get(path)).status
            for written in other_ways(path):
                assert (await app.get(written, host=HOST)).status == plain, written

    file = tmp_path / "keys.json"
    Keys(file, must_exist=False).create("a", KeyLimits())
    with_app(make_hash_llm(), use, api_keys=str(file), sessions="sqlite://")


def wrong_bases(path: str) -> Iterator[str]:
    """A route's path below a base URL that is not ours."""
    yield from (f"/v1{path}", f"/api{path}", f"/openai{path}", f"/v1/v1{path}", f"/v2{path}")
    yield from (f"/openai/deployments/x{path.removeprefix('/v1')}", path.removeprefix("/v1"))


@over("path", V1)
def test_the_404_of_a_wrong_base_url_names_the_right_one(path: str) -> None:
    async def use(app: App) -> None:
        for wrong in wrong_bases(path):
            reply = await app.send("POST", wrong, b"{}")
            if reply.status != 404:
                assert (reply.status, wrong) == (405, "/v1/models/x")
                continue
            assert repr(path) in reply.error()["message"], (wrong, reply.error())
            assert "/v1 here" in reply.error()["message"]

    with_app(make_hash_llm(), use, sessions="sqlite://")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/api/tags", "/v1/models"),
        ("/ollama/api/tags", "/v1/models"),
        ("/completion", "/v1/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/model", "/v1/models"),
        ("/v1/embeddings", "no embeddings"),
        ("/embeddings", "no embeddings"),
        ("/api/show", "/v1/chat/completions"),
        ("/qqqq", "/v1/chat/completions"),
        ("/" + "v1/" * 5000 + "models", "/v1/chat/completions"),
    ],
)
def test_other_paths(wrong: str, meant: str) -> None:
    async def use(app: App) -> None:
        for method in ("GET", "POST"):
            reply = await app.send(method, wrong)
            assert (reply.status, reply.error()["code"]) == (404, "not_found")
            assert meant in reply.error()["message"]
            assert len(reply.body) < 1000

    with_app(make_hash_llm(), use)


# ---- preflights

STAINLESS = ["os", "lang", "arch", "runtime", "runtime-version", "package-version"]
STAINLESS += ["retry-count", "timeout", "helper-method"]
ASKED = ", ".join(["authorization", "content-type", *(f"x-stainless-{each}" for each in STAINLESS)])
PAGE = "https://page.example"


@pytest.mark.parametrize("has_keys", [False, True])
def test_a_page_of_an_allowed_origin_may_send_any_header(has_keys: bool, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    Keys(file, must_exist=False).create("a", KeyLimits())
    keys = {"api_keys": str(file)} if has_keys else {}
    preflight = {"origin": PAGE, "host": "localhost"}

    async def ask_for(path: str, app: App) -> None:
        for method in ("GET", "POST", "DELETE", "PATCH"):
            for asked in (ASKED, "x-never-seen", None):
                more = {"access-control-request-headers": asked} if asked else {}
                headers = {**preflight, "access-control-request-method": method, **more}
                reply = await app.send("OPTIONS", path, headers=headers)
                assert (reply.status, reply.body) == (204, b"")
                assert "content-type" not in reply.headers
                assert reply.headers["access-control-allow-origin"] == PAGE
                assert method in reply.headers["access-control-allow-methods"].split(", ")
                assert reply.headers.get("access-control-allow-headers") == asked
        headers = {**preflight, "access-control-request-method": "TRACE"}
        refused = await app.send("OPTIONS", path, headers=headers)
        assert refused.status == 400
        assert "PATCH" in refused.error()["message"]
        other = {**headers, "origin": "https://other.example"}
        refused = await app.send("OPTIONS", path, headers=other)
        assert refused.status == (400 if has_keys else 403)
        assert "--cors-origins" in refused.error()["message"]
        assert "access-control-allow-origin" not in refused.headers

    async def use(app: App) -> None:
        for path in ROUTES:
            await ask_for(path, app)

    with_app(make_hash_llm(), use, cors_origins=PAGE, sessions="sqlite://", **keys)


# ---- empty lines


def answers_to(url: str, *pieces: bytes) -> list[int]:
    """The statuses of the answers on one connection, which ends after the last piece."""
    with connect(url) as sock:
        for piece in pieces:
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        return [int(status) for status in re.findall(rb"HTTP/1.1 ([2-5][0-9]{2}) ", read_all(sock))]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with live(make_hash_llm()) as found:
        yield found


@pytest.mark.parametrize("line", [b"\r\n", b"\n"])
@pytest.mark.parametrize("count", [1, 2, MAX_EMPTY_LINES, MAX_EMPTY_LINES + 1])
def test_empty_lines_before_a_request(url: str, line: bytes, count: int) -> None:
    few = count <= MAX_EMPTY_LINES
    assert answers_to(url, line * count + HEALTH) == ([200] if few else [400])
    # Byte by byte, and before each of several requests, also behind a body.
    data = json.dumps(completion_body(max_tokens=1)).encode()
    post = f"{HEAD}content-length: {len(data)}\r\n\r\n".encode() + data
    many = line * count + HEALTH + line * count + post + line * count + HEALTH
    assert answers_to(url, many) == ([200, 200, 200] if few else [400])
    with connect(url) as sock:
        for byte in line * count + HEALTH:
            sock.sendall(bytes([byte]))
        assert read_answer(sock)[0] == (200 if few else 400)


@pytest.mark.parametrize("start", [b"\r", b"\r\r\n", b" \r\n", b"\0", b"\n\r\r\n"])
def test_what_is_no_empty_line_is_refused(url: str, start: bytes) -> None:
    assert answers_to(url, start + HEALTH) == [400]


# ---- the client's id of a request

MINE = {"x-request-id": "mine-1"}
SLOW = completion_body(max_tokens=400, ignore_eos=True)


def slow_llm() -> Any:
    return make_hash_llm(step_s=0.01, num_pages=2048)


async def check_named(ask: App, app: App, headers: dict[str, str]) -> None:
    """Requests that `ask` gets are found by `app` under the name that their client gave."""
    path = "/v1/requests/mine-1"

    def get(at: str) -> Any:
        return app.send("GET", at, headers=headers)

    assert (await get(path)).error()["code"] == "request_not_found"
    body = completion_body(max_tokens=1)
    for _ in range(2):  # a client that tries again uses the name again
        done = (await ask.post(COMPLETIONS, body, headers={**MINE, **headers})).json()["id"]
    found = (await get(path)).json()
    assert (found["id"], found["client_request_id"]) == (done, "mine-1")
    listed = (await get("/v1/requests")).json()["data"]
    assert [each["client_request_id"] for each in listed] == ["mine-1"] * 2
    # One that runs comes before those that have ended; of several none is chosen.
    asking = []
    for number in (1, 2):
        post = ask.post(COMPLETIONS, SLOW, headers={**MINE, **headers})
        asking.append(asyncio.ensure_future(post))
        await all_open(ask, number)
        if number == 1:
            running = (await get(path)).json()
            assert (running["total_ms"], running["id"] != done) == (None, True)
    for method, at in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
        refused = await app.send(method, at, headers={**headers, "content-type": "text/plain"})
        assert (refused.status, refused.error()["code"]) == (409, "request_ambiguous")
        assert running["id"] in refused.error()["message"]
    ended = await app.send("DELETE", f"/v1/requests/{running['id']}", headers=headers)
    assert ended.json()["cancelled"]
    assert (await asking[0]).error()["code"] == "request_cancelled"
    ended = await app.send("DELETE", path, headers=headers)
    assert ended.json()["cancelled"]
    assert ended.json()["id"] != running["id"]
    assert (await asking[1]).error()["code"] == "request_cancelled"
    ended = await app.send("DELETE", path, headers=headers)
    assert ended.json()["cancelled"] is False  # the last one


def test_a_clients_id_finds_its_request() -> None:
    with_app(slow_llm(), lambda app: check_named(app, app, {}))


@pytest.mark.parametrize("at", [0, 1])
def test_a_clients_id_finds_its_request_at_any_front(at: int) -> None:
    async def use(shared: SharedByFronts, fronts: list[FrontOfSeveral], apps: list[App]) -> None:
        await check_named(apps[0], apps[at], {})
        asking = [
            asyncio.ensure_future(app.post(COMPLETIONS, SLOW, headers={"x-request-id": "f" * 32}))
            for app in apps[:2]
        ]
        for app in apps[:2]:
            await all_open(app, 1)
        refused = await apps[at].get(f"/v1/requests/{'f' * 32}")
        assert (refused.status, refused.error()["code"]) == (409, "request_ambiguous")
        for each in (await apps[at].get("/v1/requests")).json()["data"][:2]:
            await apps[at].send("DELETE", f"/v1/requests/{each['id']}")
        await asyncio.gather(*asking)

    with_several_fronts(use, slow_llm, 2)


def test_a_clients_id_finds_requests_of_its_key_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, other = make(file, "one"), make(file, "other")

    async def use(app: App) -> None:
        post = app.post(COMPLETIONS, SLOW, headers={**MINE, **other})
        asking = asyncio.ensure_future(post)
        await all_open(app, 1)
        (theirs,) = (await app.send("GET", "/v1/requests", headers=other)).json()["data"]
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            at = f"/v1/requests/mine-1{path}"
            refused = await app.send(method, at, headers=one)
            assert refused.error()["code"] == "request_not_found"
        await app.send("DELETE", "/v1/requests/mine-1", headers=other)
        assert (await asking).error()["code"] == "request_cancelled"
        # Nor does a name that is another key's own id.
        taken = {"x-request-id": theirs["id"], **one}
        mine = (await app.post(COMPLETIONS, completion_body(), headers=taken)).json()["id"]
        at = f"/v1/requests/{theirs['id']}"
        assert (await app.send("GET", at, headers=one)).json()["id"] == mine
        assert (await app.send("GET", at, headers=other)).json()["id"] == theirs["id"]

    with_app(slow_llm(), use, api_keys=str(file))
