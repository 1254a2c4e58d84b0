"""`AuthMiddleware`: authentication by API key; `Tenant`: enforcement of a key's limits"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from infer.errors import RevokedKeyError
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import HttpError, describe, log, too_many
from infer.server.observe.request_trace import RequestTrace
from infer.server.tenancy.keys import ANYBODY, Key, Keys
from infer.server.tenancy.limit_messages import LimitAsk
from infer.server.tenancy.local_limits import LocalLimits
from infer.server.tenancy.reader_places import ReaderPlaces
from infer.types import Request

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
"""Paths that need no key."""
WATCH_S = 0.25
"""Interval in seconds at which the file of keys is checked while requests are open."""
ADMIN_PATHS = frozenset(
    {"/metrics", "/stats", "/v1/engine/comparisons", "/v1/models/load", "/v1/models/unload"}
)
"""Paths that need a key with the right `admin`."""
CHARS_A_TOKEN = 4
"""Characters per token at which text other than prompts is charged."""
FREE_CPU_S, TOKENS_A_CPU_SECOND = 0.1, 1000
"""CPU seconds of one job that cost nothing beyond its characters, and tokens at which each further
second is charged."""
RESERVED_PART = 8
"""One part in so many of an engine's queue is for keys of which nothing waits."""
AGENT_PART = 4
"""One part in so many of a bucket is taken before a request that may use more than all of it."""
MAX_MINUTES = 4
"""Minutes of a key's tokens that one request may use; beyond one minute the bucket goes below 0."""


def costs(method: str, path: str) -> bool:
    """Whether a request counts against its key's limits; those that only read state, or end a
    request, do not."""
    if path.startswith("/v1/requests") or path.endswith("/cancel"):
        return False
    is_read = method in ("GET", "HEAD", "OPTIONS")
    return not is_read or path.startswith(("/v1/sessions", "/v1/responses/"))


class Tenant:
    """The state of one API key while the server runs."""

    def __init__(self, key: Key, limits: LocalLimits | None = None) -> None:
        """`limits`: who decides; default: this tenant alone."""
        self.key = key
        self._limits = limits or LocalLimits()
        self.readers = ReaderPlaces()
        self._num_generating = 0
        requests, tokens = key.limits.requests_per_minute, key.limits.tokens_per_minute
        self._sizes = {"requests": requests or 0, "tokens": tokens or 0}
        """Of the key's buckets; 0: there is none."""

    @property
    def visible_to(self) -> str | None:
        """Id of the key whose requests it may see; None = those of all keys."""
        return None if self.key.limits.admin else self.key.id

    @property
    def num_generating(self) -> int:
        """Number of choices that have a place and are in no trace yet."""
        return self._num_generating

    @property
    def num_open(self) -> int:
        """Number of requests that are open."""
        return self._limits.num_open(self.key.id)

    def level(self, name: str) -> float:
        """What may be used now of `requests` or `tokens`, of which there is a limit a minute."""
        return self._limits.level(self.key.id, name, self._sizes[name])

    async def enter(self, context: RequestContext) -> None:
        """Count a request until its context is cleaned up; raises `HttpError` (429) if the key has
        too many open or per minute. A refused request is not counted."""
        await self._take("requests", 1, context, num_opened=1)
        context.cleanup.callback(self._limits.leave, self.key.id)

    @contextmanager
    def queueing(
        self,
        num_choices: int,
        *,
        num_queued: int,
        num_taken: int,
        num_seats: int,
        max_waiting: int,
    ) -> Iterator[None]:
        """Count choices as waiting until the block ends, in which they take their places.

        `num_queued`: choices of this key that wait already. `num_taken`: choices of all keys that
        run or wait. `num_seats`: choices that can run at the same time. `max_waiting`: choices of
        all keys that may wait. Raises `HttpError`: 429 if more choices would wait than the key may
        have waiting, or what is left is for keys of which none waits; 400 if they never could fit.
        """
        most = self.key.limits.max_queued
        if num_choices > most + num_seats:
            message = f"this key may have {most} choices waiting, beside {num_seats} that run: send"
            message += f" at most {most + num_seats} in one request, not {num_choices}"
            raise HttpError(400, message, code="too_many_choices")
        num_own = num_queued + self._num_generating + num_choices
        num_left_over = num_taken + num_choices - num_seats
        if min(num_own, num_left_over) > most:
            raise too_many(f"this key may have {most} choices waiting", 1)
        has_waiting = self.key.id and num_own > num_choices
        if has_waiting and 0 <= max_waiting - num_left_over < max_waiting // RESERVED_PART:
            raise too_many("the queue is nearly full, and choices of this key are in it", 1)
        self._num_generating += num_choices
        try:
            yield
        finally:
            self._num_generating -= num_choices

    async def charge_chars(self, num_chars: int, context: RequestContext) -> None:
        """Charge work on text that is no prompt (grammars, requests to the tokenizer) as tokens, at
        `CHARS_A_TOKEN`; raises `HttpError` (429). Nothing is given back later."""
        if amount := min(math.ceil(num_chars / CHARS_A_TOKEN), self._sizes["tokens"]):
            await self._take("tokens", amount, context)

    def charge_cpu(self, cpu_s: float) -> None:
        """Charge CPU time of other processes (checking a grammar, rendering a chat) as tokens, at
        `TOKENS_A_CPU_SECOND`, where it is more than usual. The bucket may go below 0: then the
        key's next requests wait."""
        if cpu_s > FREE_CPU_S:
            amount = math.ceil((cpu_s - FREE_CPU_S) * TOKENS_A_CPU_SECOND)
            self._change_tokens(min(amount, self._sizes["tokens"]))

    def _change_tokens(self, amount: int) -> None:
        if amount and (size := self._sizes["tokens"]):
            self._limits.change(self.key.id, "tokens", size, amount)

    def fitted(self, requests: list[Request], *, clamps: bool) -> list[Request]:
        """The requests, if together they may use at most `MAX_MINUTES` of the key's tokens.

        Otherwise, with `clamps`, they are returned with as many tokens as fit: agents send the same
        large `max_tokens` with each request, and only what is used counts. Raises `HttpError` (400)
        if that is none, or without `clamps`.
        """
        per_minute = self.key.limits.tokens_per_minute
        if per_minute is None or not requests:
            return requests
        most = MAX_MINUTES * per_minute
        if _worst_case(requests) <= most:
            return requests
        num_prompts = sum(len(request.prompt_token_ids) for request in requests)
        room = (most - num_prompts) // len(requests)
        if not clamps or room < max(1, requests[0].sampling.min_tokens):
            message = f"this request may use {_worst_case(requests)} tokens; this key has"
            message += f" {per_minute} a minute, and one request may use {most}: send a smaller"
            message += " max_tokens, fewer choices or a shorter prompt"
            raise HttpError(400, message, code="tokens_per_minute_exceeded", param="max_tokens")
        return [replace(request, max_tokens=min(request.max_tokens, room)) for request in requests]

    @asynccontextmanager
    async def acquire(
        self, requests: Sequence[Request], context: RequestContext
    ) -> AsyncIterator[Grant]:
        """Take the tokens that requests may use; raises `HttpError` (429). A grant that the block
        leaves unused is given back.

        Agents let each request use more than a full bucket, and it hardly ever does. So of these
        only the prompts are taken before, or one part in `AGENT_PART` of the bucket, if that is
        more."""
        size, amount = self._sizes["tokens"], _worst_case(requests)
        if amount > size:
            num_prompt = sum(len(request.prompt_token_ids) for request in requests)
            amount = min(size, max(num_prompt, size // AGENT_PART))
        grant = Grant(self._change_tokens, amount)
        if grant.amount:
            await self._take("tokens", grant.amount, context)
        try:
            yield grant
        finally:
            if not grant.is_used:
                self._change_tokens(-grant.amount)

    async def _take(
        self, name: str, amount: int, context: RequestContext, num_opened: int = 0
    ) -> None:
        """Take an amount from a bucket, if the key has it, and count an open request; raises
        `HttpError` (429)."""
        size, most = self._sizes[name], self.key.limits.max_concurrent
        ask = LimitAsk(self.key.id, name if size else "", size, amount, num_opened, most)
        verdict = await self._limits.acquire(ask)
        if verdict.is_full:
            raise too_many(f"this key may have {most} requests open", 1)
        if not size:
            return
        reset_s = 60 * (1 - max(0.0, verdict.level) / size)
        shown = {
            f"x-ratelimit-limit-{name}": str(size),
            f"x-ratelimit-remaining-{name}": str(max(0, int(verdict.level))),
            f"x-ratelimit-reset-{name}": f"{reset_s:.3f}s",
        }
        kept = [header for header in context.headers if header[0] not in shown]
        context.headers[:] = [*kept, *shown.items()]
        if verdict.wait_s:
            raise too_many(f"this key may use {size} {name} a minute", verdict.wait_s)


class Grant:
    """Tokens that a request may use."""

    def __init__(self, change: Callable[[int], None], amount: int) -> None:
        """`change` takes tokens from the key's bucket."""
        self._change = change
        self.amount = amount
        self.is_used = False

    def use(self, context: RequestContext, trace: RequestTrace) -> None:
        """Let the request of a trace have them. When its context ends, the key's bucket is
        corrected by what it has used."""
        self.is_used = True
        context.cleanup.callback(self._settle, trace)

    def _settle(self, trace: RequestTrace) -> None:
        self._change(trace.num_prompt + trace.sum_of("num_tokens") - self.amount)


def _worst_case(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt_token_ids) + request.max_tokens for request in requests)


def revoked() -> RevokedKeyError:
    """The error that ends a request whose key was revoked. It passes the engine's façade, which
    knows the errors of `infer.errors` and their statuses only."""
    return RevokedKeyError("the API key of this request was revoked")


class AuthMiddleware:
    """The middleware is inside the outermost layer and before all routes. Every path needs a key,
    except `OPEN_PATHS`. It decides by the path of the ASGI scope, which no header can change. A
    tenant counts its key's open requests and has token buckets of requests and tokens per minute.
    Every request that causes work is counted before its body is read. The maximum tokens of an
    answer are reserved when it begins; those not used are given back when it ends. `keys` is None
    for a server without keys, which lets every request pass."""

    def __init__(self, app: ASGIApp, keys: Keys | None, limits: LocalLimits | None = None) -> None:
        """`limits`: who decides about the keys' limits; default: each `Tenant` alone."""
        self._app = app
        self._keys = keys
        self._limits = limits
        self._tenants: dict[str, Tenant] = {}
        self._known: frozenset[str] = frozenset()
        """`Keys.ids` when tenants of other keys were forgotten last."""
        self._anybody = Tenant(ANYBODY)
        self._open: dict[str, list[RequestContext]] = {}
        """Contexts of open requests by key id; those of a revoked key are ended."""
        self._watching = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, path = RequestContext.of(scope), scope["path"]
        context.tenant = self._anybody
        if self._keys is not None and path not in OPEN_PATHS:
            headers = Headers(scope=scope)
            try:
                key = self._key_of(headers)
            except (OSError, ValueError) as problem:
                log.error("the file of keys cannot be read; all requests are refused: %s", problem)
                error = HttpError(
                    503,
                    "the keys of this server cannot be read now",
                    code="keys_unavailable",
                    type="server_error",
                    retry_after_s=5,
                )
                await describe(error)(scope, receive, send)
                return
            if key is None:  # OpenAI's words, by which LiteLLM recognises it
                is_sent = "authorization" in headers or "x-api-key" in headers
                fault = "Incorrect" if is_sent else "No"
                message = f"{fault} API key provided; send one that this server knows as"
                message += " `Authorization: Bearer KEY`"
                error = HttpError(401, message, code="invalid_api_key")
                await describe(error)(scope, receive, send)
                return
            context.key_name = key.name
            context.tenant = tenant = self._tenant_of(key)
            self._watch(key, context)
            if path in ADMIN_PATHS and not key.limits.admin:
                message = "only a key with the right `admin` may use this"
                error = HttpError(403, message, code="permission_denied")
                await describe(error)(scope, receive, send)
                return
            if costs(scope["method"], path):
                try:
                    await tenant.enter(context)
                except HttpError as error:
                    await describe(error)(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _key_of(self, headers: Headers) -> Key | None:
        assert self._keys is not None
        authorization = headers.get("authorization")
        if authorization is None:
            token = headers.get("x-api-key", "")
        else:
            scheme, _, token = authorization.partition(" ")
            token = token if scheme.lower() == "bearer" else ""
        if not token:
            return None
        return self._keys.find(token.strip())

    def _watch(self, key: Key, context: RequestContext) -> None:
        """Check until the request ends whether its key has been revoked."""
        contexts = self._open.setdefault(key.id, [])
        contexts.append(context)
        context.cleanup.callback(contexts.remove, context)
        if not self._watching:
            self._watching = True
            asyncio.get_running_loop().call_later(WATCH_S, self._end_revoked)

    def _end_revoked(self) -> None:
        assert self._keys is not None
        self._open = {key: contexts for key, contexts in self._open.items() if contexts}
        self._watching = bool(self._open)
        if not self._watching:
            return
        # A file that cannot be read is reported when a request is authenticated.
        with contextlib.suppress(OSError, ValueError):
            self._keys.refresh()
            for key_id in self._open.keys() - self._keys.ids:
                for context in self._open[key_id]:
                    if context.on_revoked is not None:
                        context.on_revoked()
        asyncio.get_running_loop().call_later(WATCH_S, self._end_revoked)

    def _tenant_of(self, key: Key) -> Tenant:
        tenant = self._tenants.get(key.id)
        if tenant is None or tenant.key != key:
            assert self._keys is not None
            if self._known is not (known := self._keys.ids):  # the file has changed
                self._tenants = {i: t for i, t in self._tenants.items() if i in known}
                self._known = known
            tenant = self._tenants[key.id] = Tenant(key, self._limits)
        return tenant


def tenant_of(scope: Scope) -> Tenant:
    """The tenant of a request that has passed `AuthMiddleware`."""
    tenant = RequestContext.of(scope).tenant
    assert isinstance(tenant, Tenant)
    return tenant
