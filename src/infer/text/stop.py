"""`StopMatcher`: finds stop strings in a stream of text and holds back what may begin one."""

from __future__ import annotations

import functools
from collections.abc import Sequence

_MAX_KEPT = 4
"""Number of lists of stop strings whose prefixes are cached; a list has up to 4,096 strings."""


@functools.lru_cache(_MAX_KEPT)
def _beginnings_of(stop: tuple[str, ...]) -> frozenset[str]:
    """All proper prefixes of the stop strings; cached for the choices of one request."""
    return frozenset(string[:end] for string in stop for end in range(len(string)))


class StopMatcher:
    """Finds stop strings in one text.

    The stop string that is completed first ends the text. If the same character completes several,
    the longest of them counts. Text from the start of the match on is dropped, or with
    `include_stop` text after its end. The result depends on the text alone and not on how it was
    divided into pieces. No part of a stop string that is completed later is ever returned.

    It holds back the longest end of the text that is a prefix of a stop string.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`stop`: strings of at least one character. `include_stop`: the match is returned too."""
        self._stop = stop
        self._include_stop = include_stop
        self._starts = frozenset(string[0] for string in self._stop)
        self._beginnings = _beginnings_of(tuple(stop))
        self._longest = max(map(len, self._beginnings), default=0)
        self._open = ""
        self._reached = False
        self.found: str | None = None
        """The stop string that has ended the text."""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; returns (text that is certain now, whether a stop string was found).

        After a stop string was found, all further text is dropped: `("", True)`.
        """
        if self._reached:
            return "", True
        if not self._open and self._starts.isdisjoint(text):  # nearly always
            return text, False
        seen = self._open + text
        # With `include_stop` stop strings are returned, so they are not held back.
        shown = len(self._open) if self._include_stop else 0
        matches = [
            (start + len(string), start)
            for string in self._stop
            if (start := seen.find(string)) >= 0
        ]
        if matches:
            end, start = min(matches)
            self._reached, self._open = True, ""
            self.found = seen[start:end]
            return seen[shown : end if self._include_stop else start], True
        start = max(0, len(seen) - self._longest)
        while seen[start:] not in self._beginnings:
            start += 1
        self._open = seen[start:]
        return seen[shown : None if self._include_stop else start], False

    def finish(self) -> str:
        """End the text; returns the text that was held back."""
        held, self._open = self._open, ""
        return "" if self._include_stop else held
