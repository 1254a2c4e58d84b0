"""Schemas without what cannot be enforced: every keyword of the drafts, formats, expressions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.grammars.patterns import is_enforceable
from infer.text.grammars.schema_relaxing import DROPPED, FORMATS, MAX_NAMED, relaxed
from infer.types.grammar import Grammar
from tests.support.cases import over
from tests.support.doubles import small_tokenizer
from tests.support.serving import spelled

TEXT = {"type": "string"}
# Each keyword of the drafts 4, 6, 7, 2019-09 and 2020-12, with a value and a value of the instance
# that it allows.
VOCABULARY: dict[str, tuple[Any, Any]] = {
    "$anchor": ("a", "x"), "$comment": ("c", "x"), "$defs": ({"a": TEXT}, "x"),
    "$dynamicAnchor": ("a", "x"), "$dynamicRef": ("#a", "x"), "$id": ("http://x/y", "x"),
    "$recursiveAnchor": (True, "x"), "$recursiveRef": ("#", "x"), "$ref": ("#/$defs/t", "x"),
    "$schema": ("https://json-schema.org/draft/2020-12/schema", "x"),
    "$vocabulary": ({"https://x": True}, "x"), "additionalItems": (False, []),
    "additionalProperties": (TEXT, {"a": "x"}), "allOf": ([TEXT], "x"), "anyOf": ([TEXT], "x"),
    "const": (1, 1), "contains": (TEXT, ["x"]), "contentEncoding": ("base64", "eA=="),
    "contentMediaType": ("text/x", "x"), "contentSchema": (TEXT, "x"), "default": (1, "x"),
    "definitions": ({"a": TEXT}, "x"), "dependencies": ({"a": ["b"]}, {"a": 1, "b": 2}),
    "dependentRequired": ({"a": ["b"]}, {"a": 1, "b": 2}),
    "dependentSchemas": ({"a": {"required": ["b"]}}, {"a": 1, "b": 2}), "deprecated": (True, "x"),
    "description": ("d", "x"), "else": (TEXT, "x"), "enum": ([1, 2], 2), "examples": ([1], "x"),
    "exclusiveMaximum": (5, 4), "exclusiveMinimum": (1, 4), "format": ("path", "x"),
    "id": ("http://x/y", "x"), "if": (TEXT, "x"), "items": (TEXT, ["x"]), "maxContains": (2, []),
    "maxItems": (2, [1]), "maxLength": (3, "x"), "maxProperties": (2, {"a": 1}),
    "maximum": (5, 5), "minContains": (1, [1]), "minItems": (1, [1]), "minLength": (1, "x"),
    "minProperties": (1, {"a": 1}), "minimum": (1, 1), "multipleOf": (2, 4),
    "not": ({"const": 3}, 4), "oneOf": ([TEXT], "x"), "pattern": ("^(?!-)a+$", "aa"),
    "patternProperties": ({"^(?!x)": TEXT}, {"a": "x"}), "prefixItems": ([TEXT], ["x"]),
    "properties": ({"a": TEXT}, {"a": "x"}), "propertyNames": ({"pattern": "^a"}, {"a": 1}),
    "readOnly": (True, "x"), "required": (["a"], {"a": 1}), "then": (TEXT, "x"),
    "title": ("t", "x"), "type": ("string", "x"), "unevaluatedItems": (False, []),
    "unevaluatedProperties": (False, {}), "uniqueItems": (True, [1, 2]), "writeOnly": (True, "x"),
}  # fmt: skip
FORMATS_OF_DRAFTS = (
    "date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname",
    "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template",
    "json-pointer", "relative-json-pointer", "regex", "color", "host-name", "ip-address",
    "utc-millisec", "phone", "style",
)  # fmt: skip
OTHER_FORMATS = (
    "password", "path", "file-path", "binary", "byte", "decimal", "char", "uint64", "url",
    "unknown", "é",
)  # fmt: skip
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "root": (lambda s: s, lambda v: v, ""),
    "property": (
        lambda s: {"type": "object", "properties": {"v": s}, "required": ["v"]},
        lambda v: {"v": v},
        ".properties.v",
    ),
    "items": (lambda s: {"type": "array", "items": s}, lambda v: [v, v], ".items"),
    "prefix": (lambda s: {"type": "array", "prefixItems": [s]}, lambda v: [v], ".prefixItems[0]"),
    "anyOf": (lambda s: {"anyOf": [{"type": "null"}, s]}, lambda v: v, ".anyOf[1]"),
    "allOf": (lambda s: {"allOf": [{}, s]}, lambda v: v, ".allOf[1]"),
    "additional": (
        lambda s: {"type": "object", "additionalProperties": s},
        lambda v: {"b": v},
        ".additionalProperties",
    ),
    "reference": (
        lambda s: {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": s}},
        lambda v: [v],
        ".$defs.a",
    ),
    "elsewhere": (
        lambda s: {"items": {"$ref": "#/components/schemas/a~1b"},
                   "components": {"schemas": {"a/b": s}}},
        lambda v: [v],
        ".components.schemas.a~1b",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = small_tokenizer()
    return Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size))


def accepts(compiler: Compiler, schema: Any, value: Any) -> bool:
    """Whether the grammar of a schema allows the text of a value, from beginning to end."""
    constraint = compiler.constraint(Grammar.json(schema))
    try:
        for token in spelled(json.dumps(value, ensure_ascii=False)):
            constraint.take(token)
    except ValueError:
        return False
    return True


def problem(compiler: Compiler, schema: Any) -> str:
    return compiler.problem(Grammar.json(schema))[0]


@pytest.mark.parametrize("place", PLACES)
@over("keyword", VOCABULARY)
def test_no_keyword_of_the_drafts_is_refused(compiler: Compiler, keyword: str, place: str) -> None:
    wrap, instance, _ = PLACES[place]
    value, allowed = VOCABULARY[keyword]
    schema = wrap({keyword: value})
    schema["$defs"] = {"t": TEXT, **schema.get("$defs", {})}
    kept = relaxed(schema).schema
    assert problem(compiler, kept) == ""
    assert accepts(compiler, kept, instance(allowed))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_dropped_is_named_with_its_place(place: str) -> None:
    wrap, _, path = PLACES[place]
    for keyword in ("uniqueItems", "not", "contains", "propertyNames", "dependentRequired"):
        [dropped] = relaxed(wrap({keyword: VOCABULARY[keyword][0]})).dropped
        assert dropped == (path, keyword)
    [dropped] = relaxed(wrap({"type": "string", "format": "path"})).dropped
    assert dropped == (path, "format 'path'")
    [dropped] = relaxed(wrap({"if": {}, "then": {"minLength": 3}})).dropped[:1]
    assert dropped == (path, "if")


def test_what_can_be_enforced_is_left_as_it_is(compiler: Compiler) -> None:
    for keyword, (value, _) in VOCABULARY.items():
        if keyword not in DROPPED and keyword not in ("format", "pattern", "patternProperties"):
            schema = {"$defs": {"t": TEXT}, keyword: value}
            assert relaxed(schema).dropped == ()
    schema = {
        "type": "object",
        "properties": {"uniqueItems": TEXT, "not": {"pattern": "^a+$", "format": "date"}},
        "patternProperties": {"^x": TEXT},
        "additionalProperties": False,
        "default": {"uniqueItems": True},
        "const": {"not": 1},
    }
    assert relaxed(schema).schema is schema
    silent: dict[str, Any]
    for silent in ({"uniqueItems": False}, {"unevaluatedItems": True}, {"propertyNames": {}},
                   {"$schema": "http://x/y"}, {"minLength": 2.0}, {"minContains": 0}):  # fmt: skip
        kept = relaxed({**TEXT, **silent})
        assert kept.dropped == ()
        assert problem(compiler, kept.schema) == ""


def test_dropping_never_forbids(compiler: Compiler) -> None:
    """A property whose pattern is dropped falls under no other keyword."""
    schema = {"patternProperties": {"^(?!x)": TEXT, "^y": {"type": "integer"}},
              "additionalProperties": False, "type": "object"}  # fmt: skip
    kept = relaxed(schema)
    assert accepts(compiler, kept.schema, {"abc": "text", "y": 5})
    assert not accepts(compiler, kept.schema, {"y": "text"})
    assert [one.keyword for one in kept.dropped] == [
        "patternProperties '^(?!x)'", "additionalProperties"
    ]  # fmt: skip
    dangling = {"not": TEXT, "items": {"$ref": "#/not"}, "type": "array"}
    kept = relaxed(dangling)
    assert problem(compiler, kept.schema) == ""
    assert kept.dropped == (("", "not"), (".items", "$ref '#/not'"))


@pytest.mark.parametrize(
    "schema",
    [{"type": "any"}, {"type": None}, {"type": ["string", "foo"]}, {"type": []}, {"enum": "x"},
     {"required": True, "type": "object"}, {"properties": []}, {"properties": {"a": None}},
     {"properties": {"a": "string"}}, {"$ref": "https://example.com/x"}, {"$ref": "#/$defs/no"},
     {"$ref": 5}, {"minLength": -1}, {"maxLength": "5"}, {"maxLength": 10**12}, {"minimum": "5"},
     {"multipleOf": 0}, {"pattern": "("}, {"pattern": 5}, {"format": 5}, {"anyOf": {}},
     {"anyOf": []}, {"anyOf": [5]}, {"items": None}, {"items": 5}, {"additionalProperties": "x"},
     {"required": None}, {"prefixItems": {}}, {"$id": "::"}, {"patternProperties": {"(": TEXT}},
     {"minProperties": 2, "properties": {"a": TEXT}},
     {"allOf": [{"minProperties": 1}, {"properties": {"a": {}}}]}],
    ids=json.dumps,
)  # fmt: skip
def test_malformed_keywords_are_dropped(compiler: Compiler, schema: dict[str, Any]) -> None:
    whole = {"type": "object", "properties": {"v": schema, "w": TEXT}, "required": ["w"]}
    kept = relaxed(whole)
    assert kept.dropped or "$id" in schema
    assert problem(compiler, kept.schema) == ""
    assert not accepts(compiler, kept.schema, {"w": 5})  # the others are enforced
    assert accepts(compiler, kept.schema, {"w": "x"})


@pytest.mark.parametrize(
    ("patterns", "is_kept"),
    [(["^a", "^b"], True), (["^a", "^ab"], False), (["^.*$", "^x-"], False), (["a", "b"], False),
     (["^x-", "^y-", "^x-z"], False), (["^a$", "^b"], True), (["^[a-z]+$", "^[0-9]+$"], True)],
)  # fmt: skip
def test_expressions_for_names_must_be_disjoint(
    compiler: Compiler, patterns: list[str], is_kept: bool
) -> None:
    properties = dict.fromkeys(patterns, TEXT)
    schema = {"type": "object", "patternProperties": properties, "additionalProperties": False}
    assert (problem(compiler, schema) == "") is is_kept
    kept = relaxed(schema)
    assert (kept.schema is schema) is is_kept
    assert problem(compiler, kept.schema) == ""


@pytest.mark.parametrize("name", [*FORMATS_OF_DRAFTS, *OTHER_FORMATS])
def test_the_formats_that_are_enforced(compiler: Compiler, name: str) -> None:
    schema = {"type": "string", "format": name}
    assert (problem(compiler, schema) == "") is (name in FORMATS)
    assert problem(compiler, relaxed(schema).schema) == ""
    number = {"type": "integer", "format": name}
    assert relaxed(number).schema is number


def test_expressions_that_cannot_be_enforced_are_known(compiler: Compiler) -> None:
    """What is said to be enforceable compiles; random expressions."""
    draw = random.Random(5)
    atoms = ["a", "b", "^", "$", "|", "(", ")", "(?:", "(?=", "(?!", "(?<=", "(?<n>", "(?P<m>",
             "(?i)", "(?>", "[", "]", "[^", "-", "z", "&&", "*", "+", "?", "{2}", "{1,3}", "{3,1}",
             "{", "}", "\\d", "\\b", "\\w", ".", "\\.", "\\u0041", "\\ud83d", "\\x41", "\\p{L}",
             "\\p{No such}", "\\1", "\\A", "\\z", "\\Z", "\\-", "é", " ", "/", "\\/", "[a-z]",
             "[^0-9]", "[[:alpha:]]"]  # fmt: skip
    num_enforceable = 0
    for _ in range(3000):
        pattern = "".join(draw.choices(atoms, k=draw.randint(1, 8)))
        if is_enforceable(pattern):
            num_enforceable += 1
            found = problem(compiler, {"type": "string", "pattern": pattern})
            assert not found or "empty" in found or "no text" in found, (pattern, found)
    assert num_enforceable > 300
    for pattern in (r"^\d{4}-\d{2}$", r"^[A-Z][\w.-]*$", r"^(?:a|b)+$", r"\S+@\S+\.\w{2,}",
                    r"^[^\\/:*?\"<>|]+$", r"(https?)://", r"(?i)^yes|no$", r"\p{Lu}"):  # fmt: skip
        assert is_enforceable(pattern)
        assert problem(compiler, {"type": "string", "pattern": pattern}) == ""
    for pattern in (r"^(?!-)[a-z]+$", r"(?<=a)b", r"\bfoo\b", r"(a)\1", r"a\Z", r"(?>a)", "(",
                    "[z-a]", "a{2,1}", "*", r"\cA", "a^b"):  # fmt: skip
        assert not is_enforceable(pattern)


LIMITS = (0, 1, 2**31 - 1, 2**31, 2**53 - 1, 10**17, 10**18 - 1, 2**62, 2**63 - 1025, 2**63 - 1,
          2**63, 2**64 - 1, 1e19, 1e100, 1.7976931348623157e308, 0.5, 1e-9, 1e-12, 1e-60, 1e-100,
          5e-324, 0.01, 3.141592653589793, 604800, 86400)  # fmt: skip
"""Numbers that other languages have as the ends of their types, and others that people write."""


@pytest.mark.parametrize("name", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize("kind", ["integer", "number", None])
def test_bounds_of_every_size_are_answered(compiler: Compiler, name: str, kind: str | None) -> None:
    """C#, Go and Rust write the ends of their types into schemas: 64 bits, and 1.8e308."""
    kinds = {} if kind is None else {"type": kind}
    for bound in (*LIMITS, *(-limit for limit in LIMITS)):
        kept = relaxed({"properties": {"v": {**kinds, name: bound}}, "required": ["v"]})
        assert problem(compiler, kept.schema) == "", bound
        assert len(kept.dropped) == (name not in kept.schema["properties"]["v"])
    kept = relaxed({"type": "integer", "minimum": 3, "maximum": 2**63 - 1})
    assert kept.dropped == ()
    assert not accepts(compiler, kept.schema, -2)


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_multiples_of_every_size_are_answered(compiler: Compiler, kind: str) -> None:
    multiples = (*LIMITS, -3, 5, 10, 60, 1000, 1024, 65536, 10**6, 42 * 10**8, 777 * 10**6, 2**20,
                 2**24, 99_991, 123_456_789.5)  # fmt: skip
    enforced = []
    for multiple in multiples:
        kept = relaxed({"type": kind, "multipleOf": multiple})
        assert problem(compiler, kept.schema) == "", multiple
        enforced += [multiple] * (not kept.dropped)
    assert {1, 5, 10, 60, 1000, 1024, 65536, 10**6, 86400, 0.01, 0.5, 1e-9} <= set(enforced)


@pytest.mark.parametrize(
    "schema",
    [{"const": -(2**63)}, {"enum": ["a", -(2**63) + 1]}, {"enum": [{"a": [-(2**63)]}]},
     {"minLength": 2**63}, {"minItems": 2**64 - 1}, {"maxItems": 10**12}],
    ids=json.dumps,
)  # fmt: skip
def test_values_that_end_the_compiler_are_dropped(schema: dict[str, Any]) -> None:
    """Some of them end a process; so this asks whether they are dropped, without compiling."""
    [keyword] = schema
    if keyword in ("const", "enum", "minLength"):
        assert keyword in relaxed(schema).dropped[0].keyword
        assert relaxed(schema).schema == {}


def recursive(child: Any) -> dict[str, Any]:
    node = {"type": "object", "properties": {"v": TEXT, "c": child}, "required": ["v"]}
    return {"$ref": "#/$defs/n", "$defs": {"n": node, "t": TEXT}}


SELF = {"$ref": "#/$defs/n"}
FORBIDDING = ("additionalProperties", "allOf", "anyOf", "const", "enum", "items", "maxLength",
              "minItems", "minLength", "oneOf", "pattern", "properties", "required",
              "type")  # fmt: skip


@over("keyword", [*sorted(VOCABULARY.keys() - {"$ref"}), "nullable", "x-order", "optional", "xml"])
def test_a_schema_may_hold_itself_beside_any_keyword(compiler: Compiler, keyword: str) -> None:
    """llguidance merges a `$ref` with what stands beside it, for ever if that is itself."""
    value = VOCABULARY.get(keyword, (True, None))[0]
    children = [{keyword: value, **SELF}, {keyword: value, "anyOf": [SELF, {"type": "null"}]}]
    for child in children:
        kept = relaxed(recursive(child))
        assert problem(compiler, kept.schema) == ""
        assert accepts(compiler, kept.schema, {"v": "x", "c": {"v": "y", "c": {"v": "z"}}})
        assert not accepts(compiler, kept.schema, {"v": "x", "c": {"v": 5}})  # itself is kept
        if keyword in FORBIDDING and "anyOf" not in child:
            assert kept.dropped[0].path == ".$defs.n.properties.c"


@pytest.mark.parametrize(
    ("child", "lost"),
    [({"allOf": [SELF], "nullable": True}, []),
     ({"allOf": [SELF, {"required": ["c"]}]}, ["[1]"]),
     ({"allOf": [{"required": ["c"]}, {"anyOf": [SELF, {"type": "null"}]}]}, ["[0]"]),
     ({"type": ["object", "null"], "anyOf": [SELF, {"type": "null"}]}, ["type"]),
     ({"type": "object", "oneOf": [SELF]}, ["type 'object'"]),
     ({"type": "array", "items": {**SELF, "type": "object"}}, ["type 'object'"])],
    ids=json.dumps,
)  # fmt: skip
def test_a_schema_may_hold_itself_in_lists(
    compiler: Compiler, child: dict[str, Any], lost: list[str]
) -> None:
    kept = relaxed(recursive(child))
    assert problem(compiler, kept.schema) == ""
    assert [one.keyword for one in kept.dropped] == lost


def test_only_what_leads_back_is_opened(compiler: Compiler) -> None:
    derived = {"allOf": [{"$ref": "#/$defs/base"}, {"properties": {"x": {"type": "integer"}}}]}
    child = {"anyOf": [{"$ref": "#/$defs/derived"}, {"type": "null"}], "nullable": True}
    base = {"type": "object", "properties": {"child": child, "v": TEXT}}
    whole = {"$ref": "#/$defs/derived", "$defs": {"base": base, "derived": derived}}
    kept = relaxed(whole)
    assert kept.dropped == ()
    assert problem(compiler, kept.schema) == ""
    assert not accepts(compiler, kept.schema, {"child": {"v": "a", "x": "text"}})
    plain = {"$ref": "#/$defs/t", "maxLength": 3, "nullable": True, "$defs": {"t": TEXT}}
    assert relaxed(plain).schema is plain


@pytest.mark.parametrize(
    "loop",
    [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"allOf": [{"$ref": "#/$defs/a"}]},
     {"anyOf": [{"$ref": "#/$defs/b"}]}, {"$ref": "#/$defs/a", "type": "integer"}],
    ids=json.dumps,
)  # fmt: skip
def test_references_that_only_mean_themselves_are_dropped(
    compiler: Compiler, loop: dict[str, Any]
) -> None:
    definitions = {"a": loop, "b": {"$ref": "#/$defs/a"}}
    whole = {"properties": {"v": {"$ref": "#/$defs/a"}}, "$defs": definitions, "required": ["v"]}
    kept = relaxed(whole)
    assert accepts(compiler, kept.schema, {"v": 5})
    assert kept.dropped


NAMED = {"a": {"type": "integer"}}


@pytest.mark.parametrize("dialect", [None, "http://json-schema.org/draft-07/schema#", "x:y"])
@pytest.mark.parametrize(
    ("schema", "reference"),
    [({"definitions": {"a": {"$id": "#foo", **NAMED["a"]}}}, "#foo"),
     ({"definitions": {"a": {"id": "#foo", **NAMED["a"]}}}, "#foo"),
     ({"$defs": {"a": {"$anchor": "foo", **NAMED["a"]}}}, "#foo"),
     ({"$id": "http://[::1", "$defs": NAMED}, "#/$defs/a"),
     ({"$id": "http://x:port/", "$defs": NAMED}, "#/$defs/a"),
     ({"$id": "http://x/y#z", "$defs": NAMED}, "#/$defs/a"),
     ({"$id": "http://x/y", "$defs": {"a": {"$id": "/a", **NAMED["a"]}}}, "http://x/y#/$defs/a"),
     ({"$id": "a b", "$defs": NAMED}, "#/$defs/a")],
)  # fmt: skip
def test_names_of_schemas_are_read_as_they_were_meant(
    compiler: Compiler, dialect: str | None, schema: dict[str, Any], reference: str
) -> None:
    """Anchors of each draft, and ids that are no addresses, around a schema with an id of its own
    (as jsonschema.net writes them)."""
    inner = {"$id": "/properties/v", "properties": {"w": {"$ref": reference}}, "required": ["w"]}
    if not reference.startswith("#"):
        del inner["$id"]
    whole = {"type": "object", "properties": {"v": inner}, "required": ["v"], **schema}
    kept = relaxed(whole if dialect is None else {"$schema": dialect, **whole})
    assert kept.dropped == ()
    assert accepts(compiler, kept.schema, {"v": {"w": 5}})
    assert not accepts(compiler, kept.schema, {"v": {"w": "text"}})


def test_the_work_is_bounded() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"not": {}} for i in range(5000)}}
    kept = relaxed(many)
    assert len(kept.dropped) == MAX_NAMED
    assert all(one == {} for one in kept.schema["properties"].values())
    deep: Any = {"uniqueItems": True}
    for _ in range(50_000):
        deep = {"items": deep}
    assert relaxed(deep).schema is deep
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}", "type": "object"} for i in range(20_000)}
    chain["n20000"] = {"$ref": "#/$defs/n0", "type": "object"}
    assert len(relaxed({"$ref": "#/$defs/n0", "$defs": chain}).dropped) == MAX_NAMED
    cycle = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#"}, {"not": {}}]}}}
    assert relaxed(cycle).dropped == ((".$defs.a.anyOf[1]", "not"),)
    assert is_enforceable("(" * 100_000 + ")" * 100_000)
    schema: Any
    for schema in (True, False, None, 5, "x", []):
        assert relaxed(schema).schema is schema
