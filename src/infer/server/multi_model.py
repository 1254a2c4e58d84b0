"""`ModelRouter`: several models behind one address, each with an engine and an app of its own.

A request's `model` decides which app answers it. A GET has it in the query, and the first model is
the default. Requests and metrics are listed for all models. Engines are loaded one at a time, at
the start or for their first request, and unloaded when they are idle. A model that cannot be
loaded, or whose engine crashes, is a 503 for its own requests and changes nothing for the others.
`serve.Server` uses a router as it uses an engine.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError, LoadError, OverloadedError
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError, error_handlers
from infer.server.offload import PARSED, Offload
from infer.server.request_views import (
    RequestViews,
    ServedEngine,
    check_stays,
    model_fields,
    model_list,
    model_of,
)
from infer.server.route_table import routes_of
from infer.server.settings import ServerSettings
from infer.server.viewers import EngineViewers
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

log = logging.getLogger("infer.server")


@dataclass(eq=False)
class _Model:
    """A model's name, and its engine and app while they are loaded."""

    name: str
    launch: Callable[[], AsyncLLM]
    engine: AsyncLLM | None = None
    app: Starlette | None = None
    used_s: float = 0.0
    refused_until_s: float = 0.0
    reason: str = ""
    """Why it could not be loaded, without the folders of this machine; "" where it could or was not
    tried."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The lock that loading and unloading hold."""

    @property
    def status(self) -> str:
        if self.engine is not None:
            return "loaded" if self.engine.is_ready else "restarting"
        if self.changing.locked():
            return "loading"
        return "failed" if self.reason else "unloaded"

    def not_loaded(self) -> EngineDeadError:
        """The error of a request for a model that could not be loaded."""
        return EngineDeadError(f"the model {self.name!r} could not be loaded: {self.reason}")


class _Loader:
    """One thread that launches engines, one after the other.

    It lives as long as they do, because the system ends an engine's process with the thread that
    started it. The end of the program does not wait for it, because a load may hang.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[AsyncLLM], Callable[[], AsyncLLM]]] = (
            queue.SimpleQueue()
        )
        threading.Thread(target=self._run, name="infer-load", daemon=True).start()

    def submit(self, launch: Callable[[], AsyncLLM]) -> Future[AsyncLLM]:
        """The future result of `launch`, which is called in the thread when its turn comes."""
        future: Future[AsyncLLM] = Future()
        self._queue.put((future, launch))
        return future

    def _run(self) -> None:
        while True:
            future, launch = self._queue.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(launch())
                except BaseException as error:
                    future.set_exception(error)
            del future, launch


class ModelRouter(RequestViews):
    """See the module's docstring."""

    def __init__(
        self,
        launches: Mapping[str, Callable[[], AsyncLLM]],
        make_app: Callable[[AsyncLLM], Starlette],
        *,
        idle_unload_s: float | None = None,
        end_loads: Callable[[], None] = lambda: None,
        limits: ServerLimits = SERVER_LIMITS,
        unknown_model_statuses: Mapping[str, int] | None = None,
    ) -> None:
        """`launches` load the models by name, in a thread. `make_app` makes the app over an engine,
        without `RequestBoundary`. `end_loads` makes a launch that is running in another thread
        raise `LoadError`. `idle_unload_s` is the time after which an idle model is unloaded; None:
        never. `unknown_model_statuses` are the statuses of requests for an unknown model, by path;
        404 where a path is not named."""
        self._models = {name: _Model(name, launch) for name, launch in launches.items()}
        self._settings: ServerSettings | None = None
        """those that `apply` was given last"""
        self._make_app = make_app
        self._idle_unload_s = idle_unload_s
        self._loader = _Loader()
        self._end_loads = end_loads
        self._unknown_model_statuses = unknown_model_statuses or {}
        self._ending = asyncio.Event()
        """Set when the server ends; from then on nothing is loaded."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._limits = limits
        self._pool = Offload(limits)
        self._created = int(time.time())
        self._draining = False

    # ---- what `serve.Server` uses of an engine

    @property
    def model_name(self) -> str:
        """The names of all models."""
        return ", ".join(self._models)

    @property
    def announcement(self) -> tuple[str, str]:
        """The names of what is served, and what the start says of the others, with the reasons."""
        failed = [
            f"{model.name} ({model.reason})" for model in self._models.values() if model.reason
        ]
        served = ", ".join(model.name for model in self._models.values() if not model.reason)
        return served, "".join(f"; not {each}" for each in failed)

    @property
    def num_open(self) -> int:
        """The number of requests that run in all engines."""
        return sum(engine.num_open for engine in self.engines())

    def drain(self) -> None:
        """Let running requests finish, and refuse new ones."""
        self._draining = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)
        for engine in self.engines():
            engine.drain()

    async def close(self) -> None:
        """End running requests with an error, then stop the engines."""
        self._draining = True
        self._ending.set()
        await asyncio.to_thread(self._end_loads)
        await asyncio.gather(*[engine.close() for engine in self.engines()])

    def engines(self) -> list[AsyncLLM]:
        """The engines that are loaded."""
        return [model.engine for model in self._models.values() if model.engine is not None]

    def apply(self, settings: ServerSettings) -> None:
        """Take the live settings, for the models that are loaded later too."""
        self._settings = settings
        for model in self._models.values():
            if model.app is not None:
                model.app.state.apply(settings)

    # ---- loading and unloading

    def load_all(self, note: Callable[[str, str], None] = lambda name, status: None) -> None:
        """Load all models before the server starts. Raises `LoadError` if none can be loaded.
        `note`: told the name and the status of each that has been tried."""
        errors = []
        for model in self._models.values():
            try:
                model.engine = self._loader.submit(model.launch).result()
            except LoadError as error:
                errors.append(error)
                self._note_failure(model, error)
            note(model.name, "loaded" if model.engine is not None else model.status)
        if len(errors) == len(self._models):
            raise errors[0]

    def _note_failure(self, model: _Model, error: LoadError) -> None:
        log.error("the model %r cannot be loaded: %s", model.name, error)
        model.refused_until_s = time.monotonic() + self._limits.retry_load_s
        model.reason = public_reason(error)

    async def _app_of(self, model: _Model) -> Starlette:
        model.used_s = time.monotonic()
        if model.app is not None:
            return model.app
        async with model.changing:
            if model.app is None:
                await self._load(model)
            model.used_s = time.monotonic()
            assert model.app is not None
            return model.app

    async def _load(self, model: _Model) -> None:
        if self._draining:
            raise EngineDeadError("the server is shutting down")
        if time.monotonic() < model.refused_until_s:
            raise model.not_loaded()
        loading = asyncio.wrap_future(self._loader.submit(model.launch))
        ending = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((loading, ending), return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                await asyncio.to_thread(self._end_loads)
                raise EngineDeadError("the server is shutting down")
            engine = loading.result()
        except LoadError as error:
            self._note_failure(model, error)
            raise model.not_loaded() from None
        finally:
            ending.cancel()
            if not loading.done():
                loading.add_done_callback(_forget)
        await self._begin(model, engine)

    async def _begin(self, model: _Model, engine: AsyncLLM) -> None:
        engine.model_name = model.name
        # In a thread: an app renders the public prefixes with the model's chat template.
        app = await asyncio.to_thread(self._make_app, engine)
        await engine.start()
        if self._draining:
            await engine.close()
        if self._settings is not None:
            app.state.apply(self._settings)
        model.engine, model.app = engine, app
        model.reason = ""

    async def _unload_idle(self, after_s: float) -> None:
        while True:
            await asyncio.sleep(min(1.0, after_s / 4))
            now_s = time.monotonic()
            for model in self._models.values():
                engine = model.engine
                if engine is None or model.changing.locked():
                    continue
                if engine.num_open:
                    model.used_s = now_s
                elif now_s - model.used_s >= after_s:
                    async with model.changing:
                        self._save_usage(model)
                        model.engine = model.app = None
                        await engine.close()
                    log.info("the model %r is unloaded", model.name)

    def _save_usage(self, model: _Model) -> None:
        if model.app is not None:
            model.app.state.metrics.save()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        for model in self._models.values():
            if model.engine is not None:
                model.used_s = time.monotonic()
                await self._begin(model, model.engine)
        idle_s = self._idle_unload_s
        unloading = None if idle_s is None else asyncio.create_task(self._unload_idle(idle_s))
        try:
            yield
        finally:
            if unloading is not None:
                unloading.cancel()
            await self.close()
            for model in self._models.values():
                self._save_usage(model)
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
        model = self._models.get(context.model) or self._find(None)
        if model.app is not None:
            model.app.state.metrics.seen(context)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name = request.query_params.get("model")
        if scope["method"] == "POST" and "content-type" in request.headers:
            scope[PARSED] = body = await self._pool.read_object(request)
            name = body.get("model", name)
        model = self._find(name, self._unknown_model_statuses.get(request.url.path, 404))
        RequestContext.of(scope).model = model.name
        app = await self._app_of(model)
        await app(scope, receive, send)

    def _find(self, name: Any, unknown_status: int = 404) -> _Model:
        if name is None:
            return next(iter(self._models.values()))
        if not isinstance(name, str) and unknown_status != 404:
            message = "model must be a string"
            raise HttpError(400, message, param="model", code="invalid_type")
        if not isinstance(name, str) or name not in self._models:
            message = f"there is no such model here; this server has {self.model_name}"
            raise HttpError(unknown_status, message, param="model", code="model_not_found")
        return self._models[name]

    # ---- as `RequestViews`

    def served(self, http: Request) -> dict[str, ServedEngine]:
        """The loaded ones. Raises `HttpError` (404) for an unknown model."""
        named = [self._find(name) for name in (model_of(http),) if name is not None]
        models = named or self._models.values()
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
        stats = {name: each.metrics.stats() for name, each in self.served(http).items()}
        return stats.get(model_of(http) or "", {"models": stats})

    async def models(self, http: Request) -> dict[str, Any]:
        return model_list(list(map(self._shown, self._models.values())))

    async def model(self, http: Request) -> dict[str, Any]:
        return self._shown(self._find(http.path_params["name"]))

    def _shown(self, model: _Model) -> dict[str, Any]:
        fields = model_fields(model.name, self._created, model.engine)
        return {**fields, "status": model.status, "reason": model.reason or None}

    async def health(self, http: Request) -> dict[str, Any]:
        engines = self.engines()
        if len(engines) == len(self._models) and not any(engine.is_live for engine in engines):
            raise EngineDeadError("no engine is running")
        return {"status": "ok"}

    async def ready(self, http: Request) -> dict[str, Any]:
        """Ready as long as any model can answer: one that crashed must not keep requests from the
        others. /v1/models has the state of each model."""
        check_stays(http)
        statuses = {model.name: model.status for model in self._models.values()}
        if self._draining or not {"loaded", "unloaded"} & set(statuses.values()):
            raise EngineDeadError("no model is ready")
        return {"status": "ready", "models": statuses}


def public_reason(error: LoadError) -> str:
    """The message of an error for callers: one line of at most 300 characters, in which paths have
    their last part only."""
    text = " ".join(str(error).split())
    text = re.sub(r"[^\s'\"(]*[\\/](?=[^\s\\/])", "", text.replace("owner/name", "owner\0name"))
    return text.replace("\0", "/")[:300]


def _forget(loading: asyncio.Future[AsyncLLM]) -> None:
    """Take the result of a load that nobody waits for, so that its error is not logged."""
    if not loading.cancelled():
        loading.exception()
