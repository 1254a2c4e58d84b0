"""Linear layers: our kernels beside oneDNN and memory: `python benchmarks/linear.py [ROWS ...]`.

For each shape and number of rows these are measured in turns, and medians are printed: oneDNN's
packed product in float32 and, where the CPU has it, in bfloat16; our kernels in bfloat16, int8,
int4 and the blocks of GGUF files; and a plain loop that reads as many bytes as each weight has,
from which comes the share of the read rate. The weights take turns in 300 MB, so that no cache
holds them.

OMP_NUM_THREADS sets the number of threads. `INFER_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2` keeps both sides to AVX2. Nothing else may run at the same time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from infer.kernels import loader
from infer.kernels.blocks import NUMBERS, PANEL, ZEROED, BlockWeight, packed_bytes
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.fusion import Linear
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.linear.onednn import PackedLinear, onednn_has_bfloat16
from infer.kernels.native import instruction_set, weight_bytes

Shapes = list[tuple[int, int]]
"""(K, N) of layers that are measured together."""
SHAPES: list[Shapes] = [[(2048, 8192)], [(8192, 2048)], [(2048, 3072)], [(1024, 6144)]]
DECODER_LAYERS: dict[str, Shapes] = {
    "llama-1b": [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)],
    "qwen3-0.6b": [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024)],
}
"""The products of one layer of a decoder, by the model's name."""
ROWS = [1, 2, 4, 8, 32, 128, 512, 1024]


def seconds(run: Callable[[], object]) -> float:
    """The duration of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def sweep(layers: list[Linear], num_rows: int) -> Callable[[], object]:
    """A function that calls each of the layers once."""
    inputs = {
        layer.in_features: torch.randn(num_rows, layer.in_features).to(layer.dtype)
        for layer in layers
    }
    return lambda: [layer(inputs[layer.in_features]) for layer in layers]


def reading(memory: Tensor) -> Callable[[], object]:
    """A function that reads a tensor once."""
    arguments = memory.nbytes, torch.get_num_threads()
    return lambda: loader.loaded().infer_read(memory.data_ptr(), *arguments)


def block_weight(kind: str, n: int, k: int) -> BlockWeight:
    """A weight of random codes; its factors, in which no time is spent, are random too."""
    if kind in ZEROED:
        block = int(kind.partition("_")[2])
        size = 4 + block * int(kind[1]) // 8
    else:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rows = np.random.default_rng(0).integers(0, 256, (64, k // block * size), dtype=np.uint8)
    return BlockWeight(kind, (n, k), np.tile(rows, (-(-n // 64), 1))[:n])


def kinds(
    shapes: Shapes, wanted: list[str], rotate: float
) -> dict[str, tuple[float, list[Linear]]]:
    """Name → (bytes of a set of layers, several sets: as many as keep them out of the caches)."""
    found: dict[str, tuple[float, list[Linear]]] = {}
    num_weights = sum(k * n for k, n in shapes)
    for name in wanted:
        if name == "onednn16" and not onednn_has_bfloat16():
            continue
        quantization = name if name.startswith("int") else None
        each = 4.0 if name == "onednn32" else weight_bytes(quantization, 2, 1024)
        in_blocks = name in NUMBERS or name in ZEROED
        if in_blocks:
            each = packed_bytes([name], 1024) / (PANEL * 1024)
        layers: list[Linear] = []
        for _ in range(max(2, round(rotate / (each * num_weights)))):
            for k, n in shapes:
                if in_blocks:
                    layers.append(NativeLinear([block_weight(name, n, k)]))
                    continue
                weight = torch.randn(64, k).mul_(k**-0.5).repeat(-(-n // 64), 1)[:n]
                if name.startswith("onednn"):
                    layers.append(PackedLinear(weight if each == 4 else weight.bfloat16(), None))
                else:
                    layers.append(make_linear(weight.bfloat16(), quantization=quantization))
        found[name] = each * num_weights, layers
    return found


def measure(title: str, shapes: Shapes, rows: list[int], options: argparse.Namespace) -> None:
    """Print the lines of some shapes; times are of all of them together."""
    found = kinds(shapes, options.kinds.split(","), options.rotate_mb * 1e6)
    num_weights = sum(k * n for k, n in shapes)
    memory = torch.ones(40_000_000, dtype=torch.int64)
    for num_rows in rows:
        runs: dict[str, Callable[[], object]] = {"read": reading(memory)}
        runs |= {name: sweep(layers, num_rows) for name, (_, layers) in found.items()}
        times = [
            {name: seconds(run) for name, run in runs.items()} for _ in range(options.rounds + 1)
        ]
        medians = {name: statistics.median(one[name] for one in times[1:]) for name in runs}
        rate = memory.nbytes / medians["read"]
        parts = []
        for name, (num_bytes, layers) in found.items():
            own = medians[name] / (len(layers) // len(shapes))
            parts.append(
                f"{name} {own * 1e6:8.0f} µs {2 * num_weights * num_rows / own / 1e9:5.0f} Gflop/s"
                f" {num_bytes / own / rate:4.0%}"
            )
        print(f"{title} {num_rows:5}  {rate / 1e9:3.0f} GB/s | " + " | ".join(parts), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", default="", help="as 2048x8192,8192x2048 (K x N)")
    parser.add_argument("--layers", default="", help="a model's, of " + ", ".join(DECODER_LAYERS))
    parser.add_argument("--kinds", default="onednn32,onednn16,bfloat16,int8,int4,Q8_0,Q4_K,Q6_K")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rotate-mb", type=int, default=300)
    options = parser.parse_args()
    given = [one.split("x") for one in options.shapes.split(",") if one]
    groups: dict[str, Shapes] = {f"{k:>5} {n:>6}": [(int(k), int(n))] for k, n in given}
    groups |= {name: DECODER_LAYERS[name] for name in options.layers.split(",") if name}
    groups = groups or {f"{s[0][0]:5} {s[0][1]:6}": s for s in SHAPES}
    print(
        f"{torch.get_num_threads()} threads, {instruction_set()}; columns: shape, rows, read rate"
    )
    with torch.inference_mode():
        for title, shapes in groups.items():
            measure(title, shapes, options.rows, options)


if __name__ == "__main__":
    main()
