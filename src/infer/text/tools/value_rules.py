"""`ValueRules`: rules of a grammar for values of a JSON schema that are not written in JSON

Python's calls and Gemma's have texts, lists and objects of their own syntax. A schema is enforced
in it as far as types, listed values, members, items and lengths go. For anything else
`NotExpressibleError` is raised, and the caller forces JSON instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from infer.text.grammars.schema_relaxing import FORMATS

_NOTES = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly",
     "writeOnly", "$comment", "$schema", "$id", "$defs", "definitions", "strict", "nullable")
)  # fmt: skip
"""Keywords that forbid nothing."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CHAR = r"""[^{0}\\\x00-\x1f]|\\["'\\nt]"""
"""Pattern of a character of a text of Python in quotes of one kind."""
_MAX_DEPTH = 12
_MAX_LENGTH = 1000
_SPECIAL = frozenset("\\.+*?()|[]{}^$/-&~#")


class NotExpressibleError(Exception):
    """A schema that a syntax cannot express, or a format whose calls cannot be forced in it."""


class Dialect(NamedTuple):
    """How values are written."""

    quote: str
    """Rule of the mark before and behind a text; "": texts are Python's."""
    marks: tuple[str, ...]
    """What a text does not have, the mark around it first."""
    words: Mapping[str, str]
    """True, false and null."""
    has_bare_keys: bool
    """Whether keys have no quotes."""
    colon: str
    comma: str

    @classmethod
    def python(cls) -> Dialect:
        """Values of Python."""
        words = {"true": "True", "false": "False", "null": "None"}
        return cls("", (), words, False, ": ", ", ")

    @classmethod
    def gemma(cls, quote: str, mark: str, closing: str) -> Dialect:
        """Values of Gemma; `quote`: the rule for the mark around texts."""
        words = {"true": "true", "false": "false", "null": "null"}
        return cls(quote, (mark, closing), words, True, ":", ",")


class ValueRules:
    """Makes the rules for the values of one schema."""

    def __init__(self, prefix: str, root: Mapping[str, Any], dialect: Dialect) -> None:
        """`prefix`: beginning of the rules' names. `root`: schema to which references refer."""
        self.lines: list[str] = []
        """The rules so far."""
        self._prefix = prefix
        self._root = root
        self._dialect = dialect

    def rule(self, schema: Any, depth: int = 0) -> str:
        """The name of the rule for a value of a schema."""
        name = f"{self._prefix}v{len(self.lines)}"
        self.lines.append("")  # keeps its place
        place = len(self.lines) - 1
        self.lines[place] = f"{name}: {self._value(schema, depth)}"
        return name

    def _value(self, schema: Any, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise NotExpressibleError
        if not isinstance(schema, dict):
            raise NotExpressibleError
        if "$ref" in schema:
            schema = resolved(schema, self._root)
        known = {key: value for key, value in schema.items() if key not in _NOTES}
        listed = known.get("enum", [known["const"]] if "const" in known else None)
        if isinstance(listed, list):
            return " | ".join(self._constant(value) for value in listed)
        for key in ("anyOf", "oneOf"):
            if key in known:
                if known.keys() - {key}:
                    raise NotExpressibleError
                return " | ".join(self.rule(alternative, depth + 1) for alternative in known[key])
        types = known.pop("type", None)
        if types is None:
            raise NotExpressibleError
        types = types if isinstance(types, list) else [types]
        return " | ".join(self._typed(kind, known, schema, depth) for kind in types)

    def _typed(
        self, kind: str, known: Mapping[str, Any], schema: Mapping[str, Any], depth: int
    ) -> str:
        words = self._dialect.words
        if kind == "string":
            return self._text(schema)
        if kind == "boolean":
            return f'"{words["true"]}" | "{words["false"]}"'
        if kind == "null":
            return f'"{words["null"]}"'
        if kind in ("integer", "number"):
            bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
            inner = {"type": kind, **{name: known[name] for name in bounds if name in known}}
            return f"%json {json.dumps(inner)}"
        if kind == "array":
            return self._list(known, depth)
        if kind == "object":
            return self.object_of(schema, depth)
        raise NotExpressibleError

    def _list(self, known: Mapping[str, Any], depth: int) -> str:
        if known.keys() - {"items", "minItems", "maxItems"} or "items" not in known:
            raise NotExpressibleError
        least, most = known.get("minItems", 0), known.get("maxItems")
        if type(least) is not int or least > _MAX_LENGTH or type(most) not in (int, type(None)):
            raise NotExpressibleError
        item, comma = self.rule(known["items"], depth + 1), json.dumps(self._dialect.comma)
        if most == 0:
            return '"[]"'
        upper = "" if most is None else str(most - 1)
        inside = f"{item} ({comma} {item}){{{max(0, least - 1)},{upper}}}"
        return f'"[" {inside} "]"' if least else f'"[" ({inside})? "]"'

    def object_of(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """The rule for an object."""
        members = []
        for key, inner, must in plain_object(schema, self._root):
            if self._dialect.has_bare_keys and not _WORD.fullmatch(key):
                raise NotExpressibleError
            shown = [key] if self._dialect.has_bare_keys else _python_texts(key)
            heads = " | ".join(json.dumps(text + self._dialect.colon) for text in shown)
            members.append((f"({heads}) {self.rule(inner, depth + 1)}", must))
        comma = json.dumps(self._dialect.comma)
        inside = separated(members, comma, self.lines, f"{self._prefix}m{len(self.lines)}")
        return f'"{{" {inside} "}}"'

    def _constant(self, value: Any) -> str:
        quote, marks = self._dialect.quote, self._dialect.marks
        if isinstance(value, str):
            if any(mark in value for mark in marks) or any(ord(char) < 32 for char in value):
                raise NotExpressibleError
            if quote:
                return f"{quote} {json.dumps(value) if value else ''} {quote}"
            return " | ".join(json.dumps(text) for text in _python_texts(value))
        if isinstance(value, bool) or value is None:
            return json.dumps(self._dialect.words[json.dumps(value)])
        if isinstance(value, int | float):
            return json.dumps(json.dumps(value))
        raise NotExpressibleError

    def _text(self, schema: Mapping[str, Any]) -> str:
        length = text_length(schema, _MAX_LENGTH)
        quote = self._dialect.quote
        name = f"{self._prefix.upper()}T{len(self.lines)}"
        if not quote:
            double, single = (f"{q}({_CHAR.format(q)}){length}{q}" for q in ('"', "'"))
            self.lines.append(f"{name}: /{double}|{single}/")
            return name
        without = "|".join(map(escaped, self._dialect.marks))
        rest = f"& ~/(?s:.*)({without})(?s:.*)/"
        if quote.startswith('"'):  # the mark is no token, but a text
            mark = self._dialect.marks[0]
            self.lines.append(f"{name}: /(?s:.{length})/ {rest}")
            self.lines.append(f"{name.lower()}x[suffix={json.dumps(mark)}]: {name}")
            return f"{quote} {name.lower()}x"
        self.lines.append(f"{name}: /(?s:.{length})/ {rest}")
        return f"{quote} {name}{'?' if length.startswith(('*', '{0')) else ''} {quote}"


def plain_object(
    schema: Mapping[str, Any], root: Mapping[str, Any]
) -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, schema, whether it must be there) of the members of an object, in their order.

    Raises `NotExpressibleError` for an object that is described in another way.
    """
    known = {key: value for key, value in schema.items() if key not in _NOTES}
    if known.keys() - {"type", "properties", "required", "additionalProperties"}:
        raise NotExpressibleError
    if known.get("type", "object") not in ("object", ["object"]):
        raise NotExpressibleError
    properties, required = known.get("properties") or {}, known.get("required") or []
    if set(required) - properties.keys():
        raise NotExpressibleError
    if not properties and known.get("additionalProperties", False) not in (False, None):
        raise NotExpressibleError
    for key, inner in properties.items():
        if not isinstance(inner, dict):
            raise NotExpressibleError
        yield key, resolved(inner, root), key in required


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema to which a `$ref` without other keywords leads; a schema without one itself."""
    for _ in range(_MAX_DEPTH):
        reference = schema.get("$ref")
        if reference is None:
            return schema
        if schema.keys() - _NOTES - {"$ref"} or not isinstance(reference, str):
            raise NotExpressibleError
        node: Any = root
        for name in reference.removeprefix("#/").split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            node = node.get(name) if isinstance(node, Mapping) else None
        if not isinstance(node, Mapping):
            raise NotExpressibleError
        schema = node
    raise NotExpressibleError


def separated(
    members: Sequence[tuple[str, bool]], comma: str, lines: list[str], prefix: str
) -> str:
    """A rule for members of which some may be left out, with a comma between those that are there.

    `members`: (rule, whether it must be there). `lines` gets the rules that are needed, whose names
    begin with `prefix`. Their number is linear in that of the members.
    """
    if not members:
        return ""
    # `behind` is what may follow when there is a member before; `first` when there is none.
    behind, first = '""', '""' if not any(must for _, must in members) else ""
    for i in reversed(range(len(members))):
        rule, must = members[i]
        lines.append(f"{prefix}x{i}: {rule}")
        name = f"{prefix}x{i}"
        with_own = f"{name} {behind}"
        alone = with_own if must or not first else f"{with_own} | {first}"
        after = f"{comma} {with_own}" + ("" if must else f" | {behind}")
        lines += [f"{prefix}f{i}: {alone}", f"{prefix}b{i}: {after}"]
        first, behind = f"{prefix}f{i}", f"{prefix}b{i}"
    return first


def _python_texts(value: str) -> list[str]:
    """A text as Python writes it, in each kind of quotes."""
    inner = value.replace("\\", "\\\\")
    return [quote + inner.replace(quote, "\\" + quote) + quote for quote in ('"', "'")]


def listed_texts(schema: Any) -> list[str] | None:
    """The texts that a schema lists; None if it lists none."""
    if not isinstance(schema, Mapping):
        return None
    listed = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(listed, list) or not listed:
        return None
    return [value for value in listed if isinstance(value, str)]


def text_length(schema: Any, most: int) -> str:
    """The number of characters of a text, as the repetition of a pattern.

    Raises `NotExpressibleError` for a schema that asks for more of a text than a length.
    """
    if not isinstance(schema, Mapping):
        raise NotExpressibleError
    for inner in [*schema.get("anyOf", ()), *schema.get("oneOf", ())]:
        if not isinstance(inner, Mapping) or inner.keys() & _OF_TEXT or "$ref" in inner:
            raise NotExpressibleError
    kind = schema.get("format")
    if "pattern" in schema or "allOf" in schema or (isinstance(kind, str) and kind in FORMATS):
        raise NotExpressibleError
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if not low and high is None:
        return "*"
    if low > most or (high is not None and high > most):
        raise NotExpressibleError
    return f"{{{low},{'' if high is None else high}}}"


_OF_TEXT = frozenset(("pattern", "format", "minLength", "maxLength", "enum", "const", "anyOf",
                      "oneOf", "allOf"))  # fmt: skip


def escaped(text: str) -> str:
    """A pattern that matches a text."""
    chars = ("\\" + char if char in _SPECIAL else char for char in text)
    return "".join(chars).replace("\n", "\\n")
