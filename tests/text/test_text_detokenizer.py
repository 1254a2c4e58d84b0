"""Tests of detokenizers: the streamed pieces are together exactly the text of all ids."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from infer.text.detokenizer import (
    ByteLevelDetokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from infer.text.tokenizer import Tokenizer
from tests.support.cases import over
from tests.support.text_checkpoints import (
    KINDS,
    Pair,
    byte_level,
    gemma_like,
    llama2_like,
    quick,
    save,
    wordpiece,
)

UNICODE = [
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 🏳️‍🌈",
    "e\u0301 a\u0308 combining, ﷽, \u200d\u200d",
    "mixed 日本語テキスト and 中文。 ﬁne",
    "\U0010ffff \ufffd \ufeff bom",
    "line\r\nline\ttab\x00nul",
]


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> list[str]:
    detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


def check(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = stream(tokenizer, ids, skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer.from_folder(save(tmp_path_factory.mktemp(name), KINDS[name]()))
        for name in KINDS
    }


def test_each_kind_of_decoder_gets_the_exact_class(by_kind: dict[str, Tokenizer]) -> None:
    kinds = {name: type(tok.new_detokenizer()) for name, tok in by_kind.items()}
    assert kinds == {
        "byte_level": ByteLevelDetokenizer,
        "llama2": FallbackDetokenizer,
        "gemma": FallbackDetokenizer,
        "unigram": FallbackDetokenizer,
    }


@over("text", UNICODE)
@over("skip", [True, False])
def test_unicode_texts(pair: Pair, text: str, skip: bool) -> None:
    check(pair.ours, pair.ours.encode(text), skip)


@quick
@given(text=st.text(st.characters(exclude_categories=["Cs"])), skip=st.booleans())
def test_random_texts(pair: Pair, text: str, skip: bool) -> None:
    check(pair.ours, pair.ours.encode(text), skip)


@quick
@given(ids=st.lists(st.integers(0, 520), max_size=40), skip=st.booleans())
def test_random_ids(pair: Pair, ids: list[int], skip: bool) -> None:
    """Invalid bytes, special tokens within characters, ids that do not exist."""
    check(pair.ours, ids, skip)


@functools.cache
def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """The first ordinary token with each sequence of bytes; for one byte its byte token."""
    found: dict[bytes, int] = {}
    for token_id in range(tokenizer.vocab_size):
        spelled = tokenizer.token_bytes(token_id)
        if spelled and token_id not in tokenizer.special_token_ids:
            found.setdefault(spelled, token_id)
    return found


bytes_of_note = st.sampled_from([0x20, 0x41, 0x80, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED])
more_bytes = st.sampled_from([0xA0, 0xF0, 0x9F, 0x99, 0x82, 0xF4, 0x90, 0xFF, 0xC0, 0xE0])


@quick
@given(
    data=st.lists(bytes_of_note | more_bytes | st.just(-1) | st.just(-2), max_size=24),
    skip=st.booleans(),
)
@pytest.mark.parametrize("kind", ["byte_level", "llama2", "gemma"])
def test_sequences_of_byte_tokens(
    by_kind: dict[str, Tokenizer], kind: str, data: list[int], skip: bool
) -> None:
    """Many kinds of invalid UTF-8, with special (-1) and ordinary (-2) tokens in between."""
    tokenizer = by_kind[kind]
    by_bytes = _ids_by_bytes(tokenizer)
    special = min(tokenizer.special_token_ids)
    word = next(token for spelled, token in by_bytes.items() if spelled[1:].isalpha())
    others = {-1: special, -2: word}
    check(tokenizer, [others[b] if b < 0 else by_bytes[bytes([b])] for b in data], skip)


@quick
@given(ids=st.lists(st.integers(0, 520), max_size=30), skip=st.booleans())
def test_every_piece_is_final(pair: Pair, ids: list[int], skip: bool) -> None:
    """The pieces are a prefix of the text of any continuation; two continuations are tried."""
    detokenizer = pair.ours.new_detokenizer(skip_special_tokens=skip)
    given_so_far = ""
    for end, token_id in enumerate(ids, start=1):
        given_so_far += detokenizer.push(token_id)
        for more in ([], ids[::-1]):
            text = pair.ours.decode(ids[:end] + more, skip_special_tokens=skip)
            assert text.startswith(given_so_far)


@pytest.mark.parametrize("skip", [True, False])
def test_every_token_alone_and_all_in_a_row(pair: Pair, skip: bool) -> None:
    everything = list(range(pair.ours.vocab_size + 3))
    check(pair.ours, everything, skip)
    check(pair.ours, everything[::-1], skip)
    for token_id in everything:
        check(pair.ours, [token_id], skip)


@pytest.mark.parametrize("build", [byte_level, gemma_like])
def test_ids_without_a_token_have_no_text(tmp_path: Path, build: Any) -> None:
    save(tmp_path, build())
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["vocab"]["faraway"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    check(Tokenizer.from_folder(tmp_path), [900, 899, 900], True)


def test_stripping_goes_on_while_nothing_is_left(tmp_path: Path) -> None:
    backend = llama2_like()
    backend.decoder = DECODERS["strip two"]
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
    space = tokenizer.encode(" ", add_special_tokens=False)
    byte = _ids_by_bytes(tokenizer)[b"the"[:1]]
    spaces = [i for i in range(tokenizer.vocab_size) if tokenizer.token_text(i) == " "]
    assert space
    for one in spaces:
        for ids in ([one, one, one, byte], [one, byte, one], [one], [byte, one]):
            check(tokenizer, ids, True)


def test_an_unknown_decoder_of_bytes_gives_whole_characters(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("zz", "z")])
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
    assert isinstance(tokenizer.new_detokenizer(), WindowDetokenizer)
    ids = tokenizer.encode("a🙂b 数字 x", add_special_tokens=False)
    pieces = stream(tokenizer, ids, True)
    assert "".join(pieces) == "a🙂b 数字 x"
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream(tokenizer, ids[:3], True)[-1] == "\ufffd"


def test_a_character_is_given_whole_and_at_once(by_kind: dict[str, Tokenizer]) -> None:
    tokenizer = by_kind["byte_level"]
    ids = tokenizer.encode("a🙂b", add_special_tokens=False)
    assert [piece for piece in stream(tokenizer, ids, True) if piece] == ["a", "🙂", "b"]
    assert [piece for piece in stream(tokenizer, ids[:3], True) if piece] == ["a", "\ufffd"]


@pytest.mark.parametrize("kind", ["llama2", "gemma"])
def test_byte_tokens_are_given_when_their_run_ends(
    by_kind: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = by_kind[kind]
    ids = tokenizer.encode("the 🙂 dog", add_special_tokens=False)
    pieces = stream(tokenizer, ids, True)
    assert "".join(pieces) == "the 🙂 dog"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # no text is held back longer


@quick
@given(ids=st.lists(st.integers(0, 16), max_size=20), skip=st.booleans())
def test_decoders_of_another_kind(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], skip: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "wordpiece"
    tokenizer = _loaded(folder if folder.exists() else save(folder, wordpiece()))
    assert isinstance(tokenizer.new_detokenizer(), WindowDetokenizer)
    check(tokenizer, ids, skip)


DECODERS = {
    "strip two": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 2, 0)]
    ),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "strip right": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip("e", 0, 0)]
    ),
    "no fuse": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()]),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
@quick
@given(ids=st.lists(st.integers(0, 520), max_size=30), skip=st.booleans())
def test_variants_of_decoders(
    tmp_path_factory: pytest.TempPathFactory, name: str, ids: list[int], skip: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / name
    if not folder.exists():
        backend = llama2_like()
        backend.decoder = DECODERS[name]
        save(folder, backend)
    tokenizer = _loaded(folder)
    assert isinstance(tokenizer.new_detokenizer(), FallbackDetokenizer)
    check(tokenizer, ids, skip)


@functools.cache
def _loaded(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_a_decoder_that_takes_off_the_end_is_left_to_the_library(tmp_path: Path) -> None:
    backend = gemma_like()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    )
    tokenizer = Tokenizer.from_folder(save(tmp_path, backend))
    assert isinstance(tokenizer.new_detokenizer(), WindowDetokenizer)


@pytest.mark.parametrize("build", [byte_level, gemma_like])
def test_cost_of_a_push_does_not_grow(tmp_path: Path, build: Any) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, build()))
    ids = tokenizer.encode("The quick brown fox. " * 50, add_special_tokens=False)
    detokenizer = tokenizer.new_detokenizer()

    def seconds() -> float:
        start = time.perf_counter()
        for token_id in ids:
            detokenizer.push(token_id)
        return time.perf_counter() - start

    first = min(seconds() for _ in range(5))
    for _ in range(100):
        seconds()
    later = min(seconds() for _ in range(5))
    assert later < 5 * first + 1e-3
