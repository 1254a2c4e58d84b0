"""`TurnAway`: requests that are refused by their headers while the engine has no room."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.server.address import bind
from infer.server.serve import Server
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import KeyLimits, Keys
from infer.types.server_limits import ServerLimits
from tests.support.doubles import make_hash_llm
from tests.support.waits import until

LONG = {"model": "hash-model", "prompt": "Hello", "max_tokens": 400, "ignore_eos": True}
SHORT = {"model": "hash-model", "max_tokens": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**SHORT, "prompt": "Hello"},
    "/v1/chat/completions": {**SHORT, "messages": [{"role": "user", "content": "Hello"}]},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {**SHORT, "messages": [{"role": "user", "content": "Hello"}]},
}
STATUSES = {"/v1/messages": 529}
"""Statuses of a full server where they are not 503."""
COMPLETION = ("/v1/completions", BODIES["/v1/completions"])


@contextlib.contextmanager
def full_server(
    settings: ServerSettings, *, max_waiting_requests: int = 0, **limits: Any
) -> Iterator[tuple[Any, int]]:
    """An engine with room for one request, and the port of its server."""
    limits["max_waiting_requests"] = max_waiting_requests
    engine = make_hash_llm(step_s=0.01, max_batch_size=1, **limits)
    with bind(port=0, write_stall_s=5) as sock:
        server = Server(engine, sock, settings)
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            until(lambda: server.started)
            yield engine, sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(timeout=20)


def post(
    port: int, path: str, body: dict[str, Any], **headers: str
) -> tuple[http.client.HTTPResponse, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(
        "POST", path, json.dumps(body), {"content-type": "application/json", **headers}
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response, answer


@contextlib.contextmanager
def busy(engine: Any, port: int, **headers: str) -> Iterator[None]:
    """While one request takes the only place; its client leaves at the end."""
    body = json.dumps(LONG)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    headers = {"content-type": "application/json", **headers}
    connection.request("POST", "/v1/completions", body, headers)
    until(lambda: engine.num_open == 1)
    yield
    assert engine.num_open == 1, "the first request ended before the others were tried"
    connection.close()
    until(lambda: engine.num_open == 0)


@pytest.mark.parametrize("path", BODIES)
def test_the_refusal_of_a_head_is_that_of_the_app(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "infer.access")
    with full_server(ServerSettings(cors_origins="http://page.example")) as (engine, port):
        with busy(engine, port):
            early, said = post(port, path, BODIES[path], **{"x-request-id": "mine-1"})
            # The app answers requests of other origins, because its layers add headers for them.
            late, meant = post(port, path, BODIES[path], origin="http://page.example")
        counted = engine.stats()["num_requests_refused"]
    status = STATUSES.get(path, 503)
    assert early.status == late.status == status
    for answer in (said, meant):
        answer.pop("request_id", None)  # of Anthropic's form
    assert said == meant
    assert early.headers["x-request-id"] == "mine-1"
    for name in ("retry-after", "content-type", "x-content-type-options"):
        assert early.headers[name] == late.headers[name]
    assert early.headers["connection"] == "close"
    assert counted == 2
    logged = [record.__dict__["fields"] for record in caplog.records if hasattr(record, "fields")]
    assert [each["client_request_id"] for each in logged if each.get("status") == status] == [
        "mine-1",
        None,
    ]


def test_other_requests_are_answered_meanwhile() -> None:
    with full_server(ServerSettings()) as (engine, port), busy(engine, port):
        response, answer = post(port, "/tokenize", {"prompt": "Hello"})
        assert (response.status, answer["count"] > 0) == (200, True)
        response, answer = post(port, "/v1/nothing", {})
        assert response.status == 404


def test_with_keys_the_key_is_looked_at_first(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = Keys(path, must_exist=False).create("one", KeyLimits())
    mine: dict[str, Any] = {"authorization": f"Bearer {key}"}
    settings = ServerSettings(api_keys=str(path))
    with full_server(settings) as (engine, port), busy(engine, port, **mine):
        assert post(port, *COMPLETION)[0].status == 401
        assert post(port, *COMPLETION, **mine)[0].status == 503


def garbage_of(port: int, path: str) -> set[str]:
    """The types of the objects that 20 requests leave in cycles of references."""
    post(port, path, COMPLETION[1])
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(20):
            post(port, path, COMPLETION[1])
        gc.collect()
        return {type(each).__name__ for each in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.enable()
        gc.garbage.clear()


OURS = {"BoundedProtocol", "RequestContext", "RequestTrace", "OverloadedError"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/nothing"])
def test_a_refused_connection_leaves_nothing_to_collect(path: str) -> None:
    """Under overload there is no full collection: what is kept by cycles of references stays."""
    with full_server(ServerSettings()) as (engine, port), busy(engine, port):
        assert not OURS & garbage_of(port, path)


def test_an_answered_request_leaves_nothing_to_collect() -> None:
    with full_server(ServerSettings(limits=ServerLimits(max_traces_of_owner=2))) as (_, port):
        assert not OURS & garbage_of(port, "/v1/completions")


LIMITS: list[dict[str, Any]] = [
    {"max_waiting_requests": 0},
    {"max_waiting_requests": 9, "max_waiting_tokens": 0},
]


@pytest.mark.parametrize("status", ["503", "429"])
@pytest.mark.parametrize("limits", LIMITS)
def test_the_status_of_a_full_server_can_be_chosen(limits: dict[str, Any], status: Any) -> None:
    """For requests and for tokens, by the headers and in the app."""
    settings = ServerSettings(cors_origins="http://page.example", overload_status=status)
    with full_server(settings, **limits) as (engine, port):
        with busy(engine, port):
            early, said = post(port, *COMPLETION)
            late, meant = post(port, *COMPLETION, origin="http://page.example")
        counted = engine.stats()["num_requests_refused"]
    assert early.status == late.status == int(status)
    assert said == meant
    assert said["error"]["type"] == "overloaded_error"
    assert said["error"]["code"] == "overloaded"
    assert early.headers["retry-after"] == late.headers["retry-after"] == "1"
    assert counted == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_to_wait_is_refused_whole(stream: bool) -> None:
    """Its length is known in the app only; of two choices none is begun."""
    limits = {"max_waiting_requests": 9, "max_waiting_tokens": 20}
    with full_server(ServerSettings(), **limits) as (engine, port):
        with busy(engine, port):
            body = {**SHORT, "prompt": "x" * 15, "stream": stream, "n": 2}
            refused, said = post(port, "/v1/completions", body)
            assert engine.num_open == 1
        assert engine.stats()["num_requests_refused"] == 2
    assert refused.status == 503
    assert "max_waiting_tokens" in said["error"]["message"]
    assert refused.headers["retry-after"] == "1"
