"""Triton kernels that sample rows of logits: greedy, temperature, top-k, top-p and min-p.

The method is that of `runner.sampler`: the distribution function is inverted at
`uniform(seed, position)`. `scan` divides a row into blocks of columns and stores the maximum of
every group of 64 columns. `pick` inverts over the blocks' sums and then inside one block.

`narrow` draws again for rows with top-k, top-p or min-p, one program per row. It reads only groups
whose maximum is large enough, and finds the k-th largest logit by radix selection on its bits. It
draws a token and accepts it if the more probable tokens have less than top-p together; if not, it
draws again among those. The distribution function is that of the tokens in the order of their ids.

Sums over blocks are float64 and in order, so a row's token depends on that row alone. Errors are
reported as flags.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.kernels.cuda import has_pdl
from infer.kernels.cuda.launch import launch

SCAN_BLOCK = 4096
"""Number of columns of a block."""
GROUP: tl.constexpr = tl.constexpr(64)
"""Number of columns of a group, the unit in which `narrow` reads a row."""
SCAN_GROUPS: tl.constexpr = tl.constexpr(64)
"""Number of groups of a block."""
NOT_FINITE_FLAG = 1
"""Flag of a row that has a NaN or +inf, or nothing but -inf."""

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _mix(x):
    """One round of splitmix64 on uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _to_unit(x):
    """A float64 in [0, 1) from the upper 53 bits of a uint64."""
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def scan(
    logits, maxima, places, sums, groups, temperatures, vocab, stride, num_blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store a block's maximum (NaN if it has one), its column, and Σ exp relative to it.

    One program computes one block of one row. It also stores the maximum of each group.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
    bad = tl.max((x != x).to(tl.int32), 0)
    highest = tl.max(x, 0)
    place = tl.min(tl.where(x == highest, i, 2147483647), 0)
    temperature = tl.load(temperatures + row)
    at = row * num_blocks + block
    tl.store(maxima + at, tl.where(bad > 0, float("nan"), highest))
    tl.store(places + at, place)
    in_groups = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), 1)
    tl.store(groups + at * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP), in_groups)
    if temperature > 0:
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        total = tl.sum(tl.exp2((x - safe) * (_LOG2E / temperature)), 0)
        tl.store(sums + at, total)


@triton.jit
def pick(
    logits, maxima, places, sums, temperatures, seeds, positions, tokens, flags, totals,
    vocab, stride, num_blocks, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the token of a row, drawn from the whole row, and the row's Σ exp.

    One program computes one row, from the results of `scan`.
    """
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCKS)
    there = j < num_blocks
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    highest = tl.load(maxima + row * num_blocks + j, mask=there, other=float("-inf"))
    top = tl.max(highest, 0)
    bad = tl.max((highest != highest).to(tl.int32), 0)
    bad = tl.where((top == float("inf")) | (top == float("-inf")), 1, bad)
    tl.store(flags + row, bad)
    place = tl.load(places + row * num_blocks + j, mask=there, other=2147483647)
    token = tl.min(tl.where(highest == top, place, 2147483647), 0)
    temperature = tl.load(temperatures + row)
    if (temperature > 0) & (bad == 0):
        factor = _LOG2E / temperature
        weights = tl.load(sums + row * num_blocks + j, mask=there, other=0.0).to(tl.float64)
        weights *= tl.exp2((highest - top) * factor).to(tl.float64)
        weights = tl.where(there & (highest > float("-inf")), weights, 0.0)
        running = tl.cumsum(weights, 0)
        total = tl.sum(weights, 0)
        tl.store(totals + row, total)
        seed = tl.load(seeds + row).to(tl.uint64)
        point = _to_unit(_mix(_mix(seed) + tl.load(positions + row).to(tl.uint64)))
        target = point * total
        block = tl.sum((running <= target).to(tl.int32), 0)
        # Rounding may make the target equal the last sum. The last block with a weight is chosen.
        block = tl.minimum(block, tl.max(tl.where(weights > 0, j, 0), 0))
        before = tl.sum(tl.where(j < block, weights, 0.0), 0)
        i = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + i, mask=i < vocab, other=float("-inf"))
        inside = tl.exp2((x - top) * factor).to(tl.float64)
        index = tl.sum((tl.cumsum(inside, 0) <= target - before).to(tl.int32), 0)
        last = tl.max(tl.where(inside > 0, tl.arange(0, BLOCK), 0), 0)
        token = block * BLOCK + tl.minimum(index, last)
    # The step ahead embeds a token before the host has read the flag, and an id beyond the table
    # ends the whole CUDA context.
    tl.store(tokens + row, tl.where(bad > 0, 0, token))


@triton.jit
def _order(x):
    """uint32 numbers that are ordered as the float32 numbers x are; -0 equals 0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _columns(chosen, start, count, BLOCK: tl.constexpr):
    """The columns of BLOCK / GROUP chosen groups, in order, and a mask of those that exist."""
    e = tl.arange(0, BLOCK)
    at = start + e // GROUP
    there = at < count
    return tl.load(chosen + at, mask=there, other=0) * GROUP + e % GROUP, there


@triton.jit
def _largest(base, chosen, count, vocab, k, BLOCK: tl.constexpr):
    """The k-th largest number of the chosen groups, as `_order` gives it, and a column.

    The column is the last one among the k largest whose number equals the k-th. It is a radix
    selection with digits of eight bits.
    """
    bins = tl.arange(0, 256)
    least = tl.zeros((), tl.uint32)
    last_equal = vocab
    remaining = k
    step: tl.constexpr = BLOCK // GROUP
    for byte in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, step):
            i, among = _columns(chosen, start, count, BLOCK)
            among &= i < vocab
            key = _order(tl.load(base + i, mask=among, other=float("-inf")))
            if byte > 0:
                among &= (key >> (32 - 8 * byte)) == (least >> (32 - 8 * byte))
            digits = ((key >> (24 - 8 * byte)) & 255).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=among)
        from_here = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        digit = tl.max(tl.where(from_here >= remaining, bins, 0), 0)
        remaining -= tl.sum(tl.where(bins > digit, counts, 0), 0)
        least = least | (digit.to(tl.uint32) << (24 - 8 * byte))
    seen = 0
    for start in range(0, count, step):
        i, among = _columns(chosen, start, count, BLOCK)
        among &= i < vocab
        key = _order(tl.load(base + i, mask=among, other=float("-inf")))
        equal = ((key == least) & among).to(tl.int32)
        rank = seen + tl.cumsum(equal, 0)
        last = tl.min(tl.where((equal > 0) & (rank == remaining), i, vocab), 0)
        last_equal = tl.minimum(last_equal, last)
        seen += tl.sum(equal, 0)
    return least, last_equal


@triton.jit
def _weights(
    base, chosen, start, count, vocab, top, factor, least, last_equal, bound, bound_place, lowest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of chosen groups and their weights.

    A weight is 0 unless the column is among the k largest, ranks before the bound (a larger value,
    or the same value at a smaller id) and is not below `lowest`.
    """
    i, there = _columns(chosen, start, count, BLOCK)
    x = tl.load(base + i, mask=there & (i < vocab), other=float("-inf"))
    key = _order(x)
    kept = (key > least) | ((key == least) & (i <= last_equal))
    kept &= (x > bound) | ((x == bound) & (i < bound_place))
    kept &= (x >= lowest) & (x > float("-inf"))
    return i, tl.where(kept, tl.exp2((x - top) * factor), 0.0)


@triton.jit
def _total(
    base, chosen, count, vocab, top, factor, least, last_equal, bound, bound_place, lowest,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of `_weights` over the chosen groups, float64."""
    total = tl.zeros((), tl.float64)
    for start in range(0, count, BLOCK // GROUP):
        _, weights = _weights(
            base, chosen, start, count, vocab, top, factor, least, last_equal, bound, bound_place,
            lowest, BLOCK,
        )  # fmt: skip
        total += tl.sum(weights, 0).to(tl.float64)
    return total


@triton.jit
def narrow(
    logits, maxima, groups, chosens, totals, temperatures, narrowed, top_ks, top_ps, min_ps, seeds,
    positions, tokens, flags, vocab, stride, num_blocks,
    BLOCKS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the token of a row with top-k, top-p or min-p; `narrowed` marks these rows.

    `tokens` holds the token that `pick` drew. It is the first attempt of rows with top-p only.
    """
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    bad = tl.load(flags + row)
    if (tl.load(narrowed + row) != 0) & (bad == 0):
        j = tl.arange(0, BLOCKS)
        highest = tl.load(maxima + row * num_blocks + j, mask=j < num_blocks, other=float("-inf"))
        top = tl.max(highest, 0)
        factor = _LOG2E / tl.load(temperatures + row)
        base = logits + row * stride
        k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        token = tl.load(tokens + row)
        lowest = tl.full((), float("-inf"), tl.float32)
        if min_p > 0:
            lowest = top + tl.log2(min_p) / factor
        # With top-k only the groups with the k largest maxima are needed. With top-p only those
        # are needed whose maximum is at least the first attempt's logit. No group is needed whose
        # maximum is below `lowest`, except for the sum of the k largest, of which top-p is a share.
        g = tl.arange(0, GROUPS)
        num_groups = num_blocks * SCAN_GROUPS
        of_group = tl.load(groups + row * num_groups + g, mask=g < num_groups, other=float("-inf"))
        keys = _order(of_group)
        enough = tl.zeros((), tl.uint32)
        if k > 0:
            for bit in tl.static_range(32):
                more = enough | (tl.full((), 1, tl.uint32) << (31 - bit))
                enough = tl.where(tl.sum((keys >= more).to(tl.int32), 0) >= k, more, enough)
        elif min_p <= 0:
            enough = _order(tl.load(base + token))
        needed_from = tl.where((k > 0) & (top_p < 1), float("-inf"), lowest)
        matters = (keys >= enough) & (of_group >= needed_from) & (of_group > float("-inf"))
        place = tl.cumsum(matters.to(tl.int32), 0) - 1
        count = tl.sum(matters.to(tl.int32), 0)
        chosen = chosens + row * num_groups
        tl.store(chosen + place, g, mask=matters)
        tl.debug_barrier()  # other threads of the program read what was stored
        least = tl.zeros((), tl.uint32)
        last_equal = tl.zeros((), tl.int32) + vocab
        if k > 0:
            least, last_equal = _largest(base, chosen, count, vocab, k, BLOCK)
        bound = tl.full((), float("-inf"), tl.float32)
        bound_place = tl.zeros((), tl.int32)
        total = tl.load(totals + row)
        nothing = tl.full((), float("-inf"), tl.float32)
        if k > 0:
            total = _total(
                base, chosen, count, vocab, top, factor, least, last_equal, bound, bound_place,
                nothing, BLOCK,
            )  # fmt: skip
        limit = total * top_p.to(tl.float64)
        random = _mix(
            _mix(tl.load(seeds + row).to(tl.uint64)) + tl.load(positions + row).to(tl.uint64)
        )
        is_drawn = (k == 0) & (min_p <= 0)
        if min_p > 0:
            total = _total(
                base, chosen, count, vocab, top, factor, least, last_equal, bound, bound_place,
                lowest, BLOCK,
            )  # fmt: skip
        drawing = total > 0
        while drawing:
            if is_drawn == 0:
                target = _to_unit(random) * total
                running = tl.zeros((), tl.float64)
                token = tl.zeros((), tl.int32) + vocab
                last = tl.zeros((), tl.int32)
                start = tl.zeros((), tl.int32)
                while (start < count) & (token == vocab):
                    i, weights = _weights(
                        base, chosen, start, count, vocab, top, factor, least, last_equal, bound,
                        bound_place, lowest, BLOCK,
                    )  # fmt: skip
                    inside = running + tl.cumsum(weights.to(tl.float64), 0)
                    passed = (inside > target) & (weights > 0)
                    token = tl.min(tl.where(passed, i, vocab), 0)
                    last = tl.maximum(last, tl.max(tl.where(weights > 0, i, 0), 0))
                    running += tl.sum(weights, 0).to(tl.float64)
                    start += BLOCK // GROUP
                # Rounding may make the target equal the last sum. The last column with a weight
                # is chosen.
                token = tl.where(token == vocab, last, token)
            is_drawn = (k == 0) & (k != 0)
            # The token is accepted if the more probable ones have less weight than the limit.
            bound = tl.load(base + token)
            bound_place = token
            total = _total(
                base, chosen, count, vocab, top, factor, least, last_equal, bound, bound_place,
                lowest, BLOCK,
            )  # fmt: skip
            # In float32 a top-p near 0 is 0, and so may be its limit.
            drawing = (total > 0) & (total >= limit) & (top_p < 1)
            random = _mix(random)
        tl.store(tokens + row, token)


class DrawBuffers:
    """Memory for intermediate results of the kernels."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        """`rows`: maximum number of rows; `vocab`: number of columns of the logits."""
        self.num_blocks = triton.cdiv(vocab, SCAN_BLOCK)
        shape = (rows, self.num_blocks)
        groups = (rows, self.num_blocks * SCAN_GROUPS.value)
        self.maxima = torch.empty(shape, dtype=torch.float32, device=device)
        self.places = torch.empty(shape, dtype=torch.int32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        self.totals = torch.empty(rows, dtype=torch.float64, device=device)
        self.groups = torch.empty(groups, dtype=torch.float32, device=device)
        self.chosen = torch.empty(groups, dtype=torch.int32, device=device)


def draw(
    logits: Tensor,
    buffers: DrawBuffers,
    *,
    temperatures: Tensor,
    narrowed: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    seeds: Tensor,
    positions: Tensor,
    tokens: Tensor,
    flags: Tensor,
) -> None:
    """Sample each row of the logits [R, V], float32, into `tokens` [R] and `flags` [R].

    A flag is 0, or `NOT_FINITE_FLAG`, and the token then 0. All other arguments are [R]:
    `temperatures`, `top_ps` and `min_ps` float32; `narrowed`, `top_ks`, `positions`, `tokens` and
    `flags` int32; `seeds` int64. A temperature of 0 is greedy. `narrowed`: whether the row has
    top-k, top-p or min-p, and a temperature above 0.
    """
    rows, vocab = logits.shape
    num_blocks, pdl = buffers.num_blocks, has_pdl(logits.device)
    launch(scan, (rows, num_blocks))(
        logits, buffers.maxima, buffers.places, buffers.sums, buffers.groups, temperatures, vocab,
        logits.stride(0), num_blocks, BLOCK=SCAN_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    blocks = triton.next_power_of_2(num_blocks)
    launch(pick, (rows,))(
        logits, buffers.maxima, buffers.places, buffers.sums, temperatures, seeds, positions,
        tokens, flags, buffers.totals, vocab, logits.stride(0), num_blocks,
        BLOCKS=blocks, BLOCK=SCAN_BLOCK, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    launch(narrow, (rows,))(
        logits, buffers.maxima, buffers.groups, buffers.chosen, buffers.totals, temperatures,
        narrowed, top_ks, top_ps, min_ps, seeds, positions, tokens, flags,
        vocab, logits.stride(0), num_blocks,
        BLOCKS=blocks, GROUPS=blocks * SCAN_GROUPS.value, BLOCK=SCAN_BLOCK, PDL=pdl,
        num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
