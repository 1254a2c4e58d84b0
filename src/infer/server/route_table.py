"""`ROUTES`: a row for each endpoint, in the order in which the index shows them

An endpoint that generates is a row of `GENERATING`; `server.generation` serves those. Any other is
a row of `ROUTES`: method, path, and who answers: a method of `RequestViews`, which has JSON values,
or of a class of endpoints, which has a `Response`. An app has the rows of those that it has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

from starlette.convertors import PathConvertor, StringConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from infer.server.anthropic.messages_answer import MessagesApi
from infer.server.http.error_responses import IGNORED
from infer.server.mcp.mcp_endpoints import McpEndpoints
from infer.server.model_endpoints import ModelEndpoints
from infer.server.offload import Offload
from infer.server.openai.chat import ChatApi
from infer.server.openai.completions import CompletionsApi
from infer.server.openai.generating_api import GeneratingApi
from infer.server.openai.large_json import json_response
from infer.server.openai.responses import ResponsesApi
from infer.server.openai.schema_base import Wire, read
from infer.server.openai.typed_completions import TypedCompletionsApi
from infer.server.request_views import RequestViews
from infer.server.served_models import MODEL_ACTIONS
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.stored_responses import StoredResponses
from infer.server.settings import ServerSettings


class _ResponseName(StringConvertor):
    """What may be the name of a response in a path: another endpoint has the place of one."""

    regex = "(?!input_tokens$)[^/]+"


class _ModelName(PathConvertor):
    """What may be the name of a model in a path."""

    regex = f"(?!(?:{'|'.join(MODEL_ACTIONS)})$).*"


register_url_convertor("response", _ResponseName())
register_url_convertor("model", _ModelName())
Endpoint = Callable[[HttpRequest], Awaitable[Response]]
Row = tuple[str, str, Callable[..., Awaitable[Any]]]

EVENTS_PATH = "/v1/engine/events"
COMPARISONS_PATH = "/v1/engine/comparisons"
MCP_SERVERS_PATH, MCP_CALL_PATH = "/v1/mcp/servers", "/v1/mcp/call"

_BYTES_AN_ENTRY = 500
"""Size of an entry of a list, about."""

GENERATING: tuple[GeneratingApi[Any], ...] = (
    CompletionsApi(),
    ChatApi(),
    ResponsesApi(),
    MessagesApi(),
)
"""The endpoints that generate."""

ROUTES: tuple[Row, ...] = (
    ("POST", "/v1/chat/completions/render", ModelEndpoints.render),
    ("POST", "/v1/responses/input_tokens", ModelEndpoints.input_tokens),
    ("POST", "/v1/messages/count_tokens", ModelEndpoints.count_tokens),
    ("POST", "/tokenize", ModelEndpoints.tokenize),
    ("POST", "/detokenize", ModelEndpoints.detokenize),
    ("GET", "/tokenizer_info", ModelEndpoints.tokenizer_info),
    ("GET", "/v1/models", RequestViews.models),
    ("POST", "/v1/models/load", RequestViews.load_model),
    ("POST", "/v1/models/unload", RequestViews.unload_model),
    ("GET", "/v1/models/{name:model}", RequestViews.model),
    ("GET", "/v1/requests", RequestViews.requests),
    ("GET", "/v1/requests/{id}", RequestViews.request),
    ("DELETE", "/v1/requests/{id}", RequestViews.cancel),
    ("POST", "/v1/requests/{id}/cancel", RequestViews.cancel),
    ("GET", "/v1/requests/{id}/events", RequestViews.answer_events),
    ("GET", "/health", RequestViews.health),
    ("GET", "/health/live", RequestViews.health),
    ("GET", "/health/ready", RequestViews.ready),
    ("POST", "/v1/sessions", SessionRoutes.create),
    ("GET", "/v1/sessions", SessionRoutes.listed),
    ("GET", "/v1/sessions/{id}", SessionRoutes.read),
    ("PATCH", "/v1/sessions/{id}", SessionRoutes.rename),
    ("DELETE", "/v1/sessions/{id}", SessionRoutes.delete),
    ("POST", "/v1/sessions/{id}/fork", SessionRoutes.fork),
    ("GET", "/v1/responses/{id:response}", StoredResponses.response),
    ("DELETE", "/v1/responses/{id:response}", StoredResponses.delete_response),
    ("GET", "/v1/responses/{id:response}/input_items", StoredResponses.input_items),
    ("POST", "/v1/responses/{id:response}/cancel", RequestViews.cancel_response),
    ("GET", EVENTS_PATH, RequestViews.events),
    ("POST", COMPARISONS_PATH, ModelEndpoints.compare),
    ("GET", MCP_SERVERS_PATH, McpEndpoints.mcp_servers),
    ("POST", MCP_CALL_PATH, McpEndpoints.mcp_call),
    ("GET", "/metrics", RequestViews.metrics),
    ("GET", "/stats", RequestViews.stats),
    ("GET", "/openapi.json", ModelEndpoints.openapi),
    ("GET", "/", ModelEndpoints.index),
)

PROBE_PATHS = ("/health", "/health/live", "/health/ready", "/metrics")
PROBE_ROUTES = tuple(row for row in ROUTES if row[1] in PROBE_PATHS)
"""The rows of a port for probes and scrapes."""


def routes_of(
    views: RequestViews, offload: Offload, *endpoints: object, rows: Sequence[Row] = ROUTES
) -> list[Route]:
    """The rows that these objects answer; long answers are written by `offload`."""
    routes = []
    for method, path, answer in rows:
        name = answer.__name__
        if getattr(RequestViews, name, None) is answer:
            routes.append(Route(path, _json(views, answer, offload), methods=[method]))
        for holder in endpoints:
            if getattr(type(holder), name, None) is answer:
                routes.append(Route(path, getattr(holder, name), methods=[method]))
    return routes


def _json(views: RequestViews, answer: Callable[..., Any], offload: Offload) -> Endpoint:
    """What the views answer, as JSON; they are handed the body that they take."""
    bodies, *_ = getattr(answer, "described", ((),))

    @wraps(answer)
    async def endpoint(http: HttpRequest) -> Response:
        wires = [await _read(http, body, offload) for body in bodies]
        fields = await getattr(views, answer.__name__)(http, *wires)
        if isinstance(fields, Response):
            return fields
        num_bytes = _BYTES_AN_ENTRY * len(fields.get("data", fields.get("keys", ())))
        return await offload.render(http, num_bytes, json_response, fields)

    return endpoint


async def _read(http: HttpRequest, body: type[Wire], offload: Offload) -> Wire:
    """The body of a request. Raises 400, 408, 413, 415 and 422."""
    sent = await offload.read_object(http)
    return await offload.run(http, read, body, sent, http.scope[IGNORED])


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
