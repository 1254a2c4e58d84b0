"""Rotary embedding of queries and keys, and the norms of their heads.

Attention does it: where the native kernel reads bfloat16 queries and keys for the first time
(rotary.cpp), else by torch's operations before it. Llama's convention: the first half of a head
turns against the second half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels.linear import Norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, D] by the angles [T, D/2] of their positions, in float32."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class HeadNorms:
    """Of one layer's queries and keys, over [D]."""

    def __init__(self, q: Norm, k: Norm) -> None:
        self.q, self.k = q, k
        self.weights = [norm.weight.float().contiguous() for norm in (q, k)]


@dataclass(frozen=True, slots=True, eq=False)
class QKRotation:
    """What a layer's queries and keys still need: norms, if there are any, and a rotation."""

    cos: Tensor
    sin: Tensor
    """[T, D/2] float32"""
    norms: HeadNorms | None

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, H, D] and k [T, G, D], by torch's operations."""
        if self.norms is not None:
            q, k = self.norms.q(q), self.norms.k(k)
        return rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)

    def constants(self) -> tuple[int | float | None, ...]:
        """For the native kernel: addresses of cos, sin, norm of q, norm of k; and eps."""
        angles = self.cos.data_ptr(), self.sin.data_ptr()
        if self.norms is None:
            return (*angles, None, None, 0.0)
        q, k = self.norms.weights
        return (*angles, q.data_ptr(), k.data_ptr(), self.norms.q.eps)
