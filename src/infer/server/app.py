"""The endpoints, and `create_app`, which puts them on paths. Errors are raised, never rendered.

The generating ones go: body → wire model → requests → answer; all refusals happen before the last
step. Those that ask the tokenizer have vLLM's formats: load generators and evaluation harnesses
use them in the place of a tokenizer of their own. So, other than in a prompt, control tokens
written in a text are control tokens there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import DeadlineError, EngineDeadError, InferError, UnprocessableError
from infer.server.http.connections import connections_of
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import IGNORED, HttpError, RequestBoundary, pass_on, respond
from infer.server.http.hosts import HostGuard
from infer.server.observe.logs import log_request
from infer.server.observe.metrics import CONTENT_TYPE, Metrics, text_of
from infer.server.observe.request_trace import RequestTrace, RequestTraces
from infer.server.observe.spans import make_tracing
from infer.server.offload import NUM_BYTES, Offload
from infer.server.openai import schema_base, to_engine
from infer.server.openai.answers import ChatAnswer, CompletionAnswer, TypedEvents
from infer.server.openai.large_json import json_response, render
from infer.server.openai.openapi import JSON, document, each, takes
from infer.server.openai.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Generation,
    TokenizeBody,
    TokenizeChatBody,
)
from infer.server.openai.streaming import Events, EventStream, all_of, unless_gone
from infer.server.request_endpoints import cancelled, listed, shown
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.store import Quota
from infer.server.settings import ServerSettings
from infer.server.tenancy.keys import Keys
from infer.server.tenancy.limits import AuthMiddleware, revoked, tenant_of
from infer.server.tenancy.shared_prefixes import PublicPrefixes
from infer.types import Request

B = TypeVar("B", bound=Body)
G = TypeVar("G", bound=Generation)

EVENTS = "text/event-stream"
_BYTES_AN_ID = 8
"""about, in an answer"""


class Endpoints:
    """What the paths lead to; holds the engine and what is known about its requests."""

    def __init__(self, engine: AsyncLLM, pool: Offload, settings: ServerSettings) -> None:
        self._engine = engine
        self._pool = pool
        self._settings = settings
        self.traces = RequestTraces(engine)
        if settings.tracing:
            self.traces.on_end.append(make_tracing(engine.model_name))
        self._prefixes = PublicPrefixes(settings.public_prefixes, engine)
        quota = Quota(
            settings.max_sessions, settings.max_session_messages, settings.max_session_bytes
        )
        self.conversations = SessionRoutes(settings.sessions, pool, quota)
        usage = Path(f"{settings.api_keys}.usage") if settings.api_keys else None
        self.metrics = Metrics(engine, self.traces, settings.metrics_prefix, usage)
        self._started = int(time.time())
        self._document: bytes | None = None
        """`/openapi.json`, once somebody has asked for it"""

    async def _read(self, http: HttpRequest, model: type[B]) -> B:
        body = await self._pool.read_object(http)
        return await self._pool.computed(http, self._checked, http, model, body)

    def _checked(self, http: HttpRequest, model: type[B], body: dict[str, Any]) -> B:
        """There is one model; a request may leave its name out."""
        ignored = http.scope[IGNORED] if self._settings.unknown_params == "ignore" else None
        wire = schema_base.read(model, body, ignored)
        if wire.model not in (None, self._engine.model_name):
            message = f"there is no such model here; this server has {self._engine.model_name!r}"
            raise HttpError(404, message, param="model", code="model_not_found")
        return wire

    # ---- generating

    @takes(CompletionBody, refuses=(429, 499, 504), answers=(JSON, EVENTS))
    async def completions(self, http: HttpRequest) -> Response:
        """OpenAI's completions."""
        make_requests = to_engine.completion_requests
        return await self._answer(http, CompletionBody, make_requests, CompletionAnswer)

    @takes(ChatBody, refuses=(404, 409, 429, 499, 504), answers=(JSON, EVENTS))
    async def chat_completions(self, http: HttpRequest) -> Response:
        """OpenAI's chat completions; with a session_id, the new messages of a session."""
        return await self._answer(http, ChatBody, to_engine.chat_requests, ChatAnswer)

    async def _answer(
        self,
        http: HttpRequest,
        model: type[G],
        make_requests: Callable[[AsyncLLM, G, str], list[Request]],
        kind: type[CompletionAnswer],
    ) -> Response:
        engine = self._engine
        context, tenant = RequestContext.of(http.scope), tenant_of(http.scope)
        key = tenant.key
        body = await self._pool.read_object(http)
        turn = await self.conversations.begin(http, body) if model is ChatBody else None
        wire = await self._pool.computed(http, self._checked, http, model, body)
        answer_id = f"{kind.prefix}-{context.id}"
        tenant.charge_chars(wire.num_grammar_chars, context)

        def prepare() -> tuple[list[Request], CompletionAnswer]:
            requests = self._prefixes.owned(make_requests(engine, wire, answer_id), key)
            requests = tenant.fitted(requests, is_open_ended=wire.is_open_ended)
            return requests, kind(engine, wire, requests, answer_id)

        num_choices = wire.num_choices
        counts = {
            "num_queued": self.traces.num_queued(key.id),
            "num_taken": self.traces.num_choices + engine.num_reserved,
            "num_seats": engine.num_seats,
        }
        # From here on a choice counts as one that is being made; then its story begins, at once.
        with tenant.queueing(num_choices, **counts), engine.reserved(num_choices):
            requests, answer = await self._pool.computed(http, prepare, heavy=wire.is_heavy)
        if isinstance(wire, ChatBody) and (warning := to_engine.tool_warning(engine, wire)):
            context.headers.append(("x-warning", warning))
        if turn:
            answer.on_new = turn.add
        refund = tenant.reserve(requests, context)
        trace = self.traces.begin(answer_id, context, key.id, requests, answer.num_prompt)
        context.cleanup.callback(refund, trace)
        self._set_deadline(trace, wire.timeout)
        context.on_revoked = lambda: self.traces.cancel(trace, revoked())
        if wire.stream:
            events: Events = TypedEvents(answer) if wire.stream_format == "events" else answer
            keep = turn.keep if turn else None
            rendered = partial(self._pool.rendered, http)
            keep_alive_s = self._settings.keep_alive_s
            return EventStream(engine, requests, events, keep_alive_s, keep, rendered)
        outputs = await unless_gone(http.receive, all_of(map(engine.generate, requests)))
        num_bytes = sum(map(answer.size_of, outputs))
        whole = answer.body(outputs)
        response = await self._pool.rendered(http, num_bytes, json_response, whole)
        if turn:
            await turn.keep()
        return response

    def _set_deadline(self, trace: RequestTrace, timeout_s: float | None) -> None:
        limit_s = self._settings.request_timeout_s
        limit_s = min(timeout_s or limit_s, limit_s)
        message = f"the request was not done after {limit_s:g} s"
        error = DeadlineError(message, code="deadline_exceeded")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self.traces.cancel, trace, error)
        trace.context.cleanup.callback(timer.cancel)

    # ---- asking about requests

    async def requests(self, http: HttpRequest) -> Response:
        """The requests that run, and the latest that have ended."""
        return listed([self.traces], http)

    async def request(self, http: HttpRequest) -> Response:
        """The story of one: what it waited for, and why."""
        return shown([self.traces], http)

    async def cancel(self, http: HttpRequest) -> Response:
        """End one."""
        return cancelled([self.traces], http)

    # ---- asking the tokenizer

    @takes(ChatBody)
    async def render(self, http: HttpRequest) -> Response:
        """The prompt that a chat would become, as text and token ids."""
        wire = await self._read(http, ChatBody)
        self._charge(http)
        how = {"heavy": wire.is_heavy}
        prompt, ids = await self._pool.computed(
            http, to_engine.rendered_chat, self._engine, wire, **how
        )
        size = self._engine.max_seq_len
        fields = {"prompt": prompt, "token_ids": ids, "count": len(ids), "max_model_len": size}
        num_bytes = len(prompt) + _BYTES_AN_ID * len(ids)
        return await self._pool.rendered(http, num_bytes, json_response, fields)

    @takes(TokenizeBody, TokenizeChatBody)
    async def tokenize(self, http: HttpRequest) -> Response:
        """Text or messages to token ids."""
        body = await self._pool.read_object(http)
        model = TokenizeBody if body.get("messages") is None else TokenizeChatBody
        wire = await self._pool.computed(http, self._checked, http, model, body)
        self._charge(http)
        fields = await self._pool.computed(http, self._tokenized, wire)
        num_bytes = _BYTES_AN_ID * len(fields["tokens"])
        return await self._pool.rendered(http, num_bytes, json_response, fields)

    def _tokenized(self, wire: TokenizeBody | TokenizeChatBody) -> dict[str, Any]:
        engine = self._engine
        if isinstance(wire, TokenizeChatBody):
            ids = engine.render_chat(to_engine.plain_messages(wire), **wire.template_arguments)
        else:
            ids = engine.tokenizer.encode(
                wire.prompt,
                add_special_tokens=wire.add_special_tokens,
                parse_special_tokens=wire.parse_special_tokens,
            )
        pieces = list(map(engine.tokenizer.token_piece, ids)) if wire.return_token_strs else None
        size = engine.max_seq_len
        return {"count": len(ids), "max_model_len": size, "tokens": ids, "token_strs": pieces}

    @takes(DetokenizeBody)
    async def detokenize(self, http: HttpRequest) -> Response:
        """Token ids to text."""
        wire = await self._read(http, DetokenizeBody)
        self._charge(http)
        fields = {"prompt": await self._pool.computed(http, self._text, wire.tokens)}
        return await self._pool.rendered(http, len(fields["prompt"]), json_response, fields)

    def _charge(self, http: HttpRequest) -> None:
        """What a tokenizer is asked for counts towards the key's tokens, by the body's size."""
        tenant_of(http.scope).charge_chars(
            http.scope.get(NUM_BYTES, 0), RequestContext.of(http.scope)
        )

    def _text(self, ids: Sequence[int]) -> str:
        size = self._engine.vocab_size
        for token_id in ids:
            if not 0 <= token_id < size:
                message = f"token id {token_id} is outside the vocabulary (0 to {size - 1})"
                raise UnprocessableError(message, param="tokens")
        return self._engine.tokenizer.decode(ids, skip_special_tokens=False)

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
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def stats(self, _: HttpRequest) -> Response:
        """Queue depth, batch sizes, waiting times."""
        return JSONResponse(self.metrics.stats())

    @takes(answers=("text/plain",))
    async def index(self, http: HttpRequest) -> Response:
        """This page."""
        found = [
            f"{how:6} {route.path_format:28} {text}" for how, route, text in each(http.app.routes)
        ]
        lines = [f"infer serves {self._engine.model_name}.", "", *found, ""]
        return PlainTextResponse("\n".join(lines))

    async def openapi(self, http: HttpRequest) -> Response:
        """All this for programs: the OpenAPI document."""
        if self._document is None:
            self._document = await asyncio.to_thread(self._made_document, http.app.routes)
        return Response(self._document, media_type="application/json")

    def _made_document(self, routes: Sequence[BaseRoute]) -> bytes:
        return render(document(routes, has_keys=self._settings.api_keys is not None))


def layers(
    settings: ServerSettings, on_end: Sequence[Callable[[RequestContext], None]] = ()
) -> list[Middleware]:
    """What is around an app, from the outside in."""
    found = [
        Middleware(
            RequestBoundary, write_stall_s=settings.write_stall_s, on_end=(*on_end, log_request)
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
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.origins,
                allow_methods=["GET", "POST", "PATCH", "DELETE"],
                allow_headers=["authorization", "content-type", "x-api-key", "x-request-id"],
                expose_headers=["x-request-id", "x-warning", "retry-after"],
            )
        )
    keys = Keys(Path(settings.api_keys)) if settings.api_keys else None
    return [*found, Middleware(AuthMiddleware, keys=keys)]


def create_app(
    engine: AsyncLLM, settings: ServerSettings | None = None, *, is_inner: bool = False
) -> Starlette:
    """The ASGI app over `engine`, which must not have been started: the app does that, and closes
    it at the end. No paths but the ones below, and no redirects. `is_inner`: another app is around
    this one: it has the outer layers, and starts and ends the engine."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()
            endpoints.metrics.save()
            endpoints.conversations.close()
            pool.close()

    settings = settings or ServerSettings()
    pool = Offload()
    endpoints = Endpoints(engine, pool, settings)
    app = Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/chat/completions/render", endpoints.render, methods=["POST"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/detokenize", endpoints.detokenize, methods=["POST"]),
            Route("/tokenizer_info", endpoints.tokenizer_info, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/v1/requests", endpoints.requests, methods=["GET"]),
            Route("/v1/requests/{id}", endpoints.request, methods=["GET"]),
            Route("/v1/requests/{id}", endpoints.cancel, methods=["DELETE"]),
            Route("/v1/requests/{id}/cancel", endpoints.cancel, methods=["POST"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/health/live", endpoints.health, methods=["GET"]),
            Route("/health/ready", endpoints.ready, methods=["GET"]),
            *endpoints.conversations.routes(),
            Route("/metrics", endpoints.metrics_text, methods=["GET"]),
            Route("/stats", endpoints.stats, methods=["GET"]),
            Route("/openapi.json", endpoints.openapi, methods=["GET"]),
            Route("/", endpoints.index, methods=["GET"]),
        ],
        exception_handlers={HTTPException: respond, InferError: respond, Exception: pass_on},
        middleware=[] if is_inner else layers(settings, (endpoints.metrics.seen,)),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state = State({"metrics": endpoints.metrics, "traces": endpoints.traces})
    return app
