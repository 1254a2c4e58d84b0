"""Configs that are easily read wrongly: each with its meaning, or with the refusal that names why.

A row is a family's config as transformers writes it, with some fields changed as files have them.
What the row says is compared with what is read; `test_configs` has what holds for all families.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from infer.errors import LoadError
from infer.models.model_config import ModelConfig
from infer.models.registry import parse_model_config
from tests.support.checkpoints import written_config

ABSENT = object()
"""A field that is taken away."""
Expected = Callable[[ModelConfig], Any]
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def _theta(config: ModelConfig) -> float:
    return config.rope.theta


def _windows(config: ModelConfig) -> tuple[int | None, ...]:
    return config.windows


def _tied(config: ModelConfig) -> bool:
    return config.tie_embeddings


def _caps(config: ModelConfig) -> tuple[float | None, float | None]:
    return config.score_softcap, config.final_softcap


def _dtype(config: ModelConfig) -> str:
    return config.dtype


def _rotary(config: ModelConfig) -> int | None:
    return config.rope.rotary_size


def _kind(config: ModelConfig) -> str:
    return config.rope.kind


def _groups(config: ModelConfig) -> int:
    return config.num_kv_heads


READ: dict[str, tuple[str, dict[str, Any], Expected, Any]] = {
    "the new key of θ wins": (
        "llama",
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        *(_theta, 5e5),
    ),
    "the old key of θ": ("llama", {"rope_theta": 3e5, "rope_parameters": ABSENT}, _theta, 3e5),
    "both keys of θ are null": (
        "llama", {"rope_theta": None, "rope_parameters": None, "rope_scaling": None}, _theta, 1e4,
    ),
    "head_dim null": ("llama", {"head_dim": None}, lambda config: config.head_dim, 16),
    "the whole head rotates": ("llama", {"partial_rotary_factor": 1.0}, _rotary, None),
    "Qwen's window is off": (
        "qwen2", {"sliding_window": 4, "use_sliding_window": False}, _windows, (),
    ),
    "SmolLM3's window is off": (
        "smollm3", {"sliding_window": 4, "use_sliding_window": False}, _windows, (),
    ),
    "Mistral's window has no switch": (
        "mistral", {"sliding_window": 4, "use_sliding_window": False}, _windows, (4, 4, 4),
    ),
    "Phi-3's window has no switch": (
        "phi3", {"sliding_window": 4, "use_sliding_window": False}, _windows, (4, 4, 4),
    ),
    "StarCoder2's window has no switch": (
        "starcoder2", {"sliding_window": 4, "use_sliding_window": False}, _windows, (4, 4, 4),
    ),
    "a window that is absent is the class's": (
        "mistral", {"sliding_window": ABSENT}, _windows, (4096,) * 3,
    ),
    "a window that is null is none": ("mistral", {"sliding_window": None}, _windows, ()),
    "a pattern as text": (
        "exaone4", {"layer_types": ABSENT, "sliding_window_pattern": "LG"}, _windows,
        (24, None, 24, None),
    ),
    "one norm, one cap": ("gemma2", {"final_logit_softcapping": None}, _caps, (3.0, None)),
    "caps that are absent are the class's": (
        "gemma2", {"attn_logit_softcapping": ABSENT, "final_logit_softcapping": ABSENT}, _caps,
        (50.0, 30.0),
    ),
    "dtype under its old name": (
        "llama", {"dtype": ABSENT, "torch_dtype": "bfloat16"}, _dtype, "bfloat16",
    ),
    "dtype under both names": (
        "llama", {"dtype": "float16", "torch_dtype": "bfloat16"}, _dtype, "float16",
    ),
    "su is longrope": (
        "phi3", {"rope_parameters": ABSENT, "rope_scaling": {"type": "su", **LONG}}, _kind,
        "longrope",
    ),
    "yarn in Phi-3 is longrope": (
        "phi3", {"rope_parameters": ABSENT, "rope_scaling": {"type": "yarn", **LONG}}, _kind,
        "longrope",
    ),
    "Granite 4 in old words": (
        "granite_hybrid", {"layer_types": ABSENT, "layers_block_type": ["attention"] * 2},
        lambda config: config.num_layers, 2,
    ),
    "a dynamic RoPE's α is always in its base": (
        "hunyuan",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 9}},
        lambda config: round(config.rope.theta), round(1e4 * 9 ** (24 / 22)),
    ),
    "Falcon 1's one key": ("falcon", {"num_kv_heads": 4}, _groups, 1),
    "Falcon's own keys": ("falcon", {"multi_query": False}, _groups, 4),
    "Bloom's old name of a size": (
        "bloom", {"hidden_size": ABSENT, "n_embed": 32}, lambda config: config.hidden_size, 32,
    ),
    "MPT's attention is nested": (
        "mpt", {"attn_config": {"alibi": True, "clip_qkv": 6}},
        lambda config: config.form.qkv_clip, 6,
    ),
    "rotation everywhere": ("llama", {"no_rope_layers": [1, 1, 1]}, _theta, 1e4),
    "the outer tie counts": ("qwen3_vl", {"tie_word_embeddings": True}, _tied, True),
    "the inner tie, if there is no outer one": (
        "qwen3_vl", {"tie_word_embeddings": ABSENT, "text_config.tie_word_embeddings": True}, _tied,
        True,
    ),
    "the outer tie wins": (
        "qwen3_vl", {"tie_word_embeddings": False, "text_config.tie_word_embeddings": True}, _tied,
        False,
    ),
    "no tie at all is the class's": (
        "mistral3", {"tie_word_embeddings": ABSENT, "text_config.tie_word_embeddings": ABSENT},
        _tied, True,
    ),
    "the text part does not say its class": (
        "mistral3", {"text_config.architectures": ABSENT}, lambda config: config.num_layers, 2,
    ),
}  # fmt: skip

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a part of Llama's head rotates": (
        "llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 has no meaning",
    ),
    "the same in the new place": (
        "llama", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5 of RoPE has no meaning",
    ),
    "layers of Llama that do not rotate": (
        "llama", {"no_rope_layers": [1, 0, 1]}, "no_rope_layers=[1, 0, 1] has no meaning",
    ),
    "α in a Llama": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2, "alpha": 9}},
        "alpha=9 of RoPE has no meaning",
    ),
    "queries that grow in a Mistral": (
        "mistral", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
        "llama_4_scaling_beta=0.1 of RoPE",
    ),
    "groups for each layer": (
        "llama", {"num_key_value_heads": [2, 1, 2]}, "num_key_value_heads must be int, not [2",
    ),
    "inner sizes for each layer": (
        "llama", {"intermediate_size": [64, 96, 64]}, "intermediate_size must be int, not [64",
    ),
    "a recurrent layer": (
        "granite_hybrid", {"layer_types": ["mamba", "attention"]}, "keeps a recurrent state",
    ),
    "a text part of another kind": (
        "mistral3", {"text_config.model_type": "mistral4"}, "text_config.model_type='mistral4'",
    ),
    "a pattern of other letters": (
        "exaone4", {"layer_types": ABSENT, "sliding_window_pattern": "LXG"},
        "sliding_window_pattern",
    ),
    "a cap of 0": ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be"),
    "MPT without ALiBi": ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi=False"),
    "MPT with other slopes": (
        "mpt", {"attn_config": {"alibi_bias_max": 16}}, "attn_config: alibi_bias_max=16",
    ),
    "MPT with norms of heads": ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln=True"),
    "a sequential new Falcon": (
        "falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False",
    ),
    "Bloom's other residual": (
        "bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection",
    ),
    "scores by layer in GPT-2": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True",
    ),
    "scores by layer in StarCoder": (
        "gpt_bigcode", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx",
    ),
    "code of its own": (
        "llama", {"architectures": ["BailingMoeV2ForCausalLM"]}, "'BailingMoeV2ForCausalLM' is not",
    ),
    "no architecture and an unknown kind": (
        "llama", {"architectures": ABSENT, "model_type": "minicpm"}, "architectures must name one",
    ),
}  # fmt: skip


def changed(family: str, changes: dict[str, Any]) -> dict[str, Any]:
    fields = written_config(family)
    for name, value in changes.items():
        *outer, last = name.split(".")
        place = fields[outer[0]] if outer else fields
        place[last] = value
        if value is ABSENT:
            del place[last]
    return fields


@pytest.mark.parametrize("trap", READ)
def test_a_trap_has_its_meaning(trap: str) -> None:
    family, changes, find, expected = READ[trap]
    assert find(parse_model_config(changed(family, changes), "it")) == expected


@pytest.mark.parametrize("trap", REFUSED)
def test_a_trap_is_refused_by_name(trap: str) -> None:
    family, changes, message = REFUSED[trap]
    with pytest.raises(LoadError) as caught:
        parse_model_config(changed(family, changes), "it")
    assert message in str(caught.value)
