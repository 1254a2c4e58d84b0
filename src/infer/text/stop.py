"""Stop strings in a stream of text: what may be shown now, and whether the end was reached.

The rule: the stop string that is completed first wins; if several are completed by the same
character, the longest of them (the earliest start). Text from the start of the match on is dropped,
with `include_stop` from its end on. The result depends on the text alone, never on how it was cut
into pieces, and no piece of a stop string that goes on to be completed is ever shown before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

_MAX_KEPT = 4
"""lists of stop strings whose beginnings are kept: up to 4,096 strings each"""


@functools.lru_cache(_MAX_KEPT)
def _beginnings_of(stop: tuple[str, ...]) -> frozenset[str]:
    """Shared by the choices of a request: they come one right after the other."""
    return frozenset(string[:end] for string in stop for end in range(len(string)))


class StopMatcher:
    """Fed with pieces of text; keeps the longest end of the text that begins a stop string."""

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        """`stop`: strings of at least one character."""
        self._stop = stop
        self._include_stop = include_stop
        self._starts = frozenset(string[0] for string in self._stop)
        self._beginnings = _beginnings_of(tuple(stop))
        self._longest = max(map(len, self._beginnings), default=0)
        self._open = ""
        self._reached = False

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; gives the text that may be shown now and whether a stop was hit.

        After a stop was hit, everything that still comes is dropped: `("", True)`.
        """
        if self._reached:
            return "", True
        if not self._open and self._starts.isdisjoint(text):  # nearly always
            return text, False
        seen = self._open + text
        # A stop string that is shown anyway is not held back.
        shown = len(self._open) if self._include_stop else 0
        matches = [
            (start + len(string), start)
            for string in self._stop
            if (start := seen.find(string)) >= 0
        ]
        if matches:
            end, start = min(matches)
            self._reached, self._open = True, ""
            return seen[shown : end if self._include_stop else start], True
        start = max(0, len(seen) - self._longest)
        while seen[start:] not in self._beginnings:
            start += 1
        self._open = seen[start:]
        return seen[shown : None if self._include_stop else start], False

    def finish(self) -> str:
        """The text ends here: what was held back was no stop string after all."""
        held, self._open = self._open, ""
        return "" if self._include_stop else held
