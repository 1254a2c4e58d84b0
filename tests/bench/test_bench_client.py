"""The client against scripted servers: odd streams, deaths, refusals, other tokenizers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from infer.bench.client import EventReader, ServerTarget
from infer.bench.drive import Drive, Failure, Piece, Record, Usage
from infer.bench.workloads import Planned
from infer.errors import ConfigError

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def refused(status: bytes) -> bytes:
    return b"HTTP/1.1 " + status + b"\r\nconnection: close\r\n\r\n"


def said(text: str, reason: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return json.dumps({"choices": [choice], **more}).encode()


USAGE = {"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


async def with_server(
    answer: Callable[[bytes, dict[str, Any]], Iterable[bytes]],
    use: Callable[[str], Any],
) -> Any:
    """`answer` is given the head and the body of a request; its pieces are written one by one."""

    handled = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handled.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError):  # the client may leave first
            await reply(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        body = json.loads(await reader.readexactly(length) or b"{}")
        for piece in answer(head, body):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        try:
            return await use(f"http://{host}:{port}")
        finally:
            await asyncio.gather(*filter(None, handled))


def ask(*answer: bytes, **how: Any) -> Record:
    """One request to a server that writes this."""

    async def use(url: str) -> Record:
        target = ServerTarget(url, model="m", api_key=None)
        (record,) = await Drive([Planned(0.0, (1, 2), 5)], target, **how).run()
        return record

    result: Record = asyncio.run(with_server(lambda head, body: answer, use))
    return result


def test_events_cut_anywhere() -> None:
    text = (
        b': a comment\r\n\r\nevent: token\ndata: {"a": "\xc3\xa9"}\n\ndata:{}\r\n'
        b"data:\n\nid: 3\ndata: [DONE]\n\n"
    )
    wanted = [b'{"a": "\xc3\xa9"}', b"{}", b"[DONE]"]
    for size in (1, 2, 3, 7, len(text)):
        reader = EventReader()
        found = [
            line for i in range(0, len(text), size) for line in reader.feed(text[i : i + size])
        ]
        assert found == wanted


def test_the_server_counts_the_tokens() -> None:
    """Two events, five tokens; usage comes in an event of its own, without choices."""
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    record = ask(
        OK, b": hi\n\ndata: " + said("a b", usage=None) + b"\n\n", b"data:" + said("c d", "length"),
        b"\n\ndata: " + usage + b"\n\n", b"data: [DONE]\n\n",
    )  # fmt: skip
    assert record.error is None
    assert len(record.token_s) == 2
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 3)


def test_tokens_without_text_are_tokens() -> None:
    """Where the server counts some, an answer that shows none is one; its end stands for them."""
    usage = json.dumps({"choices": [], "usage": USAGE}).encode()
    events = said("", "length"), usage, b"[DONE]"
    record = ask(OK, *(b"data: " + event + b"\n\n" for event in events))
    assert (record.error, len(record.token_s), record.output_tokens) == (None, 1, 5)


def test_without_usage_pieces_are_counted() -> None:
    """A token whose text is held back is one; the end alone, without text, is none."""
    lines = [said("a"), said(""), said("b"), said("", "length"), b"[DONE]"]
    record = ask(OK, *(b"data: " + line + b"\n\n" for line in lines))
    assert (record.error, record.prompt_tokens, record.output_tokens) == (None, 2, 3)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ([OK, b"data: " + said("a") + b"\n\n"], "cut_off", "before the answer did"),
        ([OK, b"data: " + said("a") + b"\n\ndata: {\"choi"], "cut_off", "before the answer did"),
        ([OK, b"data: {\"error\": {\"message\": \"boom\"}}\n\n"], "error_event", "boom"),
        ([OK, b"data: so what\n\n"], "bad_stream", "so what"),
        ([OK, b"data: [1]\n\n"], "bad_stream", "[1]"),
        ([OK, b"data: [DONE]\n\n"], "empty", "without a token"),
        ([refused(b"503 No"), b'{"error":{"message":"no room"}}'], "http_503", "no room"),
        ([refused(b"404 No"), b"<p>nothing here"], "http_404", "<p>nothing here"),
        ([refused(b"307 Go")], "http_307", "no reason"),
        ([b"what is this"], "connection", "127.0.0.1"),
        ([], "connection", "127.0.0.1"),
        ([b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
          b"%x\r\n" % (len(said("a")) + 8) + b"data: " + said("a") + b"\n\n\r\n"],
         "connection", "127.0.0.1"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_an_error(answer: list[bytes], kind: str, words: str) -> None:
    record = ask(*answer)
    assert record.error == kind
    assert words in record.message


def test_nobody_listens() -> None:
    async def main() -> Record:
        url = await with_server(lambda head, body: [], lambda url: asyncio.sleep(0, url))
        target = ServerTarget(url, model="m", api_key=None)
        (record,) = await Drive([Planned(0.0, (1, 2), 5)], target).run()
        with pytest.raises(Failure, match="Connect call failed"):
            await target.connect()
        return record

    assert asyncio.run(main()).error == "connection"


def test_what_is_sent() -> None:
    seen: list[tuple[bytes, dict[str, Any]]] = []

    def answer(head: bytes, body: dict[str, Any]) -> list[bytes]:
        seen.append((head, body))
        return [OK, b"data: " + said("x", "length") + b"\n\n"]

    async def use(url: str) -> None:
        for path, ignore_eos in (("", True), ("/v3/", False), ("/proxy/v1", True)):
            target = ServerTarget(url + path, model="m", api_key="k", ignore_eos=ignore_eos)
            assert [piece async for piece in target.send((5, 6), 9)] == [Piece(1)]

    asyncio.run(with_server(answer, use))
    paths = [head.split()[1] for head, _ in seen]
    assert paths == [b"/v1/completions", b"/v3/completions", b"/proxy/v1/completions"]
    head, body = seen[0]
    assert b"authorization: bearer k\r\n" in head.lower()
    assert body == {
        "model": "m", "prompt": [5, 6], "max_tokens": 9, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    assert "ignore_eos" not in seen[1][1]


def other_tokenizer(takes_ids: bool) -> Callable[[bytes, dict[str, Any]], list[bytes]]:
    """A server with two tokens a word; one that does not take ids refuses them."""

    def answer(head: bytes, body: dict[str, Any]) -> list[bytes]:
        if head.startswith(b"GET /v1/models"):
            listed = json.dumps({"data": [{"id": "theirs"}]}).encode()
            return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(listed), listed]
        assert body["model"] == "theirs"
        prompt = body["prompt"]
        if isinstance(prompt, list) and not takes_ids:
            return [b"HTTP/1.1 400 Bad\r\ncontent-length: 4\r\n\r\ntext"]
        count = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())
        usage = {"prompt_tokens": count, "completion_tokens": 1}
        return [OK, b"data: " + said("x", "length", usage=usage) + b"\n\n"]

    return answer


def connected(takes_ids: bool, prompts: str) -> ServerTarget:
    async def use(url: str) -> ServerTarget:
        target = ServerTarget(url, model=None, api_key=None)
        await target.connect(prompts)
        return target

    found: ServerTarget = asyncio.run(with_server(other_tokenizer(takes_ids), use))
    return found


def test_prompts_are_ids_where_they_are_taken() -> None:
    target = connected(True, "auto")
    assert (target.model, target.prompts) == ("theirs", "token ids")
    assert target.prompt((3, 4)) == (3, 4)


@pytest.mark.parametrize(("takes_ids", "prompts"), [(False, "auto"), (True, "text")])
def test_else_they_are_text_of_about_the_length(takes_ids: bool, prompts: str) -> None:
    target = connected(takes_ids, prompts)
    assert target.prompts == "text, 2.00 tokens a word (measured)"
    prefix = tuple(range(40))
    one, other = target.prompt((*prefix, 1, 2, 3, 4)), target.prompt((*prefix, 5, 6, 7, 8))
    assert isinstance(one, str)
    assert isinstance(other, str)
    assert len(one.split()) == 22
    assert one.split()[:20] == other.split()[:20]
    assert one.split()[20:] != other.split()[20:]


def test_ids_that_were_asked_for_and_are_refused() -> None:
    with pytest.raises(Failure, match="text"):
        connected(False, "ids")


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://"])
def test_a_wrong_url(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url: must be like"):
        ServerTarget(url, model=None, api_key=None)


def test_usage_in_every_event() -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": 1}
    lines = [said("a", usage=usage), said("b", "stop", usage={**usage, "completion_tokens": 2})]

    async def use(url: str) -> list[Piece]:
        target = ServerTarget(url, model="m", api_key=None)
        return [piece async for piece in target.send("text", 5)]

    answer = [OK, *(b"data: " + line + b"\n\n" for line in lines)]
    pieces = asyncio.run(with_server(lambda head, body: answer, use))
    assert pieces == [Piece(1, "a", Usage(2, 1, 0)), Piece(1, "b", Usage(2, 2, 0))]
