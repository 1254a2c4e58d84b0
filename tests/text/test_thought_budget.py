"""Tests of `ThoughtBudget`: reasoning ends when it has its tokens, as the model itself ends it."""

from __future__ import annotations

import random

import pytest

from infer.text.grammars.compiler import Compiler, Constraint, Vocabulary
from infer.text.grammars.grammar_thoughts import BehindThoughts
from infer.text.grammars.thought_budget import ThoughtBudget, Unconstrained
from infer.text.reasoning_tokens import ThoughtTokens
from infer.text.tools.formats import THOUGHTS
from infer.types.grammar import Grammar
from tests.support.doubles import small_tokenizer

MARKS = {"opened": ("", "</think>"), "not yet": ("<think>", "</think>")}
END = "\n</think>\n\n"


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = small_tokenizer()
    return Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size + 3))


def ids(text: str) -> tuple[int, ...]:
    return tuple(small_tokenizer().encode(text, add_special_tokens=False))


def bounded(
    compiler: Compiler, budget: int, marks: str = "opened", answer: Constraint | None = None
) -> ThoughtBudget:
    inner = answer or Unconstrained(compiler.width)
    return ThoughtBudget(inner, compiler.token_bytes(), MARKS[marks], budget, ids(END))


def continued(constraint: Constraint, said: str, num_tokens: int) -> str:
    """What is written behind `said`: the one allowed token while there is one, else an `x`."""
    tokens = list(ids(said))
    constraint.follow(tokens)
    for _ in range(num_tokens):
        allowed = (~constraint.forbidden()).nonzero()[0].tolist()
        tokens.append(allowed[0] if len(allowed) == 1 else ids("x")[0])
        constraint.take(tokens[-1])
    return small_tokenizer().decode(tokens)


@pytest.mark.parametrize("budget", [0, 1, 2, 7, 40])
@pytest.mark.parametrize("marks", MARKS)
def test_reasoning_ends_when_it_has_its_tokens(compiler: Compiler, budget: int, marks: str) -> None:
    opening = MARKS[marks][0]
    text = continued(bounded(compiler, budget, marks), opening, budget + 20)
    thought, found, answer = text.removeprefix(opening).partition("</think>")
    assert found
    assert thought == ("x" * (budget - 1) + "\n" if budget else "")
    assert answer.startswith("\n\nx")
    counted = ThoughtTokens(small_tokenizer(), THOUGHTS[0], inside=not opening)
    counted.push(ids(text))
    assert counted.count == budget


@pytest.mark.parametrize(
    ("budget", "said", "text"),
    [
        (4, "ab</thi", "ab</think>"),  # the mark that has been begun is written to its end
        (3, "ab<", "ab\n</think>"),  # `<` is a beginning, and here the last token but one
        (9, "ab</think>", "ab</think>xxx"),
        (2, "no thoughts", "no thoughtsxxx"),
    ],
)
def test_a_mark_that_was_begun(compiler: Compiler, budget: int, said: str, text: str) -> None:
    marks = "not yet" if said.startswith("no") else "opened"
    if said == "ab<":
        said = "ab"
    assert continued(bounded(compiler, budget, marks), said, 14).startswith(text)


def test_the_grammar_of_the_answer_holds_behind_it(compiler: Compiler) -> None:
    mark = ids("</think>")
    for marks in MARKS:
        inner = BehindThoughts(
            compiler.constraint(Grammar.choice(["yes"])), compiler.token_bytes(), *MARKS[marks]
        )
        constraint = ThoughtBudget(inner, compiler.token_bytes(), MARKS[marks], 3, mark)
        opening = MARKS[marks][0]
        assert continued(constraint, opening, 3 + len(mark) + 3) == f"{opening}xxx</think>yes"


@pytest.mark.parametrize("marks", MARKS)
def test_it_is_a_function_of_the_tokens(compiler: Compiler, marks: str) -> None:
    tokens = list(ids(continued(bounded(compiler, 6, marks), MARKS[marks][0], 25)))
    expected = []
    for n in range(len(tokens)):
        fresh = bounded(compiler, 6, marks)
        fresh.follow(tokens[:n])
        expected.append(fresh.forbidden().tolist())
    constraint, dice = bounded(compiler, 6, marks), random.Random(1)
    for _ in range(60):
        n = dice.randrange(len(tokens))
        constraint.follow(tokens[:n])
        assert constraint.forbidden().tolist() == expected[n], n
        assert constraint.num_allowed(tokens[n:]) == len(tokens) - n
        wrong = ids("y")[0]
        allowed = not expected[n][wrong]
        assert constraint.num_allowed([wrong]) == allowed
        assert constraint.copy().forbidden().tolist() == expected[n]
