"""`PackedLinear`, `Int8Linear`: layers by oneDNN, and what it can compute on this CPU"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from infer.kernels.linear.fusion import PRODUCT_ONLY, Composed, Fusion
from infer.kernels.linear.int8_rows import quantized, rotated


class PackedLinear(Composed):
    """A layer with its weight in oneDNN's blocked layout, which serves every number of rows.

    The product of a row is the same for any number of rows from two up, except in bfloat16 with
    AMX, where oneDNN divides a sum differently for different numbers of rows. One row is therefore
    computed as two. That costs no time, since reading the weight takes longer.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if x.shape[0] == 1:
            return self._apply(x.expand(2, -1).contiguous())[:1]
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


class Int8Linear(Composed):
    """A layer with its weight in int8 in oneDNN's layout, where `NativeLinear` cannot be used.

    Activations are shifted to unsigned numbers, because oneDNN is thousands of times slower with
    signed ones. On a CPU without VNNI oneDNN's sums of two products may overflow 16 bits. There a
    row is computed as two rows, u = 2 · (u >> 1) + (u & 1), whose products all fit.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        whole, scales = quantized(rotated(weight))
        self._scales = scales.squeeze(1)
        self._weight = torch.ops.onednn.qlinear_prepack(whole.to(torch.int8), None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._halves = not onednn_is_exact()

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        whole, scales = quantized(rotated(x))
        unsigned = whole.add_(128).to(torch.uint8)
        if self._halves:
            both = torch.cat([unsigned >> 1, (unsigned & 1) + 64])
            high, low = self._whole_product(both, 64).chunk(2)
            y = high.mul_(2).add_(low)
        else:
            y = self._whole_product(unsigned, 128)
        y *= scales
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _whole_product(self, x: Tensor, zero: int) -> Tensor:
        return _onednn_int8(x, zero, self._weight, self._scales, self._zeros)


def _onednn_int8(x: Tensor, zero: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(x - zero) Wᵀ · scales, float32; x: [T, in] uint8; `weight`: prepacked; `scales`: [out]."""
    arguments = (weight, scales, zeros, None, 1.0, 0, torch.float32)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(x, 1.0, zero, *arguments, "none", [], "")
    return y


@functools.cache
def onednn_is_exact() -> bool:
    """Whether oneDNN's products of uint8 and int8 are exact on this CPU.

    Without VNNI oneDNN adds pairs of products in 16 bits, with saturation. The largest possible
    products are computed once to find out.
    """
    for rows, width, height in ((1, 64, 16), (2, 100, 34), (40, 256, 96)):
        weight = torch.full((height, width), 127, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        zeros = torch.zeros(height, dtype=torch.int64)
        x = torch.full((rows, width), 255, dtype=torch.uint8)
        y = _onednn_int8(x, 0, packed, torch.ones(height), zeros)
        if (y != 255 * 127 * width).any():
            return False
    return True


@functools.cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN can multiply in bfloat16 on this CPU.

    The CPU's flags must say so (x86: AVX-NE-CONVERT, or AVX-512 with BW, VL and DQ), and a test
    product must succeed: `ONEDNN_MAX_CPU_ISA` or a virtual machine may restrict oneDNN further.
    """
    if not (has_onednn("mkldnn", "_linear_pointwise") and cpu_has_bfloat16()):
        return False
    ones = torch.ones((2, 2), dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(ones, None)
        torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def cpu_has_bfloat16() -> bool:
    """Whether the CPU's flags meet torch's condition for bfloat16 products by oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn(namespace: str, operation: str) -> bool:
    """Whether torch has an operation of oneDNN."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(getattr(torch.ops, namespace), operation)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed layout exists for this weight's device and dtype, in this torch."""
    if weight.device.type != "cpu" or not has_onednn("mkldnn", "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return onednn_has_bfloat16()
    return weight.dtype == torch.float32
