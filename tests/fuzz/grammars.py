"""Grammars that a client may send: well-formed ones, broken ones, and chains that go too deep.

Strategies of each kind, and `calls`: requests with one of them, for `run.py`.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import MODEL, Call

LETTERS = "abcxyz019 "
NAMES = ["a", "b", "item", "name", "x-y", "é", "$ref", ""]
MAX_CHAIN = 4000


def regexes() -> SearchStrategy[str]:
    """Expressions of most operators, and a few that are not supported."""
    atoms = st.one_of(
        st.text(LETTERS, max_size=4),
        st.sampled_from([".", r"\d", r"\w", r"[a-z]", r"[^\n]", r"\p{L}", "é", r"\"", "/", "日"]),
        st.sampled_from(["(?=a)", r"\1", "^", "$", "[^\\s\\S]", "(?i:a)", "(", "[", "*", "\\"]),
    )
    bounds = st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{5,}", "{1000}", "{0}", "{3,1}"])

    def larger(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        return st.one_of(
            st.builds(lambda a, b: f"({a}){b}", inner, bounds),
            st.builds(lambda a, b: f"({a}|{b})", inner, inner),
            st.builds(lambda a, b: a + b, inner, inner),
        )

    return st.recursive(atoms, larger, max_leaves=10)


def schemas() -> SearchStrategy[Any]:
    """JSON schemas whose keywords fit each other most of the time."""
    numbers = st.sampled_from([0, 1, -1, 3, 10, 0.5, 10**18, -(10**30)])
    values = st.one_of(
        st.none(), st.booleans(), numbers, st.text(LETTERS, max_size=5), st.just([]), st.just({})
    )
    types = st.sampled_from(
        ["string", "integer", "number", "object", "array", "boolean", "null", "foo"]
    )
    refs = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/nowhere", "#a", "http://x/", "/"])
    leaves = st.one_of(
        st.booleans(),
        st.just({}),
        st.builds(lambda one: {"type": one}, types),
        st.builds(lambda one: {"$ref": one}, refs),
        st.builds(lambda one: {"const": one}, values),
        st.builds(lambda some: {"enum": some}, st.lists(values, max_size=5)),
        st.builds(lambda low, high: {"type": "integer", "minimum": low, "maximum": high},
                  numbers, numbers),
        st.builds(lambda low, high: {"type": "string", "minLength": low, "maxLength": high},
                  numbers, numbers),
        st.builds(lambda one: {"type": "string", "pattern": one}, regexes()),
        st.builds(lambda one: {"type": "string", "format": one},
                  st.sampled_from(["date", "uuid", "email", "ipv6", "nope", 5])),
    )  # fmt: skip

    def larger(inner: SearchStrategy[Any]) -> SearchStrategy[Any]:
        named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
        some = st.lists(inner, max_size=3)
        return st.one_of(
            st.fixed_dictionaries(
                {"type": st.just("object"), "properties": named},
                optional={
                    "required": st.lists(st.sampled_from(NAMES), max_size=4),
                    "additionalProperties": inner,
                    "patternProperties": st.dictionaries(regexes(), inner, max_size=2),
                    "minProperties": numbers,
                },
            ),
            st.fixed_dictionaries(
                {"type": st.just("array"), "items": inner},
                optional={"minItems": numbers, "maxItems": numbers, "prefixItems": some},
            ),
            st.builds(lambda word, each: {word: each},
                      st.sampled_from(["anyOf", "allOf", "oneOf"]), some),
            st.builds(lambda each, more: {**(more if isinstance(more, dict) else {}),
                                          "$defs": each}, named, inner),
            st.builds(lambda each: {"not": each}, inner),
        )  # fmt: skip

    return st.recursive(leaves, larger, max_leaves=12)


def sources() -> SearchStrategy[str]:
    """Context-free grammars in Lark or GBNF, whose rules use each other in any way."""
    rules, terminals = ["start", "a", "b", "c_1"], ["T", "U_2"]
    texts = st.one_of(
        st.text(LETTERS, max_size=4).map(json.dumps), st.sampled_from(['"\\n"', '"é"', '"', "''"])
    )
    lexemes = st.one_of(texts, st.builds(lambda one: f"/{one}/", regexes()))
    special = st.sampled_from(
        ["<|end|>", "<[5]>", "@other", "%json {}", '%json {"type": "integer"}', "%regex {}", "_"]
    )
    atoms = st.one_of(st.sampled_from([*rules, *rules, *terminals]), lexemes, lexemes, special)

    def larger(inner: SearchStrategy[str]) -> SearchStrategy[str]:
        counts = st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "~3", "{100000}"])
        return st.one_of(
            st.builds(lambda a, b: f"({a}) {b}", inner, counts),
            st.builds(lambda a, b: f"{a} | {b}", inner, inner),
            st.builds(lambda a, b: f"{a} {b}", inner, inner),
            st.builds(lambda a: f"[{a}]", inner),
        )

    bodies = st.recursive(atoms, larger, max_leaves=6)
    names = st.sampled_from([*rules, *terminals, "?a", "b.2", "T[lazy]", "b::_"])
    lines = st.lists(st.builds(lambda name, body: f"{name}: {body}", names, bodies), max_size=6)
    extras = st.lists(
        st.sampled_from(["%ignore / /", "%llguidance {}", "// a comment", "%import common.INT"]),
        max_size=1,
    )
    lark = st.builds(
        lambda first, more, extra: "\n".join([f"start: {first}", *more, *extra]),
        bodies, lines, extras,
    )  # fmt: skip
    gbnf = lark.map(lambda text: text.replace("start:", "root ::=").replace(": ", " ::= "))
    return st.one_of(lark, lark, gbnf)


def choices() -> SearchStrategy[list[str]]:
    """From one to thousands of strings."""
    some = st.lists(st.text(LETTERS + 'é"\\\n', max_size=6), min_size=1, max_size=12)
    many = st.builds(lambda n, w: [f"{i:0{w}d}" for i in range(n)],
                     st.integers(1, 4000), st.integers(1, 8))  # fmt: skip
    return st.one_of(some, some, many)


def rule_chain(count: int, form: int) -> str:
    """A chain of so many rules, in one of several dialects."""
    name, is_ = ("r{}", "R{}", "r-{}")[form % 3], (":", " ::=")[form // 3 % 2]
    start = ("start", "root")[form // 3 % 2]
    rules = [f'{name.format(i)}{is_} "a" {name.format(i + 1)}' for i in range(count)]
    if form // 6 % 2:
        rules.reverse()
    return "\n".join([f"{start}{is_} {name.format(0)}", *rules, f'{name.format(count)}{is_} "b"'])


def reference_chain(count: int, form: int) -> dict[str, Any]:
    """A chain of so many `$ref`s, by one of several keywords."""

    def step(ref: dict[str, str]) -> Any:
        many = [ref, {"type": "null"}]
        return [{"items": ref}, {"anyOf": many}, {"allOf": [ref]}, {"oneOf": many},
                {"properties": {"a": ref}}, {"not": ref}, ref][form % 7]  # fmt: skip

    links = {f"a{i}": step({"$ref": f"#/$defs/a{i - 1}"}) for i in range(1, count + 1)}
    definitions = {"a0": {"type": "string"}, **links}
    if form // 7 % 2:
        definitions = dict(reversed(definitions.items()))
    return {"$defs": definitions, "$ref": f"#/$defs/a{count}"}


def hostile() -> SearchStrategy[dict[str, Any]]:
    """Fields of a body: chains, nests and counts of all sizes around what can be taken."""
    sizes = st.one_of(st.integers(1, 40), st.integers(400, 700), st.integers(700, MAX_CHAIN))
    forms = st.integers(0, 13)
    nests = st.builds(
        lambda n, form: [
            {"guided_regex": "(" * n + "a" + ")" * n},
            {"guided_regex": "a?" * n + "a" * n},
            {"guided_regex": "(" * (n % 9) + "a" + "{1,50})" * (n % 9) + "{1,50}"},
            {"guided_grammar": "start: " + "(" * n + '"a"' + ")" * n},
            {"guided_grammar": 'start: %json {"items": ' * n},
            {"guided_grammar": 'start: e\ne: e e | "a" | ' + '"a" ' * n},
            {"guided_json": {"properties": {f"p{i}": {"type": "integer"} for i in range(n)}}},
            {"guided_json": {"type": "array", "minItems": n, "maxItems": 10**n if n < 30 else n}},
            {"guided_json": '{"items":' * n},
        ][form % 9],
        sizes, forms,
    )  # fmt: skip
    rules = st.builds(lambda n, form: {"guided_grammar": rule_chain(n, form)}, sizes, forms)
    refs = st.builds(lambda n, form: {"guided_json": reference_chain(n, form)}, sizes, forms)
    return st.one_of(rules, refs, nests)


def fields() -> SearchStrategy[dict[str, Any]]:
    """One of the ways in which a body may ask for a grammar."""

    def form(schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    return st.one_of(
        regexes().map(lambda one: {"guided_regex": one}),
        regexes().map(lambda one: {"structured_outputs": {"regex": one}}),
        schemas().map(lambda one: {"guided_json": one}),
        schemas().map(lambda one: {"response_format": form(one)}),
        sources().map(lambda one: {"guided_grammar": one}),
        sources().map(lambda one: {"structured_outputs": {"grammar": one}}),
        choices().map(lambda one: {"guided_choice": one}),
        hostile(),
    )


def forced_tools() -> SearchStrategy[dict[str, Any]]:
    """Fields of a chat that must call a tool whose parameters are a schema, or a chain of them."""
    chains = st.builds(reference_chain, st.integers(1, MAX_CHAIN), st.integers(0, 13))

    def tool(schema: Any) -> dict[str, Any]:
        function = {"name": "f", "parameters": schema}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}

    return st.one_of(schemas(), chains).map(tool)


def calls() -> SearchStrategy[Call]:
    """Completions and chats with a grammar."""
    common = st.fixed_dictionaries(
        {"model": st.just(MODEL), "max_tokens": st.integers(1, 12)},
        optional={
            "stream": st.booleans(),
            "n": st.integers(1, 3),
            "min_tokens": st.just(1),
            "allowed_token_ids": st.lists(st.integers(0, 50), min_size=1, max_size=3),
            "bad_words": st.lists(st.sampled_from(["a", "b", "{"]), max_size=2),
            "ignore_eos": st.booleans(),
        },
    )
    completion = st.builds(
        lambda body, more: Call("POST", "/v1/completions", {"prompt": "a", **body, **more}),
        common, fields(),
    )  # fmt: skip
    messages = [{"role": "user", "content": "a"}]
    chat = st.builds(
        lambda body, more: Call(
            "POST", "/v1/chat/completions", {"messages": messages, **body, **more}
        ),
        common, st.one_of(fields(), forced_tools()),
    )  # fmt: skip
    return st.one_of(completion, completion, chat)
