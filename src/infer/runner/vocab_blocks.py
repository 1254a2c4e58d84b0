"""Operations on rows of the size of a vocabulary: argmax, the k largest, a draw; without sorting.

A row is divided into blocks. One pass finds the maximum of each block. The k largest numbers of the
row lie in the k blocks with the largest maxima, so only these blocks are read again. A draw sums
the blocks first and then reads one of them. Among equal numbers the lowest id always comes first.

The result of a row depends on that row alone, to the last bit. torch may divide a sum over a long
row between threads if the row is alone in a tensor, and not if there are others. Therefore sums are
taken over blocks first, and then over the blocks' sums, in order and in float64. The sampler uses
this module.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
"""Number of tokens of a block."""


def padded(rows: Tensor) -> Tensor:
    """Rows [R, V] padded with -inf to whole blocks, as all functions below expect them."""
    missing = -rows.shape[1] % BLOCK
    return F.pad(rows, (0, missing), value=float("-inf")) if missing else rows


def _in_blocks(rows: Tensor) -> Tensor:
    return rows.view(rows.shape[0], -1, BLOCK)


def maxima(rows: Tensor) -> Tensor:
    """The maximum of each block, [R, V / BLOCK]."""
    return _in_blocks(rows).amax(dim=-1)


def argmax(rows: Tensor, tops: Tensor) -> Tensor:
    """The id of the largest number in each row, [R]; `tops`: the blocks' maxima."""
    block = tops.argmax(dim=-1, keepdim=True)
    inside = _in_blocks(rows).gather(1, block.unsqueeze(2).expand(-1, -1, BLOCK)).argmax(dim=-1)
    return torch.add(inside, block, alpha=BLOCK).squeeze(1)


def largest(rows: Tensor, tops: Tensor, members: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Values and ids, [n, k] each, of the k largest numbers in the rows `members` [n], in order."""
    tops = tops[members]
    among = torch.arange(tops.shape[1], device=rows.device)
    blocks = _first(tops, among, min(k, tops.shape[1])).unsqueeze(2)
    ids = (blocks * BLOCK + torch.arange(BLOCK, device=rows.device)).flatten(1)
    ids = _first(_in_blocks(rows)[members.unsqueeze(1), blocks.squeeze(2)].flatten(1), ids, k)
    return rows[members.unsqueeze(1), ids], ids


def _first(values: Tensor, ids: Tensor, k: int) -> Tensor:
    """The ids of the k largest of `values` [n, N]: larger values first, then lower ids; [n, k]."""
    # The bits become integers that are ordered as the floats are. Adding 0 turns -0 into 0.
    bits = (values + 0.0).view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (order.long() << 32) - ids
    return -keys.topk(k).values & 0xFFFFFFFF


def weights(rows: Tensor, tops: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities up to a factor, [R, V] float32; the most probable token has weight 1.

    `temperatures`: [R].
    """
    # The maximum is subtracted before scaling, so no exponent can exceed 0.
    scaled = rows - tops.amax(dim=-1, keepdim=True)
    factors = math.log2(math.e) / temperatures  # exp2 takes half the time of torch's exp
    return scaled.mul_(factors.unsqueeze(1)).exp2_()


def running_sums(weights: Tensor) -> Tensor:
    """The sums of the weights up to the end of each block, [R, V / BLOCK], float64."""
    return _in_blocks(weights).sum(dim=-1).double().cumsum(dim=-1)


def pick(weights: Tensor, sums: Tensor, points: Tensor) -> Tensor:
    """The id in each row at which the running sum exceeds point · total, [R].

    `sums`: the weights' running sums; `points` [R]: numbers in [0, 1).
    """
    rows = torch.arange(len(weights), device=weights.device)
    targets = points * sums[:, -1]
    block = invert(sums, targets)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    inside = _in_blocks(weights)[rows, block].double().cumsum(dim=-1)
    return block * BLOCK + invert(inside, targets - before)


def invert(sums: Tensor, targets: Tensor) -> Tensor:
    """The first index in each row at which the running sum [n, N] is above the target [n]; [n]."""
    index = torch.searchsorted(sums, targets.unsqueeze(1), right=True).squeeze(1)
    # Rounding may make the target equal the last sum. The index then is the last with a weight.
    return torch.minimum(index, (sums < sums[:, -1:]).sum(dim=-1))


def at_least(row: Tensor, weight: float, out: Tensor) -> None:
    """Copy a row of weights to `out`, with 0 in place of weights below `weight`, which is > 0."""
    # torch's one-pass operation keeps numbers above a threshold, so it is the next float below.
    torch.threshold(row, float(np.nextafter(np.float32(weight), np.float32(0))), 0.0, out=out)


def more_probable(row: Tensor, token: int) -> Tensor:
    """A copy of a row of weights [V] with 0 for `token` and all tokens of lower rank."""
    kept, weight = torch.empty_like(row), row[token].item()
    at_least(row[:token], weight, kept[:token])
    torch.threshold(row[token:], weight, 0.0, out=kept[token:])
    return kept
