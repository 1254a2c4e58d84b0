"""`RequestViews`: what a server says of its engines and their requests, whoever computes them

Three answer: `OneServer` here, over its own engine; `multi_model.ModelRouter`, over the engines of
several models; and `fronts.FrontQueries`, for a server that is one of several fronts of the same
engines. `server.engine_endpoints` makes HTTP of it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError
from infer.server.http.connections import Connections
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError
from infer.server.model_card import model_card
from infer.server.observe.metrics import Metrics, text_of
from infer.server.observe.request_trace import (
    RequestTrace,
    RequestTraces,
    cancel_answer,
    summary,
    the_one,
    view,
)
from infer.server.viewers import EngineViewers


class Asking(NamedTuple):
    """Who asks, and for what."""

    visible_to: str | None
    """id of the key whose requests the caller may see; None = those of all keys"""
    model: str | None
    """the model whose engine is meant; None = all models, or the default one"""
    context: RequestContext


class ServedEngine(NamedTuple):
    """An engine, and what its server knows about it."""

    engine: AsyncLLM
    traces: RequestTraces
    metrics: Metrics
    viewers: EngineViewers


class RequestViews(ABC):
    """See the module's docstring. The answers are JSON values. Lives on the event loop.

    What is said of requests is read from the engines that are `served`; who has others to ask
    overrides it."""

    @abstractmethod
    def served(self, asking: Asking) -> Mapping[str, ServedEngine]:
        """The engines of this process that are meant, by the names of their models."""

    @abstractmethod
    def viewers(self, asking: Asking) -> EngineViewers:
        """Those who watch the engine that is meant. Raises `EngineDeadError` if there is none."""

    @abstractmethod
    async def stats(self, asking: Asking) -> dict[str, Any]:
        """Queue depth, batch sizes, waiting times."""

    @abstractmethod
    def models(self) -> list[dict[str, Any]]:
        """The models."""

    @abstractmethod
    def model(self, name: str) -> dict[str, Any]:
        """The model of a name. Raises `HttpError` (404)."""

    @abstractmethod
    def health(self) -> dict[str, Any]:
        """Raises `EngineDeadError` unless requests are taken and move on."""

    @abstractmethod
    def ready(self) -> dict[str, Any]:
        """Raises `EngineDeadError` unless a request would be worked on at once."""

    async def requests(self, asking: Asking) -> dict[str, Any]:
        """A list: those that run, then the latest that have ended, the newest first."""
        served = self.served(asking).values()
        found = [trace for each in served for trace in each.traces.all(asking.visible_to)]
        return {"object": "list", "data": list(map(summary, sorted(found, key=_newest_first)))}

    async def request(self, asking: Asking, name: str) -> dict[str, Any]:
        """The trace of the request that a name means (see `RequestTraces.named`). Raises
        `HttpError`: 404, or 409 if several run."""
        return view(self._named(asking, name)[1])

    async def cancel(self, asking: Asking, name: str) -> dict[str, Any]:
        """End a request; raises like `request`."""
        traces, trace = self._named(asking, name)
        return cancel_answer(trace, traces.cancel(trace))

    async def metrics(self, asking: Asking, connections: Connections | None) -> bytes:
        """The metrics for Prometheus, with the numbers of connections."""
        return text_of([each.metrics for each in self.served(asking).values()], connections)

    def _named(self, asking: Asking, name: str) -> tuple[RequestTraces, RequestTrace]:
        all_traces = [each.traces for each in self.served(asking).values()]
        found = [
            (traces, trace)
            for traces in all_traces
            for trace in traces.named(name, asking.visible_to)
        ]
        meant = the_one([trace for _, trace in found], name)
        return next(pair for pair in found if pair[1] is meant)


def _newest_first(trace: RequestTrace) -> tuple[bool, float]:
    if trace.ended_s is None:
        return False, -trace.context.received_s
    return True, -trace.ended_s


def model_fields(name: str, created_at: int, engine: AsyncLLM | None) -> dict[str, Any]:
    """A model as `/v1/models` shows it; `engine`: None while it is not loaded."""
    size = None if engine is None else engine.max_seq_len
    defaults = None if engine is None else engine.sampling_defaults.as_dict()
    return model_card(name, created_at, size, sampling_defaults=defaults)


class OneServer(RequestViews):
    """Over the engine of this server."""

    def __init__(self, own: ServedEngine) -> None:
        self._own = own
        self._created_at = int(time.time())

    def served(self, asking: Asking) -> Mapping[str, ServedEngine]:
        """See `RequestViews`."""
        return {self._own.engine.model_name: self._own}

    def viewers(self, asking: Asking) -> EngineViewers:
        """See `RequestViews`."""
        return self._own.viewers

    async def stats(self, asking: Asking) -> dict[str, Any]:
        """See `RequestViews`."""
        return self._own.metrics.stats()

    def models(self) -> list[dict[str, Any]]:
        """See `RequestViews`."""
        engine = self._own.engine
        return [model_fields(engine.model_name, self._created_at, engine)]

    def model(self, name: str) -> dict[str, Any]:
        """See `RequestViews`."""
        (model,) = self.models()
        if name != model["id"]:
            message = "there is no such model here"
            raise HttpError(404, message, param="model", code="model_not_found")
        return model

    def health(self) -> dict[str, Any]:
        """See `RequestViews`."""
        if not self._own.engine.is_live:
            raise EngineDeadError("the engine is not running, or makes no progress")
        return {"status": "ok"}

    def ready(self) -> dict[str, Any]:
        """See `RequestViews`."""
        if not self._own.engine.is_ready:
            raise EngineDeadError("the engine is not ready")
        return {"status": "ready"}
