"""Too many or too slow connections, and a server that ends under load."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.types.server_limits import ServerLimits
from tests.support.doubles import launch_hash_llm, make_hash_llm
from tests.support.raw_http import connect, read_all
from tests.support.serving import COMPLETIONS, completion_body, is_idle, live
from tests.support.waits import until

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}


def post(sock: socket.socket, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)


def check(reply: bytes, status: int, code: str) -> None:
    head, _, body = reply.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(body)["error"]["code"] == code
    assert f"content-length: {len(body)}".encode() in head
    assert (b"retry-after: " in head) == (status == 503)


def test_too_many_connections() -> None:
    """Connections that are in use stay; new ones get 503, except health probes."""
    limits = ServerLimits(probe_connections=2)
    few = live(make_hash_llm(), limits=limits, max_connections=4)
    with few as url, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(url)) for _ in range(4)]
        for sock in held:
            sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n".encode())
            sock.sendall(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        time.sleep(0.2)
        with connect(url) as another:
            post(another, completion_body())
            check(read_all(another), 503, "overloaded")
        assert urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
        with connect(url) as first, connect(url) as second, connect(url) as third:
            # Two connections that have sent nothing may stay, so a third one may not.
            check(read_all(third), 503, "overloaded")
            for probe in (first, second):
                probe.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                reply = read_all(probe)
                assert reply.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in reply.lower()
        held[0].close()
        until(lambda: urllib.request.urlopen(f"{url}/v1/models", timeout=5).status == 200)


@pytest.mark.parametrize(
    "opening", [b"", b"POST /v1", b"GET / HTTP/1.1\r\nhost: localhost\r\nx-a: "]
)
def test_headers_that_do_not_come(opening: bytes) -> None:
    limits = ServerLimits(header_timeout_s=0.3)
    with live(make_hash_llm(), limits=limits) as url, connect(url) as sock, dripping(sock, opening):
        check(read_all(sock), 408, "request_timeout")


@contextlib.contextmanager
def dripping(sock: socket.socket, opening: bytes) -> Iterator[None]:
    """A byte comes now and then, without end; none at all if `opening` is empty."""
    ended = threading.Event()

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in itertools.chain(opening, itertools.repeat(ord("x"))):
                if not opening or ended.wait(0.05):
                    return
                sock.sendall(bytes([byte]))

    sending = threading.Thread(target=send)
    sending.start()
    try:
        yield
    finally:
        ended.set()
        sending.join()


def test_slow_headers_of_a_second_request() -> None:
    limits = ServerLimits(header_timeout_s=0.3)
    with live(make_hash_llm(step_s=0.05), limits=limits) as url, connect(url) as sock:
        for _ in range(2):  # neither a long answer nor a pause between requests counts as slow
            post(sock, completion_body(max_tokens=10))
            received = b""
            while not received.endswith(b"}}"):
                received += sock.recv(65536)
            time.sleep(0.4)
        sock.sendall(b"GET /health HT")
        check(read_all(sock), 408, "request_timeout")


@pytest.mark.parametrize("answer", [b"HTTP/1.1 408 ", b"HTTP/1.1 413 "])
def test_a_body_that_nobody_wants_any_more(answer: bytes) -> None:
    limits = ServerLimits(body_timeout_s=0.2 if b"408" in answer else 9, linger_s=0.3)
    length = 100 if b"408" in answer else 10**9
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with live(make_hash_llm(), limits=limits) as url, connect(url) as sock:
        sock.sendall(f"{head}content-length: {length}\r\n\r\n{{".encode())
        with dripping(sock, b"x"), contextlib.suppress(ConnectionResetError):
            assert sock.recv(13) == answer
            read_all(sock)  # ends, though more and more comes


def test_a_reader_of_nothing_is_cut() -> None:
    """Its connection is closed too, which unread data would otherwise keep open."""
    limits = ServerLimits(send_buffer_bytes=4096)
    engine = make_hash_llm(num_pages=4000)
    with live(engine, write_stall_s=0.3, limits=limits) as url, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        post(sock, completion_body(**{**LONG, "logprobs": 20, "n": 4}))
        until(lambda: is_closed(sock), 4)
        assert is_idle(engine)


def is_closed(sock: socket.socket) -> bool:
    """Whether the connection was closed. Data before the end is unread, so reading cannot tell."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1  # ESTABLISHED


def test_readers_of_nothing_do_not_hold_up_the_others() -> None:
    """Their sockets are full; their requests run to the end, and then hold nothing."""
    engine = make_hash_llm(max_batch_size=16, num_pages=4000)
    with live(engine) as url, contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = socket.socket()
            stack.enter_context(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = url.removeprefix("http://").split(":")
            sock.connect((host, int(port)))
            post(sock, completion_body(**{**LONG, "logprobs": 20}))
        with connect(url) as sock:
            post(sock, completion_body(**{**LONG, "max_tokens": 50}))
            received = b""
            while b"[DONE]" not in received:
                received += sock.recv(65536)
    assert is_idle(engine)


SCRIPT = (
    "import sys; from tests.support.doubles import launch_hash_llm;"
    "from infer.server import address, serve;"
    "settings = serve.ServerSettings(drain_timeout_s=float(sys.argv[1]));"
    "serve.run(launch_hash_llm(step_s=0.01), address.bind(port=0), settings)"
)


@pytest.mark.parametrize(
    ("drain_s", "num_signals", "num_tokens", "last"),
    [
        ("600", 1, 100, b"data: [DONE]"),
        pytest.param("0.5", 1, 400, b"shutting down", marks=pytest.mark.slow),
        ("600", 2, 400, b"shutting down"),
    ],
)
def test_the_end_with_an_engine_process(
    drain_s: str, num_signals: int, num_tokens: int, last: bytes
) -> None:
    """Running requests finish or get an error, new ones get an error, the engine ends, and the exit
    code is 0."""
    arguments = [sys.executable, "-c", SCRIPT, drain_s]
    with subprocess.Popen(
        arguments, env=ENV, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            assert process.stdout is not None
            url = re.findall(r"http://\S+", process.stdout.readline())[0]
            with contextlib.ExitStack() as stack:
                streams = [stack.enter_context(connect(url)) for _ in range(5)]
                for sock in streams:
                    post(sock, completion_body(**{**LONG, "max_tokens": num_tokens}))
                    assert sock.recv(12) == b"HTTP/1.1 200"
                process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
                if num_signals == 2:
                    process.send_signal(signal.SIGTERM)
                else:
                    with connect(url) as late:
                        post(late, completion_body())
                        assert b"HTTP/1.1 503 " in late.recv(65536)
                    with connect(url) as probe:
                        probe.sendall(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
                        assert b"HTTP/1.1 503 " in probe.recv(65536)
                for sock in streams:
                    assert last in read_all(sock)
            assert process.wait(60) == 0
        finally:
            process.kill()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert "infer.replicas.child\0" not in command.read_text(encoding="utf-8") or not is_of(
                command.parent, process.pid
            )


def is_of(folder: Path, parent: int) -> bool:
    """Whether `parent` started a process; an engine has the parent's id in its command line."""
    return (folder / "cmdline").read_text(encoding="utf-8").rstrip("\0").endswith(f"\0{parent}")


def test_a_drained_engine_refuses() -> None:
    engine = launch_hash_llm()
    with live(engine) as url:
        engine.drain()
        with connect(url) as sock:
            post(sock, completion_body())
            reply = sock.recv(65536)
        assert b"HTTP/1.1 503 " in reply
        assert b"retry-after: " in reply
        assert urllib.request.urlopen(f"{url}/health/live", timeout=5).status == 200
