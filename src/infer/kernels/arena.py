"""`Arena`: memory for tensors that live about equally long, such as the weights of a model"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from infer.kernels.loader import mapped, page_aligned

CHUNK_BYTES = 64 << 20
"""Size of what is asked of the system at once, which allocates what is written of it."""


class Arena:
    """Its tensors lie one behind the other, so that also those which are smaller than a huge page
    are in huge pages. The processor then looks up fewer pages while it reads them: a step of a
    decoder whose layers have 1 MiB is a fifth shorter. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The tensors keep their chunk, and the last one of them gives it back.
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None
        self._next = 0
        """Offset of what is free in the chunk, in bytes."""

    def take(self, num_bytes: int) -> Tensor:
        """Zeros [num_bytes], uint8, aligned to a page; `num_bytes` is at least 1."""
        if 2 * num_bytes > CHUNK_BYTES or sys.platform != "linux":
            return page_aligned(num_bytes)  # most of it is in huge pages of its own
        with self._lock:
            chunk = self._chunk()
            if chunk is None or self._next + num_bytes > len(chunk):
                chunk, self._next = mapped(CHUNK_BYTES)
                self._chunk = weakref.ref(chunk)
            offset = self._next
            self._next += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=offset)


WEIGHTS = Arena()
"""Has the packed weights of this process."""
