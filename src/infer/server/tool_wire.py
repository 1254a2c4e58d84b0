"""Bodies that may speak of tools: conversations that are rendered, not answered.

Tool definitions and earlier tool calls go to the chat template in the form templates expect, which
is OpenAI's with one difference: the arguments of a call are an object, not the text of one. Used
by `tokenizing`; the chat endpoint refuses tools, because nothing reads calls out of its answers.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, model_validator

from infer.errors import RequestError, UnprocessableError
from infer.server import inert, strict_json
from infer.server.limits import MAX_MESSAGES, MAX_TOOLS
from infer.server.wire import ChatBody, Conversation, Message, Text, read_content


def _named_functions(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"{field} must be a list of objects")
    if len(value) > MAX_TOOLS:
        raise UnprocessableError(f"{field} must be a list of at most {MAX_TOOLS}")
    for item in value:
        function = item.get("function")
        if item.get("type", "function") != "function":
            raise RequestError(f"{field}: only the type 'function' is supported")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{field}: each needs a `function`, an object with a `name`")
    return value


def _tools(value: Any) -> list[dict[str, Any]]:
    return _named_functions(value, "tools")


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    return [
        {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
        for call in _named_functions(value, "tool_calls")
    ]


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = strict_json.parse(arguments.encode())
        except RequestError:
            arguments = None
    if not isinstance(arguments, dict):
        raise RequestError("tool_calls: arguments must be a JSON object, as text or as it is")
    return arguments


Tools = Annotated[list[dict[str, Any]], PlainValidator(_tools)]


class ToolMessage(Message):
    """A message that may call tools, and then needs no content."""

    content: Annotated[Text | None, PlainValidator(read_content)] = None  # type: ignore[assignment]
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]] | None, PlainValidator(_tool_calls)] = None

    @model_validator(mode="after")
    def _says_something(self) -> ToolMessage:
        if self.content is None and not self.tool_calls:
            raise RequestError(
                "content is required", param="content", code="missing_required_parameter"
            )
        return self


class ToolConversation(Conversation):
    """A conversation with tools."""

    messages: list[ToolMessage] = Field(max_length=MAX_MESSAGES)  # type: ignore[assignment]
    tools: Tools = Field(default_factory=list)

    @property
    def template_arguments(self) -> dict[str, Any]:
        tools = {"tools": self.tools} if self.tools else {}
        return {**super().template_arguments, **tools}


class RenderBody(ToolConversation, ChatBody):
    """`POST /v1/chat/completions/render`: the body of a chat completion."""


class TokenizeChatBody(ToolConversation):
    """`POST /tokenize` of messages."""

    inert_fields = inert.TOKENIZE_CHAT_FIELDS

    model: str | None = None
    return_token_strs: bool = False
