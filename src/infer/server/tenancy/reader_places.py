"""`ReaderPlaces`: who reads again what was kept for one key, the one that came first gives way"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

MAX_READERS_OF_KEY = 64
"""Readers that one key may have at the same time."""


class EndsEarly(Protocol):
    """One that reads until it is told to stop."""

    def replace(self) -> None:
        """Another one has taken its place."""


class ReaderPlaces:
    """Such a reader costs nothing of an engine and may wait for long, so it counts neither as an
    open request nor a minute. A client whose connection has broken comes again before the server
    has noticed that; so a further reader is never refused."""

    def __init__(self) -> None:
        self._readers: dict[EndsEarly, None] = {}

    @contextmanager
    def place(self, reader: EndsEarly) -> Iterator[None]:
        """A place as long as the block lasts, or until it has to give way."""
        self._readers[reader] = None
        if len(self._readers) > MAX_READERS_OF_KEY:
            oldest = next(iter(self._readers))
            del self._readers[oldest]
            oldest.replace()
        try:
            yield
        finally:
            self._readers.pop(reader, None)
