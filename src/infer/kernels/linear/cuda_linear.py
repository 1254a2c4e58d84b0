"""`CudaLinear`, `CudaInt8Linear`: layers by the kernels for CUDA devices and cuBLAS"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.linear.fusion import PRODUCT_ONLY, Composed, Fusion
from infer.kernels.linear.int8_rows import quantized
from infer.kernels.linear.plain_linear import float_product

_ROWS_AT_A_TIME = 4096
"""Number of a weight's rows that are quantized together on a GPU: as float32 they take memory."""


class CudaLinear(Composed):
    """A layer on a CUDA device: one Triton kernel for few rows; norm, cuBLAS and gate for more.

    The product is accumulated onto the residual where possible, so the sum takes no extra pass. The
    residual's memory then holds the result.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> None:
        """`invariant`: the kernel for few rows is not used, so its rounding cannot differ."""
        super().__init__(weight, bias, fusion)
        self.weight = weight.contiguous()
        self.invariant = invariant
        self._transposed = self.weight.T

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        from infer.kernels.cuda.linear import few_rows, is_few

        fusion, norm = self.fusion, self.fusion.norm
        is_one = x.shape[0] == 1
        if norm is not None and (self.invariant or not is_one):
            x = norm(x)
        if not self.invariant and is_few(x.shape[0], self.weight):
            return few_rows(
                x,
                self.weight,
                bias=self.bias,
                norm=(norm.weight, norm.eps) if norm is not None and is_one else None,
                gate=fusion.gate,
                residual=residual,
                dtype=torch.float32 if fusion.float_out else x.dtype,
            )
        if fusion.gate:
            from infer.kernels.cuda.norm import gate

            y = gate(self.product(x), fusion.gate)
            return y if residual is None else residual + y
        if residual is not None and self.bias is None and not fusion.float_out:
            return residual.addmm_(x, self._transposed)
        product = self.float_product if fusion.float_out else self.product
        y = product(x)
        return y if residual is None else residual + y

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return float_product(x, self._transposed, self.bias)


class CudaInt8Linear(Composed):
    """A layer on a CUDA device with its weight in int8; its products are exact integers.

    A row has the same bits for every number of rows; see `kernels.cuda.int8`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        self.weight = torch.empty_like(weight, dtype=torch.int8)
        self.scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first in range(0, len(weight), _ROWS_AT_A_TIME):
            some = slice(first, first + _ROWS_AT_A_TIME)
            whole, scales = quantized(weight[some])
            self.weight[some], self.scales[some] = whole, scales.squeeze(1)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        from infer.kernels.cuda.int8 import linear, to_int8

        fusion, norm = self.fusion, self.fusion.norm
        whole, row_scales = to_int8(x, None if norm is None else (norm.weight, norm.eps))
        return linear(
            *(whole, row_scales, self.weight, self.scales),
            bias=self.bias,
            gate=fusion.gate,
            residual=residual,
            dtype=torch.float32 if fusion.float_out else x.dtype,
        )
