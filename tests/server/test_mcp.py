"""MCP servers: their tools and calls of them, and what a hostile one can do: one sentence."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import random
import ssl
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.server.mcp.mcp_client import (
    MAX_EVENTS,
    MAX_SCHEMA_DEPTH,
    MAX_TEXT_CHARS,
    MAX_TOOLS,
    EventSplitter,
)
from infer.server.mcp.mcp_settings import mcp_servers_of
from infer.server.settings import ServerSettings
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.mcp_servers import (
    TOOL,
    Asked,
    Said,
    ScriptedMcp,
    answer,
    result,
    scripted_mcp,
    text,
)
from tests.support.serving import App, Reply, serving
from tests.support.tenants import make
from tests.support.transports import make_certificate

SERVERS, CALL = "/v1/mcp/servers", "/v1/mcp/call"
FIND = {"server": "docs", "tool": "find", "arguments": {"q": "x"}}
EVENTS = "text/event-stream"


def with_mcp(use: Callable[[App, ScriptedMcp], Awaitable[Any]], **settings: Any) -> Any:
    """Run `use` with an app that may use a scripted server, as `docs`."""

    async def main() -> Any:
        async with asyncio.timeout(60), scripted_mcp() as server:
            given = {"mcp_server": f"docs={server.url}", **settings}
            async with serving(make_hash_llm(), **given) as app:
                return await use(app, server)

    return asyncio.run(main())


def event(message: Any) -> bytes:
    return b"event: message\ndata: " + json.dumps(message).encode() + b"\n\n"


def test_tools_are_listed_and_called() -> None:
    async def use(app: App, server: ScriptedMcp) -> None:
        found = (await app.get(SERVERS)).json()
        tool = {"name": "find", "description": "Finds a text", "parameters": TOOL["inputSchema"]}
        shown = {"name": "docs", "tools": [tool], "left_out": [], "error": None}
        assert found == {"object": "list", "data": [shown]}
        begin = ["initialize", "notifications/initialized"]
        assert server.methods == [*begin, "tools/list"]
        reply = await app.post(CALL, FIND)
        assert reply.json() == {
            "object": "mcp.result",
            **{"server": "docs", "tool": "find", "content": "done", "is_error": False},
        }
        call = server.asked[-1]
        assert call.message["params"] == {"name": "find", "arguments": {"q": "x"}}
        assert call.headers["mcp-protocol-version"] == "2025-06-18"
        assert call.headers["accept"] == "application/json, text/event-stream"
        assert "authorization" not in call.headers

    with_mcp(use)


def test_a_session_is_kept_and_ended() -> None:
    async def use(app: App, server: ScriptedMcp) -> None:
        def begin(asked: Asked) -> Said:
            said = answer(asked, {"protocolVersion": "2025-03-26"})
            return said._replace(headers={"Mcp-Session-Id": "s-1"})

        server.says["initialize"] = begin
        assert (await app.post(CALL, FIND)).status == 200
        assert server.methods[2:] == ["tools/call", "DELETE"]
        assert [each.headers.get("mcp-session-id") for each in server.asked] == [None, *["s-1"] * 3]

        server.says["tools/call"] = lambda asked: Said(b"")
        assert (await app.post(CALL, FIND)).status == 502
        assert server.methods[-1] == "DELETE"

    with_mcp(use)


def test_pages_of_tools_and_tools_that_cannot_be_used() -> None:
    deep: Any = {}
    for _ in range(MAX_SCHEMA_DEPTH):
        deep = {"properties": {"x": deep}}
    first = [
        {**TOOL, "name": "bad name!"},
        {**TOOL, "name": "x" * 70},
        {"name": "no-schema"},
        {**TOOL, "name": "list", "inputSchema": []},
        {**TOOL, "name": "string", "inputSchema": {"type": "string"}},
        {**TOOL, "name": "deep", "inputSchema": deep},
        {**TOOL, "name": "long", "inputSchema": {"description": "x" * 20_000}},
        *(7, {}, {"name": 3}),
    ]
    second = [TOOL, TOOL, {**TOOL, "name": "half", "description": "\ud800"}, {"name": None}]

    def listed(asked: Asked) -> Any:
        cursor = asked.message["params"].get("cursor")
        return {"tools": second} if cursor else {"tools": first, "nextCursor": "2"}

    async def use(app: App, server: ScriptedMcp) -> None:
        server.says["tools/list"] = listed
        [found] = (await app.get(SERVERS)).json()["data"]
        assert [each["name"] for each in found["tools"]] == ["find", "half"]
        assert found["error"] is None
        names = [each["name"] for each in found["left_out"]]
        assert names[:7] == [
            *("bad name!", "x" * 64, "no-schema", "list", "string", "deep", "long")
        ]
        assert names[7:] == ["", "", "", "find", ""]
        assert all(each["reason"] for each in found["left_out"])

    with_mcp(use)


def test_contents_that_are_no_text_are_named() -> None:
    image = base64.b64encode(b"x" * 30).decode()

    async def use(app: App, server: ScriptedMcp) -> None:
        async def tool(_: Asked) -> Any:
            return result(
                text("before"),
                {"type": "image", "data": image, "mimeType": "image/png"},
                {"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}},
                {"type": "resource", "resource": {"uri": "file:///b", "blob": image}},
                {"type": "resource_link", "uri": "https://a.org/\n\x1b[2J", "name": "a"},
                {"type": 7},
                {"type": "text", "text": 5},
                isError=True,
            ) | {"structuredContent": {"is not": "asked for"}}

        server.tool = tool
        found = (await app.post(CALL, FIND)).json()
        assert found["is_error"] is True
        assert found["content"].splitlines() == [
            *("before", "[image image/png, 30 bytes: not shown]", "inside"),
            "[resource file:///b, 30 bytes: not shown]",
            "[resource_link a https://a.org/ [2J: not shown]",
            *("[content: not shown]", "[text: not shown]"),
        ]
        structured = {"content": [], "structuredContent": {"n": 1}}
        server.says["tools/call"] = lambda asked: structured
        assert (await app.post(CALL, FIND)).json()["content"] == '{"n": 1}'
        server.says["tools/call"] = lambda asked: result(text("ä" * 100_000), text("\ud800"))
        content = (await app.post(CALL, FIND)).json()["content"]
        assert content.startswith("ä" * MAX_TEXT_CHARS + "\n[cut here")

    with_mcp(use)


@pytest.mark.parametrize("line", ["\n", "\r\n", "\r"])
def test_an_answer_among_events(line: str) -> None:
    async def use(app: App, server: ScriptedMcp) -> None:
        def said(asked: Asked) -> Said:
            note = {"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}
            ask = {"jsonrpc": "2.0", "id": asked.message["id"], "method": "ping"}
            parts = [b": hello\n\n", event(note), b"data:\n\n", event(ask)]
            parts += [answer(asked, result(text("found"))).body]
            body = b"".join(parts[:-1]) + b"id: 7\ndata:" + parts[-1] + b"\n\n"
            body = body.replace(b"data:\n\n", b"retry: 5\n\n").replace(b"\n", line.encode())
            return Said(body, EVENTS, ends=False)  # the stream stays open

        server.says["tools/call"] = said
        assert (await app.post(CALL, FIND)).json()["content"] == "found"

    with_mcp(use)


def test_events_may_be_cut_anywhere() -> None:
    random_ = random.Random(1)
    for _ in range(500):
        line = random_.choice([b"\n", b"\r\n", b"\r"])
        events = [b"data: %d\nid: 1" % number for number in range(4)]
        stream = b"".join(each + b"\n\n" for each in events).replace(b"\n", line) + b"x"
        splitter, found, rest = EventSplitter(), list[bytes](), stream
        while rest:
            size = random_.randint(1, 5)
            found += splitter.add(rest[:size])
            rest = rest[size:]
        assert [each.strip(b"\n") for each in found] == events


def said(body: bytes, *how: Any, **more: Any) -> Callable[[Asked], Said]:
    return lambda asked: Said(body, *how, **more)


def other_id(value: Any) -> Callable[[Asked], Said]:
    message = {"jsonrpc": "2.0", "id": value, "result": result(text("a lie"))}
    return said(json.dumps(message).encode())


def as_error(error: Any) -> Callable[[Asked], Said]:
    return said(json.dumps({"jsonrpc": "2.0", "id": 2, "error": error}).encode())


BOMB = gzip.compress(b"[" * 10_000_000)
TO_OTHER = {"Location": "http://127.0.0.1:1/"}
HOSTILE: dict[str, tuple[Callable[[Asked], Any], str]] = {
    "html": (said(b"<html>" * 99, "text/html"), "neither JSON nor events"),
    "html of a kind": (said(b"<html>"), "no JSON"),
    "no type": (said(b"{}", ""), "neither JSON nor events"),
    "nothing": (said(b""), "no JSON"),
    "10 MB": (said(b'"' + b"x" * 10_000_000 + b'"'), "more than 1048576 bytes"),
    "10 MB of headers": (said(b"{}", headers={"x": "y" * 10_000_000}), "no valid HTTP"),
    "endless events": (said(b": hello\n\n" * 2_000_000, EVENTS, ends=False), str(MAX_EVENTS)),
    "endless line": (said(b"data: x" * 2_000_000, EVENTS, ends=False), "more than"),
    "small chunks": (
        said(b"1\r\nx\r\n" * 400_000, headers={"Transfer-Encoding": "chunked"}, ends=False),
        "more than 16384 pieces",
    ),
    "an end without an answer": (said(event({"method": "x"}), EVENTS), "ended without an answer"),
    "bomb": (said(BOMB, headers={"Content-Encoding": "gzip"}), "compressed"),
    "redirect": (said(b"", status="302 Found", headers=TO_OTHER), "redirects"),
    "lasting redirect": (said(b"", status="308 Elsewhere", headers=TO_OTHER), "redirects"),
    "wrong key": (said(b"{}", status="401 No"), "refuses the key"),
    "forbidden": (said(b"{}", status="403 No"), "refuses the key"),
    "failure": (said(b"{}", status="500 Oh"), "HTTP 500"),
    "accepted": (said(b"", status="202 Accepted"), "no JSON"),
    "no HTTP": (said(b"", status="2000000 \x00"), "no valid HTTP"),
    "cut": (said(b"{", headers={"content-length": "99"}), "no valid HTTP"),
    "other id": (other_id(99), "another request"),
    "id as text": (other_id("2"), "another request"),
    "id as truth": (other_id(True), "another request"),
    "id as fraction": (other_id(2.0), "another request"),
    "no id": (other_id(None), "another request"),
    "other id in a stream": (
        said(event({"id": 9, "result": {}}), EVENTS, ends=False),
        "another request",
    ),
    "list": (said(b"[]"), "no JSON-RPC response"),
    "number": (said(b"7"), "no JSON-RPC response"),
    "notification": (said(b'{"method": "x"}'), "no JSON-RPC response"),
    "deep": (said(b"[" * 500_000), "no JSON"),
    "wide number": (said(b"1" * 20_000), "no JSON"),
    "no UTF-8": (said(b'"\xff"'), "no JSON"),
    "result is a list": (lambda asked: [], "no object"),
    "content is no list": (lambda asked: {"content": "x"}, "no list of contents"),
    "failure is no truth value": (lambda asked: {"isError": "no"}, "no list of contents"),
    "error": (as_error({"code": -32602, "message": "no\nsuch \x1b[2J tool"}), "it says: no such"),
    "long error": (as_error({"message": "x" * 100_000}), "x" * 200),
    "error of nothing": (as_error(None), "it answers with an error"),
}


def is_one_sentence(message: str, url: str) -> None:
    assert message.startswith("The MCP server 'docs'")
    assert len(message) < 300
    assert message.isprintable()
    assert url.partition("//")[2].partition("/")[0] not in message


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_server_is_one_sentence(name: str) -> None:
    says, expected = HOSTILE[name]

    async def use(app: App, server: ScriptedMcp) -> None:
        server.says["tools/call"] = says
        reply = await app.post(CALL, FIND)
        assert (reply.status, reply.error()["code"]) == (502, "mcp_server_failed")
        is_one_sentence(reply.error()["message"], server.url)
        assert expected in reply.error()["message"]
        # The same as an answer to what comes before, and for a list.
        for method in ("initialize", "tools/list"):
            server.says = {method: says}
            found = await app.get(SERVERS)
            assert found.status == 200
            [shown] = found.json()["data"]
            if "is no" not in expected or method == "initialize":
                assert shown["tools"] == []
            is_one_sentence(shown["error"], server.url)
        assert (await app.get("/health")).status == 200

    with_mcp(use)


@pytest.mark.parametrize("part", ["no head", "half a head", "events", "body"])
def test_a_server_that_hangs_costs_its_time_only(part: str) -> None:
    parts = {
        "events": Said(b": hello\n\n", EVENTS, ends=False),
        "body": Said(b"{", headers={"content-length": "9"}, ends=False),
    }

    async def use(app: App, server: ScriptedMcp) -> None:
        if part in parts:
            server.says = {
                "tools/list": lambda asked: parts[part],
                "tools/call": lambda asked: parts[part],
            }
        else:

            async def hang(reader: Any, writer: asyncio.StreamWriter) -> None:
                writer.write(b"HTTP/1.1 200" if part == "half a head" else b"")
                await asyncio.sleep(60)

            server.serve = hang  # type: ignore[method-assign]
        reply = await app.post(CALL, FIND)
        assert (reply.status, reply.error()["code"]) == (504, "mcp_server_timeout")
        is_one_sentence(reply.error()["message"], server.url)
        [shown] = (await app.get(SERVERS)).json()["data"]
        assert "has not answered after 0.2 s" in shown["error"]

    with_mcp(use, limits=ServerLimits(mcp_list_s=0.2, mcp_call_s=0.3))


def test_a_server_that_is_not_there_and_others_beside_it() -> None:
    async def use(app: App, server: ScriptedMcp) -> None:
        found = (await app.get(SERVERS)).json()["data"]
        assert [each["name"] for each in found] == ["gone", "tls", "docs"]
        assert "cannot be reached" in found[0]["error"]
        assert "TLS" in found[1]["error"]
        assert (found[2]["error"], len(found[2]["tools"])) == (None, 1)

    async def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with scripted_mcp() as server, await asyncio.start_server(refuse, "127.0.0.1") as bad:
            tls = f"https://127.0.0.1:{bad.sockets[0].getsockname()[1]}/"
            listed = f"gone=http://127.0.0.1:1/,tls={tls},docs={server.url}"
            async with serving(make_hash_llm(), mcp_server=listed) as app:
                await use(app, server)

    asyncio.run(main())


def test_tls_and_a_certificate_that_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path, "mcp")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)

    async def main() -> Any:
        async with AsyncExitStack() as held:
            server = await held.enter_async_context(scripted_mcp(tls))
            allowed = serving(make_hash_llm(), mcp_server=f"docs={server.url}")
            app = await held.enter_async_context(allowed)
            return (await app.get(SERVERS)).json()["data"][0]

    assert "TLS is not valid" in asyncio.run(main())["error"]
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    found = asyncio.run(main())
    assert (found["error"], len(found["tools"])) == (None, 1)


def test_lists_that_do_not_end() -> None:
    pages = iter(range(10**6))

    async def use(app: App, server: ScriptedMcp) -> None:
        lists: list[Callable[[Asked], Any]] = [
            lambda asked: {"tools": [], "nextCursor": "again"},
            lambda asked: {"tools": [], "nextCursor": str(next(pages))},
            lambda asked: {"tools": [], "nextCursor": 7},
            lambda asked: {"tools": [{}] * (MAX_TOOLS + 1)},
            lambda asked: {"tools": {}},
        ]
        for says in lists:
            server.says["tools/list"] = says
            [shown] = (await app.get(SERVERS)).json()["data"]
            is_one_sentence(shown["error"], server.url)
            assert shown["tools"] == []

    with_mcp(use)


def test_who_leaves_ends_the_call() -> None:
    async def use(app: App, server: ScriptedMcp) -> None:
        begun, leave = asyncio.Event(), asyncio.Event()

        async def tool(_: Asked) -> Any:
            begun.set()
            await asyncio.Event().wait()

        server.tool = tool
        call = asyncio.ensure_future(app.post(CALL, FIND, leave=leave))
        await begun.wait()
        leave.set()
        await call
        server.tool = None
        for _ in range(5):  # its place is free
            assert (await app.post(CALL, FIND)).status == 200

    with_mcp(use, limits=ServerLimits(max_mcp_calls=1))


def test_only_the_servers_of_the_operator() -> None:
    async def use(app: App, server: ScriptedMcp) -> Reply:
        for name in ("other", "http://127.0.0.1:1/", server.url, "docs/../x", ""):
            reply = await app.post(CALL, {**FIND, "server": name})
            assert (reply.status, reply.error()["param"]) == (404, "server")
        for wrong in ({"server": "docs"}, {**FIND, "arguments": []}, {**FIND, "tool": 3}):
            assert (await app.post(CALL, wrong)).status in (400, 422)
        assert server.asked == []
        return await app.get("/")

    with_mcp(use)

    async def without() -> None:
        async with serving(make_hash_llm()) as app:
            assert (await app.get(SERVERS)).json() == {"object": "list", "data": []}
            reply = await app.post(CALL, FIND)
            assert reply.status == 404
            assert "--mcp-server NAME=URL" in reply.error()["message"]

    asyncio.run(without())


@pytest.mark.parametrize(
    ("given", "header", "value"),
    [
        ("hush-hush", "authorization", "Bearer hush-hush"),
        ("X-Api-Key: hush-hush", "x-api-key", "hush-hush"),
    ],
)
def test_a_key_goes_to_its_server_only(
    given: str, header: str, value: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text(f"{given}\n", encoding="utf-8")
    file.chmod(0o644)

    async def use(app: App, server: ScriptedMcp) -> None:
        server.says["tools/call"] = said(b"{}", status="401 No")
        replies = [await app.get(SERVERS), await app.post(CALL, FIND), await app.get("/")]
        assert {each.headers[header] for each in server.asked} == {value}
        for reply in replies:
            assert b"hush" not in reply.body
        assert "hush" not in repr(mcp_servers_of(f"docs={server.url}", f"docs=@{file}"))

    with_mcp(use, mcp_token=f"docs=@{file}")
    assert f"{file} can be read or written by others" in caplog.text
    assert "hush" not in caplog.text
    with_mcp(use, mcp_token=f"docs={given}")


def test_with_keys_a_key_is_needed(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    headers = make(keys, "a")

    async def use(app: App, server: ScriptedMcp) -> None:
        assert (await app.get(SERVERS)).status == (await app.post(CALL, FIND)).status == 401
        assert server.asked == []
        assert (await app.post(CALL, FIND, headers=headers)).status == 200
        # A caller's own key is none of the MCP server's.
        sent = {value for each in server.asked for value in each.headers.values()}
        assert not sent & set(headers.values())

    with_mcp(use, api_keys=str(keys))


@pytest.mark.parametrize(
    ("servers", "tokens", "expected"),
    [
        ("https://a.org/mcp", None, "NAME=URL"),
        ("a_b=https://a.org/mcp", None, "NAME=URL"),
        ("=https://a.org/mcp", None, "NAME=URL"),
        ("a=", None, "must be like"),
        ("a=file:///etc/passwd", None, "must be like"),
        ("a=ftp://a.org/", None, "must be like"),
        ("a=https://", None, "must be like"),
        ("a=https://a.org:99999/", None, "must be like"),
        ("a=https://[::1/", None, "must be like"),
        ("a=https://a.org/a b", None, "must be like"),
        ("a=https://ä.org/", None, "must be like"),
        ("a=https://me:hush@a.org/", None, "mcp_token"),
        ("a=https://a.org/,a=https://b.org/", None, "twice"),
        (",".join(f"a{n}=https://a.org/" for n in range(17)), None, "16"),
        (None, "a=hush", "no name of an mcp_server"),
        ("a=https://a.org/", "b=hush", "no name of an mcp_server"),
        ("a=https://a.org/", "hush", "NAME=TOKEN"),
        ("a=https://a.org/", "a=", "NAME=TOKEN"),
        ("a=https://a.org/", "a=hush,a=@x", "twice"),
    ],
)
def test_settings_that_are_refused(servers: str | None, tokens: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        ServerSettings(mcp_server=servers, mcp_token=tokens)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "token", ["Host: hush", "Content-Length: hush", "hush\nX: 1", "hüsh", "", "X-Key: hush\x00"]
)
def test_tokens_that_are_refused(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match="mcp_token") as refused:
        mcp_servers_of("a=https://a.org/", f"a=@{file}")
    assert "hush" not in str(refused.value)
    with pytest.raises(ConfigError, match="the file of 'a' cannot be read"):
        mcp_servers_of("a=https://a.org/", f"a=@{file}x")


def test_addresses() -> None:
    found = mcp_servers_of("a=https://a.org,b=http://[::1]:80/x?y=1,c=http://a.org:8080/", None)
    assert [(each.authority, each.target) for each in found.values()] == [
        *(("a.org", "/"), ("[::1]", "/x?y=1"), ("a.org:8080", "/")),
    ]
