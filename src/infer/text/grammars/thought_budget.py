"""`ThoughtBudget`: ends a model's reasoning when it has the number of tokens that it may have"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from infer.text.grammars.compiler import Constraint, TokenBytes
from infer.text.grammars.grammar_thoughts import AroundThoughts


class Unconstrained(Constraint):
    """Allows any text."""

    def __init__(self, width: int) -> None:
        """`width`: number of logits, V."""
        self._width = width

    def follow(self, tokens: list[int]) -> None:
        """See `Constraint`."""

    def take(self, token: int) -> bool:
        """See `Constraint`."""
        return False

    def copy(self) -> Unconstrained:
        """See `Constraint`."""
        return self

    def num_allowed(self, tokens: Iterable[int]) -> int:
        """See `Constraint`."""
        return len(list(tokens))

    def forbidden(self) -> np.ndarray:
        """See `Constraint`."""
        return np.zeros(self._width, bool)


class ThoughtBudget(AroundThoughts):
    """Behind the last token of its budget those tokens with which the model itself ends its
    reasoning, as its chat template writes them, are the only ones that are allowed, one after the
    other. Like a grammar's, the state is a function of the sequence's own tokens. So the answer is
    the same in any batch, after preemption, and on an engine that continues the request."""

    def __init__(
        self,
        answer: Constraint,
        vocabulary: TokenBytes,
        marks: tuple[str, str],
        budget: int,
        ending: tuple[int, ...],
    ) -> None:
        """`marks`: before and behind the reasoning; the first is empty if the prompt has it.
        `budget`: maximum number of tokens of the reasoning. `ending`: tokens that end it."""
        super().__init__(answer, vocabulary, *marks)
        self._ending = ending
        pieces = b"".join(vocabulary.pieces[token] for token in ending)
        before, text = pieces.find(self._closing), b""
        num_before = 0
        for token in ending:
            text += vocabulary.pieces[token]
            num_before += len(text) <= before
        self._most = max(0, budget - num_before)
        """Number of tokens of the reasoning behind which the ending begins."""
        self._starts_at = num_before if budget < num_before else 0
        """First token of the ending that is written: there is no room for those before."""
        self._reset()

    def _reset(self) -> None:
        self._state = "inside" if not self._opening else "begin"
        self._text = b""
        """Bytes of the latest tokens, as many as may hold a part of a mark."""
        self._count = 0
        self._place = -1
        """Number of tokens of the ending that are written; -1: it has not begun."""
        self._answer.follow([])

    def take(self, token: int) -> bool:
        """See `Constraint`."""
        self._num_taken += 1
        if self._place >= 0 or self._is_spent():
            self._place = max(self._place, self._starts_at) + 1
        completes = self._answer.take(token)
        if self._state == "begin":
            self._text += self._vocabulary.pieces[token]
            seen = self._text.lstrip()
            if seen.startswith(self._opening):
                self._state, self._text = "inside", seen.removeprefix(self._opening)
            elif not self._opening.startswith(seen):
                self._state = "done"
        elif self._state == "inside":
            self._count += 1
            self._text += self._vocabulary.pieces[token]
            if self._closing in self._text:
                self._state = "done"
            self._text = self._text[-len(self._closing) + 1 :] if len(self._closing) > 1 else b""
        return completes

    def _begun_mark(self) -> bytes:
        """The beginning of the closing mark with which the reasoning ends so far."""
        sizes = range(min(len(self._closing) - 1, len(self._text)), 0, -1)
        ends = (self._text[-size:] for size in sizes)
        return next((end for end in ends if self._closing.startswith(end)), b"")

    def _is_spent(self) -> bool:
        """Whether the ending has to begin now. A mark that has been begun is written to its end."""
        is_full = self._state == "inside" and self._count >= self._most
        return is_full and not (self._begun_mark() and self._mark_tokens())

    def _mark_tokens(self) -> list[int]:
        """The tokens that go on with a closing mark that has been begun."""
        rest = self._closing[len(self._begun_mark()) :]
        pieces = self._vocabulary.pieces
        return [i for i in self._vocabulary.containing(rest[:1]) if rest.startswith(pieces[i])]

    def forbidden(self) -> np.ndarray:
        """See `Constraint`."""
        place = self._place
        if place < 0 and self._is_spent():
            place = self._starts_at
        if 0 <= place < len(self._ending):
            return self._only([self._ending[place]])
        if self._state == "inside" and self._count >= self._most and place < 0:
            return self._only(self._mark_tokens())
        return self._answer.forbidden()

    def _only(self, tokens: list[int]) -> np.ndarray:
        forbidden = np.ones(self._vocabulary.num_logits, bool)
        forbidden[tokens] = False
        return forbidden
