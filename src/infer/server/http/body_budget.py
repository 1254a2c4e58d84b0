"""`BodyBudget`: how many bytes all request bodies together may hold while they are read.

A body that is sent slowly or never ends holds what has come of it. The first bytes of each are not
counted, so that short requests go on while long bodies fill the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infer.errors import OverloadedError

UNCOUNTED_BYTES = 8 * 1024
"""of each body"""
MAX_BYTES = 36 * 1024 * 1024
"""64 MiB for all bodies, less those first bytes of 1,024 connections and what the protocol holds of
each: a piece that is parsed, one that has been, and their copies"""


class BodyBudget:
    """See the module's docstring."""

    def __init__(self, max_bytes: int = MAX_BYTES, uncounted_bytes: int = UNCOUNTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._uncounted_bytes = uncounted_bytes
        self.num_bytes = 0
        """that are counted now"""

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """For one body. The result is called with its length before it grows to that, and raises
        `OverloadedError` where there is no room; at the end the bytes are given back."""
        held = 0

        def grow_to(length: int) -> None:
            nonlocal held
            counted = max(0, length - self._uncounted_bytes)
            if self.num_bytes + counted - held > self._max_bytes:
                raise OverloadedError("too many bytes of request bodies are being read")
            self.num_bytes += counted - held
            held = counted

        try:
            yield grow_to
        finally:
            self.num_bytes -= held
