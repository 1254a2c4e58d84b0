"""What narrower numbers cost in quality: `python benchmarks/quality.py [DOCUMENTS]`.

The shipped model reads held-out documents of its grammar, teacher-forced: in float32, in bfloat16,
with int8 and int4 layers, with the blocks of GGUF files (Q8_0, Q4_K_M) and the numbers of these in
float32, and with keys and values in int8 where the CPU has the instructions. The
table has the loss, the perplexity, the divergence from bfloat16's distributions (KL), and how often
the most probable token is the same.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from k_quants import kind_of, q4_k, q6_k
from safetensors.torch import load_file
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.attention.layout import BatchLayout
from infer.engine.build.checkpoint import find_checkpoint
from infer.kernels.blocks import BlockWeight
from infer.kernels.loader import int8_cache_obstacle
from infer.kernels.rotary import QKRotation
from infer.models.hub import SHIPPED_FOLDER
from infer.models.model import Model, build_model
from infer.models.model_config import ModelConfig
from infer.models.weights import WeightSource
from infer.runner.kv_storage import KVStorage
from infer.text.tokenizer import Tokenizer

sys.path.append(str(Path(__file__).parent.parent / "training"))
from grammar import documents


def dense(layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None) -> Tensor:
    """An attention backend for one whole sequence, causal."""
    if turn is not None:
        q, k = turn(q, k)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.squeeze(0).transpose(0, 1)


class Int8Cache:
    """The native attention with keys and values in int8, for one whole sequence."""

    def __init__(self, config: ModelConfig, most: int) -> None:
        num_pages = -(-most // 16) + 1
        storage = KVStorage(config, num_pages, 16, dtype=torch.int8, device=torch.device("cpu"))
        self.backend = NativeBackend(storage.keys, storage.values, **config.attention())

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None
    ) -> Tensor:
        if layer == 0:
            num, slots = len(q), torch.arange(16, 16 + len(q))
            pages = torch.arange(1, -(-num // 16) + 1)[None]
            self.backend.plan(BatchLayout([0, num], [num], slots, pages))
        return self.backend(layer, q, k, v, turn)


def load(dtype: torch.dtype, quantization: str | None = None) -> Model:
    """The shipped model, with its layers in one kind of number."""
    checkpoint = find_checkpoint(None)
    source = checkpoint.source(dtype, torch.device("cpu"))
    source.quantization = quantization
    return build_model(checkpoint.config, source, 4096)


def load_blocks(kind_of_name: Callable[[str], str], *, dequantised: bool) -> Model:
    """The shipped model with its matrices in blocks, or with the numbers of these in float32."""
    tensors = load_file(SHIPPED_FOLDER / "model.safetensors")

    @functools.cache
    def rows_of(name: str) -> tuple[str, np.ndarray]:
        kind, rows = kind_of_name(name), tensors[name].float().numpy()
        if kind in ("Q4_K", "Q6_K"):
            return kind, (q4_k if kind == "Q4_K" else q6_k)(rows)
        return kind, quantize(rows, GGMLQuantizationType[kind])

    def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
        if len(shape) != 2:
            return tensors[name]
        kind, rows = rows_of(name)
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[kind]).reshape(shape).copy())

    def blocks(parts: Mapping[str, tuple[int, int]], gated: bool) -> list[BlockWeight]:
        return [
            BlockWeight(kind, shape, rows)
            for (kind, rows), shape in zip(map(rows_of, parts), parts.values(), strict=True)
        ]

    source = WeightSource(
        tensors,
        numbers,
        dtype=torch.float32 if dequantised else torch.bfloat16,
        device=torch.device("cpu"),
        blocks=None if dequantised else blocks,
    )
    return build_model(find_checkpoint(None).config, source, 4096)


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="?", type=int, default=200, help="default: 200")
    count = parser.parse_args().documents
    encode = Tokenizer(find_checkpoint(None).text()).encode
    texts = [
        encode(text, add_special_tokens=False, parse_special_tokens=True)
        for text in documents("heldout", 0, count)
    ]
    models = {
        "bfloat16": load(torch.bfloat16),
        "float32": load(torch.float32),
        "int8": load(torch.bfloat16, "int8"),
        "int4": load(torch.bfloat16, "int4"),
    }
    num_layers = find_checkpoint(None).config.num_layers
    mixed = functools.partial(kind_of, num_layers=num_layers)
    for name, kinds in (("Q8_0", lambda name: "Q8_0"), ("Q4_K_M", mixed)):
        models[name] = load_blocks(kinds, dequantised=False)
        models[f"{name} in float32"] = load_blocks(kinds, dequantised=True)
    ways = {name: (model, dense) for name, model in models.items()}
    config = find_checkpoint(None).config
    if int8_cache_obstacle(config.head_dim, 16) is None:
        cache = Int8Cache(config, max(map(len, texts)))
        ways["bfloat16, int8 cache"] = models["bfloat16"], cache
        ways["int8, int8 cache"] = models["int8"], cache
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in ways}
    num_tokens = 0
    for ids in texts:
        tokens, positions = torch.tensor(ids), torch.arange(len(ids))
        reference: Tensor | None = None
        for name, (model, attend) in ways.items():
            logits = model.logits(model.forward(tokens, positions, attend))[:-1]
            rows = logits.double().log_softmax(-1)
            reference = rows if reference is None else reference
            loss = -rows.gather(1, tokens[1:, None]).sum()
            divergence = (reference.exp() * (reference - rows)).sum()
            same = (rows.argmax(-1) == reference.argmax(-1)).sum()
            sums[name] += torch.stack([loss, divergence, same.double()])
        num_tokens += len(ids) - 1
    print(f"{count} documents, {num_tokens:,} tokens")
    print(f"{'':20}{'nats/token':>11}{'perplexity':>11}{'KL to bf16':>12}{'same token':>11}")
    for name, total in sums.items():
        loss, divergence, same = (total / num_tokens).tolist()
        print(f"{name:20}{loss:11.4f}{math.exp(loss):11.4f}{divergence:12.6f}{same:11.2%}")


if __name__ == "__main__":
    main()
