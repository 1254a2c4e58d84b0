"""GGUF files, llama.cpp's format: one file with metadata, tokenizer and (quantised) tensors.

`GGUFFile` converts the metadata to the fields of a Hugging Face `config.json`, so that the registry
checks them. It supplies the tensors under their Hugging Face names, so that the decoders need no
change. Four conversions of llama.cpp are undone: the order of query and key rows (Llama and Mistral
only), GPT-2's transposed weights, the `1 + w` of Gemma's norms, and Llama 3's RoPE scaling, which
is stored as one factor per frequency. The file stays memory-mapped. A tensor is dequantised when it
is taken, some rows at a time, or is taken in its own blocks. `gguf_reader` finds what it holds.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infer.errors import LoadError
from infer.kernels.blocks import BlockWeight, panel_kinds
from infer.models.gguf_blocks import HELD_AS, as_held, held_kind, numbers, readable_types
from infer.models.gguf_reader import Metadata, StoredTensor, read_gguf
from infer.models.model_config import ModelConfig
from infer.models.registry import parse_model_config
from infer.models.weights import BlockReader, WeightSource

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "mistral3": "MistralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
"""Name of an architecture in GGUF files → its name in the registry."""
LLAMA_ROWS = ("llama", "mistral3")
"""GGUF architectures whose query and key rows llama.cpp's converter reorders."""
_REQUIRED = {  # GGUF key without its architecture prefix → field of config.json
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_GPT2_REQUIRED = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "context_length": "n_positions",
    "attention.head_count": "n_head",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
_OPTIONAL = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_ROPE_SCALING = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# Keys whose effect on the mathematics is not supported, each with the value that has no effect.
_NEUTRAL = {
    **dict.fromkeys(("expert_count", "logit_scale", "attn_logit_softcapping"), 0),
    **{f"attention.{name}": 0 for name in ("scale", "clamp_kqv", "max_alibi_bias")},
    "attention.temperature_scale": 0,
    **{f"rope.scaling.{name}": 0 for name in ("alpha", "yarn_log_multiplier")},
    **{f"rope.scaling.{name}": 1 for name in ("attn_factor", "yarn_attn_factor")},
    "rope.scaling.yarn_ext_factor": 1,
    "attention.causal": True,
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_GEMMA_NAMES = {
    **_NAMES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_NAMES = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
"""Weights that are [out, in] in GGUF files and [in, out] in Hugging Face checkpoints."""
_TENSOR_NAME = re.compile(r"(blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_GEMMA_27B_LAYERS = 62
_ROWS_BYTES = 1 << 26
"""Size of the part of a tensor that is dequantised to float32 at a time, in bytes."""


class GGUFFile:
    """An open GGUF file: its metadata, its model's config and its tensors."""

    metadata: Metadata
    """The file's keys and their values as plain Python objects."""
    config: ModelConfig
    """The config of the file's model."""

    def __init__(self, path: Path) -> None:
        """Raises `LoadError` if the file is damaged or holds something that is not supported."""
        content = read_gguf(path)
        self.path, self.metadata, self._tensors = content.path, content.metadata, content.tensors
        self._arch = str(self.metadata.get("general.architecture")).strip().lower()
        if self._arch not in ARCHITECTURES:
            raise LoadError(
                f"{path}: general.architecture {self._arch!r} is not supported"
                f" (supported: {', '.join(ARCHITECTURES)})"
            )
        config = parse_model_config(self._config_fields(), str(path))
        factors = self._rope_factors(config.head_dim)
        rope = dataclasses.replace(config.rope, frequency_divisors=factors)
        ropes = tuple(rope if each == config.rope else each for each in config.ropes)
        self.config = dataclasses.replace(config, rope=rope, ropes=ropes)

    def source(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        """A source of the tensors under their Hugging Face names, converted to `dtype`."""
        names = {self._hugging_face_name(name): name for name in self._tensors}

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            stored_name = names[name]
            is_transposed = self._is_transposed(stored_name)
            values = self._read(stored_name, shape[::-1] if is_transposed else shape, dtype)
            values = values.T if is_transposed else values
            fits = tuple(values.shape) == shape  # the source reports a tensor that does not fit
            return self._as_in_hugging_face(stored_name, values) if fits else values

        def stored(name: str) -> Tensor:
            shape = self._tensors[names[name]].shape
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            return tensor.T if self._is_transposed(names[name]) else tensor

        source = WeightSource(names, read, dtype=dtype, device=device, stored=stored)
        if self.config.rope.frequency_divisors:
            source.drop(_ROPE_FACTORS)
        return source

    @property
    def block_kinds(self) -> list[str]:
        """The types of blocks in which the file's matrices can be held, most numbers first.

        Empty if none of its matrices is quantised.
        """
        sizes: Counter[str] = Counter()
        for tensor in self._tensors.values():
            if len(tensor.shape) == 2 and (kind := self._held_kind(tensor)) is not None:
                sizes[kind] += tensor.num_elements
        return [kind for kind, _ in sizes.most_common()]

    def block_reader(self, *, planned: bool = False) -> BlockReader:
        """A function that reads the weights of a linear layer in blocks.

        It returns None for weights that are not quantised, do not have the expected shape, or would
        share a panel with others that are not. `planned`: the numbers are not read.
        """
        stored_names = {self._hugging_face_name(name): name for name in self._tensors}

        def read(parts: Mapping[str, tuple[int, int]], gated: bool) -> list[BlockWeight] | None:
            names = [stored_names.get(name, "") for name in parts]
            found: list[BlockWeight] = []
            for name, shape in zip(names, parts.values(), strict=True):
                tensor = self._tensors.get(name)
                if tensor is None or tensor.shape != shape:
                    return None
                if (kind := self._held_kind(tensor)) is None:
                    return None
                found.append(BlockWeight(kind, shape, None))
            if panel_kinds(found, gated=gated) is None:
                found = [BlockWeight(HELD_AS, each.shape, None) for each in found]
            if planned:
                return found
            return [
                dataclasses.replace(each, rows=self._block_rows(name, each))
                for name, each in zip(names, found, strict=True)
            ]

        return read

    def _held_kind(self, tensor: StoredTensor) -> str | None:
        return held_kind(tensor.kind, tensor.shape[-1])

    def _block_rows(self, name: str, weight: BlockWeight) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            rows = as_held(tensor.rows, tensor.kind, weight.kind)
        except NotImplementedError:
            raise self._unreadable(name) from None
        return self._rows_as_in_hugging_face(name, rows)

    def _unreadable(self, name: str) -> LoadError:
        return LoadError(
            f"{self.path}: {name} is stored as {self._tensors[name].kind.name}, which cannot"
            f" be read (these can: {', '.join(readable_types())})"
        )

    def _get(self, key: str) -> Any:
        return self.metadata.get(f"{self._arch}.{key}")

    def _config_fields(self) -> dict[str, Any]:
        """The metadata as fields of a Hugging Face `config.json`."""
        required = _GPT2_REQUIRED if self._arch == "gpt2" else _REQUIRED
        missing = [f"{self._arch}.{key}" for key in required if self._get(key) is None]
        missing += [] if "token_embd.weight" in self._tensors else ["token_embd.weight"]
        if missing:
            raise LoadError(f"{self.path} lacks {', '.join(missing)}; convert the model again")
        if self._arch == "gpt2":
            return {
                **{field: self._get(key) for key, field in required.items()},
                "architectures": [ARCHITECTURES[self._arch]],
                "vocab_size": self._tensors["token_embd.weight"].shape[0],
                "tie_word_embeddings": "output.weight" not in self._tensors,
                "dtype": self._dtype(),
            }
        names = {**_REQUIRED, **_OPTIONAL}
        fields = {field: self._get(key) for key, field in names.items()}
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        if fields["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int):
            fields["head_dim"] = hidden // max(heads, 1)
        size = fields["head_dim"]
        neutral = {**_NEUTRAL, "attention.value_length": size, "rope.dimension_count": size}
        if self._arch == "gemma3":
            fields |= self._gemma_fields(hidden, heads, size)
        else:
            neutral |= {"attention.sliding_window": 0, "final_logit_softcapping": 0}
        for key, value in neutral.items():
            if self._get(key) not in (None, value):
                raise LoadError(
                    f"{self.path}: {self._arch}.{key} = {self._get(key)!r} is not supported"
                    f" (supported: {value!r})"
                )
        biased = "blk.0.attn_q.bias" in self._tensors
        return {
            "rope_theta": 10000.0,  # this default and the next are GGUF's, not the family's
            "num_key_value_heads": heads,
            **{name: value for name, value in fields.items() if value is not None},
            "architectures": [ARCHITECTURES[self._arch]],
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": biased and self._arch != "qwen2",  # Qwen2 always has biases
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "rope_scaling": self._rope_scaling(),
            "dtype": self._dtype(),
        }

    def _gemma_fields(self, hidden: Any, heads: Any, head_dim: Any) -> dict[str, Any]:
        window = self._get("attention.sliding_window")
        pattern = self._get("attention.sliding_window_pattern") or 6
        fields: dict[str, Any] = {
            "sliding_window": window,
            # Every n-th layer is global. Without a window every layer is global.
            "sliding_window_pattern": pattern if window else 1,
            "rope_local_base_freq": self._get("rope.freq_base_swa"),
            # The file does not hold this value; llama.cpp infers it from the number of layers too.
            "query_pre_attn_scalar": head_dim,
            "final_logit_softcapping": self._get("final_logit_softcapping") or None,
        }
        if self._get("block_count") == _GEMMA_27B_LAYERS:
            fields["query_pre_attn_scalar"] = hidden // heads
        if isinstance(pattern, list):
            kinds = ("full_attention", "sliding_attention")
            fields["layer_types"] = [kinds[bool(sliding and window)] for sliding in pattern]
            del fields["sliding_window_pattern"]
        return fields

    def _rope_scaling(self) -> dict[str, Any] | None:
        factor = self._get("rope.scaling.factor") or self._get("rope.scale_linear")
        kind = self._get("rope.scaling.type") or ("linear" if factor else "none")
        if kind == "none":
            return None
        numbers = {field: self._get(key) for key, field in _ROPE_SCALING.items()}
        return {"rope_type": kind, "factor": factor or 1.0, **numbers}

    def _rope_factors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self._tensors.get(_ROPE_FACTORS)
        # In other architectures the source reports such a tensor as unexpected.
        if tensor is None or self._arch not in LLAMA_ROWS:
            return ()
        factors = self._read(_ROPE_FACTORS, (head_dim // 2,), torch.float32)
        if factors.is_meta or not bool((factors > 0).all()):
            raise LoadError(f"{self.path}: {_ROPE_FACTORS} must be {head_dim // 2} numbers above 0")
        return tuple(factors.tolist())

    def _dtype(self) -> str:
        """The dtype of the stored matrices; bfloat16 for quantised ones."""
        types = {t.kind.name for t in self._tensors.values() if len(t.shape) > 1}
        if types == {"F32"}:
            return "float32"
        return "float16" if types <= {"F16", "F32"} else "bfloat16"

    def _hugging_face_name(self, name: str) -> str:
        """A tensor's Hugging Face name; an unknown name is unchanged, so it will be refused."""
        match = _TENSOR_NAME.fullmatch(name)
        parts = {"gemma3": _GEMMA_NAMES, "gpt2": _GPT2_NAMES}.get(self._arch, _NAMES)
        if match is None or match[3] not in parts:
            return name
        layers = "h" if self._arch == "gpt2" else "model.layers"
        layer = "" if match[1] is None else f"{layers}.{match[2]}."
        return f"{layer}{parts[match[3]]}.{match[4]}"

    def _is_transposed(self, name: str) -> bool:
        part, kind = name.split(".")[-2:] if "." in name else (name, "")
        return self._arch == "gpt2" and kind == "weight" and part in _GPT2_TRANSPOSED

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor as stored: matrices in `dtype`, vectors in float32.

        If the stored shape is not `shape`, the result is a meta tensor of the stored shape.
        """
        tensor = self._tensors[name]
        if tensor.shape != shape:
            return torch.empty(tensor.shape, device="meta")
        out = torch.empty(shape, dtype=dtype if len(shape) > 1 else torch.float32)
        target, stored = out.view(-1, shape[-1]), tensor.rows
        step = max(1, _ROWS_BYTES // (4 * shape[-1]))
        for start in range(0, len(stored), step):
            try:
                rows = numbers(stored[start : start + step], tensor.kind)
            except NotImplementedError:
                raise self._unreadable(name) from None
            target[start : start + step] = rows
        return out

    def _as_in_hugging_face(self, name: str, values: Tensor) -> Tensor:
        """A tensor's values with the changes of llama.cpp's converter undone."""
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            return values - 1.0  # the file stores 1 + w; the decoder expects w
        if num_heads := self._heads_of_rows(name):
            pairs = values.view(num_heads, -1, 2, *values.shape[1:])
            return pairs.transpose(1, 2).reshape(values.shape)
        return values

    def _rows_as_in_hugging_face(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The same for rows of a matrix in blocks."""
        if num_heads := self._heads_of_rows(name):
            pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
            return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
        return rows

    def _heads_of_rows(self, name: str) -> int:
        """The number of heads whose rows the file has in another order; 0: in none.

        llama.cpp rotates neighbouring rows as a pair. The decoder rotates row i of the first half
        of a head with row i of the second half.
        """
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        return heads.get(name.split(".")[-2], 0) if self._arch in LLAMA_ROWS else 0
