"""`make_linear`: the fastest layer for a weight on this machine"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infer.kernels import cuda
from infer.kernels.blocks import BlockWeight, fitted
from infer.kernels.int8_weight import Int8Weight
from infer.kernels.linear.cuda_linear import CudaInt8Linear, CudaLinear
from infer.kernels.linear.fusion import PRODUCT_ONLY, Fusion, Linear
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.linear.onednn import Int8Linear, PackedLinear, can_pack
from infer.kernels.linear.plain_linear import PlainLinear
from infer.kernels.native import native_obstacle


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of tensors along their first dimension, also of those without memory.

    On the meta device torch computes `torch.cat` in Python, and the first such operation imports
    its compiler: 1.5 s of every start, and 130 MB.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.device.type == "meta":
        return first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))
    return torch.cat(list(parts))


def add_one(weight: Tensor) -> Tensor:
    """1 + weight, in float32. In place, which torch computes in C++ on the meta device; see
    `joined`."""
    return weight.to(torch.float32, copy=True).add_(1.0)


def _numbers(weight: BlockWeight) -> Tensor:
    """The numbers [out, in] of a weight in blocks, bfloat16."""
    return NativeLinear([weight]).columns(torch.arange(weight.shape[0]))


def make_linear(
    weight: Tensor | BlockWeight | Sequence[Tensor] | Sequence[BlockWeight | Int8Weight],
    bias: Tensor | None = None,
    fusion: Fusion = PRODUCT_ONLY,
    *,
    quantization: str | None = None,
    batch_invariant: bool = False,
) -> Linear:
    """The fastest `Linear` for a weight [out, in], or for several with concatenated outputs.

    `quantization`: int8 or int4; None: the weight keeps its dtype. `batch_invariant`: on a GPU only
    kernels are used that can compute a row the same way for every number of rows.
    """
    several: Sequence[Tensor | BlockWeight | Int8Weight]
    several = [weight] if isinstance(weight, (Tensor, BlockWeight)) else weight
    kept = [part for part in several if not isinstance(part, Tensor)]
    parts = [part for part in several if isinstance(part, Tensor)]
    if kept:
        return NativeLinear(kept, bias, fusion)
    is_narrow = parts[0].dtype == torch.bfloat16
    if quantization == "int4" and parts[0].is_cpu:
        parts_in_blocks = [fitted(part.bfloat16()) for part in parts]
        if is_narrow:
            return NativeLinear(parts_in_blocks, bias, fusion)
        parts = [_numbers(part).to(parts[0].dtype) for part in parts_in_blocks]
    elif parts[0].is_cpu and is_narrow and native_obstacle() is None:
        return NativeLinear(parts, bias, fusion, bits=8 if quantization else 16)
    whole = joined(parts)
    if quantization == "int8" and whole.device.type == "cpu":
        return Int8Linear(whole, bias, fusion)
    if quantization == "int8" and whole.is_cuda:
        return CudaInt8Linear(whole, bias, fusion)
    if whole.is_cuda and cuda.obstacle(whole.device) is None:
        return CudaLinear(whole, bias, fusion, invariant=batch_invariant)
    kind = PackedLinear if can_pack(whole) else PlainLinear
    return kind(whole, bias, fusion)
