"""Rows in int8, and how they are rotated before"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROTATED_INPUTS = 64
"""Number of inputs that are rotated together in int8."""


def rotated(rows: Tensor) -> Tensor:
    """Rows [R, n] as the kernels rotate them, [R, n filled up to a multiple of 64], float32.

    Each 64 numbers are multiplied by the orthogonal matrix H / 8, where H is the 64 × 64 matrix of
    Hadamard in Sylvester's order. A product of two rotated rows is that of the rows.
    """
    count = len(rows)
    wide = F.pad(rows.float(), (0, -rows.shape[1] % ROTATED_INPUTS))
    for distance in (1, 2, 4, 8, 16, 32):
        first, second = wide.view(count, -1, 2, distance).unbind(2)
        wide = torch.stack([first + second, first - second], 2).view(count, -1)
    return wide.div_(ROTATED_INPUTS**0.5)


def quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, n] in int8: ([R, n] integers, [R, 1] scales).

    A row's largest magnitude becomes 127. The integers are held as float32.
    """
    wide = rows.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    usable = most.isfinite() & (most > 0)
    # A row that is not finite gets the scale NaN, so its results are NaN.
    scales = torch.where(most.isfinite(), most / 127, torch.nan)
    inverse = torch.where(usable, torch.full_like(most, 127.0) / most, 0.0)
    return (wide * inverse).nan_to_num_(0.0).round_(), scales
