"""Support of the server's tests: an app called in process, a server on a real socket, scripts.

`App` is a small ASGI client. It records every message, so that tests see what was written at once,
and it can disconnect at any moment. `live` is uvicorn in a thread on a free port. `scripted` is an
engine whose model "samples" given tokens, for tests that must know the text; all parts but the
runner are real.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from starlette.routing import BaseRoute, Match, Route

from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.loop import EngineThread
from infer.schedule.sequence import Plan, Sampled, verified
from infer.server.address import bind, unix_socket, url_of
from infer.server.app import create_app
from infer.server.fronts import SeveralFronts
from infer.server.http.anthropic_errors import is_anthropic
from infer.server.http.paths import canonical_path
from infer.server.openai.generating_api import GeneratingApi
from infer.server.openai.openapi import document
from infer.server.serve import Server
from infer.server.settings import ServerSettings
from infer.text.tokenizer import Tokenizer
from infer.types import TokenLogprobs
from infer.types.engine_limits import EngineLimits
from tests.support.doubles import make_hash_llm, small_tokenizer
from tests.support.hash_engine import make_hash_core

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def completion_body(**changes: Any) -> dict[str, Any]:
    return {"model": "hash-model", "prompt": "Hello", "max_tokens": 8, "seed": 1, **changes}


def chat_body(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "hash-model", "messages": messages, "max_tokens": 8, "seed": 1, **changes}


def code_at(path: str, code: str | None) -> str | None:
    """The code that an error has at this path: errors of Anthropic's form have none."""
    return None if is_anthropic(canonical_path(path)) else code


BODIES = {COMPLETIONS: completion_body, CHAT: chat_body}


@dataclass
class Reply:
    """A response as the sequence of messages in which it was written."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error object, after a check of the body's exact shape. Of Anthropic's, `param` and
        `code` are None."""
        assert self.headers["content-type"] == "application/json"
        if self.json().get("type") == "error":
            assert set(self.json()) == {"type", "error", "request_id"}
            assert set(self.json()["error"]) - {"details"} == {"message", "type"}
            assert self.json()["request_id"] == self.headers["x-request-id"]
            return {**self.json()["error"], "param": None, "code": None}
        (key, error), *rest = self.json().items()
        assert (key, rest) == ("error", [])
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        assert error["code"] is None or isinstance(error["code"], str)
        return dict(error)

    def events(self) -> list[Any]:
        """The chunks of a stream that ended without an error; their form is checked."""
        found = self.body.decode("ascii").split("\n\n")[:-1]
        *events, done = [event for event in found if not event.startswith(":")]
        assert done == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


@cache
def documented() -> dict[str, Any]:
    """The OpenAPI document of an app with keys, which includes all statuses."""
    app = create_app(make_hash_llm(), ServerSettings(sessions="sqlite://"))
    return document(app.routes, has_keys=True)


def check_documented(routes: Sequence[BaseRoute], scope: dict[str, Any], reply: Reply) -> None:
    """Assert that `/openapi.json` has the status and the media type of a reply."""
    found = [route for route in routes if route.matches(scope)[0] is Match.FULL]
    if not found or not reply.status or not isinstance(found[0], Route):
        return  # a route of a mounted app
    method = scope["method"].lower().replace("head", "get")
    paths, path = documented()["paths"], found[0].path_format
    if path not in paths:  # an endpoint of the test's own
        paths = document(routes, has_keys=True)["paths"]
    operation = paths[path][method]
    answer = operation["responses"].get(str(reply.status))
    assert answer, f"{scope['method']} {scope['path']} answers {reply.status}, says no document"
    assert reply.headers["content-type"].partition(";")[0] in answer["content"]


class App:
    """An app that has been started, and is called without a socket."""

    def __init__(
        self,
        engine: AsyncLLM,
        generating: Sequence[GeneratingApi[Any]] | None = None,
        fronts: SeveralFronts | None = None,
        **settings: Any,
    ) -> None:
        self.engine = engine
        own = ServerSettings(**settings)
        self.app = create_app(engine, own, generating=generating, fronts=fronts)

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] = JSON,
        *,
        leave: asyncio.Event | None = None,
        on_write: Callable[[bytes], None] = lambda data: None,
        pieces: int = 1,
    ) -> Reply:
        """Send one request; the client disconnects when the event `leave` is set."""
        path, _, query = path.partition("?")
        reply = Reply()
        size = -(-len(body) // pieces) or 1
        chunks = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        leave = leave or asyncio.Event()

        async def receive() -> dict[str, Any]:
            if chunks:
                return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Mapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                assert not reply.status, "two responses"
                reply.status = message["status"]
                reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                assert len(reply.headers) == len(message["headers"]), "a header twice"
            elif message["body"]:
                reply.writes.append(message["body"])
                on_write(message["body"])

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        await self.app(scope, receive, send)
        check_documented(self.app.routes, scope, reply)
        return reply

    async def post(self, path: str, body: Any, **how: Any) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {**JSON, "content-length": str(len(data)), **how.pop("headers", {})}
        return await self.send(how.pop("method", "POST"), path, data, headers, **how)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send("GET", path, headers=headers)

    async def idle(self) -> None:
        """Wait until every seat and page is free and no step is computed; fails after a while."""
        async with asyncio.timeout(30):
            while not is_idle(self.engine):
                await asyncio.sleep(0.002)
        steps = self.engine.stats()["num_steps"]
        await asyncio.sleep(0.03 if steps else 0.0)
        assert self.engine.stats()["num_steps"] == steps


def is_idle(engine: AsyncLLM) -> bool:
    stats = engine.stats()
    busy = [stats[f"num_{name}"] for name in ("open", "running", "waiting", "preempted")]
    return not any(busy) and stats["num_free_pages"] == stats["num_pages"]


@asynccontextmanager
async def serving(engine: AsyncLLM, **settings: Any) -> AsyncIterator[App]:
    app = App(engine, **settings)
    async with app.app.router.lifespan_context(app.app):
        yield app


def with_app(engine: AsyncLLM, use: Callable[[App], Coroutine[Any, Any, T]], **settings: Any) -> T:
    """Run `use(app)` in an event loop; afterwards the engine must hold nothing."""

    async def main() -> T:
        async with serving(engine, **settings) as app:
            result = await use(app)
            await app.idle()
            return result

    return asyncio.run(main())


def ask(engine: AsyncLLM, path: str, body: Any, **how: Any) -> Reply:
    """One POST to a new app."""
    return with_app(engine, lambda app: app.post(path, body, **how))


@contextmanager
def asking(engine: AsyncLLM, **settings: Any) -> Iterator[Callable[..., Reply]]:
    """Like `ask` several times, of one app; afterwards the engine must hold nothing."""
    app = App(engine, **settings)
    lifespan = app.app.router.lifespan_context(app.app)
    with asyncio.Runner() as runner:
        runner.run(lifespan.__aenter__())
        try:
            yield lambda path, body, **how: runner.run(app.post(path, body, **how))
            runner.run(app.idle())
        finally:
            runner.run(lifespan.__aexit__(None, None, None))


class ScriptRunner:
    """A runner that samples the given tokens, the same for every request."""

    def __init__(self, script: Sequence[int], step_s: float = 0.0) -> None:
        self.script = script
        self.step_s = step_s

    def execute(self, plan: Plan) -> list[Sampled]:
        time.sleep(self.step_s)
        results = []
        for chunk in plan:
            for sequence in chunk.samplers() if chunk.samples else ():
                position = len(sequence.tokens) - len(sequence.request.prompt_token_ids)
                token = self.script[position % len(self.script)]
                count = sequence.request.sampling.logprobs
                top = tuple((token + i, -0.25 - i) for i in range(count or 0))
                logprobs = None if count is None else TokenLogprobs(-0.25, top)
                results.append(Sampled(token, logprobs))
        return verified(plan, results)


def scripted(
    script: Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    step_s: float = 0.0,
    runner: Any = None,
    **settings: Any,
) -> AsyncLLM:
    """An engine that generates `script`; the settings are those of `make_hash_llm`."""
    core = make_hash_core(**settings)
    core.runner = runner or ScriptRunner(script, step_s)
    limits = EngineLimits(
        vocab_size=262,
        max_seq_len=core.scheduler.config.max_seq_len,
        num_seats=core.scheduler.num_seats,
        max_waiting_requests=core.scheduler.config.max_waiting_requests,
    )
    input_processor = InputProcessor(tokenizer or small_tokenizer(), limits)
    return AsyncLLM(EngineThread(core), input_processor, "hash-model")


def spelled(text: str) -> list[int]:
    """The token ids of a text, without a begin-of-sequence token."""
    ids = small_tokenizer().encode(text)
    return [token for token in ids if token < 256]


@contextmanager
def live(engine: AsyncLLM, **how: Any) -> Iterator[str]:
    """Run a server on a free port; yields its URL."""
    settings = ServerSettings(**how)
    place = unix_socket(settings.uds) if settings.uds else bind(port=0, limits=settings.limits)
    with place as sock:
        listening = threading.Event()
        server = Server(engine, sock, settings, announce=lambda line: listening.set())
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            assert listening.wait(10)
            yield url_of(sock, is_tls=settings.ssl_certfile is not None)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


async def all_open(app: App, number: int) -> None:
    """Waits until so many requests are with the engine."""
    async with asyncio.timeout(30):
        while app.engine.num_open < number:
            await asyncio.sleep(0.001)


def check_refused(
    reply: Reply, status: int, param: str | None, code: str | None, word: str
) -> None:
    """Check all of a refusal that is the caller's fault; it reveals nothing about the server."""
    error = reply.error()
    assert (reply.status, error["type"]) == (status, "invalid_request_error"), error
    assert (error["param"], error["code"]) == (param, code), error
    assert word in error["message"]
    text = reply.body.decode("ascii")
    assert not any(leak in text for leak in ("Traceback", "0x", "/work", ".py", "pydantic"))
    assert len(reply.headers["x-request-id"]) == 32
