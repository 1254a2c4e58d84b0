"""The endpoints: read, refuse or ask the engine, answer in one piece or as a stream.

Each of the two generating endpoints goes the same way: body → wire model → requests → answer; all
refusals happen before the last step. Errors are raised, never rendered, here. `Endpoints` holds
the engine and nothing else; `app` puts its methods on paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from infer.errors import EngineDeadError
from infer.server import bodies, intake, validation, waiting
from infer.server.answer import Answer, TokenCount
from infer.server.body import computed, read_object
from infer.server.failures import NotFoundError
from infer.server.logprobs import ChoiceLogprobs
from infer.server.stream.chunks import ChatChunks, CompletionChunks, Renderer
from infer.server.stream.delivery import EventStream
from infer.server.stream.events import TypedEvents
from infer.server.wire import ChatBody, CompletionBody, Generation, StreamOptions
from infer.types import Request, RequestOutput

if TYPE_CHECKING:
    from infer.engine.async_llm import AsyncLLM

Body = Callable[
    [Answer, Sequence[RequestOutput], Sequence[ChoiceLogprobs] | None, TokenCount], dict[str, Any]
]

_INDEX = """\
infer serves {model}.

POST /v1/chat/completions   OpenAI's chat completions
POST /v1/completions        OpenAI's completions
POST /v1/chat/completions/render   the prompt that a chat would become, as text and token ids
POST /tokenize              text or messages to token ids
POST /detokenize            token ids to text
GET  /tokenizer_info        the special tokens and the chat template
GET  /v1/models             the model's name
GET  /health                200 while the engine is there, then 503
"""


class Endpoints:
    """See the module's docstring."""

    def __init__(self, engine: AsyncLLM, started: int) -> None:
        self._engine = engine
        self._started = started

    async def completions(self, http: HttpRequest) -> Response:
        wire = validation.read(CompletionBody, await read_object(http))
        intake.check_model(self._engine, wire.model)
        answer = Answer.new("cmpl", self._engine.model_name)
        requests = await computed(http, intake.completion_requests, self._engine, wire, answer.id)
        return await self._answer(http, wire, answer, requests, bodies.completion, CompletionChunks)

    async def chat_completions(self, http: HttpRequest) -> Response:
        wire = validation.read(ChatBody, await read_object(http))
        intake.check_model(self._engine, wire.model)
        answer = Answer.new("chatcmpl", self._engine.model_name)
        requests = await computed(http, intake.chat_requests, self._engine, wire, answer.id)
        return await self._answer(http, wire, answer, requests, bodies.chat, ChatChunks)

    async def _answer(
        self,
        http: HttpRequest,
        wire: Generation,
        answer: Answer,
        requests: Sequence[Request],
        body: Body,
        chunks: type[ChatChunks] | type[CompletionChunks],
    ) -> Response:
        engine = self._engine
        count = TokenCount(requests, wire.n)
        logprobs = None
        if wire.wants_logprobs:
            skip = wire.skip_special_tokens
            logprobs = [ChoiceLogprobs(engine.tokenizer, skip_special=skip) for _ in requests]
        if wire.stream:
            renderer: Renderer
            if wire.stream_format == "events":
                renderer = TypedEvents(count)
            else:
                options = wire.stream_options or StreamOptions()
                renderer = chunks(answer, count, len(requests), options, logprobs)
            return EventStream(engine, requests, renderer)
        outputs = await waiting.unless_gone(
            http.receive, waiting.all_of(engine.generate(request) for request in requests)
        )
        return JSONResponse(body(answer, outputs, logprobs, count))

    async def models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, http: HttpRequest) -> Response:
        if http.path_params["name"] != self._engine.model_name:
            raise NotFoundError(
                "there is no such model here", param="model", code="model_not_found"
            )
        return JSONResponse(self._model())

    async def health(self, _: HttpRequest) -> Response:
        if not self._engine.is_alive:
            raise EngineDeadError("the engine is not running")
        return JSONResponse({"status": "ok"})

    async def index(self, _: HttpRequest) -> Response:
        return PlainTextResponse(_INDEX.format(model=self._engine.model_name))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._engine.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "infer",
            "max_model_len": self._engine.max_seq_len,
        }
