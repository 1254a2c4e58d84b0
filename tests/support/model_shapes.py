"""Unusual shapes on which each family is compared with transformers: family → name → config."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from infer.models.registry import ARCHITECTURES, Architecture
from tests.support.checkpoints import architecture_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 9000.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 9000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 9000.0, "factor": 4.0}
HALF = {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 0.5}
THIRD = {"partial_rotary_factor": 1 / 3}
WHOLE = {"rope_type": "default", "rope_theta": 9000.0, "partial_rotary_factor": 1.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 9000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + i / 4 for i in range(6)],
    "long_factor": [1.5 + i for i in range(6)],
}
UNTIED = {"tie_word_embeddings": False}
INNER = {"intermediate_size": 96}
WHOLLY = {"rope_parameters": WHOLE}
TIED = {"tie_word_embeddings": True}
ATTENTION_BIAS = {"attention_bias": True}
FULL, SLIDING = "full_attention", "sliding_attention"

SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "one kv head, odd head_dim": {"num_key_value_heads": 1, "head_dim": 24},
        "as many kv heads as heads": {"num_key_value_heads": 4},
        "llama3 rope beyond its original length": {"rope_parameters": LLAMA3},
        "linear rope": {"rope_parameters": LINEAR},
        "yarn rope beyond its original length": {"rope_parameters": YARN},
        "yarn rope, odd head_dim, own attention factor": {
            "rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0},
            "head_dim": 24,
        },
        "dynamic rope": {"rope_parameters": DYNAMIC},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "three shards": {"shard_bytes": 220_000},
    },
    "cwm": {
        "plain": {},
        "scaled rope, own pattern": {
            "rope_parameters": LLAMA3,
            "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING],
        },
    },
    "mistral": {
        "plain": {"sliding_window": None},
        "window shorter than the prompt": {"sliding_window": 37},
        "window of one page and head_dim": {"sliding_window": 4, "head_dim": 40},
    },
    "qwen2": {
        "plain": {},
        "tied, one kv head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "window from the second layer on": {
            "use_sliding_window": True,
            "sliding_window": 30,
            "max_window_layers": 1,
        },
    },
    "qwen3": {
        "plain": {},
        "head_dim larger than hidden / heads": {"head_dim": 40, "tie_word_embeddings": True},
        "three shards, biases": {"shard_bytes": 220_000, "attention_bias": True},
        "windows by layer_types": {
            "use_sliding_window": True,
            "sliding_window": 21,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
        "yarn rope": {"rope_parameters": YARN},
    },
    "gemma3": {
        "plain": {},
        "one kv head, window boundary inside the batch": {
            "num_key_value_heads": 1,
            "sliding_window": 64,
        },
        "soft-capped logits, own pattern": {
            "final_logit_softcapping": 5.0,
            "num_hidden_layers": 3,
            "layer_types": [FULL, SLIDING, FULL],
        },
        "scaled global rope": {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 700.0},
            }
        },
        "untied, three shards": {"tie_word_embeddings": False, "shard_bytes": 450_000},
    },
    "ministral": {"plain": {}, "own pattern": {"layer_types": [FULL, SLIDING, FULL]}},
    "ministral3": {"plain": {}, "tied, one kv head": {**TIED, "num_key_value_heads": 1}},
    "mistral3": {"plain": {}, "of Ministral 3": {"model_type": "ministral3", "head_dim": 24}},
    "qwen2_vl": {"plain": {}},
    "qwen2_5_vl": {"plain": {}, "three shards": {"shard_bytes": 220_000}},
    "qwen3_vl": {"plain": {}, "tied": TIED},
    "gemma3_vl": {"plain": TIED},
    "smollm3": {
        "plain": {},
        "only the second layer rotates, untied": {
            "no_rope_layers": [0, 1, 0, 0],
            "tie_word_embeddings": False,
        },
        "windows in layers that do not rotate, biases": {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 21,
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
    "phi3": {
        "plain": {},
        "three quarters rotate, no window, tied": {
            "rope_parameters": {**HALF, "partial_rotary_factor": 0.75},
            "sliding_window": None,
            **TIED,
        },
        "longrope, short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 1024},
        "longrope, long": {
            "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 2},
            "original_max_position_embeddings": 2,
        },
    },
    "granite": {
        "plain": {},
        "all multipliers, one kv head, biases": {
            "num_key_value_heads": 1,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    },
    "granite_swa": {
        "plain": {},
        "a base for each layer, one kv head, untied": {
            "layer_rope_theta": [500.0, 0, 9000.0, 0],
            "layer_types": [SLIDING, FULL, FULL, SLIDING],
            "num_key_value_heads": 1,
            "attention_multiplier": 0.2,
            **UNTIED,
        },
    },
    "hyperclovax": {
        "plain": {},
        "no norms behind the blocks, own scale, biases": {
            "use_post_norm": False,
            "attention_multiplier": 0.2,
            **ATTENTION_BIAS,
            "mlp_bias": True,
        },
    },
    "granite_hybrid": {
        "plain": {},
        "rotates, all multipliers": {
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    },
    "seed_oss": {
        "plain": {},
        "other biases": {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    },
    "olmo": {"plain": {}, "clipped, biases": {"clip_qkv": 0.7, "attention_bias": True}},
    "olmo2": {"plain": {}, "one kv head, biases": {"num_key_value_heads": 1, **ATTENTION_BIAS}},
    "olmo3": {
        "plain": {},
        "scaled global rope": {
            "rope_parameters": {FULL: {**YARN, "rope_theta": 5e5}, SLIDING: {"rope_theta": 5e5}}
        },
    },
    "glm": {"plain": {}, "a third rotates": {"rope_parameters": {**HALF, **THIRD}}},
    "glm4": {"plain": {}, "tied, no biases": {**TIED, "attention_bias": False}},
    "exaone4": {"plain": {}, "no windows": {"sliding_window": None, "layer_types": [FULL] * 4}},
    "ernie4_5": {"plain": {}, "biases, untied": {"use_bias": True, "tie_word_embeddings": False}},
    "helium": {
        "plain": {},
        "tied, one kv head, biases": {
            "num_key_value_heads": 1,
            "mlp_bias": True,
            **ATTENTION_BIAS,
            **TIED,
        },
    },
    "hunyuan": {
        "plain": {},
        "base with an exponent, biases": {
            "rope_parameters": {**DYNAMIC, "alpha": 50.0},
            **ATTENTION_BIAS,
        },
    },
    "gemma": {"plain": {}},
    "gemma2": {
        "plain": {},
        "no caps, one kv head, own pattern": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_key_value_heads": 1,
            "layer_types": [FULL, SLIDING, SLIDING],
        },
    },
    "vaultgemma": {
        "plain": {},
        "no caps, one kv head, untied, own pattern": {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "num_key_value_heads": 1,
            "layer_types": [FULL, SLIDING, SLIDING],
            **UNTIED,
        },
    },
    "cohere": {
        "plain": {},
        "q/k norms, biases": {"use_qk_norm": True, **ATTENTION_BIAS},
    },
    "cohere2": {"plain": {}, "own pattern": {"layer_types": [FULL, SLIDING, FULL, SLIDING]}},
    "stablelm": {
        "plain": {},
        "parallel, biases, half rotates": {
            "use_parallel_residual": True,
            "use_qkv_bias": True,
            "rope_parameters": HALF,
        },
    },
    "starcoder2": {
        "plain": {},
        "no biases, no window": {"use_bias": False, "sliding_window": None},
    },
    "arcee": {"plain": {}, "biases": {**ATTENTION_BIAS, "mlp_bias": True}},
    "nemotron": {
        "plain": {},
        "biases, all of a head rotates": {
            "rope_parameters": WHOLE,
            **ATTENTION_BIAS,
            "mlp_bias": True,
        },
    },
    "jais2": {
        "plain": {},
        "no biases, one kv head": {
            "attention_bias": False,
            "mlp_bias": False,
            "num_key_value_heads": 1,
        },
    },
    "apertus": {"plain": {}, "biases, plain rope": {"rope_parameters": WHOLE, **ATTENTION_BIAS}},
    "gpt2": {
        "plain": {},
        "untied, own inner size": {"tie_word_embeddings": False, "n_inner": 96},
        "three shards": {"shard_bytes": 300_000},
    },
    "gpt_bigcode": {"plain": {}, "many key/value heads, untied": {"multi_query": False, **UNTIED}},
    "gpt_neo": {
        "plain": {},
        "exact GELU, own inner size": {"activation_function": "gelu", **INNER},
    },
    "gptj": {"plain": {}, "all of a head rotates": {"rotary_dim": 16}},
    "gpt_neox": {
        "plain": {},
        "sequential, half rotates, no biases, tied": {
            "use_parallel_residual": False,
            "rope_parameters": HALF,
            "attention_bias": False,
            **TIED,
        },
    },
    "phi": {
        "plain": {},
        "one kv head, all of a head rotates": {"num_key_value_heads": 1, **WHOLLY},
    },
    "falcon": {
        "plain": {},
        "new decoder architecture": {"new_decoder_architecture": True, "num_kv_heads": 2},
        "of Falcon 2, untied": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            **UNTIED,
        },
        "ALiBi, biases, sequential": {
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
            "multi_query": False,
        },
    },
    "bloom": {"plain": {}, "three heads, untied": {"n_head": 3, "hidden_size": 96, **UNTIED}},
    "mpt": {
        "plain": {},
        "six heads, clipped, own scale": {
            "n_heads": 6,
            "d_model": 96,
            "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3},
        },
    },
    "opt": {"plain": {}, "no biases, untied": {"enable_bias": False, **UNTIED}},
}

LOOPED = frozenset(
    {
        ("cohere", "q/k norms, biases"),
        ("granite_swa", "plain"),
        ("granite_swa", "a base for each layer, one kv head, untied"),
    }
)
"""Shapes that the native stack does not compute, of families whose decoder is the common one."""


def is_stacked(family: str, shape: str) -> bool:
    """Whether the native stack computes the layers of a shape."""
    has_stack = ARCHITECTURES[architecture_of(family)].decoder == Architecture.decoder
    return has_stack and (family, shape) not in LOOPED


OF_POSITIONS = frozenset(
    {
        *("rope_parameters", "original_max_position_embeddings", "layer_types"),
        *("sliding_window", "use_sliding_window", "max_window_layers"),
    }
)


def has_matrices_of_plain(family: str, shape: str) -> bool:
    """Whether a shape differs from the family's plain one in rotations and windows only."""
    return shape != "plain" and SHAPES[family][shape].keys() <= OF_POSITIONS


STACKED = tuple(name for name in SHAPES if is_stacked(name, next(iter(SHAPES[name]))))
"""Families whose layers the native stack computes, in most of their shapes."""
FIRST = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2")
"""Families that stand for the others where a test runs every way of every shape; of the others,
most ways are `slow`."""


def crossed(ways: Iterable[str], usual: Container[str], least: str) -> list[Any]:
    """(family, shape) and way as parameters. By default each shape of the first families is tried
    in the way `least` and in every second one of `usual`, in turns; of the others, the last shape
    in the way `least`. The rest is `slow`."""
    found = []
    for family, shapes in SHAPES.items():
        for i, name in enumerate(shapes):
            for j, way in enumerate(ways):
                if family in FIRST:
                    is_usual = way == least or (way in usual and (i + j) % 2 == 0)
                else:
                    is_usual = way == least and i == len(shapes) - 1
                marks = () if is_usual else pytest.mark.slow
                case = pytest.param((family, name), way, marks=marks, id=f"{family}, {name}-{way}")
                found.append(case)
    return found
