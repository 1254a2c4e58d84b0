"""How close the engine comes to its limits: `python benchmarks/floor.py --model PATH`.

One process measures two groups in turns. The first: reading a buffer, reading the weights where
they are (layer by layer, which is up to a tenth slower), and a token of a single stream, which
reads all weights once. The second: the products of a prompt alone (every linear layer on as many
rows, the head on one) by our kernels and by torch's packed operators, and the prompt. torch's
operators are oneDNN's; their int8 does not include the quantisation of rows, and layers of one
shape share their weights, which so stay in the cache. It prints medians of ratios, because the
bandwidth changes from minute to minute. Nothing else may run at the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from infer import LLM, SamplingParams
from infer.bench.machine import reader
from infer.bench.workloads import Draw
from infer.kernels.invariance import linears
from infer.kernels.linear.fusion import Linear
from infer.kernels.linear.onednn import PackedLinear
from infer.kernels.native import native_obstacle

INPUT_LEN, STEPS = 128, 32
"""Prompt and measured steps of a single stream, in tokens."""
READ_BYTES = 1 << 29
"""The size of the buffer that is read beside each measurement, in bytes."""


def seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="bfloat16,int8,int4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--json", help="file for what was measured")
    options = parser.parse_args()
    if reason := native_obstacle():
        raise SystemExit(f"this measures our own linear layers, which do not run here: {reason}")
    found = {}
    for dtype in options.dtypes.split(","):
        found[dtype] = measure(options, dtype)
        single, prefill = found[dtype]["single"], found[dtype]["prefill"]
        print(
            f"{dtype}: {statistics.median(single['tok_s']):.1f} tok/s in one stream,"
            f" {statistics.median(single['share']):.1%} of"
            f" {statistics.median(single['read_gb_s']):.1f} GB/s over"
            f" {single['bytes_per_token'] / 1e6:.0f} MB a token,"
            f" {statistics.median(single['share_of_weights']):.1%} of reading the weights;"
            f" {statistics.median(prefill['tok_s']):.0f} prompt tok/s,"
            f" {statistics.median(prefill['share']):.1%} of the products alone,"
            f" {statistics.median(prefill['share_of_stock']):.1%} of torch's"
        )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"model": options.model, **found}, file, indent=1)


def stock_product(layer: Linear, num_rows: int, is_int8: bool) -> Callable[[], object]:
    """A call of torch's packed product of a layer's shape, with random weights."""
    weight = torch.randn(layer.num_weights // layer.in_features, layer.in_features)
    x = torch.randn(num_rows, layer.in_features)
    if not is_int8:
        product, rows = PackedLinear(weight.bfloat16()), x.bfloat16()
        return lambda: product(rows)
    packed = torch.ops.onednn.qlinear_prepack(weight.mul_(30).to(torch.int8), None)
    unsigned = x.mul_(30).add_(128).to(torch.uint8)
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int64)
    arguments: tuple[Any, ...] = (
        packed,
        scales,
        zeros,
        None,
        1.0,
        0,
        torch.bfloat16,
        "none",
        [],
        "",
    )
    return lambda: torch.ops.onednn.qlinear_pointwise(unsigned, 1.0, 128, *arguments)


@torch.inference_mode()
def measure(options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    num_rows = options.input_len
    llm = LLM(
        model=options.model, dtype=dtype, max_seq_len=max(2 * num_rows, INPUT_LEN + STEPS + 1),
        max_num_batched_tokens=num_rows,
        kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False,
    )  # fmt: skip
    draw = Draw(run=1)
    model = llm.core.runner.model  # type: ignore[attr-defined]
    layers, head = list(linears(model)), model.lm_head
    num_bytes = sum(layer.packed.nbytes for layer in layers)  # type: ignore[attr-defined]

    def greedy(output_len: int) -> SamplingParams:
        return SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)

    widths = {layer.in_features for layer in layers}
    inputs = {width: torch.randn(num_rows, width).bfloat16() for width in widths}

    readers = [reader(layer.packed) for layer in layers]  # type: ignore[attr-defined]

    def read_weights() -> None:
        for read_one in readers:
            read_one()

    def products() -> None:
        for layer in layers:
            x = inputs[layer.in_features]
            layer(x[:1] if layer is head else x)

    stock_of = {
        (layer.num_weights, layer.in_features): stock_product(
            layer, 1 if layer is head else num_rows, dtype != "bfloat16"
        )
        for layer in layers
    }

    def stock_products() -> None:
        for layer in layers:
            stock_of[layer.num_weights, layer.in_features]()

    single: dict[str, list[float]] = {
        key: [] for key in ("tok_s", "read_gb_s", "share", "share_of_weights")
    }
    prefill: dict[str, list[float]] = {
        key: [] for key in ("tok_s", "products_s", "share", "stock_products_s", "share_of_stock")
    }

    def keep(into: dict[str, list[float]], *values: float) -> None:
        for column, value in zip(into.values(), values, strict=True):
            column.append(value)

    read = reader(torch.ones(READ_BYTES // 8, dtype=torch.int64))
    for turn in range(options.rounds + 1):
        pieces = llm.stream(draw.ids(INPUT_LEN), greedy(STEPS + 1))
        next(pieces)  # the prompt
        before = read()
        for _ in range(STEPS):
            step_s = seconds(partial(next, pieces))
            after, weights_s = read(), seconds(read_weights)
            rate, before = (before + after) / 2, after
            if turn:  # the first one warms up
                shares = num_bytes / step_s / rate / 1e9, weights_s / step_s
                keep(single, 1 / step_s, rate, *shares)
        pieces.close()
        for _ in range(3):  # in turns: a machine's rate may double within seconds
            prompt, params = draw.ids(num_rows), greedy(1)
            ours_s = seconds(products)
            prompt_s = seconds(partial(llm.generate, [prompt], params))
            stock_s = seconds(stock_products)
            shares = ours_s / prompt_s, stock_s / prompt_s
            if turn:
                keep(prefill, num_rows / prompt_s, ours_s, shares[0], stock_s, shares[1])
    llm.close()
    return {"single": {**single, "bytes_per_token": num_bytes}, "prefill": prefill}


if __name__ == "__main__":
    main()
