"""`GenerationCall`: one HTTP request that generates, from its body to its answer, in a pipeline"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from infer.engine.client.async_llm import AsyncLLM, RequestStream, Reservation
from infer.errors import DeadlineError
from infer.server.body_reader import BodyReader
from infer.server.http.context import RequestContext
from infer.server.kept_answers import KeptAnswer, KeptAnswers
from infer.server.observe.request_trace import RequestTrace, RequestTraces
from infer.server.offload import Offload
from infer.server.openai.generating_api import AnswerFormat, B, GeneratingApi, StreamFormat
from infer.server.openai.large_json import json_response
from infer.server.openai.openapi import EVENTS, JSON, takes
from infer.server.openai.streaming import EventStream, StreamOfAnswer, all_of, unless_gone
from infer.server.request_status import RequestStatus, status_of
from infer.server.sessions.routes import SessionRoutes, SessionTurn
from infer.server.sessions.stored_responses import ResponseTurn, StoredResponses
from infer.server.settings import ServerSettings
from infer.server.tenancy.limits import Grant, revoked, tenant_of
from infer.server.tenancy.open_grammars import OpenGrammars
from infer.server.tenancy.shared_prefixes import PublicPrefixes
from infer.text.untrusted.workers import Steps
from infer.types import Request

CONVERSATIONS = ("session-id", "x-session-id", "x-claude-code-session-id")
"""Headers in which coding agents name a conversation; OpenAI's APIs have `prompt_cache_key`."""
MAX_CONVERSATION = 256
"""Characters of such a name that count."""
REFUSES = (429, 499, 504)
"""Statuses of errors that every endpoint that generates has."""


@dataclass(eq=False)
class GenerationPipeline:
    """What all generating requests of a server work with."""

    engine: AsyncLLM
    offload: Offload
    bodies: BodyReader
    traces: RequestTraces
    prefixes: PublicPrefixes
    sessions: SessionRoutes
    responses: StoredResponses
    kept: KeptAnswers
    grammars: OpenGrammars
    settings: ServerSettings

    def apply(self, settings: ServerSettings) -> None:
        """Take the live settings, for the requests that come from now on."""
        self.settings = settings

    def route(self, api: GeneratingApi[B]) -> Route:
        """The route of an endpoint that generates."""

        answers = (EVENTS,) if api.body.always_streams else (JSON, EVENTS)

        @takes(api.body, refuses=(*REFUSES, *api.refuses), answers=answers)
        async def endpoint(http: HttpRequest) -> Response:
            return await GenerationCall(self, api, http).respond()

        endpoint.__doc__ = api.__doc__
        return Route(api.path, endpoint, methods=["POST"], name=type(api).__name__)


class Prepared(NamedTuple):
    """What is made of a body beside the event loop."""

    requests: list[Request]
    """One for each choice."""
    answer: AnswerFormat
    events: StreamFormat | None
    """The answer as a stream, if it is to be one."""


class Places(NamedTuple):
    """The places of one request's choices, until they are handed over."""

    waiting: ExitStack
    """Counts the choices among those of the key that wait, until it is closed."""
    reservation: Reservation
    """Places of the engine."""


def conversation_of(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """What a client calls the conversation, if it does: a hint, so nothing of it is refused."""
    names = (body.get("prompt_cache_key"), *(headers.get(name) for name in CONVERSATIONS))
    return next((n[:MAX_CONVERSATION] for n in names if isinstance(n, str) and n), "")


class GenerationCall(Generic[B]):
    """`respond` is its table of contents. Every refusal comes before `_begin`, and costs nobody a
    place. `_admit` counts the choices and holds their places, which are free again only when nobody
    needs them any more: `_begin` hands them over, to the trace and to the engine's streams."""

    def __init__(
        self, pipeline: GenerationPipeline, api: GeneratingApi[B], http: HttpRequest
    ) -> None:
        """`http` is a request that the key's limits let in (`AuthMiddleware`)."""
        self._pipeline = pipeline
        self._api = api
        self._http = http
        self._context = RequestContext.of(http.scope)
        self._tenant = tenant_of(http.scope)
        self._answer_id = f"{api.id_prefix}{self._context.id}"
        self._turn: SessionTurn | ResponseTurn | None = None
        """What is kept of it, once the body is read."""
        self._conversation = ""
        """What the client calls the conversation."""
        self._is_kept = False
        """Whether the answer outlives its connection."""

    async def respond(self) -> Response:
        """All stages, in order."""
        body = await self._read()
        wire = await self._validate(body)
        with self._admit(wire) as places:
            prepared = await self._to_engine(wire)
            async with self._tenant.acquire(prepared.requests, self._context) as grant:
                running = self._begin(wire, prepared, places, grant)
        if prepared.events is not None:
            return self._stream(wire, prepared.events, running)
        return await self._whole(prepared.answer, running)

    async def _read(self) -> dict[str, Any]:
        """The body, with the conversation that it continues."""
        body = await self._pipeline.bodies.read_object(self._http)
        self._conversation = conversation_of(body, self._http.headers)
        if self._api.keeps == "sessions":
            self._turn = await self._pipeline.sessions.begin(self._http, body)
        elif self._api.keeps == "responses":
            self._turn = await self._pipeline.responses.begin(self._http, body)
        return body

    async def _validate(self, body: dict[str, Any]) -> B:
        """The wire model. Grammars are paid for here, before they are compiled."""
        wire = await self._pipeline.bodies.validate(self._http, self._api.body, body)
        streams, headers = wire.stream or wire.always_streams, self._http.headers
        self._is_kept = self._pipeline.kept.wants(headers, streams=streams)
        await self._tenant.charge_chars(wire.num_grammar_chars, self._context)
        return wire

    @contextmanager
    def _admit(self, wire: B) -> Iterator[Places]:
        """Hold a place for each choice inside of the block. Raises 400 or 429 where the key may not
        have as many, `OverloadedError` or `EngineDeadError` where the engine has none."""
        engine, traces, num_choices = self._pipeline.engine, self._pipeline.traces, wire.num_choices
        queueing = self._tenant.queueing(
            num_choices,
            num_queued=traces.num_queued(self._tenant.key.id),
            num_taken=traces.num_choices + engine.num_reserved,
            num_seats=engine.num_seats,
            max_waiting=engine.max_waiting,
        )
        with ExitStack() as waiting:
            waiting.enter_context(queueing)
            with engine.reserved(num_choices) as reservation:
                yield Places(waiting, reservation)

    async def _to_engine(self, wire: B) -> Prepared:
        """The engine's requests and the answer to them; in threads where that takes long."""
        offload = self._pipeline.offload
        prepared = await offload.run_steps(self._http, self._prepare, wire, heavy=wire.is_heavy)
        if prepared.answer.warning is not None:
            self._context.headers.append(("x-warning", prepared.answer.warning))
        self._context.headers += wire.answer_headers
        return prepared

    def _prepare(self, wire: B) -> Steps[Prepared]:
        engine, api, tenant = self._pipeline.engine, self._api, self._tenant
        requests = yield from api.make_requests(engine, wire, self._answer_id)
        requests = self._pipeline.prefixes.owned(requests, tenant.key, self._conversation)
        clamps = wire.clamps_limit or wire.is_open_ended
        requests = tenant.fitted(requests, clamps=clamps)
        on_message = self._turn.add if self._turn else None
        answer = api.make_answer(engine, wire, requests, self._answer_id, on_message)
        streams = wire.stream or wire.always_streams
        return Prepared(requests, answer, answer.events() if streams else None)

    def _begin(
        self, wire: B, prepared: Prepared, places: Places, grant: Grant
    ) -> list[RequestStream]:
        """Hand the places over. It is no coroutine, so nothing else can happen on the event loop
        while a choice is counted in neither place or in both."""
        places.reservation.check(prepared.requests)
        key_id, cleanup = self._tenant.key.id, self._context.cleanup
        self._pipeline.grammars.enter(key_id, prepared.requests, cleanup)
        self._own(wire, prepared, grant)
        places.waiting.close()  # the trace counts them now
        return self._enter(prepared, places.reservation)

    def _own(self, wire: B, prepared: Prepared, grant: Grant) -> None:
        """Begin the trace, which ends with the request context and has the key's tokens."""
        context, traces = self._context, self._pipeline.traces
        key_id, num_prompt = self._tenant.key.id, prepared.answer.num_prompt
        trace = traces.begin(self._answer_id, context, key_id, prepared.requests, num_prompt)
        grant.use(context, trace)
        self._set_deadline(trace, wire.timeout)
        context.on_revoked = lambda: traces.cancel(trace, revoked())

    def _set_deadline(self, trace: RequestTrace, timeout_s: float | None) -> None:
        limit_s = self._pipeline.settings.request_timeout_s
        limit_s = min(timeout_s or limit_s, limit_s)
        message = f"the request was not done after {limit_s:g} s"
        error = DeadlineError(message, code="deadline_exceeded")
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self._pipeline.traces.cancel, trace, error)
        trace.context.cleanup.callback(timer.cancel)

    def _enter(self, prepared: Prepared, reservation: Reservation) -> list[RequestStream]:
        """Run the requests. The answer closes their streams, or else the request context does.
        Raises `EngineDeadError`."""
        merge = prepared.events is None or prepared.events.merges
        running = []
        for request in prepared.requests:
            stream = reservation.enter(request, merge=merge)
            self._context.cleanup.enter_context(closing(stream))
            running.append(stream)
        return running

    def _stream(self, wire: B, events: StreamFormat, running: Sequence[RequestStream]) -> Response:
        pipeline, context = self._pipeline, self._context
        render = partial(pipeline.offload.render, self._http)
        kept: KeptAnswer | None = None
        if self._is_kept:
            kept = pipeline.kept.begin(context.id, self._tenant.key.id)
            context.cleanup.callback(kept.end)
        options = StreamOfAnswer(
            keep_alive_s=pipeline.settings.keep_alive_s,
            keep_turn=self._turn.keep if self._turn else None,
            status=self._status,
            status_for=self._answer_id if wire.tells_status else "",
            status_s=pipeline.settings.limits.status_s,
            kept=kept,
        )
        return EventStream(running, events, render, options)

    def _status(self) -> RequestStatus | None:
        trace = self._pipeline.traces.open_one(self._context.id)
        return None if trace is None else status_of(trace, self._pipeline.engine)

    async def _whole(self, answer: AnswerFormat, running: Sequence[RequestStream]) -> Response:
        works = all_of(stream.output() for stream in running)
        outputs = await unless_gone(self._http.receive, works)
        num_bytes, body = sum(map(answer.size_of, outputs)), answer.body(outputs)
        if self._turn and self._turn.comes_first:
            await self._turn.keep()
        response = await self._pipeline.offload.render(self._http, num_bytes, json_response, body)
        if self._turn and not self._turn.comes_first:
            await self._turn.keep()
        return response
