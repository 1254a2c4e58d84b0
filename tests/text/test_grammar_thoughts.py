"""Tests of grammars that apply after the reasoning: the text that is allowed before them."""

from __future__ import annotations

import json
import random

import pytest

from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.grammars.grammar_thoughts import BehindThoughts
from infer.types.grammar import Grammar
from tests.support.doubles import small_tokenizer

OPEN, CLOSE = "<think>", "</think>"
OBJECT = Grammar.json(
    {
        "type": "object",
        "properties": {"a": {"enum": [1, 22]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    tokenizer = small_tokenizer()
    return Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size + 3))


def behind(compiler: Compiler, opening: str, grammar: Grammar = OBJECT) -> BehindThoughts:
    constraint = compiler.constraint(grammar)
    return BehindThoughts(constraint, compiler.token_bytes(), opening, CLOSE)


def ids(text: str) -> list[int]:
    return small_tokenizer().encode(text, add_special_tokens=False)


def written(constraint: BehindThoughts, text: str) -> bool:
    """Whether the constraint allows the text; each token must be allowed before it is taken."""
    done = False
    for token in ids(text):
        if done or constraint.forbidden()[token]:
            return False
        done = constraint.take(token)
    return done


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        '<think></think>{"a": 22}',
        '<think>\nIt is {"a": 5}, < or </ think>\n</think>{"a": 1}',
        "<think>é😀" + "<<</thin</think>" + '{"a": 22}',
    ],
)
def test_with_and_without_thoughts(compiler: Compiler, text: str) -> None:
    assert written(behind(compiler, OPEN), text)
    inside = text.removeprefix(OPEN)
    assert written(behind(compiler, ""), inside) == (inside != text)


@pytest.mark.parametrize(
    "text",
    ["<", "Hm", "<thi{", '<think>Hm</think>so {"a": 1}', '</think>{"a": 1}', '{"a": 5}', "<|end|>"],
)
def test_nothing_else_may_stand_there(compiler: Compiler, text: str) -> None:
    constraint = behind(compiler, OPEN)
    assert not written(constraint, text + '{"a": 1}')


def test_an_end_is_not_within_thoughts(compiler: Compiler) -> None:
    forbidden = behind(compiler, "").forbidden().nonzero()[0].tolist()
    assert forbidden == sorted(small_tokenizer().eos_token_ids) != []


def test_it_is_a_function_of_the_tokens(compiler: Compiler) -> None:
    """The state does not depend on what was followed before, nor on how tokens were divided."""
    tokens = ids('<think>Hm, </think>{"a": 22}')
    constraint, dice = behind(compiler, OPEN), random.Random(1)
    expected = []
    for n in range(len(tokens)):
        fresh = behind(compiler, OPEN)
        fresh.follow(tokens[:n])
        expected.append(fresh.forbidden().tolist())
    for _ in range(40):
        n = dice.randrange(len(tokens))
        constraint.follow(tokens[:n])
        assert constraint.forbidden().tolist() == expected[n], n


def test_a_grammar_that_may_begin_like_thoughts(compiler: Compiler) -> None:
    tag = Grammar.regex("<t[a-z]{1,3}>")
    for text in ("<tab>", "<think>x</think><tab>", "<thi>"):
        assert written(behind(compiler, OPEN, tag), text), text
    assert not written(behind(compiler, OPEN, tag), "<think><tab>")


def test_a_token_that_closes_and_speaks_is_not_taken() -> None:
    """In a vocabulary with a token `>{`, that token would hide the `{` from the grammar."""
    from infer.text.grammars.compiler import TokenBytes

    pieces = [
        b"a",
        b"</",
        b"think",
        b">",
        b">{",
        b">\n",
        b"</think>",
        b"</think>\n\n",
        b"</think>{",
    ]

    class Free:
        thread = 0

        def follow(self, tokens: list[int]) -> None: ...
        def take(self, token: int) -> bool:
            return False

    constraint = BehindThoughts(Free(), TokenBytes(pieces, 12, [0]), "", CLOSE)  # type: ignore[arg-type]
    assert constraint.forbidden().nonzero()[0].tolist() == [0, 8]
    constraint.follow([1, 2])
    assert constraint.forbidden().nonzero()[0].tolist() == [0, 4, 8]


def test_random_walks_end_in_what_the_grammar_says(compiler: Compiler) -> None:
    """Random allowed tokens are taken until the reasoning is closed and the answer complete."""
    dice, eos = random.Random(3), set(small_tokenizer().eos_token_ids)
    for opening in (OPEN, ""):
        for _ in range(20):
            constraint, taken = behind(compiler, opening), list[int]()
            for _ in range(dice.randrange(30)):
                allowed = (~constraint.forbidden()).nonzero()[0].tolist()
                taken.append(dice.choice(allowed[: compiler.token_bytes().num_logits - 3]))
                if constraint.take(taken[-1]):
                    break
            else:
                for _ in range(300):
                    if constraint.is_inside:
                        taken += ids(CLOSE)
                        constraint.follow(taken)
                    allowed = (~constraint.forbidden()).nonzero()[0].tolist()
                    taken.append(dice.choice([each for each in allowed if each not in eos]))
                    if constraint.take(taken[-1]):
                        break
            text = small_tokenizer().decode(taken)
            answer = text.rpartition(CLOSE)[2]
            assert json.loads(answer)["a"] in (1, 22), text
