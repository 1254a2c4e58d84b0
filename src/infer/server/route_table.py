"""`ROUTES`: a row for each endpoint, in the order in which the index shows them

An endpoint that generates is a row of `GENERATING`; `server.generation` serves those. Any other is
a row of `ROUTES`: method, path, and the method of a class of endpoints that answers. An app has the
rows of the classes that it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response
from starlette.routing import Route

from infer.server.anthropic.messages_answer import MessagesApi
from infer.server.engine_endpoints import EngineEndpoints
from infer.server.model_endpoints import ModelEndpoints
from infer.server.openai.chat import ChatApi
from infer.server.openai.completions import CompletionsApi
from infer.server.openai.generating_api import GeneratingApi
from infer.server.openai.responses import ResponsesApi
from infer.server.openai.typed_completions import TypedCompletionsApi
from infer.server.sessions.routes import SessionRoutes
from infer.server.settings import ServerSettings

EVENTS_PATH = "/v1/engine/events"
COMPARISONS_PATH = "/v1/engine/comparisons"

GENERATING: tuple[GeneratingApi[Any], ...] = (
    CompletionsApi(),
    ChatApi(),
    ResponsesApi(),
    MessagesApi(),
)
"""the endpoints that generate"""

ROUTES: tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...] = (
    ("POST", "/v1/chat/completions/render", ModelEndpoints.render),
    ("POST", "/v1/responses/input_tokens", ModelEndpoints.input_tokens),
    ("POST", "/v1/messages/count_tokens", ModelEndpoints.count_tokens),
    ("POST", "/tokenize", ModelEndpoints.tokenize),
    ("POST", "/detokenize", ModelEndpoints.detokenize),
    ("GET", "/tokenizer_info", ModelEndpoints.tokenizer_info),
    ("GET", "/v1/models", EngineEndpoints.models),
    ("GET", "/v1/models/{name:path}", EngineEndpoints.model),
    ("GET", "/v1/requests", EngineEndpoints.requests),
    ("GET", "/v1/requests/{id}", EngineEndpoints.request),
    ("DELETE", "/v1/requests/{id}", EngineEndpoints.cancel),
    ("POST", "/v1/requests/{id}/cancel", EngineEndpoints.cancel),
    ("GET", "/health", EngineEndpoints.health),
    ("GET", "/health/live", EngineEndpoints.health),
    ("GET", "/health/ready", EngineEndpoints.ready),
    ("POST", "/v1/sessions", SessionRoutes.create),
    ("GET", "/v1/sessions", SessionRoutes.listed),
    ("GET", "/v1/sessions/{id}", SessionRoutes.read),
    ("PATCH", "/v1/sessions/{id}", SessionRoutes.rename),
    ("DELETE", "/v1/sessions/{id}", SessionRoutes.delete),
    ("POST", "/v1/sessions/{id}/fork", SessionRoutes.fork),
    ("GET", EVENTS_PATH, EngineEndpoints.events),
    ("POST", COMPARISONS_PATH, ModelEndpoints.compare),
    ("GET", "/metrics", EngineEndpoints.metrics),
    ("GET", "/stats", EngineEndpoints.stats),
    ("GET", "/openapi.json", ModelEndpoints.openapi),
    ("GET", "/", ModelEndpoints.index),
)


def routes_of(*endpoints: object) -> list[Route]:
    """The rows of `ROUTES` that these objects answer."""
    return [
        Route(path, getattr(each, answer.__name__), methods=[method])
        for method, path, answer in ROUTES
        for each in endpoints
        if getattr(type(each), answer.__name__, None) is answer
    ]


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
