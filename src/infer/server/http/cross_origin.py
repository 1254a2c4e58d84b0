"""`AllowedOrigins`: answers browsers' questions about the origins that the operator allows"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from infer.server.http.error_responses import HttpError, describe

_METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
_SHOWN_HEADERS = (
    *("x-request-id", "request-id", "retry-after"),
    *("x-warning", "x-ignored-params", "x-truncated-messages"),
)
"""Headers of an answer that pages may read, in addition to those that browsers always show."""


class AllowedOrigins(CORSMiddleware):
    """Before a page's request a browser may ask whether it is allowed (a preflight). SDKs send
    headers of their own that nobody can list, so a page of an allowed origin may send any. Headers
    give no rights here but the API key, and that the page must know."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            allow_private_network=True,  # the origin may use this server wherever it is
            expose_headers=_SHOWN_HEADERS,
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """204 if the page may; else 400 with what is not allowed."""
        answer = super().preflight_response(request_headers)
        headers = {name: text for name, text in answer.headers.items() if name not in _OF_BODIES}
        if answer.status_code == 200:
            return Response(status_code=204, headers=headers)
        if self.is_allowed_origin(request_headers["origin"]):
            message = f"pages may use the methods {', '.join(_METHODS)}"
        else:
            message = "pages of this origin may not use this server: allow it with --cors-origins"
        refusal = describe(HttpError(400, message, code="origin_not_allowed"))
        refusal.headers.update(headers)
        return refusal


_OF_BODIES = ("content-length", "content-type")
