"""`KVStorage`: the tensors behind the page numbers.

Per layer one tensor of keys and one of values, [pages, page_size, G, D]. Who may use which page is
the allocator's business (`cache/`); the two share nothing but the numbers. Page 0 is scrap: padding
reads and writes it, and it starts as zeros so that whatever is masked out is at least finite.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from infer.models.config import ModelConfig


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
        shape = (num_pages, page_size, config.num_kv_heads, config.head_dim)
        layers = range(config.num_layers)
        self.keys = [_zeros(shape, dtype, device) for _ in layers]
        self.values = [_zeros(shape, dtype, device) for _ in layers]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros are untouched memory of the operating system: an unused page costs nothing.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
