"""How the configs of the families before Llama are read: GPT-2 and those after it.

They have LayerNorm with biases, MLPs without a gate, and names of their own for the same sizes. The
module imports the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infer.models.families import GELU_TANH, LAYER_NORM, decoder, read_dtype
from infer.models.layer_forms import LayerForm, NormForm, TensorLayout
from infer.models.model_config import MAX_LAYERS, Alibi, ConfigReader, ModelConfig

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


_BLOOM_NAMES = {
    "embed_tokens": "word_embeddings",
    "embed_norm": "word_embeddings_layernorm",
    "norm": "ln_f",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attention.query_key_value"),
    "o_proj": "self_attention.dense",
    "up_proj": "mlp.dense_h_to_4h",
    "down_proj": "mlp.dense_4h_to_h",
}
_MPT_NAMES = {
    "embed_tokens": "wte",
    "norm": "norm_f",
    "attention_in_norm": "norm_1",
    "mlp_in_norm": "norm_2",
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn.Wqkv"),
    "o_proj": "attn.out_proj",
    "up_proj": "ffn.up_proj",
    "down_proj": "ffn.down_proj",
}
_BUFFERS = ("attn.bias", "attn.masked_bias", "attn.attention.bias", "attn.attention.masked_bias")
"""Causal masks, which old checkpoints store."""
_OWN_HEADS = {"num_key_value_heads": None, "head_dim": None}
"""Fields that the families do not have: each query head has its own keys and values."""
_ACTIVATIONS: Mapping[str, str] = {
    **dict.fromkeys(GELU_TANH, "gelu_tanh"),
    **{"gelu": "gelu", "relu": "relu"},
}
"""Names of activations in configs → their names in `LayerForm`."""


def read_gpt2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-2: the same sizes under other names; learned positions."""
    reader.only("scale_attn_by_inverse_layer_idx", (False,), False)
    config = _gpt2(architecture, reader, "gelu_new")
    return replace(config, layout=replace(config.layout, transposed=True))


def read_bigcode(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of StarCoder 1: GPT-2's, with one key/value head."""
    reader.use_defaults(tie_word_embeddings=True)
    config = _gpt2(architecture, reader, "gelu_pytorch_tanh")
    if not reader.get("multi_query", bool, True):
        return replace(config, layout=replace(config.layout, grouped=True))
    return replace(config, num_kv_heads=1)


def read_gptj(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-J: parallel blocks behind one norm; pairs of a part of each head rotate."""
    reader.use_defaults(n_positions=2048, tie_word_embeddings=False)
    config = _gpt2(architecture, reader, "gelu_new")
    rotary = reader.size("rotary_dim", 64)
    if rotary > config.head_dim or rotary % 2:
        reader.problems.append(f"rotary_dim ({rotary}) must be even, and {config.head_dim} at most")
        rotary = config.head_dim
    names = {
        **GPT2_NAMES,
        **{f"{part}_proj": f"attn.{part}_proj" for part in "qkv"},
        **{"o_proj": "attn.out_proj", "up_proj": "mlp.fc_in", "down_proj": "mlp.fc_out"},
    }
    return replace(
        config,
        positions_offset=None,
        ropes=(),
        rope=replace(config.rope, rotary_size=None if rotary == config.head_dim else rotary),
        qkv_bias=False,
        o_bias=False,
        head_bias=True,
        form=replace(config.form, parallel=True, one_norm=True),
        layout=replace(config.layout, names=names, pairs=True),
    )


def _kinds_of_layers(types: Any, count: int) -> list[str]:
    """For each of `count` layers "global" or "local"; none where `types` does not say that."""
    kinds = list[str]()
    for entry in types if isinstance(types, list) else ():
        match entry:
            case [[*some], int(times)] if len(some) * times <= count - len(kinds):
                kinds += some * min(times, count)
            case _:
                return []
    is_whole = len(kinds) == count and all(kind in ("global", "local") for kind in kinds)
    return kinds if is_whole else []


def read_gpt_neo(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-Neo: windows in every other layer, and scores without a scale."""
    reader.use_defaults(tie_word_embeddings=True)
    types = reader.raw.get("attention_types") or [[["global", "local"], 12]]
    fields = {
        "n_embd": reader.size("hidden_size"),
        "n_head": reader.size("num_heads"),
        "n_layer": reader.size("num_layers", most=MAX_LAYERS),
        "n_positions": reader.size("max_position_embeddings", 2048),
    }
    kinds = _kinds_of_layers(types, fields["n_layer"])
    if not kinds:
        reader.problems.append(
            f"attention_types must give global or local for each layer, not {types!r:.80}"
        )
        kinds = ["global"] * fields["n_layer"]
    reader.use({**reader.raw, **fields, "n_inner": reader.raw.get("intermediate_size")})
    config = _gpt2(architecture, reader, "gelu_new")
    window = reader.size("window_size", 256)
    names = {
        **GPT2_NAMES,
        **{f"{part}_proj": f"attn.attention.{part}_proj" for part in "qkv"},
        "o_proj": "attn.attention.out_proj",
    }
    return replace(
        config,
        query_scale=1.0,
        qkv_bias=False,
        windows=tuple(window if kind == "local" else None for kind in kinds),
        layout=replace(config.layout, names=names),
    )


def read_opt(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of OPT: learned positions, of which the first two are not used; ReLU."""
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        reader.only(name, (True,), True)
    reader.only("_remove_final_layer_norm", (False,), False)
    hidden = reader.size("hidden_size")
    reader.only("word_embed_proj_dim", (None, hidden), None)
    inner = reader.size("ffn_dim", 4 * hidden)
    reader.use({**reader.raw, **_OWN_HEADS, "intermediate_size": inner})
    reader.use_defaults(tie_word_embeddings=True)
    bias = reader.get("enable_bias", bool, True)
    act = str(reader.only("activation_function", tuple(_ACTIVATIONS), "relu"))
    config = decoder(architecture, reader, acts=None, eps=None, rotates=False)
    names = {
        "norm": "final_layer_norm",
        "attention_in_norm": "self_attn_layer_norm",
        "mlp_in_norm": "final_layer_norm",
        **{"o_proj": "self_attn.out_proj", "up_proj": "fc1", "down_proj": "fc2"},
    }
    return replace(
        config,
        norm_eps=1e-5,
        ropes=(None,) * config.num_layers,
        positions_offset=2,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        form=_form(act),
        layout=TensorLayout(roots=("model.decoder.", "decoder."), names=names),
    )


def read_neox(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-NeoX and Pythia: parallel blocks; a part of each head rotates."""
    reader.use({**reader.raw, **_OWN_HEADS})
    reader.use_defaults(layer_norm_eps=1e-5, rope_theta=reader.raw.get("rotary_emb_base", 1e4))
    parallel = reader.get("use_parallel_residual", bool, True)
    act = str(reader.only("hidden_act", tuple(_ACTIVATIONS), "gelu"))
    bias = reader.get("attention_bias", bool, True)
    config = decoder(architecture, reader, acts=None, eps="layer_norm_eps", share=0.25)
    names = {
        "embed_tokens": "embed_in",
        "norm": "final_layer_norm",
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.query_key_value"),
        "o_proj": "attention.dense",
        **{"up_proj": "mlp.dense_h_to_4h", "down_proj": "mlp.dense_4h_to_h"},
    }
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        form=replace(_form(act), parallel=parallel),
        layout=TensorLayout(
            roots=("gpt_neox.",),
            names=names,
            head="embed_out",
            grouped=True,
            ignored=("attention.bias", "attention.masked_bias"),
        ),
    )


def read_phi(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Phi-1 and Phi-2: parallel blocks with one norm; a part of each head rotates."""
    reader.use_defaults(layer_norm_eps=1e-5)
    reader.only("qk_layernorm", (False,), False)
    act = str(reader.only("hidden_act", tuple(_ACTIVATIONS), "gelu_new"))
    config = decoder(architecture, reader, acts=None, eps="layer_norm_eps", share=0.5)
    names = {
        "norm": "final_layernorm",
        **{"o_proj": "self_attn.dense", "up_proj": "mlp.fc1", "down_proj": "mlp.fc2"},
    }
    return replace(
        config,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        form=replace(_form(act), parallel=True, one_norm=True),
        layout=TensorLayout(names=names),
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The slopes of ALiBi (Press et al. 2021, arXiv:2108.12409) for H heads.

    They are 2^(-8 · i / n) for i = 1 … n, where n is H or else the next power of two; of
    these the even i first, then the odd ones, as many as there are heads."""
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]
    if count != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return tuple(slopes)


def read_falcon(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Falcon 1 and 2: parallel blocks with one norm or two, or ALiBi."""
    is_new = reader.get("new_decoder_architecture", bool, False)
    is_parallel = reader.get("parallel_attn", bool, True)
    if is_new:
        reader.only("parallel_attn", (True,), True)
    norms = reader.only("num_ln_in_parallel_attn", (None, 1, 2) if is_new else (None, 1), None)
    has_one_key = not is_new and reader.get("multi_query", bool, True)
    heads = reader.size("num_attention_heads")
    groups = 1 if has_one_key else reader.size("num_kv_heads", heads)
    if not is_new and not has_one_key and groups != heads:
        reader.problems.append(f"num_kv_heads ({groups}) must be num_attention_heads ({heads})")
    hidden = reader.raw.get("n_embed") or reader.size("hidden_size")
    sizes = {"hidden_size": hidden, "num_key_value_heads": groups, "head_dim": None}
    sizes["intermediate_size"] = reader.raw.get("ffn_hidden_size")
    reader.use({**reader.raw, **sizes})
    if isinstance(hidden, int):
        reader.use_defaults(intermediate_size=4 * hidden)
    reader.use_defaults(tie_word_embeddings=True, layer_norm_epsilon=1e-5)
    act = str(reader.only("activation", tuple(_ACTIVATIONS), "gelu"))
    has_slopes = reader.get("alibi", bool, False)
    config = decoder(
        architecture, reader, acts=None, eps="layer_norm_epsilon", rotates=not has_slopes
    )
    if has_slopes:
        alibi = Alibi(slopes=alibi_slopes(heads), rounded=config.head_dim**-0.5)
        config = replace(config, alibi=alibi, ropes=(None,) * config.num_layers)
    bias = reader.get("bias", bool, False)
    names, has_two = dict(_BLOOM_NAMES), is_new and norms != 1
    if has_two:
        names |= {"attention_in_norm": "ln_attn", "mlp_in_norm": "ln_mlp"}
    form = replace(_form(act), parallel=is_parallel, one_norm=is_parallel and not has_two)
    return replace(
        config,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        form=form,
        layout=TensorLayout(
            roots=("transformer.", ""),
            layers="h.",
            names=names,
            grouped=not has_one_key,
            ignored=("self_attention.maybe_rotary.inv_freq", "self_attention.rotary_emb.inv_freq"),
        ),
    )


def read_bloom(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Bloom: ALiBi, and a norm of the embeddings."""
    reader.only("apply_residual_connection_post_layernorm", (False,), False)
    raw = reader.raw
    hidden = raw.get("n_embed") or raw.get("hidden_size") or 64
    others = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    fields = reader.renamed(others)
    inner = 4 * hidden if isinstance(hidden, int) else None
    fields |= {"hidden_size": hidden, "intermediate_size": inner}
    fields["max_position_embeddings"] = raw.get("seq_length")
    reader.use({**raw, **_OWN_HEADS, **fields})
    reader.use_defaults(tie_word_embeddings=True, layer_norm_epsilon=1e-5)
    config = decoder(architecture, reader, acts=None, eps="layer_norm_epsilon", rotates=False)
    return replace(
        config,
        ropes=(None,) * config.num_layers,
        alibi=Alibi(slopes=alibi_slopes(config.num_heads)),
        embedding_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        form=_form("gelu_new"),
        layout=TensorLayout(
            roots=("transformer.", ""), layers="h.", names=_BLOOM_NAMES, grouped=True
        ),
    )


_MPT_ATTENTION: Mapping[str, tuple[object, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
    "alibi_bias_max": (8, 8.0),  # transformers has it fixed
}
"""Fields of `attn_config` → the values that are supported, the class's first."""


def read_mpt(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of MPT: ALiBi, LayerNorm without biases."""
    raw = reader.raw
    reader.only("expansion_ratio", (4,), 4)  # transformers has it fixed
    reader.only("no_bias", (True,), True)
    reader.only("logit_scale", (None,), None)
    reader.only("embedding_fraction", (1, 1.0), 1)
    given = raw.get("attn_config")
    if given is None:  # of a GGUF file, which has both fields that matter
        given = {name: raw.get(name) for name in ("clip_qkv", "alibi_bias_max")}
        reader.asked.update(given)
    part = ConfigReader(given if isinstance(given, Mapping) else {}, reader.where)
    for name, supported in _MPT_ATTENTION.items():
        part.only(name, supported, supported[0])
    clip = part.positive("clip_qkv", None) if part.raw.get("clip_qkv") else None
    scale = part.positive("softmax_scale", None)
    reader.problems.extend(f"attn_config: {problem}" for problem in part.problems)
    others = {
        **{"hidden_size": "d_model", "num_attention_heads": "n_heads"},
        **{"num_hidden_layers": "n_layers", "max_position_embeddings": "max_seq_len"},
    }
    fields = reader.renamed(others)
    hidden = fields["hidden_size"]
    fields["intermediate_size"] = 4 * hidden if isinstance(hidden, int) else None
    reader.use({**raw, **_OWN_HEADS, **fields})
    reader.use_defaults(tie_word_embeddings=True, layer_norm_epsilon=1e-5)
    config = decoder(architecture, reader, acts=None, eps="layer_norm_epsilon", rotates=False)
    form = replace(_form("gelu"), norm=NormForm(centred=True), qkv_clip=clip)
    return replace(
        config,
        ropes=(None,) * config.num_layers,
        alibi=Alibi(slopes=alibi_slopes(config.num_heads)),
        query_scale=scale,
        form=form,
        layout=TensorLayout(roots=("transformer.", ""), layers="blocks.", names=_MPT_NAMES),
    )


def _form(activation: str) -> LayerForm:
    """LayerNorm and an MLP without a gate, with an activation by its name in configs."""
    return LayerForm(norm=LAYER_NORM, gated=False, activation=_ACTIVATIONS.get(activation, "gelu"))


def _gpt2(architecture: str, reader: ConfigReader, activation: str) -> ModelConfig:
    """What GPT-2 and its relatives share. `activation`: the class's."""
    hidden, heads = reader.size("n_embd"), reader.size("n_head")
    act = str(reader.only("activation_function", tuple(_ACTIVATIONS), activation))
    reader.only("scale_attn_weights", (True,), True)
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
        form=_form(act),
        layout=TensorLayout(
            roots=("transformer.", ""), layers="h.", names=GPT2_NAMES, ignored=_BUFFERS
        ),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )
