"""How each model family's `config.json` is read into a `ModelConfig`.

There is one function per family. A field that changes the mathematics and is not supported is
added by name to the reader's list of problems; no such field is ignored. Only `models.registry`
uses this module. It imports the standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from infer.models.model_config import MAX_LAYERS, ConfigReader, ModelConfig, RopeConfig
from infer.models.rope_config import read_rope, read_rope_spec

Windows = tuple[int | None, ...]
"""Sliding window of each layer, as in `ModelConfig.windows`."""


def read_llama(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Llama 2 and 3."""
    reader.only("pretraining_tp", (1,), 1)
    config = _decoder(architecture, reader, may_have_bias=True)
    return dataclasses.replace(config, mlp_bias=reader.get("mlp_bias", bool, False))


def read_mistral(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Mistral's dense models: Llama's; older ones have a window on every layer."""
    config = _decoder(architecture, reader)
    window = reader.raw.get("sliding_window")
    if window is None:
        return config
    return dataclasses.replace(config, windows=(reader.size("sliding_window"),) * config.num_layers)


def read_qwen2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Qwen2 and Qwen2.5: q/k/v biases; an optional window in the upper layers."""
    config = _decoder(architecture, reader)
    return dataclasses.replace(config, qkv_bias=True, windows=_qwen_windows(config, reader))


def read_qwen3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of dense Qwen3: norms on query and key heads; a head size of its own."""
    config = _decoder(architecture, reader, may_have_bias=True)
    return dataclasses.replace(config, qk_norm=True, windows=_qwen_windows(config, reader))


def read_gemma3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Gemma 3's text models, and of the text part of its multimodal ones."""
    text = reader.raw.get("text_config")
    if isinstance(text, Mapping):
        inherited = {k: reader.raw[k] for k in ("dtype", "torch_dtype") if k in reader.raw}
        reader.use({**inherited, **text})
    reader.only("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    reader.only("attn_logit_softcapping", (None,), None)
    reader.only("use_bidirectional_attention", (False,), False)
    # The file omits fields that have the family's default value.
    defaults = {
        "rms_norm_eps": 1e-6,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
    }
    reader.use({**defaults, **{k: v for k, v in reader.raw.items() if v is not None}})
    config = _decoder(architecture, reader, may_have_bias=True, is_llama=False)
    scalar = reader.positive("query_pre_attn_scalar", 256)
    pattern = reader.size("sliding_window_pattern", 6)
    windows = _windows(reader, config.num_layers, lambda i: (i + 1) % pattern != 0)
    rope, local = _gemma3_ropes(reader, config.max_seq_len)
    return dataclasses.replace(
        config,
        qk_norm=True,
        query_scale=scalar**-0.5,
        windows=windows,
        rope=rope,
        ropes=tuple(rope if window is None else local for window in windows),
        final_softcap=reader.positive("final_logit_softcapping", None),
    )


def read_gpt2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GPT-2: the same sizes under other names; learned positions."""
    hidden, heads = reader.size("n_embd"), reader.size("n_head")
    reader.only("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
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
        dtype=_dtype(reader),
        ropes=(None,) * num_layers,
    )


def _decoder(
    architecture: str, reader: ConfigReader, *, may_have_bias: bool = False, is_llama: bool = True
) -> ModelConfig:
    """The fields that Llama and its relatives share.

    `may_have_bias`: `attention_bias` is read. `is_llama`: the activation and RoPE are read as well.
    """
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    if is_llama:
        reader.only("hidden_act", ("silu",), "silu")
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problems.append(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    head_dim = reader.size("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        reader.problems.append(f"the size of a head must be even, not {head_dim}")
    max_position = reader.size("max_position_embeddings", 2048)
    bias = may_have_bias and reader.get("attention_bias", bool, False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=reader.size("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.size("intermediate_size"),
        num_layers=reader.size("num_hidden_layers", most=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_seq_len=max_position,
        norm_eps=reader.positive("rms_norm_eps", 1e-6),
        tie_embeddings=reader.get("tie_word_embeddings", bool, False),
        dtype=_dtype(reader),
        qkv_bias=bias,
        o_bias=bias,
        rope=read_rope(reader, max_position=max_position) if is_llama else RopeConfig(),
    )


def _dtype(reader: ConfigReader) -> str:
    name = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    return str(reader.only(name, ("bfloat16", "float16", "float32"), "float32"))


def _qwen_windows(config: ModelConfig, reader: ConfigReader) -> Windows:
    if not reader.get("use_sliding_window", bool, False):
        return ()
    first = reader.get("max_window_layers", int, 28)
    return _windows(reader, config.num_layers, lambda i: i >= first)


def _windows(reader: ConfigReader, num_layers: int, slides: Callable[[int], bool]) -> Windows:
    """The window of each layer, from `layer_types` or else from `slides`.

    `slides(i)`: whether layer i has a window where the config has no `layer_types`.
    """
    known = ("sliding_attention", "full_attention")
    usual = [known[0] if slides(i) else known[1] for i in range(num_layers)]
    layer_types = reader.raw.get("layer_types") or usual
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(kind not in known for kind in layer_types)
    ):
        reader.problems.append(
            f"layer_types must be {num_layers} of {' or '.join(known)}, not {layer_types!r:.200}"
        )
        return ()
    if "sliding_attention" not in layer_types:
        return ()
    window = reader.size("sliding_window", 4096)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _spec(reader: ConfigReader, spec: Any) -> Mapping[str, Any]:
    if isinstance(spec, Mapping):
        return spec
    reader.problems.append(f"a specification of RoPE must be an object, not {spec!r:.80}")
    return {}


def _gemma3_ropes(reader: ConfigReader, max_position: int) -> Any:
    """(RoPE of the global layers, RoPE of the sliding layers).

    transformers 5 writes both into `rope_parameters`; older versions write separate fields.
    """
    raw = reader.raw
    both = raw.get("rope_parameters")
    if isinstance(both, Mapping) and "full_attention" in both:
        full, local = both["full_attention"] or {}, both.get("sliding_attention") or {}
        full, local = _spec(reader, full), _spec(reader, local)
        theta = full.get("rope_theta", 1_000_000.0)
        local_theta = local.get("rope_theta", 10_000.0)
    else:
        full, local = _spec(reader, raw.get("rope_scaling") or {}), {}
        theta = raw.get("rope_theta", 1_000_000.0)
        local_theta = raw.get("rope_local_base_freq", 10_000.0)
    return (
        read_rope_spec(reader, full, theta, max_position=max_position),
        read_rope_spec(reader, local, local_theta, max_position=max_position),
    )
