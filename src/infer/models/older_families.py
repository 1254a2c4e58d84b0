"""How the configs of the families before Llama are read: GPT-2 and those after it.

They have LayerNorm with biases, MLPs without a gate, and names of their own for the same sizes. The
module imports the standard library only.
"""

from __future__ import annotations

from infer.models.families import GELU_TANH, LAYER_NORM, read_dtype
from infer.models.layer_forms import LayerForm, TensorLayout
from infer.models.model_config import MAX_LAYERS, ConfigReader, ModelConfig

GPT2_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "norm": "ln_f",
    "attention_in_norm": "ln_1",
    "mlp_in_norm": "ln_2",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn.c_attn"),
    "o_proj": "attn.c_proj",
    "up_proj": "mlp.c_fc",
    "down_proj": "mlp.c_proj",
}
"""GPT-2's names of tensors."""


def read_gpt2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-2: the same sizes under other names; learned positions."""
    hidden, heads = reader.size("n_embd"), reader.size("n_head")
    reader.only("activation_function", GELU_TANH[:2], "gelu_new")
    reader.only("scale_attn_weights", (True,), True)
    reader.only("scale_attn_by_inverse_layer_idx", (False,), False)
    reader.only("add_cross_attention", (False,), False)
    if hidden % heads:
        reader.problems.append(f"n_embd ({hidden}) must be a multiple of n_head ({heads})")
    num_layers = reader.size("n_layer", most=MAX_LAYERS)
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("n_inner", 4 * hidden),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=max(1, hidden // heads),
        max_seq_len=reader.size("n_positions", 1024),
        norm_eps=reader.positive("layer_norm_epsilon", 1e-5),
        tie_embeddings=reader.get("tie_word_embeddings", bool, True),
        dtype=read_dtype(reader),
        ropes=(None,) * num_layers,
        positions_offset=0,
        form=LayerForm(norm=LAYER_NORM, gated=False, activation="gelu_tanh"),
        layout=TensorLayout(
            roots=("transformer.", ""),
            layers="h.",
            names=GPT2_NAMES,
            transposed=True,
            ignored=("attn.bias", "attn.masked_bias"),
        ),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
