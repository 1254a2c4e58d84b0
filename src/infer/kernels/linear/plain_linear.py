"""`PlainLinear`: a layer by torch's own product"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.linear.fusion import PRODUCT_ONLY, Composed, Fusion


class PlainLinear(Composed):
    """A layer by `F.linear`, for devices and dtypes without a packed form."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        self.weight = weight

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return float_product(x, self.weight.T, self.bias)


def float_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · `weight` [in, out] + b in float32. On a CUDA device it is not rounded to 16 bits first,
    since logits in 16 bits would have ties."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, weight.T, bias).float()
    y = torch.mm(x, weight, out_dtype=torch.float32)
    return y if bias is None else y + bias
