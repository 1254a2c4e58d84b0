"""Passes over rows as long as a vocabulary: argmax, the k largest, a draw. No row is ever sorted.

A row is cut into blocks. One pass finds the largest number of each; the k largest of the row lie
in the k blocks with the largest ones, so only those are looked at again. A draw sums the blocks
first and then looks into one of them. Among equals the lowest id goes first, everywhere.

What is computed for a row depends on that row alone, to the last bit. Hence sums go over blocks and
then, in float64 and in order, over their sums: torch may cut one sum over a long row between
threads when the row is alone, and not when it has company. Called by the sampler.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64


def padded(rows: Tensor) -> Tensor:
    """Rows [R, V] filled up with -inf to whole blocks; all functions below want such rows."""
    missing = -rows.shape[1] % BLOCK
    return F.pad(rows, (0, missing), value=float("-inf")) if missing else rows


def _cut(rows: Tensor) -> Tensor:
    return rows.view(rows.shape[0], -1, BLOCK)


def maxima(rows: Tensor) -> Tensor:
    """The largest of each block, [R, V / BLOCK]."""
    return _cut(rows).amax(dim=-1)


def argmax(rows: Tensor, tops: Tensor) -> Tensor:
    """The id of the largest in each row, [R]; `tops`: the rows' maxima."""
    block = tops.argmax(dim=-1, keepdim=True)
    inside = _cut(rows).gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).argmax(dim=-1)
    return torch.add(inside, block, alpha=BLOCK).squeeze(1)


def largest(rows: Tensor, tops: Tensor, members: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids [n, k] of the k largest in the rows `members` [n], the largest first."""
    tops = tops[members]
    among = torch.arange(tops.shape[1], device=rows.device)
    blocks = _first(tops, among, min(k, tops.shape[1])).unsqueeze(2)
    ids = (blocks * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    ids = _first(_cut(rows)[members.unsqueeze(1), blocks.squeeze(2)].flatten(1), ids, k)
    return rows[members.unsqueeze(1), ids], ids


def _first(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids of the k largest values [n, N], in order: a larger value, then a lower id."""
    # As integers, floats of either sign in their order; adding 0 makes -0 and 0 the same.
    bits = (values + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.long() << 32) - ids
    return -keys.topk(k).values & 0xFFFFFFFF


def weights(rows: Tensor, tops: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities [R, V] up to a factor, in float32: the most probable has 1."""
    scaled = rows - tops.amax(dim=-1, keepdim=True)  # first: no factor makes it more than 0
    factors = math.log2(math.e) / temperatures  # torch's exp takes twice as long
    return scaled.mul_(factors.unsqueeze(1)).exp2_()


def running_sums(weights: Tensor) -> Tensor:
    """Sums [R, V / BLOCK], float64, of the weights up to the end of each block."""
    return _cut(weights).sum(dim=-1).double().cumsum(dim=-1)


def pick(weights: Tensor, sums: Tensor, points: Tensor) -> Tensor:
    """Per row the id at which the running sum passes point · total, [R]; points lie in [0, 1)."""
    rows = torch.arange(len(weights), device=weights.device)
    targets = points * sums[:, -1]
    block = invert(sums, targets)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    inside = _cut(weights)[rows, block].double().cumsum(dim=-1)
    return block * BLOCK + invert(inside, targets - before)


def invert(sums: Tensor, targets: Tensor) -> Tensor:
    """Per row the first index at which the running sum [n, N] is above the target [n]."""
    index = torch.searchsorted(sums, targets.unsqueeze(1), right=True).squeeze(1)
    # Rounding may put the target on the last sum: stay on the last index that has a weight.
    return torch.minimum(index, (sums < sums[:, -1:]).sum(dim=-1))


def at_least(row: Tensor, weight: float, out: Tensor) -> None:
    """Copy a part of a row of weights to `out`, with 0 for those below a weight above 0."""
    # torch has this in one pass with "above" only.
    torch.threshold(row, float(np.nextafter(np.float32(weight), np.float32(0))), 0.0, out=out)


def more_probable(row: Tensor, token: int) -> Tensor:
    """A row of weights [V] with all at zero but those that go before a token."""
    kept, weight = torch.empty_like(row), row[token].item()
    at_least(row[:token], weight, kept[:token])
    torch.threshold(row[token:], weight, 0.0, out=kept[token:])
    return kept
