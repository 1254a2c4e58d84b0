"""`StreamedCalls`: reads calls whose arguments are returned while the model writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from infer.text.tools.argument_text import BROKEN, OPEN, ArgumentText, ObjectText
from infer.text.tools.call import Block, Reading, ToolCall
from infer.text.tools.json_calls import NOT_SPACE, BracketEnd, read_json

_MAX_HEAD_CHARS = 2048
_MAX_MEMBER_CHARS = 300
_OBJECT = r'(?=\{\s*["}])'
_WORD = r'"[^"\\\s<>{}\[\]]*"'
_OTHERS = rf'(?:"(?:type|id|tool_call_id)"\s*:\s*{_WORD}\s*,\s*)*'
JSON_HEAD = (
    rf'\{{\s*{_OTHERS}(?:"function"\s*:\s*(?P<inner>\{{)\s*)?"(?:name|function|tool_name)"\s*:\s*'
    rf'"(?P<name>[^"\\\s<>{{}}\[\]]+)"\s*,\s*{_OTHERS}"(?:arguments|parameters)"\s*:\s*{_OBJECT}'
)
"""Pattern of a call in JSON, up to its arguments."""
_MEMBER = re.compile(r'"(?:id|type|tool_call_id)"\s*:\s*"[^"\\]{0,200}"')
_PUNCTUATION = ("}", "]", ",", ";")


class Tail(NamedTuple):
    """What may follow the arguments of a call."""

    skipped: tuple[str, ...] = ()
    """Marks that mean nothing."""
    closing: str = ""
    """Mark that ends the calls; "": nothing does, and any other text is content."""
    num_closings: int = 1
    """Number of closing marks."""
    starts: tuple[str, ...] = ()
    """Marks with which another call begins."""
    is_over: bool = False
    """Whether the calls end with the arguments."""


Known = Collection[str] | None
"""Names of the functions that may be called; None: any. A mapping also has their parameters."""
Schema = Mapping[str, Any]
"""JSON schema of a tool's parameters."""


@dataclass(frozen=True, slots=True)
class Syntax:
    """How calls of one kind begin and go on."""

    head: re.Pattern[str]
    """Pattern of the text up to the arguments, with a group `name`."""
    tail: Callable[[re.Match[str]], Tail]
    """Function from the match of a head to what may follow its arguments."""
    arguments: Callable[[Schema | None], ArgumentText] = lambda schema: ObjectText()
    """Maker of readers of arguments, which get the schema of the tool's parameters, if it is
    known."""
    max_head_chars: int = _MAX_HEAD_CHARS
    """Maximum length of a head."""
    only_known: bool = False
    """Whether a call of another function than those of the request is none."""
    further: re.Pattern[str] | None = None
    """Pattern of the head of a further call; None: that of the first one."""


class StreamedCalls:
    """Reads the text after an opening mark, or a whole answer.

    A call is certain when its name and the beginning of its arguments are there: from then on its
    arguments are returned as they come, and it stays a call whatever follows. If it is cut off or
    breaks, its arguments are incomplete, and the text behind them is content. A text that does not
    begin so (arguments before the name, or inside a string) is read as a whole by another
    `Reading`.
    """

    def __init__(self, syntaxes: Sequence[Syntax], whole: Reading, names: Known) -> None:
        """`whole` reads a text that begins with none of the syntaxes; no decision of it may come
        before such a beginning is complete. `names`: names of the request's tools."""
        self._syntaxes = syntaxes
        self._whole = whole
        self._names = names
        self._state = "first"
        self._is_whole = False
        """Whether the text is too long to begin as usual."""
        self._arguments: ArgumentText | None = None
        self._tail = Tail()
        self._num_closings = 0
        self._bracket: BracketEnd | None = None

    def read(self, text: str, *, end: bool) -> Block | None:
        """See `Reading`."""
        if self._state == "arguments":
            return self._read_arguments(text, end)
        if self._state == "tail":
            return self._read_tail(text, end)
        begun = None if self._is_whole else self._begin(text)
        if begun is not None:
            return begun
        if self._state == "first":
            self._is_whole = len(text) >= max(syntax.max_head_chars for syntax in self._syntaxes)
            return self._whole.read(text, end=end)
        return self._read_element(text, end)

    def _begin(self, text: str) -> Block | None:
        for syntax in self._syntaxes:
            first = self._state == "first"
            pattern = syntax.head if first else syntax.further or syntax.head
            head = pattern.match(text[: syntax.max_head_chars])
            if head is None:
                continue
            name = head["name"]
            if syntax.only_known and self._names is not None and name not in self._names:
                continue
            known = self._names
            schema = known.get(name) if isinstance(known, Mapping) else None
            self._state, self._arguments = "arguments", syntax.arguments(schema)
            self._tail = syntax.tail(head) if first else self._tail
            self._num_closings = self._tail.num_closings
            return Block(head.end(), [ToolCall(name, "")], is_open=True)
        return None

    def _read_arguments(self, text: str, end: bool) -> Block | None:
        assert self._arguments is not None
        piece = self._arguments.read(text, end=end)
        if piece.state == OPEN:
            if not piece.size and not end:
                return None
            return Block(piece.size, (), more=piece.json, is_open=not end)
        is_over = self._tail.is_over and piece.state != BROKEN
        self._state = "tail"
        return Block(piece.size, (), more=piece.json, is_open=not is_over)

    def _read_tail(self, text: str, end: bool) -> Block | None:
        """Skip what means nothing, up to the closing mark, another call or other text."""
        tail, first = self._tail, NOT_SPACE.search(text)
        if first is None:
            return Block(len(text), (), is_open=not end) if text else None
        at, closing = first.start(), tail.closing
        if closing and text.startswith(closing, at):
            self._num_closings -= 1
            return Block(at + len(closing), (), is_open=self._num_closings > 0)
        if text.startswith(tail.starts, at):
            self._state, self._bracket, self._is_whole = "next", None, False
            return Block(at, (), is_open=True)
        for mark in tail.skipped:
            if text.startswith(mark, at):
                return Block(at + len(mark), (), is_open=True)
        if text[at] == '"' and "," in tail.skipped:
            member = _MEMBER.match(text, at)
            if member is not None:
                return Block(member.end(), (), is_open=True)
            if len(text) - at < _MAX_MEMBER_CHARS and not end:
                return None
        rest = text[at : at + 64]
        if any(mark.startswith(rest) for mark in (closing, *tail.starts, *tail.skipped)):
            return Block(len(text), ()) if end else None
        return Block(at, ())

    def _read_element(self, text: str, end: bool) -> Block | None:
        """A further call that does not begin as usual: read as a whole, if it is JSON."""
        if not text.startswith(("{", "[")):
            is_long = len(text) >= _MAX_HEAD_CHARS
            return Block(0, None) if end or is_long else None
        self._bracket = self._bracket or BracketEnd()
        at = self._bracket.find(text)
        if at < 0:
            return Block(0, None) if end else None
        calls = read_json(text[:at])
        only_known = any(syntax.only_known for syntax in self._syntaxes)
        if calls is None or (
            only_known
            and self._names is not None
            and any(call.name not in self._names for call in calls)
        ):
            return Block(0, None)
        self._state = "tail"
        return Block(at, calls, is_open=True)


def json_until(closing: str) -> Syntax:
    """Calls in JSON, one, several or a list of them, up to a closing mark."""
    tail = Tail(_PUNCTUATION, closing, starts=("{",))
    return Syntax(re.compile(rf"\s*(?:\[\s*)?{JSON_HEAD}"), lambda head: tail)


def _value_tail(head: re.Match[str]) -> Tail:
    if head["list"] is not None:
        return Tail(("}", ","), "]", starts=("{",))
    return Tail((",",), "}", num_closings=1 + (head["inner"] is not None))


JSON_VALUE = Syntax(re.compile(rf"\s*(?P<list>\[\s*)?{JSON_HEAD}"), _value_tail)
"""One JSON value: a call or a list of calls."""
JSON_LIST = Syntax(
    re.compile(rf"\s*{JSON_HEAD}"), lambda head: Tail(("}", ","), "]", starts=("{",))
)
"""The items of a list of calls, behind its opening bracket."""


def read_block(reading: Reading, text: str) -> Block:
    """All that a `Reading` makes of a whole text: its calls, and how much of the text they are."""
    calls, at = list[ToolCall](), 0
    while True:
        block = reading.read(text[at:], end=True)
        if block is None or block.calls is None:
            return Block(at, calls or None)
        at += block.size
        if block.more:
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + block.more)
        calls += block.calls
        if not block.is_open:
            return Block(at, calls)
