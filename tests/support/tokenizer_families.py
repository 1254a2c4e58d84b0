"""Small tokenizers with the structure of well-known families but another vocabulary.

`save_family` writes tokenizer.json and tokenizer_config.json like those of the family's
checkpoints. They have the same normalizer, pre-tokenizer, decoder, post-processor, names of special
tokens, flags and class of transformers. Some of these classes build the tokenizer anew and take
only the vocabulary from the file. The chat templates are in `templates/`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.text_checkpoints import BYTE_TOKENS, SENTENCES, save

TEMPLATES = Path(__file__).parent / "templates"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _control(names: list[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _with_bos(tokenizer: Tokenizer, bos: str) -> Any:
    return processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def _byte_level(control: list[str], words: str | None, text_tokens: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if words is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_special_tokens(_control(control))  # after the vocabulary, as in the families
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in text_tokens])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _spaced_pieces(control: list[str]) -> Tokenizer:
    """BPE with ▁ for a space and byte tokens for unknown characters; control tokens come first."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator([s for s in SENTENCES if "中文" not in s], trainer)
    model = json.loads(trained.to_str())["model"]
    names = list(dict.fromkeys([*control, *BYTE_TOKENS, *model["vocab"]]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(_control(control))
    return tokenizer


def llama2() -> Tokenizer:
    tokenizer = _spaced_pieces(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = _with_bos(tokenizer, "<s>")
    return tokenizer


def gemma3() -> Tokenizer:
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokenizer = _spaced_pieces([*control, "<start_of_turn>", "<end_of_turn>"])
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = _with_bos(tokenizer, "<bos>")
    return tokenizer


def llama3() -> Tokenizer:
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>"]
    control += ["<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"]
    tokenizer = _byte_level(control, _WORDS % 3, [])
    tokenizer.post_processor = processors.Sequence(
        [tokenizer.post_processor, _with_bos(tokenizer, "<|begin_of_text|>")]
    )
    return tokenizer


def qwen() -> Tokenizer:
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = (_WORDS % 1).replace("{1,1}", "")
    tokenizer = _byte_level(control, words, [*tags, "<think>", "</think>"])
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def gpt2() -> Tokenizer:
    return _byte_level(["<|endoftext|>"], None, [])


LLAMA2: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA2 |= {"add_bos_token": True, "add_eos_token": False}
LLAMA3 = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
QWEN: dict[str, Any] = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
QWEN |= {"add_bos_token": False, "add_prefix_space": False, "unk_token": None, "errors": "replace"}
GEMMA: dict[str, Any] = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
GEMMA |= {"add_bos_token": True, "add_eos_token": False}
END_OF_TEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")

FAMILIES: dict[str, tuple[Any, str | None, dict[str, Any]]] = {
    "llama2": (llama2, None, {"tokenizer_class": "LlamaTokenizer", "legacy": False, **LLAMA2}),
    "llama2_fast": (llama2, None, {"tokenizer_class": "LlamaTokenizerFast", **LLAMA2}),
    "llama32": (llama3, "llama32", {"tokenizer_class": "PreTrainedTokenizerFast", **LLAMA3}),
    "llama3_named": (llama3, "llama32", {"tokenizer_class": "LlamaTokenizerFast", **LLAMA3}),
    "qwen25": (qwen, "qwen25", {"tokenizer_class": "Qwen2Tokenizer", **QWEN}),
    "qwen3": (qwen, "qwen3", {"tokenizer_class": "Qwen2TokenizerFast", **QWEN}),
    "gemma3": (gemma3, "gemma3", {"tokenizer_class": "GemmaTokenizer", **GEMMA}),
    "gemma3_fast": (gemma3, "gemma3", {"tokenizer_class": "GemmaTokenizerFast", **GEMMA}),
    "gpt2": (gpt2, None, {"tokenizer_class": "GPT2Tokenizer", **END_OF_TEXT}),
    "gpt2_fast": (gpt2, None, {"tokenizer_class": "GPT2TokenizerFast", **END_OF_TEXT}),
}


def save_family(folder: Path, name: str, **config: Any) -> Path:
    """Write the text files of a checkpoint of this family."""
    build, template, settings = FAMILIES[name]
    text = (TEMPLATES / f"{template}.jinja").read_text("utf-8") if template else None
    return save(folder, build(), text, **{**settings, **config})
