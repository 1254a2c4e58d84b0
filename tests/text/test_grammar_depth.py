"""Tests of the nesting depth of grammars: exact near the limit, and found without recursion."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from infer.text.grammars.grammar_depth import MAX_DEPTH, is_too_deep, schema_depth
from infer.types.grammar import Grammar
from tests.support.cases import timed


def rules(count: int, spell: str = "r{}", is_: str = ":") -> str:
    """A chain of `count` rules."""
    name = spell.format
    lines = [f'{name(i)}{is_} "a" {name(i + 1)}' for i in range(count - 2)]
    return "\n".join([f"start{is_} {name(0)}", *lines, f'{name(count - 2)}{is_} "b"'])


def references(count: int, step: Callable[[dict[str, str]], Any]) -> dict[str, Any]:
    """A chain of `count` `$ref`s."""
    chain = {f"a{i}": step({"$ref": f"#/$defs/a{i - 1}"}) for i in range(1, count)}
    return {"$defs": {"a0": {"type": "string"}, **chain}, "$ref": f"#/$defs/a{count - 1}"}


STEPS: dict[str, Callable[[dict[str, str]], Any]] = {
    "items": lambda ref: {"items": ref},
    "anyOf": lambda ref: {"anyOf": [ref]},
    "allOf": lambda ref: {"allOf": [ref, {"type": "array"}]},
    "properties": lambda ref: {"properties": {"a": ref}},
    "bare": lambda ref: ref,
}


@pytest.mark.parametrize("text", [rules(4), rules(MAX_DEPTH), rules(400, "R_{}-x")])
def test_a_chain_of_rules_that_is_not_too_long(text: str) -> None:
    assert not is_too_deep(Grammar.grammar(text))


@pytest.mark.parametrize(
    "text",
    [
        rules(MAX_DEPTH + 1),
        rules(3000, "R{}"),
        rules(900, is_=" ::="),
        "\n".join(reversed(rules(900).splitlines())),
        rules(900).replace('"a" ', '("x" | '). replace("\nr898", "\n?r898").replace(":", ".2 :"),
        "start: " + "(" * 501 + '"a"' + ")" * 501,
        'start: "x" %json ' + json.dumps(references(900, STEPS["items"])),
    ],
)  # fmt: skip
def test_a_grammar_that_is_too_deep(text: str) -> None:
    assert is_too_deep(Grammar.grammar(text))


def test_many_rules_that_are_not_deep() -> None:
    wide = "start: " + " | ".join(f"r{i}" for i in range(3000))
    wide += "".join(f'\nr{i}: "{i}" start?' for i in range(3000))
    assert not is_too_deep(Grammar.grammar(wide))


@pytest.mark.parametrize("how", STEPS)
def test_references(how: str) -> None:
    step = STEPS[how]
    assert is_too_deep(Grammar.json(references(1200, step))) == (how != "bare")
    assert not is_too_deep(Grammar.json(references(200, step)))
    if how == "items":
        # The schema itself is a level too; $defs is beside the chain and adds none.
        assert schema_depth(references(400, step)) == 401


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}},
        {"$defs": {"a~/b c": {"items": {"$ref": "#/$defs/a~0~1b%20c"}}}, "$ref": "#/$defs/nope/0"},
        {"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}, {"$ref": 5}, {"$ref": "#/x/9"}]},
        {"$ref": "http://127.0.0.1:1/x"},
        5,
        [],
    ],
)
def test_cycles_and_strange_references(schema: Any) -> None:
    assert schema_depth(schema) < 10


def test_anchors_and_ids_are_followed() -> None:
    chain = {
        f"a{i}": {"$anchor": f"n{i}", "items": {"$ref": f"#n{i + 1}"}} for i in range(MAX_DEPTH + 1)
    }
    assert schema_depth({"$defs": chain, "$ref": "#n0"}) > MAX_DEPTH
    named = {
        f"a{i}": {"$id": f"n{i}", "items": {"$ref": f"n{i + 1}"}} for i in range(MAX_DEPTH + 1)
    }
    assert schema_depth({"$defs": named, "$ref": "n0"}) > MAX_DEPTH


def test_ten_thousand_on_a_small_stack() -> None:
    """The thread has a stack of 256 KiB, and Python's recursion limit leaves few frames."""
    found: list[bool] = []

    def work() -> None:
        for text in (rules(10_000), 'start: %json {"a": ' + "[" * 60_000):
            found.append(is_too_deep(Grammar.grammar(text)))
        found.append(is_too_deep(Grammar.json(references(10_000, STEPS["items"]))))
        found.append(is_too_deep(Grammar.json("[" * 60_000)))

    before, frames = threading.stack_size(256 * 1024), sys.getrecursionlimit()
    try:
        thread = threading.Thread(target=work)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found == [True] * 4
    assert sys.getrecursionlimit() == frames


@timed(2)
@pytest.mark.parametrize(
    "text",
    ['%json {"' * 8000, "a:" * 30_000, "(" * 60_000, "a" * 60_000, "a{" * 30_000, "a[x" * 20_000],
)
def test_the_time_is_linear(text: str, most_s: float) -> None:
    started_s = time.process_time()
    is_too_deep(Grammar.grammar(text))
    assert time.process_time() - started_s < most_s
