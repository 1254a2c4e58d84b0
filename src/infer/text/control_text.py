"""Control tokens in a caller's text: keeping them from becoming control tokens of the prompt.

The sealed tokenizer has the same vocabulary, ids and rules as the checkpoint's tokenizer. But each
control token has a sealed name, which consists of private-use characters with a random part. So
the sealed tokenizer encodes any text as ordinary tokens. In a chat, only literals of the template
itself get their sealed names.

Templates may trim, split and join strings. Therefore `mark` surrounds the literals in callers'
strings with a pair of Unicode noncharacters before rendering. It also puts a noncharacter after a
string whose end, together with following text, could form a literal. Then `seal` takes marked
literals as text and all others as the template's own.

There are two limits. A template may form a literal by joining pieces of messages that it has cut
at other places than white space or literals; this is not detected. Role names count as part of the
template.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import tokenizers

from infer.errors import RequestError

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that Unicode will never assign. Text has no use for them, but strings allow them."""
_PRIVATE_USE = range(0xF0000, 0xFFFFE)  # plane 15, which normalizers do not change
# Some checkpoints also flag these tokens as special. If they were sealed, text could not use them.
_NO_CONTROL = re.compile(r"\s*|<0x[0-9A-Fa-f]{2}>")


def sealed_names(tokens: Iterable[str]) -> dict[str, str]:
    """The sealed name of each control token: 64 random bits and a number; all of one length."""
    nonce = "".join(chr(secrets.choice(_PRIVATE_USE)) for _ in range(4))
    literals = sorted(token for token in set(tokens) if not _NO_CONTROL.fullmatch(token))
    names = {}
    for index, literal in enumerate(literals):
        high, low = divmod(index, len(_PRIVATE_USE))
        names[literal] = nonce + chr(_PRIVATE_USE[low]) + chr(_PRIVATE_USE[high])
    return names


def sealed_tokenizer(description: dict[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer of a parsed `tokenizer.json` with tokens renamed; changes `description`."""
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    if isinstance(model["vocab"], list):  # Unigram: [piece, score] by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:  # merges that use or make a renamed token are left out
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            (left, right)
            for left, right in model["merges"]
            if names.keys().isdisjoint((left, right, left + right.removeprefix(prefix)))
        ]
    return tokenizers.Tokenizer.from_buffer(msgspec.json.encode(description))


def strings_in(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_in(item)


def free_noncharacters(values: Any, count: int) -> tuple[str, ...]:
    """`count` noncharacters that occur in no string of `values`, so they can serve as marks.

    `RequestError` if there are not enough of them.
    """
    others = [string for string in strings_in(values) if not string.isascii()]
    free = [char for char in NONCHARACTERS if not any(char in string for string in others)]
    if len(free) < count:
        raise RequestError(
            "the messages use nearly all of the noncharacters U+FDD0 to U+FDEF;"
            " leave them out, they have no meaning in text",
            param="messages",
        )
    return tuple(free[:count])


def _one_of(literals: Iterable[str]) -> str:
    """A regular expression for any of the literals; it matches the longest possible one.

    It is a tree of common prefixes. There can be thousands of literals, and a text full of `<` must
    not be compared with each of them at each character.
    """
    groups: dict[str, list[str]] = {}
    for literal in literals:
        groups.setdefault(literal[:1], []).append(literal)
    ends_here = groups.pop("", None) is not None
    branches = []
    for first in sorted(groups):
        # The whole common prefix at once, so long literals do not make the recursion deep.
        begin = _common_beginning(groups[first])
        branches.append(re.escape(begin) + _one_of(word[len(begin) :] for word in groups[first]))
    if not branches:
        return "" if ends_here else "(?!)"
    if len(branches) == 1 and not ends_here:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + "?" * ends_here


def _common_beginning(literals: list[str]) -> str:
    low, high = min(literals), max(literals)
    pairs = enumerate(zip(low, high, strict=False))
    end = next((i for i, (char, other) in pairs if char != other), min(len(low), len(high)))
    return low[:end]


@dataclass(frozen=True, slots=True)
class Marked:
    """A caller's values with the control literals in them marked."""

    values: tuple[Any, ...]
    """Copies of the values with marks; the values themselves if there was nothing to mark."""
    opening: str
    """Noncharacter before a literal."""
    closing: str
    """Noncharacter after a literal, or after an end that could begin one."""
    is_marked: bool
    """Whether there was anything to mark."""


class ControlText:
    """Finds the control literals of one tokenizer, such as `<|im_start|>`, in text."""

    def __init__(self, sealed_names: Mapping[str, str]) -> None:
        """`sealed_names`: the sealed name of each control literal."""
        self._sealed_names = sealed_names
        self._pattern = _one_of(sealed_names)
        # Case is ignored, because a template may change it (`content | lower`), and because marking
        # too much is harmless.
        self._literal = re.compile(self._pattern, re.IGNORECASE)
        self._meant = re.compile(self._pattern)
        self._beginnings = frozenset(
            literal.lower()[:end] for literal in sealed_names for end in range(1, len(literal))
        )
        self._longest_beginning = max(map(len, self._beginnings), default=1)

    def occurs_in(self, text: str) -> bool:
        """Whether the text contains a control literal."""
        return self._literal.search(text) is not None

    def mark(self, *values: Any) -> Marked:
        """Copies of JSON-like values (strings, mappings, lists) with control literals marked.

        `RequestError` if they are nested too deeply or leave no noncharacters for marks.
        """
        try:
            strings = strings_in(values)
            if not any(
                self.occurs_in(text) or self._open_end(text) is not None for text in strings
            ):
                return Marked(values, "", "", is_marked=False)
            opening, closing = free_noncharacters(values, 2)
            marked = tuple(self._mark(value, opening, closing) for value in values)
        except RecursionError:
            raise RequestError("messages are nested too deeply", param="messages") from None
        return Marked(marked, opening, closing, is_marked=True)

    def _open_end(self, string: str) -> int | None:
        """Where a string ends whose end could begin a literal, without trailing white space."""
        kept = string.rstrip()
        tail = kept[-self._longest_beginning :].lower()
        begun = any(tail[start:] in self._beginnings for start in range(len(tail)))
        return len(kept) if begun else None

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
        """(rendered text without marks, the same with the template's own literals sealed)"""
        if not marked.is_marked:  # no literal is the caller's, so all are the template's own
            names = self._sealed_names
            return rendered, self._meant.sub(lambda match: names[match[0]], rendered)
        opening, closing = marked.opening, marked.closing
        pattern = re.compile(
            f"{opening}(?P<typed>(?i:{self._pattern})){closing}"
            f"|[{opening}{closing}]"  # a mark whose counterpart the template has cut off
            f"|(?P<meant>{self._pattern})"
        )
        sealed = pattern.sub(
            lambda match: match["typed"] or self._sealed_names.get(match["meant"], ""), rendered
        )
        return rendered.translate({ord(opening): None, ord(closing): None}), sealed
