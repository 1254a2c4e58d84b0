"""What the architectures of GGUF files are: their names in the registry, their keys and tensors.

llama.cpp names the same things alike in all architectures, so a row says only what differs. The
module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from infer.models.layer_forms import TensorLayout

RMS_EPS, LAYER_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"


@dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """One architecture of GGUF files."""

    architecture: str
    """Its name in the registry."""
    eps: tuple[str, str] = (RMS_EPS, "rms_norm_eps")
    """Key of the norms' epsilon, and its field in `config.json`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Keys that only this architecture has → fields of `config.json`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields that files do not say."""
    biases: Mapping[str, str] = field(
        default_factory=lambda: {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
    )
    """Fields that say whether there are biases → the part of layer 0 that has one."""
    pairs: bool = False
    """Whether the converter reordered the rows of queries and keys, so that neighbours rotate
    together."""
    shares: bool = False
    """Whether a part of each head may rotate."""
    windows: bool = False
    """Whether layers may have windows."""


_LAYER_NORM = (LAYER_EPS, "layer_norm_eps")
_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_BIAS = {"attention_bias": "attn_q"}
_NONE: Mapping[str, str] = {}
GGUF_FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily(architecture="LlamaForCausalLM", pairs=True),
    "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", biases=_NONE),
    "qwen2vl": GGUFFamily(architecture="Qwen2ForCausalLM", biases=_NONE),
    "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", biases=_BIAS),
    "qwen3vl": GGUFFamily(architecture="Qwen3ForCausalLM", biases=_BIAS),
    "gemma3": GGUFFamily(
        architecture="Gemma3ForCausalLM",
        keys={"rope.freq_base_swa": "rope_local_base_freq"},
        windows=True,
    ),
    "mistral3": GGUFFamily(
        architecture="MistralForCausalLM", fixed={"sliding_window": None}, biases=_NONE, pairs=True
    ),
    "gemma2": GGUFFamily(
        architecture="Gemma2ForCausalLM",
        keys={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        biases=_BIAS,
    ),
    "bloom": GGUFFamily(
        architecture="BloomForCausalLM",
        eps=(LAYER_EPS, "layer_norm_epsilon"),
        keys={"context_length": "seq_length"},
        biases=_NONE,
    ),
    "falcon": GGUFFamily(
        architecture="FalconForCausalLM", eps=(LAYER_EPS, "layer_norm_epsilon"), biases=_NONE
    ),
    "mpt": GGUFFamily(
        architecture="MptForCausalLM",
        eps=(LAYER_EPS, "layer_norm_epsilon"),
        keys={
            "attention.clamp_kqv": "clip_qkv",
            "attention.max_alibi_bias": "alibi_bias_max",
        },
        biases=_NONE,
    ),
    "starcoder": GGUFFamily(
        architecture="GPTBigCodeForCausalLM", eps=(LAYER_EPS, "layer_norm_epsilon"), biases=_NONE
    ),
    "gpt2": GGUFFamily(
        architecture="GPT2LMHeadModel", eps=(LAYER_EPS, "layer_norm_epsilon"), biases=_NONE
    ),
    "gptneox": GGUFFamily(
        architecture="GPTNeoXForCausalLM",
        eps=_LAYER_NORM,
        keys={"use_parallel_residual": "use_parallel_residual"},
        biases={"attention_bias": "attn_qkv"},
        shares=True,
    ),
    "phi2": GGUFFamily(architecture="PhiForCausalLM", eps=_LAYER_NORM, biases=_NONE, shares=True),
    "smollm3": GGUFFamily(architecture="SmolLM3ForCausalLM", pairs=True),
    "phi3": GGUFFamily(
        architecture="Phi3ForCausalLM",
        keys={"rope.scaling.original_context_length": "original_max_position_embeddings"},
        biases=_NONE,
        shares=True,
        windows=True,
    ),
    "granite": GGUFFamily(architecture="GraniteForCausalLM", keys=_MULTIPLIERS, pairs=True),
    "granitehybrid": GGUFFamily(
        architecture="GraniteMoeHybridForCausalLM",
        keys={**_MULTIPLIERS, "feed_forward_length": "shared_intermediate_size"},
        fixed={"num_local_experts": 0, "layer_types": ["attention"]},
        biases=_BIAS,
        pairs=True,
    ),
    "seed_oss": GGUFFamily(
        architecture="SeedOssForCausalLM",
        biases={
            "attention_bias": "attn_q",
            "attention_out_bias": "attn_output",
            "mlp_bias": "ffn_up",
        },
    ),
    "olmo": GGUFFamily(
        architecture="OlmoForCausalLM",
        eps=(LAYER_EPS, "layer_norm_eps"),
        keys={"attention.clamp_kqv": "clip_qkv"},
        biases=_BIAS,
        pairs=True,
    ),
    "olmo2": GGUFFamily(architecture="Olmo2ForCausalLM", biases=_BIAS, windows=True),
    "apertus": GGUFFamily(architecture="ApertusForCausalLM", biases=_BIAS),
    "chatglm": GGUFFamily(architecture="GlmForCausalLM", biases=_BIAS, shares=True),
    "glm4": GGUFFamily(architecture="Glm4ForCausalLM", biases=_BIAS, shares=True),
    "exaone4": GGUFFamily(architecture="Exaone4ForCausalLM", biases=_NONE, windows=True),
    "ernie4_5": GGUFFamily(architecture="Ernie4_5ForCausalLM", biases={"use_bias": "attn_q"}),
    "hunyuan-dense": GGUFFamily(architecture="HunYuanDenseV1ForCausalLM", biases=_BIAS),
    "gemma": GGUFFamily(architecture="GemmaForCausalLM", biases=_BIAS),
    "command-r": GGUFFamily(
        architecture="CohereForCausalLM",
        eps=_LAYER_NORM,
        keys={"logit_scale": "logit_scale"},
        biases=_BIAS,
    ),
    "cohere2": GGUFFamily(
        architecture="Cohere2ForCausalLM",
        eps=_LAYER_NORM,
        keys={"logit_scale": "logit_scale"},
        biases=_BIAS,
        windows=True,
    ),
    "stablelm": GGUFFamily(
        architecture="StableLmForCausalLM",
        eps=_LAYER_NORM,
        keys={"use_parallel_residual": "use_parallel_residual"},
        biases={"use_qkv_bias": "attn_q"},
        shares=True,
    ),
    "starcoder2": GGUFFamily(
        architecture="Starcoder2ForCausalLM",
        eps=(LAYER_EPS, "norm_epsilon"),
        biases={"use_bias": "attn_q"},
        windows=True,
    ),
    "arcee": GGUFFamily(architecture="ArceeForCausalLM", pairs=True),
    "jais2": GGUFFamily(architecture="Jais2ForCausalLM", eps=_LAYER_NORM),
    "nemotron": GGUFFamily(
        architecture="NemotronForCausalLM", eps=(LAYER_EPS, "norm_eps"), shares=True
    ),
}
"""The supported architectures by their name in GGUF files."""
ARCHITECTURES: Mapping[str, str] = {
    name: family.architecture for name, family in GGUF_FAMILIES.items()
}
"""Name of an architecture in GGUF files → its name in the registry."""
VARIANTS: Mapping[str, tuple[str, str]] = {
    "mistral3": ("attention.temperature_scale", "Ministral3ForCausalLM"),
    "olmo2": ("attention.sliding_window", "Olmo3ForCausalLM"),
}
"""Architectures that are another one of the registry in files with a key."""
REQUIRED: Mapping[str, str] = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
}
"""Keys that every file must have → fields of `config.json`; the norms' epsilon is another."""
GPT2_REQUIRED: Mapping[str, str] = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "context_length": "n_positions",
    "attention.head_count": "n_head",
}
OPTIONAL: Mapping[str, str] = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
ROPE_SCALING: Mapping[str, str] = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
NEUTRAL: Mapping[str, Any] = {
    **dict.fromkeys(("expert_count", "logit_scale", "attn_logit_softcapping"), 0),
    **dict.fromkeys(("embedding_scale", "residual_scale"), 0),
    **{f"attention.{name}": 0 for name in ("scale", "clamp_kqv", "max_alibi_bias")},
    "attention.temperature_scale": 0,
    **{f"rope.scaling.{name}": 0 for name in ("alpha", "yarn_log_multiplier")},
    **{f"rope.scaling.{name}": 1 for name in ("attn_factor", "yarn_attn_factor")},
    "rope.scaling.yarn_ext_factor": 1,
    "attention.causal": True,
    "use_parallel_residual": False,
    "attention.sliding_window": 0,
    "final_logit_softcapping": 0,
}
"""Keys whose effect on the mathematics is supported in some architectures or in none, each with the
value that has no effect."""
_PARTS: Mapping[str, str] = {
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "o_proj": "attn_output",
    "attention_in_norm": "attn_norm",
    "attention_out_norm": "post_attention_norm",
    "mlp_in_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
    **{f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "embed_tokens": "token_embd",
    "embed_positions": "position_embd",
    "embed_norm": "token_embd_norm",
    **{name: name for name in ("alpha_p", "alpha_n")},
    "norm": "output_norm",
}


def layout_of(tensors: Container[str], *, pairs: bool) -> TensorLayout:
    """How a file with these tensors names and arranges them.

    `pairs`: whether neighbouring rows of queries and keys rotate together."""
    names = dict(_PARTS)
    if "blk.0.attn_qkv.weight" in tensors:
        names |= dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_qkv")
    if "blk.0.ffn_gate.weight" not in tensors:
        names["gate_proj"] = "ffn_up"  # packed, if the family has a gate
    if "blk.0.attn_norm_2.weight" in tensors:  # Falcon's own norm of attention
        names |= {"attention_in_norm": "attn_norm_2", "mlp_in_norm": "attn_norm"}
    elif "blk.0.ffn_norm.weight" not in tensors:
        names["mlp_in_norm"] = "post_attention_norm"
    return TensorLayout(roots=("",), layers="blk.", names=names, head="output", pairs=pairs)
