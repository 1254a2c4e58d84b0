"""`Keys`: the file of API keys, and what each of them may do.

A key is 256 bits of chance, shown once when it is made; the file holds its SHA-256. Each key of the
file is compared, in constant time, whichever fits. The file is read again when it has changed, so
making and revoking keys takes effect in a server that runs. Written by `infer keys`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

from infer.config import check_fields, option
from infer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a key may use; raises `ConfigError`."""

    max_concurrent: int = option(32, "Requests that may be open at the same time.", low=1)
    max_queued: int = option(32, "Choices that may wait for a seat at the same time.", low=0)
    requests_per_minute: int | None = option(None, "Default: no limit.", low=1)
    tokens_per_minute: int | None = option(
        None, "Of prompts and answers together; default: no limit.", low=1
    )
    share_cache: str | None = option(
        None, "Keys with the same name here share one prefix cache: they may find each other out."
    )
    public_prefixes: bool = option(
        False, "Share what is cached of the server's public prefixes with the other such keys."
    )
    admin: bool = option(False, "May read /metrics and /stats, and see everybody's requests.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key, without its secret."""

    id: str
    name: str
    sha256: str
    created: int = 0
    limits: Limits = field(default_factory=Limits)

    @property
    def cache_scope(self) -> str:
        """Of the prefix cache; nobody but the operator chooses it."""
        return f"shared:{self.limits.share_cache}" if self.limits.share_cache else self.id


_UNLIMITED = Limits(max_concurrent=10**9, max_queued=10**9, admin=True)
ANYBODY = Key(id="", name="", sha256="", limits=_UNLIMITED)
"""where there are no keys"""


class Keys:
    """See the module's docstring."""

    def __init__(self, path: Path, *, must_exist: bool = True) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._keys: list[Key] = []
        if must_exist or path.exists():
            self._read()

    def all(self) -> list[Key]:
        """As the file has them now."""
        return list(self._keys)

    def find(self, token: str) -> Key | None:
        """Whose secret this is."""
        status = os.stat(self._path)
        if (status.st_mtime_ns, status.st_ino) != self._stamp:
            self._read()
        digest = _digest(token)
        found = None
        for key in self._keys:
            if hmac.compare_digest(digest, key.sha256):
                found = key
        return found

    def create(self, name: str, limits: Limits) -> str:
        """Add a key; returns its secret, which is not kept."""
        if not name or not name.isprintable() or len(name) > 64:
            raise ConfigError("name", "must be 1 to 64 printable characters")
        if any(key.name == name for key in self._keys):
            raise ConfigError("name", f"there is a key {name!r}; revoke it or choose another name")
        token = f"sk-{secrets.token_urlsafe(32)}"
        created, digest = int(time.time()), _digest(token)
        key_id = f"key-{secrets.token_hex(8)}"
        self._keys.append(Key(id=key_id, name=name, sha256=digest, created=created, limits=limits))
        self._write()
        return token

    def revoke(self, name: str) -> None:
        """Remove a key."""
        left = [key for key in self._keys if key.name != name]
        if len(left) == len(self._keys):
            raise ConfigError("name", f"there is no key {name!r} in {self._path.name}")
        self._keys = left
        self._write()

    def _read(self) -> None:
        try:
            status = os.stat(self._path)
            entries = json.loads(self._path.read_text())["keys"]
            self._keys = [Key(**{**e, "limits": Limits(**e.get("limits", {}))}) for e in entries]
        except (OSError, ValueError, TypeError, KeyError) as error:
            message = f"{self._path.name} is not a file of keys ({type(error).__name__})"
            raise ConfigError("api_keys", f"{message}; make one with infer keys create") from None
        self._stamp = (status.st_mtime_ns, status.st_ino)

    def _write(self) -> None:
        keys = [dataclasses.asdict(key) for key in self._keys]
        write_private(self._path, json.dumps({"keys": keys}, indent=1))


def write_private(path: Path, text: str) -> None:
    """Replace a file, at once; nobody but its owner may read it."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # a umask may have taken the owner's rights
        file.write(text)
    beside.replace(path)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
