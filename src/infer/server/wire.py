"""The request bodies as they come over the wire, as strict pydantic models.

Shape and type are decided here: a wrong type is 400, an unknown name or a value outside a list is
422, a known name whose effect we do not have is 400 by name, `null` is the same as absent, and a
bool is never a number. Ranges of sampling values belong to `infer.types.SamplingParams` (built in
`intake`), lengths in tokens to the engine. `validation.read` turns pydantic's findings into ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from infer.errors import RequestError, UnprocessableError
from infer.server import inert
from infer.server.limits import (
    MAX_CHAT_STOP_STRINGS,
    MAX_CHOICES,
    MAX_CHOICES_PER_PROMPT,
    MAX_MESSAGES,
    MAX_METADATA_ENTRIES,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
)

Prompt = str | tuple[int, ...]


class Text(NamedTuple):
    """The text of a message, however it was spelled."""

    value: str


class Wire(BaseModel):
    """What all wire models share: strict types, no unknown names, null = absent."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    inert_fields: ClassVar[Mapping[str, inert.Inert]] = inert.NO_FIELDS
    other_names: ClassVar[Mapping[str, str]] = {}
    """names of the other endpoint → ours, for the hint in an error"""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        """Drops nulls and fields without effect; refuses the others that are not ours."""
        if not isinstance(value, dict):
            return value  # pydantic says what is wrong
        kept = {}
        for name, member in value.items():
            if member is None:
                continue
            if name in cls.model_fields:
                kept[name] = member
            elif name not in cls.inert_fields:
                raise UnprocessableError(_unknown(cls, name), param=name, code="unknown_parameter")
            elif not cls.inert_fields[name].harmless(member):
                accepted = cls.inert_fields[name].accepted
                raise RequestError(
                    f"{name} is not supported with this value; leave it out or send {accepted}",
                    param=name,
                    code="unsupported_parameter",
                )
        return kept


def _unknown(model: type[Wire], name: str) -> str:
    known = [*model.model_fields, *model.inert_fields]
    near = [model.other_names[name]] if name in model.other_names else None
    near = near or difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(model.model_fields)}"
    return f"there is no field {name[:MAX_NAME_CHARS]!r}; {hint}"


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """All four spellings of `prompt` as one tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of strings or token ids")
    if not value:
        raise RequestError("the prompt is empty: it needs at least one token")
    if _is_ids(value):
        return (tuple(value),)
    if len(value) > MAX_CHOICES:
        raise UnprocessableError(f"prompt is a list of more than {MAX_CHOICES} prompts")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) and _is_ids(item) for item in value):
        return tuple(map(tuple, value))
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids (integers)"
        " or a list of lists of token ids"
    )


def _is_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise RequestError("stop must be a string or a list of strings")


def _chat_stop(value: Any) -> tuple[str, ...]:
    strings = _stop(value)
    if len(strings) > MAX_CHAT_STOP_STRINGS:
        raise UnprocessableError(
            f"stop has {len(strings)} strings; at most {MAX_CHAT_STOP_STRINGS} are supported"
        )
    return strings


_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")


def _logit_bias(value: Any) -> dict[int, float]:
    """JSON's keys are strings; here they are token ids."""
    if not isinstance(value, dict):
        raise RequestError("logit_bias must be an object: token id → number")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias: {key[:MAX_NAME_CHARS]!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise RequestError(f"logit_bias: the value of token {key} must be a number")
        if int(key) in biases:
            raise RequestError(f"logit_bias has token {int(key)} twice")
        biases[int(key)] = bias
    return biases


def read_content(value: Any) -> Text:
    """A string, or the texts of a list of text parts one after the other."""
    if isinstance(value, str):
        return Text(value)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise RequestError("content must be a string or a list of text parts")
    texts = []
    for part in value:
        kind = part.get("type")
        if kind != "text":
            shown = repr(kind[:MAX_NAME_CHARS]) if isinstance(kind, str) else "no type"
            raise RequestError(
                f"content has a part with {shown}; only parts of the type 'text' are supported",
                code="unsupported_content_part",
            )
        text = part.get("text")
        if not isinstance(text, str) or set(part) - {"type", "text"}:
            raise RequestError("a text part of content must be {'type': 'text', 'text': string}")
        texts.append(text)
    return Text("".join(texts))


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise RequestError("metadata must be an object whose values are strings")
    if len(value) > MAX_METADATA_ENTRIES:
        raise UnprocessableError(f"metadata has more than {MAX_METADATA_ENTRIES} entries")
    return value


def _template_variables(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError("chat_template_kwargs must be an object: variable → value")
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in value:
            raise RequestError(f"chat_template_kwargs cannot set {name!r}")
    return value


class StreamOptions(Wire):
    inert_fields = inert.STREAM_FIELDS
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(Wire):
    inert_fields = inert.MESSAGE_FIELDS
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Text, PlainValidator(read_content)]
    name: str | None = None
    tool_call_id: str | None = None


class Generation(Wire):
    """What both endpoints take; the extension names are those that vLLM uses."""

    inert_fields = inert.REQUEST_FIELDS

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_format: Literal["openai", "events"] = "openai"
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] = Field(
        default_factory=dict
    )
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    user: str | None = None
    metadata: Annotated[dict[str, str], PlainValidator(_metadata)] = Field(default_factory=dict)

    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)

    @model_validator(mode="after")
    def _streaming(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream_format == "events":
            if not self.stream:
                raise RequestError(
                    "stream_format 'events' needs stream: true", param="stream_format"
                )
            if self.n > 1 or self.wants_logprobs or self.num_prompts > 1:
                raise UnprocessableError(
                    "stream_format 'events' carries one choice without logprobs;"
                    " use stream_format 'openai' for more",
                    param="stream_format",
                )
        return self

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def num_prompts(self) -> int:
        return 1


class CompletionBody(Generation):
    """`POST /v1/completions`."""

    other_names = {
        "messages": "prompt",
        "max_completion_tokens": "max_tokens",
        "top_logprobs": "logprobs",
    }

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
    max_tokens: int = 16
    logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)


class Conversation(Wire):
    """What a chat template is given; the extension names are those that vLLM uses."""

    other_names = {"prompt": "messages"}

    messages: list[Message] = Field(max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], PlainValidator(_template_variables)] = Field(
        default_factory=dict
    )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """Beside the messages. Whoever continues a message need not say that none begins."""
        begin = self.add_generation_prompt
        if begin is None:
            begin = not self.continue_final_message
        arguments = {**self.chat_template_kwargs, "add_generation_prompt": begin}
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        return arguments


class ChatBody(Conversation, Generation):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_chat_stop)] = ()
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs
