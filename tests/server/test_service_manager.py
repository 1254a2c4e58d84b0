"""What systemd is told: ready, signs of life, reading again, stopping; against a real socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from infer.server.service_manager import ServiceManager
from tests.support.doubles import make_hash_llm
from tests.support.running_server import running, settings_with
from tests.support.waits import until


@pytest.fixture
def told(tmp_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.bind(str(tmp_path / "notify"))
    sock.setblocking(False)
    return sock


def received(sock: socket.socket) -> list[str]:
    found = []
    while True:
        try:
            found += sock.recv(4096).decode().splitlines()
        except BlockingIOError:
            return found


def test_a_server_tells_what_it_does(told: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", told.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    lines: list[str] = []

    def has(text: str) -> bool:
        lines.extend(received(told))
        return any(line.startswith(text) for line in lines)

    with told, running(make_hash_llm(), settings_with(drain_delay_s=0.5)) as (server, url, _):
        until(lambda: has("READY=1"))
        assert f"STATUS=serves at {url}" in lines
        until(
            lambda: lines.count("WATCHDOG=1") + received(told).count("WATCHDOG=1") > 0 or has("W")
        )
        lines.clear()
        server.handle_exit(1, None)  # HUP
        until(lambda: has("RELOADING=1") and has("MONOTONIC_USEC=") and has("READY=1"))
        server.handle_exit(15, None)
        until(lambda: has("STOPPING=1"))
        lines.clear()
        until(lambda: has("WATCHDOG=1"))  # also while it leaves


def test_signs_of_life_are_as_often_as_they_are_wanted(told: socket.socket) -> None:
    now = [0.0]
    variables = {"NOTIFY_SOCKET": told.getsockname(), "WATCHDOG_USEC": "60000000"}
    with told:
        manager = ServiceManager(variables, lambda: now[0])
        for _ in range(1000):
            manager.tick()
            now[0] += 0.1
        assert received(told) == ["WATCHDOG=1"] * 4


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NOTIFY_SOCKET": "/no/such/socket", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "@no-such-socket", "WATCHDOG_USEC": "many"},
    ],
)
def test_nobody_listens(variables: dict[str, str]) -> None:
    manager = ServiceManager(variables)
    manager.ready("x")
    manager.tick()
    manager.stopping()


def test_a_watchdog_of_another_process(told: socket.socket) -> None:
    variables = {"NOTIFY_SOCKET": told.getsockname(), "WATCHDOG_USEC": "1"}
    with told:
        ServiceManager({**variables, "WATCHDOG_PID": str(os.getpid() + 1)}).tick()
        assert received(told) == []
        ServiceManager({**variables, "WATCHDOG_PID": str(os.getpid())}).tick()
        assert received(told) == ["WATCHDOG=1"]
