"""`create_app`: the paths, the error mapper and the lifespan put together.

The app starts the engine with its lifespan and closes it at the end; an engine belongs to one app.
Whoever runs it is `serve`, or a test with any ASGI server. No paths but the ones below, and no
redirects.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from infer.errors import InferError
from infer.server.edge import Edge
from infer.server.failures import respond
from infer.server.routes import Endpoints
from infer.server.tokenizing import TokenizerEndpoints

if TYPE_CHECKING:
    from infer.engine.async_llm import AsyncLLM


def create_app(engine: AsyncLLM) -> Starlette:
    """The ASGI app over `engine`, which must not have been started."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    endpoints = Endpoints(engine, started=int(time.time()))
    tokenizing = TokenizerEndpoints(engine)
    app = Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
            Route("/v1/chat/completions/render", tokenizing.render, methods=["POST"]),
            Route("/tokenize", tokenizing.tokenize, methods=["POST"]),
            Route("/detokenize", tokenizing.detokenize, methods=["POST"]),
            Route("/tokenizer_info", tokenizing.tokenizer_info, methods=["GET"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/health", endpoints.health, methods=["GET"]),
            Route("/", endpoints.index, methods=["GET"]),
        ],
        exception_handlers={HTTPException: respond, InferError: respond},
        middleware=[Middleware(Edge)],
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app
