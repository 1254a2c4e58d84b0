"""Scorecard A4, A5, A7: connections without end, bodies that nobody reads, pages of other sites.

The attackers have no key, or hold what they were given. What counts is what the others notice.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from load import Findings, Served, hash_server, served
from serving import COMPLETIONS

from doubles import make_hash_llm
from infer.server import connections, serve
from infer.server.connections import ConnectionLimits, Connections, Use

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def read_answer(sock: socket.socket) -> tuple[int, bytes]:
    """Status and body of an answer with a Content-Length."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = sock.recv(65536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0])
    while len(body) < length:
        body += sock.recv(65536)
    return int(head.split()[1]), body


def read_all(sock: socket.socket) -> bytes:
    received = bytearray()
    while piece := sock.recv(65536):
        received += piece
    return bytes(received)


# ---- A5: connections


def test_what_is_accepted_does_not_wait_for_acknowledgements() -> None:
    """Else the second packet of an answer waits 40 ms for the client's system to confirm the
    first one."""
    with serve.bind(port=0) as sock:
        server = serve.Server(make_hash_llm(), sock, announce=lambda line: listening.set())
        listening = threading.Event()
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            assert listening.wait(10)
            with connect(serve.url_of(sock)) as client:
                client.sendall(HEALTH)
                assert read_answer(client)[0] == 200
                (connection,) = server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        finally:
            server.should_exit = True
            thread.join(20)
    with serve.bind(port=0) as sock:  # also without asyncio's help
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


class FakeConnection:
    def __init__(self) -> None:
        self.is_closed = False

    def give_way(self) -> None:
        self.is_closed = True


def test_who_gives_way() -> None:
    """The refused, then the idle, then the silent, each time the oldest; nobody who is in use."""
    now_s = 0.0
    places = Connections(ConnectionLimits(places=4, probe_places=2), clock=lambda: now_s)
    names = ("refused", "idle", "silent", "busy")
    known = {name: FakeConnection() for name in names}
    for connection in known.values():
        assert places.add(connection)
    places.note(known["idle"], Use.REQUEST)
    places.note(known["busy"], Use.REQUEST)
    places.note(known["refused"], Use.REFUSED)
    places.note(known["idle"], Use.IDLE)
    for i, name in enumerate(names[:3]):
        now_s = 2.0 * i
        newer = FakeConnection()
        assert places.add(newer)
        assert places.admit(newer)
        places.note(newer, Use.REQUEST)
        assert [each.is_closed for each in known.values()] == [j <= i for j in range(4)], name
        assert places.num_open == 4
    assert places.num_gave_way == 3
    # All are in use: two more may say what they want, a third one not, until those are silent.
    first, second, third = (FakeConnection() for _ in range(3))
    assert [places.add(each) for each in (first, second, third)] == [True, True, False]
    assert not places.admit(first)
    now_s += 2 * connections.SILENT_S
    assert places.add(third)
    assert first.is_closed
    places.remove(known["busy"])
    assert places.admit(third)
    assert places.num_open == 5


@pytest.mark.parametrize(
    ("limit", "used", "places"),
    [(1024, 30, 1024 - 46 - 72), (4096, 30, 1024), (96, 20, 40), (64, 20, 16), (48, 20, None)],
)
def test_places_fit_into_the_descriptors(
    monkeypatch: pytest.MonkeyPatch, limit: int, used: int, places: int | None
) -> None:
    monkeypatch.setattr(connections, "_num_open_descriptors", lambda: used)
    monkeypatch.setattr(connections, "_raised_descriptor_limit", lambda wanted: min(limit, wanted))
    if places is None:
        with pytest.raises(connections.ConfigError, match="ulimit -n"):
            connections.connection_limits()
        return
    limits = connections.connection_limits()
    assert limits.places == places
    open_at_most = limits.places + limits.probe_places + 4 * limits.accepted_at_once
    assert used + open_at_most < limit


def cpu_s(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / 100


def idle_connections(server: Served, count: int, log: Path) -> dict[str, Any]:
    """Half of them say nothing, half keep the connection after an answer."""
    url = f"http://127.0.0.1:{server.port}"
    with contextlib.ExitStack() as stack:
        for i in range(count):
            sock = stack.enter_context(connect(url))
            with contextlib.suppress(OSError):
                if i % 2:
                    sock.sendall(HEALTH)
        time.sleep(0.5)
        statuses = [server.get("/health")[0] for _ in range(20)]
        assert statuses == [200] * 20
        before, began_s = cpu_s(server.process.pid), time.monotonic()
        time.sleep(2)
        share = (cpu_s(server.process.pid) - before) / (time.monotonic() - began_s)
    text = log.read_text()
    assert "accept" not in text, text[:2000]
    assert "Traceback" not in text
    assert len(text) < 20_000
    return {"idle": count, "/health": "200, 20 times", "share of a core": round(share, 3)}


@pytest.mark.slow
@pytest.mark.parametrize(("soft", "hard"), [(64, None), (1024, None), (1024, 1024), (64, 64)])
def test_two_thousand_idle_connections(tmp_path: Path, soft: int, hard: int | None) -> None:
    mine = resource.getrlimit(resource.RLIMIT_NOFILE)
    if mine[1] < 4096:
        pytest.skip("the test itself may not have 2,000 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, mine[1]))
    try:
        log = tmp_path / "log"
        limits = (soft, hard or mine[1])
        with served(hash_server(), log, descriptors=limits) as server:
            counted = idle_connections(server, 2000, log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, mine)
    load = f"2,000 idle connections, descriptors {limits[0]} of at most {limits[1]}"
    Findings().note("A5", "idle connections", load, **counted)
    assert counted["share of a core"] < 0.05
