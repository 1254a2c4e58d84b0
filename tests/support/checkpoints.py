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
    "{% if message.name == 'nobody' %}{{ raise_exception('unknown name') }}{% endif %}"
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
MROPE = {"rope_type": "default", "rope_theta": 9000.0, "mrope_section": [2, 3, 3]}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
LAYER_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {**SMALL, "sliding_window": 24, "pad_token_id": 0}
FEW = {**SMALL, "num_hidden_layers": 2, "pad_token_id": 0}
GPT2: dict[str, object] = {
    **{"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 1024},
    **{"bos_token_id": EOS_ID, "eos_token_id": EOS_ID},
}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", SMALL),
    "cwm": ("Cwm", {**WINDOWED, "num_hidden_layers": 5, "head_dim": 24}),
    "mistral": ("Mistral", SMALL),
    "ministral": ("Ministral", {**WINDOWED, "head_dim": 24}),
    "ministral3": (
        "Ministral3",
        {
            **FEW,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 9000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "mistral3": ("Mistral3", {**FEW, "model_type": "mistral", "sliding_window": None}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2_vl": ("Qwen2VL", {**FEW, "model_type": "qwen2_vl_text", "rope_parameters": MROPE}),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {**FEW, "model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
    ),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 24}),
    "qwen3_vl": ("Qwen3VL", {**FEW, "model_type": "qwen3_vl_text", "head_dim": 24}),
    "smollm3": ("SmolLM3", {**SMALL, "num_hidden_layers": 4, "pad_token_id": 0}),
    "phi3": ("Phi3", WINDOWED),
    "granite": ("Granite", {**FEW, "residual_multiplier": 0.22}),
    "granite_hybrid": (
        "GraniteMoeHybrid",
        {
            **FEW,
            "num_local_experts": 0,
            "shared_intermediate_size": 112,
            "layer_types": ["full_attention"] * 2,
            "mamba_n_heads": 4,
            "residual_multiplier": 0.5,
        },
    ),
    "granite_swa": (
        "GraniteSWA",
        {**WINDOWED, "num_hidden_layers": 4, "residual_multiplier": 0.4},
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {**FEW, "residual_multiplier": 0.4, "logits_scaling": 0.5, "embedding_multiplier": 3.0},
    ),
    "seed_oss": ("SeedOss", {**FEW, "head_dim": 24}),
    "olmo": ("Olmo", FEW),
    "olmo2": ("Olmo2", FEW),
    "olmo3": ("Olmo3", {**WINDOWED, "num_hidden_layers": 4}),
    "glm": ("Glm", {**FEW, "head_dim": 24}),
    "glm4": ("Glm4", {**FEW, "head_dim": 24}),
    "exaone4": ("Exaone4", {**WINDOWED, "num_hidden_layers": 4}),
    "ernie4_5": ("Ernie4_5", {**FEW, "head_dim": 24}),
    "helium": ("Helium", {**FEW, "head_dim": 16}),
    "hunyuan": ("HunYuanDenseV1", {**FEW, "head_dim": 24}),
    "gemma": ("Gemma", {**FEW, "head_dim": 24}),
    "gemma2": (
        "Gemma2",
        {
            **{**WINDOWED, "head_dim": 24, "query_pre_attn_scalar": 20},
            **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        },
    ),
    "vaultgemma": (
        "VaultGemma",
        {
            **{**WINDOWED, "head_dim": 24, "query_pre_attn_scalar": 20},
            **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
        },
    ),
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
    "gemma3_vl": (
        "Gemma3",
        {**WINDOWED, "model_type": "gemma3_text", "head_dim": 24, "layer_types": LAYER_KINDS},
    ),
    "cohere": ("Cohere", {**FEW, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {**WINDOWED, "num_hidden_layers": 4, "logit_scale": 0.5}),
    "stablelm": ("StableLm", FEW),
    "starcoder2": ("Starcoder2", WINDOWED),
    "arcee": ("Arcee", FEW),
    "nemotron": ("Nemotron", FEW),
    "jais2": ("Jais2", FEW),
    "apertus": ("Apertus", FEW),
    "gpt2": ("GPT2", GPT2),
    "gpt_bigcode": ("GPTBigCode", GPT2),
    "gpt_neo": (
        "GPTNeo",
        {
            **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_heads": 4, "num_layers": 2},
            **{"attention_types": [[["global", "local"], 1]], "window_size": 24},
            **{"max_position_embeddings": 1024, "bos_token_id": EOS_ID, "eos_token_id": EOS_ID},
        },
    ),
    "gptj": ("GPTJ", {**GPT2, "rotary_dim": 8}),
    "gpt_neox": ("GPTNeoX", FEW),
    "phi": ("Phi", FEW),
    "falcon": ("Falcon", FEW),
    "bloom": (
        "Bloom",
        {
            **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
            **{"seq_length": 1024, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID},
        },
    ),
    "mpt": (
        "Mpt",
        {
            **{"vocab_size": VOCAB_SIZE, "d_model": 64, "n_layers": 2, "n_heads": 4},
            **{"max_seq_len": 1024, "bos_token_id": EOS_ID, "eos_token_id": EOS_ID},
        },
    ),
    "opt": ("OPT", {**FEW, "ffn_dim": 112}),
}
"""Family → (prefix of transformers' class names, a small shape)."""
VISIONS: dict[str, dict[str, object]] = {
    "mistral3": {**VISION, "head_dim": 16, "num_hidden_layers": 1, "model_type": "pixtral"},
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "qwen2_5_vl": {**QWEN_VISION, "out_hidden_size": 64, "fullatt_block_indexes": [0]},
    "qwen3_vl": {**QWEN_VISION, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    "gemma3_vl": {**VISION, "num_hidden_layers": 1, "model_type": "siglip_vision_model"},
}
"""Multimodal families: the shape of the part for images; the small shape is that of the text."""
ONE_MORE = ("gemma", "gemma2", "vaultgemma", "gemma3", "gemma3_vl", "nemotron")
"""Families whose norms multiply by 1 + w."""
UNCHATTED = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "gpt_neox", "bloom", "mpt", "opt")
"""Families before chats."""


def architecture_of(family: str) -> str:
    """The name in the registry of a family's architecture."""
    name = FAMILIES[family][0].removesuffix("Text")
    head = "ForConditionalGeneration" if family in VISIONS else "ForCausalLM"
    return name + ("LMHeadModel" if family == "gpt2" else head)


def make_config(family: str, **shape: object) -> Any:
    """transformers' config of a small model."""
    import transformers

    name, values = FAMILIES[family]
    fields: dict[str, Any] = {**values, **shape}
    if family in VISIONS:
        outer = {"tie_word_embeddings": fields.pop("tie_word_embeddings", False)}
        fields = {"text_config": fields, "vision_config": VISIONS[family], **outer}
    return getattr(transformers, f"{name}Config")(**fields)


def written_config(family: str, **shape: object) -> dict[str, Any]:
    """What transformers writes into config.json of a small model."""
    shape.pop("shard_bytes", None)
    fields: dict[str, Any] = make_config(family, **shape).to_dict()
    return {**fields, "architectures": [architecture_of(family)]}


def make_model(family: str, *, seed: int = 0, **shape: object) -> Any:
    """A small random model of transformers, in float32.

    The weights are larger than initial ones, so that attention is not nearly uniform and an error
    in it becomes visible.
    """
    import torch
    import transformers

    config = make_config(family, **shape)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture_of(family))(config).eval().float()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif parameter_name.endswith(".bias"):
                parameter.uniform_(-0.5, 0.5)
            else:
                shift = 1.0 if family in ONE_MORE else 0.0
                parameter.uniform_(0.5 - shift, 1.5 - shift)
    return model


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    shard_bytes: int | None = None,
    seed: int = 0,
    rounded: bool = False,
    chat: bool = True,
    **shape: object,
) -> Any:
    """Let transformers write a small random checkpoint with a tokenizer; returns its model.

    `rounded`: every weight is a number of bfloat16. `chat`: with a chat template, for which an
    engine starts a process, unless the family is older than chats.
    """
    model = make_model(family, seed=seed, **shape)
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(folder, max_shard_size=shard_bytes or "5GB")
    has_bos = family not in UNCHATTED and not family.startswith("qwen")
    write_tokenizer(folder, chat=chat and family not in UNCHATTED, add_bos=has_bos)
    return model


def write_llama(folder: Path, **shape: Any) -> Any:
    """`write_checkpoint` of the family most tests use."""
    return write_checkpoint(folder, "llama", **shape)
