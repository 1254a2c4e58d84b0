"""`ThoughtTokens`: counts the tokens of an answer's reasoning, without the marks around it."""

from __future__ import annotations

from collections.abc import Sequence

from infer.text.tokenizer import Tokenizer
from infer.text.tools.formats import Thoughts


class ThoughtTokens:
    """Counts the reasoning tokens of one answer.

    A token is counted if its text begins between the opening mark and the closing mark. Marks need
    not be single tokens, so the text decides. Tokens after the closing mark are not read.
    """

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts, *, inside: bool) -> None:
        """`thoughts`: the marks around the reasoning. `inside`: the prompt has opened it."""
        self.count = 0
        """Number of reasoning tokens so far."""
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens=False)
        self._thoughts = thoughts
        self._state = "inside" if inside else "begin"
        self._text = ""
        """End of the answer's text so far, as much as may hold a part of a mark."""
        self._starts: list[int] = []
        """Places in that text at which counted tokens begin."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens of the answer."""
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
