"""`ModelRouter`: several models behind one address, each with an engine and an app of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError, InferError, OverloadedError
from infer.server.early_stream import EarlyStream
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError, describe, error_handlers
from infer.server.loaded_models import HeldModel, LoadedModels
from infer.server.offload import PARSED, Offload
from infer.server.openai.streaming import unless_gone
from infer.server.request_views import (
    LoadBody,
    RequestViews,
    ServedEngine,
    UnloadBody,
    check_stays,
    model_fields,
    model_list,
    model_of,
)
from infer.server.route_table import routes_of
from infer.server.settings import ServerSettings
from infer.server.viewers import EngineViewers

MAX_LISTED = 20
"""Models that an error names."""


class ModelRouter(RequestViews):
    """A request's `model` decides which app answers it. A GET has it in the query, and the first
    model is the default. Requests and metrics are listed for all models.
    `loaded_models.LoadedModels` loads and unloads the engines. A model that cannot be loaded, or
    whose engine crashes, is a 503 for its own requests and changes nothing for the others.
    `serve.Server` uses a router as it uses an engine."""

    def __init__(
        self,
        models: LoadedModels,
        *,
        unknown_model_statuses: Mapping[str, int] | None = None,
        drain_timeout_s: float = ServerSettings.drain_timeout_s,
        waits: bool = True,
        keep_alive_s: float = ServerSettings.keep_alive_s,
        stays: str = "",
    ) -> None:
        """`unknown_model_statuses` are the statuses of requests for an unknown model, by path; 404
        where a path is not named. `drain_timeout_s`: seconds that the requests of a model have
        which is unloaded by force. `waits`: whether a request for a model that is not loaded waits
        until it is, or else is refused. `keep_alive_s`: seconds of waiting after which a stream is
        sent a comment; 0: never. `stays`: why no model may be unloaded; "": each may."""
        self._models = models
        self._waits = waits
        self._stays = stays
        self._keep_alive_s = keep_alive_s
        self._unknown_model_statuses = unknown_model_statuses or {}
        self._drain_timeout_s = drain_timeout_s
        self._pool = Offload(models.limits)
        self._created = int(time.time())

    # ---- what `serve.Server` uses of an engine

    @property
    def model_name(self) -> str:
        """The names of all models."""
        return ", ".join(model.name for model in self._models.all())

    @property
    def announcement(self) -> tuple[str, str]:
        """The names of what is served, and what the start says of the others, with the reasons."""
        models = self._models.all()
        failed = [f"{model.name} ({model.reason})" for model in models if model.reason]
        served = ", ".join(model.name for model in models if not model.reason)
        return served or "no model yet", "".join(f"; not {failure}" for failure in failed)

    @property
    def num_open(self) -> int:
        """The number of requests that run in all engines."""
        return sum(engine.num_open for engine in self.engines())

    def drain(self) -> None:
        """Let running requests finish, and refuse new ones."""
        self._models.drain()

    async def close(self) -> None:
        """End running requests with an error, then stop the engines."""
        await self._models.close()

    def engines(self) -> list[AsyncLLM]:
        """The engines that are loaded."""
        return self._models.engines()

    def apply(self, settings: ServerSettings) -> None:
        """Take the live settings, for the models that are loaded later too."""
        self._drain_timeout_s = settings.drain_timeout_s
        self._keep_alive_s = settings.keep_alive_s
        self._models.apply(settings)

    def load_all(self, note: Callable[[str, str], None] = lambda name, status: None) -> None:
        """Load all models before the server starts; see `LoadedModels.load_all`."""
        self._models.load_all(note)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._models.begin()
        try:
            yield
        finally:
            await self._models.end()
            self._pool.close()

    # ---- answering

    def make_app(
        self, layers: list[Middleware], overload_status: int = OverloadedError.status
    ) -> Starlette:
        """The ASGI app over all models, with `layers` around it. `overload_status`: see
        `http.error_responses.describe`."""
        app = Starlette(
            routes=[*routes_of(self, self._pool), Mount("/", self._pass_on)],
            exception_handlers=error_handlers(overload_status),
            middleware=layers,
            lifespan=self._lifespan,
        )
        app.state.views, app.state.apply = self, self.apply
        return app

    def seen(self, context: RequestContext) -> None:
        """Count an HTTP request that has ended.

        The metrics of its model count it, or those of the default model where it had none yet.
        """
        model = self._models.known(context.model) or next(iter(self._models.all()), None)
        if model is not None and model.app is not None:
            model.app.state.metrics.seen(context)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = request.query_params.get("model")
        if scope["method"] == "POST" and "content-type" in request.headers:
            scope[PARSED] = body = await self._pool.read_object(request)
            name = body.get("model", name)
        model = await self._look_for(name, self._unknown_model_statuses.get(request.url.path, 404))
        if PARSED in scope and "model" in scope[PARSED]:
            scope[PARSED] = {**scope[PARSED], "model": model.name}  # an alias is known here only
        RequestContext.of(scope).model = model.name
        if not (self._waits or model.is_at_hand or self._models.is_draining):
            raise self._models.begin_load(model)
        is_stream = scope.get(PARSED, {}).get("stream") is True
        if is_stream and not model.is_at_hand and request.url.path in self._unknown_model_statuses:
            await self._stream(model, request, send)
            return
        app = await self._models.app_of(model)
        with model.in_use():
            await app(scope, receive, send)

    async def _stream(self, model: HeldModel, request: Request, send: Send) -> None:
        """Load the model, and answer; comments are sent meanwhile."""
        context = RequestContext.of(request.scope)
        is_anthropic = request.url.path.startswith("/v1/messages")
        early = EarlyStream(send, context.id, is_anthropic=is_anthropic)
        try:
            app = await unless_gone(request.receive, self._loaded(model, early))
            while app is not model.app or model.is_leaving:  # it was unloaded before we came on
                app = await unless_gone(request.receive, self._loaded(model, early))
        except InferError as error:
            if not early.has_begun:
                raise
            response = describe(error)
            await early.fail(response.status_code, bytes(response.body))
            return
        with model.in_use():
            await app(request.scope, request.receive, early)

    async def _loaded(self, model: HeldModel, early: EarlyStream) -> Starlette:
        loading = self._models.loading(model)
        while not loading.done():
            await asyncio.wait((loading,), timeout=self._keep_alive_s or None)
            if not loading.done():
                await early.mention(f"the model {model.name} is being loaded")
        return loading.result()

    async def _look_for(self, name: Any, unknown_status: int = 404) -> HeldModel:
        """As `_find`, but where a name is not known the folder of models is looked at again."""
        is_known = isinstance(name, str) and self._models.known(name) is not None
        if not is_known and (isinstance(name, str) or not self._models.all()):
            await self._models.refresh()
        return self._find(name, unknown_status)

    def _find(self, name: Any, unknown_status: int = 404) -> HeldModel:
        if name is None and (models := self._models.all()):
            return models[0]
        if not isinstance(name, str) and unknown_status != 404:
            message = "model must be a string"
            raise HttpError(400, message, param="model", code="invalid_type")
        model = self._models.known(name) if isinstance(name, str) else None
        if model is None:
            message = f"there is no such model here; this server has {self._listed()}"
            raise HttpError(unknown_status, message, param="model", code="model_not_found")
        return model

    def _listed(self) -> str:
        names = [model.name for model in self._models.all()]
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
        return (", ".join(names[:MAX_LISTED]) or "none yet") + more

    # ---- as `RequestViews`

    def served(self, http: Request) -> dict[str, ServedEngine]:
        """The loaded ones. Raises `HttpError` (404) for an unknown model."""
        named = [self._find(name) for name in (model_of(http),) if name is not None]
        models = named or self._models.all()
        return {model.name: model.app.state.served for model in models if model.app is not None}

    def viewers(self, http: Request) -> EngineViewers:
        """Watching does not load a model."""
        model = self._find(model_of(http))
        RequestContext.of(http.scope).model, model.used_s = model.name, time.monotonic()
        if model.app is None:
            raise EngineDeadError(f"the model {model.name!r} is not loaded: there are no steps")
        served: ServedEngine = model.app.state.served
        return served.viewers

    async def stats(self, http: Request) -> dict[str, Any]:
        """Of each model, or of the one that is named."""
        stats = {name: served.metrics.stats() for name, served in self.served(http).items()}
        named = model_of(http)
        name = "" if named is None else self._find(named).name
        return stats.get(name, {"models": stats})

    async def models(self, http: Request) -> dict[str, Any]:
        await self._models.refresh()
        return model_list(list(map(self._shown, self._models.all())))

    async def model(self, http: Request) -> dict[str, Any]:
        return self._shown(await self._look_for(http.path_params["name"]))

    def _shown(self, model: HeldModel) -> dict[str, Any]:
        fields = model_fields(model.name, self._created, model.engine)
        aliases = self._models.aliases_of(model)
        how = {"status": model.status, "reason": model.reason or None, "aliases": aliases}
        return {**fields, **how}

    async def load_model(self, http: Request, wire: LoadBody) -> dict[str, Any]:
        model = await self._look_for(wire.model)
        await self._models.load(model)
        return self._shown(model)

    async def unload_model(self, http: Request, wire: UnloadBody) -> dict[str, Any]:
        model = self._find(wire.model)
        if self._stays:
            raise HttpError(409, self._stays, param="model", code="model_stays")
        await self._models.unload(model, wire.force, self._drain_timeout_s)
        return self._shown(model)

    async def health(self, http: Request) -> dict[str, Any]:
        engines = self.engines()
        if len(engines) == len(self._models.all()) and not any(
            engine.is_live for engine in engines
        ):
            raise EngineDeadError("no engine is running")
        return {"status": "ok"}

    async def ready(self, http: Request) -> dict[str, Any]:
        """Ready as long as any model can answer: one that crashed must not keep requests from the
        others. So can one whose requests wait until it is loaded: else the first of them, or an
        unload, would have proxies leave. /v1/models has the state of each model."""
        check_stays(http)
        if not self._models.all():
            await self._models.refresh()
        statuses = {model.name: model.status for model in self._models.all()}
        can_answer = {"loaded", "unloaded"} | ({"loading", "unloading"} if self._waits else set())
        if self._models.is_draining or not can_answer & set(statuses.values()):
            raise EngineDeadError("no model is ready")
        return {"status": "ready", "models": statuses}
