"""The endpoints of sessions; `SessionTurn`: one question and its answer within a session

A chat completion with a `session_id` gets the session's messages before its own. The turn is
written when its answer is complete, before the client gets the end of it. An answer that is aborted
leaves the session unchanged, so the same message can be sent again. With `continue_final_message`
the turn's last message and the answer are one message. If the turn is that message alone and the
session ends with an answer, it takes that answer's place: so an answer that reached its limit goes
on.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from infer.errors import ConfigError, UnprocessableError
from infer.private_files import state_folder
from infer.server.http.context import RequestContext
from infer.server.http.error_responses import IGNORED, HttpError
from infer.server.offload import NUM_BYTES, Offload
from infer.server.openai import schema_base
from infer.server.openai.chat import unnumbered
from infer.server.openai.content_parts import text_of
from infer.server.openai.large_json import json_response
from infer.server.openai.openapi import takes
from infer.server.openai.schema import MAX_MESSAGES
from infer.server.openai.schema import Message as WireMessage
from infer.server.openai.schema_base import WHOLE, Wire
from infer.server.sessions import NO_SESSIONS
from infer.server.sessions.database_threads import DatabaseError, DatabaseThreads
from infer.server.sessions.leases import SessionLeases
from infer.server.sessions.store import (
    MAX_TITLE_CHARS,
    Message,
    Quota,
    SessionStore,
    StartedTurn,
    busy,
)
from infer.server.tenancy.limits import tenant_of
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

log = logging.getLogger("infer.server")
_TITLE = {"title": {"maxLength": MAX_TITLE_CHARS, "pattern": "^[^\\u0000]*$"}}


class SessionBody(Wire):
    documented = _TITLE
    title: str = ""
    messages: list[WireMessage] = Field([], max_length=MAX_MESSAGES)


class RenameBody(Wire):
    documented = _TITLE
    title: str


class ForkBody(Wire):
    at: Annotated[int, Field(ge=0), WHOLE] | None = None


class SessionTurn:
    """A question within a session that is being answered."""

    comes_first = False
    """Its answer is written before it is kept."""

    def __init__(
        self,
        sessions: SessionStore,
        threads: DatabaseThreads,
        owner: str,
        name: str,
        before: int,
        asked: Any,
        *,
        continues: bool = False,
        replaces: bool = False,
        lease: str | None = None,
    ) -> None:
        """`owner`: id of the key. `name`: id of the session. `before`: number of its messages
        before this turn. `asked`: the messages of the request. `continues`: whether the answer is
        the end of the last of them. `replaces`: whether the turn takes the place of the session's
        last message. `lease`: name of the turn's lease, if it has one."""
        self._sessions = sessions
        self._threads = threads
        self._where = (owner, name, before)
        self._asked: list[Message] = asked
        self._begun: Message | None = asked[-1] if continues else None
        self._num_replaced = int(replaces)
        self._lease = lease
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        """The pieces of each call's arguments."""

    def add(self, new: dict[str, Any]) -> None:
        """Add a piece (OpenAI's delta) to the answer; see `GeneratingApi.make_answer`."""
        self._texts.append(new.get("content", ""))
        for piece in new.get("tool_calls", ()):
            if "id" in piece:
                self._calls += unnumbered([piece])
                self._arguments.append([])
            self._arguments[piece["index"]].append(piece["function"]["arguments"])

    async def keep(self) -> None:
        """Write the question and the answer so far to the session. Raises `HttpError` (409) if it
        has changed meanwhile, `DatabaseError` if it cannot be written."""
        text = "".join(self._texts)
        calls = [
            {**call, "function": {**call["function"], "arguments": "".join(pieces)}}
            for call, pieces in zip(self._calls, self._arguments, strict=True)
        ]
        whole = [call for call in calls if _is_whole(call)]
        # Nobody can answer an incomplete call, so it is kept as text.
        text += "".join(_as_text(call) for call in calls if call not in whole)
        asked = self._asked
        answer: Message = {"role": "assistant"}
        if self._begun is not None:
            asked, answer, text = asked[:-1], self._begun, _text_of(self._begun) + text
        answer = {**answer, "content": text}
        if whole:
            answer = {**answer, "content": text or None, "tool_calls": whole}
        turn = [*asked, answer]
        rest = (turn, self._num_replaced, self._lease)
        await self._threads.call(
            self._where[0], self._sessions.add_turn, *self._where, *rest, is_begun=True
        )


def _is_whole(call: dict[str, Any]) -> bool:
    try:
        return isinstance(json.loads(call["function"]["arguments"]), dict)
    except ValueError:
        return False


def _as_text(call: dict[str, Any]) -> str:
    function = call["function"]
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}'


def _ends_with_answer(messages: Sequence[Any]) -> bool:
    last = messages[-1] if messages else None
    return isinstance(last, dict) and last.get("role") == "assistant"


def _named(body: dict[str, Any]) -> tuple[str, list[Any]] | None:
    """The session that a chat's body names, and the body's messages; None without a session."""
    name, asked = body.get("session_id"), body.get("messages")
    if not isinstance(name, str) or not isinstance(asked, list):
        return None  # a wrong type is refused where the body is checked
    if body.get("n") not in (None, 1):
        raise UnprocessableError("a session has one answer to a question: n must be 1", param="n")
    return name, asked


def _put_before(body: dict[str, Any], asked: list[Any], history: list[Message]) -> bool:
    """Put a session's messages before those of a body; returns whether the body's message takes the
    place of the last one, because it is that answer, which is to get longer."""
    continues = body.get("continue_final_message") is True and _ends_with_answer(asked)
    replaces = continues and len(asked) == 1 and _ends_with_answer(history)
    body["messages"] = [*(history[:-1] if replaces else history), *asked]
    return replaces


def _text_of(message: Message) -> str:
    """The text of a message that has been checked."""
    content = message.get("content") or message.get("refusal") or ""
    return text_of(content, message["role"], [])


def default_url() -> str:
    """URL of the database in the user's state folder; makes the folder."""
    return f"sqlite:///{state_folder() / 'sessions.db'}"


class SessionRoutes:
    """The endpoints of sessions, and the database behind them."""

    def __init__(
        self,
        url: str | None,
        pool: Offload,
        quota: Quota | None = None,
        limits: ServerLimits = SERVER_LIMITS,
        *,
        has_leases: bool = False,
    ) -> None:
        """`url`: see `ServerSettings.sessions`. `has_leases`: whether other servers have the same
        sessions, so a turn must hold the session's lease while it is answered."""
        self._url = url
        self._limits = limits
        self._quota = quota or Quota()
        self._pool = pool
        self._busy: set[str] = set()
        self._threads = DatabaseThreads(limits)
        self._leases = SessionLeases(self._threads, self._call_store) if has_leases else None
        self._opening = threading.Lock()
        if url not in (None, NO_SESSIONS):
            self._sessions  # noqa: B018  opened now, so that a wrong URL is an error at start-up

    @cached_property
    def _sessions(self) -> SessionStore:
        url = default_url() if self._url is None else self._url
        return SessionStore(url, self._quota, self._limits)

    def set_quota(self, quota: Quota) -> None:
        """What each key may keep from now on."""
        self._quota = quota
        if (store := self.__dict__.get("_sessions")) is not None:
            store.set_quota(quota)

    def _call_store(self, method: str, *arguments: Any) -> Any:
        """Call a method of the `SessionStore`, which the first call opens; runs in a thread."""
        with self._opening:
            sessions = self._open_store()
        return getattr(sessions, method)(*arguments)

    def _open_store(self) -> SessionStore:
        """The store; raises `HttpError` (404) if there is to be none, `DatabaseError` if the
        default database cannot be opened. One with a URL was opened at start-up."""
        if self._url == NO_SESSIONS:
            message = "this server keeps no sessions: its operator has given no database for them"
            raise HttpError(404, message, code="sessions_off")
        try:
            return self._sessions
        except (ConfigError, OSError) as error:
            log.error("the sessions cannot be kept: %s", error)
            message = "this server cannot keep sessions: its database cannot be used"
            raise DatabaseError(message) from None

    @property
    def are_on(self) -> bool:
        """Whether there is to be a database."""
        return self._url != NO_SESSIONS

    async def call_store(
        self, owner: str, method: str, *arguments: Any, is_begun: bool = False
    ) -> Any:
        """Call a method of the `SessionStore` in a thread; see `DatabaseThreads.call`."""
        return await self._threads.call(
            owner, self._call_store, method, *arguments, is_begun=is_begun
        )

    async def begin(self, http: HttpRequest, body: dict[str, Any]) -> SessionTurn | None:
        """Put the session's messages before those of a chat's body, if it names a session.

        Returns the turn to write when it is answered; None without a session. Raises `HttpError`:
        404 for an unknown session, 409 if another turn of it is being answered, 413 if it is full.
        """
        named = _named(body)
        if named is None:
            return None
        name, asked = named
        owner = tenant_of(http.scope).key.id
        if name in self._busy:
            raise busy()
        lease = None
        if self._leases is not None:
            lease = await self._leases.take(owner, name, RequestContext.of(http.scope))
        turn = await self._find(http, name, asked)
        if name in self._busy:
            raise busy()
        self._busy.add(name)
        RequestContext.of(http.scope).cleanup.callback(self._busy.discard, name)
        continues = body.get("continue_final_message") is True and _ends_with_answer(asked)
        replaces = _put_before(body, asked, turn.messages)
        return SessionTurn(
            self._sessions,
            self._threads,
            *(owner, name, len(turn.messages), asked),
            continues=continues,
            replaces=replaces,
            lease=lease,
        )

    async def show(self, http: HttpRequest, body: dict[str, Any]) -> None:
        """Put the session's messages before those of a chat's body that is only to be looked at,
        which is no turn. Raises `HttpError`: 404 and 413 like `begin`."""
        if (named := _named(body)) is not None:
            name, asked = named
            _put_before(body, asked, (await self._find(http, name, asked)).messages)

    async def _find(self, http: HttpRequest, name: str, asked: list[Any]) -> StartedTurn:
        owner, num_new = tenant_of(http.scope).key.id, http.scope.get(NUM_BYTES, 0)
        turn: StartedTurn = await self._threads.call(
            owner, self._call_store, "begin_turn", owner, name, len(asked) + 1, num_new
        )
        # Further work on the body takes as long as if all these messages had been sent.
        http.scope[NUM_BYTES] = num_new + turn.num_bytes
        return turn

    @takes(SessionBody, refuses=(404, 429))
    async def create(self, http: HttpRequest) -> Response:
        """Make a session: a conversation that the server stores."""
        body = await self._pool.read_object(http)
        wire = await self._pool.run(http, schema_base.read, SessionBody, body, http.scope[IGNORED])
        messages = body.get("messages") or []
        return await self._call(http, "create", wire.title, messages)

    @takes(refuses=(404,))
    async def listed(self, http: HttpRequest) -> Response:
        """List the sessions of this key, the last used one first."""
        owner = tenant_of(http.scope).key.id
        data = await self._threads.call(owner, self._call_store, "all", owner)
        return JSONResponse({"object": "list", "data": data})

    async def read(self, http: HttpRequest) -> Response:
        """Get a session with its messages."""
        where = (tenant_of(http.scope).key.id, http.path_params["id"])
        num_bytes = await self._threads.call(where[0], self._call_store, "num_bytes", *where)
        session = await self._threads.call(where[0], self._call_store, "read", *where)
        return await self._pool.render(http, num_bytes, json_response, session)

    @takes(RenameBody)
    async def rename(self, http: HttpRequest) -> Response:
        """Change the title of a session."""
        wire = schema_base.read(RenameBody, await self._pool.read_object(http), http.scope[IGNORED])
        return await self._call(http, "rename", http.path_params["id"], wire.title)

    async def delete(self, http: HttpRequest) -> Response:
        """Delete a session."""
        await self._call(http, "delete", name := http.path_params["id"])
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    @takes(ForkBody, refuses=(429,))
    async def fork(self, http: HttpRequest) -> Response:
        """Make a session that begins with the first `at` messages of this one."""
        wire = schema_base.read(ForkBody, await self._pool.read_object(http), http.scope[IGNORED])
        return await self._call(http, "fork", http.path_params["id"], wire.at)

    async def _call(self, http: HttpRequest, name: str, *arguments: Any) -> Response:
        owner = tenant_of(http.scope).key.id
        return JSONResponse(
            await self._threads.call(owner, self._call_store, name, owner, *arguments)
        )

    async def close(self) -> None:
        """Close the threads and the database."""
        if self._leases is not None:
            await self._leases.close()
        self._threads.close()
        if "_sessions" in self.__dict__:
            self._sessions.close()
