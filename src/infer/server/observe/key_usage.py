"""`KeyUsage`: what each key has used, in a file over restarts; the few keys that metrics show"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from heapq import nlargest
from pathlib import Path
from typing import Any

from infer.errors import ConfigError, LoadError
from infer.files import MAX_LIST_BYTES, parse_json, read_text
from infer.private_files import locked, state_folder, write_private

log = logging.getLogger("infer.server")

MAX_SHOWN = 50
"""Keys with series of their own."""
REST = "(others)"
"""The label of all other keys; no key has such a name, because `infer keys` prints names."""
_LEAD = 1.1
"""How many times as much a key must have used as the least of those shown to take its place."""


class KeyUsage:
    """A metric with a series for each key would grow with the keys. So `MAX_SHOWN` keys have one,
    those that have used most, and the rest are together. A series only ever grows while it is
    there: what a key used before it was shown stays with the rest, and what it used while it was
    shown leaves with it."""

    def __init__(self, model: str, file: Path | None, save_every_s: float) -> None:
        """`model`: entry of the file. Servers may share a file. One that dies loses what was used
        in the last `save_every_s` seconds."""
        self._model = model
        self._file = file
        self._save_every_s = save_every_s
        self._saved_s = 0.0
        self._of_keys = {key: Counter(saved) for key, saved in self._saved().get(model, {}).items()}
        self._written = {key: Counter(counts) for key, counts in self._of_keys.items()}
        """The part of `_of_keys` that is in the file."""
        most = nlargest(MAX_SHOWN, self._of_keys, key=lambda key: _size(self._of_keys[key]))
        self._shown = {key: Counter(self._of_keys[key]) for key in most}
        self._rest: Counter[str] = Counter()
        for key, counts in self._of_keys.items():
            if key not in self._shown:
                self._rest.update(counts)

    def add(self, key: str, counts: Mapping[str, int]) -> None:
        """Add to the totals of a key."""
        totals = self._of_keys.setdefault(key, Counter())
        totals.update(counts)
        if key not in self._shown and self._has_place(_size(totals)):
            self._shown[key] = Counter()
        self._shown.get(key, self._rest).update(counts)
        if self._file is not None and time.monotonic() > self._saved_s + self._save_every_s:
            self.save()

    def _has_place(self, size: int) -> bool:
        """Whether a key of this size is shown from now on; another one may leave for it."""
        if len(self._shown) < MAX_SHOWN:
            return True
        least = min(self._shown, key=lambda key: _size(self._of_keys[key]))
        if size <= _LEAD * _size(self._of_keys[least]):
            return False
        del self._shown[least]
        return True

    def totals(self) -> dict[str, dict[str, int]]:
        """Those of all keys, by name."""
        return {key: dict(counts) for key, counts in self._of_keys.items()}

    def shown(self, name: str) -> dict[str, int]:
        """One number of the keys that are shown, and of all others together if there are any."""
        totals = {key: counts[name] for key, counts in self._shown.items()}
        return {**totals, REST: self._rest[name]} if self._rest else totals

    def _saved(self) -> dict[str, dict[str, dict[str, int]]]:
        if self._file is None or not self._file.exists():
            return {}
        try:
            return dict(parse_json(read_text(self._file, MAX_LIST_BYTES)))
        except (OSError, ValueError, TypeError, LoadError) as error:
            raise ConfigError("api_keys", f"{self._file.name} holds no usage: {error}") from None

    def save(self) -> None:
        """Add the totals to the file; entries of other models are not changed."""
        if self._file is None or not self._of_keys:
            return
        self._saved_s = time.monotonic()
        try:
            with locked(self._file, max_wait_s=0.2):
                totals = self._saved()
                ours = totals.setdefault(self._model, {})
                for key, counts in self._of_keys.items():
                    theirs, known = ours.get(key, {}), self._written.get(key, Counter())
                    ours[key] = {
                        name: theirs.get(name, 0) + count - known.get(name, 0)
                        for name, count in counts.items()
                    }
                write_private(self._file, json.dumps(totals))
            self._written = {key: Counter(counts) for key, counts in self._of_keys.items()}
        except (OSError, ConfigError) as error:
            log.error("the usage of the keys is not saved: %s", error)


def _size(counts: Mapping[str, Any]) -> int:
    return sum(value for name, value in counts.items() if name.endswith("_tokens"))


def usage_file(keys: Path) -> Path:
    """Where the usage of a file of keys is kept: beside it, or in the user's state folder where
    nothing can be written beside it, as in a volume of Kubernetes. Where there is no such folder
    either, it is not kept; the log says so."""
    beside = keys.with_name(f"{keys.name}.usage")
    folder = keys.resolve().parent
    if not folder.is_dir() or os.access(folder, os.W_OK):
        return beside
    try:
        state = state_folder()
    except OSError as error:
        log.error(
            "%s cannot be written, and the state folder cannot be made (%s): the usage of the keys"
            " is not kept; XDG_STATE_HOME names another folder",
            folder,
            error,
        )
        return beside
    log.warning("%s cannot be written: the usage of the keys is in %s", folder, state)
    return state / f"{str(keys.resolve()).strip('/').replace('/', '-')}.usage"
