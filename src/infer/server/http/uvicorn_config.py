"""`uvicorn_config`: what the server, and its port for probes, ask of uvicorn"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 75
"""Seconds that an unused connection stays open: longer than most proxies keep theirs, so that no
request meets a connection that the server is just closing."""


def uvicorn_config(
    app: ASGIApp, protocol: Callable[..., asyncio.Protocol], **more: Any
) -> uvicorn.Config:
    """`protocol` makes the `BoundedProtocol` of a connection; `more`: further settings of uvicorn.

    No variable of the environment and no header decides anything. By itself, uvicorn takes the
    address in X-Forwarded-For for the client's where the connection is from this machine or from
    FORWARDED_ALLOW_IPS, so that clients could choose the address that is logged and counted for
    them; and a WEB_CONCURRENCY that is no number ends the start.
    """
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        proxy_headers=False,
        forwarded_allow_ips=[],
        workers=1,
        **more,
    )
