"""Rotary embedding of queries and keys, and the norms of their heads, straight after a projection.

In bfloat16 on a CPU rotary.cpp does it in place, else torch's operations. Llama's convention: the
first half of a head turns against the second half.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from infer.kernels import native
from infer.kernels.linear import Norm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [T, heads, D] by the angles [T, D/2] of their positions, in float32."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class HeadRotation:
    """Norms, if there are any, and rotation of one layer's queries and keys."""

    def __init__(self, num_q_heads: int, head_dim: int, norms: tuple[Norm, Norm] | None) -> None:
        """`norms`: of q and of k, over [D]."""
        self.num_q_heads = num_q_heads
        self.head_dim = head_dim
        self.norms = norms
        library = native.library()
        self._native: Callable[..., None] | None = None
        if not isinstance(library, str):
            self._native = library.infer_rotate
        self._weights = [norm.weight.float() for norm in norms or ()]
        pointers = tuple(weight.data_ptr() for weight in self._weights) or (None, None)
        self._constants = (*pointers, norms[0].eps if norms else 0.0, native.parallel())

    def __call__(self, heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """(q [T, H, D], k [T, G, D]) of heads [T, H + G, D], which it uses up.

        `cos`, `sin` [T, D/2] float32.
        """
        first = self.num_q_heads
        if self._native is None or heads.dtype != torch.bfloat16 or heads.device.type != "cpu":
            q, k = heads[:, :first], heads[:, first:]
            if self.norms is not None:
                q, k = self.norms[0](q), self.norms[1](k)
            return rotate(q, cos, sin), rotate(k, cos, sin)
        assert heads.stride(2) == 1 and heads.stride(1) == self.head_dim  # noqa: PT018
        self._native(
            *(heads.data_ptr(), heads.shape[0], heads.stride(0), self.head_dim, heads.shape[1]),
            *(first, cos.data_ptr(), sin.data_ptr(), *self._constants, torch.get_num_threads()),
        )
        return heads[:, :first], heads[:, first:]
