"""Rows of `infer bench gpu` for single kernels: each alone, with the limit that the GPU sets to it.

A kernel is timed over several layers in turn, because in a model a layer's weights, keys and values
have left the second level cache when the layer comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from infer.attention.layout import AttentionBackend, BatchLayout
from infer.bench.gpu_rows import Peaks, Row
from infer.kernels.linear.cuda_linear import CudaInt8Linear
from infer.kernels.linear.fusion import Linear, Norm
from infer.kernels.rotary import HeadNorms, QKRotation
from infer.models.model_config import ModelConfig

CONTEXT = 512
"""Number of tokens in the cache of each sequence."""
_KIND = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KernelSizes:
    """The sizes for which kernels are timed."""

    rows: tuple[int, ...] = (1, 32, 256)
    """Numbers of rows, or of decoding sequences."""
    context: int = CONTEXT
    """Number of tokens in the cache of each sequence."""
    prompts: tuple[int, int] = (4, 1024)
    """Number of prompts and of their tokens."""
    rotated: tuple[int, int] = (16, 1024)
    """Number of sequences and of their tokens, for the rotation alone."""
    cycled_bytes: int = 256 << 20
    """Size of the weights over which a layer is timed: several times the second level cache."""


@dataclass(frozen=True, slots=True)
class CachedAttention:
    """An attention backend with its caches, such as those of a runner."""

    backend: AttentionBackend
    caches: Sequence[Tensor]
    """Keys and values, each [pages, page_size, G, D]."""


class Timer(Protocol):
    """Measures work on the device."""

    def __call__(self, work: Callable[[], object], calls: int = 1) -> float:
        """The time of a call of `work` in µs, from `calls` calls in a row."""


def kernel_rows(
    shape: ModelConfig,
    layers: Iterable[Linear],
    attention: CachedAttention,
    peaks: Peaks,
    device: torch.device,
    wanted: dict[str, float],
    timed_us: Timer,
    sizes: KernelSizes = KernelSizes(),
) -> Iterator[Row]:
    """The rows of all kernels, for a model of this shape. `layers`: the model's linear layers.

    The first pages of the cache are overwritten.
    """
    yield _rope_row(shape, peaks, device, wanted, timed_us, sizes)
    yield from _draw_rows(shape, peaks, device, timed_us, sizes)
    yield from _attention_rows(shape, attention, peaks, device, timed_us, sizes)
    yield from _linear_rows(layers, peaks, device, timed_us, sizes)
    yield from _norm_rows(shape, device, timed_us, sizes)


def _rope_row(
    shape: ModelConfig,
    peaks: Peaks,
    device: torch.device,
    wanted: dict[str, float],
    timed_us: Timer,
    sizes: KernelSizes,
) -> Row:
    from infer.kernels.cuda.rotary import apply_rope

    batch, length = sizes.rotated
    size = shape.head_dim
    q, k = (
        torch.randn(batch, length, heads, size, device=device, dtype=_KIND).transpose(1, 2)
        for heads in (shape.num_heads, shape.num_kv_heads)
    )
    angles = torch.rand(length, size // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    took_us = timed_us(lambda: apply_rope(q, k, cos, sin), 3)
    num_bytes = 4 * (q.numel() + k.numel())
    return Row(
        "rope", f"rotation of {batch} x {length:,} tokens", "TB/s", num_bytes / took_us / 1e6,
        floor=peaks.copy_tb_s, wanted=wanted.get("rope"), higher_is_better=True,
    )  # fmt: skip


def _draw_rows(
    shape: ModelConfig, peaks: Peaks, device: torch.device, timed_us: Timer, sizes: KernelSizes
) -> Iterator[Row]:
    for rows in (sizes.rows[0], sizes.rows[-1]):
        floor_us = 4 * rows * shape.vocab_size / peaks.read_tb_s / 1e6
        for name, narrowed in (("temperature", False), ("top-k 20, top-p 0.95", True)):
            took_us = timed_us(_draw(rows, shape.vocab_size, narrowed, device), 3)
            what = f"draw of {rows} rows with {name}"
            yield Row(f"draw {rows} {narrowed:d}", what, "µs", took_us, floor=floor_us)


def _draw(rows: int, vocab: int, narrowed: bool, device: torch.device) -> Callable[[], None]:
    """A draw from rows of logits in which few tokens are probable, as in a model's."""
    from infer.kernels.cuda.draw import DrawBuffers, draw

    logits = torch.randn(rows, vocab, device=device) * 3
    buffers = DrawBuffers(rows, vocab, device)

    def whole(value: int) -> Tensor:
        return torch.full((rows,), value, dtype=torch.int32, device=device)

    columns = {
        "temperatures": torch.full((rows,), 0.8, device=device),
        "top_ps": torch.full((rows,), 0.95, device=device),
        "min_ps": torch.zeros(rows, device=device),
        "top_ks": whole(20),
        "narrowed": whole(narrowed),
        "positions": whole(7),
        "seeds": torch.arange(rows, device=device),
        "tokens": whole(0),
        "flags": whole(0),
    }
    return lambda: draw(logits, buffers, **columns)


def _attention_rows(
    shape: ModelConfig,
    attention: CachedAttention,
    peaks: Peaks,
    device: torch.device,
    timed_us: Timer,
    sizes: KernelSizes,
) -> Iterator[Row]:
    """Rotation, cache write and attention of one layer: of decoding sequences, and of prompts."""
    context = sizes.context
    for count in sizes.rows:
        num_bytes = 4 * count * context * shape.num_kv_heads * shape.head_dim
        took_us = timed_us(_attention(shape, attention, [(context - 1, 1)] * count, device))
        yield Row(
            f"attention {count}", f"attention of {count} at a context of {context}", "µs a layer",
            took_us / shape.num_layers, floor=num_bytes / peaks.read_tb_s / 1e6,
        )  # fmt: skip
    num, length = sizes.prompts
    took_us = timed_us(_attention(shape, attention, [(0, length)] * num, device)) / shape.num_layers
    # Each query has on average half of the keys; a key and a value take two operations each.
    operations = 4 * num * shape.num_heads * shape.head_dim * length * (length + 1) / 2
    yield Row(
        "attention prompts", f"attention of {num} prompts of {length:,}", "Tflop/s",
        operations / took_us / 1e6, floor=peaks.product_tflop_s, higher_is_better=True,
    )  # fmt: skip


def _attention(
    shape: ModelConfig,
    attention: CachedAttention,
    chunks: list[tuple[int, int]],
    device: torch.device,
) -> Callable[[], None]:
    """Attention in all layers of a step. `chunks`: (first position, number of tokens)."""
    heads, groups, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
    page_size = attention.caches[0].shape[1]
    starts, lengths = [0], []
    for start, num in chunks:
        starts.append(starts[-1] + num)
        lengths.append(start + num)
    per = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(per), generator=torch.Generator().manual_seed(0)) + 1
    tables = torch.zeros(len(chunks), max(per), dtype=torch.int64)
    slots = []
    for row, (pages, (start, num)) in enumerate(zip(torch.split(order, per), chunks, strict=True)):
        tables[row, : len(pages)] = pages
        cells = torch.arange(start, start + num)
        slots.append(pages[cells // page_size] * page_size + cells % page_size)
    attention.backend.plan(
        BatchLayout(starts, lengths, torch.cat(slots).to(torch.int32).to(device), tables.to(device))
    )
    qkv = torch.randn(starts[-1], heads + 2 * groups, size, device=device)
    q, k, v = torch.split(qkv.to(attention.caches[0].dtype), [heads, groups, groups], 1)
    angles = torch.rand(starts[-1], size // 2, device=device)
    norm = Norm(torch.ones(size, device=device), 1e-6)
    rotation = QKRotation(
        angles.cos(), angles.sin(), HeadNorms(norm, norm) if shape.qk_norm else None
    )

    def work() -> None:
        for layer in range(shape.num_layers):
            attention.backend(layer, q, k, v, rotation)

    return work


def _linear_rows(
    layers: Iterable[Linear],
    peaks: Peaks,
    device: torch.device,
    timed_us: Timer,
    sizes: KernelSizes,
) -> Iterator[Row]:
    """The linear layers, by shape. A layer includes the norm and the gate that belong to it."""
    kinds: dict[tuple[int, int, int], list[Linear]] = {}
    for layer in layers:
        kind = (layer.in_features, layer.out_features, layer.num_weights)
        kinds.setdefault(kind, []).append(layer)
    for (width, height, num_weights), group in kinds.items():
        weight_bytes = num_weights * weight_size(group[0])
        chosen = group[: max(1, -(-sizes.cycled_bytes // weight_bytes))]
        gate = " with a gate" if num_weights > width * height else ""
        for rows in sizes.rows:
            x = torch.randn(rows, width, device=device).to(group[0].dtype)
            took_us = timed_us(partial(_apply, chosen, x))
            num_bytes = weight_bytes + rows * (2 * width + 2 * height)
            floor_us = max(
                num_bytes / peaks.read_tb_s / 1e6,
                2 * rows * num_weights / peaks.product_tflop_s / 1e6,
            )
            yield Row(
                f"linear {width} {height} {rows}", f"{width} to {height}{gate}, {rows} rows", "µs",
                took_us / len(chosen), floor=floor_us,
            )  # fmt: skip


def weight_size(layer: Linear) -> int:
    """The size of one weight of a layer, in bytes."""
    return 1 if isinstance(layer, CudaInt8Linear) else layer.dtype.itemsize


def _apply(layers: list[Linear], x: Tensor) -> None:
    for layer in layers:
        layer(x)


def _norm_rows(
    shape: ModelConfig, device: torch.device, timed_us: Timer, sizes: KernelSizes
) -> Iterator[Row]:
    """RMSNorm by itself. Its limit is the time of a launch, which is not known."""
    from infer.kernels.cuda.norm import rms_norm

    weight = torch.ones(shape.hidden_size, device=device)
    for rows in sizes.rows:
        x = torch.randn(rows, shape.hidden_size, device=device).to(_KIND)
        took_us = timed_us(partial(rms_norm, x, weight, 1e-6), 20)
        yield Row(f"norm {rows}", f"norm of {rows} rows", "µs", took_us)
