"""`ThoughtTokens`: how many tokens of an answer are thoughts, the marks around them left out.

A token counts that begins behind the opening mark and before the closing one. Marks need not be
tokens of their own, so the text decides; behind the closing mark nothing is looked at any more.
"""

from __future__ import annotations

from collections.abc import Sequence

from infer.text.tokenizer import Tokenizer
from infer.text.tools.formats import Thoughts


class ThoughtTokens:
    """For one answer."""

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, *, inside: bool) -> None:
        """`inside`: the prompt has begun the thoughts."""
        self.count = 0
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens=False)
        self._thoughts = thoughts
        self._state = "inside" if inside else "begin"
        self._text = ""
        """as far as a mark may stand in it"""
        self._starts: list[int] = []
        """where in that text the tokens begin that have been counted"""

    def push(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the answer."""
        for token_id in token_ids:
            if self._state == "done":
                return
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        start = len(self._text)
        self._text += self._detokenizer.push(token_id)
        if self._state == "begin":
            seen, opening = self._text.lstrip(), self._thoughts.opening
            if seen.startswith(opening):
                self._state, self._text = "inside", seen.removeprefix(opening)
            elif not opening.startswith(seen):
                self._state = "done"
            return
        self.count += 1
        self._starts.append(start)
        closing = self._thoughts.closing
        at = self._text.find(closing)
        if at >= 0:
            self.count -= sum(start >= at for start in self._starts)
            self._state = "done"
            return
        gone = max(0, len(self._text) - len(closing) + 1)
        self._text = self._text[gone:]
        self._starts = [start - gone for start in self._starts if start >= gone]
