"""Scorecard A5: floods of connections.

The attackers have no key, or stay within the limits of theirs. The tests measure the effect on
other clients.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from infer.errors import ConfigError
from infer.server import address, serve
from infer.server.http import connections
from infer.server.http.connections import (
    ConnectionLimits,
    Connections,
    Descriptors,
    Use,
    connection_limits,
)
from infer.server.settings import ServerSettings
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.raw_http import HEAD, HEALTH, connect, reach, read_answer
from tests.support.server_process import (
    Findings,
    Served,
    cpu_s,
    hash_server,
    model_server,
    percentile,
    served,
)
from tests.support.serving import live
from tests.support.transports import TRANSPORTS, Transport, options_of, settings_of
from tests.support.waits import until


@pytest.mark.parametrize("transport", ["plain", "tls"])
def test_what_is_accepted_does_not_wait_for_acknowledgements(
    transport: Transport, tmp_path: Path
) -> None:
    """Otherwise the second packet of an answer waits 40 ms until the client's system acknowledges
    the first."""
    with address.bind(port=0) as sock:
        settings = ServerSettings(**settings_of(transport, tmp_path))
        server = serve.Server(
            make_hash_llm(), sock, settings, announce=lambda line: listening.set()
        )
        listening = threading.Event()
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            assert listening.wait(10)
            with connect(address.url_of(sock, is_tls=transport == "tls")) as client:
                client.sendall(HEALTH)
                assert read_answer(client)[0] == 200
                (connection,) = server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        finally:
            server.should_exit = True
            thread.join(20)
    with address.bind(port=0) as sock:  # set on the listening socket, not by asyncio
        sock.listen()
        with socket.create_connection(sock.getsockname()), sock.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


class FakeConnection:
    def __init__(self) -> None:
        self.is_closed = False

    def give_way(self) -> None:
        self.is_closed = True


def test_who_gives_way() -> None:
    """First refused, then idle, then silent connections, the oldest first; never one in use."""
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
    # All are in use: two more may send a request; a third may not until those are silent.
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
    limit: int, used: int, places: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    class Few(Descriptors):
        def num_open(self) -> int:
            return used

        def raise_limit(self, wanted: int) -> int:
            return min(limit, wanted)

    if places is None:
        with pytest.raises(ConfigError, match="ulimit -n"):
            connection_limits(descriptors=Few())
        return
    limits = connection_limits(descriptors=Few())
    assert limits.places == places
    open_at_most = limits.places + limits.probe_places + 4 * limits.accepted_at_once
    assert used + open_at_most < limit
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == (places < 1024)
    for text in said:  # what there is, what was asked for, and what it takes
        assert text.startswith(f"{places} connections at most, and not 1024 (--max-connections)")
        assert f"and {used + 16 + 1024 + 72} are needed" in text


@pytest.mark.parametrize("count", [3, 0, 1_000_001])
def test_a_number_of_connections_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="max_connections"):
        ServerSettings(max_connections=count)


def test_the_number_of_connections_is_a_setting() -> None:
    """More than that get 503, and those that are open go on."""
    with live(make_hash_llm(), max_connections=5) as url, contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(url)) for _ in range(5)]
        for sock in held:
            sock.sendall(HEAD.encode() + b"content-length: 9\r\n\r\n{")
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:  # a place for probes
            assert reply.status == 200
        with connect(url) as another:
            another.sendall(HEAD.encode() + b"content-length: 2\r\n\r\n{}")
            assert read_answer(another)[0] == 503


def test_a_handshake_gives_way_before_a_connection_that_has_finished_it() -> None:
    now_s = 0.0
    places = Connections(ConnectionLimits(places=2, probe_places=1), clock=lambda: now_s)
    first, second, third, fourth = (FakeConnection() for _ in range(4))
    above = FakeConnection()
    assert places.add(first, Use.HANDSHAKE)
    places.hand_over(first, above)
    assert (places.num_open, places.admit(first), places.admit(above)) == (1, False, True)
    now_s = 0.5
    assert places.add(second, Use.HANDSHAKE)
    assert places.add(third, Use.HANDSHAKE)  # a probe's place: nobody has been silent for long
    now_s = 2.0 + connections.SILENT_S
    places.remove(third)
    assert places.add(fourth, Use.HANDSHAKE)
    assert (above.is_closed, second.is_closed) == (False, True)
    places.hand_over(fourth, third)
    assert places.num_open == 2


def flood(url: str, count: int, stack: contextlib.ExitStack) -> None:
    """Open connections of all kinds that are of no use: that send nothing (over TLS not even a
    handshake), half of a request, what is no request, or nothing after an answer."""
    for i in range(count):
        with contextlib.suppress(OSError):
            if i % 4 == 0:
                stack.enter_context(reach(url))
                continue
            sock = stack.enter_context(reach(url) if i % 4 == 1 else connect(url))
            sock.sendall((b"\x16\x03\x01", HEALTH, HEALTH[:20])[i % 4 - 1])


def counted_in(text: str, name: str) -> dict[str, float]:
    """The values of a metric by their labels."""
    rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(f"infer:{name}")]
    return {row[0].removeprefix(f"infer:{name}"): float(row[2]) for row in rows}


NUM_PLACES = 12
FEW = ServerLimits(probe_connections=4, header_timeout_s=2.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_sends_nothing_takes_no_place_from_others(
    transport: Transport, tmp_path: Path
) -> None:
    """Each is counted when it is accepted, closed for others that need its place, and closed in any
    case after `header_timeout_s`."""
    settings = settings_of(transport, tmp_path)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(
            live(make_hash_llm(), limits=FEW, max_connections=NUM_PLACES, **settings)
        )

        def ask(path: bytes) -> str:
            """The answer; "" while there is none because all places are taken."""
            with contextlib.suppress(OSError, AssertionError), connect(url) as sock:
                sock.sendall(HEALTH.replace(b"/health", path))
                status, body = read_answer(sock)
                return body.decode() if status == 200 else ""
            return ""

        flood(url, 5 * NUM_PLACES, stack)
        until(lambda: bool(ask(b"/health")), 20)
        text = ""

        def has_metrics() -> bool:
            nonlocal text
            text = ask(b"/metrics")
            return bool(text)

        until(has_metrics, 20)
        most = NUM_PLACES + FEW.probe_connections
        assert 4 <= counted_in(text, "open_connections")[""] <= most
        gave_way = counted_in(text, "connections_gave_way_total")[""]
        refused = counted_in(text, "protocol_refusals_total")
        assert gave_way + sum(refused.values()) >= 5 * NUM_PLACES // 2
        # What is left of the flood has its deadline.
        late = "handshake_timeout" if transport == "tls" else "header_timeout"
        stack.enter_context(reach(url))
        time.sleep(FEW.header_timeout_s)  # the metrics could not have it before
        until(lambda: f'{{reason="{late}"}}' in ask(b"/metrics"), 20)
        sock = stack.enter_context(reach(url))
        while True:
            try:
                if not sock.recv(65536):
                    break
            except ConnectionError:
                break


def test_plain_http_at_a_tls_port_is_counted(tmp_path: Path) -> None:
    with live(make_hash_llm(), **settings_of("tls", tmp_path)) as url:
        for _ in range(3):
            with reach(url) as plain:
                plain.sendall(HEALTH)
                with contextlib.suppress(ConnectionError):
                    assert b"HTTP" not in plain.recv(1000)
        with connect(url) as sock:
            sock.sendall(HEALTH.replace(b"/health", b"/metrics"))
            text = read_answer(sock)[1].decode()
    assert counted_in(text, "protocol_refusals_total") == {'{reason="tls_handshake"}': 3.0}
    assert counted_in(text, "open_connections") == {"": 1.0}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_long_body_and_a_long_answer(transport: Transport, tmp_path: Path) -> None:
    """More than fits into any buffer, in both directions, by a client that reads late."""
    text = "word " * 100_000
    data = json.dumps({"prompt": text, "return_token_strs": True}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    with live(make_hash_llm(), **settings_of(transport, tmp_path)) as url, connect(url) as sock:
        sock.settimeout(60)
        sock.sendall(head + b"content-length: %d\r\n\r\n" % len(data) + data)
        time.sleep(0.5)
        status, body = read_answer(sock)
        assert status == 200
        found = json.loads(body)
        assert found["count"] == len(found["tokens"]) >= 500_000
        sock.sendall(HEALTH)
        assert read_answer(sock)[0] == 200


def is_healthy(server: Served) -> bool:
    """False also if the connection is closed, which over TLS is all that a refusal can be."""
    with contextlib.suppress(OSError):
        return server.get("/health")[0] == 200
    return False


def idle_connections(server: Served, count: int, log: Path) -> dict[str, Any]:
    """A third of them send nothing, over TLS not even a handshake; a third nothing after the
    handshake; and a third keep the connection open after an answer."""
    with contextlib.ExitStack() as stack:
        for i in range(count):
            with contextlib.suppress(OSError):
                sock = stack.enter_context((connect if i % 3 else reach)(server.url))
                if i % 3 == 2:
                    sock.sendall(HEALTH)
        until(lambda: is_healthy(server), 10)  # once all have been accepted
        statuses = [server.get("/health")[0] for _ in range(20)]
        assert statuses == [200] * 20
        before, began_s = cpu_s(server.process.pid), time.monotonic()
        time.sleep(2)
        share = (cpu_s(server.process.pid) - before) / (time.monotonic() - began_s)
    text = log.read_text(encoding="utf-8")
    assert "accept" not in text, text[:2000]
    assert "Traceback" not in text
    assert len(text) < 20_000
    return {"idle": count, "/health": "200, 20 times", "share of a core": round(share, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("soft", "hard"), [(64, None), (1024, None), (1024, 1024), (64, 64)])
def test_two_thousand_idle_connections(
    tmp_path: Path, soft: int, hard: int | None, transport: Transport
) -> None:
    mine = resource.getrlimit(resource.RLIMIT_NOFILE)
    if mine[1] < 4096:
        pytest.skip("the test itself may not have 2,000 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, mine[1]))
    try:
        log = tmp_path / "log"
        limits = (soft, hard or mine[1])
        arguments = hash_server(**settings_of(transport, tmp_path))
        with served(arguments, log, descriptors=limits) as server:
            counted = idle_connections(server, 2000, log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, mine)
    load = f"2,000 idle connections ({transport}), descriptors {limits[0]} of at most {limits[1]}"
    Findings().note("A5", "idle connections", load, **counted)
    assert counted["share of a core"] < 0.05


def timed_requests(url: str) -> dict[str, Any]:
    """Medians on one kept connection in ms, and how many gaps of a stream are too short."""
    one = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
    many = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with connect(url) as sock:

        def median_ms(request: bytes) -> float:
            took = []
            for _ in range(30):
                began_s = time.perf_counter()
                sock.sendall(request)
                assert read_answer(sock)[0] == 200
                took.append(time.perf_counter() - began_s)
            return round(1000 * percentile(took, 50), 2)

        def posted(body: bytes) -> bytes:
            return f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body

        medians = median_ms(HEALTH), median_ms(posted(one))
        sock.sendall(posted(json.dumps(many).encode()))
        came_s: list[float] = []
        received = b""
        while b"[DONE]" not in received[-40:]:
            piece = sock.recv(65536)
            came_s += [time.perf_counter()] * piece.count(b"data: ")
            received += piece
    gaps = [after - before for before, after in pairwise(came_s)]
    short = sum(gap < 0.0002 for gap in gaps)
    return {
        "at_most": {
            "/health [ms]": (medians[0], 2),
            "one token [ms]": (medians[1], 5),
            "gaps below 0.2 ms [%]": (round(100 * short / len(gaps), 1), 10),
        }
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_kept_connection(tmp_path: Path, transport: Transport) -> None:
    """The scorecard judges the times, because this machine may be busy."""
    arguments = model_server(*options_of(transport, tmp_path))
    with served(arguments, tmp_path / "log") as server:
        timed_requests(server.url)
        counted = timed_requests(server.url)
    load = f"shipped model, one client ({transport})"
    Findings().note("A5", "a kept connection", load, **counted)
    # Without TCP_NODELAY any machine waits 40 ms for an acknowledgement.
    assert counted["at_most"]["/health [ms]"][0] < 35
