"""A9: logs that nobody reads, streams that are closed, loads that hang, databases that refuse."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from load import ENV

SERVE = [sys.executable, "-m", "infer.server", "--port", "0", "--device", "cpu"]


@contextmanager
def started(arguments: list[str], **streams: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*SERVE, *arguments], env=ENV, text=True, **streams) as process:
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
    """`count` times GET /health over one connection; how many were answered with 200."""
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
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(["--log-format", "json"], **streams) as process:
        port = announced_port(process)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            assert ask(sock, count) == count
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    requests_with_an_unread_log(1000)  # a pipe holds the lines of 250


@pytest.mark.slow
def test_ten_thousand_requests_with_a_log_that_nobody_reads() -> None:
    requests_with_an_unread_log(10_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("stdout", ["full", "closed", "no descriptor"])
def test_a_server_starts_without_stdout(stdout: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = {"full": os.open("/dev/full", os.O_WRONLY)}.get(stdout)
    if stdout == "closed":
        reading, target = os.pipe()
        os.close(reading)
    command = [*SERVE, "--port", str(port)]
    if stdout == "no descriptor":
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    with subprocess.Popen(
        command, env=ENV, stdout=target, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until_s = time.monotonic() + 60
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                        assert ask(sock, 20) == 20
                    break
                except ConnectionRefusedError:
                    assert process.poll() is None
                    assert time.monotonic() < until_s
                    time.sleep(0.1)
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
