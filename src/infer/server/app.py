"""`create_app`: all endpoints on their paths; and the endpoints that do not generate.

`GENERATING` has a row for each endpoint that generates; `server.generation` serves them. Errors are
raised, never rendered. The endpoints that ask the tokenizer have vLLM's formats, because load
generators and evaluation harnesses use them in place of a tokenizer of their own. So control tokens
written in a text are control tokens there, other than in a prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError, UnprocessableError
from infer.server.body_reader import BodyReader
from infer.server.comparisons import Comparisons
from infer.server.engine_endpoints import EngineEndpoints
from infer.server.fronts import FrontEndpoints, FrontQueries, SeveralFronts
from infer.server.generation import GenerationPipeline
from infer.server.http.connections import connections_of
from infer.server.http.context import RequestContext
from infer.server.http.cross_origin import AllowedOrigins
from infer.server.http.error_responses import HttpError, RequestBoundary, error_handlers, pass_on
from infer.server.http.hosts import HostGuard
from infer.server.observe.logs import log_batch, log_request
from infer.server.observe.metrics import CONTENT_TYPE, Metrics, text_of
from infer.server.observe.request_trace import RequestTraces
from infer.server.observe.spans import make_tracing
from infer.server.offload import NUM_BYTES, Offload
from infer.server.openai.chat import ChatApi, ChatBody, plain_messages, rendered_chat
from infer.server.openai.completions import CompletionsApi
from infer.server.openai.generating_api import GeneratingApi
from infer.server.openai.large_json import json_response, render
from infer.server.openai.openapi import document, each, takes
from infer.server.openai.schema import Body, DetokenizeBody, TokenizeBody, TokenizeChatBody
from infer.server.openai.typed_completions import TypedCompletionsApi
from infer.server.request_endpoints import cancelled, listed, shown
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.store import Quota
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Keys
from infer.server.tenancy.limits import AuthMiddleware, tenant_of
from infer.server.tenancy.shared_prefixes import PublicPrefixes
from infer.server.ui.page import Page, PageLayer
from infer.server.viewers import EngineViewers
from infer.text.untrusted.workers import Steps

W = TypeVar("W", bound=Body)

GENERATING: tuple[GeneratingApi[Any], ...] = (CompletionsApi(), ChatApi())
"""the endpoints that generate"""
_BYTES_AN_ID = 8
"""size of a token id in an answer, about"""
_BYTES_A_REQUEST = 500
"""size of a request in a list, about"""


def generating_apis(settings: ServerSettings) -> tuple[GeneratingApi[Any], ...]:
    """The rows of `GENERATING`, in the formats that the settings choose."""
    if settings.completions_api == "openai":
        return GENERATING
    return tuple(
        TypedCompletionsApi() if isinstance(api, CompletionsApi) else api for api in GENERATING
    )


def unknown_model_statuses(settings: ServerSettings) -> dict[str, int]:
    """The status of a body that names an unknown model, by the path of the endpoint."""
    return {api.path: api.body.unknown_model_status for api in generating_apis(settings)}


class Endpoints:
    """What the paths lead to: the engine, and what is known about its requests."""

    def __init__(
        self,
        engine: AsyncLLM,
        offload: Offload,
        settings: ServerSettings,
        fronts: SeveralFronts | None = None,
    ) -> None:
        self._engine = engine
        self._offload = offload
        self._settings = settings
        self._bodies = BodyReader(offload, engine.model_name)
        self.traces = RequestTraces(engine, settings.limits)
        self.traces.on_batch_end.append(partial(log_batch, engine.model_name))
        if settings.tracing:
            self.traces.on_end.append(make_tracing(engine.model_name))
        quota = Quota(
            settings.max_sessions, settings.max_session_messages, settings.max_session_bytes
        )
        self.sessions = SessionRoutes(
            settings.sessions, offload, quota, settings.limits, has_leases=fronts is not None
        )
        self.generation = GenerationPipeline(
            engine,
            offload,
            self._bodies,
            self.traces,
            PublicPrefixes(settings.public_prefixes, engine),
            self.sessions,
            settings,
        )
        self.about_engine = EngineEndpoints(
            EngineViewers(engine, self.traces), Comparisons(engine), self._bodies
        )
        usage = Path(f"{settings.api_keys}.usage") if settings.api_keys else None
        self.metrics = Metrics(engine, self.traces, settings.metrics_prefix, usage, settings.limits)
        self.desk: FrontEndpoints | None = None
        self._fronts: FrontQueries | None = None
        if fronts is not None:
            self.desk = FrontEndpoints(fronts.tag, self.traces, self.metrics)
            self._fronts = FrontQueries(fronts, self.desk)
        self._started = int(time.time())
        self._document: asyncio.Task[bytes] | None = None
        """makes the OpenAPI document, once somebody has asked for it"""

    # ---- asking about requests

    async def requests(self, http: HttpRequest) -> Response:
        """The requests that run, and the latest that have ended."""
        if self._fronts is not None:
            return await self._of_all(http, self._fronts.requests(tenant_of(http.scope).visible_to))
        return listed([self.traces], http)

    @takes(refuses=(409,))
    async def request(self, http: HttpRequest) -> Response:
        """The trace of one, by its id or its client's X-Request-Id: what it waited for, and why."""
        if self._fronts is not None:
            return await self._of_one(http, self._fronts, "request")
        return shown([self.traces], http)

    @takes(refuses=(409,))
    async def cancel(self, http: HttpRequest) -> Response:
        """End one."""
        if self._fronts is not None:
            return await self._of_one(http, self._fronts, "cancel")
        return cancelled([self.traces], http)

    async def _of_one(
        self, http: HttpRequest, fronts: FrontQueries, kind: Literal["request", "cancel"]
    ) -> Response:
        visible_to = tenant_of(http.scope).visible_to
        return JSONResponse(await fronts.one(kind, http.path_params["id"], visible_to))

    async def _of_all(self, http: HttpRequest, asking: Awaitable[dict[str, Any]]) -> Response:
        """An answer made of those of all fronts, which may be long."""
        fields = await asking
        num_bytes = _BYTES_A_REQUEST * len(fields.get("data", ()))
        return await self._offload.render(http, num_bytes, json_response, fields)

    # ---- asking the tokenizer

    @takes(ChatBody, refuses=(404,))
    async def render(self, http: HttpRequest) -> Response:
        """The prompt that a chat would become, as text and token ids."""
        body = await self._bodies.read_object(http)
        await self.sessions.show(http, body)
        return await self._ask_tokenizer(http, body, ChatBody, self._rendered)

    @takes(TokenizeBody, TokenizeChatBody)
    async def tokenize(self, http: HttpRequest) -> Response:
        """Text or messages to token ids."""
        body = await self._bodies.read_object(http)
        if body.get("messages") is None:
            return await self._ask_tokenizer(http, body, TokenizeBody, self._tokenized)
        return await self._ask_tokenizer(http, body, TokenizeChatBody, self._tokenized_chat)

    @takes(DetokenizeBody)
    async def detokenize(self, http: HttpRequest) -> Response:
        """Token ids to text."""
        body = await self._bodies.read_object(http)
        return await self._ask_tokenizer(http, body, DetokenizeBody, self._detokenized)

    async def _ask_tokenizer(
        self,
        http: HttpRequest,
        body: dict[str, Any],
        model: type[W],
        work: Callable[[W], Steps[dict[str, Any]]],
    ) -> Response:
        """Answer a body with what `work` makes of it. It counts towards the key's tokens, by the
        size of the body."""
        wire = await self._bodies.validate(http, model, body)
        num_bytes = http.scope.get(NUM_BYTES, 0)
        tenant, context = tenant_of(http.scope), RequestContext.of(http.scope)
        await tenant.charge_chars(num_bytes, context)
        heavy = isinstance(wire, ChatBody) and wire.is_heavy
        fields = await self._offload.run_steps(http, work, wire, heavy=heavy)
        if isinstance(wire, ChatBody):
            context.headers += wire.answer_headers
        num_ids = len(fields.get("token_ids", fields.get("tokens", ())))
        num_bytes = len(fields.get("prompt", "")) + _BYTES_AN_ID * num_ids
        return await self._offload.render(http, num_bytes, json_response, fields)

    def _rendered(self, wire: ChatBody) -> Steps[dict[str, Any]]:
        prompt, ids = yield from rendered_chat(self._engine, wire)
        size = self._engine.max_seq_len
        fields = {"prompt": prompt, "token_ids": ids, "count": len(ids), "max_model_len": size}
        return fields | wire.dropped.usage

    def _tokenized(self, wire: TokenizeBody) -> Steps[dict[str, Any]]:
        yield from ()
        ids = self._engine.tokenizer.encode(
            wire.prompt,
            add_special_tokens=wire.add_special_tokens,
            parse_special_tokens=wire.parse_special_tokens,
        )
        return self._tokens(ids, wire.return_token_strs)

    def _tokenized_chat(self, wire: TokenizeChatBody) -> Steps[dict[str, Any]]:
        ids = yield from self._engine.render_chat(plain_messages(wire), **wire.template_arguments)
        return self._tokens(ids, wire.return_token_strs)

    def _tokens(self, ids: list[int], has_pieces: bool) -> dict[str, Any]:
        pieces = list(map(self._engine.tokenizer.token_piece, ids)) if has_pieces else None
        size = self._engine.max_seq_len
        return {"count": len(ids), "max_model_len": size, "tokens": ids, "token_strs": pieces}

    def _detokenized(self, wire: DetokenizeBody) -> Steps[dict[str, Any]]:
        yield from ()
        size = self._engine.vocab_size
        for token_id in wire.tokens:
            if not 0 <= token_id < size:
                message = f"token id {token_id} is outside the vocabulary (0 to {size - 1})"
                raise UnprocessableError(message, param="tokens")
        return {"prompt": self._engine.tokenizer.decode(wire.tokens, skip_special_tokens=False)}

    async def tokenizer_info(self, _: HttpRequest) -> Response:
        """The special tokens and the chat template."""
        tokenizer = self._engine.tokenizer
        template = tokenizer.chat_template
        return JSONResponse(
            {
                "tokenizer_class": tokenizer.tokenizer_class or "PreTrainedTokenizerFast",
                **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token")),
                **tokenizer.named_tokens,
                "chat_template": template.source if template else None,
            }
        )

    # ---- what there is

    async def models(self, _: HttpRequest) -> Response:
        """The model, in a list."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        """The model of this name."""
        if http.path_params["name"] != self._engine.model_name:
            message = "there is no such model here"
            raise HttpError(404, message, param="model", code="model_not_found")
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "infer",
            "max_model_len": self._engine.max_seq_len,
            "sampling_defaults": self._engine.sampling_defaults.as_dict(),
        }

    async def health(self, _: HttpRequest) -> Response:
        """200 while requests are taken and move on, else 503."""
        if not self._engine.is_live:
            raise EngineDeadError("the engine is not running, or makes no progress")
        return JSONResponse({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """200 while a request would be worked on at once, else 503."""
        if not self._engine.is_ready:
            raise EngineDeadError("the engine is not ready")
        return JSONResponse({"status": "ready"})

    @takes(answers=("text/plain",))
    async def metrics_text(self, http: HttpRequest) -> Response:
        """For Prometheus."""
        text = text_of([self.metrics], connections_of(http.scope))
        if self._fronts is not None:
            text = await self._fronts.metrics_text(text, self.metrics.prefix)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def stats(self, http: HttpRequest) -> Response:
        """Queue depth, batch sizes, waiting times."""
        if self._fronts is not None:
            return await self._of_all(http, self._fronts.stats())
        return JSONResponse(self.metrics.stats())

    @takes(answers=("text/plain", "text/html"))
    async def index(self, http: HttpRequest) -> Response:
        """This page; for browsers a page to chat with the model."""
        found = [
            f"{how:6} {route.path_format:28} {text}" for how, route, text in each(http.app.routes)
        ]
        lines = [f"infer serves {self._engine.model_name}.", "", *found, ""]
        return PlainTextResponse("\n".join(lines))

    async def openapi(self, http: HttpRequest) -> Response:
        """All this for programs: the OpenAPI document."""
        if self._document is None:
            making = asyncio.to_thread(self._made_document, http.app.routes)
            self._document = asyncio.ensure_future(making)
        document = await asyncio.shield(self._document)
        return Response(document, media_type="application/json")

    def _made_document(self, routes: Sequence[BaseRoute]) -> bytes:
        return render(
            document(
                routes,
                has_keys=self._settings.api_keys is not None,
                refuses_unknown=self._settings.unknown_params == "refuse",
                defaults=self._engine.sampling_defaults,
            )
        )

    def routes(self) -> list[BaseRoute]:
        """The routes of all endpoints but those that generate."""
        return [
            Route("/v1/chat/completions/render", self.render, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/requests", self.requests, methods=["GET"]),
            Route("/v1/requests/{id}", self.request, methods=["GET"]),
            Route("/v1/requests/{id}", self.cancel, methods=["DELETE"]),
            Route("/v1/requests/{id}/cancel", self.cancel, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/health/live", self.health, methods=["GET"]),
            Route("/health/ready", self.ready, methods=["GET"]),
            *self.sessions.routes(),
            *self.about_engine.routes(),
            Route("/metrics", self.metrics_text, methods=["GET"]),
            Route("/stats", self.stats, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/", self.index, methods=["GET"]),
        ]


def layers(
    settings: ServerSettings,
    on_end: Sequence[Callable[[RequestContext], None]] = (),
    model: str = "",
    page: Page | None = None,
    fronts: SeveralFronts | None = None,
) -> list[Middleware]:
    """What is around an app, from the outside in. `model`: name of the only one, if it is; `page`:
    for browsers, None = there is none. `fronts`: see `create_app`."""
    found = [
        Middleware(
            RequestBoundary,
            write_stall_s=settings.write_stall_s,
            on_end=(*on_end, log_request),
            model=model,
            id_prefix=fronts.tag if fronts else "",
            ignores_unknown=settings.unknown_params == "ignore",
        )
    ]
    found.append(
        Middleware(
            HostGuard,
            has_keys=settings.api_keys is not None,
            hosts=settings.hosts,
            origins=settings.origins,
        )
    )
    if settings.origins:
        found.append(Middleware(AllowedOrigins, origins=settings.origins))
    if page is not None:
        found.append(Middleware(PageLayer, page=page))
    keys = Keys(Path(settings.api_keys)) if settings.api_keys else None
    limits = fronts.limits if fronts else None
    return [*found, Middleware(AuthMiddleware, keys=keys, limits=limits)]


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

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        if limits is not None:
            limits.start()
        try:
            yield
        finally:
            if limits is not None:
                await limits.close()
            await engine.close()
            endpoints.metrics.save()
            await endpoints.sessions.close()
            offload.close()

    settings = settings or ServerSettings()
    limits = fronts.limits if fronts is not None and settings.api_keys is not None else None
    generating = generating_apis(settings) if generating is None else generating
    offload = Offload(settings.limits)
    endpoints = Endpoints(engine, offload, settings, fronts)
    outer = layers(settings, (endpoints.metrics.seen,), engine.model_name, page, fronts)
    app = Starlette(
        routes=[*map(endpoints.generation.route, generating), *endpoints.routes()],
        exception_handlers={**error_handlers(settings.status_when_full), Exception: pass_on},
        middleware=[] if is_inner else outer,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    paths = frozenset(api.path for api in generating)
    state: dict[str, Any] = {"metrics": endpoints.metrics, "traces": endpoints.traces}
    state |= {"generating_paths": paths, "desk": endpoints.desk}
    app.state = State(state)
    return app
