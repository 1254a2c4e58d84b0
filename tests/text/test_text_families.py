"""Tests of folders that name a tokenizer class of transformers: the same ids as that class.

Some of these classes of transformers 5 build the tokenizer anew and take only the vocabulary, the
merges and the post-processor from tokenizer.json. That makes no difference for the supported
families, except for LlamaTokenizer (see the last tests).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from infer.errors import RequestError
from infer.text.tokenizer import Tokenizer
from tests.support.cases import over
from tests.support.text_checkpoints import Pair, load_pair
from tests.support.tokenizer_families import FAMILIES, save_family

TEXTS = [
    "",
    "Hello world",
    "Été à la plage, cafe\u0301 数字 12345 🙂",
    "don't I'LL x\n\n y\r\n z",
]
SPACED = ["  two  spaces \n\n\tand tabs ", " lead", "   ", "\n", "Hello</s>  x<s> y", "</s>\nx"]
SPACED += ["<|im_end|> a</s>b<s>c<end_of_turn>\n<|eot_id|><bos>d<|endoftext|>"]
BOS = {"llama2": "<s>", "llama32": "<|begin_of_text|>", "llama3_named": "<|begin_of_text|>"}
BOS |= {"llama2_fast": "<s>", "gemma3": "<bos>", "gemma3_fast": "<bos>"}
LLAMA2 = ("llama2", "llama2_fast")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {
        name: load_pair(name, save_family(tmp_path_factory.mktemp(name), name)) for name in FAMILIES
    }


@over("add_special", [True, False])
@over(
    ("name", "text"),
    [(name, text) for name in FAMILIES for text in (TEXTS if name in LLAMA2 else TEXTS + SPACED)],
)
def test_same_ids_as_the_class(
    pairs: dict[str, Pair], name: str, text: str, add_special: bool
) -> None:
    pair = pairs[name]
    ids = pair.ours.encode(text, add_special_tokens=add_special, parse_special_tokens=True)
    assert ids == pair.theirs.encode(text, add_special_tokens=add_special)
    for skip in (True, False):
        assert pair.ours.decode(ids, skip_special_tokens=skip) == pair.theirs.decode(
            ids, skip_special_tokens=skip
        )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_begins_with_bos_where_the_checkpoint_says_so(
    pairs: dict[str, Pair], name: str
) -> None:
    ours = pairs[name].ours
    ids = ours.encode("Hello")
    begins = [token_id for token_id in ids if token_id in ours.special_token_ids]
    assert begins == ([ours.bos_token_id] if name in BOS else [])
    if name in BOS:
        assert ours.token_text(ids[0]) == BOS[name]
        assert ids[1:] == ours.encode("Hello", add_special_tokens=False)


@pytest.mark.parametrize(
    "flags",
    [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}],
    ids=["bos", "no bos", "eos"],
)
@pytest.mark.parametrize("name", ["llama2", "llama32", "qwen25", "gemma3", "gpt2"])
def test_flags_that_contradict_the_post_processor(
    tmp_path: Path, name: str, flags: dict[str, bool]
) -> None:
    """The post-processor takes precedence, as in each of transformers' classes."""
    pair = load_pair(name, save_family(tmp_path, name, **flags))
    assert pair.ours.encode("Hello") == pair.theirs.encode("Hello")


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("name", [name for name in BOS if FAMILIES[name][1]])
def test_a_chat_has_exactly_one_bos(pairs: dict[str, Pair], name: str, typed: bool) -> None:
    """The template writes BOS, and the post-processor must not add another; a typed BOS is text."""
    ours = pairs[name].ours
    content = BOS[name] * 2 if typed else "Hi"
    text, ids = ours.apply_chat_template([{"role": "user", "content": content}])
    assert text.startswith(BOS[name])
    assert ids[0] == ours.bos_token_id
    assert ids.count(ids[0]) == 1
    assert ours.encode(text, parse_special_tokens=True).count(ids[0]) > 1  # the mistake to avoid


@pytest.mark.parametrize("name", ["qwen25", "qwen3"])
def test_a_chat_has_no_bos_where_there_is_none(pairs: dict[str, Pair], name: str) -> None:
    ours = pairs[name].ours
    _, ids = ours.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ours.bos_token_id is None
    assert ours.token_text(ids[0]) == "<|im_start|>"


@pytest.mark.parametrize("name", ["gpt2", "gpt2_fast", *LLAMA2])
def test_no_chat_without_a_template(pairs: dict[str, Pair], name: str) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        pairs[name].ours.apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_files_name(pairs: dict[str, Pair], name: str) -> None:
    pair = pairs[name]
    config = json.loads((pair.folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert pair.ours.tokenizer_class == config["tokenizer_class"]
    told = {key: value for key, value in pair.theirs.special_tokens_map.items() if key in config}
    named = dict(pair.ours.named_tokens)
    assert {key: named[key] for key in told if key in named} == {
        key: value for key, value in told.items() if config[key] is not None
    }
    assert set(named) == {
        key for key, value in config.items() if key.endswith("_token") and isinstance(value, str)
    }
    ids = range(len(pair.theirs))
    assert [pair.ours.token_piece(i) for i in ids] == pair.theirs.convert_ids_to_tokens(list(ids))
    for beyond in (-1, len(ids), 2**40):
        assert pair.ours.token_piece(beyond) == ""


@pytest.mark.parametrize("text", SPACED)
def test_llama_2_is_read_as_its_file_says(pairs: dict[str, Pair], text: str) -> None:
    """tokenizer.json puts a ▁ before every stretch of text, as sentencepiece does.

    transformers 5 replaces that by a rule of its own (its issue 45488); transformers 4 and other
    libraries do not.
    """
    for name in LLAMA2:
        pair = pairs[name]
        by_file: Any = PreTrainedTokenizerFast(
            tokenizer_file=str(pair.folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
        )
        assert pair.ours.encode(text, parse_special_tokens=True) == by_file.encode(text)


def test_leading_spaces_of_llama_2_survive(pairs: dict[str, Pair]) -> None:
    pair = pairs["llama2"]
    assert pair.ours.decode(pair.ours.encode(" lead")) == " lead"
    assert pair.theirs.encode(" lead") == pair.theirs.encode("lead"), "fixed in transformers: adapt"


def test_a_configuration_without_a_class(tmp_path: Path) -> None:
    folder = save_family(tmp_path, "qwen3", tokenizer_class=None)
    assert Tokenizer.from_folder(folder).tokenizer_class is None
