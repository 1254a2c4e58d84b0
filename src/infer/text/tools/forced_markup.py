"""Forced calls in the markup of the model's own family, as a grammar

A model that must call a tool does it best in the marks that it was trained on. `forced_markup`
makes the grammar of such an answer. Where calls stand and what is between them is read off
`ToolFormat.write`, the function that writes calls as the family does. What is between the marks is
JSON, or has a syntax of its own: parameters between tags, and values of Python and of Gemma. The
parameters' schema is enforced in each of them. A schema that such a syntax cannot express is not
weakened: then there is no grammar, and calls are forced as plain JSON objects.

Marks that are special tokens of the model stand in the grammar by their ids, since no text spells
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from infer.text.grammars.compiler import JSON_OPTIONS
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import GEMMA, GEMMA4, HARMONY, MAX_FORCED_CALLS, ToolFormat
from infer.text.tools.harmony import START
from infer.text.tools.parameter_types import types_of
from infer.text.tools.tagged_calls import FAMILIES, Family
from infer.text.tools.text_before_calls import OPENED, TEXT, text_before_calls
from infer.text.tools.value_rules import (
    Dialect,
    NotExpressibleError,
    ValueRules,
    escaped,
    listed_texts,
    plain_object,
    separated,
    text_length,
)
from infer.types.grammar import Grammar

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEY = re.compile(r"[A-Za-z0-9_$.@-]{1,200}")
_QUOTES: Mapping[str, tuple[str, str]] = {
    GEMMA.name: ("<escape>", "<end_function_call>"),
    GEMMA4.name: ('<|"|>', "<tool_call|>"),
}
_FAMILIES = {family.name: family for family in FAMILIES}
_PROBE = "probe{}"
TEXT_GRAMMAR = "text_grammar"
"""Member of a function whose only parameter is a text: the grammar of that text, which only tagged
values can have, since elsewhere a text is written with escapes."""
_MAX_LENGTH = 1000
"""Largest `maxLength` of a text without quotes."""


class CallFrame(NamedTuple):
    """The text around the names and the arguments of calls."""

    gaps: tuple[str, ...]
    """Text before the name of each call."""
    mids: tuple[str, ...]
    """Text between name and arguments of each call."""
    last: str
    """Text behind the last call."""


class ForcedMarkup(NamedTuple):
    """What an answer in a family's markup that must call a tool is."""

    grammar: Grammar
    """Grammar of the answer."""
    heads: Mapping[str, str]
    """Text of a first call up to its arguments, by the name of its tool."""


def forced_markup(
    way: ToolFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    special: Mapping[str, int],
    ends: Iterable[str] = (),
    thinks: bool = False,
    must: bool = True,
) -> ForcedMarkup | None:
    """The grammar of an answer that must call one of the tools; None: its markup cannot express it.

    `tools`: tools of the OpenAI API. `parallel`: several calls are allowed. `special`: ids of the
    special tokens; `ends`: those of them that end an answer. `thinks`: reasoning may come before.
    Without `must` the answer may be text in place of calls, or text and then calls.
    """
    try:
        writer = _Writer(way, special, ends)
        return writer.written(tools, parallel=parallel, thinks=thinks, must=must)
    except NotExpressibleError:
        return None


class _Writer:
    """Writes the grammar for one format."""

    def __init__(
        self, way: ToolFormat, special: Mapping[str, int], ends: Iterable[str] = ()
    ) -> None:
        self._way = way
        self._family = _FAMILIES.get(way.name)
        self._rules: list[str] = []
        self._texts: list[str] = []
        """Grammars of the caller."""
        self._ends = tuple(ends)
        self._all_special = special
        frame = self._frame(2)
        shown = "".join((*frame.gaps, *frame.mids, frame.last, *self._inner_marks()))
        known = sorted((mark for mark in special if mark in shown), key=len, reverse=True)
        self._special = {mark: special[mark] for mark in known}
        self._divider = re.compile(f"({'|'.join(map(re.escape, known))})" if known else "(?!)()")

    def _inner_marks(self) -> tuple[str, ...]:
        if self._family is not None:
            return (*self._family.written, self._family.end)
        return _QUOTES.get(self._way.name, ())

    def _frame(self, num_calls: int) -> CallFrame:
        """The text around so many calls without arguments."""
        if self._way.prompt_opens:
            raise NotExpressibleError  # whether the mark is there, the prompt decides
        names = [_PROBE.format(i) for i in range(num_calls)]
        text = self._way.write([ToolCall(name, "{}") for name in names])
        gaps, mids, at = [], [], 0
        for name in names:
            start = text.find(name, at)
            body = self._empty_body(text, start + len(name))
            body_at = text.find(body, start)
            if start < 0 or body_at < 0:
                raise NotExpressibleError
            gaps.append(text[at:start])
            mids.append(text[start + len(name) : body_at])
            at = body_at + len(body)
        return CallFrame(tuple(gaps), tuple(mids), text[at:])

    def _empty_body(self, text: str, at: int) -> str:
        """How a call without arguments is written."""
        if self._family is not None:
            return f"{self._family.between}{self._family.end}"
        return "()" if text.startswith("()", at) else "{}"

    def written(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, thinks: bool, must: bool
    ) -> ForcedMarkup:
        frame = self._frame(MAX_FORCED_CALLS if parallel else 1)
        gaps, last = list(frame.gaps), self._before_end(frame.last)
        if any(self._before_end(gap) != gap for gap in gaps):
            gaps = gaps[:1]  # what ends a call ends the answer
        functions = [tool["function"] for tool in tools]
        for function in functions:
            if not _NAME.fullmatch(function["name"]):
                raise NotExpressibleError
        bodies = [self._body(i, function) for i, function in enumerate(functions)]
        calls = []
        for mid in frame.mids[: len(gaps)]:
            names = (json.dumps(function["name"]) for function in functions)
            between = self._literal(mid)
            calls.append(
                " | ".join(f"{n} {between} {b}" for n, b in zip(names, bodies, strict=True))
            )
        lines = [self._start(gaps[0], thinks=thinks)] if must else self._free_start(gaps[0])
        lines += [f"call{i}: {call}" for i, call in enumerate(dict.fromkeys(calls))]
        if len(set(calls)) == 1:
            follow = f"({self._literal(gaps[1])} call0)" if len(gaps) > 1 else ""
            is_same = len(set(gaps[1:])) < 2
            if is_same and follow:
                lines.append(f"more0: {follow}{{0,{len(gaps) - 1}}} {self._literal(last)}")
        if not any(line.startswith("more0:") for line in lines):
            lines += self._chain(gaps, calls, last)
        heads = {f["name"]: f"{gaps[0]}{f['name']}{frame.mids[0]}" for f in functions}
        return ForcedMarkup(Grammar.calls("\n".join([*lines, *self._rules]), self._texts), heads)

    def _free_start(self, begin: str) -> list[str]:
        """Rules of an answer that may be text, or text before calls."""
        text = text_before_calls(self._way, begin, self._all_special, self._ends)
        start = f"start: {OPENED} {self._literal(text.rest)} call0 more0 | {TEXT}"
        return [start, *text.rules]

    def _start(self, begin: str, *, thinks: bool) -> str:
        lead = ""
        if self._way is HARMONY:
            lead = f"({self._literal(f'{START}assistant')})?"
        elif thinks:
            self._rules.append(r"LINES: /\n{1,2}/")
            lead = "LINES?"
        return f"start: {lead} {self._literal(begin)} call0 more0"

    def _chain(self, gaps: Sequence[str], calls: Sequence[str], last: str) -> list[str]:
        """Rules of what follows each call, where calls differ by their place."""
        numbers = {call: i for i, call in enumerate(dict.fromkeys(calls))}
        end = self._literal(last) or '""'
        lines = []
        for i in range(len(gaps)):
            more = ""
            if i + 1 < len(gaps):
                more = f" | {self._literal(gaps[i + 1])} call{numbers[calls[i + 1]]} more{i + 1}"
            lines.append(f"more{i}: {end}{more}")
        return lines

    def _before_end(self, text: str) -> str:
        """The text before the first token in it that ends an answer."""
        places = [at for mark in self._ends if (at := text.find(mark)) >= 0]
        return text[: min(places)] if places else text

    def _literal(self, text: str) -> str:
        """A text in the grammar, with its special tokens."""
        parts = self._divider.split(text)
        return " ".join(
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part)
            for part in parts
            if part
        )

    def _body(self, i: int, function: Mapping[str, Any]) -> str:
        """The name of the rule for a tool's arguments."""
        parameters = function.get("parameters") or {}
        name = f"arguments{i}"
        if self._family is not None and TEXT_GRAMMAR in function:
            self._rules.append(f"{name}: {self._given_text(function, self._family)}")
        elif self._family is not None:
            self._rules.append(f"{name}: {self._tagged(i, parameters, self._family)}")
        elif quotes := _QUOTES.get(self._way.name):
            self._rules.append(f"{name}: {self._gemma(i, parameters, quotes)}")
        elif self._way.write([ToolCall("f", "{}")]).find("f()") >= 0:
            if not _IDENTIFIER.fullmatch(function["name"].rpartition(".")[2]):
                raise NotExpressibleError
            self._rules.append(f"{name}: {self._python(i, parameters)}")
        else:
            self._rules.append(f"{name}: {json_object(parameters)}")
        return name

    def _given_text(self, function: Mapping[str, Any], family: Family) -> str:
        """The one parameter of a tool that takes a text, in the caller's grammar."""
        (key,) = function["parameters"]["properties"]
        before, _, behind = self._around(key, "string", family)
        self._texts.append(function[TEXT_GRAMMAR])
        value = f"{self._literal(before)} @text{len(self._texts) - 1} {self._literal(behind)}"
        return f"{value} {self._literal(family.between + family.end)}"

    def _python(self, i: int, parameters: Mapping[str, Any]) -> str:
        values = ValueRules(f"p{i}", parameters, Dialect.python())
        members = []
        for key, schema, must in plain_object(parameters, parameters):
            if not _IDENTIFIER.fullmatch(key):
                raise NotExpressibleError
            members.append((f"{json.dumps(key + '=')} {values.rule(schema)}", must))
        self._rules += values.lines
        inside = separated(members, '", "', self._rules, f"p{i}m")
        return f'"(" {inside} ")"'

    def _gemma(self, i: int, parameters: Mapping[str, Any], quotes: tuple[str, str]) -> str:
        quote, closing = quotes
        dialect = Dialect.gemma(self._literal(quote), quote, closing)
        values = ValueRules(f"g{i}", parameters, dialect)
        body = values.object_of(parameters)
        self._rules += values.lines
        return body

    def _tagged(self, i: int, parameters: Mapping[str, Any], family: Family) -> str:
        parts = []
        for k, (key, schema, must) in enumerate(plain_object(parameters, parameters)):
            if not _KEY.fullmatch(key):
                raise NotExpressibleError
            rule = f"p{i}x{k}"
            self._rules.append(f"{rule}: {self._parameter(rule, key, schema, parameters, family)}")
            parts.append(rule if must else f"{rule}?")
        return f"{' '.join(parts)} {self._literal(family.between + family.end)}"

    def _parameter(
        self, rule: str, key: str, schema: Any, root: Mapping[str, Any], family: Family
    ) -> str:
        """A parameter, from the text between tags before it on."""
        types = types_of(root, key)
        others = sorted(types - {"string"})
        forms = []
        if "string" in types:
            forms.append(("string", self._text(rule, key, schema, types, family)))
        if others and ("string" not in types or "{string}" in family.written[1]):
            inner = {**schema, "type": others} if "string" in types else schema
            if "string" in types and "type" not in schema:
                inner = {"type": others}
            defs = {name: root[name] for name in ("$defs", "definitions") if name in root}
            written = {**defs, **inner, "x-guidance": JSON_OPTIONS}
            self._rules.append(f"{rule}json: %json {json.dumps(written)}")
            kind = "boolean" if others == ["boolean"] else others[0]
            behind = family.written[1].partition("{value}")[2].replace("{key}", key)
            forms.append((kind, f"{rule}json {self._literal(behind)}"))
        shown = []
        for kind, value in forms:
            before, _, _ = self._around(key, kind, family)
            shown.append(f"{self._literal(before)} {value}")
        return " | ".join(shown)

    def _around(self, key: str, kind: str, family: Family) -> tuple[str, str, str]:
        """(text between a value and what is before the parameter, "{value}", text behind it)"""
        written = family.written[1].replace("{key}", key)
        written = written.replace("{string}", str(kind == "string").lower())
        written = written.replace("{type}", "number" if kind == "integer" else kind)
        return (family.between + written).partition("{value}")

    def _text(self, rule: str, key: str, schema: Any, types: frozenset[str], family: Family) -> str:
        """A text without quotes up to the tag behind it, and the tag."""
        behind = family.written[1].partition("{value}")[2].replace("{key}", key)
        after = family.after.replace("{key}", key)
        marks = {after, family.end, family.key_mark}
        texts = listed_texts(schema)
        if texts is not None and types == {"string"}:
            if any(mark in text for text in texts for mark in marks):
                raise NotExpressibleError
            choices = " | ".join(json.dumps(text) if text else '""' for text in texts)
            return f"({choices}) {self._literal(behind)}"
        length = text_length(schema, _MAX_LENGTH)
        first, *rest = self._divider.split(behind)
        without = "|".join(map(escaped, sorted(marks)))
        if not rest:
            pattern = f"/(?s:.{length})/ & ~/(?s:.*)({without})(?s:.*)/"
            self._rules.append(f"{rule}text[suffix={json.dumps(behind)}]: {rule.upper()}TEXT")
            self._rules.append(f"{rule.upper()}TEXT: {pattern}")
            return f"{rule}text"
        begun = escaped(first)
        pattern = f"/(?s:.{length}){begun}/ & ~/(?s:.*)({without})(?s:.*)/"
        self._rules.append(f"{rule.upper()}TEXT: {pattern}")
        tail = self._literal("".join(rest))
        optional = "" if begun or not length.startswith(("*", "{0")) else "?"
        return f"{rule.upper()}TEXT{optional} {tail}"


def json_object(parameters: Mapping[str, Any]) -> str:
    """The rule for arguments that are a JSON object; for a tool that takes none it is `{}`."""
    if takes_nothing(parameters):
        return '"{}"'
    schema = {"type": "object", **parameters, "x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps(schema)}"


def takes_nothing(parameters: Mapping[str, Any]) -> bool:
    """Whether a tool with these parameters takes no arguments.

    A schema allows all properties that it does not mention. In a tool that mentions none, nobody
    has meant that, unless the schema says so or describes the object in another way.
    """
    types = parameters.get("type", "object")
    is_object = types == "object" or (isinstance(types, list) and "object" in types)
    more = parameters.get("additionalProperties", False)
    is_described = any(name in parameters for name in _DESCRIBING) or any(
        parameters.get(name) for name in _DESCRIBING_IF_ANY
    )
    return is_object and more in (False, None) and not is_described


_DESCRIBING = ("const", "enum", "$ref", "$dynamicRef", "$recursiveRef", "if", "not")
_DESCRIBING_IF_ANY = (
    "properties", "patternProperties", "propertyNames", "required", "minProperties", "allOf",
    "anyOf", "oneOf", "unevaluatedProperties", "dependentSchemas", "dependentRequired",
    "dependencies",
)  # fmt: skip
"""Keywords by which a schema says something about an object's properties, if they are not empty."""
