"""Probing what a chat template supports, by rendering it once with short test chats."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from infer.errors import RequestError
from infer.text.role_order import OrderProbes, RoleOrder
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import (
    KIMI,
    Thoughts,
    ToolFormat,
    format_that_reads,
    thoughts_around,
)

Render = Callable[[Sequence[dict[str, Any]], dict[str, Any]], str]
"""Function (messages, variables of the template) → prompt, which may raise `RequestError`."""
Message = dict[str, Any]
"""Message of a chat, as in OpenAI's API."""

_TOOL_VARIABLES = ("tools", "xml_tools", "functions", "custom_tools", "available_tools")
"""Names of the variable for tools in published templates, in the order in which they are tried."""
MAX_PROBING_S = 5.0
"""Maximum time of all probes, in seconds; later probes count as failed.

Published templates need a hundredth of it.
"""
_MAX_PROBED_CHARS = 100_000
_NAME, _KEY, _VALUE = "probe_function", "probe_argument", "probe-value"
_THOUGHT = "probe-thought"
_QUESTION, _SAID, _RESULT = "probe-question", "probe-said", "probe-result"
_CALL = ToolCall(_NAME, json.dumps({_KEY: _VALUE}))
_BROKEN = f'{{"{_KEY}": "probe-bro'
_INSTEAD_OF_NO_TEXT = (" ", "…")
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
"""An id as long as those in the server's own answers."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The form in which a template expects a message's calls."""

    content: str | None
    """Content of a message that has calls and no text: "", None, or `ABSENT` for no content."""
    takes_content: bool
    """Whether the template renders calls of a message that also has text."""
    arguments_are_text: bool
    """Whether arguments must be JSON text instead of an object."""
    ids: str
    """Form of ids: "own" (any), "short" (nine characters), or "named" (Kimi K2's, in which the
    function is named)."""
    one_at_a_time: bool
    """Whether a message may have only one call."""
    takes_broken: bool = False
    """Whether arguments that are not JSON can be shown, as the text that they are."""
    takes_unanswered: bool = True
    """Whether a user message may follow calls that have no results."""


ABSENT = "\0absent"
"""Value of `CallStyle.content` that means a message without content."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What one chat template supports.

    Published templates differ in their requirements. In a message with calls the content must be
    text, null or absent. Arguments are an object or its JSON text. Some templates refuse ids that
    have not nine characters. Some render no calls, do not know the role `tool`, or take tools from
    another variable. Each probe renders a short chat and checks whether its words occur in the
    prompt.
    """

    takes_parts: bool
    """Whether a message's content may be a list of parts."""
    wants_parts: bool
    """Whether a message's content must be a list of parts."""
    order: RoleOrder
    """Orders of messages that the template takes."""
    tools_variable: str | None
    """Name of the variable for tools; None: the template renders no tools."""
    tools_are_text: bool
    """Whether that variable must be JSON text."""
    fills_tools: bool
    """Whether each tool must have a description and parameters."""
    needs_list: bool
    """Whether that variable must be an empty list where there are no tools."""
    calls: CallStyle | None
    """Form of a message's calls; None: the template renders no calls."""
    takes_results: bool
    """Whether the template renders messages with the role `tool`."""
    takes_lone_results: bool
    """Whether it renders them where no call is before them."""
    format: ToolFormat | None
    """Format in which the template renders calls; None: it renders none or in an unknown one."""
    thoughts: Thoughts | None = None
    """Marks between which the template renders reasoning; None: it renders none."""
    thought_end: str = ""
    """Text between reasoning and answer, as the template renders it; "": it renders none."""
    no_text: str = ""
    """Content of an answer without text and calls: "", or what the template takes instead."""


def find_abilities(render: Render, variables: Collection[str]) -> Abilities:
    """Probe a template. `variables`: names that may be its variables; it need not read all."""
    probes = _Probes(render)
    question: Message = {"role": "user", "content": _QUESTION}
    name, is_text, fills = _tools_variable(probes, question, variables)
    tools: dict[str, Any] = {}
    if name is not None:
        tools = shown_tools([_FULL_TOOL], name, as_text=is_text)
    style, way = _call_style(probes, question, tools)
    part = {"type": "text", "text": "probe-of-parts"}
    parts = probes.shown([{"role": "user", "content": [part]}], {})
    # The text of the part must occur, and not the list itself as Python or JSON.
    takes_parts = part["text"] in parts and "'text'" not in parts and '"text"' not in parts
    result: Message = {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _NAME}
    if style is not None:
        result["tool_call_id"] = _id_in_style(_ID, style)
    made = [_message(style, _ID)] if style else [{"role": "assistant", "content": _SAID}]
    wants_parts = takes_parts and _QUESTION not in probes.shown([question], {})
    takes_results = _RESULT in probes.shown([question, *made, result], tools)

    def loop(word: str) -> list[Message]:
        return [*made, {**result, "content": word}]

    no_tools = {} if probes.shown([question], {}) else shown_tools([], name, as_text=is_text)
    if not probes.shown([question], no_tools):
        no_tools = {}
    order = OrderProbes(
        probes.shown,
        (no_tools, tools),
        loop if style and takes_results else None,
        in_parts=wants_parts,
    ).find()
    if style and _VALUE not in probes.shown([*made, result], tools):  # Llama 3.1's
        order = replace(order, takes_answer_first=False)
    thoughts, thought_end = _thoughts(probes, question, style, tools)
    return Abilities(
        takes_parts=takes_parts,
        wants_parts=wants_parts,
        order=order,
        tools_variable=name,
        tools_are_text=is_text,
        fills_tools=fills,
        needs_list=bool(no_tools),
        calls=style,
        takes_results=takes_results,
        takes_lone_results=takes_results and _takes_lone(probes, question, result, tools),
        format=way,
        thoughts=thoughts,
        thought_end=thought_end,
        no_text=_no_text(probes, question),
    )


def _takes_lone(probes: _Probes, question: Message, result: Message, tools: dict[str, Any]) -> bool:
    """Whether a result is shown that no call is before, wherever it stands, also without an id."""
    said: Message = {"role": "assistant", "content": _SAID}
    bare: Message = {"role": "tool", "content": _RESULT}
    chats = [
        chat
        for lone in (result, bare)
        for chat in ([question, lone], [lone, question], [question, said, lone, question])
    ]
    shown = ((chat, probes.shown(chat, used)) for chat in chats for used in ({}, tools))
    return all(
        prompt.count(message["content"]) == chat.count(message)
        for chat, prompt in shown
        for message in chat
    )


def shown_tools(
    tools: Sequence[Message], variable: str | None, *, as_text: bool = False
) -> dict[str, Any]:
    """The template variables that hold the tools; none if `variable` is None.

    `as_text`: the tools are JSON text instead of a list.
    """
    if variable is None:
        return {}
    return {variable: json.dumps(list(tools), ensure_ascii=False) if as_text else list(tools)}


def short_id(call_id: str) -> str:
    """Nine letters and digits that are a function of an id; the id itself if it has that form."""
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


class _Probes:
    """Renders probes. A probe that fails, or comes after `MAX_PROBING_S`, has an empty prompt."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._ends_s = time.monotonic() + MAX_PROBING_S

    def shown(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        """The prompt of a probe; "" if it cannot be rendered."""
        if time.monotonic() > self._ends_s:
            return ""
        try:
            return self._render(messages, variables)[:_MAX_PROBED_CHARS]
        except RequestError:
            return ""


def _tools_variable(
    probes: _Probes, question: Message, variables: Collection[str]
) -> tuple[str | None, bool, bool]:
    """(variable for tools or None, whether it must be JSON text, whether tools must be complete)"""
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
    """(form of a message's calls, format in which the template renders them).

    It is the first form whose rendered call a known format reads back. If there is none, it is the
    first form in which the call occurs in the prompt, and the format is None.
    """
    said = {"role": "assistant", "content": _SAID}
    plain = probes.shown([question, said], tools)
    head = _text_after(_QUESTION, plain).partition(_SAID)[0]
    shown: CallStyle | None = None
    for ids, is_text in itertools.product(("own", "short", "named"), (False, True)):
        read: list[tuple[int, int, CallStyle, ToolFormat]] = []
        for i, content in enumerate(("", None, ABSENT)):
            style = CallStyle(content, True, is_text, ids, False)
            text = _text_after(_QUESTION, probes.shown([question, _message(style, _ID)], tools))
            if not all(word in text for word in (_NAME, _KEY, _VALUE)):
                continue
            way = format_that_reads(text, [_CALL], head)
            if way is not None:
                read.append((len(text), i, style, way))
            # No format has arguments that are JSON text encoded twice, or the text of a dict.
            elif shown is None and f'\\"{_KEY}' not in text and f"{{'{_KEY}'" not in text:
                shown = style
        if read:  # a longer text has the word None in it, or an empty answer after the call
            _, _, style, way = min(read, key=lambda candidate: candidate[:2])
            if way is KIMI:  # results are shown with the ids
                style = replace(style, ids="named")
            return _refined(probes, question, tools, style), way
    return (None if shown is None else _refined(probes, question, tools, shown)), None


def _thoughts(
    probes: _Probes, question: Message, style: CallStyle | None, tools: dict[str, Any]
) -> tuple[Thoughts | None, str]:
    """(marks around the reasoning of an answer, or of a call, beside which more templates render
    it; text between the reasoning and an answer)"""
    thought = {"reasoning_content": _THOUGHT, "thinking": _THOUGHT, "reasoning": _THOUGHT}
    answers: list[Message] = [{"role": "assistant", "content": _SAID}]
    answers += [_message(style, _ID)] if style else []
    for answer in answers:
        text = probes.shown([question, {**answer, **thought}], tools)
        marks = thoughts_around(_THOUGHT, text)
        if marks is not None:
            between, has_said, _ = text.partition(_THOUGHT)[2].partition(_SAID)
            return marks, between if has_said else ""
    return None, ""


def _no_text(probes: _Probes, question: Message) -> str:
    """The content of an answer that has no text: the first that the template does not refuse."""
    shown = (
        text
        for text in ("", *_INSTEAD_OF_NO_TEXT)
        if probes.shown([question, {"role": "assistant", "content": text}, question], {})
    )
    return next(shown, "")


def _refined(
    probes: _Probes, question: Message, tools: dict[str, Any], style: CallStyle
) -> CallStyle:
    """The style with the members that are probed apart from the others."""
    said = {**_message(style, _ID), "content": _SAID}
    text = _text_after(_QUESTION, probes.shown([question, said], tools))
    two = _message(style, _ID)
    two["tool_calls"] = [*two["tool_calls"], *_message(style, _ID[:-1] + "1")["tool_calls"]]
    both = _text_after(_QUESTION, probes.shown([question, two], tools))
    broken = _message(style, _ID)
    broken["tool_calls"][0]["function"]["arguments"] = _BROKEN
    as_it_is = _text_after(_QUESTION, probes.shown([question, broken], tools))
    further = [question, _message(style, _ID), {"role": "user", "content": _SAID}]
    unanswered = _text_after(_QUESTION, probes.shown(further, tools))
    return CallStyle(
        style.content,
        takes_content=_VALUE in text,
        arguments_are_text=style.arguments_are_text,
        ids=style.ids,
        one_at_a_time=both.count(_VALUE) < 2,
        takes_broken=_BROKEN in as_it_is,
        takes_unanswered=_VALUE in unanswered and _SAID in unanswered,
    )


def _id_in_style(call_id: str, style: CallStyle) -> str:
    if style.ids == "named":
        return named_id(_NAME, int(call_id[-1]))
    return short_id(call_id) if style.ids == "short" else call_id


def named_id(name: str, number: int) -> str:
    """The id of a call of a function in Kimi K2's form; `number`: its place among all calls."""
    return f"functions.{name}:{number}"


def _message(style: CallStyle, call_id: str) -> Message:
    """A message with the test call in this style."""
    arguments = _CALL.arguments if style.arguments_are_text else json.loads(_CALL.arguments)
    call = {
        "id": _id_in_style(call_id, style),
        "type": "function",
        "function": {"name": _NAME, "arguments": arguments},
    }
    message: Message = {"role": "assistant", "tool_calls": [call]}
    if style.content is not ABSENT:
        message["content"] = style.content
    return message


def _text_after(mark: str, text: str) -> str:
    return text.rpartition(mark)[2]
