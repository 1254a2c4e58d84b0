"""`EngineEndpoints`: the endpoints about engines and their requests, however many there are

`RequestViews` says what they answer. docs/events.md describes the stream of an engine's steps.
Where there are several models, each takes `?model=`, and an unknown one is a 404.
"""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from infer.server.http.connections import connections_of
from infer.server.http.context import RequestContext
from infer.server.model_card import model_list
from infer.server.observe.metrics import CONTENT_TYPE
from infer.server.offload import Offload
from infer.server.openai.large_json import json_response
from infer.server.openai.openapi import EVENTS, takes
from infer.server.openai.streaming import STREAM_HEADERS, unless_gone
from infer.server.request_views import Asking, RequestViews
from infer.server.tenancy.limits import tenant_of
from infer.server.viewers import Viewer

_BYTES_A_REQUEST = 500
"""size of a request in a list, about"""


def _asking(http: HttpRequest) -> Asking:
    visible_to, model = tenant_of(http.scope).visible_to, http.query_params.get("model")
    return Asking(visible_to, model, RequestContext.of(http.scope))


class EngineEndpoints:
    """See the module's docstring."""

    def __init__(self, views: RequestViews, offload: Offload) -> None:
        self._views = views
        self._offload = offload

    @takes(refuses=(404,))
    async def requests(self, http: HttpRequest) -> Response:
        """The requests that run, and the latest that have ended."""
        fields = await self._views.requests(_asking(http))
        num_bytes = _BYTES_A_REQUEST * len(fields["data"])
        return await self._offload.render(http, num_bytes, json_response, fields)

    @takes(refuses=(409,))
    async def request(self, http: HttpRequest) -> Response:
        """The trace of one, by its id or its client's X-Request-Id: what it waited for, and why."""
        return JSONResponse(await self._views.request(_asking(http), http.path_params["id"]))

    @takes(refuses=(409,))
    async def cancel(self, http: HttpRequest) -> Response:
        """End one."""
        return JSONResponse(await self._views.cancel(_asking(http), http.path_params["id"]))

    @takes(refuses=(404, 429), answers=(EVENTS,))
    async def events(self, http: HttpRequest) -> Response:
        """The engine's steps and what happens to requests, as a stream that does not end."""
        if http.method == "HEAD":
            return Response(headers={name.decode(): it.decode() for name, it in STREAM_HEADERS})
        asking, tenant = _asking(http), tenant_of(http.scope)
        viewers, context = self._views.viewers(asking), asking.context
        address = (context.client or "").rpartition(":")[0]
        viewer = viewers.join(asking.visible_to, tenant.key.id, address)
        context.cleanup.callback(viewers.leave, viewer)
        context.on_revoked = lambda: viewer.end("key_revoked")
        return _Watching(viewer)

    @takes(refuses=(404,), answers=("text/plain",))
    async def metrics(self, http: HttpRequest) -> Response:
        """For Prometheus."""
        text = await self._views.metrics(_asking(http), connections_of(http.scope))
        return Response(text, headers={"content-type": CONTENT_TYPE})

    @takes(refuses=(404,))
    async def stats(self, http: HttpRequest) -> Response:
        """Queue depth, batch sizes, waiting times."""
        return JSONResponse(await self._views.stats(_asking(http)))

    async def models(self, _: HttpRequest) -> Response:
        """The model, in a list."""
        return JSONResponse(model_list(self._views.models()))

    async def model(self, http: HttpRequest) -> Response:
        """The model of this name."""
        return JSONResponse(self._views.model(http.path_params["name"]))

    async def health(self, _: HttpRequest) -> Response:
        """200 while requests are taken and move on, else 503."""
        return JSONResponse(self._views.health())

    async def ready(self, _: HttpRequest) -> Response:
        """200 while a request would be worked on at once, else 503."""
        return JSONResponse(self._views.ready())


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
