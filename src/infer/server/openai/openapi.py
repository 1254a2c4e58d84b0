"""The OpenAPI document at `/openapi.json`, generated from the routes and the body models

It is generated from the code that answers, so it cannot differ from it. Paths and methods are those
of the routes, fields those of the models with which an endpoint is marked (`takes`), and summaries
the first lines of the endpoints' docstrings. Statuses are those of the layers that a request passes
and the endpoint's own. Ranges that depend on the model are not included; errors name them. The page
at `/` lists the same routes and summaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute, Route

from infer.server.http.anthropic_errors import OVERLOADED, is_anthropic
from infer.server.openai.schema import SampledBody
from infer.server.openai.schema_base import Wire
from infer.server.tenancy.limits import OPEN_PATHS, costs
from infer.types.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from infer.version import VERSION

E = TypeVar("E", bound=Callable[..., Any])

JSON = "application/json"
EVENTS = "text/event-stream"
REF = "#/components/schemas/{model}"
ANY_REQUEST = {400, 403, 431, 500, 503}
"""Error statuses that every request may get."""
ANY_BODY = {404, 408, 413, 415, 422}
"""Further error statuses of a request with a body; 404 is for an unknown model."""
_TYPES = {"message": "string", "type": "string", "param": ["string", "null"]}
_MEMBERS = {name: {"type": kind} for name, kind in {**_TYPES, "code": _TYPES["param"]}.items()}
_ERROR = {"type": "object", "properties": _MEMBERS, "required": [*_MEMBERS]}
_ERRORS = {"type": "object", "properties": {"error": _ERROR}, "required": ["error"]}
_ANTHROPIC_ERRORS = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object"},
            },
            "required": ["type", "message"],
        },
        "request_id": {"type": ["string", "null"]},
    },
    "required": ["type", "error"],
}
_PHRASES = {499: "Cancelled", OVERLOADED: "Overloaded"}
"""Phrases of statuses that have none of their own."""


def takes(
    *bodies: type[Wire],
    refuses: Iterable[int] = (),
    answers: Iterable[str] = (JSON,),
    query: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Callable[[E], E]:
    """Decorator that describes an endpoint: the models one of which its body must fit, the statuses
    of its own errors, the media types of a 200, and the schemas of what its query may say."""

    def mark(endpoint: E) -> E:
        endpoint.described = (bodies, refuses, answers)  # type: ignore[attr-defined]
        endpoint.query = query  # type: ignore[attr-defined]
        return endpoint

    return mark


def each(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, Route, str]]:
    """Yield method, route and summary of each route."""
    for route in routes:
        assert isinstance(route, Route)
        (method,) = (route.methods or set()) - {"HEAD"}
        yield method, route, (route.endpoint.__doc__ or "").partition("\n")[0]


def document(
    routes: Iterable[BaseRoute],
    *,
    has_keys: bool,
    refuses_unknown: bool = False,
    defaults: SamplingDefaults = NO_DEFAULTS,
) -> dict[str, Any]:
    """The OpenAPI document of an app's routes, as JSON values.

    `has_keys`: whether the server demands API keys. `refuses_unknown`: whether it refuses unknown
    fields of every body, not only of the strict ones. `defaults`: what the model says about fields
    that are left out, which replaces the fixed defaults.
    """
    paths: dict[str, dict[str, Any]] = {}
    models: dict[type[Wire], None] = {}
    for method, route, summary in each(routes):
        bodies, refuses, answers = getattr(route.endpoint, "described", ((), (), (JSON,)))
        is_open = not has_keys or route.path in OPEN_PATHS
        statuses = ANY_REQUEST | {*refuses} | (ANY_BODY if bodies else set())
        statuses |= {429} if not is_open and costs(method, route.path) else set()
        statuses |= ({404} if route.param_convertors else set()) | (set() if is_open else {401})
        error = "AnthropicError" if is_anthropic(route.path) else "Error"
        responses = {str(status): _response(status, (JSON,), error) for status in sorted(statuses)}
        operation = {
            "summary": summary,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in route.param_convertors
            ]
            + [
                {"name": name, "in": "query", "schema": schema}
                for name, schema in getattr(route.endpoint, "query", {}).items()
            ],
            "responses": {"200": _response(200, answers), **responses},
            "security": [] if is_open else [{"key": []}, {"header": []}],
        }
        if bodies:
            models |= dict.fromkeys(bodies)
            schema = {"anyOf": [{"$ref": REF.format(model=body.__name__)} for body in bodies]}
            operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
        paths.setdefault(route.path_format, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "infer", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": _schemas(models, refuses_unknown, defaults),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _schemas(
    models: Iterable[type[Wire]], refuses_unknown: bool, defaults: SamplingDefaults
) -> dict[str, Any]:
    """The schemas of bodies and errors, by name."""
    named = models_json_schema([(model, "validation") for model in models], ref_template=REF)[1]
    for model in models:
        if issubclass(model, SampledBody):
            _set_defaults(named["$defs"][model.__name__]["properties"], defaults)
    if not refuses_unknown:
        strict = {model.__name__ for model in models if model.is_strict}
        for name in named["$defs"].keys() - strict:
            named["$defs"][name].pop("additionalProperties", None)
    return {**named["$defs"], "Error": _ERRORS, "AnthropicError": _ANTHROPIC_ERRORS}


def _set_defaults(fields: dict[str, Any], defaults: SamplingDefaults) -> None:
    """Write a model's defaults into a body's fields, with the place where they are from."""
    for name, value in defaults.values.items():
        for kind in fields[name].get("anyOf", ()):
            kind.pop("default", None)
        words = f"The default of this model, from {defaults.source}."
        fields[name] |= {"default": value, "description": words}


def _response(status: int, kinds: Iterable[str], error: str = "Error") -> dict[str, Any]:
    schema = {"type": "object"} if status == 200 else {"$ref": REF.format(model=error)}
    content = {kind: {"schema": schema} if kind == JSON else {} for kind in kinds}
    phrase = _PHRASES.get(status) or HTTPStatus(status).phrase
    return {"description": phrase, "content": content}
