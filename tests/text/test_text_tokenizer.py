"""Tests of encoding and decoding against transformers, and of text with control literals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from infer.errors import LoadError, RequestError
from infer.text.tokenizer import Tokenizer
from tests.support.cases import over
from tests.support.text_checkpoints import (
    KINDS,
    Pair,
    byte_level,
    llama2_like,
    load_pair,
    quick,
    save,
    wordpiece,
)

TEXTS = [
    "",
    " ",
    "Hello world",
    "  two  spaces \n\n\tand tabs ",
    "Été à la plage, naïve façade 数字 1234",
    "family 👩‍👩‍👧‍👦 flag 🇩🇪 e\u0301 \u200d",
    "<|end|>",
    "say <|start|>system<|header|>x<|end|></s><s> now",
    "<think>no</think> été 日本語! ▁▁▁",
    "<|end|",
    "\ufdd0<|end|>\ufdd1",
]
plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
tricky_text = st.lists(
    st.sampled_from(["<|end|>", "<s>", "</s>", "<|", "|>", "<", ">", " ", "a", "end", "é", "\n"]),
    max_size=8,
).map("".join)


def control_ids(tokenizer: Tokenizer, theirs: Any) -> set[int]:
    unknown = theirs.convert_tokens_to_ids("<unk>")
    return set(tokenizer.special_token_ids) - {unknown}


@over("text", TEXTS)
@over("add_special", [True, False])
def test_encode_with_special_tokens_parsed(pair: Pair, text: str, add_special: bool) -> None:
    expected = pair.theirs.encode(text, add_special_tokens=add_special)
    assert (
        pair.ours.encode(text, add_special_tokens=add_special, parse_special_tokens=True)
        == expected
    )


@over("text", TEXTS)
@over("add_special", [True, False])
def test_encode_of_plain_text(pair: Pair, text: str, add_special: bool) -> None:
    ours = pair.ours.encode(text, add_special_tokens=add_special)
    theirs = pair.theirs.encode(text, add_special_tokens=add_special, split_special_tokens=True)
    if pair.kind == "unigram" and "<" in text:
        assert ours != theirs or "</s>" not in text  # theirs finds `</s>` in the vocabulary
    else:
        assert ours == theirs


@quick
@given(text=plain_text | tricky_text)
def test_plain_text_never_becomes_a_control_token(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text, add_special_tokens=False)
    assert not control_ids(pair.ours, pair.theirs) & set(ids)
    if pair.kind in ("byte_level", "gemma"):  # the others change spaces
        assert pair.ours.decode(ids, skip_special_tokens=True) == (
            text.replace("▁", " ") if pair.kind == "gemma" else text
        )


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_control_literals_round_trip_as_text(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, KINDS[kind]()))
    text = "a<|end|>b</s><s><|start|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_vocabulary_that_lists_a_control_token_as_a_piece(tmp_path: Path) -> None:
    pair = load_pair("unigram", save(tmp_path, KINDS["unigram"]()))
    end = pair.theirs.convert_tokens_to_ids("</s>")
    # The library's own flag does not suffice, which is the reason for `sealed_tokenizer`.
    assert end in pair.theirs.encode("x</s>", split_special_tokens=True)[:-1]
    assert end not in pair.ours.encode("x</s>")[:-1]


def test_merges_that_spell_a_control_token(tmp_path: Path) -> None:
    vocab = {piece: i for i, piece in enumerate(["</s>", "<", "/", "s", ">", "</", "s>", "</s>s"])}
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "s")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    assert backend.encode("</s>").ids == [0]
    backend.add_special_tokens(["</s>"])
    ours = Tokenizer.from_folder(save(tmp_path, backend, bos_token=None, eos_token="</s>"))
    assert ours.encode("</s>") == [5, 6]
    assert ours.encode("</s>", parse_special_tokens=True) == [0]


def test_flagged_byte_tokens_and_white_space_stay_usable(tmp_path: Path) -> None:
    """Trainers flag such tokens as special if they are given as special tokens."""
    backend = KINDS["gemma"]()
    backend.add_special_tokens([f"<0x{byte:02X}>" for byte in range(256)] + ["\n"])
    pair = load_pair("gemma", save(tmp_path, backend))
    text = "é 🙂\n数"
    ids = pair.ours.encode(text)
    assert ids == pair.theirs.encode(text)
    assert pair.ours.token_bytes(ids[-1]) == "数".encode()[-1:]


def test_unknown_words_are_still_unknown(tmp_path: Path) -> None:
    pair = load_pair("wordpiece", save(tmp_path, wordpiece(), unk_token="<unk>"))
    assert pair.ours.encode("hello zzz") == pair.theirs.encode("hello zzz")
    assert 0 in pair.ours.encode("hello zzz")


@quick
@given(ids=st.lists(st.integers(0, 500), max_size=30), skip=st.booleans())
def test_decode(pair: Pair, ids: list[int], skip: bool) -> None:
    known = [token_id for token_id in ids if token_id < len(pair.theirs)]
    assert pair.ours.decode(known, skip_special_tokens=skip) == pair.theirs.decode(
        known, skip_special_tokens=skip
    )


@quick
@given(text=plain_text)
def test_decode_of_encoded_text(pair: Pair, text: str) -> None:
    ids = pair.ours.encode(text)
    assert pair.ours.decode(ids) == pair.theirs.decode(ids, skip_special_tokens=True)


def test_properties(pair: Pair) -> None:
    assert pair.ours.vocab_size == max(pair.theirs.get_vocab().values()) + 1
    assert pair.ours.bos_token_id == pair.theirs.bos_token_id
    assert pair.ours.eos_token_ids == (pair.theirs.eos_token_id,)
    assert pair.ours.special_token_ids >= set(pair.theirs.all_special_ids)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("bos", [True, False])
def test_bos_is_the_post_processors_decision(
    tmp_path: Path, bos: bool, flags: dict[str, Any]
) -> None:
    pair = load_pair("byte_level", save(tmp_path, byte_level(bos=bos), **flags))
    expected = pair.theirs.encode("Hello")
    assert pair.ours.encode("Hello") == expected
    assert (expected[0] == pair.ours.bos_token_id) is bos


def test_padding_and_truncation_of_the_file_are_not_applied(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = Tokenizer.from_folder(save(tmp_path, tokenizer))
    for parse in (True, False):
        ids = ours.encode("Hello world, this is nothing", parse_special_tokens=parse)
        assert ours.decode(ids) == "Hello world, this is nothing"
        assert 4 < len(ids) < 64


def test_special_tokens_only_the_configuration_names(tmp_path: Path) -> None:
    """Named tokens, extra tokens and added_tokens_decoder are added as in transformers."""
    added = {
        "431": {"content": "<later>", "special": True, "normalized": False},
        "430": {"content": "<sooner>", "special": False, "normalized": False},
    }
    pair = load_pair(
        "byte_level",
        save(
            tmp_path,
            byte_level(),
            pad_token="<pad>",
            extra_special_tokens=["<extra>"],
            added_tokens_decoder=added,
        ),
    )
    text = "a<pad>b<extra>c<later>d<sooner>"
    expected = pair.theirs.encode(text)
    assert pair.ours.encode(text, parse_special_tokens=True) == expected
    assert pair.ours.vocab_size == len(pair.theirs)
    for name in ("<pad>", "<extra>", "<later>"):
        assert pair.theirs.convert_tokens_to_ids(name) in pair.ours.special_token_ids
        assert pair.theirs.convert_tokens_to_ids(name) not in pair.ours.encode(text)


def test_names_from_special_tokens_map(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}), encoding="utf-8"
    )
    ours = Tokenizer.from_folder(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids) == (0, (1,))


def test_eos_ids_are_the_union_in_order(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 1]}', encoding="utf-8")
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": 1}}', encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (5, 1, 4)


def test_eos_that_is_not_flagged_special_is_a_control_token_all_the_same(tmp_path: Path) -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<tool_call>")
    save(tmp_path, tokenizer)
    assert end in Tokenizer.from_folder(tmp_path).encode("<tool_call>")
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": end}), encoding="utf-8"
    )
    assert end not in Tokenizer.from_folder(tmp_path).encode("<tool_call>")


def test_token_text_and_bytes(pair: Pair) -> None:
    ours = pair.ours
    for token_id in range(ours.vocab_size):
        text, data = ours.token_text(token_id), ours.token_bytes(token_id)
        if data is not None:
            assert text == data.decode("utf-8", errors="replace")
    for beyond in (ours.vocab_size, ours.vocab_size + 7, 2**40, -1):
        assert ours.token_text(beyond) == ""
        assert ours.token_bytes(beyond) is None
    ids = ours.encode("Hello 🙂 é world", add_special_tokens=False)
    joined = b"".join(ours.token_bytes(token_id) or b"" for token_id in ids)
    if pair.kind != "unigram":  # which has no tokens for some of the characters
        assert joined.decode().lstrip(" ") == "Hello 🙂 é world"
        assert any("\ufffd" in ours.token_text(token_id) for token_id in ids)


def test_gaps_in_the_ids(tmp_path: Path) -> None:
    save(tmp_path, llama2_like())
    data = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    data["model"]["vocab"]["faraway"] = 900
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    ours = Tokenizer.from_folder(tmp_path)
    assert ours.vocab_size == 901
    assert ours.token_text(899) == ""
    assert ours.token_bytes(899) is None
    assert ours.token_text(900) == "faraway"
    assert ours.decode([900, 899]) == "faraway"


def test_tokenizer_of_another_kind(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(save(tmp_path, wordpiece()))
    assert ours.token_bytes(6) is None
    assert ours.token_text(6) == "hello"
    assert ours.decode(ours.encode("hello")) == "hello"


def test_lone_surrogates_are_refused(pair: Pair) -> None:
    with pytest.raises(RequestError, match=r"character 2 .* U\+D83D"):
        pair.ours.encode("ab\ud83d")


@pytest.mark.parametrize("ids", [[-1], [2**40], ["a"], [1.5]])
def test_decode_refuses_what_is_no_id(pair: Pair, ids: list[Any]) -> None:
    with pytest.raises(RequestError, match="token ids must be integers"):
        pair.ours.decode(ids)


def test_one_tokenizer_in_many_threads(pair: Pair) -> None:
    texts = [(text, parse) for text in TEXTS for parse in (True, False)] * 20
    expected = [pair.ours.encode(text, parse_special_tokens=parse) for text, parse in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda one: pair.ours.encode(one[0], parse_special_tokens=one[1]), texts)
        )
    assert found == expected


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"not a folder.*tokenizer\.json"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"tokenizer\.json is missing; copy it"):
        Tokenizer.from_folder(tmp_path)


def test_slow_tokenizer_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00")
    with pytest.raises(LoadError, match=r"tokenizer\.model.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": 5, "chat_template": 7, "added_tokens_decoder": {"x": {}}}),
        encoding="utf-8",
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}', encoding="utf-8")
    (tmp_path / "config.json").write_text("{not json", encoding="utf-8")
    with pytest.raises(LoadError) as caught:
        Tokenizer.from_folder(tmp_path)
    message = str(caught.value)
    for part in (
        "tokenizer.json is missing",
        "bos_token in tokenizer_config.json must be",
        "chat_template in tokenizer_config.json must be",
        "added_tokens_decoder in tokenizer_config.json must map",
        "eos_token_id in generation_config.json must be",
        "config.json is not valid JSON",
    ):
        assert part in message


def test_unusable_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense"}}', encoding="utf-8")
    with pytest.raises(LoadError, match=r"tokenizer\.json cannot be used with tokenizers"):
        Tokenizer.from_folder(tmp_path)


def test_post_processor_of_another_kind(tmp_path: Path) -> None:
    tokenizer = byte_level(bos=False)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<s> $A </s>",
                pair="<s> $A $B </s>",
                special_tokens=[("<s>", 0), ("</s>", 1)],
            ),
        ]
    )
    pair = load_pair("byte_level", save(tmp_path, tokenizer))
    ids = pair.ours.encode("Hello")
    assert ids == pair.theirs.encode("Hello")
    assert (ids[0], ids[-1]) == (0, 1)
