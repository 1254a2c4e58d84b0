"""`BodyBudget`: a limit on the bytes that all request bodies together hold while they are read"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infer.errors import OverloadedError
from infer.server.http.error_responses import too_many

UNCOUNTED_BYTES = 8 * 1024
"""First bytes of each body that are not counted."""
MAX_BYTES = 36 * 1024 * 1024
"""Counted bytes of all bodies: 64 MiB, less the uncounted bytes of 1,024 connections and the
protocol's buffers for each of them (a piece being parsed, a parsed one, and their copies)."""
MAX_BYTES_OF_KEY = 18 * 1024 * 1024
"""Counted bytes of the bodies of one key."""
OWN_BYTES = 256 * 1024
"""Counted bytes that a key may have when all are used."""


class BodyBudget:
    """A body that is sent slowly, or never ends, keeps the bytes received so far in memory. The
    first bytes of each body are not counted, so short requests still work when long bodies fill the
    budget. One key has a part of it only. When the budget is used up, a key may still have
    `OWN_BYTES`."""

    def __init__(self, max_bytes: int = MAX_BYTES, uncounted_bytes: int = UNCOUNTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._uncounted_bytes = uncounted_bytes
        self._held: Counter[str] = Counter()
        """Counted bytes of the bodies that are being read, by owner."""

    @property
    def num_bytes(self) -> int:
        """Counted bytes of all bodies that are being read."""
        return self._held.total()

    @contextmanager
    def body(self, owner: str = "") -> Iterator[Callable[[int], None]]:
        """Count one body until the block ends. `owner`: id of the key.

        Call the yielded function with the body's new length in bytes before it grows; it raises
        `HttpError` (429) if the key's part of the budget is used up, `OverloadedError` if all is.
        """
        held = 0

        def grow_to(length: int) -> None:
            nonlocal held
            more = max(0, length - self._uncounted_bytes) - held
            of_owner = self._held[owner] + more
            if owner and of_owner > MAX_BYTES_OF_KEY:
                most = MAX_BYTES_OF_KEY >> 20
                raise too_many(f"this key may have {most} MiB of request bodies being read", 1)
            is_used_up = self.num_bytes + more > self._max_bytes
            if is_used_up and (not owner or of_owner > OWN_BYTES):
                raise OverloadedError("too many bytes of request bodies are being read")
            self._held[owner] = of_owner
            held += more

        try:
            yield grow_to
        finally:
            self._held[owner] -= held
            if not self._held[owner]:
                del self._held[owner]
