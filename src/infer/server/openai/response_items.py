"""`ItemReader`: the items of a response's input as the messages of a chat"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from infer.errors import RequestError
from infer.server.openai.content_parts import (
    FILE,
    IMAGE,
    leave_out_kind,
    member,
    shown_kind,
    type_of,
)
from infer.server.openai.ignored_fields import note
from infer.server.openai.schema import Object
from infer.text.tools.call import BREAK
from infer.text.tools.forced_markup import TEXT_GRAMMAR

JOIN = "__"
"""Between the name of a namespace and that of a function in it, as the model sees them."""
_REPLACED = {"input_image": IMAGE, "image_url": IMAGE, "input_file": FILE, "input_audio": FILE}
"""Kinds of content parts that are no text → the text in their place."""
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "summary_text": "text",
          "reasoning_text": "text", "refusal": "refusal"}  # fmt: skip
"""Kind of a content part → the member that has its text."""
_MORE_TOOLS = ("additional_tools", "tool_search_output")
"""Kinds of items that have tools which are known from there on."""
_ROLES = ("user", "assistant", "system", "developer")
_RESULTS = ("function_call_output", "custom_tool_call_output")


class Tool(NamedTuple):
    """A tool as the client knows it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False
    """Whether it takes a text and no object."""

    @property
    def shown_name(self) -> str:
        """The name under which the model sees it."""
        return self.name if self.namespace is None else f"{self.namespace}{JOIN}{self.name}"


class Tools(NamedTuple):
    """The tools of a request."""

    shown: list[Object]
    """As a chat has them; the kinds that cannot be served have no function."""
    known: dict[str, Tool]
    """The client's tools, by the names under which the model sees them."""
    given: list[Object]
    """As the client has sent them."""
    forms: dict[str, Object]
    """What is enforced of functions and not shown, by the names under which the model sees them."""


NO_TOOLS = Tools([], {}, [], {})
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Parameters of a custom tool, as the model sees it."""


def read_tools(value: Any, path: str = "tools") -> Tools:
    """The tools of a request. Functions of a namespace are shown under joined names."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError(f"{path} must be a list of objects")
    tools = Tools([], {}, value, {})
    for i, tool in enumerate(value):
        _add_tool(tools, tool, f"{path}[{i}]", None)
    return tools


def _add_tool(tools: Tools, tool: Object, path: str, namespace: str | None) -> None:
    kind = tool.get("type")
    if kind == "namespace" and namespace is None:
        name, inner = member(tool, "name", str, path), tool.get("tools")
        if not isinstance(inner, list) or not all(
            isinstance(member_tool, dict) for member_tool in inner
        ):
            raise RequestError(f"{path}.tools must be a list of objects", param=f"{path}.tools")
        for i, member_tool in enumerate(inner):
            _add_tool(tools, member_tool, f"{path}.tools[{i}]", name)
        return
    if kind not in ("function", "custom"):
        tools.shown.append({"type": str(kind)})
        return
    known = Tool(member(tool, "name", str, path), namespace, kind == "custom")
    name = known.shown_name
    function: Object = {"name": name}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    function["parameters"] = _INPUT if known.is_custom else tool.get("parameters") or {}
    if tool.get("strict") is True:
        function["strict"] = True
    if known.is_custom and isinstance(tool.get("format"), dict):
        definition = tool["format"].get("definition")
        if isinstance(definition, str):
            tools.forms[name] = _form(definition, tool["format"].get("syntax"))
            function["description"] = f"{function.get('description', '')}\n\n{definition}".strip()
    tools.known[name] = known
    tools.shown.append({"type": "function", "function": function})


def _form(definition: str, syntax: Any) -> Object:
    """The members of a function that hold its text to a grammar."""
    if syntax != "regex":
        return {TEXT_GRAMMAR: definition}
    text = {"type": "string", "pattern": f"^(?:{definition})$"}
    return {"parameters": {**_INPUT, "properties": {"input": text}}}


def text_of(content: Any, path: str, noted: list[str] | None) -> str:
    """The text of a content, which is a string or a list of parts; "" for null."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(f"{path} must be a string or a list of parts", param=path)
    texts = list[str]()
    for i, part in enumerate(content):
        kind, here = type_of(part), f"{path}[{i}]"
        if kind in _TEXTS:
            texts.append(member(part, _TEXTS[kind], str, here))
        elif kind in _REPLACED:
            texts.append(_REPLACED[kind])
        else:
            leave_out_kind(kind, here, "a part", noted)
    return "".join(texts)


_MORE = "From now on these functions can be called, too:"


def kind_of(item: Object) -> Any:
    """The kind of an item. A message needs none, and neither does a reference to an item."""
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item or "id" not in item else "item_reference"
    return kind


def _result_of(item: Object, path: str) -> Object:
    """What says of which call an item is the result: its id, or else the function's name."""
    if item.get("call_id") is not None:
        return {"tool_call_id": member(item, "call_id", str, path)}
    if item.get("name") is None:
        return {}
    namespace = item.get("namespace")
    tool = Tool(member(item, "name", str, path), namespace if isinstance(namespace, str) else None)
    return {"name": tool.shown_name}


class ItemReader:
    """Makes messages of items.

    A response's history is a list of items: messages, thoughts, calls, results. What an assistant
    has answered in one go comes back as several items, and becomes one message again, so that its
    prompt is what it was. Items and tools of kinds that only OpenAI can serve are left out and
    named, because a history is sent again with every turn: a refusal would end the conversation for
    good.
    """

    def __init__(self, noted: list[str] | None, tools: Tools = NO_TOOLS) -> None:
        """`noted` gets the names of what is left out; None: that is refused. `tools`: those of the
        request."""
        self._noted = noted
        self.tools = Tools([*tools.shown], {**tools.known}, tools.given, {**tools.forms})
        """Those of the request, and those of its items, once they are read."""
        self._answer: Object | None = None
        """The assistant's message that further items may add to."""
        self._origin = ""
        """The response from which its last item is, as the ids of our items have it."""

    def messages(self, items: Iterable[Object]) -> Iterator[Object]:
        """Yield the messages of a chat."""
        for i, item in enumerate(items):
            yield from self._read(item, f"input[{i}]")
        yield from self._take()

    def _take(self) -> Iterator[Object]:
        if self._answer is not None:
            yield self._answer
            self._answer = None

    def _open(self, item: Object, *after: str) -> Iterator[Object]:
        """Have an answer open: another one, if the open one has one of the members `after`. What
        follows a call that has no result yet belongs to the same answer, and so does what this
        server has said in the same response."""
        name, answer = item.get("id"), self._answer or {"tool_calls": []}
        origin = name.rpartition("_")[0].partition("_")[2] if isinstance(name, str) else ""
        is_same = "tool_calls" in answer or (origin and origin == self._origin)
        if not is_same and any(name in answer for name in after):
            yield from self._take()
        if self._answer is None:
            self._answer = {"role": "assistant"}
        self._origin = origin

    def _say(self, name: str, text: str) -> None:
        """Add text to a member of the open answer."""
        assert self._answer is not None
        texts = [self._answer.get(name), text]
        self._answer[name] = BREAK.join(filter(None, texts))

    def _read(self, item: Object, path: str) -> Iterator[Object]:
        kind = kind_of(item)
        if kind == "message":
            yield from self._message(item, path)
        elif kind == "reasoning":
            text = text_of(item.get("content"), f"{path}.content", self._noted)
            text = text or text_of(item.get("summary"), f"{path}.summary", self._noted)
            if text:
                yield from self._open(item, "content")
                self._say("reasoning_content", text)
        elif kind in ("function_call", "custom_tool_call"):
            yield from self._open(item)
            assert self._answer is not None
            self._answer.setdefault("tool_calls", []).append(self._call(item, path))
        elif kind in _RESULTS:
            yield from self._take()
            output = item.get("output")
            content = text_of(output, f"{path}.output", self._noted)
            yield {"role": "tool", **_result_of(item, path), "content": content}
        elif kind in _MORE_TOOLS:
            yield from self._more_tools(item, path)
        elif isinstance(kind, str) and self._noted is not None:
            note(self._noted, kind)
        else:
            raise RequestError(f"{path} is an item with {shown_kind(kind)}", param=path)

    def _more_tools(self, item: Object, path: str) -> Iterator[Object]:
        """Show tools where the client has added them, so that the prompt before stays as it was."""
        more, texts = read_tools(item.get("tools") or [], f"{path}.tools"), list[str]()
        for tool in more.shown:
            if tool["type"] != "function":
                leave_out_kind(tool["type"], path, "a tool", self._noted)
            elif (name := tool["function"]["name"]) not in self.tools.known:
                self.tools.known[name] = more.known[name]
                self.tools.shown.append({**tool, "defer_loading": True})
                texts.append(json.dumps(tool["function"], ensure_ascii=False))
        self.tools.forms.update(more.forms)
        if texts:
            yield from self._take()
            yield {"role": "system", "content": "\n".join([_MORE, *texts])}

    def _message(self, item: Object, path: str) -> Iterator[Object]:
        role = item.get("role")
        if role not in _ROLES:
            words = ", ".join(map(repr, _ROLES))
            raise RequestError(f"{path}.role must be one of {words}", param=f"{path}.role")
        content = text_of(item.get("content"), f"{path}.content", self._noted)
        if role == "assistant":
            yield from self._open(item, "content")
            self._say("content", content)
            return
        yield from self._take()
        yield {"role": role, "content": content}

    def _call(self, item: Object, path: str) -> Object:
        is_custom = item["type"] == "custom_tool_call"
        namespace = item.get("namespace")
        tool = Tool(
            member(item, "name", str, path),
            namespace if isinstance(namespace, str) else None,
            is_custom,
        )
        if is_custom:
            arguments = json.dumps({"input": member(item, "input", str, path)}, ensure_ascii=False)
        else:
            arguments = member(item, "arguments", str, path)
        function = {"name": tool.shown_name, "arguments": arguments}
        return {"id": member(item, "call_id", str, path), "type": "function", "function": function}
