"""`infer serve --fronts 2`: two processes answer at one port, and any process may die."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infer.cli.main import main
from infer.errors import LoadError
from infer.server.early_listener import listening
from infer.server.front_keeper import HANG_S, run_fronts
from infer.server.front_places import front_places
from infer.server.settings import ServerSettings
from tests.support.doubles import start_hash_engines
from tests.support.server_process import (
    Heard,
    Recorder,
    Served,
    asked,
    bodies,
    follow,
    hash_server,
    model_server,
    served,
)
from tests.support.tenants import make
from tests.support.waits import until

STREAMS = 8
MANY = 20
"""Requests of which both fronts get some."""
SLOW_STEPS = hash_server(fronts=2, step_s=0.02, max_batch_size=64)
"""Two fronts over an engine whose streams last long with few tokens, which cost CPU time."""
Seen = tuple[int, dict[str, str], Any]
"""Status, headers and JSON of an answer."""


class LastingServer:
    """A server that the tests share, started when one asks for it: again after one has ended it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._found: Served | None = None

    def get(self) -> Served:
        """It, running."""
        if self._found is None or self._found.process.poll() is not None:
            self.close()
            self._found = self._stack.enter_context(served(SLOW_STEPS, self._folder / "log"))
        return self._found

    def close(self) -> None:
        """End it, unless it has ended."""
        self._stack.close()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastingServer]:
    found = LastingServer(tmp_path_factory.mktemp("fronts"))
    with contextlib.closing(found):
        yield found


@pytest.fixture
def server(lasting: LastingServer) -> Served:
    return lasting.get()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> Seen:
    """One request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    with contextlib.closing(connection):
        data = None if body is None else json.dumps(body)
        if data is not None:
            headers = {"content-type": "application/json", **headers}
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        is_json = "json" in answer.headers.get("content-type", "")
        fields = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, fields, json.loads(text) if is_json else text.decode()


def answered(port: int, method: str, path: str, body: Any = None, **headers: str) -> Seen:
    """`ask` again and again while another front does not answer in time, on a busy machine."""
    while True:
        found = ask(port, method, path, body, **headers)
        is_partial = isinstance(found[2], dict) and found[2].get("missing_fronts")
        is_late = found[0] == 503 and found[2]["error"]["code"] == "front_unavailable"
        if not is_partial and not is_late:
            return found
        time.sleep(0.1)


def front_of(heard: Heard) -> str:
    """The tag of the front that a stream came from."""
    found = re.search(r"x-request-id: ([0-9a-f]{8})", heard.headers)
    assert found is not None
    return found[1]


def fronts_that_answer(server: Served) -> list[str]:
    """The names of the fronts, as one of them says; none where one does not answer in time."""
    stats = ask(server.port, "GET", "/stats")[2]
    return [] if stats["missing_fronts"] else sorted(stats["fronts"])


def both_fronts(server: Served) -> list[str]:
    """The names of both, once they answer."""
    found: list[str] = until(lambda: len(names := fronts_that_answer(server)) == 2 and names)
    return found


async def begun(server: Served, wanted: list[dict[str, Any]]) -> list[tuple[Heard, Any]]:
    """Streams that have had an event, from both fronts; their tasks."""
    while True:
        heard = [Heard() for _ in wanted]
        tasks = [
            asyncio.create_task(follow(server.port, body, each))
            for body, each in zip(wanted, heard, strict=True)
        ]
        while not all(
            each.num_events or task.done() for each, task in zip(heard, tasks, strict=True)
        ):
            await asyncio.sleep(0.005)
        if len(set(map(front_of, heard))) == 2:
            return list(zip(heard, tasks, strict=True))
        await asyncio.gather(*tasks)  # the system has given all of them to one front


def streams(count: int = STREAMS, max_tokens: int = 60) -> list[dict[str, Any]]:
    return [{**body, "max_tokens": max_tokens, "ignore_eos": True} for body in bodies(count, 40)]


async def alone(server: Served, wanted: list[dict[str, Any]]) -> list[Heard]:
    return await asyncio.gather(*(follow(server.port, body) for body in wanted))


async def received(port: int, wanted: list[dict[str, Any]]) -> None:
    """Streams to their ends, of which nothing is parsed."""
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(partial(Recorder, asked(body)), "127.0.0.1", port)
        for body in wanted
    ]
    await asyncio.gather(*(recorder.ended for _, recorder in made))


def test_any_front_answers_for_all(server: Served) -> None:
    wanted = streams(8, 15)
    calm = asyncio.run(alone(server, wanted))
    assert all(heard.is_done for heard in calm)
    found = asyncio.run(begin_and_end(server, wanted))
    assert [each.answer for each in found] == [each.answer for each in calm]
    names = both_fronts(server)
    tags = {name.removeprefix("front-") for name in names}
    assert tags == {front_of(each) for each in found}
    made = {f"{each.headers.split('x-request-id: ')[1][:32]}" for each in found}
    for _ in range(6):
        listed = answered(server.port, "GET", "/v1/requests")[2]
        assert made <= {each["id"].removeprefix("cmpl-") for each in listed["data"]}

    def metrics() -> str:
        return str(ask(server.port, "GET", "/metrics")[2])

    ups = [f'infer:front_up{{front="{name}"}} 1.0' for name in names]
    text = until(lambda: all(up in (text := metrics()) for up in ups) and text)
    for name in names:
        assert f'process_cpu_seconds_total{{front="{name}",process="engine-0"}}' in text
    assert ask(server.port, "GET", "/health/ready")[0] == 200


async def begin_and_end(server: Served, wanted: list[dict[str, Any]]) -> list[Heard]:
    return await asyncio.gather(*(task for _, task in await begun(server, wanted)))


def test_a_request_is_cancelled_by_any_front(server: Served) -> None:
    async def cancelled() -> list[Heard]:
        running = await begun(server, streams(8, 200))
        for heard, _ in running:
            name = "cmpl-" + heard.headers.split("x-request-id: ")[1][:32]
            status, _, answer = await asyncio.to_thread(
                answered, server.port, "POST", f"/v1/requests/{name}/cancel", {}
            )
            assert (status, answer["cancelled"]) == (200, True)
        return await asyncio.gather(*(task for _, task in running))

    for heard in asyncio.run(cancelled()):
        assert heard.error is not None
        assert heard.error["code"] == "request_cancelled"


def test_a_kill_of_the_engine_costs_no_stream_of_any_front(server: Served) -> None:
    wanted = streams()
    calm = asyncio.run(alone(server, wanted))

    async def under_kill() -> list[Heard]:
        running = await begun(server, wanted)
        pid = server.engine_pid()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*(task for _, task in running))

    found = asyncio.run(under_kill())
    assert len(set(map(front_of, found))) == 2
    assert [each.answer for each in found] == [each.answer for each in calm]
    until(server.engine_pid)


def test_a_kill_of_a_front_ends_its_own_connections_alone(server: Served) -> None:
    wanted = streams(max_tokens=120)
    calm = asyncio.run(alone(server, wanted))
    before = both_fronts(server)
    refused: list[Any] = []
    is_over = False

    async def newcomers() -> None:
        """Connections that come meanwhile are all answered."""
        while not is_over:
            try:
                status, _, _ = await asyncio.to_thread(ask, server.port, "GET", "/health/live")
                if status != 200:
                    refused.append(status)
            except OSError as error:
                refused.append(error)
            await asyncio.sleep(0.005)

    async def under_kill() -> list[Heard | BaseException]:
        nonlocal is_over
        running = await begun(server, wanted)
        victim = server.front_pids()[0]
        coming = asyncio.create_task(newcomers())
        os.kill(victim, signal.SIGKILL)
        found = await asyncio.gather(*(task for _, task in running), return_exceptions=True)
        await asyncio.to_thread(until, lambda: len(server.front_pids()) == 2)
        await asyncio.to_thread(both_fronts, server)
        is_over = True
        await coming
        for (heard, _), each in zip(running, found, strict=True):
            ended.append((heard, each))
        return found

    ended: list[tuple[Heard, Heard | BaseException]] = []
    asyncio.run(under_kill())
    cut = {front_of(heard) for heard, _ in ended if not heard.is_over}
    assert len(cut) == 1
    for (heard, _), other in zip(ended, calm, strict=True):
        if front_of(heard) in cut:
            assert not heard.is_done
            assert heard.tokens == other.tokens[: len(heard.tokens)]
        else:
            assert heard.answer == other.answer
    assert len(refused) <= 1, refused  # what the front had accepted when it died
    after = both_fronts(server)
    assert len(set(before) & set(after)) == 1
    # Both serve streams again.
    found = asyncio.run(begin_and_end(server, streams(8, 15)))
    assert {f"front-{front_of(each)}" for each in found} == set(after)


def is_front(pid: int) -> bool:
    """Whether a process is a front or will become one."""
    with contextlib.suppress(OSError):
        return b"front_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def test_what_comes_to_a_front_that_is_away_is_answered_by_the_others(server: Served) -> None:
    before = set(server.children())
    os.kill(server.front_pids()[0], signal.SIGKILL)

    def successors() -> list[int]:
        return [pid for pid in server.children() if pid not in before and is_front(pid)]

    (successor,) = until(successors)
    os.kill(successor, signal.SIGSTOP)  # it does not come
    try:
        answers = [ask(server.port, "GET", "/v1/models") for _ in range(24)]
    finally:
        os.kill(successor, signal.SIGCONT)
    assert {status for status, _, _ in answers} == {200}
    assert len({headers["x-request-id"][:8] for _, headers, _ in answers}) == 1
    both_fronts(server)


def test_a_term_lets_the_streams_of_all_fronts_finish(server: Served) -> None:
    wanted = streams()
    calm = asyncio.run(alone(server, wanted))

    async def under_term() -> list[Heard]:
        running = await begun(server, wanted)
        os.kill(server.process.pid, signal.SIGTERM)
        return await asyncio.gather(*(task for _, task in running))

    found = asyncio.run(under_term())
    assert [each.answer for each in found] == [each.answer for each in calm]
    assert server.process.wait(20) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), 5).close()


def test_a_keys_limits_hold_over_all_fronts(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    own = make(keys, "own")
    names = itertools.count()
    how = {"fronts": 2, "api_keys": str(keys), "keep_answers_s": 60}
    with served(hash_server(**how), tmp_path / "log") as server:
        body = {"prompt": "abc", "max_tokens": 4}

        def are_shared() -> set[str]:
            """The fronts that have let in five requests of a new key together, once they have. One
            that hears too late from the process that counts gives its half, perhaps in addition."""
            few = make(keys, f"few-{next(names)}", requests_per_minute=5)
            began_s = time.monotonic()
            answers = [ask(server.port, "POST", "/v1/completions", body, **few) for _ in range(12)]
            num_grown = int((time.monotonic() - began_s) / 12)
            counts = Counter(status for status, _, _ in answers)
            assert counts[200] <= 5 + 5 // 2 + num_grown
            assert counts[200] + counts[429] == 12
            tags = {each[1]["x-request-id"][:8] for each in answers}
            return tags if counts[200] == 5 and len(tags) == 2 else set()

        tags = until(are_shared)
        # An answer is read again wherever it is asked for.
        streamed, kept = {**body, "stream": True}, {**own, "x-keep-answer": "true"}
        told = ask(server.port, "POST", "/v1/completions", streamed, **kept)
        events = f"/v1/requests/{told[1]['x-request-id']}/events"
        again = [answered(server.port, "GET", events, **own) for _ in range(MANY)]
        assert {status for status, _, _ in again} == {200}
        assert {each[1]["x-request-id"][:8] for each in again} == tags


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class EarlyClient:
    """Connects to a server as soon as it listens, again and again until it serves, and sends
    nothing before that."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(0.3):
            with contextlib.suppress(OSError):
                self._open.append(socket.create_connection(("127.0.0.1", self._port), 30))

    def status(self) -> bytes:
        """The status line that its third connection from the end gets now."""
        self._is_over.set()
        self._thread.join()
        *_, waiting, _, _ = self._open
        waiting.sendall(b"GET /health/ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
        line = waiting.recv(100).partition(b"\r\n")[0]
        for each in self._open:
            each.close()
        return line


def test_what_a_server_has_is_of_all_fronts(tmp_path: Path) -> None:
    """Sessions, stored responses, the port for probes, settings that are read again, and a client
    that was there before the server."""
    file = tmp_path / "infer.toml"
    file.write_text(
        f'fronts = 2\nsessions = "sqlite:///{tmp_path}/sessions.db"\n', encoding="utf-8"
    )
    probes, port = free_port(), free_port()
    options = ["--config", str(file), "--metrics-port", str(probes), "--log-format", "json"]
    options += ["--max-seq-len", "2048", "--no-standby"]
    early = EarlyClient(port)
    with served(model_server(*options, "--port", str(port)), tmp_path / "log") as server:
        assert early.status() == b"HTTP/1.1 200 OK"
        name = ask(server.port, "POST", "/v1/sessions", {"title": "all"})[2]["id"]
        turn = {"session_id": name, "messages": [{"role": "user", "content": "Once"}]}
        chat = partial(ask, server.port, "POST", "/v1/chat/completions")
        turns = [chat({**turn, "max_tokens": 4}) for _ in range(MANY)]
        assert {status for status, _, _ in turns} == {200}
        assert len({each[1]["x-request-id"][:8] for each in turns}) == 2
        messages = [ask(server.port, "GET", f"/v1/sessions/{name}")[2] for _ in range(4)]
        assert all(len(each["messages"]) == 2 * MANY for each in messages)
        # Two turns at the same time are refused wherever the second one comes.
        long = {**turn, "max_tokens": 700, "ignore_eos": True}
        first = threading.Thread(target=chat, args=(long,))
        first.start()
        until(lambda: ask(server.port, "GET", "/stats")[2]["running"])
        others = []
        while first.is_alive():
            others.append(chat({**turn, "max_tokens": 4})[0])
            time.sleep(0.05)
        assert set(others[:-1]) <= {409}
        stored = ask(
            *(server.port, "POST", "/v1/responses"), {"input": "hello", "max_output_tokens": 4}
        )[2]
        read = [ask(server.port, "GET", f"/v1/responses/{stored['id']}") for _ in range(6)]
        assert {status for status, _, _ in read} == {200}
        up = re.compile(r"infer:front_up\{.*\} 1.0")
        until(lambda: len(up.findall(ask(probes, "GET", "/metrics")[2])) == 2)
        assert ask(probes, "GET", "/health/ready")[0] == 200

        settings = file.read_text(encoding="utf-8")
        file.write_text(settings + "request_timeout_s = 0.001\n", encoding="utf-8")
        os.kill(server.process.pid, signal.SIGHUP)
        late: Counter[str] = Counter()

        def are_all_told() -> bool:
            status, headers, _ = chat({**turn, "max_tokens": 100, "ignore_eos": True})
            late[headers["x-request-id"][:8]] += status == 504
            return len(+late) == 2

        until(are_all_told)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text("utf-8").splitlines()]
    assert len({line["front"] for line in lines if "front" in line}) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--uds", "infer.sock"], "fronts: more than 1 need a port"),
        (["--engine-thread"], "fronts: more than 1 need an engine in a process"),
        (["--model", "a=x", "--model", "b=y"], "fronts: more than 1 serve one model"),
        (["--models-dir", "."], "fronts: more than 1 serve one model"),
        (["--model", "a=x"], "fronts: more than 1 serve one model"),
        (["--sessions", "sqlite://"], "sessions: is in memory"),
        (["--fronts", "65"], "fronts"),
    ],
)
def test_what_cannot_be_shared_is_refused_at_once(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--fronts", "2", *options])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_fronts_that_cannot_start_end_the_server() -> None:
    settings = ServerSettings(fronts=2)
    with (
        listening(settings, "127.0.0.1", 0, ["hash"]) as listener,
        front_places(listener, settings, "infer.no_such_module") as places,
        pytest.raises(LoadError, match=r"answer HTTP end while they start \(exit code 1\)"),
    ):
        run_fronts(start_hash_engines(), places, listener, settings)


@pytest.mark.slow
def test_a_front_that_hangs_is_replaced(server: Served) -> None:
    """Its connections end with it; newcomers wait for it at most as long."""
    before = both_fronts(server)
    victim = server.front_pids()[0]
    os.kill(victim, signal.SIGSTOP)
    until(lambda: victim not in server.front_pids() and len(server.front_pids()) == 2, HANG_S + 60)
    after = both_fronts(server)
    assert len(set(before) & set(after)) == 1


@pytest.mark.timing
def test_two_fronts_stream_more_than_one_where_there_are_cores(tmp_path: Path) -> None:
    """The event loop of a front has a core of its own; on two cores they share it with all."""
    if (os.cpu_count() or 1) < 6:
        pytest.skip("client, engine and both fronts need cores of their own")
    body = {"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    rates = []
    for fronts in (1, 2):
        arguments = hash_server(fronts=fronts, max_batch_size=64, num_pages=5120, step_s=0.001)
        with served(arguments, tmp_path / str(fronts)) as server:
            started_s = time.monotonic()
            asyncio.run(received(server.port, [body] * 64))
            rates.append(64 * 900 / (time.monotonic() - started_s))
    assert rates[1] > 1.3 * rates[0]
