"""The text side of a GGUF file: its vocabulary as a `tokenizer.json`, its chat templates.

`text_files` takes the file's metadata as plain Python values and gives the `TextFiles` that a
checkpoint folder would have given, so that `Tokenizer` needs to know nothing about GGUF. Two kinds
of vocabulary exist in the families served here: byte-level BPE ("gpt2"), whose pre-tokeniser is
named by `tokenizer.ggml.pre`, and sentencepiece's BPE ("llama"), which stores a score for each
piece instead of merges. Other kinds and names are refused: a wrong split gives wrong ids silently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from infer.errors import LoadError
from infer.text.checkpoint_files import TextFiles

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
# Tokens that end a turn, by text: files name only one of theirs, models use several.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>",
         "<end_of_turn>")  # fmt: skip


def _byte_level(*, regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
            "use_regex": regex}  # fmt: skip


def _split(max_digits: str) -> list[dict[str, Any]]:
    """What Llama 3 and Qwen2 cut text with; they differ in how many digits stay together."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + max_digits +
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**split, "invert": False}, _byte_level(regex=False)]


_GPT2 = [_byte_level(regex=True)]
_LLAMA3, _QWEN2 = _split("{1,3}"), _split("")
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2],
    "gpt-2": _GPT2,
    "default": _GPT2,
}


class _Vocabulary:
    """`tokenizer.ggml.*` of one file, checked as it is read."""

    def __init__(self, metadata: Mapping[str, Any], where: str) -> None:
        self.metadata = metadata
        self.where = where
        self.kind = self.need("model", str)
        if self.kind not in ("gpt2", "llama"):
            raise self.error(f"model {self.kind!r} is not supported (supported: 'gpt2', 'llama')")
        self.tokens: list[str] = self.need("tokens", list)
        self.types: list[int] = self.aligned("token_type")
        if self.kind == "llama":  # a user-defined piece is looked for in the text as it was typed
            self.tokens = [
                token.replace("▁", " ") if kind == _USER_DEFINED else token
                for token, kind in zip(self.tokens, self.types, strict=True)
            ]
        self.vocab = {
            token: i
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if token and kind != _UNUSED
        }
        defaults = (1, 2, 0) if self.kind == "llama" else (None, None, None)
        self.ids = dict(zip(_NAMED_IDS, (*defaults, None, None, None), strict=True))
        self.ids |= {name: self.token_id(key, self.ids[name]) for name, key in _NAMED_IDS.items()}

    def error(self, problem: str) -> LoadError:
        return LoadError(f"{self.where}: the tokenizer cannot be used: tokenizer.ggml.{problem}")

    def need(self, name: str, kind: type) -> Any:
        value = self.metadata.get(f"tokenizer.ggml.{name}")
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {value!r:.40}"
            raise self.error(f"{name} {found}; it must be a {kind.__name__}")
        return value

    def aligned(self, name: str) -> list[Any]:
        """A list with one entry for each token."""
        values: list[Any] = self.need(name, list)
        if len(values) != len(self.tokens):
            raise self.error(f"{name} has {len(values)} entries for {len(self.tokens)} tokens")
        return values

    def token_id(self, key: str, default: int | None = None) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise self.error(f"{key} is {value!r}, outside of {len(self.tokens)} tokens")
        return value

    def is_added(self, token_id: int) -> bool:
        """Matched in the text before anything else, so no text and no piece of a word."""
        return self.types[token_id] in (_UNKNOWN, _CONTROL, _USER_DEFINED)


def text_files(metadata: Mapping[str, Any], where: str) -> TextFiles:
    """What the metadata says about text; `where` begins the message of a `LoadError`."""
    vocabulary = _Vocabulary(metadata, where)
    build = _byte_level_bpe if vocabulary.kind == "gpt2" else _sentencepiece_bpe
    description = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": vocabulary.types[i] != _USER_DEFINED,
             "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for token, i in vocabulary.vocab.items()
            if vocabulary.is_added(i)
        ],
        **build(vocabulary),
    }  # fmt: skip
    ends = [vocabulary.ids["eos_token"], vocabulary.token_id("eot_token_id")]
    ends += [vocabulary.token_id("eom_token_id"), *map(vocabulary.vocab.get, _ENDS)]
    prefix = "tokenizer.chat_template"
    return TextFiles(
        tokenizer_json=json.dumps(description),
        named_tokens={
            name: vocabulary.tokens[i]
            for name, i in vocabulary.ids.items()
            # Some files name an ordinary token as padding; it must not turn into a special one.
            if i is not None and (name in ("bos_token", "eos_token") or vocabulary.is_added(i))
        },
        extra_special_tokens=(),
        added_tokens=(),
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
        templates={
            key.removeprefix(prefix).removeprefix(".") or "default": text
            for key, text in metadata.items()
            if (key == prefix or key.startswith(f"{prefix}.")) and isinstance(text, str)
        },
    )


def _byte_level_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    pre = vocabulary.need("pre", str)
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(map(repr, _PRE_TOKENIZERS))
        raise vocabulary.error(f"pre {pre!r} is not supported (supported: {known})")
    steps = _PRE_TOKENIZERS[pre]
    merges = [merge.split(" ") for merge in vocabulary.need("merges", list)]
    return {
        "normalizer": {"type": "NFC"} if steps is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(vocabulary, add_bos=steps is _LLAMA3),
        "decoder": _byte_level(regex=True),
        "model": {"type": "BPE", "vocab": vocabulary.vocab, "merges": merges,
                  "ignore_merges": steps is _LLAMA3},
    }  # fmt: skip


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Prepend", "prepend": "▁"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    unknown = vocabulary.ids["unk_token"]
    assert unknown is not None
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, space]} if prefix else space,
        "post_processor": _post_processor(vocabulary, add_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders if prefix else decoders[:-1]},
        "model": {"type": "BPE", "vocab": vocabulary.vocab, "merges": _merges(vocabulary),
                  "unk_token": vocabulary.tokens[unknown], "fuse_unk": True,
                  "byte_fallback": True},
    }  # fmt: skip


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a piece together from two, pieces with the highest score first.

    Sentencepiece joins whichever neighbours make the piece with the best score, however it is
    cut; so each cut is a merge, and a piece's score is the rank of all of its cuts.
    """
    scores = vocabulary.aligned("scores")
    pieces = {t: i for t, i in vocabulary.vocab.items() if vocabulary.types[i] == _NORMAL}
    cuts = [
        (scores[i], token[:cut], token[cut:])
        for token, i in pieces.items()
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    cuts.sort(key=lambda cut: (-cut[0], -len(cut[1]), -len(cut[2])))
    return [(left, right) for _, left, right in cuts]


def _post_processor(vocabulary: _Vocabulary, *, add_bos: bool) -> dict[str, Any] | None:
    """BOS and EOS around a text, where the file or else its kind of vocabulary says so."""
    ids: dict[str, int] = {}
    for name, default in (("bos_token", add_bos), ("eos_token", False)):
        if vocabulary.metadata.get(f"tokenizer.ggml.add_{name}", default):
            token_id = vocabulary.ids[name]
            if token_id is None:
                raise vocabulary.error(f"add_{name} is true, but {name}_id is missing")
            ids[name] = token_id
    if not ids:
        return None
    tokens = {name: vocabulary.tokens[token_id] for name, token_id in ids.items()}

    def mark(name: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokens[name], "type_id": 0}}] if name in ids else []

    def around(sequence: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": sequence, "type_id": 0}}
        return [*mark("bos_token"), text, *mark("eos_token")]

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A") + around("B"),
        "special_tokens": {
            tokens[name]: {"id": tokens[name], "ids": [token_id], "tokens": [tokens[name]]}
            for name, token_id in ids.items()
        },
    }
