"""The type of a tool's parameter, and a value that a model has written without a type, as JSON

A schema says which types a value may have, in `type`, in its alternatives, or by the values that it
lists. A value that is not JSON of these types is text: what a model has written must not get lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from infer.text.tools.argument_text import in_json

ANY = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
"""All types of JSON."""
_TEXT = frozenset(("string",))
_MAX_DEPTH = 16
_MAX_ALTERNATIVES = 64
_MAX_SCALAR_CHARS = 64
_SCALAR = re.compile(r"\s*[\w+\-.]*\s*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_BEGINS = {"object": "{", "array": "["}


def types_of(parameters: Mapping[str, Any], name: str) -> frozenset[str]:
    """The types that the parameter of a tool may have; all if the schema does not say."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    if schema is None:
        schema = parameters.get("additionalProperties")
    return _types(schema, parameters, 0) or ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """The types that a schema names; nothing if it names none."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    given = schema.get("type")
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    types = frozenset(kind for kind in named if isinstance(kind, str)) & ANY
    if types and schema.get("nullable") is True:
        types |= {"null"}
    if types:
        return types
    for key in ("enum", "const"):
        if key in schema:
            values = schema[key] if key == "enum" else [schema[key]]
            if isinstance(values, list) and values:
                return frozenset(_type_of(value) for value in values[:_MAX_ALTERNATIVES])
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _types(_at(root, reference), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        alternatives = schema.get(key)
        if isinstance(alternatives, list) and alternatives:
            kinds_of = [
                _types(alternative, root, depth + 1)
                for alternative in alternatives[:_MAX_ALTERNATIVES]
            ]
            if key == "allOf":
                return frozenset().union(*kinds_of)
            return frozenset().union(*kinds_of) if all(kinds_of) else frozenset()
    if isinstance(schema.get("properties"), Mapping):
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else frozenset()


def _at(root: Mapping[str, Any], reference: str) -> Any:
    node: Any = root
    for name in reference[2:].split("/")[:_MAX_DEPTH]:
        name = name.replace("~1", "/").replace("~0", "~")
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    kinds = {str: "string", int: "integer", float: "number", list: "array"}
    return kinds.get(type(value), "object")


def may_be_json(text: str, types: frozenset[str]) -> bool:
    """Whether a text that goes on may become JSON of one of these types, other than a string."""
    if types <= _TEXT:
        return False
    if "string" not in types:  # whatever it becomes, its end is needed to know
        return True
    seen = text.lstrip()
    if not seen:
        return True
    if any(kind in types and seen.startswith(mark) for kind, mark in _BEGINS.items()):
        return True
    is_scalar = bool(types - _TEXT - _BEGINS.keys())
    return is_scalar and len(text) <= _MAX_SCALAR_CHARS and _SCALAR.fullmatch(text) is not None


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON: as it is written, if it is JSON of one of the types, or else as a string."""
    written = text.strip()
    if types & {"boolean", "null"} and written in _WORDS:
        written = _WORDS[written]
    try:
        value = json.loads(written, parse_constant=_refuse) if types != _TEXT else text
    except (ValueError, RecursionError):
        return f'"{in_json(text)}"'
    kind = _type_of(value)
    if isinstance(value, str):
        # A string in quotes, where no text is expected, is that string.
        return f'"{in_json(text)}"' if "string" in types else written
    fits = kind in types or (kind == "integer" and "number" in types)
    return written if fits or "string" not in types else f'"{in_json(text)}"'


def _refuse(constant: str) -> None:
    raise ValueError(constant)
