"""Norms, activations and sums of rows that are not part of a linear layer.

On CPUs and in bfloat16 the compiled library computes them (csrc/rows.cpp), with the same functions
that it calls in a stack of layers; otherwise torch's operations do. The library's are
batch-invariant.
"""

from __future__ import annotations

import functools
from array import array
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels import loader
from infer.kernels.linear.fusion import LayerNorm, Norm
from infer.kernels.team import num_threads

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu")
"""Names of the activations, in the order of the library's numbers."""
BETA = 0.5
"""β of xIELU."""


def is_native(x: Tensor) -> bool:
    """Whether the library computes what is done with x."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and loader.available() is None


def _add_scaled(x: Tensor, residual: Tensor | None, scale: float) -> Tensor:
    if residual is None:
        return x
    return residual + (x if scale == 1.0 else scale * x)


class RowNorm:
    """A norm of rows [T, n], or None, and the sum with a residual behind it."""

    def __init__(self, norm: Norm | LayerNorm | None) -> None:
        """`norm`: over the last dimension, with one weight for all rows; None: only the sum."""
        self.norm = norm

    @functools.cached_property
    def _held(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The record for the library, as bytes, and the tensors whose addresses it has."""
        assert self.norm is not None
        bias = self.norm.bias if isinstance(self.norm, LayerNorm) else None
        weight, bias = (
            None if tensor is None else tensor.float().contiguous()
            for tensor in (self.norm.weight, bias)
        )
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in (weight, bias)]
        is_centred = isinstance(self.norm, LayerNorm)
        packed = loader.records()["RowNorm"].pack(*addresses, self.norm.eps, is_centred)
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8), weight, bias

    @property
    def address(self) -> int:
        """Address of the library's record, which lives as long as this; 0: there is no norm."""
        return 0 if self.norm is None else self._held[0].data_ptr()

    def __call__(self, x: Tensor, residual: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """[T, n] → `residual` [T, n] + `scale` · the norm of x."""
        if not is_native(x):
            x = x if self.norm is None else self.norm(x)
            return _add_scaled(x, residual, scale)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows, size = x.shape
        y = torch.empty((rows, size), dtype=x.dtype)
        added = None if residual is None else residual.contiguous()
        loader.loaded().infer_norm_rows(
            *(self.address, x.data_ptr(), x.stride(0), None if added is None else added.data_ptr()),
            *(scale, y.data_ptr(), size, rows, size, num_threads()),
        )
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Activation:
    """An activation without a gate."""

    name: str
    """One of `ACTIVATIONS`."""
    positive: float = 0.0
    """xIELU's factor of squares above 0."""
    negative: float = 0.0
    """xIELU's factor of exponentials below 0."""

    @property
    def number(self) -> int:
        """The library's number of it."""
        return ACTIVATIONS.index(self.name)

    def __call__(self, x: Tensor) -> Tensor:
        """act(x); the memory of x may hold the result."""
        if is_native(x) and x.is_contiguous():
            loader.loaded().infer_activate(
                self.number, self.positive, self.negative, x.data_ptr(), x.numel(), num_threads()
            )
            return x
        return self._by_torch(x)

    def _by_torch(self, x: Tensor) -> Tensor:
        match self.name:
            case "silu":
                return F.silu(x)
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "gelu":
                return F.gelu(x)
            case "relu":
                return F.relu(x)
            case "relu2":
                return F.relu(x).square()
        # xIELU (Huang and Schlag 2024, arXiv:2411.13010)
        below = (torch.expm1(x.clamp_max(-1e-6)) - x) * self.negative
        return BETA * x + torch.where(x > 0, self.positive * x * x, below)


def packed_doubles(*values: float) -> list[int]:
    """The bits of doubles as whole numbers of 64 bits, for tables that hold both."""
    return array("q", array("d", values).tobytes()).tolist()
