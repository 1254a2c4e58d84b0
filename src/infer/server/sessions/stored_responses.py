"""`StoredResponses`: responses that can be read again and gone on from, in the database of sessions

A stored response is a session of its own kind: its first row is the response, then come the items
of the conversation before it and those of its request. So one can be deleted and the next still be
gone on from. It counts towards its key's quota of sessions, and the key's oldest responses make
room for a new one; sessions never do. An answer that cannot be stored is an answer all the same: it
says `store: false`. Another key's response is none.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from infer.errors import InferError, RequestError
from infer.server.http.error_responses import HttpError
from infer.server.offload import NUM_BYTES, Offload
from infer.server.openai.large_json import json_response
from infer.server.openai.openapi import takes
from infer.server.openai.response_items import kind_of
from infer.server.sessions.routes import SessionRoutes
from infer.server.sessions.store import Item, StoredResponse
from infer.server.tenancy.limits import tenant_of

log = logging.getLogger("infer.server")

MAX_PAGE = 100
"""Items in one answer, at most."""
PAGE = 20
MAX_REFERENCED = 64
"""Responses in which the references of one request are looked for."""
REFERENCE = "item_reference"
ORDERS = ("asc", "desc")
_QUERY: Mapping[str, Mapping[str, Any]] = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE},
    "order": {"enum": [*ORDERS], "default": "desc"},
    "after": {"type": "string"},
}


class ResponseTurn:
    """A response that is being answered and is to be stored."""

    comes_first = True
    """It is stored before its answer is written, which says whether it is."""

    def __init__(
        self, sessions: SessionRoutes, owner: str, before: list[Item], asked: list[Item]
    ) -> None:
        """`before`: the items of the conversation so far. `asked`: those of the request."""
        self._sessions = sessions
        self._owner = owner
        self._before = before
        self._asked = asked
        self._response: dict[str, Any] = {}

    def add(self, new: dict[str, Any]) -> None:
        """The whole response, once it is there; see `GeneratingApi.make_answer`."""
        self._response = new

    async def keep(self) -> None:
        """Store it. Raises nothing: where that fails, the response says `store: false`."""
        stored = StoredResponse(dict(self._response), self._before, self._asked)
        try:
            await self._sessions.call_store(
                self._owner, "put_response", self._owner, stored, is_begun=True
            )
        except InferError as error:
            log.warning("the response %s is not stored: %s", self._response["id"], error)
            self._response["store"] = False


class StoredResponses:
    """The endpoints of stored responses, over the database of the sessions."""

    def __init__(self, sessions: SessionRoutes, offload: Offload) -> None:
        self._sessions = sessions
        self._offload = offload

    async def begin(self, http: HttpRequest, body: dict[str, Any]) -> ResponseTurn | None:
        """Put the items of `previous_response_id` before those of a body. Returns what stores the
        response; None where that is not wanted or nothing can be. Raises `HttpError` (404) if there
        is no such response."""
        before, asked = await self._shown(http, body)
        if body.get("store") is False or asked is None or not self._sessions.are_on:
            return None
        return ResponseTurn(self._sessions, tenant_of(http.scope).key.id, before, asked)

    async def show(self, http: HttpRequest, body: dict[str, Any]) -> list[Item]:
        """The items of `previous_response_id`, which are put before those of a body; 404 as
        `begin`."""
        before, _ = await self._shown(http, body)
        return before

    async def _shown(
        self, http: HttpRequest, body: dict[str, Any]
    ) -> tuple[list[Item], list[Item] | None]:
        """(the items before those of a body, those of the body), which both stand in it now."""
        name, asked = body.get("previous_response_id"), _items(body.get("input"))
        if asked is None:
            return [], None
        if any(kind_of(item) == REFERENCE for item in asked):
            body["input"] = asked = await self._dereferenced(http, asked)
        if not isinstance(name, str):
            return [], asked  # a wrong type is refused where the body is checked
        stored, num_bytes = await self._find(http, name, "previous_response_id")
        before = [*stored.before, *stored.asked, *stored.response["output"]]
        body["input"] = [*before, *asked]
        # Further work on the body takes as long as if all these items had been sent.
        http.scope[NUM_BYTES] = http.scope.get(NUM_BYTES, 0) + num_bytes
        return before, asked

    async def _dereferenced(self, http: HttpRequest, asked: list[Item]) -> list[Item]:
        """The items, with those of stored responses in the place of references to them.

        One that is not stored stays a reference, which is left out and named: a refusal would end
        the conversation for good.
        """
        items_of: dict[str, dict[str, Item]] = {}
        made = list[Item]()
        for item in asked:
            name = item.get("id")
            if kind_of(item) != REFERENCE or not isinstance(name, str):
                made.append(item)
                continue
            response = f"resp_{name.rpartition('_')[0].partition('_')[2]}"
            if response not in items_of:
                known = len(items_of) < MAX_REFERENCED
                items_of[response] = await self._items_of(http, response) if known else {}
            made.append(items_of[response].get(name, item))
        return made

    async def _items_of(self, http: HttpRequest, name: str) -> dict[str, Item]:
        """All items of a stored response by their ids; none if there is no such response."""
        try:
            stored, num_bytes = await self._find(http, name)
        except HttpError as error:
            if error.status != 404:
                raise
            return {}
        http.scope[NUM_BYTES] = http.scope.get(NUM_BYTES, 0) + num_bytes
        items = [*_with_ids(stored), *stored.response["output"]]
        return {item["id"]: item for item in items}

    async def _find(
        self, http: HttpRequest, name: str, param: str | None = None
    ) -> tuple[StoredResponse, int]:
        owner = tenant_of(http.scope).key.id
        if self._sessions.are_on:
            stored: tuple[StoredResponse, int] | None
            stored = await self._sessions.call_store(owner, "read_response", owner, name)
            if stored is not None:
                return stored
        raise _not_stored(param)

    @takes(refuses=(429,))
    async def response(self, http: HttpRequest) -> Response:
        """A response that is stored. A stream of it is refused: it is whole."""
        if http.query_params.get("stream", "false") not in ("false", "0"):
            words = "stream must be false: a stored response is whole"
            raise RequestError(words, param="stream")
        stored, num_bytes = await self._find(http, http.path_params["id"])
        return await self._offload.render(http, num_bytes, json_response, stored.response)

    @takes(refuses=(429,))
    async def delete_response(self, http: HttpRequest) -> Response:
        """Delete a response; those that go on from it stay."""
        owner, name = tenant_of(http.scope).key.id, http.path_params["id"]
        await self._find(http, name)
        await self._sessions.call_store(owner, "delete_response", owner, name)
        return JSONResponse({"id": name, "object": "response", "deleted": True})

    @takes(refuses=(429,), query=_QUERY)
    async def input_items(self, http: HttpRequest) -> Response:
        """The items of a stored response's request."""
        limit, order = _page(http.query_params)
        stored, num_bytes = await self._find(http, http.path_params["id"])
        page = partial(_listed, stored, limit, order, http.query_params.get("after"))
        return await self._offload.render(http, num_bytes, lambda: json_response(page()))


def _not_stored(param: str | None) -> HttpError:
    message = "there is no such response: it was made with store: false, was deleted, made room for"
    message += " a newer one, or this server keeps none; send the whole conversation as input"
    code = "response_not_found" if param is None else "previous_response_not_found"
    return HttpError(404, message, code=code, param=param)


def _items(value: Any) -> list[Item] | None:
    """The items of an `input`, as far as it is one."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    is_list = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    return value if is_list else None


def _page(query: Mapping[str, str]) -> tuple[int, str]:
    """(limit, order) of a list. Raises `RequestError`."""
    limit, order = query.get("limit", str(PAGE)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise RequestError(f"limit must be an integer between 1 and {MAX_PAGE}", param="limit")
    if order not in ORDERS:
        raise RequestError("order must be 'asc' or 'desc'", param="order")
    return int(limit), order


def _with_ids(stored: StoredResponse) -> list[Item]:
    name = stored.response["id"].partition("_")[2]
    return [_with_id(item, f"item_{name}_{i}") for i, item in enumerate(stored.asked)]


def _listed(stored: StoredResponse, limit: int, order: str, after: str | None) -> dict[str, Any]:
    items = _with_ids(stored)
    if order == "desc":
        items.reverse()
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise RequestError("after must be the id of an item of the list", param="after")
        items = items[names.index(after) + 1 :]
    page = items[:limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    ends = ends or {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, "has_more": len(items) > limit, **ends}


def _with_id(item: Item, name: str) -> Item:
    """An item as clients of the list want it: with an id, a type, and parts as content."""
    item = {"type": "message", **item, "id": item.get("id") or name}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return item
