"""`BodyBudget`: a limit on the bytes that all request bodies together hold while they are read

A body that is sent slowly, or never ends, keeps the bytes received so far in memory. The first
bytes of each body are not counted, so short requests still work when long bodies fill the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from infer.errors import OverloadedError

UNCOUNTED_BYTES = 8 * 1024
"""first bytes of each body that are not counted"""
MAX_BYTES = 36 * 1024 * 1024
"""counted bytes of all bodies: 64 MiB, less the uncounted bytes of 1,024 connections and the
protocol's buffers for each of them (a piece being parsed, a parsed one, and their copies)"""


class BodyBudget:
    """See the module's docstring."""

    def __init__(self, max_bytes: int = MAX_BYTES, uncounted_bytes: int = UNCOUNTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._uncounted_bytes = uncounted_bytes
        self.num_bytes = 0
        """counted bytes of all bodies that are being read"""

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Count one body until the block ends.

        Call the yielded function with the body's new length in bytes before it grows; it raises
        `OverloadedError` if the budget is used up.
        """
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
