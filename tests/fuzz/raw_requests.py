"""Bytes that are nearly HTTP: requests with broken framing, in pieces of any size: `calls()`."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import MODEL, RawRequest

BODY = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2}).encode()
STREAM = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 2, "stream": True}).encode()
LINES = [
    b"GET /health HTTP/1.1", b"POST /v1/completions HTTP/1.1", b"POST /v1/completions HTTP/1.0",
    b"POST /v1/completions HTTP/9.9", b"GET /", b"GET http://x/health HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"CONNECT x:1 HTTP/1.1", b"PRI * HTTP/2.0", b"\x16\x03\x01\x02\x00",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1", b"GET /\xff HTTP/1.1", b" GET / HTTP/1.1",
]  # fmt: skip
HEADERS = [
    b"Host: localhost", b"Host: evil.example", b"Host: a\r\nHost: b", b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: websocket", b"Connection: keep-alive",
    b"Expect: 100-continue",
    b"Content-Type: application/json", b"Content-Type: text/plain", b"Content-Length: 0",
    b"Content-Length: 5, 5", b"Content-Length: +5", b"Content-Length: -1", b"Content-Length: 0x10",
    b"Content-Length: 99999999999999999999999999", b"Content-Length: 3000000",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding : chunked", b"Content-Encoding: gzip", b"X: " + b"y" * 70_000,
    b"\r\n".join(b"h%d: v" % i for i in range(200)), b"no colon", b" folded", b"a\x00b: c",
    b"\xff: \xff",
]  # fmt: skip


def chunked(body: bytes, sizes: list[int], end: bytes) -> bytes:
    """A body in chunks of these sizes, over and over."""
    out, at = b"", 0
    while at < len(body):
        size = sizes[len(out) % len(sizes)]
        part = body[at : at + size]
        out += b"%x\r\n%s\r\n" % (len(part), part)
        at += size
    return out + end


def calls() -> SearchStrategy[RawRequest]:
    """One to three requests on a connection, cut into pieces, some with bytes changed."""
    bodies = st.sampled_from([b"", BODY, BODY, STREAM, b"{", b"x" * 70_000])
    ends = st.sampled_from(
        [b"0\r\n\r\n", b"0\r\nA: b\r\n\r\n", b"", b"-1\r\n", b"f" * 40 + b"\r\n"]
    )
    lengthy = bodies.map(lambda it: (b"Content-Length: %d" % len(it), it))
    in_chunks = st.builds(
        lambda body, sizes, end: (b"Transfer-Encoding: chunked", chunked(body, sizes, end)),
        bodies, st.lists(st.integers(1, 60), min_size=1, max_size=3), ends,
    )  # fmt: skip

    def request(line: bytes, headers: list[bytes], framed: tuple[bytes, bytes]) -> bytes:
        return b"\r\n".join([line, *headers, framed[0], b"", framed[1]])

    right = [b"Host: localhost", b"Content-Type: application/json"]
    headers = st.one_of(
        st.just(right),
        st.lists(st.sampled_from(HEADERS), max_size=3).map(lambda more: [*right, *more]),
        st.lists(st.sampled_from(HEADERS), max_size=5),
    )
    one = st.builds(request, st.sampled_from(LINES), headers, st.one_of(lengthy, in_chunks))
    whole = st.one_of(st.lists(one, min_size=1, max_size=3).map(b"".join), st.binary(max_size=80))

    def changed(content: bytes, at: int, new: bytes, cuts: list[int]) -> RawRequest:
        if at >= 0:
            at %= len(content) + 1
            content = content[:at] + new + content[at + 1 :]
        places = sorted({0, len(content), *(cut % (len(content) + 1) for cut in cuts)})
        pairs = pairwise(places)
        return RawRequest(tuple(content[a:b] for a, b in pairs))

    few = st.lists(st.integers(0, 80_000), max_size=4)
    return st.builds(changed, whole, st.integers(-300, 300), st.binary(max_size=3), few)
