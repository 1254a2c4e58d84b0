"""Scorecard A9: unread logs, closed standard streams, model loads that hang."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import infer
from tests.support.server_process import ENV, children_named, state_of
from tests.support.waits import until

SERVE = [sys.executable, "-m", "infer.server", "--port", "0", "--device", "cpu"]


@contextmanager
def started(
    arguments: list[str], env: Mapping[str, str] = ENV, **streams: Any
) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*SERVE, *arguments], env=env, text=True, **streams, encoding="utf-8"
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def announced_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.findall(r":(\d+) ", line)
    assert found, line
    return int(found[0])


def ask(sock: socket.socket, count: int, pipelined: int = 20) -> int:
    """GET /health `count` times over one connection; returns the number of answers with 200."""
    answered = 0
    for _ in range(count // pipelined):
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n" * pipelined)
        received, until = b"", answered + pipelined
        while answered < until:
            data = sock.recv(1 << 16)
            assert data, received
            *whole, received = (received + data).split(b'{"status":"ok"}')
            assert all(b"HTTP/1.1 200" in each for each in whole)
            answered += len(whole)
    return answered


def requests_with_an_unread_log(count: int) -> None:
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(["--log-format", "json"], **streams) as process:
        port = announced_port(process)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            assert ask(sock, count) == count
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_a_log_that_nobody_reads_stops_nothing() -> None:
    requests_with_an_unread_log(1000)  # a pipe holds the lines of 250


@pytest.mark.slow
def test_ten_thousand_requests_with_a_log_that_nobody_reads() -> None:
    requests_with_an_unread_log(10_000)


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health/ready")
        return connection.getresponse().status == 200
    except ConnectionRefusedError:
        return False
    finally:
        connection.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize(
    "stdout",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in ("full", "closed")), "no descriptor"],
)
def test_a_server_starts_without_stdout(stdout: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = {"full": os.open("/dev/full", os.O_WRONLY)}.get(stdout)
    if stdout == "closed":
        reading, target = os.pipe()
        os.close(reading)
    small = ["--no-standby", "--max-seq-len", "256", "--kv-cache-memory-bytes", str(4 << 20)]
    command = [*SERVE, "--port", str(port), *small]
    if stdout == "no descriptor":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    with subprocess.Popen(
        command, env=ENV, stdout=target, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        try:
            until_s = time.monotonic() + 60
            while not is_ready(port):
                assert process.poll() is None
                assert time.monotonic() < until_s
                time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                assert ask(sock, 20) == 20
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            log = process.stderr.read()
            assert process.wait(30) == 0, log
            assert "Traceback" not in log
            assert ("stdout cannot be written" in log) == (stdout != "no descriptor")
        finally:
            process.kill()
            if target is not None:
                os.close(target)


HANGS = {**ENV, "INFER_WRAP_CORE": "tests.support.faulty:never"}
DEMO = str(Path(infer.__file__).parent / "demo_model")
SEVERAL = ["--model", f"a={DEMO}", "--model", f"b={DEMO}"]
ENDS_S = 10.0
"""The system may still be at it when the parent of a process has gone."""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


def engine_of(pid: int) -> int:
    """Wait for the engine process that a server starts; returns its id. It has its name by then: a
    copy of the server that is stopped before it becomes one would be nobody's."""
    (engine,) = until(lambda: children_named(pid, "infer-engine"))
    return int(engine)


def is_gone(pid: int) -> bool:
    return state_of(Path(f"/proc/{pid}")) in "XZ"


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("models", [[], SEVERAL], ids=["single", "several"])
def test_sigterm_ends_a_load_at_the_start(models: list[str]) -> None:
    with started(models, HANGS, **PIPES) as process:
        engine = engine_of(process.pid)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        process.wait(60)  # the load itself never ends
    until(lambda: is_gone(engine), ENDS_S)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sigterm_ends_a_load_that_a_client_waits_for() -> None:
    """The client gets a typed 503, also one that waits behind it."""
    arguments = [*SEVERAL, "--load-on-first-use"]
    with started(arguments, HANGS, **PIPES) as process, ThreadPoolExecutor(2) as clients:
        port = announced_port(process)
        asked = [clients.submit(completion, port, name) for name in ("b", "a")]
        engine = engine_of(process.pid)
        os.kill(engine, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for answer in asked:
            status, error, retry_after = answer.result()
            assert (status, error["code"]) == (503, "engine_unavailable")
            assert error["message"] == "the server is shutting down"
            assert retry_after
        until(lambda: is_gone(engine), ENDS_S)


@pytest.mark.slow
def test_a_load_has_a_deadline() -> None:
    arguments = [*SEVERAL, "--load-on-first-use", "--load-timeout-s", "1"]
    with started(arguments, HANGS, **PIPES) as process:
        port = announced_port(process)
        status, error, _ = completion(port, "b")
        assert status == 503
        assert error["message"].startswith("the model 'b' could not be loaded: ")
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        log = process.stderr.read()
        assert process.wait(30) == 0
        assert "was not ready after 1 s" in log
    with started(["--load-timeout-s", "1"], HANGS, **PIPES) as process:
        assert process.stderr is not None
        assert "raise --load-timeout-s" in " ".join(process.stderr.read().split())
        assert process.wait(30) == 2


def completion(port: int, model: str) -> tuple[int, dict[str, Any], str | None]:
    """Status, error and Retry-After of an answer."""
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": 1})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
        return response.status, error, response.headers["retry-after"]
    finally:
        connection.close()
