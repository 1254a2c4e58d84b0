"""The address from the start of the process until the server has it: answers, and the hand-over"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.config import EngineConfig
from infer.errors import ConfigError
from infer.server.address import bind, url_of
from infer.server.early_listener import EarlyListener, listening
from infer.server.http.http_errors import MAX_HEADER_BYTES, HttpError
from infer.server.http.request_head import end_of_head, read_head
from infer.server.serve import Server
from infer.server.served_models import names_of
from infer.server.settings import ServerSettings
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import connect, reach, read_answer
from tests.support.server_process import children_of
from tests.support.transports import TRANSPORTS, Transport, settings_of
from tests.support.waits import until

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
LIVE = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
READY = LIVE.replace(b"live", b"ready")


@contextlib.contextmanager
def loading(**how: Any) -> Iterator[tuple[EarlyListener, str]]:
    """A server that loads, and its URL."""
    settings = ServerSettings(**how)
    with listening(settings, "127.0.0.1", 0, ["a-model", "another"]) as early:
        yield early, url_of(early.sock, is_tls=settings.ssl_certfile is not None)


@contextlib.contextmanager
def taken_over(early: EarlyListener, settings: ServerSettings) -> Iterator[None]:
    """The server at the address where `early` has answered."""
    said = threading.Event()
    server = Server(
        make_hash_llm(), early.sock, settings, announce=lambda _: said.set(), early=early
    )
    thread = threading.Thread(target=server.serve_until_stopped)
    thread.start()
    try:
        assert said.wait(30)
        yield
    finally:
        server.should_exit = True
        thread.join(30)


def asked(url: str, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and body of the last answer of a connection."""
    with connect(url) as sock:
        sock.sendall(request)
        received = b""
        while not received.endswith(b"}") and (piece := sock.recv(65536)):
            received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    assert int(headers["content-length"]) == len(body) or request.startswith(b"HEAD")
    assert headers["connection"] == "close"
    return int(first.split()[1]), headers, json.loads(body or b"null")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_answered_while_a_model_loads(transport: Transport, tmp_path: Path) -> None:
    with loading(**settings_of(transport, tmp_path)) as (early, url):
        assert asked(url, LIVE)[::2] == (200, {"status": "ok"})
        for path in (b"/health/ready", b"/health", b"//health/ready/?a=b"):
            status, headers, body = asked(url, READY.replace(b"/health/ready", path))
            assert (status, headers["retry-after"]) == (503, "5")
            assert body["error"]["message"] == "the server is starting: it loads a-model, another"
            assert body["error"]["code"] == "engine_unavailable"
            assert body["status"] == "loading"
            assert body["models"] == {"a-model": "loading", "another": "loading"}
        early.answers.note("a-model", "loaded")
        assert asked(url, READY)[2]["models"] == {"a-model": "loaded", "another": "loading"}
        status, headers, body = asked(url, b"HEAD /health/ready HTTP/1.0\r\n\r\n")
        assert (status, body) == (503, None)
        named = b"x-request-id: mine-1\r\nhost: localhost\r\ncontent-length: 300000\r\n\r\n"
        request = b"POST /v1/completions HTTP/1.1\r\n" + named + b"x" * 300_000
        status, headers, body = asked(url, request)
        assert (status, headers["x-request-id"]) == (503, "mine-1")
        assert headers["request-id"] == "mine-1"
        assert set(body) == {"error"}
        assert body["error"]["message"] == "the server is starting: it loads another"
        for path in (b"/v1/messages", b"//v1/messages/?beta=true", b"/v1/messages/count_tokens"):
            request = b"POST " + path + b" HTTP/1.1\r\n" + named + b"x" * 300_000
            status, headers, body = asked(url, request)
            assert (status, headers["retry-after"]) == (503, "5")
            assert set(body) == {"type", "error", "request_id"}
            assert (body["type"], body["request_id"]) == ("error", "mine-1")
            message = "the server is starting: it loads another"
            assert body["error"] == {"type": "api_error", "message": message}


def test_pages_of_others_learn_nothing_while_a_model_loads() -> None:
    """The rules for Host and Origin are those of the server."""
    foreign = READY.replace(b"localhost", b"models.example")
    page = READY.replace(b"\r\n\r\n", b"\r\norigin: http://models.example\r\n\r\n")
    with loading() as (_, url):
        for request, code in ((foreign, "host_not_allowed"), (page, "origin_not_allowed")):
            status, _, body = asked(url, request)
            assert (status, body["error"]["code"]) == (403, code)
            assert "a-model" not in str(body)
    with loading(allowed_hosts="models.example") as (_, url):
        assert asked(url, foreign)[0] == 503


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_server_takes_the_address_and_its_connections_over(
    transport: Transport, tmp_path: Path
) -> None:
    """A connection that is silent when the server comes gets the server's answer; one that has
    begun a request is answered; and one that comes then is never refused."""
    how = settings_of(transport, tmp_path)
    statuses: list[int] = []
    is_over = threading.Event()

    def keep_asking() -> None:
        while not is_over.is_set():
            with connect(url) as sock:
                sock.sendall(READY)
                statuses.append(read_answer(sock)[0])

    with loading(**how) as (early, url):
        asking = threading.Thread(target=keep_asking)
        asking.start()
        with connect(url) as begun, reach(url) as silent:
            begun.sendall(READY[:20])
            before = len(statuses)
            until(lambda: len(statuses) > before + 3)  # so both have been accepted
            assert not {200} & set(statuses)
            with taken_over(early, ServerSettings(**how)):
                until(lambda: 200 in statuses)
                begun.sendall(READY[20:])
                assert read_answer(begun)[0] == 503
                if transport != "tls":
                    for _ in range(2):  # the connection is kept
                        silent.sendall(READY)
                        assert read_answer(silent) == (200, b'{"status":"ready"}')
                is_over.set()
                asking.join(30)
    assert not asking.is_alive()
    assert set(statuses) == {503, 200}
    assert statuses == sorted(statuses, reverse=True)
    assert not any(thread.name == "infer-early" for thread in threading.enumerate())


def test_a_silent_tls_connection_is_handed_over(tmp_path: Path) -> None:
    """Its handshake has not begun, so the server can do it."""
    how = settings_of("tls", tmp_path)
    with loading(**how) as (early, url), reach(url) as silent:
        asked(url, READY)
        with taken_over(early, ServerSettings(**how)), connect_over(silent) as sock:
            sock.sendall(READY)
            assert read_answer(sock)[0] == 200


def connect_over(sock: socket.socket) -> socket.socket:
    """TLS over a connection."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(sock)


def test_the_port_is_held_from_the_start() -> None:
    """Nobody else can take it while the model loads; a second server is told at once."""
    with loading() as (early, _):
        port = early.sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port: {port} is in use"):
            bind(port=port)
    with bind(port=port) as other:
        other.listen()
        with (
            pytest.raises(ConfigError, match=rf"port: {port} is in use"),
            listening(ServerSettings(), "127.0.0.1", port, []),
        ):
            pass


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"\x00",
        b"\r\n\r\n\x7f\xff\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost x\r\n\r\n",
        b"GET / HTTP/1.1\r\nho st: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
        b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_no_http(data: bytes) -> None:
    with pytest.raises(HttpError, match="not valid HTTP"):
        read_head(data[: end_of_head(data)])


def test_heads_are_found_however_they_arrive() -> None:
    whole = b"\r\n\nGET /a%20b//c/?x=1 HTTP/1.1\nHost:  x \r\nx-request-id: a\r\nX: y\r\n\r\nbody"
    received = bytearray()
    ends = []
    for byte in whole:
        num_seen = len(received)
        received.append(byte)
        ends.append(end_of_head(received, num_seen))
    assert ends.index(len(whole) - 4) == len(whole) - 5
    head = read_head(whole[: len(whole) - 4])
    assert (head.method, head.path, head.client_id) == ("GET", "/a b/c", "a")
    assert head.headers["host"] == "x"
    assert not head.has_body
    long = b"GET / HTTP/1.1\r\nhost: x\r\na:" + b" " * MAX_HEADER_BYTES + b"\r\n\r\n"
    assert read_head(long).headers["a"] == ""


def test_names_while_models_load() -> None:
    shown = {
        None: "infer-demo",
        "owner/name": "owner/name",
        "owner/name:Q4_K_M": "owner/name:Q4_K_M",
        "package:some": "package:some",
        "/home/me/secret/model": "model",
        "./model.gguf": "model.gguf",
        "~/a/b": "b",
        "/": "the model",
    }
    for model, name in shown.items():
        assert names_of(EngineConfig(model=model)) == [name]
    assert names_of(EngineConfig(model="/a/b", served_model_name="n")) == ["n"]
    assert names_of({"a": EngineConfig(), "b": EngineConfig()}) == ["a", "b"]


def test_what_listens_early_needs_nothing_large() -> None:
    """Otherwise it would come late."""
    code = (
        "import sys, infer.cli.serving;"
        "large = {'torch', 'uvicorn', 'starlette', 'asyncio', 'anyio', 'numpy', 'sqlalchemy'};"
        "print(*large & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, check=True, timeout=60, stdout=subprocess.PIPE
    )
    assert done.stdout.strip() == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_loads_answers_and_ends_at_a_signal(number: signal.Signals) -> None:
    env = {**ENV, "INFER_WRAP_CORE": "tests.support.faulty:never"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "infer", "serve", "--device", "cpu", "--port", str(port)]
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as process:
        try:
            statuses = {}
            for path in ("live", "ready"):
                while path not in statuses:
                    assert process.poll() is None
                    with contextlib.suppress(ConnectionRefusedError):
                        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                        connection.request("GET", f"/health/{path}")
                        response = connection.getresponse()
                        statuses[path] = response.status, response.read()
                        connection.close()
                    time.sleep(0.01)
            assert statuses["live"] == (200, b'{"status":"ok"}')
            assert statuses["ready"][0] == 503
            assert b"it loads infer-demo" in statuses["ready"][1]
            second = subprocess.run(command, env=ENV, stderr=subprocess.PIPE, timeout=60)
            assert second.returncode == 2
            said = " ".join(re.sub(r"\x1b\[[\d;]*m", "", second.stderr.decode()).split())
            assert f"port: {port} is in use on 127.0.0.1" in said
            process.send_signal(number)
            assert process.wait(60) == -number
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_ctrl_c_ends_a_load_at_every_moment() -> None:
    """Whatever the main thread does: imports, a wait for the engine, a line of the log."""
    code = """
import signal, sys, threading, time
from infer.signals import ended_by_signals

class Held:
    def __del__(self):  # what is raised here is said and forgotten
        print("in", flush=True)
        time.sleep(60)

with ended_by_signals():
    Held()
"""
    command = [sys.executable, "-c", code]
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            process.send_signal(number)
            assert process.wait(30) == -number


def test_the_first_process_of_a_container_ends_while_it_loads() -> None:
    """The system gives it no signal for which it has no handler."""
    code = """
import time
from infer.signals import ended_by_signals

with ended_by_signals():
    print("in", flush=True)
    while True:
        time.sleep(0.01)
"""
    contained = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*contained, "true"]).returncode:
        pytest.skip("no process can be the first one of a namespace here")
    with subprocess.Popen(
        [*contained, sys.executable, "-c", code], env=ENV, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            (first,) = children_of(process.pid)
            os.kill(first, signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()


SMALL = ServerLimits(header_timeout_s=0.2, probe_connections=2)


def test_times_and_places_are_bounded() -> None:
    """Heads have a time and a size; without a place a silent connection gives way."""
    with loading(limits=SMALL, max_connections=8) as (_, url):
        with connect(url) as slow:
            slow.sendall(READY[:10])
            status, body = read_answer(slow)
            assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        long = READY[:-2] + b"a: " + b"x" * MAX_HEADER_BYTES
        assert asked(url, long)[0] == 431
        held = [reach(url) for _ in range(50)]
        try:
            until(lambda: is_live(url))
        finally:
            for sock in held:
                sock.close()


def is_live(url: str) -> bool:
    """Whether a probe has got its answer; without a place it gets another one, or none."""
    try:
        return asked(url, LIVE)[0] == 200
    except (ConnectionError, ValueError):
        return False
