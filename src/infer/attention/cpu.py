"""`NativeBackend`: attention on CPUs by the compiled C++ kernel."""

from __future__ import annotations

import functools
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from infer.attention.layout import BatchLayout, held_slopes
from infer.kernels import loader
from infer.kernels.invariance import linears
from infer.kernels.layer_stack import LayerStack
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.loader import NativeCall
from infer.kernels.rotary import Angles, QKRotation
from infer.kernels.team import ForKernels, WithTorch, num_threads

MAX_HEAD_DIM = 512
"""Maximum size of a head that the kernel supports."""


def obstacle(
    head_dim: int, dtype: torch.dtype, device: torch.device, page_size: int = loader.STRIP
) -> str | None:
    """The reason why the kernel cannot be used for a KV cache of this dtype; None if it can."""
    if device.type != "cpu":
        return f"the kernel is for CPUs, not {device.type}"
    if dtype == torch.int8:
        return loader.int8_cache_obstacle(head_dim, page_size)
    if dtype not in (torch.bfloat16, torch.float32):
        return f"the kernel supports bfloat16 and float32, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or not 8 <= head_dim <= MAX_HEAD_DIM:
        return f"the kernel supports head sizes of 8, 16, … {MAX_HEAD_DIM}, not {head_dim}"
    return loader.available()


class NativeBackend:
    """The attention backend for CPUs.

    The kernel reads keys and values in place through the page tables, so nothing is gathered,
    padded or masked in memory. It works from the same `BatchLayout` as `SDPABackend`, which is the
    reference. A query row's result is the same bit for bit whatever the batch, the chunks, the page
    size and the number of threads. `obstacle` says why the kernel cannot be used for a shape; the
    composition root then takes `SDPABackend`.
    """

    def __init__(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        *,
        num_heads: int,
        scale: float,
        softcap: float | None = None,
        slopes: Sequence[float] = (),
        rounded: float | None = None,
        windows: Sequence[int | None] = (),
        by_node: bool = False,
    ) -> None:
        """`keys`, `values`: the KV cache of each layer, [pages, page_size, G, D].

        In int8 they are [pages, page_size, G, D + 4], and queries are bfloat16. The order of the
        bytes within a page depends on the instruction set. The other arguments are those of
        `AttentionArguments`; `windows` may be (): none. `by_node`: whether the caches are divided
        among NUMA nodes (`KVStorage`). `ValueError` with the reason if the kernel cannot be used.
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
        numbers, kept = array("q", distinct), held_slopes(slopes, rounded)
        self._handle = self._library.infer_attention_new(
            *(self.isa.encode(), num_heads, num_kv_heads, head_dim, page_size, held.itemsize),
            *(scale, softcap or 0.0, kept.data_ptr() if slopes else None),
            *(rounded or 0.0, *numbers.buffer_info(), len(keys[0]) if by_node else 0),
        )
        weakref.finalize(self, self._library.infer_attention_free, self._handle)
        self._attend = functools.partial(self._library.infer_attention_attend, self._handle)
        self._planned: NativeCall

    def plan(self, layout: BatchLayout) -> None:
        """Divide the step into the kernel's work items; all layers use them."""
        self._planned = self.plan_call(layout)
        self.num_items: int = self._planned()

    def plan_call(self, layout: BatchLayout) -> NativeCall:
        """See `CallingBackend`. The kernel keeps the addresses."""
        slots, tables = layout.slot_mapping, layout.page_tables
        assert slots.dtype == tables.dtype == torch.int64
        assert slots.stride(0) == tables.stride(1) == 1
        starts, lengths = array("q", layout.query_start_loc), array("q", layout.seq_lens)
        return NativeCall(
            self._library.infer_attention_plan,
            *(self._handle, len(lengths), starts.buffer_info()[0], lengths.buffer_info()[0]),
            *(slots.data_ptr(), tables.data_ptr(), tables.stride(0), num_threads()),
            kept=(starts, lengths, slots, tables),
        )

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        """Rotate q and k, store k, v [T, G, D] in the cache, attend: q [T, H, D] → [T, H, D]."""
        if rotation is not None and self._dtype != torch.bfloat16:
            (q, k), rotation = rotation(q, k), rotation.only_sinks()
        q, k, v = self._rows(q), self._rows(k), self._rows(v)
        out = torch.empty(q.shape, dtype=self._dtype)
        self._attend(
            *(*self._layers[layer], q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()),
            *(q.stride(0), k.stride(0), v.stride(0)),
            *((*[None] * 4, 0.0, *[None] * 3) if rotation is None else rotation.constants()),
        )
        return out

    def through(
        self,
        stack: LayerStack,
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> Tensor:
        """Compute all layers of a stack in one call; see `AttendsThrough`."""
        y = torch.empty_like(x)
        self.through_call(y, stack, x, angles, growth)()
        return y

    def through_call(
        self,
        y: Tensor,
        stack: LayerStack,
        x: Tensor,
        angles: Sequence[Angles | None],
        growth: Tensor | None = None,
    ) -> NativeCall:
        """See `CallsThrough`."""
        return stack.call(y, self._handle, self._table, x, angles, growth)

    def _rows(self, x: Tensor) -> Tensor:
        # The kernel takes any stride between tokens, so a slice of a fused projection needs no
        # copy. The other strides must be those of a contiguous tensor.
        assert x.dtype == self._dtype
        if x.stride(2) == 1 and x.stride(1) == self._head_dim:
            return x
        return x.contiguous()


def threads_for(model: object, attention: object) -> ForKernels | WithTorch | None:
    """The context for steps: who has the threads, the kernels or torch; None without kernels.

    `model`: as for `linears`; `attention`: its backend."""
    layers = list(linears(model))
    is_native = bool(layers) and all(isinstance(layer, NativeLinear) for layer in layers)
    if not isinstance(attention, NativeBackend):
        return None
    return ForKernels() if is_native else WithTorch()
