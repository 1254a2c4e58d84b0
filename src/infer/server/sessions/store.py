"""`SessionStore`: conversations in a database, so that a client sends only its new messages"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from infer.errors import ConfigError, UnprocessableError
from infer.extras import to_install
from infer.server.http.error_responses import HttpError
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

MAX_TITLE_CHARS = 200
MAX_LISTED = 1000
"""Maximum number of sessions in a list."""
MAX_SESSION_BYTES = 4 * 1024 * 1024
"""Maximum bytes of a session's messages with those of a new turn; the longest context has fewer."""
LEASE_S = 8.0
"""Seconds for which a session belongs to a turn whose server says nothing more."""
CONNECT_S = 5
"""Seconds for which a call waits for a database server, or for a free connection."""
Message = dict[str, Any]
"""One message in OpenAI's format."""
Item = dict[str, Any]
"""One item of a response's conversation."""
SESSION, RESPONSE = "sess-", "resp_"
"""How the ids of sessions begin, and those of stored responses, which are rows like these."""

_tables = sql.MetaData()
_sessions = sql.Table(
    "sessions",
    _tables,
    sql.Column("id", sql.String(64), primary_key=True),
    sql.Column("owner", sql.String(64), nullable=False, index=True),
    sql.Column("title", sql.String(MAX_TITLE_CHARS), nullable=False),
    sql.Column("created", sql.BigInteger, nullable=False),
    sql.Column("updated", sql.BigInteger, nullable=False),
)
_messages = sql.Table(
    "messages",
    _tables,
    sql.Column("session", sql.ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    sql.Column("position", sql.Integer, primary_key=True),
    sql.Column("message", sql.JSON, nullable=False),
)

_sizes = sql.Table(
    "session_sizes",
    _tables,
    sql.Column("session", sql.ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    sql.Column("messages", sql.Integer, nullable=False),
    sql.Column("bytes", sql.BigInteger, nullable=False),
)
"""Number and size of each session's messages, known without reading them."""
_leases = sql.Table(
    "session_leases",
    _tables,
    sql.Column("session", sql.ForeignKey("sessions.id", ondelete="CASCADE"), primary_key=True),
    sql.Column("turn", sql.String(64), nullable=False),
    sql.Column("ends", sql.Float, nullable=False),
)
"""The turn of each session that is being answered at one of several servers; `ends` is a time of
the database's clock in seconds since the epoch."""


class Quota(NamedTuple):
    """Limits on all sessions of one owner together."""

    sessions: int = 1000
    messages: int = 100_000
    bytes: int = 64 * 1024 * 1024
    """Size of the messages as JSON."""


class StartedTurn(NamedTuple):
    """The state of a session at the start of a turn."""

    messages: list[Message]
    num_bytes: int
    """Size of the messages as JSON."""


class StoredResponse(NamedTuple):
    """A response, and the conversation that it is of."""

    response: dict[str, Any]
    before: list[Item]
    """Items before its request."""
    asked: list[Item]
    """Those of its request."""


class _Turns:
    """A lock that threads get in the order in which they want it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._line: deque[int] = deque()
        """The threads that want it; the first one has it."""

    def __enter__(self) -> None:
        """Wait for it; raises `TimeoutError`."""
        thread = threading.get_ident()
        with self._changed:
            self._line.append(thread)
            if not self._changed.wait_for(lambda: self._line[0] == thread, self._timeout_s):
                self._line.remove(thread)
                raise TimeoutError("the database is used by others for too long")

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._line.popleft()
            self._changed.notify_all()


class SessionStore:
    """A session belongs to the key that made it; no other key finds it. Each message is a row, in
    the order of `position`. Only whole turns are written: the question together with its complete
    answer. Two turns at the same time would each miss the other, so the second is refused. Every
    database that SQLAlchemy supports can be used. The methods block, so they are called in threads.
    """

    def __init__(
        self, url: str, quota: Quota | None = None, limits: ServerLimits = SERVER_LIMITS
    ) -> None:
        """Raises `ConfigError` if the database cannot be used."""
        self._quota = quota or Quota()
        self._turns: _Turns | None = None
        """Of transactions, where there is one at a time."""
        try:
            _make_private(url)
            # Errors are logged, without the texts (`hide_parameters`). A database server may have
            # been restarted since the last call (`pool_pre_ping`).
            where = sql.make_url(url)
            waits: dict[str, Any] = {}
            if where.get_backend_name() == "sqlite":
                waits = {"connect_args": {"timeout": limits.database_busy_s}}
                if where.database in (None, "", ":memory:"):  # each connection would have its own
                    waits["connect_args"]["check_same_thread"] = False
                    waits["poolclass"] = sql.StaticPool
                self._turns = _Turns(limits.database_busy_s)
            elif where.get_backend_name() == "postgresql":
                waits = {"connect_args": {"connect_timeout": CONNECT_S}, "pool_timeout": CONNECT_S}
                if where.get_driver_name() == "psycopg":
                    # A pool between (PgBouncer) may give each transaction another connection, which
                    # has not prepared the statements, or has prepared others by the same names.
                    waits["connect_args"]["prepare_threshold"] = None
            self._engine = sql.create_engine(
                where, hide_parameters=True, pool_pre_ping=True, **waits
            )
            _tables.create_all(self._engine)
            with self._engine.begin() as db:
                _add_missing_sizes(db)
        except (SQLAlchemyError, ImportError) as error:
            message = f"the database cannot be used ({type(error).__name__})"
            raise ConfigError(
                "sessions",
                f"{message}; give a URL like sqlite:///sessions.db or"
                " postgresql+psycopg://user@host/name (needs the"
                f" packages of an extra: {to_install('postgres')})",
            ) from None

    def set_quota(self, quota: Quota) -> None:
        """What each owner may keep from now on."""
        self._quota = quota

    @contextmanager
    def _transaction(self) -> Iterator[sql.Connection]:
        """A transaction. SQLite has one writer, and lets all others look again and again until they
        give up, so a key that writes all the time would keep others out. Threads of this process
        wait for each other instead."""
        with self._turns or nullcontext(), self._engine.begin() as db:
            yield db

    def create(
        self, owner: str, title: str = "", messages: Sequence[Message] = ()
    ) -> dict[str, Any]:
        """Make a session, which may begin with messages. Raises `HttpError` (429 or 413) if the
        owner's quota is used up, `UnprocessableError` for an invalid title."""
        _check_title(title)
        session_id, now = f"{SESSION}{secrets.token_hex(16)}", int(time.time())
        row = {"id": session_id, "owner": owner, "title": title, "created": now, "updated": now}
        with self._transaction() as db:
            db.execute(sql.insert(_sessions).values(row))
            db.execute(sql.insert(_sizes).values(session=session_id, messages=0, bytes=0))
            _append(db, session_id, 0, messages)
            self._check_quota(db, owner)  # within the transaction, so others cannot write
        return _shown(row)

    def all(self, owner: str) -> list[dict[str, Any]]:
        """The owner's sessions, the last used one first, at most `MAX_LISTED`."""
        query = sql.select(_sessions).where(_sessions.c.owner == owner, _is_of(SESSION))
        query = query.order_by(_sessions.c.updated.desc(), _sessions.c.id).limit(MAX_LISTED)
        with self._transaction() as db:
            return [_shown(row._mapping) for row in db.execute(query)]

    def read(self, owner: str, session_id: str) -> dict[str, Any]:
        """A session with its messages; raises `HttpError` (404) if the owner has no such one."""
        with self._transaction() as db:
            return {
                **_shown(_owned_session(db, owner, session_id)),
                "messages": _history(db, session_id),
            }

    def num_bytes(self, owner: str, session_id: str) -> int:
        """Size of a session's messages as JSON, in bytes; 404 like `read`."""
        with self._transaction() as db:
            _owned_session(db, owner, session_id)
            return _num_bytes(db, session_id)

    def begin_turn(self, owner: str, session_id: str, num_asked: int, num_new: int) -> StartedTurn:
        """The messages before a turn of `num_asked` messages (the answer counted) in `num_new`
        bytes.

        Raises `HttpError`: 404 for an unknown session, 413 if the session or the owner's quota has
        no room for the turn, which is thus refused before it is answered.
        """
        with self._transaction() as db:
            _owned_session(db, owner, session_id)
            num_bytes = _num_bytes(db, session_id)
            if num_bytes + num_new > MAX_SESSION_BYTES:
                message = f"the session has {num_bytes} bytes; together with new messages it may"
                message += f" have {MAX_SESSION_BYTES}: begin another one"
                raise HttpError(413, message, code="session_too_long", param="session_id")
            self._check_quota(db, owner, Quota(0, num_asked, num_new))
            return StartedTurn(_history(db, session_id), num_bytes)

    def rename(self, owner: str, session_id: str, title: str) -> dict[str, Any]:
        """Change a session's title; returns the session."""
        _check_title(title)
        with self._transaction() as db:
            row = _owned_session(db, owner, session_id)
            db.execute(
                sql.update(_sessions).where(_sessions.c.id == session_id).values(title=title)
            )
        return _shown({**row, "title": title})

    def delete(self, owner: str, session_id: str) -> None:
        """Delete a session; 404 like `read`."""
        with self._transaction() as db:
            _owned_session(db, owner, session_id)
            _delete(db, session_id)

    def purge(self, owners: Collection[str]) -> int:
        """Delete the sessions of all owners but these and the one without a key (""); returns their
        number."""
        gone = _sessions.c.owner.not_in([*owners, ""])
        with self._transaction() as db:
            theirs = sql.select(_sessions.c.id).where(gone)
            for table in (_messages, _sizes, _leases):
                db.execute(sql.delete(table).where(table.c.session.in_(theirs)))
            return db.execute(sql.delete(_sessions).where(gone)).rowcount

    def fork(self, owner: str, session_id: str, num_messages: int | None) -> dict[str, Any]:
        """Make a session that begins with the first `num_messages` messages of this one (None =
        all of them)."""
        session = self.read(owner, session_id)
        messages = session["messages"]
        if num_messages is not None and not 0 <= num_messages <= len(messages):
            message = f"the session has {len(messages)} messages; at must be between 0 and that"
            raise UnprocessableError(message, param="at")
        return self.create(owner, session["title"], messages[:num_messages])

    def add_turn(
        self,
        owner: str,
        session_id: str,
        num_before: int,
        messages: Sequence[Message],
        num_replaced: int = 0,
        turn: str | None = None,
    ) -> None:
        """Append a turn, in place of the last `num_replaced` messages, and end the lease that it
        has (`turn`: see `lease`). Raises `HttpError` (409) if the session does not have
        `num_before` messages, because another turn was written since."""
        try:
            with self._transaction() as db:
                _owned_session(db, owner, session_id)
                history = _history(db, session_id)
                if len(history) != num_before:
                    raise busy()
                num_kept = num_before - num_replaced
                _remove(db, session_id, num_kept, history[num_kept:])
                _append(db, session_id, num_kept, messages)
                now = sql.update(_sessions).where(_sessions.c.id == session_id)
                db.execute(now.values(updated=int(time.time())))
                if turn is not None:
                    db.execute(sql.delete(_leases).where(_leases.c.turn == turn))
        except IntegrityError:  # another server has written a turn meanwhile
            raise busy() from None

    # ---- stored responses: see `sessions.stored_responses`

    def put_response(self, owner: str, stored: StoredResponse) -> None:
        """Store a response; the owner's oldest ones make room for it. Raises `HttpError` (413 or
        429) if there is none."""
        response_id, now = stored.response["id"], int(time.time())
        head = {"response": stored.response, "num_before": len(stored.before)}
        rows = [head, *stored.before, *stored.asked]
        num_bytes = sum(len(json.dumps(row)) for row in rows)
        if num_bytes > MAX_SESSION_BYTES:
            message = f"the response and its conversation have {num_bytes} bytes, and may have"
            raise HttpError(413, f"{message} {MAX_SESSION_BYTES}", code="response_too_long")
        row = {"id": response_id, "owner": owner, "title": "", "created": now, "updated": now}
        with self._transaction() as db:
            self._check_quota(db, owner, Quota(1, len(rows), num_bytes))
            db.execute(sql.insert(_sessions).values(row))
            db.execute(sql.insert(_sizes).values(session=response_id, messages=0, bytes=0))
            _append(db, response_id, 0, rows)

    def read_response(self, owner: str, response_id: str) -> tuple[StoredResponse, int] | None:
        """A stored response and its size in bytes; None if the owner has no such one."""
        with self._transaction() as db:
            if not _owns(db, owner, response_id, RESPONSE):
                return None
            head, *items = _history(db, response_id)
            num_before = head["num_before"]
            stored = StoredResponse(head["response"], items[:num_before], items[num_before:])
            return stored, _num_bytes(db, response_id)

    def delete_response(self, owner: str, response_id: str) -> None:
        """Delete a stored response, if the owner has it."""
        with self._transaction() as db:
            if _owns(db, owner, response_id, RESPONSE):
                _delete(db, response_id)

    # ---- leases: only where several servers have the same sessions

    def lease(self, owner: str, session_id: str, turn: str) -> None:
        """Let a session belong to a turn for `LEASE_S`. `turn`: a random name. Raises `HttpError`:
        409 if it belongs to another one, 404 for an unknown session."""
        try:
            with self._transaction() as db:
                _owned_session(db, owner, session_id)
                now_s = database_clock(db)
                here = _leases.c.session == session_id
                db.execute(sql.delete(_leases).where(here, _leases.c.ends < now_s))
                row = {"session": session_id, "turn": turn, "ends": now_s + LEASE_S}
                db.execute(sql.insert(_leases).values(row))
        except IntegrityError:
            raise busy() from None

    def renew_leases(self, turns: Collection[str]) -> None:
        """Let the leases of these turns last for another `LEASE_S`."""
        with self._transaction() as db:
            theirs = sql.update(_leases).where(_leases.c.turn.in_(turns))
            db.execute(theirs.values(ends=database_clock(db) + LEASE_S))

    def end_lease(self, turn: str) -> None:
        """End the lease of a turn, if it has one."""
        with self._transaction() as db:
            db.execute(sql.delete(_leases).where(_leases.c.turn == turn))

    def _check_quota(self, db: sql.Connection, owner: str, more: Quota | None = None) -> None:
        """Raise `HttpError` (429 or 413) if an owner's sessions, with `more`, exceed the quota. The
        owner's oldest stored responses make room."""
        while (name := self._exceeded(db, owner, more or Quota(0, 0, 0))) is not None:
            if not _delete_oldest_response(db, owner):
                most = getattr(self._quota, name)
                status = 429 if name == "sessions" else 413
                message = f"all sessions of this key together may have {most} {name}"
                if name == "sessions":
                    message = f"this key may have {most} sessions"
                message += "; DELETE /v1/sessions/ID makes room"
                raise HttpError(status, message, code="session_quota_exceeded")

    def _exceeded(self, db: sql.Connection, owner: str, more: Quota) -> str | None:
        """What an owner would have too much of, with `more`."""
        used = sql.select(
            sql.func.count(),
            sql.func.coalesce(sql.func.sum(_sizes.c.messages), 0),
            sql.func.coalesce(sql.func.sum(_sizes.c.bytes), 0),
        ).where(_sizes.c.session == _sessions.c.id, _sessions.c.owner == owner)
        row = db.execute(used).one()
        wanted = Quota(*(int(a) + b for a, b in zip(row, more, strict=True)))
        exceeded = (n for n, most in self._quota._asdict().items() if getattr(wanted, n) > most)
        return next(exceeded, None)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def busy() -> HttpError:
    """The 409 for a second turn of a session at the same time."""
    message = "another turn of this session is being answered; send this one after it"
    return HttpError(409, message, code="session_busy", param="session_id")


def database_clock(db: sql.Connection) -> float:
    """The database's clock, which all servers share, in seconds since the epoch."""
    now: datetime = db.execute(sql.select(sql.func.now())).scalar_one()
    return (now if now.tzinfo else now.replace(tzinfo=UTC)).timestamp()


def _is_of(kind: str) -> sql.ColumnElement[bool]:
    """Whether a row is of a session, or of a stored response."""
    return _sessions.c.id.startswith(kind, autoescape=True)


def _owns(db: sql.Connection, owner: str, name: str, kind: str) -> dict[str, Any] | None:
    """The row of a session or a stored response, if the owner has it."""
    query = sql.select(_sessions).where(_sessions.c.id == name, _sessions.c.owner == owner)
    # No id has a NUL, and some databases do not accept one in text.
    is_name = name.startswith(kind) and "\0" not in name
    row = db.execute(query).first() if is_name else None
    return None if row is None else dict(row._mapping)


def _delete(db: sql.Connection, name: str) -> None:
    for table in (_messages, _sizes, _leases):
        db.execute(sql.delete(table).where(table.c.session == name))
    db.execute(sql.delete(_sessions).where(_sessions.c.id == name))


def _delete_oldest_response(db: sql.Connection, owner: str) -> bool:
    """Make room; whether there was a stored response."""
    oldest = sql.select(_sessions.c.id).where(_sessions.c.owner == owner, _is_of(RESPONSE))
    name = db.scalar(oldest.order_by(_sessions.c.created, _sessions.c.id).limit(1))
    if name is not None:
        _delete(db, name)
    return name is not None


def _owned_session(db: sql.Connection, owner: str, session_id: str) -> dict[str, Any]:
    row = _owns(db, owner, session_id, SESSION)
    if row is None:
        message = "there is no such session; POST /v1/sessions makes one"
        raise HttpError(404, message, code="session_not_found", param="session_id")
    return row


def _history(db: sql.Connection, session_id: str) -> list[Message]:
    query = sql.select(_messages.c.message).where(_messages.c.session == session_id)
    return list(db.scalars(query.order_by(_messages.c.position)))


def _append(db: sql.Connection, session_id: str, start: int, messages: Sequence[Message]) -> None:
    rows = [
        {"session": session_id, "position": start + i, "message": message}
        for i, message in enumerate(messages)
    ]
    if rows:
        db.execute(sql.insert(_messages), rows)
        num_bytes = sum(len(json.dumps(message)) for message in messages)
        size = sql.update(_sizes).where(_sizes.c.session == session_id)
        more = {"messages": _sizes.c.messages + len(rows), "bytes": _sizes.c.bytes + num_bytes}
        db.execute(size.values(more))


def _remove(db: sql.Connection, session_id: str, start: int, messages: Sequence[Message]) -> None:
    """Remove the messages from position `start` on, which are `messages`."""
    if messages:
        later = (_messages.c.session == session_id) & (_messages.c.position >= start)
        db.execute(sql.delete(_messages).where(later))
        num_bytes = sum(len(json.dumps(message)) for message in messages)
        size = sql.update(_sizes).where(_sizes.c.session == session_id)
        less = {"messages": _sizes.c.messages - len(messages), "bytes": _sizes.c.bytes - num_bytes}
        db.execute(size.values(less))


def _num_bytes(db: sql.Connection, session_id: str) -> int:
    query = sql.select(_sizes.c.bytes).where(_sizes.c.session == session_id)
    return int(db.scalar(query) or 0)


def _add_missing_sizes(db: sql.Connection) -> None:
    """Add sizes for sessions that were made before the table of sizes existed."""
    size = sql.func.length(sql.cast(_messages.c.message, sql.Text))
    missing = (
        sql.select(
            _sessions.c.id,
            sql.func.count(_messages.c.position),
            sql.func.coalesce(sql.func.sum(size), 0),
        )
        .select_from(_sessions.outerjoin(_messages))
        .where(_sessions.c.id.not_in(sql.select(_sizes.c.session)))
        .group_by(_sessions.c.id)
    )
    if db.execute(missing.limit(1)).first() is not None:  # a database may be read-only
        db.execute(sql.insert(_sizes).from_select(["session", "messages", "bytes"], missing))


def is_in_memory(url: str) -> bool:
    """Whether the database of a URL is one of this process alone."""
    with suppress(SQLAlchemyError):  # opening it reports the error
        where = sql.make_url(url)
        path = where.database or ""
        is_memory = path in ("", ":memory:") or (path.startswith("file:") and "memory" in path)
        return where.get_backend_name() == "sqlite" and is_memory
    return False


def _make_private(url: str) -> None:
    """Make a database file readable for its owner only, whatever the umask is; SQLite gives the
    files beside it the same mode."""
    where = sql.make_url(url)
    path = where.database or ""
    if where.get_backend_name() != "sqlite" or path in ("", ":memory:") or path.startswith("file:"):
        return
    with suppress(OSError):  # opening the database reports the error
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        os.chmod(path, 0o600)


def _check_title(title: str) -> None:
    if len(title) > MAX_TITLE_CHARS or "\0" in title:  # PostgreSQL's texts cannot hold a NUL
        message = f"title must have at most {MAX_TITLE_CHARS} characters, and no NUL"
        raise UnprocessableError(message, param="title")


def _shown(row: Any) -> dict[str, Any]:
    return {
        "object": "session",
        **{name: row[name] for name in ("id", "title", "created", "updated")},
    }
