"""The attention kernel against SDPA and against memory: `python benchmarks/attention.py`.

Each call is one layer in bfloat16, with pages of 16 tokens in random order. The KV caches of
several layers take turns, so that no call finds its keys in a cache of the CPU (`--rotate-mb`, by
default 700, which is more than the last level holds). The floor of decode is the bytes of K and V
divided by the read bandwidth, which is measured in the same round. The flops of prefill are 4 · H ·
D for every key that a query sees. A rotation (with norms of heads for D = 128) takes the time that
attention takes longer with it. The backends take turns, and the tables have medians. Nothing else
may run at the same time.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import time
from collections.abc import Callable

import torch

from infer.attention.cpu import NativeBackend
from infer.attention.layout import AttentionBackend, BatchLayout
from infer.attention.sdpa import SDPABackend
from infer.kernels import loader
from infer.kernels.linear.fusion import Norm
from infer.kernels.rotary import HeadNorms, QKRotation

PAGE = 16
LLAMA, QWEN = (32, 8, 64), (16, 8, 128)
DECODE = [
    (LLAMA, 8, 160), (LLAMA, 32, 160), (LLAMA, 32, 1024), (LLAMA, 32, 2048), (LLAMA, 1, 8192),
    (QWEN, 32, 160), (QWEN, 32, 1024),
]  # fmt: skip
PREFILL = [(LLAMA, 1, 1024), (LLAMA, 8, 128), (QWEN, 1, 1024)]
ROTATION = [(LLAMA, 32, 160, 1), (QWEN, 32, 160, 1), (LLAMA, 1, 1024, 1024), (QWEN, 1, 1024, 1024)]


def random_cache(shape: tuple[int, ...]) -> torch.Tensor:
    """A cache of random numbers, laid out in memory like the engine's."""
    return loader.page_aligned(math.prod(shape) * 2).view(torch.bfloat16).view(shape).normal_()


class Case:
    """B sequences of n tokens, whose last `num` are queries, in layers of `rotate` bytes."""

    def __init__(self, shape: tuple[int, int, int], B: int, n: int, num: int, rotate: int) -> None:
        H, G, D = shape
        pages = B * -(-n // PAGE)
        self.bytes = 2 * B * n * G * D * 2
        self.flops = 4 * H * D * B * sum(range(n - num + 1, n + 1))
        layers = max(1, min(200, -(-rotate // self.bytes)))
        cache = (pages + 1, PAGE, G, D)
        self.keys = [random_cache(cache) for _ in range(layers)]
        self.values = [random_cache(cache) for _ in range(layers)]
        for tensor in (*self.keys, *self.values):
            tensor[0] = 0
        self.heads, self.scale = H, D**-0.5
        tables = (torch.randperm(pages) + 1).view(B, -1)
        positions = torch.arange(n - num, n)
        slots = tables[:, positions // PAGE] * PAGE + positions % PAGE
        self.layout = BatchLayout([i * num for i in range(B + 1)], [n] * B, slots.flatten(), tables)
        self.q = torch.randn(B * num, H, D).bfloat16()
        self.k = torch.randn(B * num, G, D).bfloat16()
        self.v = torch.randn(B * num, G, D).bfloat16()

    def rotation(self) -> QKRotation:
        """A rotation of the queries and keys, behind norms of heads for a size of 128."""
        size = self.q.shape[2]
        angles = torch.rand(len(self.q), size // 2)
        norm = Norm(torch.ones(size), 1e-6)
        norms = HeadNorms(norm, norm) if size == 128 else None
        return QKRotation(angles.cos(), angles.sin(), norms)

    def backend(
        self, kind: Callable[..., AttentionBackend], rotation: QKRotation | None = None
    ) -> Callable[[], float]:
        """A function that computes attention in the next layer and returns the seconds."""
        backend = kind(self.keys, self.values, num_heads=self.heads, scale=self.scale)
        backend.plan(self.layout)
        count = itertools.count()

        def attend() -> float:
            layer = next(count) % len(self.keys)
            started = time.perf_counter()
            backend(layer, self.q, self.k, self.v, rotation)
            return time.perf_counter() - started

        return attend


def read_bandwidth(data: torch.Tensor) -> float:
    """The bytes a second that all threads read while they sum a large tensor."""
    started = time.perf_counter()
    data.sum()
    return data.nbytes / (time.perf_counter() - started)


def measure(case: Case, data: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """The medians: seconds of the native kernel, seconds of SDPA, read bandwidth in bytes/s."""
    ours, theirs = case.backend(NativeBackend), case.backend(SDPABackend)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    for i in range(-1, rounds):
        repeat = 10 if case.bytes < 1 << 24 else 3
        found = (
            statistics.median(ours() for _ in range(repeat)),
            statistics.median(theirs() for _ in range(max(1, repeat // 3))),
            read_bandwidth(data),
        )
        if i >= 0:  # the first round only warms up
            for column, value in zip(times, found, strict=True):
                column.append(value)
    a, b, c = (statistics.median(column) for column in times)
    return a, b, c


def measure_rotation(case: Case, rounds: int) -> tuple[float, float, float]:
    """Medians of the seconds: attention without a rotation and with one, and torch's rotation."""
    rotation = case.rotation()

    def by_torch() -> float:
        started = time.perf_counter()
        rotation(case.q, case.k)
        return time.perf_counter() - started

    ways = (case.backend(NativeBackend), case.backend(NativeBackend, rotation))
    times: list[list[float]] = [[], []]
    for i in range(20 * rounds):
        for which in (i % 2, 1 - i % 2):
            times[which].append(ways[which]())
    without, together = (statistics.median(column[3:]) for column in times)
    return without, together, statistics.median(by_torch() for _ in range(10 * rounds))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rotate-mb", type=int, default=700)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    if reason := loader.available():
        raise SystemExit(reason)
    rotate = options.rotate_mb << 20
    data = torch.ones(rotate // 4)
    with torch.inference_mode():
        print(f"{options.threads} threads, {loader.chosen_instruction_set()}\n")
        print("| decode: H, G, D; B × context | GB/s | floor ms | native ms | × floor | SDPA ms |")
        print("|---|---|---|---|---|---|")
        for shape, B, n in DECODE:
            case = Case(shape, B, n, 1, rotate)
            ours, theirs, bandwidth = measure(case, data, options.rounds)
            floor = case.bytes / bandwidth
            print(
                f"| {shape}; {B} × {n} | {bandwidth / 1e9:.0f} | {floor * 1e3:.2f} |"
                f" {ours * 1e3:.2f} | {ours / floor:.2f} | {theirs * 1e3:.2f} |",
                flush=True,
            )
        print("\n| prefill: H, G, D; B × tokens | native ms | Gflop/s | SDPA ms | Gflop/s |")
        print("|---|---|---|---|---|")
        for shape, B, n in PREFILL:
            case = Case(shape, B, n, n, 64 << 20)
            ours, theirs, _ = measure(case, data, options.rounds)
            print(
                f"| {shape}; {B} × {n} | {ours * 1e3:.2f} | {case.flops / ours / 1e9:.0f} |"
                f" {theirs * 1e3:.2f} | {case.flops / theirs / 1e9:.0f} |",
                flush=True,
            )
        print("\n| rotation: H, G, D; B × queries | native, within attention, ms | torch's ms |")
        print("|---|---|---|")
        for shape, B, n, num in ROTATION:
            case = Case(shape, B, n, num, 64 << 20)
            without, together, alone = measure_rotation(case, options.rounds)
            print(
                f"| {shape}; {B} × {num} | {(together - without) * 1e3:.3f} | {alone * 1e3:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
