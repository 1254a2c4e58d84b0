"""Tests of vocabularies from GGUF files: the same ids as the tokenizers they were made from.

The original tokenizers are built here as the families publish them, with the complete split
patterns and with the merges that transformers derives from scores. `metadata_of` makes the metadata
that llama.cpp's converter would write.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing
from transformers.tokenization_utils_base import generate_merges

from infer.errors import LoadError
from infer.text.gguf_vocab import PRE_TOKENIZERS, text_files
from infer.text.tokenizer import Tokenizer as OurTokenizer
from tests.support.text_checkpoints import CHATML_TEMPLATE, SENTENCES, load_pair, save

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
O200K = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
BYTES = pre.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre.ByteLevel(add_prefix_space=False)


def split(pattern: str) -> pre.Sequence:
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), BYTES])


PRE = {
    "llama-bpe": split(LLAMA3),
    "qwen2": split(QWEN2),
    "glm4": split(LLAMA3),
    "gpt-4o": split(O200K),
    "smollm": pre.Sequence([pre.Digits(individual_digits=True), GPT2]),
    "gpt-2": GPT2,
    "default": GPT2,
}
SPECIAL = ["<s>", "</s>", "<unk>", "<|start|>", "<|end|>", "<|im_end|>"]
DEFINED = ["<think>", "</think>"]
TEXTS = [
    *SENTENCES,
    "",
    " leading and trailing ",
    "It's we'll WE'LL don'T don'Sx 1234567 3.14159, x=10000000000 ٣٤٥ ②",
    "a  b   c\t\td\n\n\ne \r\n f      \n  g",
    "    for i in range(10):\n        print(i)\n",
    "Zoë naïve cafe\u0301 A\u030a ﬁ Å",
    "emoji 👍🏽 👨‍👩‍👧 🇩🇪 \U0001fae8 日本語。中文!!! ¿Qué? don't—stop…",
    "<|start|>user<|end|> <think>\n\n</think> </s>x<s>",
    "hellohello worldworld overlazy overdog",
]


def metadata_of(tokenizer: Tokenizer, kind: str, **keys: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [f"[PAD{i}]" for i in range(max(vocab.values()) + 3)]
    types = [5] * len(tokens)
    for token, i in vocab.items():
        tokens[i] = token
        types[i] = 4 if token in DEFINED else 3 if token in SPECIAL else 1
        types[i] = 6 if kind == "llama" and token.startswith("<0x") else types[i]
    types[vocab["<unk>"]] = 2
    values = {"model": kind, "tokens": tokens, "token_type": types, **keys}
    values |= {"bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"]}
    values["unknown_token_id"] = vocab["<unk>"]
    if kind == "gpt2":
        values["merges"] = [" ".join(merge) for merge in model["merges"]]
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def trained(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama-bpe"))
    tokenizer.pre_tokenizer = GPT2  # replaced below, so that the splits of the new one matter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC() if name == "qwen2" else None
    alphabet = pre.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [*SENTENCES, "12 123 1234 12345 it's we'll 'Sx"] * 2,
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False),
    )
    if name == "llama-bpe":  # some tokens are words that no merges form
        description = json.loads(tokenizer.to_str())
        description["model"]["merges"] = description["model"]["merges"][:100]
        tokenizer = Tokenizer.from_str(json.dumps(description))
    tokenizer.pre_tokenizer = PRE[name]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in DEFINED])
    return tokenizer


def sentencepiece(*, prefix: bool) -> tuple[Tokenizer, list[float]]:
    """A tokenizer with transformers' merges, and the scores of its tokens.

    The scores are shuffled, so that their order differs from that of the ids.
    """
    learnt = Tokenizer(models.BPE())
    learnt.normalizer = normalizers.Replace(" ", "▁")
    learnt.train_from_iterator(SENTENCES[:4], trainers.BpeTrainer(vocab_size=260))
    pieces = sorted(learnt.get_vocab(), key=learnt.get_vocab().__getitem__)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate([*names, *pieces])}
    scores = [0.0] * len(names) + random.Random(0).sample(range(-len(pieces), 0), len(pieces))
    merges = generate_merges(vocab, {p: scores[vocab[p]] for p in pieces}, skip_tokens=names)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "▁")
    sequence = normalizers.Sequence([normalizers.Prepend("▁"), space])
    tokenizer.normalizer = sequence if prefix else space
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in DEFINED])
    return tokenizer, scores + [-1000.0] * (len(DEFINED) + 2)


def assert_same(ours: OurTokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        ids = ours.encode(text, parse_special_tokens=True, add_special_tokens=False)
        assert ids == original.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(
            ids, skip_special_tokens=False
        )


@pytest.mark.parametrize("name", PRE)
def test_byte_level(name: str) -> None:
    original = trained(name)
    ours = OurTokenizer(text_files(metadata_of(original, "gpt2", pre=name), "m.gguf"))
    assert_same(ours, original)
    assert ours.special_token_ids == {original.token_to_id(token) for token in SPECIAL}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool) -> None:
    original, scores = sentencepiece(prefix=prefix)
    keys = {} if prefix else {"add_space_prefix": False}
    metadata = metadata_of(original, "llama", scores=scores, **keys)
    ours = OurTokenizer(text_files(metadata, "m.gguf"))
    assert_same(ours, original)
    assert ours.encode("x")[0] == ours.bos_token_id  # the default
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert OurTokenizer(text_files(metadata, "m")).encode("x") == ours.encode("x")[1:]


def test_user_defined_white_space() -> None:
    """Gemma's runs of spaces and new lines are matched as typed, however the file spells them."""
    original, scores = sentencepiece(prefix=False)
    metadata = metadata_of(original, "llama", scores=scores, add_space_prefix=False)
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["  ", "▁▁▁", "\n\n"]
    metadata["tokenizer.ggml.token_type"] += [4] * 3
    metadata["tokenizer.ggml.scores"] += [-1000.0] * 3
    ours = OurTokenizer(text_files(metadata, "m.gguf"))
    text = "a     b\n\nc"
    ids = ours.encode(text)
    assert ids[2:4] == [size + 1, size]
    assert size + 2 in ids
    assert ours.decode(ids) == text


def test_text_that_spells_a_byte_token() -> None:
    """Such text is six characters, even if the vocabulary has them as a byte token."""
    original, scores = sentencepiece(prefix=False)
    pieces = ["<", "0", "x", "4", "1", ">", "<0", "<0x", "<0x4", "<0x41"]
    new = [piece for piece in pieces if original.token_to_id(piece) is None]
    metadata = metadata_of(original, "llama", scores=scores + [-999.0] * len(new))
    metadata["tokenizer.ggml.tokens"] += new
    metadata["tokenizer.ggml.token_type"] += [1] * len(new)
    ours = OurTokenizer(text_files(metadata, "m"))
    assert ours.decode(ours.encode("<0x41>")) == "<0x41>"


@pytest.fixture
def metadata() -> dict[str, Any]:
    return metadata_of(trained("gpt-2"), "gpt2", pre="gpt-2")


def test_bos_and_eos(metadata: dict[str, Any]) -> None:
    ids = OurTokenizer(text_files(metadata, "m")).encode("Hello")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    metadata["tokenizer.ggml.add_bos_token"] = metadata["tokenizer.ggml.add_eos_token"] = True
    metadata["tokenizer.ggml.eot_token_id"] = vocab["<|end|>"]
    ours = OurTokenizer(text_files(metadata, "m"))
    assert ours.encode("Hello") == [vocab["<s>"], *ids, vocab["</s>"]]
    assert ours.bos_token_id == vocab["<s>"]
    # <|im_end|> is recognised by its text
    assert ours.eos_token_ids == (vocab["</s>"], vocab["<|end|>"], vocab["<|im_end|>"])


def test_llama3_adds_bos_unless_told_not_to() -> None:
    original = trained("llama-bpe")
    metadata = metadata_of(original, "gpt2", pre="llama-bpe")
    ours = OurTokenizer(text_files(metadata, "m"))
    assert ours.encode("Hello")[0] == ours.bos_token_id
    metadata["tokenizer.ggml.add_bos_token"] = False
    assert OurTokenizer(text_files(metadata, "m")).encode("Hello") == ours.encode("Hello")[1:]


def test_an_ordinary_token_named_as_padding_stays_ordinary(metadata: dict[str, Any]) -> None:
    exclamation = metadata["tokenizer.ggml.tokens"].index("!")
    metadata["tokenizer.ggml.padding_token_id"] = exclamation
    ours = OurTokenizer(text_files(metadata, "m"))
    assert exclamation not in ours.special_token_ids
    assert ours.decode([exclamation]) == "!"


def test_padding_of_the_vocabulary_has_no_text(metadata: dict[str, Any]) -> None:
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert metadata["tokenizer.ggml.tokens"][last].startswith("[PAD")
    assert OurTokenizer(text_files(metadata, "m")).decode([last]) == ""


def test_chat_templates(metadata: dict[str, Any], tmp_path: Path) -> None:
    original = trained("gpt-2")
    original.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", original.token_to_id("<s>"))]
    )
    pair = load_pair("", save(tmp_path, original, CHATML_TEMPLATE, eos_token="</s>"))
    metadata["tokenizer.chat_template"] = CHATML_TEMPLATE
    metadata["tokenizer.chat_template.tool_use"] = (
        "tools: {{ tools[0].function.name }} {{ messages[0].content }}"
    )
    ours = OurTokenizer(text_files(metadata, "m"))
    messages = [{"role": "user", "content": "Hi <|end|> there"}]
    assert ours.apply_chat_template(messages) == pair.ours.apply_chat_template(messages)
    tool = {"type": "function", "function": {"name": "f"}}
    assert ours.apply_chat_template(messages, tools=[tool])[0] == "tools: f Hi <|end|> there"
    del metadata["tokenizer.chat_template"], metadata["tokenizer.chat_template.tool_use"]
    assert OurTokenizer(text_files(metadata, "m")).chat_template is None


REFUSED = [
    ({"model": "t5"}, "model 't5' is not supported (supported: 'gpt2', 'llama')"),
    ({"model": None}, "m.gguf: the tokenizer cannot be used: tokenizer.ggml.model is missing"),
    ({"pre": "viking"}, "pre 'viking' is not supported (supported: 'llama-bpe', "),
    ({"pre": None}, "pre is missing; it must be a str"),
    ({"merges": None}, "merges is missing; it must be a list"),
    ({"tokens": "abc"}, "tokens is 'abc'; it must be a list"),
    ({"token_type": [1, 1]}, "token_type has 2 entries for "),
    ({"model": "llama"}, "scores is missing"),
    ({"bos_token_id": 9999}, "bos_token_id is 9999, outside of "),
    ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true, but bos_token_id is"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:30])
def test_refusals(changes: dict[str, Any], message: str, metadata: dict[str, Any]) -> None:
    for name, value in changes.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(LoadError) as error:
        text_files(metadata, "m.gguf")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tekken", ["Hello", "World", " ", "1", "2", "3", "!/\n", "don", "'t", " ÉTÉs"]),
        ("smaug-bpe", ["HelloWorld", " ", "123", "!/\n", "don", "'t", " ÉTÉs"]),
        ("falcon", ["HelloWorld", " ", "123", "!/", "\n", "don", "'", "t", " ÉTÉs"]),
        ("bloom", ["HelloWorld", " 123", "!", "/", "\n", "don't", " ÉTÉs"]),
        ("seed-coder", ["HelloWorld", " ", "1", "2", "3", "!/", "\n", "don", "'t", " ÉTÉs"]),
        ("stablelm2", ["HelloWorld", " ", "1", "2", "3", "!/\n", "don", "'t", " ÉTÉs"]),
        ("hunyuan-dense", ["HelloWorld", " ", "123", "!/\n", "don", "'t", " ÉTÉs"]),
        ("starcoder", ["HelloWorld", " ", "1", "2", "3", "!/", "\n", "don", "'t", " ÉTÉs"]),
    ],
)
def test_what_words_end_at(name: str, words: list[str]) -> None:
    splits = PRE_TOKENIZERS[name].splits
    text = "HelloWorld 123!/\ndon't ÉTÉs"
    found = [text[start:end] for _, (start, end) in splits.pre_tokenize_str(text)]
    assert found == words


def test_names_for_the_same_thing() -> None:
    same = (("llama-bpe", "falcon3"), ("qwen2", "megrez"), ("smaug-bpe", "dbrx"),
            ("smollm", "command-r"), ("gpt-2", "olmo"))  # fmt: skip
    for one, other in same:
        assert PRE_TOKENIZERS[one] is PRE_TOKENIZERS[other]
    tekken, smaug = PRE_TOKENIZERS["tekken"], PRE_TOKENIZERS["smaug-bpe"]
    assert (tekken.add_bos, tekken.ignore_merges) == (True, True)
    assert (smaug.add_bos, smaug.ignore_merges) == (False, False)
