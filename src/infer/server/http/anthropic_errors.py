"""The errors of Anthropic's API, made from OpenAI's, which all layers of the server write

The standard library only: the server's port answers before the server is imported. `error_forms`
changes what leaves the server.
"""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

OVERLOADED = 529
"""Anthropic's status of a server without room."""
NO_THREADS = "thread_unsupported_request"
"""Code of the error that makes Anthropic's clients keep the conversation themselves."""
VERSION = "anthropic-version"
"""Header of all requests of Anthropic's clients."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
"""Status → type of an error."""


def is_anthropic(path: str, headers: Container[str] = ()) -> bool:
    """Whether errors have Anthropic's form: at the paths that only its API has, and elsewhere for
    its clients, all of which send `anthropic-version`. `headers`: the names in lower case."""
    at_home = path == "/v1/messages" or path.startswith("/v1/messages/")
    return at_home or VERSION in headers


def anthropic_error(
    status: int, error: dict[str, Any], request_id: str = ""
) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error; `error`: OpenAI's members of it."""
    if status == 503 and error.get("type") == "overloaded_error":
        status = OVERLOADED
    if status == 422:  # of which Anthropic's API knows nothing
        status = 400
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields: dict[str, Any] = {"type": kind, "message": error["message"]}
    if error.get("code") == NO_THREADS:
        fields["details"] = {"error_code": NO_THREADS, "unsupported": [error["param"]]}
    return status, {"type": "error", "error": fields, "request_id": request_id or None}


def reformed_body(status: int, data: bytes, request_id: str) -> tuple[int, bytes]:
    """(status, body) of an error in Anthropic's form; `data`: its body in OpenAI's. What is no
    error of OpenAI's, such as why a probe failed, stays as it is."""
    try:
        error = json.loads(data)["error"]
    except (ValueError, LookupError, TypeError):
        return status, data
    status, fields = anthropic_error(status, error, request_id)
    return status, json.dumps(fields, separators=(",", ":")).encode()
