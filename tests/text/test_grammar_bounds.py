"""Bounds of integers with which llguidance crashes, or which it does not keep."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.errors import RequestError
from infer.text.grammars.grammar_bounds import problem_of_bounds
from infer.text.untrusted.grammar_checker import GrammarChecker
from infer.types.grammar import Grammar

LARGE = 2**63
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"minimum": -LARGE, "maximum": -LARGE}, "maximum must be above"),
    ({"minimum": -2 * LARGE, "maximum": -LARGE - 5}, "maximum must be above"),
    ({"minimum": 1 - LARGE, "maximum": 1 - LARGE}, "maximum must be above"),
    ({"exclusiveMinimum": -1e308, "exclusiveMaximum": -1e19}, "exclusiveMaximum must be above"),
    ({"minimum": LARGE + 5, "maximum": 2 * LARGE}, "minimum must be below"),
    ({"exclusiveMinimum": LARGE - 1, "maximum": 2 * LARGE}, "exclusiveMinimum must be below"),
    ({"allOf": [{"minimum": -LARGE}, {"maximum": -LARGE}]}, "maximum must be above"),
    ({"const": -LARGE}, "an integer of const or enum must be above"),
    ({"enum": [1, {"a": [-LARGE]}]}, "an integer of const or enum must be above"),
]
MULTIPLE = {"multipleOf": 99991}
TOO_MANY: list[tuple[dict[str, Any], str]] = [
    ({"multipleOf": 999983}, "multipleOf 999983 needs an automaton of 999,983 remainders"),
    ({"multipleOf": 9999830}, "multipleOf 9999830 needs"),
    ({"multipleOf": 2**24}, "multipleOf 16777216 needs"),
    ({"multipleOf": 655360}, "multipleOf 655360 needs"),
    ({"multipleOf": 999.983}, "multipleOf 999.983 needs"),
    ({"multipleOf": 2**62 - 1}, "multipleOf 4611686018427387903 needs"),
    ({"anyOf": [MULTIPLE, {"multipleOf": 99989}]}, "multipleOf of one value needs"),
    ({**MULTIPLE, "allOf": [{"oneOf": [{"multipleOf": 11}]}]}, "multipleOf of one value needs"),
    ({"$ref": "#/$defs/a", "multipleOf": 11, "$defs": {"a": MULTIPLE}}, "multipleOf of one value"),
]
"""Automata that take seconds to make."""
ACCEPTED: list[dict[str, Any]] = [
    {"multipleOf": 399989},
    {"multipleOf": 2**18},
    {"multipleOf": 10**12},
    {"multipleOf": 0.000001},
    {"multipleOf": 0.999983},
    {"multipleOf": "x"},
    {"multipleOf": {"multipleOf": True}},
    {"multipleOf": 1e999},
    {"properties": {"a": MULTIPLE, "b": {"multipleOf": 99989}, "multipleOf": MULTIPLE}},
    {"anyOf": [{"multipleOf": 100}, {"multipleOf": 60}, {"multipleOf": 7}]},
    {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"multipleOf": 3}]}}, "$ref": "#/$defs/a"},
    {"minimum": 0, "maximum": 2 * LARGE},
    {"minimum": -1e18, "maximum": 1e18},
    {"minimum": 2**62, "exclusiveMaximum": LARGE},
    {"properties": {"maximum": {"type": "integer", "maximum": 5}}},
    {"enum": [{"minimum": 1e300}], "default": {"minimum": 1e300}},
    {"exclusiveMaximum": True, "maximum": "x"},
]


@pytest.mark.parametrize(("schema", "words"), REFUSED + TOO_MANY)
def test_bounds_beyond_64_bits(schema: dict[str, Any], words: str) -> None:
    definitions = {"$defs": schema.get("$defs", {})}
    for whole in (schema, {"properties": {"a": {"items": [schema]}}, **definitions}):
        text = json.dumps(whole | {"type": "integer"})
        assert problem_of_bounds(Grammar.json(text)).startswith(words)
        assert problem_of_bounds(Grammar.grammar(f"start: %json {text}")).startswith(words)


@pytest.mark.parametrize("schema", ACCEPTED)
def test_bounds_within(schema: dict[str, Any]) -> None:
    assert problem_of_bounds(Grammar.json(schema)) == ""


@pytest.mark.parametrize("text", ["{", "[" * 60_000, "start: %json {", "true", '{"maximum": []}'])
def test_what_is_no_schema(text: str) -> None:
    assert problem_of_bounds(Grammar.json(text)) == ""
    assert problem_of_bounds(Grammar.grammar(text)) == ""


def test_they_do_not_end_the_checker(checker: GrammarChecker) -> None:
    checker.check(Grammar.choice(["a"]))
    for schema, words in REFUSED + TOO_MANY:
        with pytest.raises(RequestError, match=words):
            checker.check(Grammar.json({"type": "integer"} | schema))
    assert checker.workers.num_deaths == 0
