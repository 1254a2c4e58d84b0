"""`EngineEndpoints`: the endpoints about an engine as a whole, such as the stream of its steps.

docs/events.md describes what they answer.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from infer.server.body_reader import BodyReader
from infer.server.comparisons import ComparisonBody, Comparisons
from infer.server.http.context import RequestContext
from infer.server.openai.openapi import EVENTS, JSON, takes
from infer.server.openai.streaming import STREAM_HEADERS, unless_gone
from infer.server.tenancy.limits import tenant_of
from infer.server.viewers import EngineViewers, Viewer

EVENTS_PATH = "/v1/engine/events"
COMPARISONS_PATH = "/v1/engine/comparisons"


class EngineEndpoints:
    """See the module's docstring."""

    def __init__(
        self, viewers: EngineViewers, comparisons: Comparisons, bodies: BodyReader
    ) -> None:
        self._viewers = viewers
        self._comparisons = comparisons
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Their routes."""
        return [
            Route(EVENTS_PATH, self.events, methods=["GET"]),
            Route(COMPARISONS_PATH, self.compare, methods=["POST"]),
        ]

    @takes(refuses=(429,), answers=(EVENTS,))
    async def events(self, http: HttpRequest) -> Response:
        """The engine's steps and what happens to requests, as a stream that does not end."""
        if http.method == "HEAD":
            return Response(headers={name.decode(): it.decode() for name, it in STREAM_HEADERS})
        tenant = tenant_of(http.scope)
        context = RequestContext.of(http.scope)
        address = (context.client or "").rpartition(":")[0]
        viewer = self._viewers.join(tenant.visible_to, tenant.key.id, address)
        context.cleanup.callback(self._viewers.leave, viewer)
        context.on_revoked = lambda: viewer.end("key_revoked")
        return _Watching(viewer)

    @takes(ComparisonBody, refuses=(504,))
    async def compare(self, http: HttpRequest) -> Response:
        """The batching modes beside one another, on the model that ships: a recording of each."""
        body = await self._bodies.read_object(http)
        wire = await self._bodies.validate(http, ComparisonBody, body)
        owner = tenant_of(http.scope).key.id
        found = await unless_gone(http.receive, self._comparisons.run(wire, owner))
        return Response(found, media_type=JSON)


class _Watching(Response):
    """A `Response` only in that Starlette calls it: what a viewer gets, until one of both ends."""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer = viewer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
        while (data := await self._viewer.take()) is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
