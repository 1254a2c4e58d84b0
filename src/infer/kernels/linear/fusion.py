"""`Linear`: what a layer is; `Fusion`: what one computes together with its product"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels import cuda


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension.

    With a weight in float32 it is computed in float32.
    """

    weight: Tensor
    """Weight, [in]."""
    eps: float
    """Number that is added to the mean of squares."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[…, in] → […, in]; `residual`, of the shape of x, is added to the result."""
        if x.is_cuda and x.ndim == 2 and cuda.obstacle(x.device) is None:
            from infer.kernels.cuda.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, residual)
        if self.weight.dtype == x.dtype:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        else:
            y = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450) over the last dimension, of size n.

    With a weight in float32, or one for each head, it is computed in float32.
    """

    size: int
    """Size of the last dimension, n."""
    eps: float
    """Number that is added to the variance."""
    weight: Tensor | None = None
    """Weight, [n], or [heads, n] with one for each head."""
    bias: Tensor | None = None
    """Bias, [n]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[…, n] → […, n]; `residual`, of the shape of x, is added to the result."""
        shape, weight, bias = (self.size,), self.weight, self.bias
        if weight is not None and weight.ndim > 1:
            y = (F.layer_norm(x.float(), shape, eps=self.eps) * weight.float()).to(x.dtype)
        elif weight is None or weight.dtype == x.dtype:
            y = F.layer_norm(x, shape, weight, bias, self.eps)
        else:
            bias = None if bias is None else bias.float()
            y = F.layer_norm(x.float(), shape, weight, bias, self.eps).to(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Operations that a linear layer computes together with its product."""

    norm: Norm | None = None
    """Norm of the input."""
    gate: str | None = None
    """Activation of the gate, silu or gelu_tanh: act(first half of the outputs) · second half."""
    float_out: bool = False
    """Whether the result is float32 instead of the dtype of the activations."""


PRODUCT_ONLY = Fusion()
"""No operation besides the product."""


class Linear(Protocol):
    """A linear layer: [T, in] → [T, out]."""

    in_features: int
    """Number of inputs."""
    out_features: int
    """Number of outputs, after the gate."""
    num_weights: int
    """Number of elements of the weight."""
    dtype: torch.dtype
    """Dtype of the activations."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the layer: [T, in] → [T, out]; `residual` [T, out] is added to the result."""


class Composed:
    """A layer that computes norm, gate and residual by torch's operations around `product`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        rows, self.in_features = weight.shape
        self.out_features = rows // 2 if fusion.gate else rows
        self.num_weights = weight.numel()
        self.dtype = weight.dtype
        self.bias = bias
        self.fusion = fusion

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        raise NotImplementedError

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return self.product(x).float()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        fusion = self.fusion
        x = x if fusion.norm is None else fusion.norm(x)
        y = self.float_product(x) if fusion.float_out and not fusion.gate else self.product(x)
        if fusion.gate:
            first, second = y.chunk(2, dim=-1)
            silu = fusion.gate == "silu"
            y = (F.silu(first) if silu else F.gelu(first, approximate="tanh")) * second
        if fusion.float_out:
            y = y.float()
        return y if residual is None else residual + y
