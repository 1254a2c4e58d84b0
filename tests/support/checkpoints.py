"""Small checkpoints on disk for tests: a byte-level tokenizer, and models written by transformers.

`write_tokenizer` makes a folder that `Tokenizer.from_folder` reads: 256 byte tokens (ids 0 to 255
in the library's byte order) and six special ones, with a chat template; text of any language
round-trips. The `write_*` functions for models let transformers write random weights, so the files
are like published ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.pre_tokenizers import ByteLevel

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL = [BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
VOCAB_SIZE = 256 + len(SPECIAL)
BOS_ID, EOS_ID, END_ID = 256, 257, 261

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}"
    "{% endif %}"
    "{{ '<|' ~ message.role ~ '|>\n' ~ message.content ~ '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, *, chat: bool = True, add_bos: bool = True) -> Path:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    vocab = {char: i for i, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "model_max_length": 2048,
    }
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, END_ID]}), encoding="utf-8"
    )
    return folder


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_ID,
    "eos_token_id": [EOS_ID, END_ID],
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", SMALL),
    "mistral": ("Mistral", SMALL),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 24}),
    "gemma3": (
        "Gemma3Text",
        {
            **SMALL,
            "num_hidden_layers": 7,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 40,
            "pad_token_id": 0,
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 64,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 1024,
            "bos_token_id": EOS_ID,
            "eos_token_id": EOS_ID,
        },
    ),
}
"""Family → (prefix of transformers' class names, a small shape)."""


def architecture_of(family: str) -> str:
    """The name in the registry of a family's architecture."""
    head = "LMHeadModel" if family == "gpt2" else "ForCausalLM"
    return FAMILIES[family][0].removesuffix("Text") + head


def make_model(family: str, *, seed: int = 0, **shape: object) -> Any:
    """A small random model of transformers, in float32.

    The weights are larger than initial ones, so that attention is not nearly uniform and an error
    in it becomes visible.
    """
    import torch
    import transformers

    name, values = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**values, **shape})
    torch.manual_seed(seed)
    model = getattr(transformers, architecture_of(family))(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif parameter_name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                shift = 1.0 if family == "gemma3" else 0.0  # its norms are 1 + w
                parameter.uniform_(0.5 - shift, 1.5 - shift)
    return model


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    shard_bytes: int | None = None,
    seed: int = 0,
    rounded: bool = False,
    **shape: object,
) -> Any:
    """Let transformers write a small random checkpoint with a tokenizer; returns its model.

    `rounded`: every weight is a number of bfloat16.
    """
    model = make_model(family, seed=seed, **shape)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder, max_shard_size=shard_bytes or "5GB")
    write_tokenizer(folder, chat=family != "gpt2", add_bos=family not in ("gpt2", "qwen2", "qwen3"))
    return model


def write_llama(folder: Path, **shape: Any) -> Any:
    """`write_checkpoint` of the family most tests use."""
    return write_checkpoint(folder, "llama", **shape)
