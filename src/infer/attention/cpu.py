"""`NativeBackend`: attention from the compiled kernel, on CPUs.

It reads keys and values through the page tables where they lie, so nothing is gathered, padded or
masked in memory, and it works from the same layout as `SDPABackend`, the definition of correct. A
query row's result is the same bit for bit alone, in any batch, at any chunking, page size and
number of threads. Shapes that the kernel does not know are named by `obstacle`; the composition
root then takes the other backend.
"""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.attention.layout import BatchLayout
from infer.kernels import loader
from infer.kernels.layer_stack import LayerStack
from infer.kernels.rotary import QKRotation

MAX_HEAD_DIM = 256


def obstacle(
    head_dim: int, dtype: torch.dtype, device: torch.device, page_size: int = loader.STRIP
) -> str | None:
    """Why the kernel cannot be used here for a cache of this dtype; None if it can."""
    if device.type != "cpu":
        return f"the kernel is for CPUs, not {device.type}"
    if dtype == torch.int8:
        return loader.int8_cache_obstacle(head_dim, page_size)
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the kernel knows bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"the kernel knows head sizes of 8, 16, … {MAX_HEAD_DIM}, not {head_dim}"
    return loader.available()


class NativeBackend:
    """See the module's docstring."""

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        num_heads: int,
        scale: float,
        windows: Sequence[int | None] = (),
    ) -> None:
        """`keys`, `values`: per layer [pages, page_size, G, D], shared with the storage; in int8
        [pages, page_size, G, D + 4], for queries in bfloat16. What lies where in a page is the
        code path's own affair.

        `windows`: per layer how many positions, itself included, a query sees; None = all.
        `ValueError` with the reason if the kernel cannot be used.
        """
        _, page_size, num_kv_heads, head_dim = keys[0].shape
        self._dtype = held = keys[0].dtype
        if held == torch.int8:
            self._dtype, head_dim = torch.bfloat16, head_dim - loader.SCALE_BYTES
        if reason := obstacle(head_dim, held, keys[0].device, page_size):
            raise ValueError(reason)
        assert all(cache.is_contiguous() for cache in (*keys, *values))
        self._caches = list(zip(keys, values, strict=True))  # keeps the addresses below valid
        per_layer = [window or 0 for window in windows] or [0] * len(keys)
        distinct = sorted(set(per_layer))
        self._layers = [
            (distinct.index(window), key.data_ptr(), value.data_ptr())
            for window, (key, value) in zip(per_layer, self._caches, strict=True)
        ]
        self._table = array("q", [number for layer in self._layers for number in layer])
        self._head_dim = head_dim
        self.isa = loader.chosen_instruction_set()
        self._library = loader.loaded()
        numbers = array("q", distinct)
        self._handle = self._library.infer_attention_new(
            *(self.isa.encode(), num_heads, num_kv_heads, head_dim, page_size, held.itemsize),
            *(scale, *numbers.buffer_info(), loader.parallel()),
        )
        weakref.finalize(self, self._library.infer_attention_free, self._handle)
        self._attend = functools.partial(self._library.infer_attention_attend, self._handle)
        self._step: tuple[Tensor, Tensor]

    def plan(self, layout: BatchLayout) -> None:
        """Cut the step into work items, once for all layers."""
        slots, tables = layout.slot_mapping, layout.page_tables
        assert slots.dtype == tables.dtype == torch.int64
        assert slots.stride(0) == tables.stride(1) == 1
        self._step = (slots, tables)  # the kernel keeps their addresses
        starts, lengths = array("q", layout.query_start_loc), array("q", layout.seq_lens)
        self.num_items: int = self._library.infer_attention_plan(
            *(self._handle, len(lengths), starts.buffer_info()[0], lengths.buffer_info()[0]),
            *(slots.data_ptr(), tables.data_ptr(), tables.stride(0), torch.get_num_threads()),
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None
    ) -> Tensor:
        """Turn q and k, write k, v [T, G, D] to their cells, attend: q [T, H, D] → [T, H, D]."""
        if turn is not None and self._dtype != torch.bfloat16:
            (q, k), turn = turn(q, k), None
        q, k, v = self._rows(q), self._rows(k), self._rows(v)
        out = torch.empty(q.shape, dtype=self._dtype)
        self._attend(
            *(*self._layers[layer], q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            *(q.stride(0), k.stride(0), v.stride(0)),
            *((None, None, None, None, 0.0) if turn is None else turn.constants()),
        )
        return out

    def through(self, stack: LayerStack, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """All layers of a stack at once; see `AttendsThrough`."""
        return stack(self._handle, self._table, x, cos, sin)

    def _rows(self, x: Tensor) -> Tensor:
        # A slice of a fused projection is read as it is: only the stride between tokens is free.
        assert x.dtype == self._dtype
        if x.stride(2) == 1 and x.stride(1) == self._head_dim:
            return x
        return x.contiguous()
