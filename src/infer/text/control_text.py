"""Keeps control tokens typed by a caller from becoming control tokens of the prompt.

A chat template writes `<|im_end|>` and means it; a message that contains the same characters must
not. Templates are programs (they trim, split, join), so where a character of the rendered text
came from is not known afterwards. `ControlText.mark` therefore surrounds each control literal in
the callers' strings with a pair of Unicode noncharacters *before* rendering, and puts one behind
an end that could be completed to a literal by what follows. `seal` reads the rendered text: what
is marked is text, a literal without marks is the template's own, and only that is replaced by its
sealed name, the only thing the tokenizer for such prompts (`sealed.py`) knows control tokens by.
Limits: a template that composes literals from pieces of messages cut elsewhere than at whitespace
or at literals is not seen through, and role names are taken for part of the template.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infer.errors import RequestError

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode promises never to assign: nobody's text, but everybody's string."""


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def free_noncharacters(values: Iterable[Any], count: int) -> tuple[str, ...]:
    """`count` noncharacters that occur in none of the strings, so they can serve as marks."""
    used: set[str] = set()
    for value in values:
        for string in strings_in(value):
            # Nearly no text has one; this is one pass at the speed of a scan.
            if not string.isascii():
                used.update(char for char in NONCHARACTERS if char in string)
    free = [char for char in NONCHARACTERS if char not in used]
    if len(free) < count:
        raise RequestError(
            "the messages use nearly all of the noncharacters U+FDD0 to U+FDEF;"
            " leave them out, they have no meaning in text",
            param="messages",
        )
    return tuple(free[:count])


def _one_of(literals: Iterable[str]) -> str:
    """A regular expression for any of the literals, of several that begin alike the longest.

    A tree by common beginnings: there can be thousands, and a text full of `<` must not cost a
    comparison with each of them at each character.
    """
    tree: dict[str, Any] = {}
    for literal in literals:
        node = tree
        for char in literal:
            node = node.setdefault(char, {})
        node[""] = {}  # a literal ends here
    return _pattern_of(tree) if tree else "(?!)"


def _pattern_of(node: Mapping[str, Any]) -> str:
    branches = [
        re.escape(char) + _pattern_of(child) for char, child in sorted(node.items()) if char
    ]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in node else "")


@dataclass(frozen=True, slots=True)
class Marked:
    """Values of a caller with the control literals in them marked."""

    values: tuple[Any, ...]
    opening: str
    closing: str
    found: bool
    """whether there was anything to mark; if not, `values` are as they came"""


class ControlText:
    """The control literals of one tokenizer, e.g. `<|im_start|>`, and where they occur in text."""

    def __init__(self, sealed_names: Mapping[str, str]) -> None:
        self._sealed_names = sealed_names
        self._pattern = _one_of(sealed_names)
        # Any case: a template may change it (`content | lower`), and marking too much is harmless.
        self._literal = re.compile(self._pattern, re.IGNORECASE)
        self._beginnings = frozenset(
            literal.lower()[:end] for literal in sealed_names for end in range(1, len(literal))
        )
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def occurs_in(self, text: str) -> bool:
        """Whether the text contains a control literal."""
        return self._literal.search(text) is not None

    def mark(self, *values: Any) -> Marked:
        """Copies of the values (JSON-like: strings, mappings, lists) with literals marked."""
        try:
            if not any(map(self._needs_mark, strings_in(values))):
                return Marked(values, "", "", found=False)
            opening, closing = free_noncharacters(values, 2)
            marked = tuple(self._mark(value, opening, closing) for value in values)
        except RecursionError:
            raise RequestError("messages are nested too deeply", param="messages") from None
        return Marked(marked, opening, closing, found=True)

    def _needs_mark(self, string: str) -> bool:
        return self.occurs_in(string) or self._open_end(string) is not None

    def _open_end(self, string: str) -> int | None:
        """Where an end that begins a literal stops, white space after it left aside."""
        kept = string.rstrip()
        tail = kept[-self._longest_beginning :].lower() if self._longest_beginning else ""
        if any(tail[start:] in self._beginnings for start in range(len(tail))):
            return len(kept)
        return None

    def _mark(self, value: Any, opening: str, closing: str) -> Any:
        if isinstance(value, str):
            end = self._open_end(value)
            if end is not None:
                value = value[:end] + closing + value[end:]
            return self._literal.sub(lambda match: f"{opening}{match[0]}{closing}", value)
        if isinstance(value, Mapping):
            return {
                self._mark(key, opening, closing): self._mark(item, opening, closing)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._mark(item, opening, closing) for item in value]
        return value

    def seal(self, rendered: str, marked: Marked) -> tuple[str, str]:
        """(the text without marks, the same with the template's own literals sealed)."""
        opening, closing = marked.opening, marked.closing
        pattern = re.compile(
            f"{opening}(?P<typed>(?i:{self._pattern})){closing}"
            f"|[{opening}{closing}]"  # a mark whose other half the template cut off
            f"|(?P<meant>{self._pattern})"
        )
        sealed = pattern.sub(
            lambda match: match["typed"] or self._sealed_names.get(match["meant"], ""), rendered
        )
        return rendered.translate({ord(opening): None, ord(closing): None}), sealed
