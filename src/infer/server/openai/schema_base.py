"""`Wire`: the base of all request bodies; pydantic's errors as our own

A `RequestError` names the field and the expected value; it does not repeat values of the client.
Only the first error is reported. Errors of our own validators are passed on, with the path of the
field added.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from infer.errors import RequestError, UnprocessableError
from infer.server.http.json_body import MAX_NAME_CHARS
from infer.server.openai import ignored_fields

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "literal_error": "a string",
    "list_type": "a list",
    "model_type": "an object",
}
_SENT = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_LIMITS = {
    "gt": "above {}",
    "ge": "at least {}",
    "le": "at most {}",
    "min_length": "a list of at least {}",
    "max_length": "a list of at most {}",
}
_LENGTHS = {
    "min_length": "a string of at least {} characters",
    "max_length": "a string of at most {} characters",
}

# Field of one endpoint → the field of another with the same meaning, for the hint in an error.
_OTHER_NAMES = {
    "messages": "prompt",
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
}


def plain(check: Callable[..., Any], sent: Any) -> PlainValidator:
    """A validator that calls only `check`; `sent` is the type that the OpenAPI document shows."""
    return PlainValidator(check, json_schema_input_type=sent)


def whole(value: Any) -> Any:
    """A number without a fraction as an integer: JavaScript, R and Lua may write 8.0 for 8."""
    if type(value) is float and value.is_integer() and abs(value) < 2.0**64:
        return int(value)
    return value


def whole_list(value: Any) -> Any:
    """The same for the members of a list."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [whole(item) for item in value]
    return value


WHOLE = BeforeValidator(whole)
"""After the limits of an integer field in its `Annotated`."""
Int = Annotated[int, WHOLE]
"""The type of an integer field."""


class Wire(BaseModel):
    """A request body with strict types, in which null means absent. Whoever reads it decides
    whether unknown names are refused or left out; see `read`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[ignored_fields.IgnoredValues] = {}
    """Fields that are accepted with values that have no effect."""
    documented: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """JSON Schema of ranges that later code checks, by field, for the OpenAPI document."""
    is_strict: ClassVar[bool] = False
    """Whether unknown names are refused in any case."""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any, info: ValidationInfo) -> Any:
        """Drop nulls and fields without effect. Refuse unknown names; but if the context is a list,
        drop them, too, and note them there."""
        if not isinstance(value, dict):
            return value  # pydantic reports the error
        kept = {}
        for name, member in value.items():
            if member is None:
                continue
            if name in cls.model_fields:
                kept[name] = member
            elif name not in cls.ignored:
                if info.context is None:
                    code = "unknown_parameter"
                    raise UnprocessableError(cls._unknown(name), param=name, code=code)
                ignored_fields.note(info.context, name)
            elif not ignored_fields.has_no_effect(member, cls.ignored[name]):
                if info.context is not None and name in ignored_fields.HINTS:
                    ignored_fields.note(info.context, name)
                    continue
                raise RequestError(
                    f"{name} is not supported with this value; leave it out or send"
                    f" {ignored_fields.shown(cls.ignored[name])}",
                    param=name,
                    code="unsupported_parameter",
                )
        return kept

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: GetJsonSchemaHandler) -> Any:
        """The model's schema with the fields without effect, and with null for optional fields."""
        schema = handler.resolve_ref_schema(handler(core))
        for name, field in schema["properties"].items():
            field |= cls.documented.get(name, {})
            if name not in schema.get("required", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        others = {name: ignored_fields.schema(values) for name, values in cls.ignored.items()}
        schema["properties"] = others | schema["properties"]
        return schema

    @classmethod
    def _unknown(cls, name: str) -> str:
        short = name[:MAX_NAME_CHARS]
        near = [other for other in (_OTHER_NAMES.get(name),) if other in cls.model_fields]
        near += difflib.get_close_matches(short, [*cls.model_fields, *cls.ignored], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(cls.model_fields)}"
        return f"there is no field {short!r}; {hint}"


W = TypeVar("W", bound=Wire)


def read(model: type[W], body: dict[str, Any], ignored: list[str] | None = None) -> W:
    """Check a body; raises `RequestError` (400) or `UnprocessableError` (422).

    Unknown names are an error if `ignored` is None or the model is strict; otherwise they are noted
    in that list.
    """
    try:
        return model.model_validate(body, context=None if model.is_strict else ignored)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None


def _explained(finding: Any) -> RequestError:
    kind, sent, context = finding["type"], finding["input"], finding.get("ctx", {})
    # messages, 0, content → messages[0].content
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in finding["loc"]]
    param = "".join(steps).removeprefix(".")
    error = context.get("error")
    if isinstance(error, RequestError):
        inner = "." + error.param if error.param and param else error.param or ""
        return type(error)(error.message, param=(param + inner) or None, code=error.code)
    if kind == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if kind == "literal_error" and isinstance(sent, str):
        return UnprocessableError(f"{param} must be {context['expected']}", param=param)
    bounds = _LENGTHS if isinstance(sent, str) else _LIMITS
    limits = [words.format(context[key]) for key, words in bounds.items() if key in context]
    if limits:
        return UnprocessableError(f"{param} must be {' and '.join(limits)}", param=param)
    right, wrong = _EXPECTED.get(kind, "of another type"), _SENT.get(type(sent), "something else")
    message = f"{param} must be {right}, not {wrong}"
    return RequestError(message, param=param, code="invalid_type")
