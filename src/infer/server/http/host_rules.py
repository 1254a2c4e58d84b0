"""`HostRules`: which hosts and pages may use a server that has no keys, on loopback"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence

from infer.server.http.http_errors import HttpError
from infer.server.http.paths import canonical_path

_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+?)\.?(?::[0-9]{1,5})?", re.ASCII)
_MAX_SHOWN = 64
_FOREIGN = ("cross-site", "same-site")
"""Values of Sec-Fetch-Site for requests of other origins' pages."""


def _opens_page(method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether somebody follows a link to the page for browsers, in a tab and not in a frame."""
    is_tab = headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")
    path = canonical_path(path)
    is_page = path == "/" or path.startswith("/ui/")
    return is_page and method == "GET" and is_tab == ("navigate", "document")


def is_loopback(address: str) -> bool:
    """Whether a text is a loopback IP address, which only this machine reaches."""
    try:
        ip = ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def name_of(host: str) -> str | None:
    """The name or address in a Host header, in lower case and without port; None if malformed."""
    match = _HOST.fullmatch(host.lower())
    return match[1] if match else None


class HostRules:
    """A page may make its own host name resolve to 127.0.0.1 (DNS rebinding); the browser then lets
    it read this server's answers. It cannot choose the headers Host, which holds that name, and
    Origin. So Host must be a loopback address, `localhost` or a name that the operator has given,
    and Origin, if present, must be the same host or one of `--cors-origins`. Requests for images
    and scripts have no Origin; of those the browser says in Sec-Fetch-Site that another site's
    page, or one of another port here, has made them. Only following a link to the page is allowed
    to these. A server with keys needs no such check, because a page has none; nor does one on
    another address, which is open to everybody anyway."""

    def __init__(self, *, has_keys: bool, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._has_keys = has_keys
        self._hosts = {"localhost", *(name_of(host) for host in hosts)}
        self._origins = frozenset(origins)

    def refusal(
        self, address: str, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[str, HttpError] | None:
        """Why a request is refused (`host` or `origin`) and its error; None if it is not.
        `address`: where it has arrived. `headers`: by their names in lower case."""
        if self._has_keys or not is_loopback(address):
            return None
        host = headers.get("host")
        if host is not None and not self._is_known(host):
            message = f"the Host {host[:_MAX_SHOWN]!r} is no name of this server, which has no keys"
            message += ": use localhost or 127.0.0.1, or allow the host with --allowed-hosts"
            return "host", HttpError(403, message, code="host_not_allowed")
        origin = headers.get("origin")
        if origin in self._origins:
            return None
        if headers.get("sec-fetch-site") in _FOREIGN and not _opens_page(method, path, headers):
            message = "pages of other sites and ports may not use this server, which has no keys"
            message += ": allow their origin with --cors-origins"
            return "origin", HttpError(403, message, code="origin_not_allowed")
        if origin is None:
            return None
        scheme, _, authority = origin.partition("://")
        if scheme in ("http", "https") and host is not None and authority == host.lower():
            return None
        message = f"pages of {origin[:_MAX_SHOWN]!r} may not use this server, which has no keys"
        message += ": allow the origin with --cors-origins"
        return "origin", HttpError(403, message, code="origin_not_allowed")

    def _is_known(self, host: str) -> bool:
        name = name_of(host)
        return name is not None and (name in self._hosts or is_loopback(name))
