"""Checkpoints in the shapes of real models, with random weights; nothing is downloaded.

`write(folder, name)` writes config, tokenizer and sharded bfloat16 safetensors as transformers
does. `python benchmarks/shapes.py NAME FOLDER` does it from the command line. `write_config` leaves
the weights out; `infer plan` and `--load-format dummy` need no more. The weights are scaled so that
activations stay near one. The tokenizer is the shipped one, and every id beyond its vocabulary is a
word of its own, because ids without text would stream nothing. `--quantized` writes the decoder's
matrices in a format of `tests.support.quantized_files`, such as W8A8.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from infer.models.hub import SHIPPED_FOLDER
from infer.models.model import build_model
from infer.models.registry import parse_model_config
from infer.models.weights import WeightSource, dummy_source

if TYPE_CHECKING:
    from tests.support.quantized_files import Format

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "torch_dtype": "bfloat16",
    },
}
SHAPES |= {
    "phi-4-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "vocab_size": 200064,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    },
    "qwen3-1.7b": SHAPES["qwen3-0.6b"] | {"hidden_size": 2048, "intermediate_size": 6144},
    "llama-3.2-3b": SHAPES["llama-3.2-1b"]
    | {
        "hidden_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "head_dim": 128,
    },
    "qwen3-4b": SHAPES["qwen3-0.6b"]
    | {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "gemma-3-4b": SHAPES["gemma-3-1b"]
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
    },
}


def write_config(folder: Path, name: str, quantized: Format | None = None) -> None:
    """Write config and tokenizer of the named shape."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = dict(SHAPES[name])
    if quantized is not None:
        raw["quantization_config"] = dict(quantized.config)
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    for file in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(SHIPPED_FOLDER / file, folder / file)
    tokenizer = json.loads((SHIPPED_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab.update({f"Ġw{i}": i for i in range(max(vocab.values()) + 1, raw["vocab_size"])})
    (folder / "tokenizer.json").write_text(
        json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8"
    )


def write(
    folder: Path, name: str, shard_bytes: int = 10**9, quantized: Format | None = None
) -> None:
    """Write a checkpoint of the named shape, unless it is there.

    `quantized`: how the decoder's matrices are written; None: in bfloat16.
    """
    if (folder / "model.safetensors.index.json").is_file():
        return
    write_config(folder, name, quantized)
    names = tensor_shapes(SHAPES[name])
    source = dummy_source(torch.bfloat16, torch.device("cpu"))
    shards: list[list[str]] = [[]]
    size = 0
    for tensor, shape in names.items():
        num_bytes = 2 * torch.Size(shape).numel()
        if size and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    weight_map = {}
    for i, members in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for tensor in members:
            tensors |= written(tensor, source.take(tensor, names[tensor]), quantized)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def written(name: str, weight: Tensor, quantized: Format | None) -> dict[str, Tensor]:
    """A weight as its file has it. Embeddings, heads and norms are not quantised."""
    if quantized is None or weight.dim() != 2 or ".layers." not in name:
        return {name: weight}
    tensors, _ = quantized.write(weight)
    return {
        f"{name.removesuffix('.weight')}.{part}": tensor.contiguous()
        for part, tensor in tensors.items()
    }


def tensor_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the decoder's weights, found by building it without memory."""
    shapes: dict[str, tuple[int, ...]] = {}

    def read(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        before = shapes.get(name, (0,))[0]  # rows of a tensor that holds several
        shapes[name] = (before + shape[0], *shape[1:])
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    meta = torch.device("meta")
    source = WeightSource((), read, dtype=torch.bfloat16, device=meta, complete=False)
    build_model(parse_model_config(raw, "shape"), source, 1)
    return shapes


def main() -> None:
    """Write a checkpoint."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.quantized_files import FORMATS  # programs that import this one do without

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantized", choices=FORMATS, help="a format of quantised files")
    options = parser.parse_args()
    quantized = FORMATS[options.quantized] if options.quantized else None
    write(options.folder, options.name, quantized=quantized)


if __name__ == "__main__":
    main()
