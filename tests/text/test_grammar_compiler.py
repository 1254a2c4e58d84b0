"""Tests of the masks of compiled grammars, against the tokens as the tokenizer itself has them."""

from __future__ import annotations

import re

import numpy as np
import pytest

from infer.models.hub import SHIPPED_FOLDER
from infer.text.grammars.compiler import Compiler, Vocabulary
from infer.text.tokenizer import Tokenizer
from infer.types.grammar import Grammar
from tests.support.doubles import small_tokenizer

EXTRA_LOGITS = 3


@pytest.mark.parametrize("pattern", ["[a-z ]+", "[^\n]+"])
@pytest.mark.parametrize("shipped", [False, True])
def test_a_mask_allows_the_tokens_that_match_and_no_control_token(
    shipped: bool, pattern: str
) -> None:
    tokenizer = Tokenizer.from_folder(SHIPPED_FOLDER) if shipped else small_tokenizer()
    vocabulary = Vocabulary.of(tokenizer, tokenizer.vocab_size + EXTRA_LOGITS)
    constraint = Compiler(vocabulary).constraint(Grammar.regex(pattern))
    before = constraint.forbidden()
    pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    texts = {
        token: piece.decode()
        for token, piece in enumerate(pieces)
        if piece and tokenizer.decode([token]) and _is_whole(piece)
    }
    assert len(texts) > 100
    wrong = [
        (token, text)
        for token, text in texts.items()
        if before[token] == bool(re.fullmatch(pattern, text))
    ]
    assert not wrong
    controls = [token for token in range(tokenizer.vocab_size) if not tokenizer.decode([token])]
    assert set(vocabulary.eos_token_ids) <= set(controls)
    assert before[controls].all()
    assert before[tokenizer.vocab_size :].all()

    constraint.take(next(token for token, text in texts.items() if text == "a"))
    after = constraint.forbidden()
    may_end = [token for token in controls if not after[token]]
    assert may_end == sorted(vocabulary.eos_token_ids)
    assert np.array_equal(np.delete(after, may_end), np.delete(before, may_end))


def _is_whole(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.regex("x" * 300 + "(?=a)"),
        Grammar.json({"type": "string", "pattern": "(?=a)b"}),
        Grammar.grammar("start: /(?=a)b/"),
    ],
)
def test_a_problem_with_a_regular_expression_has_its_cause(grammar: Grammar) -> None:
    tokenizer = small_tokenizer()
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    problem, _ = compiler.problem(grammar)
    assert "invalid regex: look-around" in problem
    assert "is not supported (in " in problem
    assert "\n" not in problem
    assert len(problem) < 300


@pytest.mark.parametrize("ids", ["<[5]>", "<[0-255]>", "<[1,3]>", "<[^5]>", "<[*]>", "<[ 5 ]>"])
@pytest.mark.parametrize("source", ["start: {}", 'start: "a" x\nx: {} | "b"', "root ::= {}"])
def test_a_grammar_names_no_token_by_its_id(source: str, ids: str) -> None:
    """The first ids of a vocabulary are often those of control tokens."""
    tokenizer = small_tokenizer()
    compiler = Compiler(Vocabulary.of(tokenizer, tokenizer.vocab_size))
    problem, _ = compiler.problem(Grammar.grammar(source.format(ids)))
    assert problem
