"""`Int8Weight`: rows of a weight in int8 with a scale for each, as a checkpoint has them

Linear layers multiply them as they are: nothing is rounded a second time, and nothing is rotated,
since the scales were chosen for the rows as they are. Activations are rounded as in every int8
layer (csrc/linear.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from infer.kernels import loader
from infer.kernels.blocks import BlockWeight, packed_bytes, panel_kinds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """A weight [out, in]: whole numbers times the scale of their output."""

    shape: tuple[int, int]
    """Number of outputs and inputs."""
    rows: Tensor | None
    """The numbers, [out, in] int8; None: the weight is only planned."""
    scales: Tensor | None
    """The scale of each output, [out] float32."""

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    def content(self) -> Tensor:
        """Some of the numbers and their scales as a tensor, for a digest of a model's weights."""
        import torch  # a plan of memory does without

        assert self.rows is not None
        assert self.scales is not None
        step = max(1, len(self.rows) // 64)
        return torch.cat([self.rows[::step].flatten().float(), self.scales[::step]])

    def reordered(self, order: np.ndarray | slice) -> Int8Weight:
        """The outputs that `order` names, in its order."""
        import torch

        count = len(range(self.shape[0])[order] if isinstance(order, slice) else order)
        index = order if isinstance(order, slice) else torch.from_numpy(order)
        rows = None if self.rows is None else self.rows[index]
        scales = None if self.scales is None else self.scales[index]
        return Int8Weight((count, self.shape[1]), rows, scales)


def int8_bytes(weights: Sequence[Int8Weight], *, gated: bool) -> int:
    """The size in bytes of a layer with these weights as its outputs: panels and scales."""
    rows, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    panels = loader.loaded().infer_linear_packed_bytes(rows, width, 8, 1 if gated else 0)
    return int(panels) + 4 * rows


def kept_bytes(weights: Sequence[BlockWeight | Int8Weight], *, gated: bool) -> int:
    """The size in bytes of a layer with these weights as its outputs."""
    whole = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if whole:
        return int8_bytes(whole, gated=gated)
    blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
    return packed_bytes(panel_kinds(blocks, gated=gated) or (), blocks[0].shape[1])
