"""`Page`: the files of the page in memory; `PageLayer`: answers the requests for them

The files are read, compressed and hashed at the start, so a request costs a look-up. `/` is the
page for clients that accept `text/html`, and goes on to the list of routes for all others. Files
below `/ui/` need no key: they are the same for everybody and hold no secrets. The page asks the API
with its reader's key. Its policy forbids scripts, styles, connections and frames of other hosts.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.server.http.error_responses import HttpError, describe

log = logging.getLogger("infer.server")

FOLDER = Path(__file__).parent
PREFIX = "/ui/"
START = "index.html"
WORKER = "sw.js"
"""The service worker, which keeps the page's files; its scope is the page, above its folder."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    " manifest-src 'self'; worker-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types lit-html dompurify infer-worker"
)
"""The Content-Security-Policy of every file."""
NEEDED = (
    "index.html",
    "main.js",
    *(f"vendor/{name}.js" for name in ("core", "highlight", "katex", "uplot", "schema")),
    "vendor/uplot.css",
)
"""Files without which the page, or a part of it, does not work."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
"""Media types by suffix; files with other suffixes are not served."""


@dataclass(frozen=True)
class _File:
    """A file of the page."""

    body: bytes
    compressed: bytes
    """The body as gzip."""
    etag: str
    media_type: str


class Page:
    """The files of the page by their path below the folder, such as `vendor/core.js`."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Reads the files of `folder`, and logs which of `NEEDED` are missing."""
        self._files: dict[str, _File] = {}
        for path in sorted(folder.rglob("*")):
            if path.suffix in _TYPES and path.is_file():
                self._files[path.relative_to(folder).as_posix()] = _read(path)
        missing = [name for name in NEEDED if name not in self._files]
        if missing:
            log.error(
                "the page for browsers does not work in full: %s missing in %s; install infer"
                " again, or start it with --no-ui",
                ", ".join(missing) + (" is" if len(missing) == 1 else " are"),
                folder,
            )

    def find(self, name: str) -> _File | None:
        """The file at a path below the folder; None if there is none."""
        return self._files.get(name)

    def answer(self, name: str, headers: Headers) -> Response:
        """The answer with a file: compressed where the client can read gzip, empty (304) where it
        has the file already, 404 where there is none."""
        file = self._files.get(name)
        if file is None:
            return describe(HttpError(404, "the page has no such file", code="not_found"))
        file_headers = {
            "etag": file.etag,
            "cache-control": "no-cache",
            "vary": "accept-encoding" if name != START else "accept, accept-encoding",
            "content-security-policy": POLICY,
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }
        if name == WORKER:
            file_headers["service-worker-allowed"] = "/"
        if _has_tag(headers.get("if-none-match", ""), file.etag):
            return Response(status_code=304, headers=file_headers)
        body = file.body
        if _takes(headers.getlist("accept-encoding"), {"gzip"}):
            body, file_headers["content-encoding"] = file.compressed, "gzip"
        return Response(body, headers={**file_headers, "content-type": file.media_type})


def _read(path: Path) -> _File:
    body = path.read_bytes()
    compressed = gzip.compress(body, 9, mtime=0)
    # Weak: the same tag stands for the compressed and the plain body.
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:24]}"'
    return _File(body, compressed, etag, _TYPES[path.suffix])


def _has_tag(header: str, etag: str) -> bool:
    """Whether an If-None-Match names a tag."""
    given = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in given or etag.removeprefix("W/") in given


def _takes(headers: Iterable[str], names: set[str]) -> bool:
    """Whether a header of the kind of Accept names one of `names`, other than with `q=0`."""
    for part in ",".join(headers).lower().split(","):
        name, *parameters = (word.strip() for word in part.split(";"))
        if name in names:
            return not any(p.replace(" ", "") in ("q=0", "q=0.0", "q=0.00") for p in parameters)
    return False


class PageLayer:
    """Answers requests for the page's files; all others go on to the app inside."""

    def __init__(self, app: ASGIApp, page: Page) -> None:
        self._app = app
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (name := self._name(scope)) is not None:
            if scope["method"] not in ("GET", "HEAD"):
                error = HttpError(405, "the page's files are read with GET", code="bad_method")
                response = describe(error)
                response.headers["allow"] = "GET, HEAD"
            else:
                response = self._page.answer(name, Headers(scope=scope))
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _name(self, scope: Scope) -> str | None:
        """The file that a request asks for; None if it asks for something else."""
        path = scope["path"]
        if path.startswith(PREFIX):
            return str(path.removeprefix(PREFIX))
        is_read = path == "/" and scope["method"] in ("GET", "HEAD")
        if is_read and _takes(Headers(scope=scope).getlist("accept"), {"text/html"}):
            return START
        return None
