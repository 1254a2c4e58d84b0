"""The request models that endpoints share: sampling and conversations, strictly typed

The body of an endpoint that generates stands in the endpoint's own file and is made of these. The
models check shapes and types: a wrong type is 400, an unknown name or a value outside a list is
422, and a known name without an implementation is 400 unless its value has no effect. `null` is the
same as absent, and a bool is never a number. `infer.types.SamplingParams`, built in `to_engine`,
checks the ranges of sampling values; the engine checks lengths in tokens. Names of extensions are
those of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    model_validator,
)

from infer.errors import RequestError, UnprocessableError
from infer.server.http.json_body import MAX_NAME_CHARS, parse_json
from infer.server.openai import content_parts, grammar_fields, ignored_fields
from infer.server.openai.schema_base import WHOLE, Int, Wire, plain, whole, whole_list
from infer.text.tools.written_numbers import has_own_form
from infer.types import sampling
from infer.types.grammar import Grammar
from infer.types.sampling import MAX_LOGIT_BIAS_ENTRIES

MAX_CHOICES_PER_PROMPT = 128
"""Largest `n`; OpenAI's."""
MAX_LIGHT_CHARS, MAX_LIGHT_WORDS = 1024, 16
"""Maximum size of `bad_words`, and of a chat that may be truncated, on the event loop."""
MAX_LIGHT_ENTRIES = 2048
"""Maximum of choices x (1 + entries of lists) that are checked on the event loop."""
MAX_MESSAGES = 4096
"""A coding agent's task has two for each of its steps."""
MAX_METADATA_ENTRIES = 16
MAX_TOOLS = 512
"""Four times OpenAI's limit, for agents with several MCP servers."""
MAX_CALLS = 128
"""Calls of one message."""
MAX_PRIORITY = 1000
MAX_TIMEOUT_S = 86400
"""One day."""

Object = dict[str, Any]
"""Any JSON object."""
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")


def _stop(value: Any, info: ValidationInfo) -> tuple[str, ...]:
    """The strings; null and "" are none."""
    strings = [value] if isinstance(value, str) else value
    if isinstance(strings, list):
        strings = [item for item in strings if item is not None]
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise RequestError(f"{info.field_name} must be a string or a list of strings")
    return tuple(filter(None, strings))


def _limit(value: Any) -> Any:
    """A number of tokens; None for -1, which clients send for no limit."""
    value = whole(value)
    return None if type(value) is int and value in sampling.NO_LIMIT else value


def _budget(value: Any) -> Any:
    """A number of tokens of reasoning; None for -1, which clients send for no limit."""
    value = whole(value)
    return None if type(value) is int and value == -1 else value


def _logit_bias(value: Any) -> dict[int, float]:
    """The biases by token id; in JSON the keys are strings."""
    if not isinstance(value, dict):
        raise RequestError("logit_bias must be an object: token id → number")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:  # `SamplingParams` checks it too, but only later
        raise UnprocessableError(f"logit_bias has more than {MAX_LOGIT_BIAS_ENTRIES} entries")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias: {key[:MAX_NAME_CHARS]!r} is not a token id")
        if type(bias) not in (int, float):
            raise RequestError(f"logit_bias: the value of token {key} must be a number")
        if int(key) in biases:
            raise RequestError(f"logit_bias has token {int(key)} twice")
        biases[int(key)] = bias
    return biases


def checked_metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise RequestError("metadata must be an object whose values are strings")
    if len(value) > MAX_METADATA_ENTRIES:
        raise UnprocessableError(f"metadata has more than {MAX_METADATA_ENTRIES} entries")
    return value


def _content(value: Any, info: ValidationInfo) -> str:
    return content_parts.text_of(value, info.data.get("role"), info.context)


def _prediction(value: Any, info: ValidationInfo) -> str:
    """The text of OpenAI's `prediction`: `{"type": "content", "content": …}`, whose content is a
    text or a list of text parts."""
    words = '{"type": "content", "content": a text, or a list of {"type": "text", "text": …}}'
    if not isinstance(value, dict) or value.get("type") != "content" or "content" not in value:
        raise RequestError(f"prediction must be {words}")
    content_parts.leave_out(value, {"type", "content"}, "prediction", info.context)
    try:
        return content_parts.text_of(value["content"], None, info.context)
    except UnprocessableError:
        raise
    except RequestError:
        raise RequestError(f"prediction must be {words}") from None


def _variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object: variable → value")
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in value:
            raise RequestError(f"chat_template_kwargs cannot set {name!r}")
    return value


def _thinking(value: Any, info: ValidationInfo) -> bool | None:
    """Whether to think, from a boolean or an object with a `type`; None: as the model does."""
    if isinstance(value, bool):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("enabled", "disabled", "adaptive", "auto"):
        words = "{'type': 'enabled', 'disabled' or 'adaptive'}"
        raise RequestError(f"thinking must be true, false or {words}")
    if isinstance(value, dict):
        content_parts.leave_out(value, {"type", "budget_tokens"}, "thinking", info.context)
    return None if kind in ("adaptive", "auto") else kind == "enabled"


def _functions(value: Any, info: ValidationInfo) -> list[dict[str, Any]]:
    """A list of definitions or calls of functions, checked for its shape. Tools may also be of
    other kinds, which nobody but their owner can run: they are not shown to the model."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestError(f"{info.field_name} must be a list of objects")
    most = MAX_TOOLS if info.field_name == "tools" else MAX_CALLS
    if len(value) > most:
        raise UnprocessableError(f"{info.field_name} must be a list of at most {most}")
    items = [_without_null_type(item) for item in value]
    for item in items:
        function, kind = item.get("function"), item.get("type", "function")
        if info.field_name == "tools" and kind != "function" and isinstance(kind, str):
            continue  # named in a header
        if kind != "function":
            raise RequestError(f"{info.field_name}: only the type 'function' is supported")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            words = "each needs a `function`, an object with a `name`"
            raise RequestError(f"{info.field_name}: {words}")
        if not isinstance(function.get("parameters") or {}, dict):
            raise RequestError(f"{info.field_name}: parameters must be an object, a JSON schema")
    return items


def _without_null_type(item: dict[str, Any]) -> dict[str, Any]:
    if "type" in item and item["type"] is None:
        return {name: member for name, member in item.items() if name != "type"}
    return item


def _tool_choice(value: Any, info: ValidationInfo) -> str | dict[str, Any]:
    """The choice: "none", "auto", "required", a function as `{"name": …}`, or functions as
    `{"mode": "auto" or "required", "names": […]}`. Members without a meaning are noted in the
    context, or refused without one."""
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(value)
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function")
        named = value if function is None else function  # `/v1/responses` has the name in `value`
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            content_parts.leave_out(
                value, {"type", "function", "name"}, "tool_choice", info.context
            )
            content_parts.leave_out(named, {"type", "name"}, "tool_choice", info.context)
            return {"name": named["name"]}
    elif isinstance(value, str) and value in _CHOICES:
        return _CHOICES[value]
    words = "{'type': 'function', 'function': {'name': string}}"
    raise RequestError(f"tool_choice must be 'none', 'auto', 'required' or {words}")


_CHOICES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}
"""What may be chosen; "any" is Mistral's name."""


def _allowed_tools(value: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's `allowed_tools`, with its members in the choice itself or in one of this name."""
    inner = value.get("allowed_tools", value)
    mode, tools = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, 0)
    if mode not in ("auto", "required") or not isinstance(tools, list):
        words = "{'mode': 'auto' or 'required', 'tools': [{'type': 'function', 'function': …}]}"
        raise RequestError(f"tool_choice: allowed_tools must be {words}")
    names = list[str]()
    for tool in tools:
        if not isinstance(tool, dict):
            raise RequestError("tool_choice: each of the allowed tools must be an object")
        if tool.get("type", "function") != "function":
            continue
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise RequestError("tool_choice: each allowed function needs a name")
        names.append(name)
    return {"mode": mode, "names": names}


def _parsed_calls(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls in the form that templates expect, with their arguments as an object.

    Arguments that are none, as a model may have written them, stay text for `tool_messages`, and so
    do those with a number in a form of its own, which goes back as it is.
    """
    parsed = []
    for call in calls:
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            with contextlib.suppress(RequestError):
                value = parse_json(arguments.encode())
                if value is None:
                    arguments = {}
                elif isinstance(value, dict) and not has_own_form(arguments):
                    arguments = value
        elif not isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        parsed.append({**call, "function": {**call["function"], "arguments": arguments}})
    return parsed


# "developer" is OpenAI's newer name of "system", which chat templates do not know.
Role = Annotated[
    Literal["system", "developer", "user", "assistant", "tool"],
    AfterValidator(lambda role: "system" if role == "developer" else role),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Stop = Annotated[tuple[str, ...], plain(_stop, str | list[str])]
# One error only, not one for each wrong id.
TokenIds = Annotated[list[int], FailFast(), BeforeValidator(whole_list)]
Limit = Annotated[int | None, BeforeValidator(_limit)]
Budget = Annotated[int | None, BeforeValidator(_budget)]
ToolChoice = Annotated[str | dict[str, Any], plain(_tool_choice, str | dict[str, Any])]
Functions = Annotated[list[dict[str, Any]], plain(_functions, list[dict[str, Any]])]


def between(low: float, high: float) -> dict[str, Any]:
    return {"minimum": low, "maximum": high}


COUNT = between(0, sampling.MAX_TOKENS_CEILING)
_STRING = {"type": "string", "maxLength": sampling.MAX_STOP_STRING_CHARS}


def limit(least: int) -> dict[str, Any]:
    """A limit of the answer's tokens; -1 is none."""
    tokens = {"type": "integer", **between(least, sampling.MAX_TOKENS_CEILING)}
    return {"anyOf": [{"const": -1}, tokens]}


def _string_list(most: int) -> dict[str, Any]:
    items = {"anyOf": [_STRING, {"type": "null"}]}
    return {"anyOf": [_STRING, {"type": "array", "items": items, "maxItems": most}]}


def _token_ids(most: int, least: int = 0) -> dict[str, Any]:
    ids = {"type": "integer", **between(0, 2**31 - 1)}
    return {"anyOf": [{"type": "array", "items": ids, "minItems": least, "maxItems": most}]}


RANGES: dict[str, dict[str, Any]] = {
    "temperature": between(0, 2),
    "top_p": between(0, 1),
    "min_p": between(0, 1),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": {"exclusiveMinimum": 0, "maximum": 10},
    "top_k": between(-1, 2**31 - 1),
    "seed": {"anyOf": [{"type": "integer", **between(-(2**63), 2**63 - 1)}]},
    "min_tokens": COUNT,
    "prompt_logprobs": {"anyOf": [{"type": "integer", **between(0, sampling.MAX_LOGPROBS)}]},
    "stop": _string_list(sampling.MAX_STOP_STRINGS),
    "bad_words": _string_list(sampling.MAX_BAD_WORDS),
    "stop_token_ids": _token_ids(sampling.MAX_STOP_TOKEN_IDS),
    "allowed_token_ids": _token_ids(sampling.MAX_ALLOWED_TOKEN_IDS, 1),
    "logit_bias": {
        "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", **between(-100, 100)},
    },
    "guided_choice": {"minItems": 1},
}
"""Ranges of the fields of `SamplingParams`, which checks them, as JSON Schema for the OpenAPI
document; ranges that depend on the model are not included."""
_FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_OTHER_TOOL = {
    "type": "object",
    "properties": {"type": {"type": "string", "not": {"const": "function"}}},
    "required": ["type"],
}
_REFERENCE = {"type": {"const": "function"}, "function": _FUNCTION}
_CHOSEN = {
    "type": "object",
    "properties": _REFERENCE,
    "required": ["type", "function"],
    "additionalProperties": False,
}
_ALLOWED = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": _REFERENCE,
                        "required": ["function"],
                    },
                },
            },
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_THINKING = {
    "type": "object",
    "properties": {"type": {"enum": ["enabled", "disabled", "adaptive", "auto"]}},
    "required": ["type"],
}
CONVERSATION: dict[str, dict[str, Any]] = {
    "thinking": {"anyOf": [{"type": "boolean"}, _THINKING]},
    "messages": {"minItems": 1},
    "tools": {"items": {"anyOf": [_TOOL, _OTHER_TOOL]}, "maxItems": MAX_TOOLS},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _CHOSEN, _ALLOWED]},
}


class StreamOptions(Wire):
    """Options of a streamed answer."""

    ignored = ignored_fields.STREAM_FIELDS
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether every piece has the usage so far, if `include_usage` is true."""
    include_status: bool = False
    """Whether a silent stream says why, by events of its own (docs/events.md)."""


class Body(Wire):
    """A body that may name the model."""

    unknown_model_status: ClassVar[int] = 404
    """Status of the error where this server has no model of that name."""
    model: Annotated[str | None, BeforeValidator(lambda name: None if name == "" else name)] = None


class GeneratingBody(Body):
    """What the pipeline of `server.generation` reads of the body of any endpoint that generates."""

    always_streams: ClassVar[bool] = False
    """Whether the answer is a stream whatever `stream` says."""
    clamps_limit: ClassVar[bool] = True
    """Whether a `max_tokens` for which there is no room becomes what there is room for."""
    stream: bool = False
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    """Maximum time of the request in seconds; the server has a limit of its own."""

    @property
    def num_choices(self) -> int:
        """Number of choices of the answer, each of which needs a place."""
        return 1

    @property
    def num_grammar_chars(self) -> int:
        """Number of characters of the grammar to be compiled; 0 without one."""
        return 0

    @property
    def is_heavy(self) -> bool:
        """Whether making the requests takes noticeable time even if the body is small."""
        return bool(self.num_grammar_chars)

    @property
    def is_open_ended(self) -> bool:
        """Whether the client has set no limit to the number of output tokens."""
        return False

    @property
    def tells_status(self) -> bool:
        """Whether the client has asked for events that say why its stream is silent."""
        return False

    @property
    def answer_headers(self) -> list[tuple[str, str]]:
        """Headers of the answer beside those that all have; read once the requests are made."""
        return []


class TextPart(Wire):
    """A part of a content, as the OpenAPI document shows it."""

    type: Literal["text"]
    text: str


class PredictedContent(Wire):
    """OpenAI's `prediction`, as the OpenAPI document shows it."""

    type: Literal["content"]
    content: str | list[TextPart]


class SampledBody(GeneratingBody):
    """The fields that decide which tokens are chosen, and how the scheduler treats the request."""

    documented = RANGES

    max_tokens: Limit = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: Int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], plain(_logit_bias, dict[str, float])] = Field({})
    stop: Stop = ()

    top_k: Int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: Int = 0
    ignore_eos: bool = False
    stop_token_ids: TokenIds = Field([])
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Annotated[list[int] | None, FailFast(), BeforeValidator(whole_list)] = None
    bad_words: Stop = ()
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY), WHOLE] = 0
    reuse_prefix: bool = True
    """Whether the prompt may take pages from the prefix cache and leave its own there for others.
    """
    prediction: Annotated[str, plain(_prediction, PredictedContent)] = Field("")
    speculation: bool = True
    """Whether tokens may be proposed for the answer, which changes its speed and no token."""

    response_format: Annotated[Grammar | None, plain(grammar_fields.response_format, Object)] = None
    structured_outputs: Annotated[Grammar | None, plain(grammar_fields.outputs, Object)] = None
    guided_json: Annotated[Grammar | None, plain(grammar_fields.json_schema, Object | str)] = None
    guided_regex: Annotated[Grammar | None, plain(grammar_fields.regex, str)] = None
    guided_choice: Annotated[Grammar | None, plain(grammar_fields.choice, list[str])] = None
    guided_grammar: Annotated[Grammar | None, plain(grammar_fields.grammar, str)] = None

    @property
    def is_heavy(self) -> bool:
        """Whether checking takes noticeable time even if the body is small: a grammar has to be
        compiled, many words tokenised, or many choices made."""
        num_entries = len(self.logit_bias) + len(self.allowed_token_ids or ())
        return bool(
            self.num_grammar_chars
            or sum(map(len, self.bad_words)) > MAX_LIGHT_CHARS
            or len(self.bad_words) > MAX_LIGHT_WORDS
            or len(self.prediction) > MAX_LIGHT_CHARS
            or self.num_choices * (1 + num_entries) > MAX_LIGHT_ENTRIES
        )

    @property
    def num_grammar_chars(self) -> int:
        return sum(len(grammar.text) for grammar in self.grammars.values())

    @property
    def sets_limit(self) -> bool:
        """Whether the client says how many tokens it wants, or that there is no limit."""
        return "max_tokens" in self.model_fields_set

    @property
    def is_open_ended(self) -> bool:
        return self.max_tokens is None or not self.sets_limit

    @property
    def grammars(self) -> dict[str, Grammar]:
        """Grammars of the answer's text, by the name of the field that has them."""
        given = {name: getattr(self, name) for name in grammar_fields.FIELDS}
        return {name: grammar for name, grammar in given.items() if grammar is not None}

    @cached_property
    def enforced(self) -> grammar_fields.Enforced:
        """The grammar of the answer's text, and what of a schema is not in it. Raises
        `RequestError`; the time is linear in the schema's size."""
        return grammar_fields.enforced(next(iter(self.grammars.values()), None))

    @model_validator(mode="after")
    def _check_grammars(self) -> SampledBody:
        if len(self.grammars) > 1:
            first, other, *_ = self.grammars
            message = f"{first} and {other} both constrain the answer's text; send one of them"
            raise RequestError(message, param=other)
        return self


class Generation(SampledBody):
    """The fields that both of OpenAI's generating endpoints accept."""

    ignored = ignored_fields.REQUEST_FIELDS

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES_PER_PROMPT), WHOLE] = 1
    stream_options: StreamOptions | None = None
    stream_format: Literal["openai", "events"] = "openai"
    user: str | None = None
    metadata: Annotated[dict[str, str], plain(checked_metadata, dict[str, str])] = Field({})
    prompt_logprobs: Int | None = None
    return_token_ids: bool = False

    @property
    def num_choices(self) -> int:
        return self.n

    @property
    def tells_status(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_status

    @model_validator(mode="after")
    def _check_combinations(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream_format == "events" and not self.stream:
            raise RequestError("stream_format 'events' needs stream: true", param="stream_format")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")
        return self


class Message(Wire):
    """A message of a conversation; an answer needs no content."""

    ignored = ignored_fields.MESSAGE_FIELDS
    role: Role
    content: Annotated[str | None, plain(_content, str | list[Object])] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    tool_calls: Annotated[Functions, AfterValidator(_parsed_calls)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_content(cls, value: Any) -> Any:
        """An assistant that refused has said so in `refusal`, in place of a content; a tool that
        has no result has said nothing."""
        if not isinstance(value, dict):
            return value
        if value.get("role") == "tool" and value.get("content") is None:
            return {**value, "content": ""}
        if value.get("role") == "assistant":
            refusal = value.get("refusal")
            if isinstance(refusal, str) and value.get("content") is None:
                return {**value, "content": refusal, "refusal": None}
        return value

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant" and not self.tool_calls:
            code = "missing_required_parameter"
            raise RequestError("content is required", param="content", code=code)
        return self


class Conversation(Body):
    """The fields from which a chat template makes a prompt."""

    documented = CONVERSATION
    messages: list[Message] = Field(max_length=MAX_MESSAGES)
    tools: Functions = Field([])
    tool_choice: ToolChoice = "auto"
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], plain(_variables, dict[str, Any])] = Field({})
    reasoning_effort: Effort | None = None
    """How long to think; each template gets it under the names and with the values that it reads.
    """
    enable_thinking: bool | None = None
    """Whether to think; each template gets it under the name that it reads."""
    thinking: Annotated[bool | None, plain(_thinking, bool | Object)] = None
    """Another form of `enable_thinking`: `{"type": "enabled"}`, `disabled` or `adaptive`."""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The template's arguments beside the messages. `add_generation_prompt` is false by default
        if the final message is continued."""
        begin = self.add_generation_prompt
        if begin is None:
            begin = not self.continue_final_message
        on = self.thinking if self.enable_thinking is None else self.enable_thinking
        said = {"reasoning_effort": self.reasoning_effort, "enable_thinking": on}
        given = {name: value for name, value in said.items() if value is not None}
        arguments = {**given, **self.chat_template_kwargs, "add_generation_prompt": begin}
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        if tools := [tool for tool in self.shown_tools if not tool.get("defer_loading")]:
            arguments["tools"] = tools
        return arguments

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call. It learns of one with `defer_loading` where a message
        mentions it, so that a tool which is loaded later leaves the beginning of the prompt as it
        was."""
        return [tool for _, tool in self.shown]

    @property
    def shown(self) -> list[tuple[int, dict[str, Any]]]:
        """The tools that the model may call, with their places in `tools`."""
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("mode") == "auto":
            names = self.tool_choice["names"]
            return [(i, t) for i, t in self.functions if t["function"]["name"] in names]
        return self.functions

    @property
    def functions(self) -> list[tuple[int, dict[str, Any]]]:
        """The tools that are functions, with their places in `tools`."""
        return [(i, t) for i, t in enumerate(self.tools) if t.get("type", "function") == "function"]


class TokenizeChatBody(Conversation):
    """`POST /tokenize` of messages."""

    ignored = ignored_fields.TOKENIZE_CHAT_FIELDS
    return_token_strs: bool = False


class TokenizeBody(Body):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool = True
    parse_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    documented = {"tokens": {"items": {"type": "integer", "minimum": 0}}}  # noqa: RUF012
    tokens: TokenIds
