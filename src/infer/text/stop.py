"""Stop strings in a stream of text: what may be shown now, and whether the end was reached.

The rule: the stop string that is completed first wins; if several are completed by the same
character, the longest of them (the earliest start). Text from the start of the match on is dropped,
with `include_stop` from its end on. The result depends on the text alone, never on how it was cut
into pieces, and no piece of a stop string that goes on to be completed is ever shown before.
Called by the output processor, once per delta; it knows no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from infer.errors import RequestError


class StopMatcher:
    """An Aho-Corasick automaton over the stop strings, fed with pieces of text.

    Its state is the longest end of the text so far that begins some stop string: exactly what has
    to be held back. Each character costs amortised O(1), whatever the number of stop strings.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool = False) -> None:
        if isinstance(stop, str):
            stop = (stop,)
        if not all(stop):
            raise RequestError("a stop string must have at least one character", param="stop")
        self._include_stop = include_stop
        self._held = ""
        self._state = 0
        self._reached = False
        self._build(stop)

    def _build(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]  # length of the prefix a state stands for
        self._ends = [0]  # length of the longest stop string that ends in a state, or 0
        for string in stop:
            state = 0
            for char in string:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._ends.append(0)
                state = self._next[state][char]
            self._ends[state] = len(string)
        # Breadth first, so that the state a failure leads to is finished before it is needed.
        self._fail = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, 0)
                # A state's own string is longer than any that ends at its fallback.
                self._ends[child] = self._ends[child] or self._ends[self._fail[child]]
                queue.append(child)
        self._starts = frozenset(self._next[0])

    def push(self, text: str) -> tuple[str, bool]:
        """Takes the next piece; gives the text that may be shown now and whether a stop was hit.

        After a stop was hit, everything that still comes is dropped: `("", True)`.
        """
        if self._reached:
            return "", True
        state = self._state
        if state == 0 and self._starts.isdisjoint(text):  # nearly always, and free without stops
            return text, False
        transitions, fail = self._next, self._fail
        for index, char in enumerate(text):
            while state and char not in transitions[state]:
                state = fail[state]
            state = transitions[state].get(char, 0)
            if self._ends[state]:
                self._reached = True
                seen = self._held + text[: index + 1]
                self._held = ""
                if self._include_stop:
                    return seen, True
                return seen[: len(seen) - self._ends[state]], True
        self._state = state
        if self._include_stop:  # a stop string is shown anyway, so there is nothing to hide
            return text, False
        seen = self._held + text
        shown = len(seen) - self._depth[state]
        self._held = seen[shown:]
        return seen[:shown], False

    def finish(self) -> str:
        """The text ends here: what was held back was no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held
