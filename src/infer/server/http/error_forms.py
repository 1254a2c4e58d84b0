"""Errors in the form of the API that was asked: in one place for what leaves the server"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message

from infer.server.http.anthropic_errors import reformed_body


def anthropic_response(response: Response, request_id: str) -> Response:
    """The same error in Anthropic's form."""
    status, data = reformed_body(response.status_code, bytes(response.body), request_id)
    response.status_code, response.body = status, data
    response.headers["content-length"] = str(len(data))
    return response


def reformed(start: Message, body: Message, request_id: str) -> tuple[Message, Message]:
    """The two messages of an error's response, in Anthropic's form."""
    status, data = reformed_body(start["status"], body["body"], request_id)
    start = {**start, "status": status, "headers": list(start.get("headers", ()))}
    MutableHeaders(raw=start["headers"])["content-length"] = str(len(data))
    return start, {**body, "body": data}
