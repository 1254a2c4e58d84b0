"""Scorecard 15: a list of hostile inputs, each with a name, over a real socket.

A row is refused with 4xx and OpenAI's error body (which reveals nothing about the server), and the
engine computes no step for it. Rows that are legal (the edge of a range, text that only looks like
a command) have 200. The time of each answer is recorded for `scorecard.py`, which judges it; the
tests do not.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import infer
from infer.engine.client.async_llm import AsyncLLM
from infer.server.http.error_responses import MAX_HEADER_BYTES
from infer.server.http.json_body import MAX_BODY_BYTES
from infer.server.openai.chat import ChatBody
from infer.types.server_limits import ServerLimits
from tests.support.cases import over
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import COMMANDS, ENGINES
from tests.support.frozen_heap import frozen_heap
from tests.support.server_process import Findings, Served, model_server, served
from tests.support.serving import CHAT, COMPLETIONS, chat_body, completion_body, live

CONTEXT = 512
"""Maximum tokens of a request, on both servers here."""
FLOATS = [
    name
    for name, field in ChatBody.model_fields.items()
    if field.annotation in (float, float | None)
]
BIG = 10**6


class Raw(str):
    """JSON text that is sent unchanged, which `json.dumps` would not write."""


@dataclass(frozen=True)
class Row:
    """A hostile input: `request` is sent, then `more` repeatedly until the server answers."""

    name: str
    status: int
    request: bytes
    more: bytes = b""
    num_answers: int = 1
    """Number of answers; the last one has the status, those before it are refusals too."""
    waits: bool = False
    """Whether the server answers only after a deadline."""


def text_of(fields: dict[str, Any]) -> bytes:
    def value(given: Any) -> str:
        return str(given) if isinstance(given, Raw) else json.dumps(given)

    members = (f"{json.dumps(name)}: {value(given)}" for name, given in fields.items())
    return ("{" + ", ".join(members) + "}").encode()


def post(path: str, body: bytes, *lines: str, length: object = None, kind: str = "") -> bytes:
    """A POST as bytes; `length` replaces that of the body, "" = no Content-Length."""
    length = len(body) if length is None else length
    head = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        f"content-type: {kind or 'application/json'}",
    ]
    head += [f"content-length: {length}"] * (length != "")
    return "\r\n".join([*head, *lines, "", ""]).encode() + body


def valid(path: str, **changes: Any) -> bytes:
    fields = completion_body() if path == COMPLETIONS else chat_body()
    del fields["model"]
    return text_of({**fields, **changes})


def both(name: str, status: int, chat: int | None = None, **changes: Any) -> Iterator[Row]:
    """Rows with the fields on both endpoints; `chat`: the status on chat, if it differs."""
    for path, expected in ((COMPLETIONS, status), (CHAT, status if chat is None else chat)):
        yield Row(f"{name} in {path[4:]}", expected, post(path, valid(path, **changes)))


def completion(name: str, status: int, **changes: Any) -> Iterator[Row]:
    yield Row(name, status, post(COMPLETIONS, valid(COMPLETIONS, **changes)))


def chat(name: str, status: int, *messages: Any, **changes: Any) -> Iterator[Row]:
    said = {"messages": list(messages)} if messages else {}
    yield Row(name, status, post(CHAT, valid(CHAT, **said, **changes)))


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def nested(depth: int) -> Raw:
    """Lists in lists, so that the body is `depth` levels deep."""
    return Raw("[" * (depth - 1) + "]" * (depth - 1))


def table(vocab: int) -> list[Row]:
    return [*_numbers(), *_ids(vocab), *_texts(), *_messages(), *_bytes(), *_http(), *_grammars()]


def _numbers() -> Iterator[Row]:
    for name in FLOATS:
        for number in ("NaN", "Infinity", "-Infinity", "1e400"):
            yield from both(f"{name} {number}", 400, None, **{name: Raw(number)})
    for number in ("NaN", "Infinity", "1e400"):
        yield from both(f"logit_bias value {number}", 400, logit_bias=Raw(f'{{"1": {number}}}'))
    yield from both("temperature 0", 200, temperature=0)
    yield from both("temperature 1e-5", 200, temperature=1e-5)  # clients' words for greedy
    for value in (1e308, -1):
        yield from both(f"temperature {value}", 422, temperature=value)
    for value in (0, -0.0):
        yield from both(f"top_p {value}", 200, top_p=value)
    yield from both("top_p 1.0000001", 422, top_p=1.0000001)
    for value in (-2, 2**63):
        yield from both(f"top_k {value}", 422, top_k=value)
    yield from both("max_tokens -1", 200, max_tokens=-1)  # no limit
    for value in (-3, 0, 2**31, 2**63):
        yield from both(f"max_tokens {value}", 422, max_tokens=value)
    for wrong in (Raw("1e30"), "5", True):
        yield from both(f"max_tokens {wrong!r}", 400, max_tokens=wrong)
    yield from both("min_tokens > max_tokens", 422, min_tokens=9, max_tokens=8)
    much = {"min_tokens": CONTEXT, "max_tokens": None}
    yield from chat("min_tokens > what fits, max_tokens null", 422, **much)
    yield from completion("min_tokens > 16, max_tokens null", 422, min_tokens=17, max_tokens=None)
    for value in (0, 129, 10**9):
        yield from both(f"n {value}", 422, n=value)
    for value in (-1, 21, BIG):
        yield from completion(f"logprobs {value}", 422, logprobs=value)
        yield from chat(f"top_logprobs {value}", 422, logprobs=True, top_logprobs=value)
    yield from chat("top_logprobs without logprobs", 400, top_logprobs=2)
    yield from both("seed 2**64", 422, seed=2**64)


def _ids(vocab: int) -> Iterator[Row]:
    for token in (-1, vocab, vocab + 1, 2**63):
        yield from both(f"logit_bias id {token}", 422, logit_bias={str(token): 1})
        yield from completion(f"prompt of token {token}", 422, prompt=[1, token])
        yield from completion(f"prompts of token {token}", 422, prompt=[[1], [token]])
        yield from both(f"stop_token_ids {token}", 422, stop_token_ids=[token])
    many = Raw("{" + ", ".join(f'"{i}": 1' for i in range(10**5)) + "}")
    yield from both("logit_bias of 10**5 entries", 422, logit_bias=many)
    many = Raw("{" + ",".join(map('"{}":1'.format, range(BIG))) + "}")
    yield from both("logit_bias of 10**6 entries", 413, logit_bias=many)
    empty: tuple[Any, ...] = ("", [], [[]])
    for prompt in empty:
        yield from completion(f"prompt {prompt!r}", 400, prompt=prompt)
    for other in (True, 1.5, "a"):
        yield from completion(f"prompt with token {other!r}", 400, prompt=[1, other])
    one_less = [1] * (CONTEXT - 1)
    yield from completion("prompt of context - 1 tokens", 200, prompt=one_less, max_tokens=1)
    for more, words in ((1, "context"), (2, "context + 1")):
        yield from completion(
            f"prompt of {words} tokens", 400, prompt=[*one_less, *[1] * more], max_tokens=1
        )
    yield from completion("prompt of 10**6 tokens, 3 MB", 413, prompt=[1] * BIG)
    close = Raw("[" + "1," * BIG + "1]")
    yield from completion("prompt of 10**6 tokens, 2 MB", 400, prompt=close)
    yield from completion(
        "prompt of 10**6 tokens, the last of 30 digits",
        400,
        prompt=Raw(close[:-2] + "1" * 30 + "]"),
    )
    yield from completion("prompt of 10**6 characters", 400, prompt="x" * BIG)
    yield from completion("prompt of 10**6 words", 400, prompt="a " * (BIG - 100))


def _texts() -> Iterator[Row]:
    yield from both("stop []", 200, stop=[])
    yield from both("stop ''", 200, stop="")
    yield from both("stop of 5 strings", 200, stop=list("abcde"))  # lm-eval sends so many
    yield from both("stop of 17 strings", 422, stop=["x"] * 17)
    yield from both("stop of 10**6 characters", 422, stop="x" * BIG)
    yield from both("stop over tokens and emoji", 200, stop="the \U0001f600\U0001f98a end")
    yield from both("stop that begins another", 200, stop=["a", "ab", "abc"])
    yield from both("stop that is a token", 200, stop=" the")
    yield from both("an unknown field", 200, temprature=1)
    yield from both("metadata twice in it", 400, metadata=Raw('{"a": "b", "a": "c"}'))
    for path in (COMPLETIONS, CHAT):
        twice = valid(path)[:-1] + b', "seed": 2}'
        yield Row(f"a field twice in {path[4:]}", 400, post(path, twice))
    for depth in (10, 64, 10**3, 10**5):
        for name in ("metadata", "response_format"):
            yield from both(f"{name} of depth {depth}", 400, None, **{name: nested(depth)})
        yield from chat(f"tools of depth {depth}", 400, tools=nested(depth))
        schema = Raw('{"type": "json_schema", "json_schema": {"name": "x", "schema": %s}}')
        inner = '{"properties": {"a": ' * (depth // 2) + '{"type": "null"}' + "}}" * (depth // 2)
        yield from both(
            f"response_format, a schema of depth {depth}",
            200 if depth == 10 else 400,
            response_format=Raw(schema % inner),
        )
    yield from both("NUL in stop", 200, stop="a\x00b")
    yield from both("NUL in user", 200, user="\x00")
    yield from both("NUL in the model's name", 404, model="\x00")
    yield from both("NUL in a field's name", 200, **{"see\x00d": 1})
    yield from completion("NUL in the prompt", 200, prompt="a\x00b")
    yield from chat("NUL in a message", 200, user("a\x00b"))
    for text in ("<|endoftext|>", "<|im_start|>system", "</s>", "<eos>"):
        yield from completion(f"{text} typed", 200, prompt=f"a {text} b")
        yield from chat(f"{text} typed in a message", 200, user(f"a {text} b"))
    half = Raw('"\\ud800"')
    yield from completion("half a surrogate pair in prompt", 400, prompt=half)
    for name in ("stop", "user", "model"):
        yield from both(f"half a surrogate pair in {name}", 400, None, **{name: half})


def _messages() -> Iterator[Row]:
    yield from chat("messages []", 400, messages=[])
    yield from chat("messages of 10**4 entries", 422, *[user("x")] * 10**4)
    yield from chat("messages of 10**5 entries", 413, *[user("x")] * 10**5)
    yield from chat("a role unknown", 422, {"role": "root", "content": "x"})
    yield from chat("content null", 400, user(None))
    yield from chat("parts in parts", 400, user([{"type": "text", "text": [{"type": "text"}]}]))
    yield from chat("a list in the parts", 400, user([[{"type": "text", "text": "x"}]]))
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}
    yield from chat("a part to be fetched", 400, user([part]))
    for name, message in {
        "role": Raw('[{"role": "\\ud800", "content": "x"}]'),
        "content": Raw('[{"role": "user", "content": "\\ud800"}]'),
        "tool arguments": Raw(
            '[{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",'
            ' "function": {"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}}]}]'
        ),
    }.items():
        yield from chat(f"half a surrogate pair in {name}", 400, messages=message)
    half = Raw(
        '[{"role": "assistant", "tool_calls": [{"id": "a", "type": "function",'
        ' "function": {"name": "f", "arguments": "{\\"a\\": \\"\\\\ud800\\"}"}}]}]'
    )
    yield from chat("half a surrogate pair in tool arguments, escaped twice", 200, messages=half)


def _bytes() -> Iterator[Row]:
    for path in (COMPLETIONS, CHAT):
        where, good = f"in {path[4:]}", valid(path)
        for name, size, status in (
            ("1 byte under the limit", MAX_BODY_BYTES - 1, 200),
            ("at the limit", MAX_BODY_BYTES, 200),
            ("1 byte over", MAX_BODY_BYTES + 1, 413),
            ("of 10 MB", 10**7, 413),
        ):
            yield Row(f"a body {name} {where}", status, post(path, good.ljust(size)))
        yield Row(
            f"a body of 1 GB, chunked, {where}",
            *(413, post(path, b"", "transfer-encoding: chunked", length="")),
            more=b"10000\r\n" + b" " * 65536 + b"\r\n",
        )
        bomb = 100 * gzip.compress(b" " * 10**6)  # members one after the other are one file
        for coding in ("gzip", "deflate", "br", "identity, gzip"):
            row = post(path, bomb, f"content-encoding: {coding}")
            yield Row(f"a {coding} bomb {where}", 415, row)
        for name, body in (
            ("invalid UTF-8", good.replace(b"Hello", b"\xff\xfe")),
            ("overlong UTF-8", good.replace(b"Hello", b"\xc0\xaf")),
            ("a surrogate as UTF-8", good.replace(b"Hello", b"\xed\xa0\x80")),
            ("a byte-order mark", b"\xef\xbb\xbf" + good),
            ("UTF-16", good.decode().encode("utf-16")),
            ("UTF-16 without a mark", good.decode().encode("utf-16-le")),
            ("a NUL byte in a string", good.replace(b"Hello", b"a\x00b")),
            ("a NUL byte behind", good + b"\x00"),
            ("only NUL bytes", b"\x00" * 100),
            ("10**5 levels", b"[" * 10**5),
            ("nothing", b""),
        ):
            yield Row(f"{name} {where}", 400, post(path, body))
        charset = post(path, good, kind="application/json; charset=utf-16")
        yield Row(f"charset=utf-16 {where}", 415, charset)


def _http() -> Iterator[Row]:
    path = COMPLETIONS
    wrong = valid(path, n=0)

    def padded(size: int) -> bytes:
        room = size - len(post(path, wrong, "x-pad: ")) + len(wrong)
        return post(path, wrong, "x-pad: " + "x" * room)

    for name, size, status in (
        ("1 byte under the limit", MAX_HEADER_BYTES - 1, 422),
        ("at the limit", MAX_HEADER_BYTES, 422),
        ("1 byte over", MAX_HEADER_BYTES + 1, 431),
        ("of twice the limit", 2 * MAX_HEADER_BYTES, 431),
    ):
        yield Row(f"headers {name}", status, padded(size))
    yield Row("10**4 headers", 431, post(path, wrong, *[f"x-{i}: 1" for i in range(10**4)]))
    yield Row("a path of 20,000 characters", 431, f"GET /{'x' * 20_000} HTTP/1.1\r\n".encode())
    yield Row("20,000 blanks", 400, b" " * 20_000)
    cut = post(path, wrong, length=len(wrong) - 3)
    yield Row("Content-Length too small", 400, cut, num_answers=2)
    yield Row("Content-Length too large", 408, post(path, wrong, length=999), waits=True)
    for length in ("-1", "1e3", "0x10", "+5", "5, 6", "ten", "9" * 30):
        yield Row(f"Content-Length {length}", 400, post(path, wrong, length=length))
    twice = post(path, wrong, f"content-length: {len(wrong) + 1}")
    yield Row("two Content-Lengths", 400, twice)
    chunked = f"{len(wrong):x}\r\n".encode() + wrong + b"\r\n0\r\n\r\n"
    for number in (len(wrong), len(chunked), 5):
        both_ways = post(path, chunked, "transfer-encoding: chunked", length=number)
        yield Row(f"Transfer-Encoding and Content-Length {number}", 400, both_ways)
    for coding in ("gzip", "gzip, chunked", "xchunked", "chunked, identity"):
        row = post(path, chunked, f"transfer-encoding: {coding}", length="")
        yield Row(f"Transfer-Encoding {coding}", 400, row)
    unsized = b"zz\r\n" + wrong
    yield Row(
        "a chunk without a size", 400, post(path, unsized, "transfer-encoding: chunked", length="")
    )
    yield Row("three requests at once", 422, post(path, wrong) * 3, num_answers=3)
    yield Row(
        "a request behind one that is refused",
        *(400, post(path, b" " * 10, kind="text/plain") + b"\x00\x01\x02 / HTTP/1.1\r\n\r\n"),
        num_answers=2,
    )
    for name, line in (
        ("no HTTP at all", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"),
        ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("a line that is folded", b"GET / HTTP/1.1\r\n x: y\r\n\r\n"),
        ("a NUL byte in a header", b"GET / HTTP/1.1\r\nhost: localhost\r\nx: a\x00b\r\n\r\n"),
        ("a space before the colon", b"GET / HTTP/1.1\r\nhost : x\r\n\r\n"),
        ("no Host", b"GET / HTTP/1.1\r\n\r\n"),
        ("two Hosts", b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: y\r\n\r\n"),
    ):
        yield Row(name, 404 if name == "HTTP/2" else 400, line)


def _grammars() -> Iterator[Row]:
    # 200: a legal grammar costs only the states that an answer of 8 tokens reaches.
    for name, regex, status in (
        ("that backtracks elsewhere", "(a+)+$", 200),
        ("unclosed", "(((((", 400),
        ("nested counts", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}", 200),
        ("a count of 10**9", "a{1000000000}", 200),
        ("10**4 groups", "(" * 10**4 + "a" + ")" * 10**4, 400),
        ("that looks back", r"(?<=a)b\1", 400),
        ("of 10**5 alternatives", "|".join(f"a{i}" for i in range(10**5)), 400),
        ("that knows 20 letters back", "[ab]*a[ab]{20}", 200),
    ):
        yield from both(f"regex {name}", status, guided_regex=regex)
    for name, grammar, status in (
        ("that begins with itself only", "start: start", 400),
        ("that never ends", 'start: "a" start', 200),
        ("that doubles 40 times", "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(40)), 400),
        ("of 10**5 rules", "start: r0\n" + "".join(f'r{i}: "a"\n' for i in range(10**5)), 400),
        ("with a regex that blows up", "start: /((a{1,1000}){1,1000}){1,1000}/", 200),
    ):
        yield from both(f"grammar {name}", status, guided_grammar=grammar)
    for name, schema, status in (
        ("that is itself", {"$ref": "#"}, 200),
        ("to be fetched", {"$ref": "http://127.0.0.1/schema"}, 200),
        ("from a file", {"$ref": "file:///etc/passwd"}, 200),
        ("of a wrong type", {"type": "nope"}, 200),
        (
            "with a hostile pattern",
            {"type": "string", "pattern": "((a{1,999}){1,999}){1,999}"},
            200,
        ),
        ("of 10**9 items", {"type": "array", "minItems": 10**9, "items": {"type": "null"}}, 200),
        ("nobody can satisfy", {"allOf": [{"type": "string"}, {"type": "null"}]}, 400),
        ("of 64 KiB", {"const": "x" * 65536}, 400),
    ):
        yield from both(f"schema {name}", status, guided_json=schema)


# ---- sending them

LEAK = re.compile(
    r"Traceback|0x[0-9a-f]{5}|/infer/|/work|/opt|/usr|/tmp|\.py\b|object at|pydantic|h11"
)


async def ask(port: int, row: Row) -> float:
    """Send a row and check its answers; returns the seconds from the first byte to the last."""
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def answers() -> Iterator[tuple[int, dict[str, str], bytes]]:
        found = []
        for _ in range(row.num_answers):
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines[1:] if line)
            body = await reader.readexactly(int(headers["content-length"]))
            found.append((int(lines[0].split()[1]), headers, body))
        return iter(found)

    reading = asyncio.ensure_future(answers())
    try:
        async with asyncio.timeout(20):
            try:
                writer.write(row.request)
                for _ in range(2**30 // len(row.more) if row.more else 0):
                    if reading.done():
                        break
                    writer.write(row.more)
                    await writer.drain()
            except OSError:
                pass  # the server has answered and closed the connection
            found = await reading
            took_s = time.perf_counter() - began_s
    finally:
        reading.cancel()
        writer.transport.abort()
        await asyncio.sleep(0)  # so that the socket is closed
    for status, headers, body in found:
        if status != 200:
            check_error(status, headers, body)
    assert status == row.status, (row.name, status, body[:300])
    return took_s


def check_error(status: int, headers: dict[str, str], body: bytes) -> None:
    assert 400 <= status < 500, body
    assert headers["content-type"] == "application/json"
    assert json.loads(body).keys() == {"error"}
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] is None or isinstance(error["code"], str)
    assert not LEAK.search(body.decode("ascii")), body


@pytest.fixture(scope="module", params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> Callable[..., AsyncLLM]:
    maker: Callable[..., AsyncLLM] = request.param
    return maker


@pytest.fixture(scope="module")
def server(make_engine: Callable[..., AsyncLLM]) -> Iterator[tuple[AsyncLLM, int]]:
    engine = make_engine(max_seq_len=CONTEXT)
    with live(engine) as url:
        yield engine, int(url.rpartition(":")[2])


@pytest.fixture(scope="module")
def impatient_server(make_engine: Callable[..., AsyncLLM]) -> Iterator[tuple[AsyncLLM, int]]:
    """Waits for a body for a moment only."""
    engine = make_engine(max_seq_len=CONTEXT)
    with live(engine, limits=ServerLimits(body_timeout_s=0.05)) as url:
        yield engine, int(url.rpartition(":")[2])


@over("row", partial(table, VOCAB_SIZE))
def test_a_hostile_input(
    row: Row, server: tuple[AsyncLLM, int], impatient_server: tuple[AsyncLLM, int]
) -> None:
    engine, port = impatient_server if row.waits else server
    before = engine.stats()["num_steps"]
    asyncio.run(ask(port, row))
    if row.status != 200:
        assert engine.stats()["num_steps"] == before


async def time_all(server: Served, vocab: int) -> dict[str, float]:
    """The longest of three times of each row, in milliseconds."""
    longest_ms: dict[str, float] = {}
    before = (await server.stats())["num_steps"]
    for row in table(vocab):
        if row.status != 200 and not row.waits:
            times_ms = [1000 * await ask(server.port, row) for _ in range(3)]
            longest_ms[row.name] = max(times_ms)
    assert (await server.stats())["num_steps"] == before
    return longest_ms


@pytest.mark.slow
@COMMANDS
def test_the_time_of_each_answer(tmp_path: Path, options: list[str]) -> None:
    """On the shipped model; `scorecard.py` judges the times."""
    with served(model_server(*options), tmp_path / "log") as server:
        config = json.loads(
            (Path(infer.__file__).parent / "demo_model/config.json").read_text(encoding="utf-8")
        )
        server.settle()
        with frozen_heap():
            longest_ms = asyncio.run(time_all(server, config["vocab_size"]))
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
    order = sorted(longest_ms, key=longest_ms.__getitem__, reverse=True)
    Findings().note(
        15,
        "hostile inputs",
        " ".join(["each row of the list, three times, over a socket; shipped model", *options]),
        rows=len(order),
        slowest={name: round(longest_ms[name], 1) for name in order[:10]},
        at_most={"longest answer [ms]": (round(longest_ms[order[0]], 1), 100)},
    )
