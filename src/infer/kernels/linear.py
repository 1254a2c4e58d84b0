"""`Linear`: y = x Wᵀ + b with the weight in the layout that the machine reads fastest.

On an x86 CPU the weight is packed once into oneDNN's blocked layout (one packed copy serves every
number of rows, and the original is freed); elsewhere it is `F.linear`. Made by `make_linear`, used
by the models. The packed float32 product of a row is the same bit for bit for any number of rows
from two up; one row is therefore computed as two (free, since one row is bound by memory).
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """A linear layer: [T, in] → [T, out]."""

    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it."""


class PlainLinear:
    """`F.linear`, for devices and dtypes without a packed form."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.out_features = weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A weight in oneDNN's layout; see the module's docstring."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        if x.shape[0] == 1:
            twice = x.expand(2, -1).contiguous()
            return self._apply(twice)[:1]
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether this torch build, device and dtype have the packed form."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The fastest `Linear` for a weight [out, in] where it is; the weight may be dropped after."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)
