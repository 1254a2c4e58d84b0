"""`BehindThoughts`: a grammar that applies after the model's reasoning."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Self

import numpy as np

from infer.text.grammars.compiler import Constraint, TokenBytes


class AroundThoughts(Constraint):
    """A constraint of an answer's reasoning, which wraps that of the text after it.

    Like the wrapped one, its state is a function of the tokens of one sequence.
    """

    def __init__(
        self, answer: Constraint, vocabulary: TokenBytes, opening: str, closing: str
    ) -> None:
        """`answer`: the constraint of the text after the reasoning.

        `opening`, `closing`: the marks around the reasoning. `opening` is empty if the prompt has
        already opened it.
        """
        self._answer = answer
        self._vocabulary = vocabulary
        self._opening, self._closing = opening.encode(), closing.encode()
        self._num_taken = 0
        self.thread = answer.thread

    def copy(self) -> Self:
        """See `Constraint`."""
        copied = copy.copy(self)
        copied._answer = self._answer.copy()
        return copied

    def num_allowed(self, tokens: Iterable[int]) -> int:
        """See `Constraint`."""
        trial, count = self.copy(), 0
        for token in tokens:
            if trial.forbidden()[token]:
                break
            count += 1
            if trial.take(token):
                break
        return count


class BehindThoughts(AroundThoughts):
    """The reasoning itself is not constrained, with two exceptions. No token in it may end the
    answer. And no token may hold both the closing mark and the beginning of the answer, because the
    grammar could not see that beginning. If the prompt has not opened the reasoning, an answer
    begins either with the opening mark or as the grammar requires. Marks need not be single tokens,
    since the tokens' bytes are compared."""

    def __init__(
        self, answer: Constraint, vocabulary: TokenBytes, opening: str, closing: str
    ) -> None:
        """See `AroundThoughts`."""
        super().__init__(answer, vocabulary, opening, closing)
        self._reset()

    def _reset(self) -> None:
        self._text = b""
        """Bytes of the latest tokens, as many as may hold a part of a mark."""
        self._state = "begin" if self._opening else "inside"
        self._may_answer = True
        """Whether the text so far may begin the answer, without any reasoning."""
        self._answer.follow([])

    @property
    def is_inside(self) -> bool:
        """Whether the reasoning has begun and has not ended."""
        return self._state == "inside"

    def take(self, token: int) -> bool:
        """See `Constraint`."""
        self._num_taken += 1
        if self._state == "answer":
            return self._answer.take(token)
        self._text += self._vocabulary.pieces[token]
        if self._state == "begin":
            return self._take_first(token)
        at = self._text.find(self._closing)
        if at < 0:
            self._text = self._text[max(0, len(self._text) - len(self._closing) + 1) :]
        else:
            self._state = "answer"
        return False

    def num_allowed(self, tokens: Iterable[int]) -> int:
        """See `Constraint`."""
        if self._state == "answer":
            return self._answer.num_allowed(tokens)
        return super().num_allowed(tokens)

    def _take_first(self, token: int) -> bool:
        completes = False
        if self._may_answer:
            if self._answer.forbidden()[token]:
                self._may_answer = False
            else:
                completes = self._answer.take(token)
        seen = self._text.lstrip()
        if seen.startswith(self._opening):
            self._state, self._text = "inside", seen.removeprefix(self._opening)
            self._answer.follow([])
            return False
        if not self._opening.startswith(seen):
            if not self._may_answer:
                raise ValueError("the text is neither reasoning nor allowed by the grammar")
            self._state = "answer"
        return completes

    def forbidden(self) -> np.ndarray:
        """See `Constraint`."""
        if self._state == "answer":
            return self._answer.forbidden()
        if self._state == "inside":
            return self._forbidden_inside()
        forbidden = np.ones(self._vocabulary.num_logits, bool)
        if self._may_answer:
            forbidden = self._answer.forbidden().copy()
        seen, opening = self._text.lstrip(), self._opening
        for token in self._vocabulary.containing(opening[len(seen) : len(seen) + 1]):
            # A token may go on after the mark as well as end with it.
            text = seen + self._vocabulary.pieces[token]
            if opening.startswith(text) or text.startswith(opening):
                forbidden[token] = self._has_answer_after_mark(text.removeprefix(opening))
        return forbidden

    def _forbidden_inside(self) -> np.ndarray:
        forbidden = np.zeros(self._vocabulary.num_logits, bool)
        forbidden[self._vocabulary.ends] = True
        for token in self._vocabulary.containing(self._closing[-1:]):
            if self._has_answer_after_mark(self._text + self._vocabulary.pieces[token]):
                forbidden[token] = True
        return forbidden

    def _has_answer_after_mark(self, text: bytes) -> bool:
        """Whether the text has the closing mark and a part of the answer after it."""
        _, mark, rest = text.partition(self._closing)
        return bool(mark and rest.strip())
