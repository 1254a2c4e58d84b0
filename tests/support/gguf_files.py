"""Writes transformers' models as GGUF files, with the `gguf` package.

The package supplies tensor names, keys and blocks; this module makes llama.cpp's order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from tokenizers.pre_tokenizers import ByteLevel

from infer.kernels.rotary import QKRotation
from infer.models.gguf_families import GGUF_FAMILIES
from infer.models.gguf_file import GGUFFile
from infer.models.model import build_model
from tests.support.checkpoints import BOS_ID, CHAT_TEMPLATE, END_ID, EOS_ID, SPECIAL


def row_order(heads: int, size: int) -> np.ndarray:
    """llama.cpp's order of query or key rows, in which the halves of each head are interleaved."""
    one = np.arange(size).reshape(2, size // 2).T.ravel()
    return np.concatenate([head * size + one for head in range(heads)])


def blocks(shape: tuple[int, int], kind: Q) -> np.ndarray:
    """Random blocks of any type that has a float16 factor or an exponent, as rows of bytes.

    The package can read such blocks, but of K-quants and others it cannot make any.
    """
    rng = np.random.default_rng(shape[0])
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0] * shape[1] // block, size), dtype=np.uint8)

    def put(first: int, typical: float) -> None:
        factors = (rng.uniform(0.5, 1.5, len(raw)) * typical).astype(np.float16)
        raw[:, first : first + 2] = factors.view(np.uint8).reshape(-1, 2)

    for first, typical in FACTORS[kind]:
        put(first, typical)
    if kind == Q.MXFP4:
        raw[:, 0] = rng.integers(117, 123, len(raw), dtype=np.uint8)  # exponents of 2
    return raw.reshape(shape[0], -1)


# Of each type: where the float16 factors of a block are, and how large they typically are.
FACTORS: dict[Q, list[tuple[int, float]]] = {
    Q.Q4_0: [(0, 1e-2)],
    Q.Q8_0: [(0, 8e-4)],
    Q.Q4_K: [(0, 4e-4), (2, 3e-3)],
    Q.Q5_K: [(0, 2e-4), (2, 3e-3)],
    Q.Q6_K: [(208, 1e-4)],
    Q.Q4_1: [(0, 1e-2), (2, 1e-2)],
    Q.Q5_0: [(0, 5e-3)],
    Q.Q5_1: [(0, 5e-3), (2, 1e-2)],
    Q.Q2_K: [(80, 2e-3), (82, 2e-3)],
    Q.Q3_K: [(108, 5e-4)],
    Q.IQ4_NL: [(0, 3e-4)],
    Q.IQ4_XS: [(0, 3e-5)],
    Q.IQ2_XXS: [(0, 3e-3)],
    Q.IQ2_XS: [(0, 3e-3)],
    Q.IQ2_S: [(0, 3e-3)],
    Q.IQ3_XXS: [(0, 3e-3)],
    Q.IQ3_S: [(0, 3e-3)],
    Q.MXFP4: [],
}


UNWRITTEN = (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS)
"""Types that the package cannot make of numbers."""


def add_text(writer: gguf.GGUFWriter, *, chat: bool = True) -> None:
    """Add the tokenizer of `checkpoints.write_tokenizer` and one merge.

    The merge is needed because the format has no empty lists. It joins two zero bytes to a token
    with the id of a byte that UTF-8 never uses.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["ĀĀ" if char == "ÿ" else char for char in sorted(ByteLevel.alphabet())]
    writer.add_token_list([*tokens, *SPECIAL])
    writer.add_token_types([1] * 256 + [3] * len(SPECIAL))
    writer.add_token_merges(["Ā Ā"])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_eot_token_id(END_ID)
    writer.add_add_bos_token(True)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)


ONE_MORE = ("gemma", "gemma2", "gemma3", "nemotron")
"""Architectures whose files store 1 + w of norms."""


LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len", "n_positions")
"""Names of the maximum number of positions."""
NO_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4}


def falcon_groups(config: Any) -> int:
    """The number of key/value heads."""
    if config.new_decoder_architecture:
        return int(config.num_kv_heads)
    return 1 if config.multi_query else int(config.num_attention_heads)


def qkv_apart(data: np.ndarray, arch: str, config: Any, size: int) -> np.ndarray:
    """The rows of a packed projection in the file's order: all q, then all k, then all v."""
    heads = groups = config.num_attention_heads
    if arch == "falcon":
        groups = falcon_groups(config)
    each = heads // groups
    rows = data.reshape(groups, each + 2, size, *data.shape[1:])
    parts = rows[:, :each], rows[:, each : each + 1], rows[:, each + 1 :]
    return np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])


def base_of(rope: Mapping[str, Any], size: int) -> float:
    """The base of RoPE, with HunYuan's exponent, as the converter computes it."""
    exponent = size / (size - 2)
    return float(rope["rope_theta"] * (rope.get("alpha") or 1.0) ** exponent)


def add_family_keys(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    """Add the keys that only some architectures have, as llama.cpp's converter does."""
    kinds = getattr(config, "layer_types", None) or []
    has_windows = "sliding_attention" in kinds or arch == "phi3"
    if getattr(config, "sliding_window", None) and has_windows and GGUF_FAMILIES[arch].windows:
        writer.add_sliding_window(config.sliding_window)
        if arch in ("exaone4", "cohere2", "olmo2"):
            writer.add_sliding_window_pattern([each == "sliding_attention" for each in kinds])
    for key, field in GGUF_FAMILIES[arch].keys.items():
        value = getattr(config, field, None)
        is_number = key.startswith(("attention.scale", "attention.clamp")) or key.endswith("_scale")
        if is_number and value is not None:
            writer.add_float32(f"{arch}.{key}", value)
    if arch in ("stablelm", "gptneox"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if arch == "granitehybrid":
        writer.add_bool(f"{arch}.rope.scaling.finetuned", config.position_embedding_type == "rope")
    if arch == "gemma2":
        writer.add_sliding_window(config.sliding_window)
        if config.attn_logit_softcapping:
            writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
            writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
        if config.attn_config.clip_qkv:
            writer.add_clamp_kqv(config.attn_config.clip_qkv)
    rope = getattr(config, "rope_parameters", None) or NO_ROPE
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)
        ratio = config.max_position_embeddings / config.original_max_position_embeddings
        scale = math.log(ratio) / math.log(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + scale))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if growth := rope.get("llama_4_scaling_beta"):
        writer.add_float32(f"{arch}.attention.temperature_scale", growth)


def parts_of(names: Any, name: str, data: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """The tensors of a file, each with its name, that a parameter of transformers becomes."""
    if "shared_mlp.input_linear" in name:
        layer = name.split(".")[2]
        gate, up = np.split(data, 2)
        return [(f"blk.{layer}.ffn_gate.weight", gate), (f"blk.{layer}.ffn_up.weight", up)]
    name = name.replace("shared_mlp.output_linear", "mlp.down_proj")
    written = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if written is None:  # the converter takes Bloom's prefix away
        short = name.removeprefix("transformer.")
        written = names.get_name(short, try_suffixes=(".weight", ".bias"))
    assert written is not None, name
    return [(written, data)]


def write(
    path: Path,
    arch: str,
    model: Any,
    kind: Q = Q.F32,
    head: Q | None = None,
    *,
    sampling: Mapping[str, float] | None = None,
    chat: bool = True,
    **keys: Any,
) -> Any:
    """Write a model as a file; afterwards the model has the same weights as the file.

    Matrices are stored as `kind`, the output head as `head`. `keys` are added to the metadata, as
    are the settings of `sampling`, and a chat template if `chat`, for which an engine starts a
    process.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    longest = next(n for n in LENGTHS if getattr(config, n, None))
    writer.add_context_length(getattr(config, longest))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    inner = "shared_intermediate_size" if arch == "granitehybrid" else "intermediate_size"
    inner = "ffn_hidden_size" if arch == "falcon" else inner
    writer.add_feed_forward_length(getattr(config, inner, None) or 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    groups = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if arch == "falcon":
        groups = falcon_groups(config)
    if arch == "starcoder":
        groups = 1
    if arch != "gptneox":
        writer.add_head_count_kv(groups)
    key, field = GGUF_FAMILIES[arch].eps
    writer.add_float32(f"{arch}.{key}", getattr(config, field, 1e-5))
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(size)
        writer.add_value_length(size)
    rope = getattr(config, "rope_parameters", None) or NO_ROPE
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(base_of(rope, size))
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1)))
    add_family_keys(writer, arch, config)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast") or 32.0)
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow") or 1.0)
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, size, 2) / size)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(*(value if isinstance(value, tuple) else (value,)))
    for key, value in (sampling or {}).items():
        name = f"general.sampling.{key}"
        if isinstance(value, int):
            writer.add_int32(name, value)
        else:
            writer.add_float32(name, value)
    add_text(writer, chat=chat)

    names = gguf.get_tensor_name_map(
        next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch),
        config.num_hidden_layers,
    )
    if arch == "apertus":
        each = [layer.mlp.act_fn for layer in model.model.layers]
        writer.add_xielu_alpha_p([act.alpha_p.item() for act in each])
        writer.add_xielu_alpha_n([act.alpha_n.item() for act in each])
    for name, parameter in model.named_parameters():
        if ".act_fn." in name:
            continue
        values = parameter.detach().numpy()
        order = None
        if GGUF_FAMILIES[arch].pairs and (".q_proj" in name or ".k_proj" in name):
            order = row_order(len(values) // size, size)
            values = values[order]
        shift = float(arch in ONE_MORE and name.endswith("norm.weight"))
        stored = kind if values.ndim > 1 and "norm" not in name else Q.F32
        stored = head if name == "lm_head.weight" and head is not None else stored
        if stored in UNWRITTEN:
            data = blocks(values.shape, stored)
        else:
            data = gguf.quants.quantize(values + np.float32(shift), stored)
        if "query_key_value" in name:  # the file has all q, then all k, then all v
            data, seen_as = qkv_apart(data, arch, config, size), data
        else:
            seen_as = data
        for written, part in parts_of(names, name, data):
            writer.add_tensor(written, part, raw_dtype=stored)
        seen = gguf.quants.dequantize(seen_as, stored).reshape(values.shape) - np.float32(shift)
        back = seen if order is None else seen[np.argsort(order)]
        parameter.data = torch.from_numpy(back.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_gpt2(path: Path, model: Any, kind: Q = Q.F32, *, with_head: bool = False) -> Any:
    """Write GPT-2 as llama.cpp's converter does, with linear weights transposed to [out, in].

    `with_head`: the tied head is stored too, as older converters did. Afterwards the model has the
    same weights as the file.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    add_text(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, config.n_layer)
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        is_turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        stored = kind if values.ndim > 1 else Q.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values.T if is_turned else values), stored)
        written = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert written, name
        assert written is not None, name
        writer.add_tensor(written, data, raw_dtype=stored)
        if with_head and written == "token_embd.weight":
            writer.add_tensor("output.weight", data, raw_dtype=stored)
        seen = gguf.quants.dequantize(data, stored)
        parameter.data = torch.from_numpy((seen.T if is_turned else seen).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@torch.inference_mode()
def dense_logits(
    file: GGUFFile,
    tokens: list[int],
    dtype: torch.dtype = torch.float32,
    *,
    in_blocks: bool = False,
) -> torch.Tensor:
    """Logits of the file's model with dense causal attention and the layers' windows.

    `in_blocks`: the weights stay in the blocks of the file.
    """
    config = file.config
    source = file.source(dtype, torch.device("cpu"))
    if in_blocks:
        source = source.with_layers(None, blocks=file.block_reader())
    model = build_model(config, source, len(tokens))
    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: QKRotation | None
    ) -> torch.Tensor:
        window = config.layer(layer).window or len(tokens)
        if rotation is not None:
            q, k = rotation(q, k)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        seen = (distance >= 0) & (distance < window)
        out = F.scaled_dot_product_attention(
            q, k, v, seen, scale=config.layer(layer).attention_scale, enable_gqa=True
        )
        return out.transpose(0, 1)

    hidden = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    return model.logits(hidden)
