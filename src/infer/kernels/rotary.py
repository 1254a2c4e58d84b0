"""Rotary embedding of queries and keys, the norms of their heads, and attention sinks.

The attention backend applies both. The native kernel does so when it first reads bfloat16 queries
and keys (rotary_heads.h); otherwise torch's operations do it before attention. The convention is
Llama's: element i of a head's first half and element i of its second half are rotated as a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from infer.kernels.linear.fusion import Norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, D], computed in float32: [T, heads, D] in the dtype of x.

    `cos`, `sin`: [T, D/2], of the angles of the tokens' positions.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of the angles of a step's tokens, [T, D/2] float32 each."""


class HeadNorms:
    """The norms of one layer's query heads and key heads."""

    def __init__(self, q: Norm, k: Norm) -> None:
        """`q`, `k`: norms over a head, with weights [D]."""
        self.q, self.k = q, k
        self.weights = [norm.weight.float().contiguous() for norm in (q, k)]


@dataclass(frozen=True, slots=True, eq=False)
class QKRotation:
    """The head norms, the rotation and the attention sinks of a layer, as far as it has them."""

    cos: Tensor | None
    """Cosines of the tokens' angles, [T, D/2] float32; None: no rotation."""
    sin: Tensor | None
    """Sines of the tokens' angles, [T, D/2] float32; None: no rotation."""
    norms: HeadNorms | None
    """Norms that are applied before the rotation; None: no norms."""
    factor: Tensor | None = None
    """Factor of the rotated queries, [D] float32; None: 1. GPU kernels do not know it."""
    growth: Tensor | None = None
    """Factor of each token's rotated queries, [T] float32; None: 1. GPU kernels do not know it."""
    sinks: Tensor | None = None
    """Score of each query head that takes a share of the weights and has no value (Xiao et al.
    2023, arXiv:2309.17453), [H] float32; None: no sinks. GPU kernels do not know it."""

    @classmethod
    def of(
        cls,
        angles: Angles | None,
        norms: HeadNorms | None,
        factor: Tensor | None = None,
        growth: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> QKRotation | None:
        """What a layer with these angles and norms passes to attention; None: nothing to do."""
        if all(part is None for part in (angles, norms, factor, growth, sinks)):
            return None
        cos, sin = angles or (None, None)
        return cls(cos, sin, norms, factor, growth, sinks)

    def only_sinks(self) -> QKRotation | None:
        """What is left once queries and keys are normalised and rotated."""
        return QKRotation.of(None, None, sinks=self.sinks)

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise and rotate q [T, H, D] and k [T, G, D] by torch's operations."""
        if self.norms is not None:
            q, k = self.norms.q(q), self.norms.k(k)
        if self.cos is not None and self.sin is not None:
            q, k = rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin)
        if self.factor is not None:
            q = (q * self.factor).to(q.dtype)
        if self.growth is not None:
            q = (q * self.growth[:, None, None]).to(q.dtype)
        return q, k

    @property
    def scales_queries(self) -> bool:
        """Whether rotated queries have a factor."""
        return self.factor is not None or self.growth is not None

    def constants(self) -> tuple[int | float | None, ...]:
        """Arguments of the native kernel: addresses of cos, sin and both norms' weights, eps, and
        addresses of the factors and of the sinks.

        The addresses of what the layer does not have are None.
        """
        angles = [None if table is None else table.data_ptr() for table in (self.cos, self.sin)]
        last = (self.factor, self.growth, self.sinks)
        factors = [None if x is None else x.data_ptr() for x in last]
        if self.norms is None:
            return (*angles, None, None, 0.0, *factors)
        q, k = self.norms.weights
        return (*angles, q.data_ptr(), k.data_ptr(), self.norms.q.eps, *factors)
