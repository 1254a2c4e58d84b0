"""`Gate` and `Tenant`: whose a request is, and whether its key's limits leave room for it.

The gate stands inside the outermost layer and before all routes: every path needs a key, except
those that are listed here. It decides on the path of the ASGI scope, which no header can change. A
tenant counts what its key has open and fills its buckets of requests and tokens by the clock; a
request's tokens are reserved when it comes and what it did not use is given back when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.errors import RequestError
from infer.server.failures import HttpError, describe, log
from infer.server.keys import ANYBODY, Key, Keys
from infer.server.story import Story
from infer.server.visit import Visit
from infer.types import Request

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
WATCH_S = 0.25
"""between two looks at the file of keys, while requests are open"""
ADMIN_PATHS = frozenset({"/metrics", "/stats"})


class Bucket:
    """So much a minute: full at the start, filled evenly."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.size = per_minute
        self._level = float(per_minute)
        self._clock = clock
        self._at_s = clock()

    def level(self) -> float:
        """What is in it now; below 0 after more was used than was reserved."""
        now_s = self._clock()
        filled = self._level + (now_s - self._at_s) * self.size / 60
        self._level, self._at_s = min(float(self.size), filled), now_s
        return self._level

    def wait_s(self, amount: float) -> float:
        """How long until there is so much; 0 = now."""
        return max(0.0, (amount - self.level()) * 60 / self.size)

    def take(self, amount: float) -> None:
        """Use (or, below 0, give back) so much."""
        self._level = min(float(self.size), self.level() - amount)


class Tenant:
    """The state of a key: one for each, as long as the server runs."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self._num_open = 0
        limits = key.limits
        self._buckets = {
            name: Bucket(per_minute, clock)
            for name, per_minute in (
                ("requests", limits.requests_per_minute),
                ("tokens", limits.tokens_per_minute),
            )
            if per_minute is not None
        }

    @property
    def sight(self) -> str | None:
        """Whose requests it may see: None = everybody's."""
        return None if self.key.limits.admin else self.key.id

    def enter(self, visit: Visit, num_queued: int) -> None:
        """A request for the model has come; raises 429. Costs nothing if it is refused."""
        limits = self.key.limits
        if self._num_open >= limits.max_concurrent:
            raise _too_many(f"this key may have {limits.max_concurrent} requests open", 1)
        if num_queued > limits.max_queued:
            raise _too_many(f"this key may have {limits.max_queued} choices waiting", 1)
        self._take("requests", 1, visit)
        self._num_open += 1
        visit.leaving.callback(self._leave)

    def _leave(self) -> None:
        self._num_open -= 1

    def reserve(self, requests: Sequence[Request], visit: Visit) -> Callable[[Story], None]:
        """Take the tokens that requests may use; the result gives back what they did not."""
        bucket = self._buckets.get("tokens")
        most = sum(len(request.prompt_token_ids) + request.max_tokens for request in requests)
        reserved = min(most, bucket.size) if bucket else 0
        self._take("tokens", reserved, visit)

        def settle(story: Story) -> None:
            if bucket:
                bucket.take(story.num_prompt + story.sum_of("num_tokens") - reserved)

        return settle

    def _take(self, name: str, amount: int, visit: Visit) -> None:
        bucket = self._buckets.get(name)
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount)
        if not wait_s:
            bucket.take(amount)
        left = max(0, int(bucket.level()))
        reset_s = 60 * (1 - max(0.0, bucket.level()) / bucket.size)
        visit.headers += [
            (f"x-ratelimit-limit-{name}", str(bucket.size)),
            (f"x-ratelimit-remaining-{name}", str(left)),
            (f"x-ratelimit-reset-{name}", f"{reset_s:.3f}s"),
        ]
        if wait_s:
            raise _too_many(f"this key may use {bucket.size} {name} a minute", wait_s)


def _too_many(message: str, wait_s: float) -> RequestError:
    error = HttpError(429, message, code="rate_limit_exceeded")
    error.type = "rate_limit_error"
    error.retry_after_s = math.ceil(wait_s)
    return error


def revoked() -> HttpError:
    """What ends a request whose key was revoked."""
    return HttpError(401, "the API key of this request was revoked", code="invalid_api_key")


class Gate:
    """See the module's docstring; `keys` None = there are none, and everybody is trusted."""

    def __init__(self, app: ASGIApp, keys: Keys | None) -> None:
        self._app = app
        self._keys = keys
        self._tenants: dict[str, Tenant] = {}
        self._anybody = Tenant(ANYBODY)
        self._open: dict[str, list[Visit]] = {}
        """of each key; those of a key that is revoked are ended"""
        self._watching = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit, path = Visit.of(scope), scope["path"]
        visit.tenant = self._anybody
        if self._keys is not None and path not in OPEN_PATHS:
            headers = Headers(scope=scope)
            try:
                key = self._key_of(headers)
            except (OSError, ValueError) as problem:
                log.error("the file of keys cannot be read, nobody is let in: %s", problem)
                error = HttpError(
                    503, "the keys of this server cannot be read now", code="keys_unavailable"
                )
                error.type, error.retry_after_s = "server_error", 5
                await describe(error)(scope, receive, send)
                return
            if key is None:  # OpenAI's words, by which LiteLLM tells it from other refusals
                found = "Incorrect" if "authorization" in headers else "No"
                message = f"{found} API key provided; send one that this server knows as"
                message += " `Authorization: Bearer KEY`"
                error = HttpError(401, message, code="invalid_api_key")
                await describe(error)(scope, receive, send)
                return
            visit.key_name = key.name
            visit.tenant = self._tenant_of(key)
            self._watch(key, visit)
            if path in ADMIN_PATHS and not key.limits.admin:
                error = HttpError(403, "this is for keys of admins", code="permission_denied")
                await describe(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _key_of(self, headers: Headers) -> Key | None:
        assert self._keys is not None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            return None
        return self._keys.find(token.strip())

    def _watch(self, key: Key, visit: Visit) -> None:
        """Until it ends, look whether the key is still there."""
        visits = self._open.setdefault(key.id, [])
        visits.append(visit)
        visit.leaving.callback(visits.remove, visit)
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(WATCH_S, self._end_revoked)

    def _end_revoked(self) -> None:
        assert self._keys is not None
        self._open = {key: visits for key, visits in self._open.items() if visits}
        self._watching = bool(self._open)
        if not self._watching:
            return
        # What is wrong with the file is said where somebody asks to be let in.
        with contextlib.suppress(OSError, ValueError):
            self._keys.refresh()
            known = {key.id for key in self._keys.all()}
            for key_id in self._open.keys() - known:
                for visit in self._open[key_id]:
                    if visit.on_revoked is not None:
                        visit.on_revoked()
        asyncio.get_running_loop().call_later(WATCH_S, self._end_revoked)

    def _tenant_of(self, key: Key) -> Tenant:
        tenant = self._tenants.get(key.id)
        if tenant is None or tenant.key != key:
            assert self._keys is not None
            known = {other.id for other in self._keys.all()}
            self._tenants = {i: t for i, t in self._tenants.items() if i in known}
            tenant = self._tenants[key.id] = Tenant(key)
        return tenant


def tenant_of(scope: Scope) -> Tenant:
    """Whose a request is, behind the gate."""
    tenant = Visit.of(scope).tenant
    assert isinstance(tenant, Tenant)
    return tenant
