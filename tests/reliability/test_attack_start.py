"""Scorecard A11: the address while a model loads, attacked by those that can reach it."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from infer.server.settings import ServerSettings
from tests.server.test_early_listener import LIVE, READY, loading, taken_over
from tests.support.raw_http import connect, reach, read_answer
from tests.support.transports import TRANSPORTS, Transport, settings_of


def attack(url: str, seed: int, is_over: threading.Event) -> None:
    """Open connections that are silent, slow, rubbish, too long, or gone before the answer."""
    chance = random.Random(seed)
    held: list[socket.socket] = []
    while not is_over.is_set():
        time.sleep(0.002)  # or the interpreter would be the attackers' alone
        with contextlib.suppress(OSError):
            sock = reach(url)
            held.append(sock)
            sock.settimeout(0.01)
            match chance.randrange(6):
                case 0:
                    sock.sendall(chance.randbytes(chance.randrange(1, 5000)))
                case 1:
                    sock.sendall(READY[: chance.randrange(1, len(READY))])
                case 2:
                    sock.sendall(b"GET / HTTP/1.1\r\na: " + b"x" * 40_000)
                case 3:
                    sock.sendall(READY * 50)
                    sock.close()
                case 4:
                    sock.sendall(b"\x16\x03\x01" + chance.randbytes(200))
                case _:
                    pass
        if len(held) > 120:
            for sock in held[:60]:
                sock.close()
            del held[:60]
    for sock in held:
        sock.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_probes_are_answered_under_attack(transport: Transport, tmp_path: Path) -> None:
    """And the server that takes the address over answers too; nothing is left open."""
    how = settings_of(transport, tmp_path)
    is_over = threading.Event()
    with loading(**how) as (early, _), taken_over(early, ServerSettings(**how)):
        pass  # what a server opens once for a process is open now
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with loading(**how) as (early, url):
        attackers = [
            threading.Thread(target=attack, args=(url, seed, is_over)) for seed in range(4)
        ]
        for each in attackers:
            each.start()
        try:
            for _ in range(30):
                assert patiently(url, LIVE) == 200
                assert patiently(url, READY) == 503
            with taken_over(early, ServerSettings(**how)):
                is_over.set()
                for each in attackers:
                    each.join(60)
                assert patiently(url, READY) == 200
        finally:
            is_over.set()
    if descriptors:
        until_s = time.monotonic() + 30
        while len(os.listdir("/proc/self/fd")) > descriptors and time.monotonic() < until_s:
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= descriptors


@pytest.mark.parametrize("transport", ["plain", "unix"])
def test_a_thousand_silent_connections(transport: Transport, tmp_path: Path) -> None:
    """A probe beside them is answered, while the model loads and when the server is there."""
    how = settings_of(transport, tmp_path)
    held: list[socket.socket] = []
    with loading(**how) as (early, url):
        try:
            for _ in range(1000):
                held.append(reach(url))
            assert patiently(url, LIVE) == 200
            with taken_over(early, ServerSettings(**how)):
                assert patiently(url, READY) == 200
        finally:
            for sock in held:
                sock.close()


def patiently(url: str, request: bytes) -> int:
    """The status of an answer. A client of a Unix socket whose queue is full has to ask again."""
    while True:
        with contextlib.suppress(BlockingIOError), connect(url) as sock:
            sock.sendall(request)
            return read_answer(sock)[0]
        time.sleep(0.01)
