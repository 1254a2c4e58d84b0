"""`/v1/responses`: the endpoint's body, and the chat that it is

`chat` is the same conversation as a `ChatBody`, from which the request, the prompt and the parts of
the answer are made. The items of `previous_response_id` are in `input` when the body is checked:
`server.sessions.stored_responses` has put them there. `ResponseAnswer`
(`server.openai.response_answer`) writes the items and events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError, UnprocessableError
from infer.server.openai import ignored_fields, schema, schema_base
from infer.server.openai.chat import AsChat, ChatBody, GeneratingAsChat, chat_requests
from infer.server.openai.generating_api import Keeps, OnMessage
from infer.server.openai.response_answer import ResponseAnswer
from infer.server.openai.response_items import NO_TOOLS, ItemReader, Tools, read_tools
from infer.server.openai.schema import (
    MAX_MESSAGES,
    RANGES,
    Limit,
    Object,
    limit,
)
from infer.server.openai.schema_base import plain
from infer.server.openai.to_engine import in_callers_names
from infer.text.untrusted.workers import Steps
from infer.types import Request

MAX_ITEMS = 4 * MAX_MESSAGES
"""An answer that is one message has an item for its thoughts, its text and each of its calls."""


def _input(value: Any) -> list[Object]:
    """The items; a string is the message of a user."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError("input must be a string or a list of items")
    if len(value) > MAX_ITEMS:
        raise UnprocessableError(f"input must be a list of at most {MAX_ITEMS} items")
    return value


def _tool_choice(value: Any) -> Any:
    """The choice in the form of a chat, with the client's names."""
    if isinstance(value, str):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": value.get("name")}}
    if kind == "allowed_tools":
        allowed = value.get("tools") or []
        if not isinstance(allowed, list):
            raise RequestError("tool_choice: tools must be a list of objects")
        objects = [tool for tool in allowed if isinstance(tool, dict)]
        named = [
            {"type": "function", "function": {"name": tool.get("name")}}
            for tool in objects
            if tool.get("type") in ("function", "custom")
        ]
        return {"type": kind, "allowed_tools": {"mode": value.get("mode"), "tools": named}}
    words = "a {'type': 'function', 'name': string}, or {'type': 'allowed_tools', …}"
    raise RequestError(f"tool_choice must be 'none', 'auto', 'required', {words}")


def _told_choice(choice: Any, tools: Tools) -> Any:
    """The choice as the client has sent it."""
    if isinstance(choice, str):
        return choice
    custom = {tool.name for tool in tools.known.values() if tool.is_custom}

    def told(reference: Object) -> Object:
        name = reference["function"]["name"]
        return {"type": "custom" if name in custom else "function", "name": name}

    if choice["type"] == "function":
        return told(choice)
    allowed = choice["allowed_tools"]
    named = [told(allowed_tool) for allowed_tool in allowed["tools"]]
    return {"type": "allowed_tools", "mode": allowed["mode"], "tools": named}


def _text(value: Any) -> Object:
    """The fields of a chat for `text`: the form of the answer."""
    if not isinstance(value, dict):
        raise RequestError("text must be an object")
    form = value.get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise RequestError("text.format must be an object")
    if form.get("type") != "json_schema":
        return {"response_format": form}
    schema = {name: member for name, member in form.items() if name != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _reasoning(value: Any) -> Object:
    """The fields of a chat for `reasoning`; how much of it is summarised has no meaning here.

    `max_tokens` is no field of OpenAI's, but the name that gateways have for a budget.
    """
    if not isinstance(value, dict):
        raise RequestError("reasoning must be an object")
    effort, budget = value.get("effort"), value.get("max_tokens")
    if budget is not None and (type(budget) is not int or budget < 0):
        raise RequestError("reasoning.max_tokens must be an integer of at least 0")
    said = {"reasoning_effort": effort, "thinking_token_budget": budget}
    return {name: given for name, given in said.items() if given is not None}


_NO_EFFECT: ignored_fields.IgnoredValues = {
    **dict.fromkeys(("client_metadata", "prompt_cache_options"), (dict,)),
    **dict.fromkeys(("conversation", "prompt"), ()),
    "context_management": (list,),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "user"), (str,)),
    **dict.fromkeys(("prompt_cache_retention", "service_tier"), (str,)),
    "stream_options": (dict,),
    "background": (False,),
    "max_tool_calls": (int,),
    "top_logprobs": (0,),
}
"""Fields that clients send and that change nothing here, with the values for which that is so."""


_CHATS_NAMES = {
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "response_format": "text.format",
    "messages": "input",
}
"""Names of a chat's fields in an error → the client's."""
_LOGPROBS = "message.output_text.logprobs"


def _include(value: Any, info: ValidationInfo) -> None:
    """What of other servers' tools the answer is to show says nothing here; log-probabilities are
    named as what is left out."""
    if not isinstance(value, list):
        raise RequestError("include must be a list")
    if _LOGPROBS in value:
        if info.context is None:
            raise RequestError(f"include: {_LOGPROBS} is not supported", param="include")
        ignored_fields.note(info.context, f"include.{_LOGPROBS}")


class InputTokensBody(AsChat):
    """`POST /v1/responses/input_tokens`."""

    ignored = _NO_EFFECT
    input: Annotated[list[Object], plain(_input, str | list[Object])]
    instructions: str | None = None
    tools: Annotated[Any, plain(read_tools, list[Object])] = Field(NO_TOOLS)
    """Read as `Tools`."""
    tool_choice: Annotated[Any, plain(_tool_choice, str | Object)] = "auto"
    parallel_tool_calls: bool = True
    reasoning: Annotated[Object, plain(_reasoning, Object)] = Field({})
    text: Annotated[Object, plain(_text, Object)] = Field({})
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: str | None = None
    include: Annotated[None, plain(_include, list[str])] = None
    metadata: Annotated[dict[str, str], plain(schema.checked_metadata, dict[str, str])] = Field({})
    """Pairs that the response repeats."""
    store: bool | None = None
    """Whether it can be read again and gone on from; null: if the server stores any."""

    _known_tools: Tools = PrivateAttr(NO_TOOLS)

    @property
    def known_tools(self) -> Tools:
        """The tools of the request and those of its items."""
        return self._known_tools

    @property
    def chat_fields(self) -> Object:
        """The fields of the chat beside its messages, tools and model."""
        return {
            **self.text,
            **self.reasoning,
            "parallel_tool_calls": self.parallel_tool_calls,
            "truncation": self.truncation,
        }

    @model_validator(mode="after")
    def _translate(self, info: ValidationInfo) -> InputTokensBody:
        reader = ItemReader(info.context, self.tools)
        messages = [*reader.messages(self.input)]
        self._known_tools = tools = reader.tools
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        if not messages:
            raise RequestError("input is empty: it needs at least one item", param="input")
        fields = {"messages": messages, **self.chat_fields}
        if tools.shown:
            fields |= {"tools": tools.shown, "tool_choice": self._shown_choice()}
        elif self.tool_choice not in ("auto", "none"):
            raise RequestError("tool_choice names none of the tools", param="tool_choice")
        with in_callers_names(_CHATS_NAMES):
            self._chat = schema_base.read(ChatBody, fields, info.context)
        self._chat.set_forms(tools.forms)
        return self

    def _shown_choice(self) -> Any:
        """The choice, with the names under which the model sees the tools."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        names = {tool.name: shown for shown, tool in self.known_tools.known.items()}

        def shown(reference: Object) -> Object:
            name = reference["function"]["name"]
            known = names.get(name, name) if isinstance(name, str) else name
            return {"type": "function", "function": {"name": known}}

        if choice["type"] == "function":
            return shown(choice)
        allowed = choice["allowed_tools"]
        return {**choice, "allowed_tools": {**allowed, "tools": [*map(shown, allowed["tools"])]}}


class ResponseBody(InputTokensBody, GeneratingAsChat):
    """`POST /v1/responses`."""

    documented = {  # noqa: RUF012
        **{name: RANGES[name] for name in ("temperature", "top_p")},
        "max_output_tokens": limit(1),
    }
    max_output_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None

    @property
    def is_open_ended(self) -> bool:
        return self.max_output_tokens is None

    @property
    def told(self) -> Object:
        """The members of the response that repeat the request's."""
        form = self.text.get("response_format", {"type": "text"})
        form = {"type": form["type"], **form.get("json_schema", {})} if form else form
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.get("reasoning_effort"), "summary": None},
            "temperature": self.temperature,
            "text": {"format": form},
            "tool_choice": _told_choice(self.tool_choice, self.tools),
            "tools": self.tools.given,
            "top_p": self.top_p,
            "truncation": self.truncation,
        }

    @property
    def chat_fields(self) -> Object:
        chat_values = {
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        given = {name: value for name, value in chat_values.items() if value is not None}
        return super().chat_fields | given | {"stream": self.stream}


class ResponsesApi:
    """OpenAI's responses."""

    path = "/v1/responses"
    body = ResponseBody
    id_prefix = "resp_"
    refuses = ()
    keeps: Keeps = "responses"

    def make_requests(
        self, engine: AsyncLLM, wire: ResponseBody, answer_id: str
    ) -> Steps[list[Request]]:
        names = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}
        with in_callers_names(names):
            requests = yield from chat_requests(engine, wire.chat, answer_id)
            return requests

    def make_answer(
        self,
        engine: AsyncLLM,
        wire: ResponseBody,
        requests: Sequence[Request],
        answer_id: str,
        on_message: OnMessage | None = None,
    ) -> ResponseAnswer:
        parts = (engine, wire.chat, wire.known_tools, wire.told, requests, answer_id)
        return ResponseAnswer(*parts, on_message)
