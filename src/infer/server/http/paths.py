"""Paths as clients write them: `canonical_path`, and `nearest_path` for the 404 of a wrong base URL

Clients join a base URL and a path, so a slash too many is common, at the joint or at the end. It
changes nothing here; a redirect would lose the body of a POST. Nor does a whole URL in place of a
path (`path_of`). A base URL that has a part too many
or too few (`/v1/v1/models`, `/models`, `/api/v1/models`) names no route, and the answer says which
path was meant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

_MAX_SEGMENTS = 12
"""Number of parts of a path beyond which no other path is looked for."""
_MAX_CHARS = 256
_URL = re.compile(r"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_BASE = "/v1"
_OTHER_APIS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/chat": "/v1/chat/completions",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/v1/chat": "/v1/chat/completions",
    "/v1/engines": "/v1/models",
}
"""Paths of other servers' APIs → the path here that does the same."""


def path_of(target: str, host: str) -> str:
    """The path of a request's target without its query, which may be a whole URL of the same host
    as the header (RFC 9112, 3.2.2), as clients of proxies send it; see `canonical_path`."""
    if not target.startswith("/") and (url := _URL.fullmatch(target)):
        target = url[2] if url[1].lower() == host.lower() else target
    return canonical_path(target or "/")


def canonical_path(path: str) -> str:
    """A path with single slashes, and none at its end."""
    if "//" not in path and (not path.endswith("/") or path == "/"):
        return path
    return re.sub("/{2,}", "/", path).rstrip("/") or "/"


def nearest_path(path: str, routes: Sequence[BaseRoute]) -> str | None:
    """The path of one of `routes` that a client meant by a `path` that is none; None: unknown."""
    from starlette.routing import Route

    segments = path.strip("/").split("/")
    if len(path) > _MAX_CHARS or len(segments) > _MAX_SEGMENTS:
        return None
    for first in range(len(segments)):
        rest = "/" + "/".join(segments[first:])
        for meant in (_BASE + rest, rest):
            if meant not in ("/", path) and _is_route(meant, routes):
                return meant
    known = [route.path for route in routes if isinstance(route, Route) and "{" not in route.path]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    ends = ("/" + "/".join(segments[first:]) for first in range(len(segments)))
    others = [_OTHER_APIS[end] for end in ends if end in _OTHER_APIS]
    return _OTHER_APIS.get(path) or next(iter([*near, *others]), None)


def _is_route(path: str, routes: Sequence[BaseRoute]) -> bool:
    from starlette.routing import Match, Route

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    return any(
        isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE for route in routes
    )
