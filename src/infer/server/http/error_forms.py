"""The errors of Anthropic's API, made from OpenAI's, which all layers of the server write

One place changes what leaves the server, so that an error of any layer has the form of the API that
was asked.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message

OVERLOADED = 529
"""Anthropic's status of a server without room"""
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
"""status → type of an error"""


def is_anthropic(path: str) -> bool:
    """Whether answers at this path have Anthropic's form."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_error(
    status: int, error: dict[str, Any], request_id: str = ""
) -> tuple[int, dict[str, Any]]:
    """(status, body) of an error; `error`: OpenAI's members of it."""
    if status == 503 and error.get("type") == "overloaded_error":
        status = OVERLOADED
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields = {"type": kind, "message": error["message"]}
    return status, {"type": "error", "error": fields, "request_id": request_id or None}


def anthropic_response(response: Response, request_id: str) -> Response:
    """The same error in Anthropic's form."""
    status, data = _reformed(response.status_code, bytes(response.body), request_id)
    response.status_code, response.body = status, data
    response.headers["content-length"] = str(len(data))
    return response


def reformed(start: Message, body: Message, request_id: str) -> tuple[Message, Message]:
    """The two messages of an error's response, in Anthropic's form."""
    status, data = _reformed(start["status"], body["body"], request_id)
    start = {**start, "status": status, "headers": list(start.get("headers", ()))}
    MutableHeaders(raw=start["headers"])["content-length"] = str(len(data))
    return start, {**body, "body": data}


def _reformed(status: int, data: bytes, request_id: str) -> tuple[int, bytes]:
    status, fields = anthropic_error(status, json.loads(data)["error"], request_id)
    return status, json.dumps(fields, separators=(",", ":")).encode()
