"""How each model family's `config.json` is read into a `ModelConfig`.

There is one function per family. A field that changes the mathematics and is not supported is
added by name to the reader's list of problems; no such field is ignored. A field that is absent has
the value of the family's class. Only `models.registry` uses this module; `models.older_families`
has the families before Llama. It imports the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infer.models.layer_forms import LayerForm, NormForm, TensorLayout
from infer.models.model_config import (
    MAX_LAYERS,
    MAX_NUMBER,
    ConfigReader,
    ModelConfig,
    RopeConfig,
)
from infer.models.rope_config import read_rope, read_rope_spec

Windows = tuple[int | None, ...]
"""Sliding window of each layer, as in `ModelConfig.windows`."""
Read = Callable[[str, ConfigReader], ModelConfig]
"""A function that reads the config of a family: (architecture, reader) → config."""
GELU_TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Names of the tanh approximation of GELU."""
LAYER_NORM = NormForm(centred=True, bias=True)
"""LayerNorm with weight and bias."""
GEMMA = LayerForm(norm=NormForm(add_one=True), activation="gelu_tanh")
SANDWICH = {
    "mlp_in_norm": "pre_feedforward_layernorm",
    "attention_out_norm": "post_attention_layernorm",
}
"""Gemma's names of norms before and after a block."""
PACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "self_attn.qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up_proj"),
}
"""Phi-3's names of packed projections."""


def text_part(texts: Mapping[str, Read], *, is_tied: bool = False) -> Read:
    """The reader of a multimodal checkpoint's text part.

    `texts`: the reader for each `model_type` of the text part; the first is for files that do not
    say. `is_tied`: whether the class ties its head, which the outer config says before the text's.
    """

    def read(architecture: str, reader: ConfigReader) -> ModelConfig:
        outer, text = reader.raw, reader.raw.get("text_config")
        kind = None
        if isinstance(text, Mapping):
            dtypes = {k: outer[k] for k in ("dtype", "torch_dtype") if k in outer}
            ties = (part.get("tie_word_embeddings") for part in (outer, text))
            tied = next((tie for tie in ties if tie is not None), is_tied)
            reader.use({**dtypes, **text, "tie_word_embeddings": tied})
            kind = text.get("model_type")
        if kind is not None and str(kind) not in texts:
            reader.problems.append(
                f"text_config.model_type={kind!r:.80} is not supported"
                f" (supported: {', '.join(texts)})"
            )
        config = texts.get(str(kind), next(iter(texts.values())))(architecture, reader)
        roots = ("model.language_model.", "language_model.model.", "model.")
        return replace(config, layout=replace(config.layout, roots=roots, text_part=True))

    return read


def read_llama(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Llama 2 and 3."""
    reader.only("pretraining_tp", (1,), 1)
    config = decoder(architecture, reader, bias=True)
    return replace(config, mlp_bias=reader.get("mlp_bias", bool, False))


def read_mistral(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Mistral's dense models: Llama's; older ones have a window on every layer."""
    reader.use_defaults(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096)
    return with_window(decoder(architecture, reader), reader)


def read_ministral(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Ministral of 2024: Mistral's, in which some layers may see all positions."""
    reader.use_defaults(num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096)
    config = decoder(architecture, reader)
    has_window = reader.raw.get("sliding_window") is not None
    windows = layer_windows(reader, config.num_layers, lambda i: has_window)
    return replace(config, windows=windows)


def read_ministral3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Ministral 3: Mistral's, with queries that grow beyond the original context."""
    reader.use_defaults(
        num_key_value_heads=8, rms_norm_eps=1e-5, head_dim=128, max_position_embeddings=262_144
    )
    if not reader.raw.get("rope_scaling"):
        reader.use_defaults(
            rope_parameters={
                **{"type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0},
                **{"original_max_position_embeddings": 16_384, "mscale_all_dim": 1.0},
                "llama_4_scaling_beta": 0.1,
            }
        )
    reader.asked.add("llama_4_scaling_beta")
    config = with_window(decoder(architecture, reader), reader)
    spec = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling")
    part = ConfigReader(spec if isinstance(spec, Mapping) else {}, reader.where)
    growth = part.get("llama_4_scaling_beta", (int, float), 0)
    reader.problems.extend(part.problems)
    return replace(config, rope=replace(config.rope, query_growth=float(growth)))


def read_cwm(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Code World Model: Llama 3's; three of four layers have windows."""
    reader.use_defaults(
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        head_dim=128,
        sliding_window=8192,
    )
    if not reader.raw.get("rope_scaling"):
        reader.use_defaults(
            rope_parameters={
                **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            }
        )
    reader.only("pretraining_tp", (1,), 1)
    config = decoder(architecture, reader, theta=1e6)
    windows = layer_windows(reader, config.num_layers, lambda i: i % 4 != 0)
    return replace(config, windows=windows, mlp_bias=reader.get("mlp_bias", bool, False))


def read_qwen2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Qwen2 and Qwen2.5: q/k/v biases; an optional window in the upper layers."""
    reader.use_defaults(num_key_value_heads=32, max_position_embeddings=32_768)
    config = decoder(architecture, reader)
    return replace(config, qkv_bias=True, windows=_qwen_windows(config, reader))


def read_qwen2_vl(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The text part of Qwen2-VL and Qwen2.5-VL, whose three positions are equal in texts."""
    reader.use_defaults(
        num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5, max_window_layers=80
    )
    _forget_mrope(reader)
    return read_qwen2(architecture, reader)


def read_qwen3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of dense Qwen3: norms on query and key heads; a head size of its own."""
    reader.use_defaults(num_key_value_heads=32, max_position_embeddings=32_768, head_dim=128)
    config = decoder(architecture, reader, bias=True)
    return replace(config, qk_norm=True, windows=_qwen_windows(config, reader))


def read_qwen3_vl(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The text part of Qwen3-VL."""
    reader.use_defaults(rope_theta=5e5, max_position_embeddings=128_000)
    _forget_mrope(reader)
    return read_qwen3(architecture, reader)


def read_seed_oss(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Seed-OSS: Llama's, with a switch for each kind of bias."""
    reader.use_defaults(num_key_value_heads=8, max_position_embeddings=524_288, head_dim=128)
    return replace(
        decoder(architecture, reader),
        qkv_bias=reader.get("attention_bias", bool, True),
        o_bias=reader.get("attention_out_bias", bool, False),
        mlp_bias=reader.get("mlp_bias", bool, False),
    )


def read_smollm3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of SmolLM3: Llama's; layers that do not rotate, which may have a window."""
    reader.use_defaults(
        num_key_value_heads=4, max_position_embeddings=32_768, tie_word_embeddings=True
    )
    config = decoder(architecture, reader, bias=True, theta=2e6)
    every = reader.size("no_rope_layer_interval", 4)
    usual = [int((i + 1) % every != 0) for i in range(config.num_layers)]
    reader.asked.add("no_rope_layers")
    rotates = reader.raw.get("no_rope_layers") or usual  # 1: the layer rotates
    if not isinstance(rotates, list) or len(rotates) < config.num_layers:
        reader.problems.append(f"no_rope_layers must have {config.num_layers} items")
        rotates = usual
    windows: Windows = ()
    if reader.get("use_sliding_window", bool, False) and reader.raw.get("sliding_window"):
        windows = layer_windows(reader, config.num_layers, lambda i: not rotates[i])
    return replace(
        config,
        mlp_bias=reader.get("mlp_bias", bool, False),
        ropes=tuple(config.rope if rotates[i] else None for i in range(config.num_layers)),
        windows=windows,
    )


def read_phi3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Phi-3 and Phi-4: packed projections; a part of each head may rotate."""
    reader.use_defaults(
        rms_norm_eps=1e-5, max_position_embeddings=4096, original_max_position_embeddings=4096
    )
    longrope = dict.fromkeys(("su", "yarn"), "longrope")
    config = decoder(architecture, reader, share=1.0, renamed=longrope)
    return replace(with_window(config, reader), layout=TensorLayout(names=PACKED))


def read_granite(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Granite 3, dense: Llama's, with four multipliers."""
    config = decoder(architecture, reader, bias=True)
    return replace(
        config,
        mlp_bias=reader.get("mlp_bias", bool, False),
        query_scale=reader.positive("attention_multiplier", 1.0),
        embedding_scale=reader.positive("embedding_multiplier", 1.0),
        form=LayerForm(residual_scale=reader.positive("residual_multiplier", 1.0)),
        logits_scale=1.0 / reader.positive("logits_scaling", 1.0),
    )


def read_hyperclovax(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of HyperCLOVA X: Granite's, with norms behind the blocks, too.

    Logits are multiplied by `logits_scaling`, where Granite divides."""
    config = read_granite(architecture, reader)
    scale = reader.positive("attention_multiplier", config.head_dim**-0.5)
    form = replace(config.form, post_norms=reader.get("use_post_norm", bool, True))
    names = {"attention_out_norm": "post_norm1", "mlp_out_norm": "post_norm2"}
    return replace(
        config,
        query_scale=scale,
        logits_scale=1.0 / config.logits_scale,
        form=form,
        layout=TensorLayout(names=names),
    )


def read_granite_swa(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Granite with windows: sinks, and a base of RoPE for each layer (0: none)."""
    reader.use_defaults(
        num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=8192, sliding_window=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    config = read_granite(architecture, reader)
    count, usual = config.num_layers, config.rope.theta
    reader.asked.add("layer_rope_theta")
    bases = reader.raw.get("layer_rope_theta") or [usual] * count
    good = isinstance(bases, list) and len(bases) == count
    if not good or any(not _is_base(base) for base in bases):
        reader.problems.append(
            f"layer_rope_theta must be {count} bases of RoPE or 0, not {bases!r:.200}"
        )
        bases = [usual] * count
    return replace(
        config,
        windows=layer_windows(reader, count, lambda i: i % 4 != 0),
        ropes=tuple(replace(config.rope, theta=float(base)) if base else None for base in bases),
        form=replace(config.form, sinks=True),
    )


def _is_base(value: Any) -> bool:
    return type(value) in (int, float) and (value == 0 or 1 < value < MAX_NUMBER)


def read_granite_hybrid(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Granite 4 whose layers are all attention and have no experts."""
    reader.only("num_local_experts", (0,), 8)
    given = reader.raw.get("layer_types") or reader.raw.get("layers_block_type") or ["mamba"]
    kinds = given if isinstance(given, list) else [given]
    wrong = [kind for kind in kinds if kind not in ("attention", "full_attention")]
    if wrong:
        reader.problems.append(
            f"layer_types: {wrong[0]!r:.80} keeps a recurrent state, which is not supported"
            " (supported: attention)"
        )
    reader.use({**reader.raw, "intermediate_size": reader.size("shared_intermediate_size", 1024)})
    config = read_granite(architecture, reader)
    rotates = reader.only("position_embedding_type", ("rope", "nope", None), None) == "rope"
    names = {
        **dict.fromkeys(("gate_proj", "up_proj"), "shared_mlp.input_linear"),
        "down_proj": "shared_mlp.output_linear",
    }
    ropes = () if rotates else (None,) * config.num_layers
    return replace(config, ropes=ropes, mlp_bias=False, layout=TensorLayout(names=names))


def read_olmo(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of OLMo 1: norms without weights, and clipped projections."""
    clip = reader.positive("clip_qkv", None)
    config = decoder(architecture, reader, bias=True, eps=None)
    norm = NormForm(centred=True, weight=False)
    return replace(config, norm_eps=1e-5, form=LayerForm(norm=norm, qkv_clip=clip))


def read_olmo2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of OLMo 2: norms behind the blocks, and over all query and all key heads."""
    reader.use_defaults(rms_norm_eps=1e-5)
    return _olmo2(decoder(architecture, reader, bias=True))


def read_olmo3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of OLMo 3: OLMo 2's; three of four layers have windows and no scaled RoPE."""
    reader.use_defaults(rms_norm_eps=1e-5)
    config = _olmo2(decoder(architecture, reader, bias=True, rotates=False))
    windows = layer_windows(reader, config.num_layers, lambda i: (i + 1) % 4 != 0)
    theta = reader.raw.get("rope_theta", 5e5)
    return _with_two_ropes(config, reader, windows, theta, theta)


def _olmo2(config: ModelConfig) -> ModelConfig:
    names = {"attention_out_norm": "post_attention_layernorm"}
    form = LayerForm(pre_norms=False, post_norms=True, qk_norm="width")
    return replace(config, qk_norm=True, form=form, layout=TensorLayout(names=names))


def read_exaone4(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of EXAONE 4: norms behind the blocks; layers without a window do not rotate."""
    reader.use_defaults(num_key_value_heads=32, rms_norm_eps=1e-5, sliding_window=4096)
    config = decoder(architecture, reader)
    count, has_windows = config.num_layers, reader.raw.get("sliding_window") is not None
    pattern: Any = reader.raw.get("sliding_window_pattern", 4)
    windows: Windows = ()
    if has_windows and isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        windows = layer_windows(
            reader, count, lambda i: pattern[i % len(pattern)] == "L" and i < count - 1
        )
    elif has_windows:
        every = reader.size("sliding_window_pattern", 4)
        windows = layer_windows(reader, count, lambda i: (i + 1) % every != 0)
    rotating = windows or ((None,) * count if has_windows else (1,) * count)
    return replace(
        config,
        qk_norm=True,
        windows=windows,
        ropes=tuple(None if rotates is None else config.rope for rotates in rotating),
        form=LayerForm(pre_norms=False, post_norms=True),
    )


def read_glm(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GLM: half of each head rotates, in pairs; packed gate and up."""
    reader.use_defaults(
        num_key_value_heads=2, rms_norm_eps=1.5625e-7, head_dim=128, max_position_embeddings=131_072
    )
    config = decoder(architecture, reader, share=0.5)
    names = dict.fromkeys(("gate_proj", "up_proj"), "mlp.gate_up_proj")
    return replace(
        config,
        qkv_bias=reader.get("attention_bias", bool, True),
        layout=TensorLayout(names=names, pairs=True),
    )


def read_glm4(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of GLM-4 of 2025: GLM's, with norms behind the blocks, too."""
    config = read_glm(architecture, reader)
    names = {
        **config.layout.names,
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
    layout = replace(config.layout, names=names)
    return replace(config, form=LayerForm(post_norms=True), layout=layout)


def read_ernie(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Ernie 4.5, dense: Llama's, rotated in pairs."""
    reader.use_defaults(
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        head_dim=128,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
    )
    bias = reader.get("use_bias", bool, False)
    config = decoder(architecture, reader, theta=5e5)
    layout = TensorLayout(pairs=True)
    return replace(config, qkv_bias=bias, o_bias=bias, mlp_bias=bias, layout=layout)


def read_helium(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Helium: Llama's, rotated in pairs; attention's output has no bias."""
    reader.use_defaults(
        rms_norm_eps=1e-8, num_key_value_heads=20, head_dim=128, max_position_embeddings=4096
    )
    config = decoder(architecture, reader, bias=True, theta=1e5)
    mlp_bias, layout = reader.get("mlp_bias", bool, False), TensorLayout(pairs=True)
    return replace(config, o_bias=False, mlp_bias=mlp_bias, layout=layout)


def read_hunyuan(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of HunYuan, dense: norms of heads behind the rotation, a base with an exponent."""
    reader.use_defaults(rms_norm_eps=1e-5)
    reader.only("pretraining_tp", (1,), 1)
    reader.asked.add("alpha")
    config = decoder(architecture, reader, bias=True)
    spec = reader.raw.get("rope_parameters") or reader.raw.get("rope_scaling")
    part = ConfigReader(spec if isinstance(spec, Mapping) else {}, reader.where)
    size, theta = config.head_dim, config.rope.theta
    kind = part.raw.get("rope_type") or part.raw.get("type")
    if kind == "dynamic" and (alpha := part.positive("alpha", None)) and size > 2:
        theta *= alpha ** (size / (size - 2))
    reader.problems.extend(part.problems)
    names = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
    return replace(
        config,
        qk_norm=True,
        rope=replace(config.rope, theta=theta),
        form=LayerForm(qk_norm="rotated"),
        layout=TensorLayout(names=names),
    )


def read_arcee(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Arcee's AFM: Llama's, with a squared ReLU and no gate."""
    reader.use_defaults(rms_norm_eps=1e-5, max_position_embeddings=4096)
    config = decoder(architecture, reader, bias=True, acts=("relu2",))
    form = LayerForm(gated=False, activation="relu2")
    return replace(config, mlp_bias=reader.get("mlp_bias", bool, False), form=form)


def read_nemotron(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Nemotron 3 and 4: LayerNorm, a squared ReLU, and half of each head rotates."""
    reader.use_defaults(max_position_embeddings=4096, norm_eps=1e-5)
    config = decoder(architecture, reader, bias=True, acts=("relu2",), eps="norm_eps", share=0.5)
    norm = NormForm(centred=True, bias=True, add_one=True)
    form = LayerForm(norm=norm, gated=False, activation="relu2")
    return replace(config, mlp_bias=reader.get("mlp_bias", bool, False), form=form)


def read_jais2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Jais 2: Llama's, with LayerNorm, biases, and a squared ReLU without a gate."""
    reader.use_defaults(
        layer_norm_eps=1e-5, max_position_embeddings=8192, attention_bias=True, mlp_bias=True
    )
    eps = "layer_norm_eps"
    config = decoder(architecture, reader, bias=True, acts=("relu2",), eps=eps)
    form = LayerForm(norm=LAYER_NORM, gated=False, activation="relu2")
    return replace(config, mlp_bias=reader.get("mlp_bias", bool, True), form=form)


def read_apertus(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Apertus: head norms, and the activation xIELU without a gate."""
    reader.use_defaults(rms_norm_eps=1e-5, max_position_embeddings=65_536)
    if not reader.raw.get("rope_scaling"):
        reader.use_defaults(
            rope_parameters={
                **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            }
        )
    config = decoder(architecture, reader, bias=True, acts=("xielu",), theta=12e6)
    names = {"attention_in_norm": "attention_layernorm", "mlp_in_norm": "feedforward_layernorm"}
    ignored = ("mlp.act_fn.beta", "mlp.act_fn.eps")
    return replace(
        config,
        qk_norm=True,
        form=LayerForm(gated=False, activation="xielu"),
        layout=TensorLayout(names=names, ignored=ignored),
    )


def read_cohere(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Command R: parallel blocks behind one LayerNorm, rotated in pairs."""
    return _cohere(architecture, reader, theta=5e5)


def _cohere(architecture: str, reader: ConfigReader, *, theta: float) -> ModelConfig:
    reader.use_defaults(max_position_embeddings=8192, layer_norm_eps=1e-5, tie_word_embeddings=True)
    config = decoder(architecture, reader, bias=True, eps="layer_norm_eps", theta=theta)
    return replace(
        config,
        qk_norm=reader.get("use_qk_norm", bool, False),
        form=LayerForm(
            norm=NormForm(centred=True), parallel=True, one_norm=True, qk_norm="each head"
        ),
        layout=TensorLayout(pairs=True),
        logits_scale=reader.positive("logit_scale", 0.0625),
    )


def read_cohere2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Command R7B and A: Command R's; layers without a window do not rotate."""
    reader.only("use_qk_norm", (False,), False)
    config = _cohere(architecture, reader, theta=1e4)
    reader.use_defaults(sliding_window=4096)
    every = reader.size("sliding_window_pattern", 4)
    windows = layer_windows(reader, config.num_layers, lambda i: (i + 1) % every != 0)
    ropes = tuple(None if window is None else config.rope for window in windows)
    return replace(config, windows=windows, ropes=ropes or (None,) * config.num_layers)


def read_stablelm(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of StableLM 2: LayerNorm, and a quarter of each head rotates."""
    reader.use_defaults(num_key_value_heads=32, max_position_embeddings=4096, layer_norm_eps=1e-5)
    reader.only("qk_layernorm", (False,), False)
    parallel = reader.get("use_parallel_residual", bool, False)
    config = decoder(architecture, reader, eps="layer_norm_eps", share=0.25)
    form = LayerForm(norm=LAYER_NORM, parallel=parallel, one_norm=parallel)
    return replace(config, qkv_bias=reader.get("use_qkv_bias", bool, False), form=form)


def read_starcoder2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of StarCoder2: LayerNorm, biases, tanh-GELU without a gate, a window."""
    reader.use_defaults(
        num_key_value_heads=2,
        max_position_embeddings=4096,
        norm_epsilon=1e-5,
        tie_word_embeddings=True,
    )
    bias = reader.get("use_bias", bool, True)
    config = decoder(architecture, reader, acts=GELU_TANH, eps="norm_epsilon")
    return replace(
        with_window(config, reader),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        form=LayerForm(norm=LAYER_NORM, gated=False, activation="gelu_tanh"),
        layout=TensorLayout(names={"up_proj": "mlp.c_fc", "down_proj": "mlp.c_proj"}),
    )


def read_gemma(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Gemma 1."""
    reader.use_defaults(
        num_key_value_heads=16, head_dim=256, max_position_embeddings=8192, tie_word_embeddings=True
    )
    if reader.raw.get("hidden_activation") is None:
        reader.only("hidden_act", ("gelu", *GELU_TANH), "gelu")  # both mean the approximation
    config = _gemma(decoder(architecture, reader, bias=True, acts=None), reader)
    return replace(config, form=GEMMA)


def read_gemma2(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Gemma 2: a window in every other layer, four norms, scores with a cap."""
    reader.use_defaults(
        head_dim=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        query_pre_attn_scalar=256,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    config = _gemma(decoder(architecture, reader, bias=True, acts=None), reader)
    return replace(
        config,
        windows=layer_windows(reader, config.num_layers, lambda i: i % 2 == 0),
        query_scale=reader.positive("query_pre_attn_scalar", 256) ** -0.5,
        form=replace(GEMMA, post_norms=True),
        layout=TensorLayout(names=SANDWICH),
        score_softcap=reader.positive("attn_logit_softcapping", None),
        final_softcap=reader.positive("final_logit_softcapping", None),
    )


def read_vaultgemma(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of VaultGemma: Gemma 2's, without the norms behind the blocks."""
    return replace(read_gemma2(architecture, reader), form=GEMMA)


def read_gemma3(architecture: str, reader: ConfigReader) -> ModelConfig:
    """The config of Gemma 3's text models: a window in five of six layers, two RoPEs."""
    reader.only("attn_logit_softcapping", (None,), None)
    # Multimodal files omit fields that have the family's default value.
    reader.use_defaults(
        head_dim=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=262_208,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        query_pre_attn_scalar=256,
    )
    config = _gemma(decoder(architecture, reader, bias=True, acts=None, rotates=False), reader)
    pattern = reader.size("sliding_window_pattern", 6)
    windows = layer_windows(reader, config.num_layers, lambda i: (i + 1) % pattern != 0)
    raw = reader.raw
    theta, local = raw.get("rope_theta", 1e6), raw.get("rope_local_base_freq", 1e4)
    config = _with_two_ropes(config, reader, windows, theta, local)
    return replace(
        config,
        qk_norm=True,
        query_scale=reader.positive("query_pre_attn_scalar", 256) ** -0.5,
        form=replace(GEMMA, post_norms=True),
        layout=TensorLayout(names=SANDWICH),
        final_softcap=reader.positive("final_logit_softcapping", None),
    )


def _gemma(config: ModelConfig, reader: ConfigReader) -> ModelConfig:
    """What all Gemma models have."""
    reader.only("hidden_activation", GELU_TANH[:1], GELU_TANH[0])
    reader.only("use_bidirectional_attention", (False,), False)
    # Training rounded the constant to the embedding's dtype.
    scale = math.sqrt(config.hidden_size)
    return replace(config, embedding_scale=scale, rounds_embedding_scale=True)


def decoder(
    architecture: str,
    reader: ConfigReader,
    *,
    bias: bool = False,
    acts: tuple[str, ...] | None = ("silu",),
    eps: str | None = "rms_norm_eps",
    theta: float = 10_000.0,
    share: float | None = None,
    renamed: Mapping[str, str] | None = None,
    rotates: bool = True,
) -> ModelConfig:
    """The fields that Llama and its relatives share.

    `bias`: `attention_bias` is read. `acts`: what `hidden_act` may be; None: it is not read. `eps`:
    the name of the norms' epsilon. `theta`, `share` and `renamed`: as for `read_rope`. `rotates`:
    whether RoPE is read here.
    """
    hidden = reader.size("hidden_size")
    heads = reader.size("num_attention_heads")
    if acts is not None:
        reader.only("hidden_act", acts, acts[0])
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        reader.problems.append(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    head_dim = reader.size("head_dim", max(1, hidden // heads))
    if head_dim % 2:
        reader.problems.append(f"the size of a head must be even, not {head_dim}")
    max_position = reader.size("max_position_embeddings", 2048)
    has_bias = bias and reader.get("attention_bias", bool, False)
    rope = RopeConfig()
    if rotates:
        rope = read_rope(
            reader,
            max_position=max_position,
            head_dim=head_dim,
            theta=theta,
            share=share,
            renamed=renamed or {},
        )
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
        norm_eps=1e-6 if eps is None else reader.positive(eps, 1e-6),
        tie_embeddings=reader.get("tie_word_embeddings", bool, False),
        dtype=read_dtype(reader),
        qkv_bias=has_bias,
        o_bias=has_bias,
        rope=rope,
    )


def read_dtype(reader: ConfigReader) -> str:
    """The dtype of the checkpoint, which is written under two names; "auto" says none."""
    if reader.raw.get("dtype") == "auto" or reader.raw.get("torch_dtype") == "auto":
        reader.use({name: None if value == "auto" else value for name, value in reader.raw.items()})
    name = "dtype" if reader.raw.get("dtype") is not None else "torch_dtype"
    return str(reader.only(name, ("bfloat16", "float16", "float32"), "float32"))


def with_window(config: ModelConfig, reader: ConfigReader) -> ModelConfig:
    """The config with a window on every layer, if the file has one."""
    if reader.raw.get("sliding_window") is None:
        return config
    return replace(config, windows=(reader.size("sliding_window"),) * config.num_layers)


def _forget_mrope(reader: ConfigReader) -> None:
    """Positions of texts are one number, so a RoPE of three is the plain one."""
    raw = dict(reader.raw)
    for name in ("rope_parameters", "rope_scaling"):
        spec = raw.get(name)
        if isinstance(spec, Mapping):
            kinds = {
                key: "default" if value == "mrope" else value
                for key, value in spec.items()
                if key in ("type", "rope_type")
            }
            raw[name] = {**spec, **kinds}
    reader.use(raw)


def _qwen_windows(config: ModelConfig, reader: ConfigReader) -> Windows:
    if not reader.get("use_sliding_window", bool, False):
        return ()
    first = reader.get("max_window_layers", int, 28)
    return layer_windows(reader, config.num_layers, lambda i: i >= first)


def layer_windows(reader: ConfigReader, num_layers: int, slides: Callable[[int], bool]) -> Windows:
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


def _with_two_ropes(
    config: ModelConfig, reader: ConfigReader, windows: Windows, theta: Any, local_theta: Any
) -> ModelConfig:
    """The config with one RoPE for layers that see all positions, and one for those with windows.

    transformers 5 writes both into `rope_parameters`; older versions write separate fields, and
    scale the first alone. `theta`, `local_theta`: their bases in files of older versions.
    """
    raw, position = reader.raw, config.max_seq_len
    both = raw.get("rope_parameters")
    if isinstance(both, Mapping) and "full_attention" in both:
        full, local = both["full_attention"] or {}, both.get("sliding_attention") or {}
        full, local = _spec(reader, full), _spec(reader, local)
        theta, local_theta = full.get("rope_theta", theta), local.get("rope_theta", local_theta)
    else:
        full, local = _spec(reader, both or raw.get("rope_scaling") or {}), {}
        theta = full.get("rope_theta", theta)
    rope = read_rope_spec(reader, full, theta, max_position=position)
    sliding = read_rope_spec(reader, local, local_theta, max_position=position)
    ropes = tuple(rope if window is None else sliding for window in windows)
    return replace(config, rope=rope, windows=windows, ropes=ropes)
