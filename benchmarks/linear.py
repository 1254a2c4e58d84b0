"""bfloat16 linear layers: linear.cpp beside oneDNN: `python benchmarks/linear.py [ROWS ...]`.

For each shape and number of rows, three things are measured in turns, and medians are printed:
oneDNN's packed product, ours, and the time in which `Tensor.sum` reads as many bytes. The last is a
mark to compare runs with, not a limit: a plain loop that prefetches reads a third faster. The
weights take turns in more than 600 MB, so that no cache holds them. OMP_NUM_THREADS sets the number
of threads. Nothing else may run at the same time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from infer.kernels.linear import Linear, NativeLinear, PackedLinear

SHAPES = [(2048, 8192), (8192, 2048), (2048, 3072), (2048, 128256)]  # K, N
ROWS = [1, 2, 8, 32, 128, 512, 1024]
ROTATED_BYTES = 650e6


def seconds(run: Callable[[], object]) -> float:
    """The duration of a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def sweep(layers: list[Linear], x: Tensor) -> Callable[[], object]:
    """A function that calls each of the layers once."""
    return lambda: [layer(x) for layer in layers]


def main() -> None:
    """Measure and print."""
    wanted = [int(word) for word in sys.argv[1:]] or ROWS
    memory = torch.ones(80_000_000, dtype=torch.int64)
    print(f"{torch.get_num_threads()} threads; times in µs a layer")
    print(f"{'K':>5} {'N':>6} {'M':>5} {'sum':>7} {'oneDNN':>8} {'native':>8} {'ratio':>6} Gflop/s")
    for k, n in SHAPES:
        count = max(2, round(ROTATED_BYTES / (2 * k * n)))
        weights = [torch.randn(n, k).mul_(k**-0.5).bfloat16() for _ in range(count)]
        packed: list[Linear] = [PackedLinear(weight, None) for weight in weights]
        native: list[Linear] = [NativeLinear([weight], None) for weight in weights]
        del weights
        for num_rows in [m for m in wanted if n < 100_000 or m <= 32]:
            x = torch.randn(num_rows, k).bfloat16()
            runs: list[Callable[[], object]] = [memory.sum, sweep(packed, x), sweep(native, x)]
            times = [[seconds(run) for run in runs] for _ in range(7)][1:]
            read, onednn, ours = (statistics.median(column) for column in zip(*times, strict=True))
            num_bytes = 2 * (k * n + num_rows * (k + n))
            mark = num_bytes * read / memory.nbytes
            onednn, ours = onednn / count, ours / count
            print(
                f"{k:5} {n:6} {num_rows:5} {mark * 1e6:7.0f} {onednn * 1e6:8.0f} {ours * 1e6:8.0f}"
                f" {onednn / ours:6.2f} {2 * k * n * num_rows / ours / 1e9:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
