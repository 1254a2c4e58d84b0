"""`create_app`: the ASGI app over an engine: all endpoints on their paths, and the layers around

The endpoints are rows of `server.route_table`. Errors are raised, never rendered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.middleware import Middleware

from infer.engine.client.async_llm import AsyncLLM
from infer.server.body_reader import BodyReader
from infer.server.fronts import FrontQueries, SeveralFronts
from infer.server.generation import GenerationPipeline
from infer.server.http.context import RequestContext
from infer.server.http.cross_origin import AllowedOrigins
from infer.server.http.error_responses import RequestBoundary, error_handlers, pass_on
from infer.server.http.hosts import HostGuard
from infer.server.kept_answers import KeptAnswers
from infer.server.mcp.mcp_endpoints import McpEndpoints
from infer.server.model_endpoints import ModelEndpoints
from infer.server.observe.key_usage import usage_file
from infer.server.observe.logs import log_batch, log_request
from infer.server.observe.metrics import Metrics
from infer.server.observe.request_trace import RequestTraces
from infer.server.observe.spans import make_tracing
from infer.server.offload import Offload
from infer.server.openai.generating_api import GeneratingApi
from infer.server.request_views import OneServer, ServedEngine
from infer.server.route_table import generating_apis, routes_of
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.store import Quota
from infer.server.sessions.stored_responses import StoredResponses
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Keys
from infer.server.tenancy.limits import AuthMiddleware
from infer.server.tenancy.open_grammars import OpenGrammars
from infer.server.tenancy.shared_prefixes import PublicPrefixes
from infer.server.ui.page import Page, PageLayer
from infer.server.viewers import EngineViewers


def layers(
    settings: ServerSettings,
    on_end: Sequence[Callable[[RequestContext], None]] = (),
    model: str = "",
    page: Page | None = None,
    fronts: SeveralFronts | None = None,
) -> list[Middleware]:
    """What is around an app, from the outside in. `model`: name of the only one, if it is; `page`:
    for browsers, None = there is none. `fronts`: see `create_app`."""
    middleware = [
        Middleware(
            RequestBoundary,
            write_stall_s=settings.write_stall_s,
            on_end=(*on_end, log_request),
            model=model,
            id_prefix=fronts.tag if fronts else "",
            ignores_unknown=settings.unknown_params == "ignore",
        )
    ]
    middleware.append(
        Middleware(
            HostGuard,
            has_keys=settings.api_keys is not None,
            hosts=settings.hosts,
            origins=settings.origins,
        )
    )
    if settings.origins:
        middleware.append(Middleware(AllowedOrigins, origins=settings.origins))
    if page is not None:
        middleware.append(Middleware(PageLayer, page=page))
    keys = Keys(Path(settings.api_keys)) if settings.api_keys else None
    limits = fronts.limits if fronts else None
    return [*middleware, Middleware(AuthMiddleware, keys=keys, limits=limits)]


def create_app(
    engine: AsyncLLM,
    settings: ServerSettings | None = None,
    *,
    generating: Sequence[GeneratingApi[Any]] | None = None,
    is_inner: bool = False,
    page: Page | None = None,
    fronts: SeveralFronts | None = None,
) -> Starlette:
    """The ASGI app over `engine`, which must not have been started: the app does that, and closes
    it at the end. There are no paths but the ones below, those of `generating` and those of `page`,
    and no redirects. By default the settings choose the formats of `GENERATING`. `is_inner`:
    another app around this one has the outer layers, and starts and ends the engine. `fronts`: this
    one among several servers of the same engines."""
    settings = settings or ServerSettings()
    generating = generating_apis(settings) if generating is None else generating
    offload = Offload(settings.limits)
    traces = _traces(engine, settings)
    metrics = _metrics(engine, traces, settings)
    kept = KeptAnswers(settings.keep_answers_s, settings.limits)
    served = ServedEngine(engine, traces, metrics, EngineViewers(engine, traces), kept)
    sessions = _sessions(settings, offload, has_leases=fronts is not None)
    bodies = BodyReader(offload, engine.model_name)
    prefixes = PublicPrefixes(settings.public_prefixes, engine)
    responses = StoredResponses(sessions, offload)
    mcp = McpEndpoints(offload, bodies, settings)
    shared = (engine, offload, bodies, traces, prefixes, sessions, responses, kept)
    pipeline = GenerationPipeline(*shared, OpenGrammars(settings.limits), settings)
    views = OneServer(served) if fronts is None else FrontQueries(served, fronts)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            async with _shared_limits(fronts, settings):
                yield
        finally:
            await engine.close()
            metrics.save()
            kept.close()
            await sessions.close()
            mcp.close()
            offload.close()

    of_model = ModelEndpoints(engine, offload, bodies, sessions, responses, settings)
    rest = routes_of(views, offload, of_model, sessions, responses, mcp)
    outer = layers(settings, (metrics.seen,), engine.model_name, page, fronts)
    app = Starlette(
        routes=[*map(pipeline.route, generating), *rest],
        exception_handlers={**error_handlers(settings.status_when_full), Exception: pass_on},
        middleware=[] if is_inner else outer,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    paths, apply = frozenset(api.path for api in generating), partial(_apply, pipeline, sessions)
    state = {"served": served, "metrics": metrics, "traces": traces, "views": views}
    app.state = State({**state, "apply": apply, "generating_paths": paths})
    return app


def _metrics(engine: AsyncLLM, traces: RequestTraces, settings: ServerSettings) -> Metrics:
    usage = usage_file(Path(settings.api_keys)) if settings.api_keys else None
    return Metrics(engine, traces, settings.metrics_prefix, usage, settings.limits)


@asynccontextmanager
async def _shared_limits(
    fronts: SeveralFronts | None, settings: ServerSettings
) -> AsyncIterator[None]:
    """While the block runs, the limits of keys are those of all fronts together, if there are some
    of both."""
    if fronts is None or settings.api_keys is None:
        yield
        return
    fronts.limits.start()
    try:
        yield
    finally:
        await fronts.limits.close()


def _apply(pipeline: GenerationPipeline, sessions: SessionRoutes, now: ServerSettings) -> None:
    """Take the live settings."""
    pipeline.apply(now)
    sessions.set_quota(_quota(now))


def _sessions(settings: ServerSettings, offload: Offload, *, has_leases: bool) -> SessionRoutes:
    url, limits = settings.sessions, settings.limits
    return SessionRoutes(url, offload, _quota(settings), limits, has_leases=has_leases)


def _quota(settings: ServerSettings) -> Quota:
    return Quota(settings.max_sessions, settings.max_session_messages, settings.max_session_bytes)


def _traces(engine: AsyncLLM, settings: ServerSettings) -> RequestTraces:
    traces = RequestTraces(engine, settings.limits)
    traces.on_batch_end.append(partial(log_batch, engine.model_name))
    if settings.tracing:
        traces.on_end.append(make_tracing(engine.model_name))
    return traces
