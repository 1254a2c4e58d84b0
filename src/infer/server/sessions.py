"""`Sessions`: conversations that the server keeps, so that a client sends only what is new.

A session belongs to the key that made it; nobody else finds it. Its messages are rows of their own,
in the order of `position`, and only whole turns are written: what was asked together with its
answer, once the answer is there. Two turns at the same time would each miss the other, so the
second is refused. Any database that SQLAlchemy reaches will do; calls block, so they are made in
threads.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence
from typing import Any

import sqlalchemy as sql
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from infer.errors import ConfigError, UnprocessableError
from infer.server.failures import HttpError

MAX_TITLE_CHARS = 200
MAX_LISTED = 1000
Message = dict[str, Any]

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


class Sessions:
    """See the module's docstring."""

    def __init__(self, url: str) -> None:
        """Raises `ConfigError` if the database cannot be used."""
        try:
            # Errors are logged, texts not; and a server of databases may be restarted.
            self._engine = sql.create_engine(url, hide_parameters=True, pool_pre_ping=True)
            _tables.create_all(self._engine)
        except (SQLAlchemyError, ImportError) as error:
            message = f"the database cannot be used ({type(error).__name__})"
            raise ConfigError(
                "sessions",
                f"{message}; give a URL like sqlite:///sessions.db or"
                " postgresql+psycopg://user@host/name (needs the extra: infer[postgres])",
            ) from None

    def create(
        self, owner: str, title: str = "", messages: Sequence[Message] = ()
    ) -> dict[str, Any]:
        """A new session, which may begin with messages."""
        _check_title(title)
        session_id, now = f"sess-{secrets.token_hex(16)}", int(time.time())
        row = {"id": session_id, "owner": owner, "title": title, "created": now, "updated": now}
        with self._engine.begin() as db:
            db.execute(sql.insert(_sessions).values(row))
            _append(db, session_id, 0, messages)
        return _shown(row)

    def all(self, owner: str) -> list[dict[str, Any]]:
        """Of an owner, the last used first."""
        query = sql.select(_sessions).where(_sessions.c.owner == owner)
        query = query.order_by(_sessions.c.updated.desc(), _sessions.c.id).limit(MAX_LISTED)
        with self._engine.connect() as db:
            return [_shown(row._mapping) for row in db.execute(query)]

    def read(self, owner: str, session_id: str) -> dict[str, Any]:
        """A session with its messages; 404 where it is not this owner's."""
        with self._engine.connect() as db:
            return {**_shown(_own(db, owner, session_id)), "messages": _history(db, session_id)}

    def rename(self, owner: str, session_id: str, title: str) -> dict[str, Any]:
        """Give it a title."""
        _check_title(title)
        with self._engine.begin() as db:
            row = _own(db, owner, session_id)
            db.execute(
                sql.update(_sessions).where(_sessions.c.id == session_id).values(title=title)
            )
        return _shown({**row, "title": title})

    def delete(self, owner: str, session_id: str) -> None:
        """Forget it."""
        with self._engine.begin() as db:
            _own(db, owner, session_id)
            db.execute(sql.delete(_messages).where(_messages.c.session == session_id))
            db.execute(sql.delete(_sessions).where(_sessions.c.id == session_id))

    def purge(self, owners: Collection[str]) -> int:
        """Forget the sessions of everybody but these, and of those without a key; how many."""
        gone = _sessions.c.owner.not_in([*owners, ""])
        with self._engine.begin() as db:
            theirs = sql.select(_sessions.c.id).where(gone)
            db.execute(sql.delete(_messages).where(_messages.c.session.in_(theirs)))
            return db.execute(sql.delete(_sessions).where(gone)).rowcount

    def fork(self, owner: str, session_id: str, num_messages: int | None) -> dict[str, Any]:
        """A new session that begins with the first messages of this one; None = with all."""
        found = self.read(owner, session_id)
        messages = found["messages"]
        if num_messages is not None and not 0 <= num_messages <= len(messages):
            message = f"the session has {len(messages)} messages; at must be between 0 and that"
            raise UnprocessableError(message, param="at")
        return self.create(owner, found["title"], messages[:num_messages])

    def add_turn(
        self, owner: str, session_id: str, num_before: int, messages: Sequence[Message]
    ) -> None:
        """Write a turn behind the messages that it was asked with; 409 if there are others."""
        try:
            with self._engine.begin() as db:
                _own(db, owner, session_id)
                if len(_history(db, session_id)) != num_before:
                    raise busy()
                _append(db, session_id, num_before, messages)
                now = sql.update(_sessions).where(_sessions.c.id == session_id)
                db.execute(now.values(updated=int(time.time())))
        except IntegrityError:  # another server has written one since we looked
            raise busy() from None

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def busy() -> HttpError:
    """Two turns of a session at the same time."""
    message = "another turn of this session is being answered; send this one after it"
    return HttpError(409, message, code="session_busy", param="session_id")


def _own(db: sql.Connection, owner: str, session_id: str) -> dict[str, Any]:
    query = sql.select(_sessions).where(_sessions.c.id == session_id, _sessions.c.owner == owner)
    # No id has it, and not every database takes it as text.
    row = None if "\0" in session_id else db.execute(query).first()
    if row is None:
        message = "there is no such session; POST /v1/sessions makes one"
        raise HttpError(404, message, code="session_not_found", param="session_id")
    return dict(row._mapping)


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


def _check_title(title: str) -> None:
    if len(title) > MAX_TITLE_CHARS or "\0" in title:  # which PostgreSQL's texts cannot hold
        message = f"title must have at most {MAX_TITLE_CHARS} characters, and no NUL"
        raise UnprocessableError(message, param="title")


def _shown(row: Any) -> dict[str, Any]:
    return {
        "object": "session",
        **{name: row[name] for name in ("id", "title", "created", "updated")},
    }
