"""Calls between tags, whose arguments are text: `<function=f><parameter=city>Ulm</parameter>…`

Qwen3-Coder, Qwen 3.5, GLM, MiniMax, Seed-OSS, DeepSeek V3.2 and others write such calls; `FAMILIES`
is the table of their tags. A value has no type, so the schema of the parameter decides: `12` is a
text where a string is wanted. Where a schema allows several types, a value that is JSON of one of
them is that, and text otherwise. Parameters come in any order.

Agents write code, so values contain tags. A closing tag is one only if what follows it can follow a
value. If a model has left it out, the next parameter ends the value, at a line's start and if the
tool has it, and so does the end of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.text.tools.argument_text import (
    BROKEN,
    OPEN,
    WHOLE,
    ArgumentPiece,
    ArgumentText,
    ObjectText,
    in_json,
)
from infer.text.tools.call import Block, ToolCall, arguments_of
from infer.text.tools.json_calls import NOT_SPACE
from infer.text.tools.parameter_types import ANY, json_of, may_be_json, types_of

Schema = Mapping[str, Any]
"""JSON schema of a tool's parameters."""
_MAX_KEY_CHARS = 256
_MAX_SPACE_CHARS = 64
_MAX_SEEN_CHARS = 128


@dataclass(frozen=True, slots=True)
class Family:
    """The tags of one family of models."""

    name: str
    """Name of the format."""
    openings: tuple[str, ...]
    """Marks before calls; the first one is the usual one."""
    closing: str
    """Mark after calls."""
    call: str
    """Pattern of the beginning of a call, up to its parameters, with a group `name`."""
    starts: str
    """Mark with which a further call between the same marks begins; "": there is one only."""
    key: str
    """Pattern of the beginning of a parameter, up to its value, with the groups `key` and, if the
    model says whether the value is a text, `string`."""
    key_mark: str
    """Text with which a parameter begins."""
    after: str
    """Tag after a value; `{key}` is the parameter's name."""
    end: str
    """Tag after the last parameter; the closing mark if there is none."""
    written: tuple[str, str]
    """How a call begins, and how a parameter and its value are written."""
    has_breaks: bool = False
    """Whether a line break on each side of a value belongs to the tags."""
    empty: str = ""
    """Pattern of a call without parameters, where it could be other text: of known tools only."""
    alone: str = ""
    """Mark of a call whose opening mark the model has left out."""
    special: tuple[str, ...] = ()
    """Special tokens of which the tags consist."""
    between: str = "\n"
    """Text between tags."""


_QWEN = Family(
    "qwen3-coder", ("<tool_call>",), "</tool_call>",
    call=r"\s*<function=(?P<name>[^\s<>]+)>\s*(?=<parameter=|</function>)", starts="<function=",
    key=r"<parameter=(?P<key>[^<>\n]+)>", key_mark="<parameter=", after="</parameter>",
    end="</function>", has_breaks=True, alone="<function=",
    written=("<function={name}>", "<parameter={key}>\n{value}\n</parameter>"),
)  # fmt: skip
_GLM_KEY = r"<arg_key>\s*(?P<key>[^<>\n]+?)\s*</arg_key>\s*<arg_value>"
_OPEN_VALUE = "_value:opensource>"
_DSML = Family(
    "deepseek-v3.2", ("<｜DSML｜function_calls>",), "</｜DSML｜function_calls>",
    call=r'\s*<｜DSML｜invoke name="(?P<name>[^\s<>"]+)">\s*(?=<｜DSML｜p|</｜DSML｜i|\{)',
    starts="<｜DSML｜invoke",
    key=r'<｜DSML｜parameter name="(?P<key>[^<>"\n]+)"'
    r'(?:\s+string="(?P<string>true|false)")?\s*>',
    key_mark="<｜DSML｜parameter", after="</｜DSML｜parameter>", end="</｜DSML｜invoke>",
    special=("｜DSML｜",),
    written=(
        '<｜DSML｜invoke name="{name}">',
        '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>',
    ),
)  # fmt: skip
_M3 = "]<]minimax[>["
FAMILIES = (
    replace(
        _QWEN, name="seed-oss", openings=("<seed:tool_call>",), closing="</seed:tool_call>",
        has_breaks=False, alone="",
        written=("<function={name}>", "<parameter={key}>{value}</parameter>"),
    ),
    _QWEN,
    Family(
        "glm", ("<tool_call>",), "</tool_call>",
        call=r"\s*(?P<name>[^\s<>{}\[\]\"]+)\s*(?=<arg_key>)", starts="",
        empty=r"\s*(?P<name>[^\s<>{}\[\]\"]+)\s*(?=</tool_call>)",
        key=_GLM_KEY, key_mark="<arg_key>", after="</arg_value>", end="</tool_call>",
        written=("{name}", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"),
    ),
    Family(
        "hunyuan", ("<tool_calls>",), "</tool_calls>",
        call=r"\s*<tool_call>\s*(?P<name>[^\s<>{}]+)\s*<tool_sep>", starts="<tool_call>",
        key=_GLM_KEY, key_mark="<arg_key>", after="</arg_value>", end="</tool_call>",
        written=(
            "<tool_call>{name}<tool_sep>",
            "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>",
        ),
    ),
    Family(
        "hunyuan-v3", ("<tool_calls:opensource>",), "</tool_calls:opensource>",
        call=r"\s*<tool_call:opensource>\s*(?P<name>[^\s<>{}]+)\s*<tool_sep:opensource>",
        starts="<tool_call:opensource>",
        key=_GLM_KEY.replace("arg_key>", "arg_key:opensource>").replace("_value>", _OPEN_VALUE),
        key_mark="<arg_key:opensource>", after="</arg_value:opensource>",
        end="</tool_call:opensource>",
        written=(
            "<tool_call:opensource>{name}<tool_sep:opensource>",
            "<arg_key:opensource>{key}</arg_key:opensource>\n"
            "<arg_value:opensource>{value}</arg_value:opensource>",
        ),
    ),
    Family(
        "minimax-m2", ("<minimax:tool_call>",), "</minimax:tool_call>",
        call=r'\s*<invoke name="(?P<name>[^\s<>"]+)">\s*(?=<parameter|</invoke>)',
        starts="<invoke", key=r'<parameter name="(?P<key>[^<>"\n]+)">', key_mark="<parameter",
        after="</parameter>", end="</invoke>",
        written=('<invoke name="{name}">', '<parameter name="{key}">{value}</parameter>'),
    ),
    Family(
        "minimax-m3", (f"{_M3}<tool_call>",), f"{_M3}</tool_call>",
        call=rf'\s*{re.escape(_M3)}<invoke name="(?P<name>[^\s<>"]+)">\s*(?={re.escape(_M3)}<)',
        starts=f"{_M3}<invoke", key=rf"{re.escape(_M3)}<(?P<key>[^<>/\s]+)>", key_mark=f"{_M3}<",
        after=f"{_M3}</{{key}}>", end=f"{_M3}</invoke>", special=(_M3,),
        written=(f'{_M3}<invoke name="{{name}}">', f"{_M3}<{{key}}>{{value}}{_M3}</{{key}}>"),
    ),
    _DSML,
    replace(
        _DSML, name="deepseek-v4", openings=("<｜DSML｜tool_calls>",),
        closing="</｜DSML｜tool_calls>",
    ),
    Family(
        "minicpm5", ('<function name="',), "</function>",
        call=r'(?P<name>[^\s<>"]+)">\s*(?=<param|</function>)', starts="",
        key=r'<param name="(?P<key>[^<>"\n]+)">', key_mark="<param", after="</param>",
        end="</function>", between="",
        written=("{name}\">", '<param name="{key}">{value}</param>'),
    ),
    Family(
        "muse", ("<atem:function_calls>",), "</atem:function_calls>",
        call=r'\s*<atem:invoke name="(?P<name>[^\s<>"]+)">\s*(?=<atem:p|</atem:i)',
        starts="<atem:invoke", key=r'<atem:parameter name="(?P<key>[^<>"\n]+)">',
        key_mark="<atem:parameter", after="</atem:parameter>", end="</atem:invoke>",
        written=(
            '<atem:invoke name="{name}">',
            '<atem:parameter name="{key}">{value}</atem:parameter>',
        ),
    ),
    Family(
        "kimi-k3", ("<|open|>tools<|sep|>",), "<|close|>tools<|sep|>",
        call=r'\s*<\|open\|>call tool="(?P<name>[^"\s]+)"[^<>]*<\|sep\|>', starts="<|open|>call",
        key=r'<\|open\|>argument key="(?P<key>[^"\n]+)"(?: type="(?P<string>[a-z]+)")?<\|sep\|>',
        key_mark="<|open|>argument", after="<|close|>argument<|sep|>", end="<|close|>call<|sep|>",
        written=(
            '<|open|>call tool="{name}" index="{number}"<|sep|>',
            '<|open|>argument key="{key}" type="{type}"<|sep|>{value}<|close|>argument<|sep|>',
        ),
        special=("<|open|>", "<|close|>", "<|sep|>"), between="",
    ),
)  # fmt: skip
"""The tags of all families."""


def write_tagged(family: Family) -> Callable[[Sequence[ToolCall]], str]:
    """The function that writes calls as this family does."""

    def write(calls: Sequence[ToolCall]) -> str:
        opening, gap = family.openings[0], family.between
        written = [
            _written(family, call, number).removeprefix(opening)
            for number, call in enumerate(calls, 1)
        ]
        if not family.starts:  # each call has marks of its own
            closing = "" if family.end == family.closing else family.closing
            return gap.join(f"{opening}{call_text}{closing}" for call_text in written)
        if family.alone:
            return gap.join(
                f"{opening}{gap}{call_text}{gap}{family.closing}" for call_text in written
            )
        return f"{opening}{gap}{gap.join(written)}{gap}{family.closing}"

    return write


def _written(family: Family, call: ToolCall, number: int) -> str:
    head, parameter = family.written
    lines = [head.replace("{name}", call.name).replace("{number}", str(number))]
    for key, value in arguments_of(call).items():
        is_text = isinstance(value, str)
        kind = _KINDS[type(value)]
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        line = parameter.replace("{key}", key).replace("{string}", str(is_text).lower())
        lines.append(line.replace("{type}", kind).replace("{value}", text))
    return family.between.join([*lines, family.end])


_KINDS = {
    str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array",
    type(None): "null",
}  # fmt: skip


class TaggedText:
    """Reads the parameters of a call up to the tag that ends it; see `ArgumentText`."""

    def __init__(self, family: Family, schema: Schema | None) -> None:
        """`schema`: of the tool's parameters; None: it is not known."""
        self._family = family
        self._schema = schema
        self._key = re.compile(family.key)
        self._first = True
        self._expects = "key"
        self._given = set[str]()
        self._object: ObjectText | None = None
        self._value: _Value | None = None
        self._after = ""
        self._tags: tuple[str, ...] = ()
        """What may end the value, the longest one first."""
        self._mark = re.compile("")

    def read(self, text: str, *, end: bool) -> ArgumentPiece:
        """See `ArgumentText`."""
        pieces, at = list[str](), 0
        while True:
            step = self._in_value if self._value is not None else self._between
            if self._object is not None:
                step = self._in_object
            piece = step(text, at, end)
            if piece is None:
                return ArgumentPiece(at, "".join(pieces))
            moved, at = piece.size > at or bool(piece.json), piece.size
            pieces.append(piece.json)
            if piece.state != OPEN:
                return ArgumentPiece(at, "".join(pieces), piece.state)
            if not moved:
                return ArgumentPiece(at, "".join(pieces))

    def _in_object(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        """Arguments that are a JSON object after all."""
        assert self._object is not None
        piece = self._object.read(text[at:], end=end)
        return piece._replace(size=at + piece.size)

    def _between(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        """Before a parameter, or before the end of the call."""
        family, match = self._family, NOT_SPACE.search(text, at)
        if match is None:
            return ArgumentPiece(len(text), "") if len(text) > at else None
        at = match.start()
        begun = "{" if self._first else ""
        if self._first and text[at] == "{":
            self._first, self._object = False, ObjectText()
            return ArgumentPiece(at, "")
        for mark in (family.end, family.closing):
            if text.startswith(mark, at):
                # The mark after all calls is left to whoever reads them.
                size = at if mark == family.closing else at + len(mark)
                return ArgumentPiece(size, begun + "}", WHOLE)
        key = self._key.match(text, at, at + _MAX_KEY_CHARS)
        if key is not None:
            return self._begin_value(key, begun)
        rest = text[at : at + _MAX_KEY_CHARS]
        marks = (family.end, family.closing, family.key_mark)
        is_key = rest.startswith(family.key_mark) and len(rest) < _MAX_KEY_CHARS
        if not end and (is_key or any(mark.startswith(rest) for mark in marks)):
            return None
        return ArgumentPiece(at, begun, BROKEN)

    def _begin_value(self, key: re.Match[str], begun: str) -> ArgumentPiece:
        name = key["key"].strip()
        types = ANY if self._schema is None else types_of(self._schema, name)
        kind = key.groupdict().get("string")
        if kind is not None:
            types = _TEXT if kind in ("true", "string") else ANY - _TEXT
        comma = begun or ("" if self._first else ", ")
        self._first = False
        self._given.add(name)
        self._after = self._family.after.replace("{key}", name)
        self._value = _Value(types, has_breaks=self._family.has_breaks)
        self._mark = self._marks()
        return ArgumentPiece(key.end(), f"{comma}{json.dumps(name, ensure_ascii=False)}: ")

    def _marks(self) -> re.Pattern[str]:
        """What may end this value."""
        family = self._family
        marks = {self._after, family.end, family.key_mark}
        self._tags = tuple(sorted(marks, key=len, reverse=True))
        return re.compile("|".join(map(re.escape, self._tags)))

    def _in_value(self, text: str, at: int, end: bool) -> ArgumentPiece | None:
        assert self._value is not None
        match = self._mark.search(text, at)
        if match is None:
            stop = len(text) if end else at + _sure(text[at:], len(self._tags[0]))
            return ArgumentPiece(stop, self._value.more(text[at:stop]))
        written = self._value.more(text[at : match.start()])
        rest = text[match.start() : match.start() + len(self._tags[0])]
        is_begun = not end and any(tag != rest and tag.startswith(rest) for tag in self._tags)
        ends = None if is_begun else self._ends(text, match, end)
        if ends is None:  # what follows will tell
            return ArgumentPiece(match.start(), written)
        if not ends:
            stop = match.start() + 1
            return ArgumentPiece(stop, written + self._value.more(match[0][0]))
        written += self._value.close()
        self._value = None
        size = match.end() if match[0] == self._after else match.start()
        return ArgumentPiece(size, written)

    def _ends(self, text: str, match: re.Match[str], end: bool) -> bool | None:
        """Whether a tag inside a value ends it; None: further text will tell."""
        family, mark = self._family, match[0]
        if mark == self._after:
            follows = (family.key_mark, family.end, family.closing)
            return _follows(text, match.end(), follows, end)
        assert self._value is not None
        if mark == family.key_mark:
            properties = (self._schema or {}).get("properties")
            if not self._value.is_at_line or not isinstance(properties, Mapping):
                return False
            key = self._key.match(text, match.start(), match.start() + _MAX_KEY_CHARS)
            if key is not None:
                name = key["key"].strip()
                return name in properties and name not in self._given
            rest = text[match.start() : match.start() + _MAX_KEY_CHARS]
            is_over = end or "\n" in rest or ">" in rest or len(rest) == _MAX_KEY_CHARS
            return False if is_over else None
        if mark == family.closing:  # there is no other end: `after` is missing
            return _follows(text, match.end(), (*family.openings, ""), end)
        return self._closes_all(text, match.end(), end)

    def _closes_all(self, text: str, at: int, end: bool) -> bool | None:
        """Whether the end of a call, behind a value that is not closed, is followed by the mark
        after all calls, and this by another call or by nothing."""
        family, first = self._family, NOT_SPACE.search(text, at)
        if first is None:
            return end or None
        if family.starts and text.startswith(family.starts, first.start()):
            return True
        if text.startswith(family.closing, first.start()):
            after = first.start() + len(family.closing)
            return _follows(text, after, (*family.openings, ""), end)
        rest = text[first.start() : first.start() + len(family.closing)]
        marks = (family.closing, family.starts)
        return None if not end and any(mark.startswith(rest) for mark in marks if mark) else False


_TEXT = frozenset(("string",))


def _sure(text: str, longest: int) -> int:
    """The number of characters that cannot be the beginning of a tag, or of the line break before
    one. Tags begin with one of a few characters."""
    at = max(0, len(text) - longest)
    tail = text[at:]
    starts = [place for char in "<]" if (place := tail.find(char)) >= 0]
    size = at + min(starts, default=len(tail))
    return size


def _follows(text: str, at: int, marks: Sequence[str], end: bool) -> bool | None:
    """Whether one of the marks comes next, behind white space; "": nothing comes any more."""
    first = NOT_SPACE.search(text, at)
    if first is None:
        # A long stretch of white space is a part of a value.
        return (end or None) if len(text) - at < _MAX_SPACE_CHARS else end
    if text.startswith(tuple(filter(None, marks)), first.start()):
        return True
    rest = text[first.start() : first.start() + _MAX_KEY_CHARS]
    return None if not end and any(mark and mark.startswith(rest) for mark in marks) else False


class _Value:
    """A value while it is written: text as the inside of a JSON string, or JSON at its end."""

    def __init__(self, types: frozenset[str], *, has_breaks: bool) -> None:
        self._types = types
        self._has_breaks = has_breaks
        self._is_text = False
        """Whether it is known to be text, of which the beginning has been written."""
        self._held = ""
        """Text that is not written yet."""
        self._pieces = list[str]()
        """Text that may be JSON, before the held one."""
        self._seen = ""
        """The beginning of the value."""
        self._is_json = True
        """Whether it may be JSON, as far as it is known."""
        self._is_first = True
        self._is_empty = True
        """Whether nothing belongs to the value yet."""
        self.is_at_line = False
        """Whether the next character begins a line, which is not the first one."""

    def more(self, text: str) -> str:
        """Take a further piece; returns what is certain of its JSON."""
        if not text:
            return ""
        self._held += text
        if self._is_first and self._has_breaks:
            # A carriage return belongs to the line break.
            if self._held in ("\r",):
                return ""
            self._held = re.sub(r"\A\r?\n", "", self._held)
        self._is_first = False
        self._is_empty = self._is_empty and not self._held
        self.is_at_line = text.endswith("\n") and not self._is_empty
        if self._is_text:
            return self._write()
        self._pieces.append(self._held)
        if len(self._seen) < _MAX_SEEN_CHARS:
            self._seen += self._held[:_MAX_SEEN_CHARS]
            self._is_json = may_be_json(self._seen, self._types)
        self._held = ""
        if self._is_json:
            return ""
        self._is_text, self._held = True, "".join(self._pieces)
        return '"' + self._write()

    def _write(self) -> str:
        """The held text, without an end that may be the line break before a tag."""
        size = len(self._held)
        if self._has_breaks:
            size = len(self._held.removesuffix("\n").removesuffix("\r"))
        text, self._held = self._held[:size], self._held[size:]
        return in_json(text)

    def close(self) -> str:
        """The rest of the JSON."""
        if self._is_text:
            rest = re.sub(r"\r?\n\Z", "", self._held) if self._has_breaks else self._held
            return in_json(rest) + '"'
        text = "".join(self._pieces) + self._held
        if self._has_breaks:
            text = re.sub(r"\r?\n\Z", "", text)
        return json_of(text, self._types)


class NoCall:
    """Reads a text that begins as a call of `alone`, and is none."""

    _BEGUN = re.compile(r"[^\s<>]{0,128}(?:(?<=[^\s<>])>\s{0,64}(?:<[a-z/_=]{0,12})?)?")

    def read(self, text: str, *, end: bool) -> Block | None:
        """See `Reading`."""
        if not end and self._BEGUN.fullmatch(text[:256]):
            return None
        return Block(0, None)


def tagged_text(family: Family) -> Callable[[Schema | None], ArgumentText]:
    """The maker of readers of this family's arguments."""
    return lambda schema: TaggedText(family, schema)
