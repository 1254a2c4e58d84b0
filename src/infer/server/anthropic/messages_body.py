"""`MessagesBody`: the body of `/v1/messages`, and the chat that it is

Anthropic's conversation differs from OpenAI's in its form only: the system prompt stands beside the
messages, a user's message holds the results of calls, an assistant's holds its thoughts and calls
as blocks. `chat` is the same conversation as a `ChatBody`, from which everything else is made. The
prompt depends on texts only: marks for caches, ids and the form of a content (a string or a list of
one text block) change nothing of it, so an agent finds all of its last turn in the prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, model_validator

from infer.errors import RequestError
from infer.server.http.anthropic_errors import NO_THREADS
from infer.server.openai import content_parts, ignored_fields, schema_base
from infer.server.openai.chat import AsChat, ChatBody, GeneratingAsChat
from infer.server.openai.content_parts import member
from infer.server.openai.schema import (
    MAX_MESSAGES,
    RANGES,
    Limit,
    Object,
    Stop,
    limit,
)
from infer.server.openai.schema_base import Int, plain
from infer.server.openai.to_engine import in_callers_names
from infer.text.tools.call import BREAK

BETWEEN = BREAK
"""What stands between text blocks of one message."""
BILLING = "x-anthropic-billing-header:"
"""Beginning of a system block that one client sends for its own service; it changes with each
conversation and says nothing to a model."""
_REPLACED = {
    "image": content_parts.IMAGE,
    "container_upload": content_parts.FILE,
}
"""Kinds of blocks that are no text → the text in their place."""
_NO_DOCUMENT = "[document: this server reads text only]"
_HIDDEN = frozenset(("redacted_thinking", "server_tool_use", "mcp_tool_use", "fallback"))
"""Kinds of blocks that are left out and named."""


def _blocks(value: Any, path: str) -> list[Object]:
    """A content as a list of blocks; a string is one text block."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}] if value else []
    if not isinstance(value, list) or not all(isinstance(block, dict) for block in value):
        raise RequestError(f"{path} must be a string or a list of blocks", param=path)
    return value


def _text(block: Object, path: str, noted: list[str] | None) -> str | None:
    """The text of a block without calls and results; None where it has none."""
    kind = content_parts.type_of(block)
    if kind == "text":
        return str(member(block, "text", str, path))
    if kind in ("document", "search_result"):
        return _document(block, path, noted)
    if kind == "compaction":
        return str(block.get("content") or "") or None
    if kind in _REPLACED:
        return _REPLACED[kind]
    content_parts.leave_out_kind(kind, path, "a block", noted)
    return None


def _document(block: Object, path: str, noted: list[str] | None) -> str:
    """The text of a document or a search result, behind what is said about it."""
    about = [block.get(name) for name in ("title", "source", "context")]
    source = block.get("source")
    if block["type"] == "search_result":
        text = _joined(block.get("content", ""), f"{path}.content", noted)
    elif isinstance(source, dict) and source.get("type") == "text":
        text = str(member(source, "data", str, f"{path}.source"))
    elif isinstance(source, dict) and source.get("type") == "content":
        text = _joined(source.get("content", ""), f"{path}.source.content", noted)
    else:
        text = _NO_DOCUMENT
    return BETWEEN.join([*(said for said in about if isinstance(said, str) and said), text])


def _joined(value: Any, path: str, noted: list[str] | None) -> str:
    """The texts of a content, with an empty line between blocks."""
    blocks = enumerate(_blocks(value, path))
    texts = (_text(block, f"{path}[{i}]", noted) for i, block in blocks)
    return BETWEEN.join(text for text in texts if text is not None)


def _system(value: Any, info: ValidationInfo) -> str:
    return _rules(value, "system", info.context)


def _rules(value: Any, path: str, noted: list[str] | None) -> str:
    """The text of a system prompt, or of a system message, without a line of `BILLING`."""
    kept = list[Object]()
    for block in _blocks(value, path):
        text = block.get("text")
        if isinstance(text, str) and text.startswith(BILLING):
            # Gateways join all blocks to one, so only the line goes.
            text = text.partition("\n")[2].lstrip("\n")
            if not text:
                continue
            block = {**block, "text": text}
        kept.append(block)
    return _joined(kept, path, noted)


def _result(block: Object, path: str, tools: dict[str, Object], noted: list[str] | None) -> str:
    """The text of a `tool_result`. The first reference to a tool is the tool's definition, so that
    one that is loaded later changes nothing before it. `tools`: those without a reference so far,
    by name."""
    texts = list[str]()
    for i, part in enumerate(_blocks(block.get("content") or "", f"{path}.content")):
        name = part.get("tool_name")
        if part.get("type") != "tool_reference":
            text = _text(part, f"{path}.content[{i}]", noted)
        else:
            # Once: a short reference could stand for a long definition very often.
            tool = tools.pop(name, None) if isinstance(name, str) else None
            text = json.dumps(tool, ensure_ascii=False) if tool else str(name)
        if text is not None:
            texts.append(text)
    return BETWEEN.join(texts)


def _of_user(
    blocks: list[Object], path: str, tools: dict[str, Object], noted: list[str] | None
) -> Iterator[Object]:
    """Yield the chat's messages of a user's: each result, and the texts between them."""
    texts = list[str]()

    def said() -> Iterator[Object]:
        if texts:
            yield {"role": "user", "content": BETWEEN.join(texts)}
            texts.clear()

    for i, block in enumerate(blocks):
        here = f"{path}[{i}]"
        if block.get("type") != "tool_result":
            text = _text(block, here, noted)
            if text is not None:
                texts.append(text)
            continue
        yield from said()
        content = _result(block, here, tools, noted)
        call_id = member(block, "tool_use_id", str, here)
        yield {"role": "tool", "tool_call_id": call_id, "content": content}
    yield from said()


def _of_assistant(blocks: list[Object], path: str, noted: list[str] | None) -> Object:
    """The chat's message of an assistant's: thoughts, text and calls."""
    thoughts, texts, calls = list[str](), list[str](), list[Object]()
    for i, block in enumerate(blocks):
        kind, here = content_parts.type_of(block), f"{path}[{i}]"
        if kind == "thinking":
            thoughts.append(member(block, "thinking", str, here))
        elif kind == "tool_use":
            # An `input` that is no object is what a cut call has left: the chat takes it as it is.
            name, given = member(block, "name", str, here), block.get("input")
            function = {"name": name, "arguments": given}
            call_id = member(block, "id", str, here)
            calls.append({"id": call_id, "type": "function", "function": function})
        elif kind in _HIDDEN and noted is not None:
            ignored_fields.note(noted, str(kind))
        else:
            text = _text(block, here, noted)
            if text is not None:
                texts.append(text)
    message: Object = {"role": "assistant", "content": BETWEEN.join(texts)}
    if any(thoughts):
        message["reasoning_content"] = BETWEEN.join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return message


def _messages(value: Any) -> list[Object]:
    """The messages, checked for their roles."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RequestError("messages must be a list of objects")
    if len(value) > MAX_MESSAGES:
        raise RequestError(f"messages must be a list of at most {MAX_MESSAGES}")
    for i, message in enumerate(value):
        if message.get("role") not in ("user", "assistant", "system"):
            words = "'user', 'assistant' or 'system'"
            raise RequestError(f"messages[{i}].role must be {words}", param=f"messages[{i}].role")
        if message.get("content") is None:
            code, path = "missing_required_parameter", f"messages[{i}].content"
            raise RequestError(f"{path} is required", param=path, code=code)
    return value


def _tools(value: Any) -> list[Object]:
    """The tools in OpenAI's form. Kinds that run at Anthropic have no schema here: they keep their
    kind, and are named as what the model does not see."""
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RequestError("tools must be a list of objects")
    tools = list[Object]()
    for i, tool in enumerate(value):
        kind = content_parts.type_of(tool)
        if kind not in (None, "custom", "function") and "input_schema" not in tool:
            tools.append({"type": str(kind)})
            continue
        name = member(tool, "name", str, f"tools[{i}]")
        schema = tool.get("input_schema") or {}
        if not isinstance(schema, dict):
            raise RequestError(f"tools[{i}].input_schema must be an object, a JSON schema")
        function: Object = {"name": name}
        if isinstance(tool.get("description"), str):
            function["description"] = tool["description"]
        function["parameters"] = schema
        if tool.get("strict") is True:
            function["strict"] = True
        later = {"defer_loading": True} if tool.get("defer_loading") is True else {}
        tools.append({"type": "function", "function": function, **later})
    return tools


_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _tool_choice(value: Any) -> Object:
    """The fields of a chat that say the same."""
    kind = content_parts.type_of(value)
    if kind == "tool" and isinstance(value.get("name"), str):
        choice: Any = {"type": "function", "function": {"name": value["name"]}}
    elif kind in _CHOICES:
        choice = _CHOICES[kind]
    else:
        words = "{'type': 'auto', 'any', 'none', or 'tool' with a 'name'}"
        raise RequestError(f"tool_choice must be {words}")
    is_single = value.get("disable_parallel_tool_use") is True
    return {"tool_choice": choice} | ({"parallel_tool_calls": False} if is_single else {})


_THINKING = {
    "enabled": "enabled",
    "disabled": "disabled",
    "adaptive": "adaptive",
    "between_tools": "disabled",
}
"""`thinking.type` → the type of a chat; notes between calls are no thoughts but text here."""


def _thinking(value: Any) -> Object:
    """The fields of a chat for `thinking`."""
    kind = content_parts.type_of(value)
    if kind not in _THINKING:
        words = ", ".join(map(repr, _THINKING))
        raise RequestError(f"thinking.type must be one of {words}")
    budget = value.get("budget_tokens") if kind == "enabled" else None
    if budget is not None and (type(budget) is not int or budget < 0):
        raise RequestError("thinking.budget_tokens must be an integer of at least 0")
    given = {} if budget is None else {"thinking_token_budget": budget}
    return {"thinking": {"type": _THINKING[kind]}, **given}


def _output_config(value: Any) -> Object:
    """The fields of a chat for `output_config`: effort, and a JSON schema of the answer."""
    if not isinstance(value, dict):
        raise RequestError("output_config must be an object")
    fields: Object = {}
    if value.get("effort") is not None:
        fields["reasoning_effort"] = value["effort"]
    form = value.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise RequestError("output_config.format must be {'type': 'json_schema', 'schema': …}")
        schema = {"name": "answer", "schema": form.get("schema")}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


_NO_EFFECT: ignored_fields.IgnoredValues = {
    "metadata": (dict,),
    **dict.fromkeys(("context_management", "diagnostics"), (dict, list)),
    "compaction": (),  # asks for a summary in the place of an answer
    "cache_control": (dict,),
    **dict.fromkeys(("container", "inference_geo", "service_tier", "speed"), (str, dict)),
    **dict.fromkeys(("user_profile_id", "workspace_id"), (str,)),
    "betas": (list,),
}
"""Fields that Anthropic's clients send and that change nothing here."""
_BLOCKS = str | list[Object]
CHATS_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Names of a chat's fields in an error → the client's."""


def _thread(value: Any) -> None:
    """Refuse a conversation that the server is to hold. Its client then sends all messages each
    time; taken as nothing, the second request would have the last result and no more."""
    if value is not None:
        raise RequestError(
            "thread is not supported: send all messages of the conversation with each request",
            code=NO_THREADS,
        )


class CountTokensBody(AsChat):
    """`POST /v1/messages/count_tokens`."""

    ignored = _NO_EFFECT
    messages: Annotated[list[Object], plain(_messages, list[Object])]
    system: Annotated[str, plain(_system, _BLOCKS)] = ""
    tools: Annotated[list[Object], plain(_tools, list[Object])] = Field([])
    tool_choice: Annotated[Object, plain(_tool_choice, Object)] = Field({})
    thinking: Annotated[Object, plain(_thinking, Object)] = Field({})
    output_config: Annotated[Object, plain(_output_config, Object)] = Field({})

    @property
    def chat_fields(self) -> Object:
        """The fields of the chat beside its messages, tools and model."""
        return {**self.tool_choice, **self.output_config, **self.thinking}

    @model_validator(mode="after")
    def _translate(self, info: ValidationInfo) -> CountTokensBody:
        messages = [*self._chat_messages(info.context)]
        fields = {"messages": messages, **self.chat_fields}
        if self.tools:
            fields["tools"] = self.tools
        if messages and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            fields["continue_final_message"] = True
        with in_callers_names(CHATS_NAMES):
            self._chat = schema_base.read(ChatBody, fields, info.context)
        return self

    def _chat_messages(self, noted: list[str] | None) -> Iterator[Object]:
        if self.system:
            yield {"role": "system", "content": self.system}
        functions = [tool["function"] for tool in self.tools if "function" in tool]
        tools = {function["name"]: function for function in functions}
        for i, message in enumerate(self.messages):
            role, path = message["role"], f"messages[{i}].content"
            known = {"role", "content"}
            content_parts.leave_out(message, known | {"cache_control"}, "a message", noted)
            blocks = _blocks(message["content"], path)
            if role == "assistant":
                yield _of_assistant(blocks, path, noted)
            elif role == "system":
                yield {"role": "system", "content": _rules(blocks, path, noted)}
            else:
                yield from _of_user(blocks, path, tools, noted)


class MessagesBody(CountTokensBody, GeneratingAsChat):
    """`POST /v1/messages`."""

    documented = {  # noqa: RUF012
        **{name: RANGES[name] for name in ("temperature", "top_p", "top_k")},
        "max_tokens": limit(1),
        "stop_sequences": RANGES["stop"],
    }
    max_tokens: Limit = None
    stop_sequences: Stop = ()
    thread: Annotated[None, plain(_thread, Object)] = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None

    @property
    def is_open_ended(self) -> bool:
        return self.max_tokens is None

    @property
    def chat_fields(self) -> Object:
        names = ("max_tokens", "temperature", "top_p", "top_k")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        stop = {"stop": list(self.stop_sequences)} if self.stop_sequences else {}
        return super().chat_fields | given | stop | {"stream": self.stream}
