"""`LayerStack`: all layers of a decoder in one call of the native library (layers.cpp).

The library makes the same calls in the same order as the decoder's own loop, so the results have
the same bits. It avoids the interpreter's cost of 65 µs per layer, which is a tenth of a small
model's step. The cost is that high because each layer's weights displace the interpreter's data
from the CPU's caches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from infer.kernels import loader
from infer.kernels.linear import Linear, NativeLinear
from infer.kernels.rotary import HeadNorms

Parts = tuple[Linear, Linear, Linear, Linear, HeadNorms | None]
"""One layer: qkv (with the norm before it), o, gate_up (with norm and gate), down, head norms."""


class AttendsThrough(Protocol):
    """An attention backend that can compute all layers of a `LayerStack` in one call."""

    def through(self, stack: LayerStack, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply all layers: x [T, E] → [T, E]. `cos`, `sin` [T, D/2]: of the tokens' positions."""


def attends_through(attend: object) -> TypeGuard[AttendsThrough]:
    """Whether an attention backend can compute a `LayerStack`. In Python 3.11 `isinstance` with a
    protocol takes 10 µs, which would be added to every step."""
    return hasattr(attend, "through")


class LayerStack:
    """All layers of a decoder. `stack_layers` makes it.

    It holds addresses of the layers' data, so the decoder must outlive it.
    """

    def __init__(self, first: Parts, num_layers: int, addresses: list[int]) -> None:
        """`first`: the first layer, for the sizes. `addresses`: six per layer, for layers.cpp."""
        self._num_layers, self._table = num_layers, array("q", addresses)
        qkv, o, gate_up, _, norms = first
        kv_size = (qkv.out_features - o.in_features) // 2
        self._sizes = (o.out_features, o.in_features, kv_size, gate_up.out_features)
        self._eps = 0.0 if norms is None else norms.q.eps
        self._apply = loader.loaded().infer_layers

    def __call__(
        self, attention: int, caches: array[int], x: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Apply all layers: x [T, E] → [T, E], bfloat16.

        `attention`: handle of an attention kernel that has planned the step. `caches`: for each
        layer the index of its window and the addresses of its keys and values.
        """
        assert (x.dtype, x.stride()) == (torch.bfloat16, (self._sizes[0], 1))
        y = torch.empty_like(x)
        self._apply(
            *(attention, self._table.buffer_info()[0], caches.buffer_info()[0], self._num_layers),
            *(cos.data_ptr(), sin.data_ptr(), self._eps, x.data_ptr(), y.data_ptr()),
            *(x.shape[0], *self._sizes, torch.get_num_threads()),
        )
        return y


def stack_layers(layers: Sequence[Parts]) -> LayerStack | None:
    """A stack of these layers; None if any linear layer is not a `NativeLinear`."""
    addresses = []
    for *products, norms in layers:
        handles = [each.handle for each in products if isinstance(each, NativeLinear)]
        if len(handles) < len(products):
            return None
        addresses += handles
        addresses += [0, 0] if norms is None else [norm.data_ptr() for norm in norms.weights]
    return LayerStack(layers[0], len(layers), addresses)
