"""Which regular expressions in JSON schemas the compiler of grammars can enforce.

Schemas have expressions of ECMAScript, and in practice of Python and PCRE. llguidance knows those
of Rust, without look-around and with anchors at both ends only. `is_enforceable` reads an
expression once, without recursion. It may say no to one that could be enforced, but not yes to one
that cannot be.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEX = "[0-9A-Fa-f]"
_ESCAPE = re.compile(
    rf"\\(?:(?P<set>[dDsSwW])|(?P<anchor>[Az])|x(?P<x>{_HEX}{{2}}|\{{{_HEX}{{1,6}}\}})"
    rf"|u(?P<u>{_HEX}{{4}}|\{{{_HEX}{{1,6}}\}})|[pP](?P<property>[A-Za-z]|\{{[A-Za-z_=]+\}})"
    r"|(?P<one>[afnrtv_ ]|[^\w\s<>]))",
    re.ASCII,
)
_GROUP = re.compile(r"\((?:\?(?:P?<(?P<name>[A-Za-z_][A-Za-z0-9_]*)>|[is]*:|(?P<flags>[is]+)\)))?")
_REPEAT = re.compile(r"(?:[*+?]|\{(\d{1,5})(?:(,)(\d{0,5}))?\})\??")
_CATEGORIES = (
    "L|Lu|Ll|Lt|Lm|Lo|M|Mn|Mc|Me|N|Nd|Nl|No|P|Pc|Pd|Ps|Pe|Pi|Pf|Po|S|Sm|Sc|Sk|So|Z|Zs|Zl|Zp|C|Cc|Cf"
)
_PROPERTY = re.compile(
    rf"\{{?(?:(?:General_Category=|gc=)?(?:{_CATEGORIES}|(?:Uppercase_|Lowercase_)?Letter|Mark"
    r"|(?:Decimal_)?Number|Punctuation|Symbol|Separator)|Alphabetic|Uppercase|Lowercase"
    r"|(?:Script=|sc=)?(?:Latin|Greek|Cyrillic|Han|Hiragana|Katakana|Hangul|Arabic|Hebrew|Thai"
    r"|Devanagari))\}?"
)
_SURROGATES = range(0xD800, 0xE000)


@dataclass(slots=True)
class _Level:
    """A group that is being read; the outermost one is the whole expression."""

    begins: bool
    """Whether nothing precedes the group's beginning."""
    at_start: bool
    """Whether nothing precedes this place."""
    has_atom: bool = False
    """Whether there is something before this place that can be repeated."""
    is_over: bool = False
    """Whether the end of the text precedes this place, so nothing may follow."""
    ends: bool = False
    """Whether the end of the text is in any branch."""
    has_anchor: bool = False
    """Whether there is an anchor in the group."""


@dataclass(slots=True)
class _Reader:
    text: str
    at: int = 0
    levels: list[_Level] = field(default_factory=lambda: [_Level(True, True)])
    names: set[str] = field(default_factory=set)

    def is_enforceable(self) -> bool:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in "(|)^$":
                known = self._structure(char)
            elif char in "*+?{":
                known = self._repeat()
            else:
                known = self._atom(char)
            if not known:
                return False
        return len(self.levels) == 1

    def _structure(self, char: str) -> bool:
        level = self.levels[-1]
        if char == "(":
            return self._open(level)
        self.at += 1
        if char == "|":
            level.at_start, level.is_over, level.has_atom = level.begins, False, False
            return True
        if char == ")":
            return self._close()
        return self._anchor(level, char == "^")

    def _anchor(self, level: _Level, is_start: bool) -> bool:
        level.has_anchor, level.has_atom = True, False
        if is_start:
            return level.at_start
        level.at_start, level.is_over, level.ends = False, True, True
        return True

    def _open(self, level: _Level) -> bool:
        group = _GROUP.match(self.text, self.at)
        if group is None or level.is_over or group["name"] in self.names:
            return False
        if group["flags"] is not None and self.at:
            return False
        if group[0] == "(" and self.text.startswith("?", group.end()):
            return False
        self.at = group.end()
        if group["flags"] is None:
            self.names |= {group["name"]} - {None}
            self.levels.append(_Level(level.at_start, level.at_start))
        else:
            level.has_atom = False
        return True

    def _close(self) -> bool:
        if len(self.levels) == 1:
            return False
        closed, level = self.levels.pop(), self.levels[-1]
        level.at_start, level.has_atom = False, not closed.has_anchor
        level.is_over = level.is_over or closed.ends
        level.ends = level.ends or closed.ends
        level.has_anchor = level.has_anchor or closed.has_anchor
        return True

    def _repeat(self) -> bool:
        level = self.levels[-1]
        match = _REPEAT.match(self.text, self.at)
        if match is None or not level.has_atom:
            return False
        if match[3] and int(match[3]) < int(match[1]):
            return False
        self.at, level.has_atom = match.end(), False
        return True

    def _atom(self, char: str) -> bool:
        level = self.levels[-1]
        if char == "\\":
            match = _ESCAPE.match(self.text, self.at)
            if match is not None and match["anchor"]:
                self.at = match.end()
                return self._anchor(level, match["anchor"] == "A")
            if match is None or _code_of(match) is None:
                return False
            self.at = match.end()
        elif char == "[":
            if not self._class():
                return False
        else:
            self.at += 1
        known = not level.is_over
        level.at_start, level.has_atom = False, True
        return known

    def _class(self) -> bool:
        """Read a class of characters, without classes inside and operations on them."""
        self.at += 1 + self.text.startswith("^", self.at + 1)
        first, low, is_range, text = True, -1, False, self.text
        while self.at < len(text):
            char = text[self.at]
            if char == "]" and not first:
                self.at += 1
                return True
            if char in "[]" or text.startswith(("&&", "--", "~~"), self.at):
                return False
            if char == "-" and low >= 0 and not is_range and text[self.at + 1 : self.at + 2] != "]":
                self.at, is_range = self.at + 1, True
                continue
            code: int | None = ord(char)
            match = _ESCAPE.match(text, self.at) if char == "\\" else None
            if char == "\\":
                code = None if match is None or match["anchor"] else _code_of(match)
            if code is None or (is_range and code < max(low, 0)):
                return False
            self.at = match.end() if match is not None else self.at + 1
            first, low, is_range = False, -1 if is_range else code, False
        return False


def _code_of(escape: re.Match[str]) -> int | None:
    """The code point that an escape stands for; -1 for a set of them; None if it is not known."""
    if escape["set"]:
        return -1
    if escape["property"]:
        return -1 if _PROPERTY.fullmatch(escape["property"]) else None
    digits = escape["x"] or escape["u"]
    if digits is None:
        return {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}.get(
            escape["one"], ord(escape["one"])
        )
    code = int(digits.strip("{}"), 16)
    return None if code in _SURROGATES or code > 0x10FFFF else code


def is_enforceable(pattern: str) -> bool:
    """Whether a grammar can be made of a schema's regular expression."""
    return _Reader(pattern).is_enforceable()
