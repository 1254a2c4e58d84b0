"""A server in a thread of this process, whose signals a test can send by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from infer.engine.client.async_llm import AsyncLLM
from infer.server.address import url_of
from infer.server.early_listener import listening
from infer.server.multi_model import ModelRouter
from infer.server.reload import ReadAgain
from infer.server.serve import Server
from infer.server.settings import ServerSettings


@contextmanager
def running(
    engine: AsyncLLM | ModelRouter,
    settings: ServerSettings,
    read_again: ReadAgain | None = None,
) -> Iterator[tuple[Server, str, str]]:
    """Serve on a free port; yields the server, its URL, and that of its port for metrics."""
    with ExitStack() as held:
        early = held.enter_context(listening(settings, "127.0.0.1", 0, ["a-model"]))
        said = threading.Event()
        server = Server(
            engine,
            early.sock,
            settings,
            announce=lambda line: said.set(),
            early=early,
            read_again=read_again,
        )
        url = url_of(early.sock, is_tls=settings.ssl_certfile is not None)
        metrics = url_of(early.metrics.sock) if early.metrics is not None else ""
        thread = threading.Thread(target=server.serve_until_stopped)
        thread.start()
        try:
            assert said.wait(30)
            yield server, url, metrics
        finally:
            server.should_exit = True
            server.handle_exit(15, None)
            server.handle_exit(15, None)
            thread.join(30)
            assert not thread.is_alive()


def settings_with(**how: Any) -> ServerSettings:
    """Settings of a test's server."""
    return ServerSettings(**{"ui": False, "sessions": "off", **how})
