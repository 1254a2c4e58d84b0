"""`KVStorage`: the tensors behind the page numbers.

Per layer one tensor of keys and one of values, [pages, page_size, G, D], or in int8 with 4 bytes
more a head, for its scale, in the attention kernel's own order. Who may use which page is
the allocator's business (`cache/`); the two share nothing but the numbers. Page 0 is scrap: padding
reads and writes it, and it starts as zeros so that whatever is masked out is at least finite.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from infer.kernels.loader import POPULATE_WRITE, advise, cell_bytes, page_aligned
from infer.models.model_config import ModelConfig
from infer.threads import BackgroundThread

PREPARED_BYTES = 1 << 30
"""of a cache, in the order in which pages are first used, asked of the operating system beforehand
(on a CPU): 2 MiB that are met for the first time cost a millisecond, which doubled the time of
prefill's attention."""
_CHUNK_BYTES = 2 << 20  # of one tensor: a huge page


class KVStorage:
    """See the module's docstring."""

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`num_pages` counts page 0."""
        width = cell_bytes(config.head_dim, dtype) // dtype.itemsize
        shape = (num_pages, page_size, config.num_kv_heads, width)
        layers = range(config.num_layers)
        self.keys = [_zeros(shape, dtype, device) for _ in layers]
        self.values = [_zeros(shape, dtype, device) for _ in layers]
        self.preparing: BackgroundThread | None = None
        if device.type == "cpu" and sys.platform == "linux":
            stopping = threading.Event()
            run = partial(_prepare, [ref(each) for each in (*self.keys, *self.values)], stopping)
            self.preparing = BackgroundThread(run, stopping.set, "kv-storage")
            self.preparing.start()


def _prepare(tensors: Sequence[ref[Tensor]], stopping: threading.Event) -> None:
    """Ask for the first memory of each tensor, chunk by chunk, until nobody holds them any more."""
    # Of this thread alone: it must not take a core from the first request.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    for first in range(0, PREPARED_BYTES // len(tensors), _CHUNK_BYTES):
        for each in tensors:
            tensor = each()
            if tensor is None or stopping.is_set():
                return
            advise(tensor, POPULATE_WRITE, first, _CHUNK_BYTES)
            del tensor


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return page_aligned(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
