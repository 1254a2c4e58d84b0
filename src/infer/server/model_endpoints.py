"""`ModelEndpoints`: the endpoints about one model that do not generate, and their schema"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import UnprocessableError
from infer.server.anthropic.messages_body import CountTokensBody
from infer.server.body_reader import BodyReader
from infer.server.comparisons import ComparisonBody, ComparisonEvents, Comparisons
from infer.server.http.context import RequestContext
from infer.server.offload import NUM_BYTES, Offload
from infer.server.openai.chat import AsChat, ChatBody, plain_messages, rendered_chat
from infer.server.openai.large_json import json_response, render
from infer.server.openai.openapi import EVENTS, JSON, document, each, takes
from infer.server.openai.responses import InputTokensBody
from infer.server.openai.schema import Body, DetokenizeBody, TokenizeBody, TokenizeChatBody
from infer.server.openai.streaming import unless_gone
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.stored_responses import StoredResponses
from infer.server.settings import ServerSettings
from infer.server.tenancy.limits import tenant_of
from infer.text.untrusted.workers import Steps

W = TypeVar("W", bound=Body)
_BYTES_AN_ID = 8
"""Size of a token id in an answer, about."""


class ModelEndpoints:
    """Endpoints that ask the tokenizer have vLLM's formats, because load generators and evaluation
    harnesses use them in place of a tokenizer of their own. So control tokens written in a text are
    control tokens there, other than in a prompt."""

    def __init__(
        self,
        engine: AsyncLLM,
        offload: Offload,
        bodies: BodyReader,
        sessions: SessionRoutes,
        responses: StoredResponses,
        settings: ServerSettings,
    ) -> None:
        self._engine = engine
        self._offload = offload
        self._bodies = bodies
        self._sessions = sessions
        self._responses = responses
        self._settings = settings
        self._comparisons = Comparisons(engine)
        self._document: asyncio.Task[bytes] | None = None
        """Makes the OpenAPI document, once somebody has asked for it."""

    @takes(ChatBody, refuses=(404,))
    async def render(self, http: HttpRequest) -> Response:
        """The prompt that a chat would become, as text and token ids."""
        body = await self._bodies.read_object(http)
        await self._sessions.show(http, body)
        return await self._ask_tokenizer(http, body, ChatBody, self._rendered)

    @takes(TokenizeBody, TokenizeChatBody)
    async def tokenize(self, http: HttpRequest) -> Response:
        """Text or messages to token ids."""
        body = await self._bodies.read_object(http)
        if body.get("messages") is None:
            return await self._ask_tokenizer(http, body, TokenizeBody, self._tokenized)
        return await self._ask_tokenizer(http, body, TokenizeChatBody, self._tokenized_chat)

    @takes(InputTokensBody, refuses=(429,))
    async def input_tokens(self, http: HttpRequest) -> Response:
        """How many tokens the input of a response has."""
        body = await self._bodies.read_object(http)
        await self._responses.show(http, body)
        return await self._ask_tokenizer(http, body, InputTokensBody, self._counted_input)

    @takes(CountTokensBody)
    async def count_tokens(self, http: HttpRequest) -> Response:
        """How many tokens the prompt of a message has."""
        body = await self._bodies.read_object(http)
        return await self._ask_tokenizer(http, body, CountTokensBody, self._counted)

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
        chat = wire.chat if isinstance(wire, AsChat) else wire
        heavy = isinstance(chat, ChatBody) and chat.is_heavy
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

    def _counted(self, wire: AsChat) -> Steps[dict[str, Any]]:
        _, ids = yield from rendered_chat(self._engine, wire.chat)
        return {"input_tokens": len(ids)}

    def _counted_input(self, wire: InputTokensBody) -> Steps[dict[str, Any]]:
        counted = yield from self._counted(wire)
        return {"object": "response.input_tokens", **counted}

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

    @takes(ComparisonBody, refuses=(504,), answers=(JSON, EVENTS))
    async def compare(self, http: HttpRequest) -> Response:
        """The batching modes beside one another, on the model that ships: a recording of each."""
        body = await self._bodies.read_object(http)
        wire = await self._bodies.validate(http, ComparisonBody, body)
        owner = tenant_of(http.scope).key.id
        if not wire.stream:
            recording = await unless_gone(http.receive, self._comparisons.run(wire, owner))
            return Response(recording, media_type=JSON)
        pieces = self._comparisons.pieces(wire, owner)
        try:
            first = await unless_gone(http.receive, anext(pieces))
        except BaseException:
            await pieces.aclose()
            raise
        return ComparisonEvents(first, pieces)

    @takes(answers=("text/plain", "text/html"))
    async def index(self, http: HttpRequest) -> Response:
        """This page; for browsers a page to chat with the model."""
        addresses = [
            f"{how:6} {route.path_format:28} {text}" for how, route, text in each(http.app.routes)
        ]
        lines = [f"infer serves {self._engine.model_name}.", "", *addresses, ""]
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
