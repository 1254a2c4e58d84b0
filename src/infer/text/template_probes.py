"""What a chat template takes: found once, by rendering it with messages made for this.

Published templates differ in what they want. Beside calls the content must be text, or null, or
absent; arguments are an object, or the text of one; some refuse ids of another length than nine;
some write no calls, know no role `tool`, or are shown tools by another variable. Each question is
one rendering of a short chat, and the answer is whether its words are found in the prompt.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from infer.errors import RequestError
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import ToolFormat, format_that_reads

Render = Callable[[Sequence[dict[str, Any]], dict[str, Any]], str]
"""(messages, variables of the template) → prompt; raises `RequestError`."""
Message = dict[str, Any]

_TOOL_VARIABLES = ("tools", "xml_tools", "functions", "custom_tools", "available_tools")
"""Names that published templates have for it, in the order in which they are tried."""
MAX_PROBING_S = 5.0
"""Published templates need a hundredth of it; one that is slow on purpose is not asked again."""
_MAX_PROBED_CHARS = 100_000
_NAME, _KEY, _VALUE = "probe_function", "probe_argument", "probe-value"
_QUESTION, _SAID, _RESULT = "probe-question", "probe-said", "probe-result"
_CALL = ToolCall(_NAME, json.dumps({_KEY: _VALUE}))
_BARE_TOOL: Message = {"type": "function", "function": {"name": _NAME}}
_FULL_TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    },
}
_ID = "call_0123456789abcdef0123456789abcdef_0_0"
"""As long as those of the server's own answers."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a message's calls must be given to a template."""

    content: str | None
    """beside calls where there is no text: "" or None; `ABSENT`: no content at all"""
    takes_content: bool
    """whether calls are written where there is text beside them"""
    arguments_are_text: bool
    short_ids: bool
    """whether ids must have nine characters"""
    one_at_a_time: bool
    """whether a message may have one call only"""


ABSENT = "\0absent"
"""In the place of a message's content: there is none."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """See the module's docstring."""

    takes_parts: bool
    """whether a message's content may be a list of parts"""
    wants_parts: bool
    """whether it shows such a list only, and no content that is text"""
    takes_system: bool
    """whether there may be a system message"""
    tools_variable: str | None
    """by which it is shown tools; None: it shows none"""
    tools_are_text: bool
    """whether that variable is JSON text"""
    fills_tools: bool
    """whether each tool needs a description and parameters"""
    calls: CallStyle | None
    """None: it does not write calls"""
    takes_results: bool
    """whether it shows messages of the role `tool`"""
    format: ToolFormat | None
    """in which it writes calls; None: it writes none, or in a format that we do not know"""


def find_abilities(render: Render, variables: Collection[str]) -> Abilities:
    """`variables`: the names that the template may read, which can be too many."""
    probes = _Probes(render)
    question: Message = {"role": "user", "content": _QUESTION}
    name, is_text, fills = _tools_variable(probes, question, variables)
    tools: dict[str, Any] = {}
    if name is not None:
        tools = shown_tools([_FULL_TOOL], name, as_text=is_text)
    style, way = _call_style(probes, question, tools)
    part = {"type": "text", "text": "probe-of-parts"}
    parts = probes.shown([{"role": "user", "content": [part]}], {})
    # not the list itself, as Python or JSON
    takes_parts = part["text"] in parts and "'text'" not in parts and '"text"' not in parts
    result: Message = {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _NAME}
    if style is not None and style.short_ids:
        result["tool_call_id"] = short_id(_ID)
    made = [_message(style, _ID)] if style else [{"role": "assistant", "content": _SAID}]
    return Abilities(
        takes_parts=takes_parts,
        wants_parts=takes_parts and _QUESTION not in probes.shown([question], {}),
        takes_system=_SAID in probes.shown([{"role": "system", "content": _SAID}, question], {}),
        tools_variable=name,
        tools_are_text=is_text,
        fills_tools=fills,
        calls=style,
        takes_results=_RESULT in probes.shown([question, *made, result], tools),
        format=way,
    )


def shown_tools(
    tools: Sequence[Message], variable: str | None, *, as_text: bool = False
) -> dict[str, Any]:
    """The variables by which a template is shown tools."""
    if variable is None:
        return {}
    return {variable: json.dumps(list(tools), ensure_ascii=False) if as_text else list(tools)}


def short_id(call_id: str) -> str:
    """Nine letters and digits for an id, always the same ones."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class _Probes:
    """Renders; what cannot be rendered is an empty prompt, and so is what comes too late."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._ends_s = time.monotonic() + MAX_PROBING_S

    def shown(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        if time.monotonic() > self._ends_s:
            return ""
        try:
            return self._render(messages, variables)[:_MAX_PROBED_CHARS]
        except RequestError:
            return ""


def _tools_variable(
    probes: _Probes, question: Message, variables: Collection[str]
) -> tuple[str | None, bool, bool]:
    """(the variable, whether it is text, whether tools must be complete)"""
    others = sorted(name for name in variables if "tool" in name and name not in _TOOL_VARIABLES)
    names = [name for name in (*_TOOL_VARIABLES, *others) if name in variables]
    system: Message = {"role": "system", "content": _SAID}
    for name, is_text, messages, tool in itertools.product(
        names, (False, True), ([question], [system, question]), (_BARE_TOOL, _FULL_TOOL)
    ):
        if _NAME in probes.shown(messages, shown_tools([tool], name, as_text=is_text)):
            return name, is_text, tool is _FULL_TOOL
    return None, False, False


def _call_style(
    probes: _Probes, question: Message, tools: dict[str, Any]
) -> tuple[CallStyle | None, ToolFormat | None]:
    """The style in which the call is read back; else the first in which it is shown."""
    said = {"role": "assistant", "content": _SAID}
    plain = probes.shown([question, said], tools)
    head = _behind(_QUESTION, plain).partition(_SAID)[0]
    shown: CallStyle | None = None
    for is_short, is_text in itertools.product((False, True), (False, True)):
        read: list[tuple[int, int, CallStyle, ToolFormat]] = []
        for i, content in enumerate(("", None, ABSENT)):
            style = CallStyle(content, True, is_text, is_short, False)
            text = _behind(_QUESTION, probes.shown([question, _message(style, _ID)], tools))
            if not all(word in text for word in (_NAME, _KEY, _VALUE)):
                continue
            way = format_that_reads(text, [_CALL], head)
            if way is not None:
                read.append((len(text), i, style, way))
            # The text of the text of an object, or Python's words for one, are nobody's format.
            elif shown is None and f'\\"{_KEY}' not in text and f"{{'{_KEY}'" not in text:
                shown = style
        if read:  # a longer text has the word None in it, or an empty answer behind the call
            _, _, style, way = min(read, key=lambda one: one[:2])
            return _refined(probes, question, tools, style), way
    return (None if shown is None else _refined(probes, question, tools, shown)), None


def _refined(
    probes: _Probes, question: Message, tools: dict[str, Any], style: CallStyle
) -> CallStyle:
    """With what remains to be known about it."""
    said = {**_message(style, _ID), "content": _SAID}
    text = _behind(_QUESTION, probes.shown([question, said], tools))
    two = _message(style, _ID)
    two["tool_calls"] = [*two["tool_calls"], *_message(style, _ID[:-1] + "1")["tool_calls"]]
    both = _behind(_QUESTION, probes.shown([question, two], tools))
    return CallStyle(
        style.content,
        takes_content=_VALUE in text,
        arguments_are_text=style.arguments_are_text,
        short_ids=style.short_ids,
        one_at_a_time=both.count(_VALUE) < 2,
    )


def _message(style: CallStyle, call_id: str) -> Message:
    """A message with the probe's call in this style."""
    arguments = _CALL.arguments if style.arguments_are_text else json.loads(_CALL.arguments)
    call = {
        "id": short_id(call_id) if style.short_ids else call_id,
        "type": "function",
        "function": {"name": _NAME, "arguments": arguments},
    }
    message: Message = {"role": "assistant", "tool_calls": [call]}
    if style.content is not ABSENT:
        message["content"] = style.content
    return message


def _behind(mark: str, text: str) -> str:
    return text.rpartition(mark)[2]
