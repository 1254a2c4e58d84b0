"""Calls in which a name precedes the arguments, which are a separate JSON object.

These are Mistral's `name[ARGS]{…}`, functionary's `<function=name>{…}</function>`, functionary's
`>>>name` followed by a new line and the object, and DeepSeek's, whose object is in a code block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from infer.text.tools.call import Block, ToolCall, made_call
from infer.text.tools.json_calls import NOT_SPACE, BracketEnd, JsonList
from infer.text.tools.streamed_calls import Syntax, Tail

MAX_HEAD_CHARS = 512
"""Maximum length of the text before the arguments, in characters."""
_MISTRAL_HEAD = re.compile(
    r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?(?:\[ARGS\])?\s*(?=\{)"
)
_SECTION_HEAD = re.compile(r"(?P<name>[^\s\[\]{}]+)[ \t\r]*\n\s*(?=\{)")
_ALL = re.compile(r"all[ \t\r]*\n")
_FUNCTION = re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*>(?P<arguments>.*)", re.DOTALL)
_NAME = re.compile(r"[^\s<>{}]+")
DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
"""DeepSeek's marks before a call, before its name and after the call."""
_BEGIN, _SEP, _END = DEEPSEEK_MARKS
_CLOSING = "<｜tool▁calls▁end｜>"

_OBJECT = r'(?=\{\s*["}])'
_OVER = Tail(is_over=True)
MISTRAL = Syntax(
    re.compile(
        rf"\s*(?P<name>[^\s\[\]{{}}]+)\s*(?:\[CALL_ID\][^\[\]{{}}]*)?(?:\[ARGS\])?\s*{_OBJECT}"
    ),
    lambda head: _OVER,
    max_head_chars=MAX_HEAD_CHARS,
)
"""Mistral's `name[ARGS]{…}`."""
SECTION = Syntax(
    re.compile(rf"(?!all[ \t\r]*\n)(?P<name>[^\s\[\]{{}}]+)[ \t\r]*\n\s*{_OBJECT}"),
    lambda head: _OVER,
    max_head_chars=MAX_HEAD_CHARS,
)
"""Functionary's `>>>name`, a new line and an object."""
FUNCTION = Syntax(
    re.compile(rf"\s*(?P<name>[^\s<>{{}}]+)\s*>\s*{_OBJECT}"),
    lambda head: Tail(closing="</function>"),
)
"""Functionary's `<function=name>{…}</function>`."""

DEEPSEEK = Syntax(
    re.compile(
        rf"\s*{_BEGIN}(?:[^<{{]*{_SEP})?\s*(?P<name>[^\s<>{{}}]+)\s*(?:```json|{_SEP})\s*{_OBJECT}"
    ),
    lambda head: Tail(("```", _END), _CLOSING, starts=(_BEGIN,)),
)
"""DeepSeek's calls, whose object is in a code block in older models."""


_KIMI_CALL, _KIMI_ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_argument_begin|>"
KIMI = Syntax(
    re.compile(
        rf"\s*{re.escape(_KIMI_CALL)}\s*(?:functions\.)?(?P<name>[^\s<>{{}}:]+)(?::\d+)?\s*"
        rf"{re.escape(_KIMI_ARGUMENTS)}\s*{_OBJECT}"
    ),
    lambda head: Tail(("<|tool_call_end|>",), "<|tool_calls_section_end|>", starts=(_KIMI_CALL,)),
)
"""Kimi K2's calls, whose id holds the function's name."""
SOLAR = Syntax(
    re.compile(
        r"\s*<\|tool_call:begin\|>[^<>]{0,256}<\|tool_call:name\|>(?P<name>[^\s<>{}]+)\s*"
        rf"<\|tool_call:args\|>\s*{_OBJECT}"
    ),
    lambda head: Tail(("<|tool_call:end|>",), "<|calls|>", starts=("<|tool_call:begin|>",)),
)
"""Solar's calls."""
MEMBERS = Syntax(
    re.compile(rf'\s*(?:\[\s*)?\{{\s*"(?P<name>[^"\\\s]+)"\s*:\s*{_OBJECT}'),
    lambda head: Tail(("}", "]", ","), "<|tools_suffix|>", starts=("{",)),
)
"""Apertus' calls: a list of objects with one member, whose name is the function's."""


class _HeadAndObject:
    """Parses a head that matches a pattern, followed by a JSON object."""

    def __init__(self, head: re.Pattern[str]) -> None:
        """`head`: pattern of the head up to the `{`, with a group `name`."""
        self._head = head
        self._bracket: BracketEnd | None = None

    def read(self, text: str, *, end: bool) -> Block | None:
        start = text.find("{", 0, MAX_HEAD_CHARS)
        if start < 0:
            return Block(0, None) if end or len(text) >= MAX_HEAD_CHARS else None
        head = self._head.match(text[: start + 1])
        if head is None or head.end() != start:
            return Block(0, None)
        if self._bracket is None:
            self._bracket = BracketEnd(start=start)
        at = self._bracket.find(text)
        if at < 0:
            return Block(len(text), None) if end else None
        call = made_call(head["name"], text[start:at])
        return Block(at, None if call is None else [call])


class MistralCalls:
    """Parses the text after `[TOOL_CALLS]`: a list of JSON calls, or one call `name[ARGS]{…}`."""

    def __init__(self) -> None:
        self._list = JsonList()
        self._named = _HeadAndObject(_MISTRAL_HEAD)

    def read(self, text: str, *, end: bool) -> Block | None:
        first = NOT_SPACE.search(text)
        if first is None:
            return Block(0, None) if end else None
        return (self._list if first[0] in "[{" else self._named).read(text, end=end)


class Section:
    """Parses the text after functionary's `>>>`: a name and arguments, or `all` and content."""

    def __init__(self) -> None:
        self._named = _HeadAndObject(_SECTION_HEAD)

    def read(self, text: str, *, end: bool) -> Block | None:
        line = text.find("\n", 0, MAX_HEAD_CHARS)
        if line >= 0 and _ALL.fullmatch(text, 0, line + 1):
            return Block(line + 1, [])
        if end and text.rstrip() == "all":
            return Block(len(text), [])
        if line >= 0:
            first = NOT_SPACE.search(text, line)
            if first is not None and first[0] != "{":
                return Block(0, None)
        return self._named.read(text, end=end)


def parse_function(text: str) -> list[ToolCall] | None:
    """The call in the text `name>{…}` between `<function=` and `</function>`."""
    match = _FUNCTION.fullmatch(text)
    call = made_call(match["name"], match["arguments"].strip() or "{}") if match else None
    return None if call is None else [call]


def parse_deepseek(text: str) -> list[ToolCall] | None:
    """The calls in the text between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`."""
    before, *pieces = text.split(_BEGIN)
    if before.strip():
        return None
    calls = list[ToolCall]()
    for piece in pieces:
        inside, mark, after = piece.rpartition(_END)
        if mark and after.strip():
            return None
        head, _, rest = (inside if mark else piece).partition(_SEP)
        name, arguments = head.strip(), rest.strip()
        if not arguments.startswith("{"):  # R1 writes the kind, the name and a code block
            name, _, block = arguments.partition("```json")
            name, arguments = name.strip(), block.rstrip().removesuffix("```")
        call = made_call(name, arguments)
        if call is None or not _NAME.fullmatch(name):
            return None
        calls.append(call)
    return calls or None


def write_mistral(calls: Sequence[ToolCall]) -> str:
    """The calls in Mistral's newer format, which has no ids."""
    return "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.arguments}" for call in calls)


def write_functions(calls: Sequence[ToolCall]) -> str:
    """The calls in the format of functionary v3.1."""
    return "".join(f"<function={call.name}>{call.arguments}</function>" for call in calls)


def write_sections(calls: Sequence[ToolCall]) -> str:
    """The calls in the format of functionary v3.2."""
    return "".join(f">>>{call.name}\n{call.arguments}" for call in calls)


def write_deepseek(calls: Sequence[ToolCall]) -> str:
    """The calls in DeepSeek R1's format."""
    written = [
        f"{_BEGIN}function{_SEP}{call.name}\n```json\n{call.arguments}\n```{_END}" for call in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(written)}{_CLOSING}"


def parse_members(text: str) -> list[ToolCall] | None:
    """The calls in a list of objects with one member, whose name is the function's."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = list[ToolCall]()
    for item in items if isinstance(items, list) else [items]:
        if not isinstance(item, dict) or len(item) != 1:
            return None
        [(name, arguments)] = item.items()
        call = made_call(name, arguments)
        if call is None:
            return None
        calls.append(call)
    return calls or None


def write_members(calls: Sequence[ToolCall]) -> str:
    """The list that `parse_members` reads."""
    return f"[{', '.join(f'{{{json.dumps(c.name)}: {c.arguments}}}' for c in calls)}]"


def write_kimi(calls: Sequence[ToolCall]) -> str:
    """The calls in Kimi K2's format."""
    written = (
        f"{_KIMI_CALL}functions.{call.name}:{i}{_KIMI_ARGUMENTS}{call.arguments}<|tool_call_end|>"
        for i, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


def write_solar(calls: Sequence[ToolCall]) -> str:
    """The calls in Solar's format."""
    written = (
        f"<|tool_call:begin|>{i}<|tool_call:name|>{call.name}<|tool_call:args|>{call.arguments}"
        "<|tool_call:end|>"
        for i, call in enumerate(calls)
    )
    return f"<|tool_calls|>{''.join(written)}<|calls|>"
