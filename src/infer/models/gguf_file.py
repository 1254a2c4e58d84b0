"""GGUF files, llama.cpp's format: one file with metadata, tokenizer and (quantised) tensors.

`GGUFFile` converts the metadata to the fields of a Hugging Face `config.json`, so that the registry
checks them; `gguf_families` has what differs between architectures. The config's `TensorLayout`
says how the file names and arranges the tensors: the converter reordered the query and key rows of
some families. Two more of its changes are undone: the `1 + w` of some norms, and Llama 3's RoPE
scaling, which is stored as one factor per frequency. The file stays memory-mapped. A tensor is
dequantised when it is taken, some rows at a time, or is taken in its own blocks. `gguf_reader`
finds what it holds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer.errors import LoadError
from infer.kernels.blocks import BlockWeight, fitted_bytes, panel_kinds
from infer.models.gguf_blocks import HELD_AS, as_held, held_kind, numbers, readable_types
from infer.models.gguf_families import (
    ARCHITECTURES,
    GGUF_FAMILIES,
    GPT2_REQUIRED,
    NEUTRAL,
    OPTIONAL,
    REQUIRED,
    ROPE_SCALING,
    VARIANTS,
    layout_of,
)
from infer.models.gguf_reader import KINDS, Metadata, StoredTensor, read_gguf
from infer.models.model_config import ModelConfig
from infer.models.registry import parse_model_config

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from infer.models.weights import BlockReader, WeightSource

_TABLES = ("token_embd.weight", "output.weight", "position_embd.weight")
"""Matrices with a row for each token or position, which int4 does not change."""
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {
    "short_factor": "rope_factors_short.weight",
    "long_factor": "rope_factors_long.weight",
}
_KINDS = ("full_attention", "sliding_attention")
_GEMMA_27B_LAYERS = 62
_GEMMA2_27B_LAYERS = 46
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
        self._family = GGUF_FAMILIES[self._arch]
        self._tensors |= self._activation_numbers()
        config = parse_model_config(self._config_fields(), str(path))
        layout = layout_of(self._tensors, pairs=self._family.pairs or config.layout.pairs)
        config = dataclasses.replace(config, layout=layout)
        if factors := self._rope_factors(config.head_dim):
            rope = dataclasses.replace(config.rope, frequency_divisors=factors)
            ropes = tuple(
                rope if rope_of_layer == config.rope else rope_of_layer
                for rope_of_layer in config.ropes
            )
            config = dataclasses.replace(config, rope=rope, ropes=ropes)
        self.config = config

    def source(self, dtype: torch.dtype, device: torch.device) -> WeightSource:
        """A source of the tensors, converted to `dtype`."""
        import torch  # a plan of memory does without

        from infer.models.weights import WeightSource

        def read(name: str, shape: tuple[int, ...]) -> Tensor:
            values = self._read(name, shape, dtype)
            has_one_more = self.config.form.norm.add_one and name.endswith("norm.weight")
            # The file stores 1 + w; the decoder expects w.
            return values - 1.0 if has_one_more and not values.is_meta else values

        def stored(name: str) -> Tensor:
            return torch.empty(self._tensors[name].shape, dtype=dtype, device="meta")

        source = WeightSource(self._tensors, read, dtype=dtype, device=device, stored=stored)
        if self.config.rope.frequency_divisors:
            source.drop(_ROPE_FACTORS, *_LONGROPE_FACTORS.values())
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

    @property
    def is_near_int4(self) -> bool:
        """Whether int4 would take at least seven eighths of the bytes of the layers' blocks."""
        in_file = in_int4 = 0.0
        for name, tensor in self._tensors.items():
            is_layer = len(tensor.shape) == 2 and name not in _TABLES
            if is_layer and (kind := self._held_kind(tensor)) is not None:
                size = KINDS[kind]
                in_file += tensor.num_elements * size.block_bytes / size.block
                in_int4 += tensor.num_elements * fitted_bytes(tensor.shape[-1])
        return in_int4 >= in_file * 7 / 8

    def block_reader(self, *, planned: bool = False) -> BlockReader:
        """A function that reads the weights of a linear layer in blocks.

        It returns None for weights that are not quantised or do not have the expected shape. Those
        that would share a panel with others of a type with which no panel can be are rounded.
        `planned`: the numbers are not read.
        """

        def read(parts: Mapping[str, tuple[int, int]], gated: bool) -> list[BlockWeight] | None:
            weights: list[BlockWeight] = []
            for name, shape in parts.items():
                tensor = self._tensors.get(name)
                if tensor is None or tensor.shape != shape:
                    return None
                if (kind := self._held_kind(tensor)) is None:
                    return None
                weights.append(BlockWeight(kind, shape, None, stored=tensor.kind.name))
            if panel_kinds(weights, gated=gated) is None:
                weights = [dataclasses.replace(weight, kind=HELD_AS) for weight in weights]
            if planned:
                return weights
            return [
                dataclasses.replace(weight, rows=self._block_rows(name, weight))
                for name, weight in zip(parts, weights, strict=True)
            ]

        return read

    def _held_kind(self, tensor: StoredTensor) -> str | None:
        return held_kind(tensor.kind, tensor.shape[-1])

    def _block_rows(self, name: str, weight: BlockWeight) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            return as_held(tensor.rows, tensor.kind, weight.kind)
        except NotImplementedError:
            raise self._unreadable(name) from None

    def _unreadable(self, name: str) -> LoadError:
        return LoadError(
            f"{self.path}: {name} is stored as {self._tensors[name].kind.name}, which cannot"
            f" be read (these can: {', '.join(readable_types())})"
        )

    def _get(self, key: str) -> Any:
        return self.metadata.get(f"{self._arch}.{key}")

    def _config_fields(self) -> dict[str, Any]:
        """The metadata as fields of a Hugging Face `config.json`."""
        family = self._family
        is_gpt2 = self._arch in ("gpt2", "starcoder")
        required = {**(GPT2_REQUIRED if is_gpt2 else REQUIRED)}
        required |= dict([family.eps])
        missing = [f"{self._arch}.{key}" for key in required if self._get(key) is None]
        missing += [] if "token_embd.weight" in self._tensors else ["token_embd.weight"]
        if missing:
            raise LoadError(f"{self.path} lacks {', '.join(missing)}; convert the model again")
        key, variant = VARIANTS.get(self._arch, ("", ""))
        shared = {
            "architectures": [variant if self._get(key) else family.architecture],
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "dtype": self._dtype(),
        }
        if is_gpt2:
            fields = {field: self._get(key) for key, field in required.items()}
            return {"multi_query": self._get("attention.head_count_kv") == 1, **fields, **shared}
        names = {**required, **OPTIONAL, **family.keys}
        fields = {field: self._get(key) for key, field in names.items()}
        fields["intermediate_size"] = self._get("feed_forward_length")
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        if fields["head_dim"] is None and isinstance(hidden, int) and isinstance(heads, int):
            fields["head_dim"] = hidden // max(heads, 1)
        fields["num_key_value_heads"] = self._number_of_all_layers("attention.head_count_kv")
        size = fields["head_dim"]
        fields |= self._special_fields(hidden, heads, size)
        self._check_neutral(size)
        biases = {
            field: f"blk.0.{part}.bias" in self._tensors
            or (part == "attn_q" and "blk.0.attn_qkv.bias" in self._tensors)
            for field, part in family.biases.items()
        }
        return {
            "rope_theta": 10000.0,  # this default and the next are GGUF's, not the family's
            "num_key_value_heads": heads,
            **{name: value for name, value in fields.items() if value is not None},
            **biases,
            # Without the key there is no window; the family may have one.
            **({"sliding_window": fields["sliding_window"]} if family.windows else {}),
            # No scaling is none, where a family's class has one by default, too.
            "rope_scaling": self._rope_scaling() or {"rope_type": "default"},
            **family.fixed,
            **shared,
        }

    def _number_of_all_layers(self, key: str) -> Any:
        """The value of a key that may have one for each layer; `LoadError` if they differ."""
        value = self._get(key)
        if not isinstance(value, list):
            return value
        if not value or len(set(value)) > 1:
            raise LoadError(
                f"{self.path}: {self._arch}.{key} = {value!r:.80} is not supported (supported: the"
                " same number in all layers)"
            )
        return value[0]

    def _check_neutral(self, size: Any) -> None:
        """Raise `LoadError` if a key has an effect that the architecture does not support."""
        family = self._family
        supported = {*family.keys, VARIANTS.get(self._arch, ("",))[0]}
        neutral = {**NEUTRAL, "attention.value_length": size}
        if family.windows:
            supported |= {"attention.sliding_window"}
        if not family.shares:
            neutral["rope.dimension_count"] = size
        if self._arch == "gemma3":
            supported |= {"final_logit_softcapping"}
        if self._arch in ("phi3", "mistral3"):
            supported |= {"rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier"}
        for key, value in neutral.items():
            if key not in supported and self._get(key) not in (None, value):
                raise LoadError(
                    f"{self.path}: {self._arch}.{key} = {self._get(key)!r} is not supported"
                    f" (supported: {value!r})"
                )

    def _special_fields(self, hidden: Any, heads: Any, size: Any) -> dict[str, Any]:
        """Fields that are not the value of one key."""
        family = self._family
        if self._arch == "gemma3":
            return self._gemma_fields(hidden, heads, size)
        fields: dict[str, Any] = {}
        if family.windows:
            fields["sliding_window"] = self._get("attention.sliding_window") or None
            pattern = self._get("attention.sliding_window_pattern")
            if isinstance(pattern, list):
                fields["layer_types"] = [_KINDS[bool(is_sliding)] for is_sliding in pattern]
        turning = self._get("rope.dimension_count")
        if family.shares and turning is not None and isinstance(size, int) and size > 0:
            fields["partial_rotary_factor"] = turning / size
        if self._arch == "command-r":
            fields["use_qk_norm"] = "blk.0.attn_q_norm.weight" in self._tensors
        if self._arch == "gemma2":
            fields["query_pre_attn_scalar"] = size
            if self._get("block_count") == _GEMMA2_27B_LAYERS:
                fields["query_pre_attn_scalar"] = hidden // heads
        if self._arch == "falcon":
            groups = self._number_of_all_layers("attention.head_count_kv") or heads
            has_two = "blk.0.attn_norm_2.weight" in self._tensors
            is_new = has_two or (groups != 1 and groups != heads)
            fields |= {"num_kv_heads": groups, "new_decoder_architecture": is_new}
            fields["num_ln_in_parallel_attn"] = (2 if has_two else 1) if is_new else None
        if self._arch == "granitehybrid":
            rotates = self._get("rope.scaling.finetuned") is not False
            fields["position_embedding_type"] = "rope" if rotates else "nope"
        return fields

    def _gemma_fields(self, hidden: Any, heads: Any, head_dim: Any) -> dict[str, Any]:
        window = self._get("attention.sliding_window")
        pattern = self._get("attention.sliding_window_pattern") or 6
        fields: dict[str, Any] = {
            "sliding_window": window,
            # Every n-th layer is global. Without a window every layer is global.
            "sliding_window_pattern": pattern if window else 1,
            # The file does not hold this value; llama.cpp infers it from the number of layers too.
            "query_pre_attn_scalar": head_dim,
            "final_logit_softcapping": self._get("final_logit_softcapping") or None,
        }
        if self._get("block_count") == _GEMMA_27B_LAYERS:
            fields["query_pre_attn_scalar"] = hidden // heads
        if isinstance(pattern, list):
            fields["layer_types"] = [_KINDS[bool(sliding and window)] for sliding in pattern]
            del fields["sliding_window_pattern"]
        return fields

    def _rope_scaling(self) -> dict[str, Any] | None:
        if all(name in self._tensors for name in _LONGROPE_FACTORS.values()):
            return self._longrope()
        factor = self._get("rope.scaling.factor") or self._get("rope.scale_linear")
        kind = self._get("rope.scaling.type") or ("linear" if factor else "none")
        if kind == "none":
            return None
        numbers = {field: self._get(key) for key, field in ROPE_SCALING.items()}
        if (all_dim := self._get("rope.scaling.yarn_log_multiplier")) and kind == "yarn":
            numbers |= {"mscale": 1.0, "mscale_all_dim": all_dim}
        if growth := self._get("attention.temperature_scale"):
            numbers["llama_4_scaling_beta"] = growth
        return {"rope_type": kind, "factor": factor or 1.0, **numbers}

    def _longrope(self) -> dict[str, Any]:
        """Phi-3's scaling, whose divisors are tensors."""
        divisors = {}
        for field, name in _LONGROPE_FACTORS.items():
            divisors[field] = self._vector(name)
        original = self._get("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            **divisors,
            "attention_factor": self._get("rope.scaling.attn_factor") or 1.0,
            "original_max_position_embeddings": original,
        }

    def _rope_factors(self, head_dim: int) -> tuple[float, ...]:
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return ()
        factors = self._vector(_ROPE_FACTORS)
        if len(factors) != head_dim // 2 or not all(factor > 0 for factor in factors):
            raise LoadError(f"{self.path}: {_ROPE_FACTORS} must be {head_dim // 2} numbers above 0")
        return tuple(factors)

    def _vector(self, name: str) -> list[float]:
        """The numbers of a small tensor."""
        tensor = self._tensors[name]
        if tensor.kind.name == "F32":  # as converters write them
            return [float(number) for number in tensor.rows.ravel().view("<f4")]
        return [float(number) for number in numbers(tensor.rows, tensor.kind).flatten()]

    def _activation_numbers(self) -> dict[str, StoredTensor]:
        """xIELU's numbers of each layer, which are keys, as the tensors that they are elsewhere."""
        numbers = {}
        for name in ("alpha_p", "alpha_n"):
            values = self.metadata.get(f"xielu.{name}")
            for index, value in enumerate(values if isinstance(values, list) else ()):
                rows = np.frombuffer(np.float32(value).tobytes(), np.uint8).reshape(1, 4)
                numbers[f"blk.{index}.{name}"] = StoredTensor(KINDS["F32"], (1,), rows)
        return numbers

    def _dtype(self) -> str:
        """The dtype of the stored matrices; bfloat16 for quantised ones."""
        types = {t.kind.name for t in self._tensors.values() if len(t.shape) > 1}
        if types == {"F32"}:
            return "float32"
        return "float16" if types <= {"F16", "F32"} else "bfloat16"

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor as stored: matrices in `dtype`, vectors in float32.

        If the stored shape is not `shape`, the result is a meta tensor of the stored shape.
        """
        import torch

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
