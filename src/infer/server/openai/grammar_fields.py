"""The fields for structured output, each read as a `Grammar`

These are OpenAI's `response_format`, and vLLM's `structured_outputs` and older `guided_*`. Only the
shape is checked here; the engine's `InputProcessor` checks that a schema or an expression compiles.
"""

from __future__ import annotations

from typing import Any

from infer.errors import RequestError, UnprocessableError
from infer.types.grammar import Grammar

FIELDS = ("response_format", "structured_outputs", "guided_json", "guided_regex",
          "guided_choice", "guided_grammar")  # fmt: skip
_MEMBER_OF = {"json_schema": "json_schema", "json_object": "schema"}
"""type of a response_format → the other field that it may have"""


def response_format(value: Any) -> Grammar | None:
    """The grammar of a `response_format`; None for the type `text`.

    A `json_object` may have a `schema`, which some clients add; a `json_schema` has
    `{"json_schema": {"name", "schema"}}`, whose name has no effect and may be missing.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise RequestError("response_format must be an object with a type")
    allowed = {"type", _MEMBER_OF.get(kind, "type")}
    if unknown := sorted(value.keys() - allowed):
        raise UnprocessableError(f"response_format of this type has no field {unknown[0][:64]!r}")
    if kind == "json_schema":
        return _named_schema(value.get("json_schema"))
    if kind not in ("text", "json_object"):
        kinds = "'text', 'json_object' or 'json_schema'"
        raise UnprocessableError(f"response_format: type must be {kinds}")
    schema = value.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError("response_format: schema must be an object")
    return Grammar.json(schema) if kind == "json_object" else None


def _named_schema(value: Any) -> Grammar:
    if not isinstance(value, dict) or not isinstance(value.get("name") or "", str):
        raise RequestError("response_format: json_schema must be an object whose name is a string")
    if unknown := sorted(value.keys() - {"name", "description", "schema", "strict"}):
        raise UnprocessableError(f"response_format: json_schema has no field {unknown[0][:64]!r}")
    schema = value.get("schema")
    if schema is not None and not isinstance(schema, dict):
        raise RequestError("response_format: json_schema.schema must be an object")
    return Grammar.json(schema)


def outputs(value: Any) -> Grammar | None:
    """The grammar of `structured_outputs`: an object with exactly one of `json`, `json_object`,
    `regex`, `choice` and `grammar`."""
    if not isinstance(value, dict):
        raise RequestError("structured_outputs must be an object")
    given = {name: member for name, member in value.items() if member not in (None, False)}
    if unknown := sorted(given.keys() - _OUTPUTS):
        known = ", ".join(_OUTPUTS)
        raise UnprocessableError(
            f"structured_outputs has no field {unknown[0][:64]!r}; known are {known}"
        )
    if len(given) != 1:
        raise RequestError(f"structured_outputs needs exactly one of {', '.join(_OUTPUTS)}")
    ((name, member),) = given.items()
    return _OUTPUTS[name](member)


def json_schema(value: Any) -> Grammar:
    """The grammar of a JSON schema, which is an object or its text."""
    if not isinstance(value, dict | str):
        raise RequestError("a JSON schema must be an object or its text")
    return Grammar.json(value)


def regex(value: Any) -> Grammar:
    """The grammar of a regular expression."""
    return Grammar.regex(_text(value))


def choice(value: Any) -> Grammar:
    """The grammar of a list of texts, one of which is the answer."""
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
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
