"""`infer top`: the picture of an engine, and what it says where there is none."""

from __future__ import annotations

import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from rich.console import Console

from infer.cli.engine_state import EngineState
from infer.cli.main import app as command
from infer.cli.top import picture, run_top
from infer.errors import InferError
from tests.support.command_line import CliRunner
from tests.support.doubles import make_hash_llm
from tests.support.serving import COMPLETIONS, completion_body, live

HELLO = {"version": 2, "model": "m", "mode": "continuous", "seats": 2, "gap_bounds_ms": [1, 10]}


def told(event: str, number: int, after: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"event": event, "request": number, "after": after, **fields}


def queued(number: int, name: str | None = "cmpl-x", **more: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": name,
        "choice": 0,
        "prompt_tokens": 100,
        "max_tokens": 50,
        "received": 0.0,
    }
    return told("queued", number, waiting_before=0, running=0, behind=[], **facts, **more)


def admitted(number: int, cached: int = 0, **more: Any) -> dict[str, Any]:
    return told("admitted", number, cached_tokens=cached, of_tokens=100, **more)


def steps_of(*rows: tuple[Any, ...]) -> dict[str, list[Any]]:
    names = ["count", "pause", "duration", "sequences", "prompt_tokens", "free_pages"]
    names += ["cached_pages", "replica", "number"]
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=False))


def running(number: int, name: str, **more: Any) -> dict[str, list[Any]]:
    row = {
        **{"request": number, "state": "running", "name": name, "choice": 1, "prompt_tokens": 10},
        **{"max_tokens": 20, "received": 0.0, "cached_tokens": 0, "computed_tokens": 10},
        **{"output_tokens": 4, **more},
    }
    return {key: [value] for key, value in row.items()}


def test_a_state_follows_the_frames() -> None:
    state = EngineState()
    state.take("hello", HELLO)
    state.take("frame", {"at": 0.0, "requests": {}, "gauges": {"running": 0}})
    state.take("frame", {"at": 10.0, "events": [queued(1), queued(2, None), queued(3)]})
    events = [admitted(1, 16), admitted(2), told("chunk", 1, from_token=16, tokens=40, duration=5)]
    events.append(told("first_token", 2, 6.0, since_received=30.0))
    state.take(
        "frame",
        {
            **{"at": 20.0, "number": 7, "steps": steps_of((1, 0.0, 5.0, 2, 140, 90, 9))},
            **{"events": events, "tokens": {"2": 1}, "gaps": [1, 2, 1]},
        },
    )
    one, two, three = state.requests.values()
    assert (one.state.status, one.seat) == ("running", 0)
    assert (one.state.num_cached, one.state.num_computed) == (16, 56)
    assert (two.seat, two.state.num_output, two.name) == (1, 1, None)
    assert (three.state.status, three.seat) == ("waiting", None)
    assert (state.number, state.now_ms) == (8, 25.0)
    assert state.rate(state.output) == 0.2
    assert [state.gap_percentile(share) for share in (0.2, 0.5, 1.0)] == [1, 10, float("inf")]
    state.take("frame", {"at": 30.0, "events": [told("preempted", 2, lost_tokens=60)]})
    assert (two.state.status, two.seat, two.state.num_computed) == ("preempted", None, 0)
    ended = told("finished", 1, outcome="stop", output_tokens=5)
    state.take("frame", {"at": 31.0, "events": [ended, told("invented", 2)]})
    state.take("frame", {"at": 32.0, "events": [admitted(3)]})
    assert three.seat == 0
    state.take("frame", {"at": 40.0, "restarted": True, "number": 0, "steps": {}})
    assert {request.state.status for request in state.requests.values()} == {"waiting"}
    assert {request.seat for request in state.requests.values()} == {None}
    left_out = {"frames": 3, "steps": 9, "events": 0}
    state.take("frame", {"at": 50.0, "requests": running(9, "cmpl-y"), "left_out": left_out})
    assert list(state.requests) == ["9"]
    assert (state.requests["9"].state.num_output, state.requests["9"].seat) == (4, 0)
    assert state.num_left_out == 3
    state.take("frame", {"at": 90_000.0})
    assert not state.steps
    assert not state.output


def gauges_of(ready: bool, running: int, restarts: int = 0) -> dict[str, Any]:
    return {
        **{"ready": ready, "waiting": 0, "running": running, "preempted": 0, "pages": 100},
        **{"free_pages": 100 - 10 * running, "cached_pages": 5, "restarts": restarts},
    }


def shown(state: EngineState, width: int = 120) -> str:
    console = Console(highlight=False, width=width)
    with console.capture() as found:
        console.print(picture(state, "http://here", width, 0))
    return found.get()


def test_replicas_have_seats_steps_and_pages_of_their_own() -> None:
    state = EngineState()
    state.take("hello", {**HELLO, "seats": 4})
    replicas = {"replica-1": gauges_of(True, 1), "replica-2": gauges_of(True, 2)}
    gauges = {**gauges_of(True, 3), "pages": 200, "free_pages": 170, "replicas": replicas}
    where = {number: f"replica-{1 + number // 2}" for number in (1, 2, 3)}
    events = [queued(number, replica=replica) for number, replica in where.items()]
    events += [admitted(number, replica=replica) for number, replica in where.items()]
    steps = steps_of(
        (1, 0.0, 8.0, 1, 9, 90, 5, "replica-1", 31),
        (1, -6.0, 5.0, 2, 9, 80, 5, "replica-2", 7),
        (1, 1.0, 2.0, 2, 0, 80, 5, "replica-2", 8),
    )
    frame = {"at": 10.0, "number": 4, "steps": steps, "events": events, "gauges": gauges}
    state.take("frame", {**frame, "tokens": {"1": 1, "2": 1, "3": 1}})
    seats = [(each.state.replica, each.seat) for each in state.requests.values()]
    assert seats == [("replica-1", 0), ("replica-2", 0), ("replica-2", 1)]
    assert (state.number, state.now_ms) == (7, 20.0)
    assert [step.num_sequences for step in state.steps_of("replica-2")] == [2, 2]
    text = shown(state)
    words = [line.split() for line in text.splitlines() if line.strip()]
    lines = {name: cells for name, *cells in reversed(words)}
    assert lines["replica-1"][:6] == ["ready", "1", "0", "0", "5", "10%"]
    assert lines["all"][:6] == ["ready", "3", "0", "0", "5", "15%"]
    assert "rows 1" in text
    assert "rows 2" in text
    # One of them dies; its request goes on at the other.
    gauges["replicas"] = {"replica-1": gauges_of(False, 0), "replica-2": gauges_of(True, 3)}
    moved = [told("resumed", 1, waiting_before=0, running=2, replica="replica-2")]
    moved.append(admitted(1, replica="replica-2"))
    state.take("frame", {"at": 30.0, "events": moved, "gauges": gauges})
    assert (state.requests["1"].state.replica, state.requests["1"].seat) == ("replica-2", 2)
    assert "not ready" in shown(state)
    narrow = shown(state, 80)
    assert "…" not in narrow, "80 columns are enough for all that is shown in them"
    assert re.search(r"replica-2 +ready +3 +0 +30% of 100", narrow)
    assert re.search(r"replica-2 +3 +cmpl-\S* +running", narrow)
    moved_back = running(1, "cmpl-x", replica="replica-1")
    state.take("frame", {"at": 50.0, "requests": moved_back})
    assert (state.requests["1"].state.replica, state.requests["1"].seat) == ("replica-1", 0)


def test_one_engine_has_no_column_for_replicas() -> None:
    state = EngineState()
    state.take("hello", HELLO)
    state.take("frame", {"at": 1.0, "events": [queued(1)], "gauges": gauges_of(True, 0)})
    assert "replica" not in shown(state)
    assert "rows a step" in shown(state)


def test_one_picture() -> None:
    with live(make_hash_llm(step_s=0.01)) as url:
        body = completion_body(max_tokens=400, ignore_eos=True, stream=True)
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url + COMPLETIONS, data, headers)
        with urllib.request.urlopen(request) as answer:
            answer.readline()  # it has a seat now
            done = CliRunner().invoke(command, ["top", url, "--once"], env={"COLUMNS": "120"})
            answer.read()
    assert done.exit_code == 0, done.output
    assert "hash-model" in done.output
    assert "seats 1/8" in done.output
    assert "cmpl-" in done.output
    assert "running" in done.output


@contextmanager
def answering(text: bytes, status: int = 200) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("text", "status", "word"),
    [
        (b"", 404, "the status is 404"),
        (b'{"error": {"message": "8 viewers\\u001b[2J watch"}}', 503, "8 viewers"),
        (b'event: frame\ndata: {"at": "x"}\n\n', 200, "has broken off"),
        (b"event: frame\ndata: [1]\n\n", 200, "has broken off"),
        (b"event: frame\ndata: {}\n\n", 200, "has broken off"),
        (b"event: frame\ndata: {", 200, "has broken off"),
        (b"\xff\xfe\n\n", 200, "has broken off"),
        (b'event: hello\ndata: {"version": 1}\n\n', 200, "has version 1, not 2: use the server's"),
    ],
)
def test_what_is_no_stream_is_one_sentence(text: bytes, status: int, word: str) -> None:
    with answering(text, status) as url, pytest.raises(InferError, match=word):
        run_top(url, None, None, once=True)


def test_a_server_that_is_not_there_is_no_broken_stream() -> None:
    with answering(b"") as url:
        pass
    with pytest.raises(InferError, match="no infer server answers"):
        run_top(url, None, None, once=True)


def test_names_of_strangers_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    hello = b'event: hello\ndata: {"version": 2, "model": "\\u001b[31m[red]evil", "seats": 1}\n\n'
    with answering(hello + b'event: end\ndata: {"reason": "x"}\n\n') as url:
        run_top(url, None, None, once=True)
    text = capsys.readouterr().out
    assert "\\x1b[31m[red]evil" in text


def test_an_address_that_is_none() -> None:
    with pytest.raises(InferError, match="is not the address of a server"):
        run_top("file:///etc/passwd", None, None, once=True)


def test_gauges_fit_into_a_usual_terminal() -> None:
    state = EngineState()
    state.take("hello", HELLO | {"seats": 256})
    row = gauges_of(True, 0) | {
        "running": 256,
        "waiting": 1000,
        "pages": 8192,
        "cached_pages": 8000,
    }
    state.take("frame", {"at": 1.0, "gauges": row})
    wide, narrow = (shown(state, width).splitlines() for width in (120, 80))
    assert any("seats" in line and "steps/s" in line for line in wide)
    assert any("seats" in line and "steps/s" in line for line in narrow)
    assert any("pages" in line and "cached" in line for line in narrow)


def test_a_model_that_is_not_served() -> None:
    hello = b'event: hello\ndata: {"version": 2, "model": "m", "seats": 1}\n\n'
    with answering(hello + b'event: end\ndata: {"reason": "x"}\n\n') as url:
        run_top(url, "m", None, once=True)
        with pytest.raises(InferError, match=r"there is no model 'other'.*which has 'm'"):
            run_top(url, "other", None, once=True)


@pytest.mark.parametrize("words", [["top", "{url}", "--once"], ["explain", "x", "--url", "{url}"]])
def test_where_nothing_listens(words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    result = CliRunner().invoke(command, [word.format(url=url) for word in words])
    assert isinstance(result.exception, InferError)
    assert str(result.exception).startswith(f"no infer server answers at {url}: [Errno ")
