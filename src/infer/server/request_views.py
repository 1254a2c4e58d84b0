"""`RequestViews`: what a server says of its engines and their requests, whoever computes them

Three answer: `OneServer` here, over its own engine; `multi_model.ModelRouter`, over the engines of
several models; and `fronts.FrontQueries`, for a server that is one of several fronts of the same
engines. Each method is an endpoint (`server.route_table`), and the first line of its docstring here
is what the index and the OpenAPI document say of it. docs/events.md describes the stream of steps.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError
from infer.server.http.connections import connections_of
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError
from infer.server.kept_answers import NUMBER, KeptAnswers, Reader, number_of
from infer.server.observe.metrics import CONTENT_TYPE, Metrics, snapshot_of
from infer.server.observe.request_trace import (
    RequestNotFoundError,
    RequestTrace,
    RequestTraces,
    cancel_answer,
    summary,
    the_one,
    view,
)
from infer.server.openai.openapi import EVENTS, takes
from infer.server.openai.response_answer import cancelled_response
from infer.server.openai.schema import Body
from infer.server.openai.streaming import STREAM_HEADERS, SourceStream
from infer.server.sessions.store import RESPONSE
from infer.server.tenancy.limits import tenant_of
from infer.server.viewers import MAX_EVERY_MS, EngineViewers, every_s_of

Fields = dict[str, Any]
EVERY_MS = {"type": "integer", "minimum": 0, "maximum": MAX_EVERY_MS, "default": 0}


def visible_to(http: HttpRequest) -> str | None:
    """Id of the key whose requests the caller may see; None = those of all keys."""
    return tenant_of(http.scope).visible_to


def model_of(http: HttpRequest) -> str | None:
    """The model whose engine is meant; None = all models, or the default one."""
    return http.query_params.get("model")


class LoadBody(Body):
    """`POST /v1/models/load`."""

    model: str


class UnloadBody(Body):
    """`POST /v1/models/unload`."""

    model: str
    force: bool = False
    """Whether it is unloaded though requests run on it, which may finish within the time that those
    of a server have at its end."""


class ServedEngine(NamedTuple):
    """An engine, and what its server knows about it."""

    engine: AsyncLLM
    traces: RequestTraces
    metrics: Metrics
    viewers: EngineViewers
    kept: KeptAnswers


class RequestViews(ABC):
    """Answers are JSON values, or a `Response`. Lives on the event loop.

    What is said of requests is read from the engines that are `served`; who has others to ask
    overrides it. With several models `?model=` names one, and an unknown one is a 404."""

    @abstractmethod
    def served(self, http: HttpRequest) -> Mapping[str, ServedEngine]:
        """The engines of this process that are meant, by the names of their models."""

    @abstractmethod
    def viewers(self, http: HttpRequest) -> EngineViewers:
        """Those who watch the engine that is meant. Raises `EngineDeadError` if there is none."""

    @abstractmethod
    async def models(self, http: HttpRequest) -> Fields:
        """The model, in a list."""

    @abstractmethod
    async def model(self, http: HttpRequest) -> Fields:
        """The model of this name."""

    @takes(LoadBody)
    @abstractmethod
    async def load_model(self, http: HttpRequest, wire: LoadBody) -> Fields:
        """Load a model; answered when it is loaded."""

    @takes(UnloadBody, refuses=(409,))
    @abstractmethod
    async def unload_model(self, http: HttpRequest, wire: UnloadBody) -> Fields:
        """Unload a model; the next request for it loads it again."""

    @takes(refuses=(404,))
    async def requests(self, http: HttpRequest) -> Fields:
        """The requests that run, and the latest that have ended."""
        served = self.served(http).values()
        traces = [trace for server in served for trace in server.traces.all(visible_to(http))]
        return {"object": "list", "data": list(map(summary, sorted(traces, key=_newest_first)))}

    @takes(refuses=(409,))
    async def request(self, http: HttpRequest) -> Fields:
        """The trace of one, by its id or its client's X-Request-Id: what it waited for, and why."""
        return view(self._named(http)[1])

    @takes(refuses=(409,))
    async def cancel(self, http: HttpRequest) -> Fields:
        """End one."""
        served, trace = self._named(http)
        return cancel_answer(trace, served.traces.cancel(trace))

    @takes(refuses=(409,))
    async def cancel_response(self, http: HttpRequest) -> Fields:
        """End a response that is being answered."""
        if not http.path_params["id"].startswith(RESPONSE):
            raise RequestNotFoundError
        told = await self.cancel(http)
        if told["cancelled"]:
            return cancelled_response(told["id"], RequestContext.of(http.scope).model)
        message = "this response has ended: only one that is being answered can be cancelled"
        raise HttpError(400, message, code="response_not_running")

    @abstractmethod
    async def health(self, http: HttpRequest) -> Fields:
        """200 while requests are taken and move on, else 503."""

    @abstractmethod
    async def ready(self, http: HttpRequest) -> Fields:
        """200 while a request would be worked on at once, else 503."""

    @takes(refuses=(404, 429), answers=(EVENTS,), query={"every_ms": EVERY_MS})
    async def events(self, http: HttpRequest) -> Response:
        """The engine's steps and what happens to requests, as a stream that does not end."""
        if http.method == "HEAD":
            return _head_of_stream()
        every_s = every_s_of(http.query_params.get("every_ms"))
        context, viewers = RequestContext.of(http.scope), self.viewers(http)
        address = (context.client or "").rpartition(":")[0]
        key_id = tenant_of(http.scope).key.id
        viewer = viewers.join(visible_to(http), key_id, address, every_s=every_s)
        context.cleanup.callback(viewers.leave, viewer)
        context.on_revoked = lambda: viewer.end("key_revoked")
        return SourceStream(viewer)

    @takes(refuses=(409, 410), answers=(EVENTS,), query={"after": NUMBER})
    async def answer_events(self, http: HttpRequest) -> Response:
        """The events of an answer that is kept (X-Keep-Answer), from the one behind `after` on."""
        after = number_of((http.query_params.get("after"), http.headers.get("last-event-id")))
        reader, context = await self.kept_reader(http, after), RequestContext.of(http.scope)
        context.cleanup.enter_context(closing(reader))
        context.cleanup.enter_context(tenant_of(http.scope).readers.place(reader))
        context.on_revoked = reader.replace
        return _head_of_stream() if http.method == "HEAD" else SourceStream(reader)

    async def kept_reader(self, http: HttpRequest, after: int) -> Reader:
        """Reads what comes behind event `after` of the answer that the path names. Raises
        `HttpError`: 404 and 409 as `request`, 410 if that is not kept any more, 400 if there is no
        such event."""
        served, trace = self._named(http)
        return served.kept.read(trace.context.id, after)

    @takes(refuses=(404,), answers=("text/plain",))
    async def metrics(self, http: HttpRequest) -> Response:
        """For Prometheus."""
        metrics = [server.metrics for server in self.served(http).values()]
        render = snapshot_of(metrics, connections_of(http.scope))
        return metrics_response(await asyncio.to_thread(render))

    @takes(refuses=(404,))
    @abstractmethod
    async def stats(self, http: HttpRequest) -> Fields:
        """Queue depth, batch sizes, waiting times."""

    def _named(self, http: HttpRequest) -> tuple[ServedEngine, RequestTrace]:
        """The trace that the path names. Raises `HttpError`: 404, or 409 if several run."""
        name, seen = http.path_params["id"], visible_to(http)
        all_served = self.served(http).values()
        pairs = [
            (server, trace) for server in all_served for trace in server.traces.named(name, seen)
        ]
        meant = the_one([trace for _, trace in pairs], name)
        return next(pair for pair in pairs if pair[1] is meant)


def _head_of_stream() -> Response:
    """The answer to HEAD where GET gets a stream."""
    return Response(headers={name.decode(): value.decode() for name, value in STREAM_HEADERS})


def check_stays(http: HttpRequest) -> None:
    """Raise `EngineDeadError` where the server will end and wants no more requests."""
    if connections_of(http.scope).is_leaving:
        raise EngineDeadError("the server is shutting down")


def metrics_response(text: bytes) -> Response:
    """Metrics as Prometheus reads them."""
    return Response(text, headers={"content-type": CONTENT_TYPE})


def _newest_first(trace: RequestTrace) -> tuple[bool, float]:
    if trace.ended_s is None:
        return False, -trace.context.received_s
    return True, -trace.ended_s


def model_fields(name: str, created_at: int, engine: AsyncLLM | None) -> Fields:
    """A model as `/v1/models` shows it, with what clients of OpenAI and of Anthropic look for;
    `created_at`: seconds since the epoch; `engine`: None while it is not loaded."""
    size = None if engine is None else engine.max_seq_len
    return {
        "id": name,
        "object": "model",
        "created": created_at,
        "owned_by": "infer",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": size,
        "max_tokens": size,
        "max_model_len": size,
        "sampling_defaults": None if engine is None else engine.sampling_defaults.as_dict(),
    }


def model_list(models: Sequence[Fields]) -> Fields:
    """A list of models, all on one page."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
    return {"object": "list", "data": models, "has_more": False, **ends}


class OneServer(RequestViews):
    """Over the engine of this server."""

    def __init__(self, served: ServedEngine) -> None:
        self._own = served
        self._created_at = int(time.time())

    def served(self, http: HttpRequest) -> Mapping[str, ServedEngine]:
        return {self._own.engine.model_name: self._own}

    def viewers(self, http: HttpRequest) -> EngineViewers:
        return self._own.viewers

    def _model(self) -> Fields:
        return model_fields(self._own.engine.model_name, self._created_at, self._own.engine)

    async def models(self, http: HttpRequest) -> Fields:
        return model_list([self._model()])

    async def model(self, http: HttpRequest) -> Fields:
        return self._of_name(http.path_params["name"])

    def _of_name(self, name: str) -> Fields:
        if name != self._own.engine.model_name:
            message = "there is no such model here"
            raise HttpError(404, message, param="model", code="model_not_found")
        return self._model()

    async def load_model(self, http: HttpRequest, wire: LoadBody) -> Fields:
        """It is loaded since the start."""
        return self._of_name(wire.model)

    async def unload_model(self, http: HttpRequest, wire: UnloadBody) -> Fields:
        """Refused: nothing would load it again."""
        self._of_name(wire.model)
        message = (
            "the only model of a server stays loaded; one that is served as --model"
            " NAME=PATH-OR-HUB-ID can be unloaded"
        )
        raise HttpError(409, message, param="model", code="only_model")

    async def health(self, http: HttpRequest) -> Fields:
        if not self._own.engine.is_live:
            raise EngineDeadError("the engine is not running, or makes no progress")
        return {"status": "ok"}

    async def ready(self, http: HttpRequest) -> Fields:
        check_stays(http)
        if not self._own.engine.is_ready:
            raise EngineDeadError("the engine is not ready")
        return {"status": "ready"}

    async def stats(self, http: HttpRequest) -> Fields:
        return self._own.metrics.stats()
