"""The bytes of tokens equal those that llguidance reads from the tokenizer's JSON."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from infer.text.grammars.compiler import Compiler, Vocabulary, read_pieces
from infer.text.grammars.token_pieces import TokenPieces, token_pieces
from infer.types.grammar import Grammar
from tests.support import tokenizer_families

SPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
WORDS = ["<x>", "[x]", "foo", "<|x|>", "< a >", "<>", "a>", "\n<a>", "</x>", "▁bar", " baz", "é"]
WORDS += ["é x", "  ", "Ġq", "日本", "Ġ日", "<é>", "[PAD]", "<a", "x\x00y", "\xa0", "a\xadb"]
ODD = ["<div>", "▁x", "x▁▁y", "Ġy", "<>", "<0x41>", "<0xab>", "<0xFF>", "ÿ"]


def families() -> dict[str, tokenizers.Tokenizer]:
    names = ["llama2", "gemma3", "llama3", "qwen", "gpt2"]
    return {name: getattr(tokenizer_families, name)() for name in names}


def of_tokens(tokens: list[str], decoder: Any, step: int = 1) -> tokenizers.Tokenizer:
    vocab = {token: step * i for i, token in enumerate(["a", *tokens])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


def pieces_of(tokenizer: tokenizers.Tokenizer) -> TokenPieces | None:
    return token_pieces(tokenizer, tokenizer.get_vocab())


def same(tokenizer: tokenizers.Tokenizer) -> TokenPieces:
    found = pieces_of(tokenizer)
    assert found is not None
    size = max(tokenizer.get_vocab().values()) + 1
    wanted = read_pieces(tokenizer.to_str(), size, [0])
    assert found == wanted
    return found


@pytest.mark.parametrize("name", ["llama2", "gemma3", "llama3", "qwen", "gpt2"])
def test_families(name: str) -> None:
    tokenizer = families()[name]
    same(tokenizer)
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    special = [f"S{word}" for word in WORDS]
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    pieces, _ = same(tokenizer)
    assert "日本".encode() in pieces


def test_tokens_that_look_like_something_else() -> None:
    assert b"A" in same(of_tokens(ODD, SPACED)).pieces
    letters = [token for token in ODD if "▁" not in token]
    assert b"<0x41>" in same(of_tokens(letters, decoders.ByteLevel())).pieces
    assert b"\xff" not in same(of_tokens(letters, decoders.Sequence([decoders.ByteLevel()]))).pieces


def test_ids_without_tokens() -> None:
    """llguidance knows no token whose id is not below the number of tokens, and takes a hole for
    text. Here such a token has its bytes, and a hole stands for none."""
    dense, sparse = (pieces_of(of_tokens(ODD, SPACED, step)) for step in (1, 2))
    assert dense is not None
    assert sparse is not None
    assert sparse.pieces[::2] == dense.pieces
    assert sparse.pieces[1::2] == [b"<[%d]>" % i for i in range(1, 2 * len(ODD), 2)]
    assert sparse.special == sorted([*range(1, 2 * len(ODD), 2), *(2 * i for i in dense.special)])
    known = len(ODD) + 1
    read = read_pieces(of_tokens(ODD, SPACED, 2).to_str(), known, [0])
    assert read.pieces == sparse.pieces[:known]


@pytest.mark.parametrize(
    ("tokens", "decoder", "step"),
    [
        (["日"], decoders.ByteLevel(), 1),
        ([""], SPACED, 1),
        (["▁x"], decoders.Metaspace(), 1),
        (["x"], None, 1),
        (["x"], SPACED, 1000),
    ],
    ids=["a letter of no byte", "an empty token", "other spaces", "no decoder", "far ids"],
)
def test_what_is_not_known_is_left_to_llguidance(
    tokens: list[str], decoder: Any, step: int
) -> None:
    assert pieces_of(of_tokens(tokens, decoder, step)) is None


@pytest.mark.parametrize("name", ["<0xdeadbeef>", "<0xZZ>", "<0x"])
def test_a_token_that_is_named_like_a_byte_ends_nothing(name: str) -> None:
    """llguidance's own reading ends in a panic there."""
    tokens = [*map(chr, range(0x61, 0x7B)), name, "<end>"]
    tokenizer = of_tokens(tokens, SPACED)
    size = tokenizer.get_vocab_size()
    vocabulary = Vocabulary(tokenizer.to_str(), size, (size - 1,), size).read()
    assert not isinstance(vocabulary.tokenizer, str)
    problem, _ = Compiler(vocabulary).problem(Grammar.regex("[a-z]+"))
    assert problem == ""
