"""`KVStorage`: the tensors of the KV cache."""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from infer.kernels.loader import POPULATE_WRITE, advise, cell_bytes, page_aligned
from infer.kernels.team import HeadSlice, head_slices, prefer_node
from infer.models.model_config import ModelConfig
from infer.threads import BackgroundThread

PREPARED_BYTES = 64 << 20
"""Size of the part of a cache on a CPU that is allocated before its first use, in bytes, at least
one huge page of each tensor: those that the first request needs in any case.

All other memory is taken when it is first written, which takes a millisecond for 2 MiB.
"""
_CHUNK_BYTES = 2 << 20  # a huge page


class KVStorage:
    """The keys and values of all layers.

    Each layer has one tensor of keys and one of values, [pages, page_size, G, D]. In int8 a head
    has 4 more bytes for its scale, and the attention kernel defines the order of the bytes.
    `schedule.page_allocator` decides which sequence may use which page; it and the storage share
    only the page numbers. Page 0 belongs to no sequence: padding reads and writes it. It starts as
    zeros, so that masked values are finite.

    Where the engine's threads have cores on several NUMA nodes, the heads of a node's slice lie in
    its memory: a tensor is then all pages of the first node's heads, then those of the next one's.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        by_node: bool = False,
    ) -> None:
        """`num_pages` includes page 0. `page_size`: cells of a page. `by_node`: whether heads lie
        on the NUMA nodes of the threads, as the native kernels can read them."""
        shapes = [
            (
                *(num_pages, page_size, layer.num_kv_heads),
                cell_bytes(layer.head_dim, dtype.itemsize) // dtype.itemsize,
            )
            for layer in config.layers()
        ]
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]
        self.by_node = by_node
        tensors = (*self.keys, *self.values)
        self.num_tensors = len(tensors)
        self._parts = [_parts(tensor, by_node) for tensor in tensors]
        for tensor, parts in zip(tensors, self._parts, strict=True):
            for part in parts:
                if part.node is not None:
                    size = part.page_bytes * num_pages
                    prefer_node(tensor.data_ptr() + part.first_byte, size, part.node)
        self.page_bytes = sum(_page_bytes(tensor) for tensor in tensors)
        self.preparing: BackgroundThread | None = None
        if device.type == "cpu" and sys.platform == "linux":
            stopping = threading.Event()
            run = partial(
                _prepare, [ref(storage_tensor) for storage_tensor in tensors], self._parts, stopping
            )
            self.preparing = BackgroundThread(run, stopping.set, "kv-storage")
            self.preparing.start()

    def release(self, runs: Sequence[tuple[int, int]]) -> None:
        """Give the memory of runs of pages (the first one, and how many) back to the system, where
        it can take it; they are zeros when they are used again. On CPUs."""
        if sys.platform != "linux":
            return
        for tensor, parts in zip((*self.keys, *self.values), self._parts, strict=True):
            for part in parts:
                size = part.page_bytes
                for first, count in runs:
                    begin = part.first_byte + first * size
                    advise(tensor, mmap.MADV_DONTNEED, begin, count * size)


def _page_bytes(tensor: Tensor) -> int:
    return tensor.stride(0) * tensor.itemsize


@dataclass(frozen=True, slots=True)
class _Part:
    """The pages of some heads in a tensor."""

    first_byte: int
    page_bytes: int
    node: int | None
    """Number of the NUMA node to which they belong; None: any."""


def _parts(tensor: Tensor, by_node: bool) -> list[_Part]:
    num_heads, page_bytes = tensor.shape[2], _page_bytes(tensor)
    head_bytes = page_bytes // num_heads
    slices = head_slices(num_heads) if by_node else [HeadSlice(0, num_heads, None)]
    return [
        _Part(
            part.first * head_bytes * len(tensor), (part.end - part.first) * head_bytes, part.node
        )
        for part in slices
    ]


def _prepare(
    tensors: Sequence[ref[Tensor]], parts: Sequence[list[_Part]], stopping: threading.Event
) -> None:
    """Allocate the first memory of each tensor in chunks, until a tensor is freed or `stopping`."""
    # This thread gets the lowest priority, so that it takes no core from the first request.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for first in range(0, PREPARED_BYTES // len(tensors), _CHUNK_BYTES):
        for tensor_ref, of_tensor in zip(tensors, parts, strict=True):
            tensor = tensor_ref()
            if tensor is None or stopping.is_set():
                return
            for part in of_tensor:
                if first < part.page_bytes * len(tensor):
                    advise(tensor, POPULATE_WRITE, part.first_byte + first, _CHUNK_BYTES)
            del tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return page_aligned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
