"""The fields for structured output, each read as a `Grammar`

These are OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`. Only the
shape is checked here; the engine's `InputProcessor` checks that a schema or an expression compiles.

What cannot be enforced of a schema, also of a tool's parameters, is dropped and named in the header
`X-Warning`, since clients pass on schemas that they have not written. With `strict: true` it is an
error, which names the place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationInfo

from infer.errors import RequestError, UnprocessableError
from infer.server.openai.content_parts import leave_out, type_of
from infer.text.answer_parser import takes_nothing
from infer.text.grammars.schema_relaxing import DroppedKeywords, relaxed
from infer.types.grammar import MAX_GRAMMAR_CHARS, Grammar

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice", "guided_grammar")  # fmt: skip
_MEMBERS = {"text": {"type"}, "json_object": {"type", "schema"},
            "json_schema": {"type", "json_schema"}}  # fmt: skip
"""Type of a response_format → the members that mean something."""
_NAMED = {"name", "description", "schema", "strict"}
"""Members of a json_schema."""

MAX_WARNED = 8
"""Maximum number of keywords that a header names."""


@dataclass(frozen=True, slots=True)
class AskedSchema(Grammar):
    """The grammar of a JSON schema as a client has sent it."""

    path: str = ""
    """Where the body has the schema."""
    is_strict: bool = False
    """Whether all of it must be enforced."""


class Enforced(NamedTuple):
    """What is enforced of schemas."""

    grammar: Grammar | None
    dropped: tuple[str, ...] = ()
    """Places and names of keywords that are not enforced."""


def enforced(asked: Grammar | None) -> Enforced:
    """What is enforced of a grammar. Raises `RequestError` if that is not all and it is strict.

    The time is linear in the schema's size.
    """
    if not isinstance(asked, AskedSchema):
        return Enforced(asked)
    plain = Grammar(asked.kind, asked.text)
    if len(asked.text) > MAX_GRAMMAR_CHARS:  # refused later
        return Enforced(plain)
    try:
        schema = json.loads(asked.text)
    except (ValueError, RecursionError):
        return Enforced(plain)
    kept = relaxed(schema)
    dropped = _named(kept.dropped, asked.path, is_strict=asked.is_strict)
    return Enforced(plain if kept.schema is schema else Grammar.json(kept.schema), dropped)


def enforced_tools(
    tools: Iterable[tuple[int, dict[str, Any]]],
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """(tools with what is enforced of their parameters, names of what is not).

    `tools`: places in the body and functions, in OpenAI's form. Raises `RequestError` for a tool
    with `strict: true`, of which all must be enforced.
    """
    kept, names = list[dict[str, Any]](), list[str]()
    for i, tool in tools:
        function = tool["function"]
        given = function.get("parameters") or {}
        asked, other = _of_object(given)
        parameters = relaxed(asked)
        path = f"tools[{i}].function.parameters"
        dropped = (*other, *parameters.dropped)
        names += _named(dropped, path, is_strict=function.get("strict") is True)
        schema = parameters.schema
        if takes_nothing(schema) and not takes_nothing(given):  # what described it was dropped
            schema = {**schema, "additionalProperties": True}
        kept.append({**tool, "function": {**function, "parameters": schema}})
    return kept, tuple(names)


def _of_object(parameters: dict[str, Any]) -> tuple[dict[str, Any], tuple[DroppedKeywords, ...]]:
    """(parameters whose `type` is an object, what they have lost), since arguments are one.

    A malformed `type` is left to `relaxed`.
    """
    types = parameters.get("type", "object")
    names = types if isinstance(types, list) else [types]
    if types == "object" or not names or not all(isinstance(name, str) for name in names):
        return parameters, ()
    other = () if "object" in names else (DroppedKeywords("", f"type {', '.join(names)[:64]!r}"),)
    return {**parameters, "type": "object"}, other


def _named(dropped: Sequence[DroppedKeywords], path: str, *, is_strict: bool) -> tuple[str, ...]:
    if dropped and is_strict:
        where, keyword = path + dropped[0].path, dropped[0].keyword
        raise RequestError(
            f"{where}: {keyword} cannot be enforced, and strict is true; leave it out, or send"
            " strict: false to have it ignored",
            param=where,
            code="invalid_json_schema",
        )
    return tuple(
        f"{path}{dropped_keyword.path}: {dropped_keyword.keyword}" for dropped_keyword in dropped
    )


def warning_of(dropped: Sequence[str]) -> str | None:
    """The warning about keywords that are not enforced, in ASCII; None if there are none."""
    if not dropped:
        return None
    named = [ascii(keyword)[1:-1] for keyword in dropped[:MAX_WARNED]]
    rest = len(dropped) - len(named)
    return f"not enforced: {', '.join(named)}" + (f" and {rest} more" if rest else "")


def response_format(value: Any, info: ValidationInfo) -> Grammar | None:
    """The grammar of a `response_format`; None for the type `text`.

    A `json_object` may have a `schema`, which some clients add; a `json_schema` has
    `{"json_schema": {"name", "schema"}}`, whose name has no effect and may be missing, or, as other
    servers take it, the same members itself. Members without a meaning are noted in the context,
    which is a list; without one they are a 422.
    """
    kind = type_of(value)
    if kind is None:
        raise RequestError("response_format must be an object with a type")
    if kind not in _MEMBERS:
        kinds = "'text', 'json_object' or 'json_schema'"
        raise UnprocessableError(f"response_format: type must be {kinds}")
    known, given, path = _MEMBERS[kind], value.get("json_schema"), "response_format.json_schema"
    if kind == "json_schema" and given is None and "schema" in value:
        known, path = {"type", *_NAMED}, "response_format"
        given = {name: value[name] for name in _NAMED & value.keys()}
    leave_out(value, known, "response_format", info.context)
    if kind == "json_schema":
        return _named_schema(given, path, info.context)
    if kind == "text":
        return None
    schema = value.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError("response_format: schema must be an object")
    return _asked(schema, "response_format.schema")


def _asked(
    schema: dict[str, Any] | bool | str | None, path: str, *, is_strict: bool = False
) -> Grammar:
    plain = Grammar.json(schema)
    return AskedSchema(plain.kind, plain.text, path, is_strict)


def _named_schema(value: Any, path: str, noted: list[str] | None) -> Grammar:
    if not isinstance(value, dict) or not isinstance(value.get("name") or "", str):
        raise RequestError("response_format: json_schema must be an object whose name is a string")
    leave_out(value, _NAMED, "json_schema", noted)
    schema = value.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError("response_format: json_schema.schema must be an object")
    return _asked(schema, f"{path}.schema", is_strict=value.get("strict") is True)


def outputs(value: Any, info: ValidationInfo) -> Grammar | None:
    """The grammar of `structured_outputs`: an object with exactly one of `json`, `json_object`,
    `regex`, `choice` and `grammar`. Other members are noted or refused, as in `response_format`."""
    if not isinstance(value, dict):
        raise RequestError("structured_outputs must be an object")
    given = {name: member for name, member in value.items() if member not in (None, False)}
    leave_out(given, set(_OUTPUTS), "structured_outputs", info.context)
    given = {name: member for name, member in given.items() if name in _OUTPUTS}
    if len(given) != 1:
        raise RequestError(f"structured_outputs needs exactly one of {', '.join(_OUTPUTS)}")
    ((name, member),) = given.items()
    if name == "json":
        return json_schema(member, "structured_outputs.json")
    return _OUTPUTS[name](member)


def json_schema(value: Any, path: str = "guided_json") -> Grammar:
    """The grammar of a JSON schema, which is an object or its text."""
    if not isinstance(value, dict | str):
        raise RequestError("a JSON schema must be an object or its text")
    return _asked(value, path)


def regex(value: Any) -> Grammar:
    """The grammar of a regular expression."""
    return Grammar.regex(_text(value))


def choice(value: Any) -> Grammar:
    """The grammar of a list of texts, one of which is the answer."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise RequestError("choices must be a list of at least one string")
    return Grammar.choice(value)


def grammar(value: Any) -> Grammar:
    """The grammar of a text in Lark or GBNF."""
    return Grammar.grammar(_text(value))


def _json_object(value: Any) -> Grammar:
    if value is not True:
        raise RequestError("structured_outputs: json_object must be true or false")
    return Grammar.json()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError("a regular expression or grammar must be a string")
    return value


_OUTPUTS = {"json": json_schema, "json_object": _json_object, "regex": regex, "choice": choice,
            "grammar": grammar}  # fmt: skip
