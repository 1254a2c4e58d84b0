"""`Keys`: the file of API keys, with the limits of each key"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infer.config import NonNegativeInt, PositiveInt, check_fields, option
from infer.errors import ConfigError, LoadError
from infer.files import MAX_LIST_BYTES, parse_json, read_text
from infer.private_files import locked, warn_if_shared, write_private


@dataclass(frozen=True, kw_only=True)
class KeyLimits:
    """Limits and rights of a key; raises `ConfigError` for a value that is out of range."""

    max_concurrent: PositiveInt = option(32, "Requests that may be open at the same time.")
    max_queued: NonNegativeInt = option(32, "Choices that may wait for a seat at the same time.")
    requests_per_minute: PositiveInt | None = option(None, "Default: no limit.")
    tokens_per_minute: PositiveInt | None = option(
        None, "Of prompts and answers together; default: no limit."
    )
    share_cache: str | None = option(
        None,
        "Keys with the same name here share one prefix cache; by response times each may find out"
        " what the others have cached.",
    )
    public_prefixes: bool = option(
        False, "Share cached pages of the server's public prefixes with other keys that do."
    )
    admin: bool = option(False, "May read /metrics and /stats, and see the requests of all keys.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, without its secret."""

    id: str
    """Random id, used as the tenant's name."""
    name: str
    """Name that the operator has given, unique in the file."""
    sha256: str
    """SHA-256 of the secret, in hexadecimal."""
    created: int = 0
    """Time of creation, in seconds since the epoch."""
    limits: KeyLimits = field(default_factory=KeyLimits)

    @property
    def cache_scope(self) -> str:
        """Scope of the prefix cache for the key's requests; only the operator can choose it."""
        return f"shared:{self.limits.share_cache}" if self.limits.share_cache else self.id


_UNLIMITED = KeyLimits(max_concurrent=10**9, max_queued=10**9, admin=True)
ANYBODY = Key(id="", name="", sha256="", limits=_UNLIMITED)
"""The key of all requests to a server without keys."""


class Keys:
    """A key is 256 random bits, shown once when it is made; the file holds its SHA-256. A secret is
    looked up by its SHA-256, which takes as long with ten thousand keys as with one; how long a
    look-up takes says nothing, because nobody can choose the digest of a secret. The file is read
    again when it has changed, so keys that are made or revoked take effect in a running server.
    `infer keys` writes it, under a lock beside the file (`locked`), so no change is lost if several
    processes write."""

    def __init__(self, path: Path, *, must_exist: bool = True) -> None:
        """Raises `ConfigError` if the file is not one of keys, or is absent and `must_exist`."""
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: list[Key] = []
        self._by_digest: dict[str, Key] = {}
        self.ids: frozenset[str] = frozenset()
        """Ids of all keys, as the file had them when it was read last; another object each time."""
        if must_exist or path.exists():
            self._read()

    def all(self) -> list[Key]:
        """All keys, as the file had them when it was read last."""
        return list(self._keys)

    def find(self, token: str) -> Key | None:
        """The key whose secret `token` is; None if there is none. Raises as `refresh` does."""
        self.refresh()
        return self._by_digest.get(_digest(token))

    def create(self, name: str, limits: KeyLimits) -> str:
        """Add a key; returns its secret, which is not stored. Raises `ConfigError` if the name is
        invalid or in use."""
        if not name or not name.isprintable() or len(name) > 64:
            raise ConfigError("name", "must be 1 to 64 printable characters")
        token = f"sk-{secrets.token_urlsafe(32)}"
        created, digest = int(time.time()), _digest(token)
        key_id = f"key-{secrets.token_hex(8)}"
        new = Key(id=key_id, name=name, sha256=digest, created=created, limits=limits)
        with self._changing():
            if any(key.name == name for key in self._keys):
                raise ConfigError(
                    "name", f"there is a key {name!r}; revoke it or choose another name"
                )
            self._keys.append(new)
        return token

    def revoke(self, name: str) -> None:
        """Remove a key by its name; raises `ConfigError` if there is none."""
        with self._changing():
            left = [key for key in self._keys if key.name != name]
            if len(left) == len(self._keys):
                raise ConfigError("name", f"there is no key {name!r} in {self._path.name}")
            self._keys = left

    def refresh(self) -> None:
        """Read the file again if it has changed; raises `OSError` or `ConfigError` if it cannot be
        read."""
        status = os.stat(self._path)
        if (status.st_mtime_ns, status.st_ino) != self._stamp:
            self._read()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock and read the file, and write it when the block ends."""
        try:
            with locked(self._path):
                if self._path.exists():
                    self._read()
                yield
                keys = [dataclasses.asdict(key) for key in self._keys]
                write_private(self._path, json.dumps({"keys": keys}, indent=1))
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError("api_keys", f"{self._path} cannot be written: {reason}") from None

    def _read(self) -> None:
        try:
            status = os.stat(self._path)
            entries = parse_json(read_text(self._path, MAX_LIST_BYTES))["keys"]
            keys = [_read_key(entry) for entry in entries]
        except OSError as error:
            message = f"{self._path.name} cannot be read ({error.strerror})"
            user = f"this process runs as user {os.geteuid()}"
            raise ConfigError(
                "api_keys", f"{message}; {user}; infer keys create makes such a file"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, LoadError) as error:
            message = f"{self._path.name} is not a file of keys ({error})"
            raise ConfigError("api_keys", f"{message}; make one with infer keys create") from None
        self._keys = keys
        self._by_digest = {key.sha256: key for key in keys}
        self.ids = frozenset(key.id for key in keys)
        self._stamp = (status.st_mtime_ns, status.st_ino)
        warn_if_shared(self._path, status.st_mode)


def _read_key(entry: dict[str, Any]) -> Key:
    key = Key(**{**entry, "limits": KeyLimits(**entry.get("limits", {}))})
    texts = isinstance(key.id, str) and isinstance(key.name, str) and isinstance(key.sha256, str)
    if not texts or not key.id or type(key.created) is not int:
        raise ValueError("an entry lacks an id, a name or a time")
    if not re.fullmatch("[0-9a-f]{64}", key.sha256):
        raise ValueError(f"the sha256 of the key {key.name!r:.80} is not 64 hexadecimal digits")
    return key


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
