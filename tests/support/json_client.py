"""Plain requests to a server on this machine, with the JSON of their answers."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any


def call(
    port: int,
    path: str,
    body: Any = None,
    *,
    headers: Mapping[str, str] | None = None,
    method: str | None = None,
) -> tuple[int, Any]:
    """Status and JSON of an answer; None where it has no JSON. `body`: sent as JSON.

    `method`: POST where there is a body and GET otherwise, unless it is given.
    """
    data = None if body is None else json.dumps(body).encode()
    head = {**(headers or {}), "content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, head, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, said = answer.status, answer.read()
    except urllib.error.HTTPError as refused:
        status, said = refused.code, refused.read()
    try:
        return status, json.loads(said)
    except ValueError:
        return status, None
