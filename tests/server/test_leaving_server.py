"""The end of a server behind a proxy: not ready first, then no port, and no request is lost.

Also its port for probes and metrics, which answers until the end.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.server import serve
from infer.server.address import bind
from infer.server.early_listener import listening
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import connect, read_all, read_answer
from tests.support.running_server import running, settings_with
from tests.support.serving import COMPLETIONS, completion_body
from tests.support.waits import until


def get(url: str, path: str, *headers: str) -> tuple[int, bytes]:
    with connect(url) as sock:
        lines = [f"GET {path} HTTP/1.1", "host: localhost", "connection: close", *headers]
        sock.sendall("\r\n".join([*lines, "", ""]).encode())
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
        return int(head.split()[1]), body


def post(**fields: Any) -> bytes:
    body = json.dumps(completion_body(**fields)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


def is_open(url: str) -> bool:
    try:
        connect(url).close()
    except OSError:
        return False
    return True


def test_newcomers_are_served_until_the_port_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a server that is idle. Each answer is then the last of its connection."""
    monkeypatch.setattr(serve, "LAST_REQUESTS_S", 60.0)  # of a busy machine's seconds
    settings = settings_with(drain_delay_s=3.0, metrics_port=0)
    with running(make_hash_llm(), settings) as (server, url, probes):
        assert get(url, "/health/ready")[0] == 200
        with connect(url) as kept, connect(url) as silent:
            kept.sendall(post(max_tokens=2))
            status, _ = read_answer(kept)
            assert status == 200
            server.handle_exit(signal.SIGTERM, None)
            until(lambda: get(url, "/health/ready")[0] == 503)
            assert get(url, "/health/live")[0] == 200
            assert get(probes, "/health/ready")[0] == 503
            with connect(url) as new:
                new.sendall(post(max_tokens=2))
                answer = read_all(new)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"connection: close" in answer.lower()
            assert is_open(url)
            until(lambda: not is_open(url))
            assert kept.recv(10) == b""  # it had no request
            assert get(probes, "/health/ready")[0] == 503
            assert get(probes, "/metrics")[0] == 200
            silent.sendall(post(max_tokens=2))  # its request was under way
            assert read_all(silent).startswith(b"HTTP/1.1 200")
            server.handle_exit(signal.SIGTERM, None)
    assert not is_open(probes)


def test_streams_go_on_after_the_port_is_closed() -> None:
    settings = settings_with(drain_delay_s=0.2, drain_timeout_s=30)
    with running(make_hash_llm(step_s=0.01), settings) as (server, url, _):
        with connect(url) as sock:
            sock.sendall(post(max_tokens=200, stream=True, ignore_eos=True))
            received = sock.recv(100)
            server.handle_exit(signal.SIGTERM, None)
            until(lambda: not is_open(url))
            received += read_all(sock)
        assert received.rstrip().endswith(b"0")
        assert b"data: [DONE]" in received


def test_a_second_signal_does_not_wait() -> None:
    settings = settings_with(drain_delay_s=1000)
    with running(make_hash_llm(), settings) as (server, url, _):
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: get(url, "/health/ready")[0] == 503)
        server.handle_exit(signal.SIGTERM, None)
        until(lambda: not is_open(url))


def test_what_waits_at_the_port_is_served_when_it_closes() -> None:
    """Clients that connect all the time are served or refused as connections, never cut off."""
    settings = settings_with(drain_delay_s=0.5)
    ends: list[str] = []
    is_over = threading.Event()

    def keep_asking(url: str) -> None:
        while not is_over.is_set():
            try:
                sock = connect(url)
            except OSError:
                ends.append("refused")
                return
            with sock:
                try:
                    sock.sendall(post(max_tokens=2))
                    ends.append(f"answered {read_answer(sock)[0]}")
                except OSError as error:
                    ends.append(f"cut off: {error}")

    with running(make_hash_llm(), settings) as (server, url, _):
        threads = [threading.Thread(target=keep_asking, args=(url,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        until(lambda: len(ends) > 20)
        server.handle_exit(signal.SIGTERM, None)
        for thread in threads:
            thread.join(20)
        is_over.set()
    assert set(ends) == {"answered 200", "refused"}
    assert ends.count("refused") == 8


# ---- the port for probes and metrics


def test_metrics_need_no_key_at_their_own_port(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    token = Keys(keys, must_exist=False).create("a", KeyLimits())
    settings = settings_with(metrics_port=0, api_keys=str(keys))
    with running(make_hash_llm(), settings) as (_, url, probes):
        assert get(url, "/metrics")[0] == 401
        status, text = get(probes, "/metrics")
        assert status == 200
        assert b"infer:open_connections 0.0" in text  # those of the server
        for path in ("/health", "/health/live", "/health/ready"):
            assert get(probes, path)[0] == 200
        for path in ("/stats", "/v1/models", "/v1/requests", "/", "/openapi.json", COMPLETIONS):
            assert get(probes, path, f"authorization: Bearer {token}")[0] == 404, path
        with connect(probes) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nhost: evil.example\r\n\r\n")
            assert read_answer(sock)[0] == 403


def test_probes_are_answered_while_a_model_loads() -> None:
    settings = settings_with(metrics_port=0)
    with listening(settings, "127.0.0.1", 0, ["a-model"]) as early:
        assert early.metrics is not None
        host, port = early.metrics.sock.getsockname()
        url = f"http://{host}:{port}"
        assert get(url, "/health/live")[0] == 200
        assert get(url, "/health/ready")[0] == 503
        assert get(url, "/metrics")[0] == 503


def test_a_port_for_metrics_that_is_taken() -> None:
    with bind(port=0) as held:
        held.listen()
        settings = settings_with(metrics_port=held.getsockname()[1])
        with (
            pytest.raises(
                ConfigError, match=r"metrics_port: \d+ is in use .* another --metrics-port"
            ),
            listening(settings, "127.0.0.1", 0, []),
        ):
            pass


def test_many_idle_scrapers_do_not_keep_others_out() -> None:
    settings = settings_with(metrics_port=0)
    with running(make_hash_llm(), settings) as (_, url, probes):
        idle: list[socket.socket] = [connect(probes) for _ in range(80)]
        time.sleep(1.2)
        assert get(probes, "/metrics")[0] == 200
        assert get(url, "/health")[0] == 200
        for sock in idle:
            sock.close()
