"""Adapting tools, tool calls and results in messages to what a chat template supports.

OpenAI's API has one form of calls and results; `Abilities` says how a template differs from it.
Data that the template does not render become text that it renders: calls are written into the
content, results become user messages, and tools become an instruction to the model. Nothing is left
out. A message that the template supports is not changed. Whatever a chat has answered can be a
message: an answer without text, and a call whose arguments were cut off and are not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from infer.text.role_order import rows_joined
from infer.text.template_probes import ABSENT, Abilities, CallStyle, named_id, short_id, shown_tools
from infer.text.tools.call import ToolCall, made_call
from infer.text.tools.formats import GENERIC, ToolFormat

Message = dict[str, Any]
"""Message of a chat, as in OpenAI's API."""
MAX_ARGUMENTS_DEPTH = 64
"""Maximum nesting of a call's arguments that a template gets as an object; deeper ones are text."""
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_RESULT = "There is no result."
_EXAMPLE = ToolCall("NAME", '{"ARGUMENT": "VALUE"}')
_INSTRUCTION = """\
You can call these functions, each described by a JSON object:
<tools>
{tools}
</tools>
To call one, write its name and its arguments, a JSON object, in exactly this form, and nothing \
after it:
{example}
What it returns is in the next message. Where no function is needed, answer without calling one."""


def adapted(
    messages: Sequence[Message],
    tools: Sequence[Message] | None,
    abilities: Abilities,
    way: ToolFormat | None,
) -> tuple[list[Message], dict[str, Any]]:
    """(messages, template variables for the tools) in the form that the template supports.

    `way`: the format of the model's calls; None if it is not known. `messages` and `tools` are JSON
    values and are not changed.
    """
    way = way or GENERIC
    style = abilities.calls
    fills = abilities.takes_results and style is not None and not style.takes_unanswered
    turns = _paired(_with_names(messages), fills=fills, takes_lone=abilities.takes_lone_results)
    turns = [_with_text(turn, abilities.no_text) for turn in turns]
    takes_broken = style is not None and style.takes_broken
    turns = [_with_readable_calls(turn, takes_broken=takes_broken) for turn in turns]
    if style is None:
        turns = [_with_written_calls(turn, way) for turn in turns]
    else:
        turns = _with_named_ids(turns) if style.ids == "named" else turns
        turns = _one_at_a_time(turns) if style.one_at_a_time else turns
        turns = [message for turn in turns for message in _in_style(turn, style)]
    if not abilities.takes_results:
        turns = _results_of_the_user(turns)
    turns = rows_joined(turns, abilities.order)
    # An empty list means no tools in the API; templates test for `none`.
    variables: dict[str, Any] = {"tools": None}
    if tools and abilities.tools_variable is None:
        turns = _with_instruction(turns, tools, way, abilities.order.takes_system)
    elif tools:
        if abilities.fills_tools:
            tools = [_completed(tool) for tool in tools]
        as_text = abilities.tools_are_text
        variables |= shown_tools(tools, abilities.tools_variable, as_text=as_text)
    elif abilities.tools_are_text or abilities.needs_list:
        as_text = abilities.tools_are_text
        variables |= shown_tools([], abilities.tools_variable, as_text=as_text)
    if abilities.wants_parts:
        turns = [_in_parts(turn) for turn in turns]
    return turns, variables


def _in_parts(turn: Message) -> Message:
    content = turn.get("content")
    if not isinstance(content, str):
        return turn
    return {**turn, "content": [{"type": "text", "text": content}]}


def _calls_of(turn: Message) -> list[Message]:
    calls = turn.get("tool_calls")
    well_formed = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    )
    return calls if well_formed and calls else []


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """The messages, with an id, which is text, and a type for each call, and a function's name for
    each result."""
    names: dict[Any, Any] = {}
    turns = []
    for i, message in enumerate(messages):
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": str(message["tool_call_id"])}
        if calls := _calls_of(message):
            calls = [{"id": None, "type": "function", **call} for call in calls]
            calls = [
                {**call, "id": f"call_{i}_{j}" if call["id"] is None else str(call["id"])}
                for j, call in enumerate(calls)
            ]
            names |= {call["id"]: call["function"].get("name") for call in calls}
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id"))
            message = message if name is None else {**message, "name": name}
        turns.append(message)
    return turns


def _paired(turns: Sequence[Message], *, fills: bool, takes_lone: bool) -> list[Message]:
    """The messages, in which each result stands behind its call; clients cut the beginning off a
    chat, make ids anew, or lose a result. A result without a call is text of the user, unless
    `takes_lone`. With `fills` a call without a result gets one that says so."""
    made: list[Message] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        is_lone = turn.get("role") == "tool" and not takes_lone
        made.append(_of_the_user(turn) if is_lone else turn)
        calls = list(_calls_of(turn))
        if not calls:
            continue
        while at < len(turns) and (more := _calls_of(turns[at])):
            calls += more
            made.append(turns[at])
            at += 1
        results = []
        while at < len(turns) and turns[at].get("role") == "tool":
            results.append(turns[at])
            at += 1
        matching, others, lost = _results_of(calls, results)
        made += [*matching, *(lost if fills and at < len(turns) else ())]
        made += others if takes_lone else map(_of_the_user, others)
    return made


def _results_of(
    calls: Sequence[Message], results: Sequence[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """(results of the calls, other results, results in place of those that there are not).

    A result with an unknown id is that of a call of its name, or of the first one, that has no
    other; it gets the call's id."""
    names = {call["id"]: call["function"].get("name") for call in calls}
    given = [str(result.get("tool_call_id")) for result in results]
    free = [call_id for call_id in names if call_id not in given]
    matching, others = list[Message](), list[Message]()
    for result, call_id in zip(results, given, strict=True):
        if call_id not in names and free:
            call_id = next((i for i in free if names[i] == result.get("name")), free[0])
            free.remove(call_id)
            result = {**result, "tool_call_id": call_id, "name": names[call_id]}
        (matching if call_id in names else others).append(result)
    none = {"role": "tool", "content": _NO_RESULT}
    return matching, others, [{**none, "tool_call_id": i, "name": names[i]} for i in free]


def _of_the_user(result: Message) -> Message:
    """A result as text of a user message."""
    content = result.get("content")
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return {"role": "user", "content": f"<tool_response>\n{text}\n</tool_response>"}


def _with_named_ids(turns: Sequence[Message]) -> list[Message]:
    """The messages, whose calls are numbered through and have their function's name in the id."""
    made, ids = list[Message](), dict[str, str]()
    for turn in turns:
        calls = list[Message]()
        for call in _calls_of(turn):
            name = str(call["function"].get("name"))
            ids[call["id"]] = named_id(name, len(ids))
            calls.append({**call, "id": ids[call["id"]]})
        if calls:
            turn = {**turn, "tool_calls": calls}
        elif turn.get("tool_call_id") in ids:
            turn = {**turn, "tool_call_id": ids[turn["tool_call_id"]]}
        made.append(turn)
    return made


def _with_text(turn: Message, no_text: str) -> Message:
    """The message; an answer that has neither text nor calls gets `no_text` as its content."""
    if turn.get("role") != "assistant" or _calls_of(turn):
        return turn
    content = turn.get("content")
    if content in (None, "", []) or (isinstance(content, str) and no_text and not content.strip()):
        return {**turn, "content": no_text}
    return turn


def _with_readable_calls(turn: Message, *, takes_broken: bool) -> Message:
    """The message, in which arguments are an object, or text that the template shows.

    Arguments that are not an object become `{}` and their text follows the content, unless
    `takes_broken`: then they stay, as text.
    """
    calls, beside = [], list[str]()
    for call in _calls_of(turn):
        function = call["function"]
        given = function.get("arguments")
        if given is None or (isinstance(given, str) and given.strip() in ("", "null")):
            given = {}
        elif _decoded(call) is None:
            given = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            if not takes_broken:
                beside.append(given)
                given = {}
        calls.append({**call, "function": {**function, "arguments": given}})
    if not calls:
        return turn
    turn = {**turn, "tool_calls": calls}
    if not beside:
        return turn
    content, text = turn.get("content"), "\n".join(beside)
    if isinstance(content, list):
        return {**turn, "content": [*content, {"type": "text", "text": text}]}
    return {**turn, "content": f"{content}\n{text}" if content else text}


def _decoded(call: Message) -> ToolCall | None:
    """The call with its arguments as JSON text; None if they are not an object."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str) and _depth(arguments) > MAX_ARGUMENTS_DEPTH:
        return None
    made = made_call(function.get("name"), arguments)
    if made is None:
        return None
    # A prompt is text, and half of a pair of surrogates is none.
    return made._replace(arguments=_without_surrogates(made.arguments))


def _without_surrogates(arguments: str) -> str:
    if "\\u" not in arguments:
        return arguments
    text = json.dumps(json.loads(arguments), ensure_ascii=False)
    return _LONE_SURROGATE.sub("\ufffd", text)


def _depth(text: str) -> int:
    """The nesting of brackets in a text of JSON, without those in strings."""
    depth = deepest = 0
    if text.count("{") + text.count("[") > MAX_ARGUMENTS_DEPTH:
        for char in _STRINGS.sub("", text):
            depth += (char in "{[") - (char in "}]")
            deepest = max(deepest, depth)
    return deepest


def _with_written_calls(turn: Message, way: ToolFormat) -> Message:
    """The message with its calls written into the content, in the model's format."""
    calls = _calls_of(turn)
    decoded = [_decoded(call) for call in calls]
    if not calls or None in decoded:
        return turn
    text = way.write([call for call in decoded if call is not None])
    content = turn.get("content")
    content = content if isinstance(content, str) else ""
    said = f"{content}\n{text}" if content.strip() else text
    kept = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**kept, "content": said}


def _one_at_a_time(turns: Sequence[Message]) -> list[Message]:
    """The messages, in which several calls become messages of one call, each with its result."""
    made: list[Message] = []
    at = 0
    while at < len(turns):
        turn = turns[at]
        at += 1
        calls = _calls_of(turn)
        if len(calls) < 2:
            made.append(turn)
            continue
        results = []
        while at < len(turns) and turns[at].get("role") == "tool":
            results.append(turns[at])
            at += 1
        for i, call in enumerate(calls):
            first = {**turn, "tool_calls": [call]}
            made.append(first if i == 0 else {**first, "content": ""})
            matching = [result for result in results if result.get("tool_call_id") == call["id"]]
            made += matching or (
                [results[i]] if i < len(results) and not _have_ids(results) else []
            )
        known = {call["id"] for call in calls}
        if _have_ids(results):
            made += [result for result in results if result.get("tool_call_id") not in known]
        else:
            made += results[len(calls) :]
    return made


def _have_ids(results: Sequence[Message]) -> bool:
    return any("tool_call_id" in result for result in results)


def _in_style(turn: Message, style: CallStyle) -> list[Message]:
    """A message with calls, or with a call's result, in the form that the template expects."""
    if style.ids == "short" and "tool_call_id" in turn:
        return [{**turn, "tool_call_id": short_id(turn["tool_call_id"])}]
    calls = _calls_of(turn)
    if not calls:
        return [turn]
    made = {**turn, "tool_calls": [_call_in_style(call, style) for call in calls]}
    content = made.get("content")
    if content:
        if style.takes_content:
            return [made]
        # The template renders either content or calls of a message, so there are two messages.
        del made["content"]
        kept = {name: value for name, value in turn.items() if name != "tool_calls"}
        return [kept, *_in_style(made, style)]
    made.pop("content", None)
    if style.content is not ABSENT:
        made["content"] = style.content
    return [made]


def _call_in_style(call: Message, style: CallStyle) -> Message:
    function = dict(call["function"])
    arguments = function.get("arguments", {})
    decoded = _decoded(call)
    if style.arguments_are_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not style.arguments_are_text and isinstance(arguments, str) and decoded is not None:
        function["arguments"] = json.loads(decoded.arguments)
    made = {**call, "function": function}
    if style.ids == "short":
        made["id"] = short_id(call["id"])
    return made


def _results_of_the_user(turns: Sequence[Message]) -> list[Message]:
    """The messages with results as text of user messages, joined with the user's next message."""
    made: list[Message] = []
    for turn in turns:
        is_result = turn.get("role") == "tool"
        turn = _of_the_user(turn) if is_result else turn
        content = turn.get("content")
        before = made[-1].get("content") if made and made[-1].get("role") == "user" else None
        joins = turn.get("role") == "user" and isinstance(before, str) and isinstance(content, str)
        if joins and (is_result or _is_result(made[-1])):
            made[-1] = {**made[-1], "content": f"{before}\n{content}"}
        else:
            made.append(turn)
    return made


def _is_result(turn: Message) -> bool:
    content = turn.get("content")
    return isinstance(content, str) and content.startswith("<tool_response>")


def _with_instruction(
    turns: Sequence[Message], tools: Sequence[Message], way: ToolFormat, takes_system: bool
) -> list[Message]:
    """The messages with an instruction about the tools at the beginning."""
    described = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    example = way.write([_EXAMPLE])
    text = _INSTRUCTION.format(tools="\n".join(described), example=example)
    made = list(turns)
    first = made[0] if made else {}
    content = first.get("content")
    if first.get("role") == "system" or (not takes_system and first.get("role") == "user"):
        joined: Any = text
        if isinstance(content, str):
            joined = f"{content}\n\n{text}" if first["role"] == "system" else f"{text}\n\n{content}"
        elif isinstance(content, list):
            joined = [{"type": "text", "text": text + "\n\n"}, *content]
        return [{**first, "content": joined}, *made[1:]]
    return [{"role": "system" if takes_system else "user", "content": text}, *made]


def _completed(tool: Message) -> Message:
    """The tool with a description and parameters, which some templates read unconditionally."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool
    given = function.get("parameters")
    parameters = given if isinstance(given, dict) else {}
    properties = parameters.get("properties")
    described = {
        name: {"description": "", **property_schema}
        if isinstance(property_schema, dict)
        else property_schema
        for name, property_schema in (properties if isinstance(properties, dict) else {}).items()
    }
    filled = {"type": "object", **parameters, "properties": described}
    return {**tool, "function": {"description": "", **function, "parameters": filled}}
