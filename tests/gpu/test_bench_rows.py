"""The rows of `infer bench gpu` for single kernels, at small sizes, with a made-up clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from infer.bench.gpu_kernels import CachedAttention, KernelSizes, kernel_rows
from infer.bench.gpu_rows import Peaks
from infer.kernels.invariance import linears
from tests.support.device_runners import SHAPE, device_runner, make_model

SIZES = KernelSizes(rows=(1, 3), context=9, prompts=(2, 11), rotated=(2, 5), cycled_bytes=20_000)
TOOK_US = 8.0


def test_every_kernel_has_rows(device: torch.device) -> None:
    done = []

    def timed_us(work: Callable[[], object], calls: int = 1) -> float:
        work()
        done.append(calls)
        return TOOK_US

    peaks = Peaks(copy_tb_s=2.0, read_tb_s=3.0, product_tflop_s=700.0)
    model = make_model(device)
    layers = list(linears(model))
    runner = device_runner(model, device, graphs=False)
    attention = CachedAttention(runner.backend, runner.caches)
    for cache in runner.caches:
        cache.zero_()
    with torch.inference_mode():
        rows = list(
            kernel_rows(SHAPE, layers, attention, peaks, device, {"rope": 1.5}, timed_us, SIZES)
        )
    assert len(rows) == len(done)
    by_key = {row.key: row for row in rows}
    assert len(by_key) == len(rows)
    starts = ("rope", "draw 1 1", "draw 3 0", "attention 3", "attention prompts", "norm 1")
    assert set(starts) <= by_key.keys()
    assert by_key["rope"].ok is False
    kinds = {(layer.in_features, layer.out_features) for layer in layers}
    assert {key for key in by_key if key.startswith("linear")} == {
        f"linear {width} {height} {rows}" for width, height in kinds for rows in SIZES.rows
    }
    # Keys and values of 3 sequences with 9 tokens of 2 heads, in 16 bits.
    decode = by_key["attention 3"]
    assert decode.floor is not None
    assert decode.floor * 3.0e6 == 4 * 3 * 9 * 2 * 16
    assert decode.share is not None
    assert 0 < decode.share < 1
