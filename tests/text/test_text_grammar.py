"""Tests of checking grammars: which are refused, with which message, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from infer.errors import RequestError
from infer.text.grammars.compiler import Vocabulary
from infer.text.untrusted.grammar_checker import GrammarChecker
from infer.types.grammar import Grammar
from tests.support.cases import timed
from tests.support.doubles import small_tokenizer


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    tokenizer = small_tokenizer()
    checker = GrammarChecker(lambda: Vocabulary.of(tokenizer, tokenizer.vocab_size))
    checker.check(Grammar.json())
    yield checker
    checker.close()


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


DOUBLING = "\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)), 'R60: "a"'])
REFUSED = [
    (Grammar.json("{"), "Expecting property name"),
    (Grammar.json("5"), "object or boolean"),
    (Grammar.json(False), "Unsatisfiable"),
    (Grammar.json({"type": "foo"}), "Invalid type"),
    (Grammar.json({"properties": 5}), "properties"),
    (Grammar.json({"enum": []}), "Unsatisfiable"),
    (Grammar.json({"type": "integer", "minimum": 5, "maximum": 1}), "Unsatisfiable"),
    (Grammar.json({"type": "string", "pattern": "("}), "regex"),
    (Grammar.json({"type": "string", "format": "nope"}), "Unknown format"),
    (Grammar.json({"not": {}}), "Unimplemented"),
    (Grammar.json({"$ref": "#"}), "no text satisfies it"),
    (Grammar.json({"$ref": "http://127.0.0.1:1/x"}), "not present"),
    (Grammar.json({"$ref": "file:///etc/passwd"}), "not present"),
    (Grammar.json("[" * 60000), "nested too deeply"),
    (Grammar.regex("("), "invalid regex"),
    (Grammar.regex("(?=a)"), "invalid regex"),
    (Grammar.regex(r"(a)\1"), "invalid regex"),
    (Grammar.regex(r"[^\s\S]"), "no text satisfies it"),
    (Grammar.regex("(" * 30000 + ")" * 30000), "invalid regex"),
    (Grammar.choice([]), "nothing to choose"),
    (Grammar.choice(["\ud800"]), "parsing string"),
    (Grammar.grammar(""), "No .root. rule"),
    (Grammar.grammar("start: start"), "no text satisfies it"),
    (Grammar.grammar("start: A\nA: B\nB: A"), "circular"),
    (Grammar.grammar("start: @other"), "unknown grammar"),
    (Grammar.grammar('%llguidance {"no_forcing": false}\nstart: "a"'), "options"),
    (Grammar.grammar("start: <|end_of_text|>"), "special token"),
    (Grammar.grammar("root ::= " + "(" * 20000 + '"a"' + ")" * 20000), "nested too deeply"),
    (Grammar.grammar("start: " + "(" * 20000 + '"a"' + ")" * 20000), "nested"),
    (Grammar.grammar(DOUBLING), "too big"),
]
ACCEPTED = [
    Grammar.json(),
    Grammar.json(True),
    Grammar.json(nested(30)),
    Grammar.json({"type": "string", "pattern": "(a{1000}){1000}"}),
    Grammar.json({"type": "array", "minItems": 10**18}),
    Grammar.json({"properties": {f"p{i}": {"type": "integer"} for i in range(1200)}}),
    Grammar.json({"oneOf": [{"const": 1}, {"type": "string"}]}),
    Grammar.json({"type": "object", "x-guidance": {"whitespace_flexible": 5}}),
    Grammar.regex(""),
    Grammar.regex("(a{1000}){1000}"),
    Grammar.regex("(((a?){1,50}){1,50}){1,50}"),
    Grammar.regex(r"/[/\n\\\"]+\d"),
    Grammar.choice(["", "a\"b\n", "日本"]),
    Grammar.choice(["a"] * 8000),
    Grammar.choice([f"{i:04d}" for i in range(2001)]),
    Grammar.json({"properties": {f"p{i}": {"type": "integer"} for i in range(2000)}}),
    Grammar.grammar('root ::= "a" | "b" root'),
    Grammar.grammar('start: a{100000}\na: "x"{100000}'),
    Grammar.grammar('start: e\ne: e e | "a" | "aa"'),
]  # fmt: skip


@timed(5)
@pytest.mark.parametrize(("grammar", "word"), REFUSED, ids=range(len(REFUSED)))
def test_a_grammar_is_refused(
    checker: GrammarChecker, grammar: Grammar, word: str, most_s: float
) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError, match=word) as caught:
        checker.check(grammar)
    assert time.perf_counter() - started < most_s
    error = caught.value
    assert (error.status, error.param) == (400, "grammar")
    assert "\n" not in error.message
    assert len(error.message) < 250


@timed(5)
@pytest.mark.parametrize("grammar", ACCEPTED, ids=range(len(ACCEPTED)))
def test_a_grammar_is_accepted_soon(
    checker: GrammarChecker, grammar: Grammar, most_s: float
) -> None:
    started = time.perf_counter()
    assert checker.check(grammar) > 0
    assert time.perf_counter() - started < most_s
