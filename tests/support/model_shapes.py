"""Unusual shapes on which each family is compared with transformers: family → name → config."""

from __future__ import annotations

from typing import Any

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
    "gpt2": {
        "plain": {},
        "untied, own inner size": {"tie_word_embeddings": False, "n_inner": 96},
        "three shards": {"shard_bytes": 300_000},
    },
}
