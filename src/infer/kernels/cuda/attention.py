"""Triton kernels of paged attention, each over a list of work items.

An item is a tile of query tokens of one sequence and a range of its keys. The host makes the list
(`attention.triton`). The number of programs is fixed, each of n programs takes every n-th item, and
the device reads the number of items. So one launch, and one CUDA graph, serves every mixture of
lengths.

The query heads that share a key/value head are rows of the same tile. The keys of a tile may be
divided into splits, as in Flash-Decoding. Then each program stores a partial result, and the
program that stores the last one of a tile merges them in the order of the splits. The softmax is
computed online, as in FlashAttention (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ITEM_FIELDS = 10
"""Number of int32 fields of an item.

The fields are: first row of the tile in the step, number of its tokens, position of the first
token, row of the page tables, first key, end of the keys, index of the split, number of the tile's
splits, first row of the tile's partial results, index of the tile.
"""

_LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _cells(table, key, there, offset, PAGE: tl.constexpr, CELL: tl.constexpr):
    """Offsets of keys' heads in the cache; keys for which `there` is False are in page 0."""
    page = tl.load(table + key // PAGE, mask=there, other=0).to(tl.int64)
    return (page * PAGE + key % PAGE) * CELL + offset


@triton.jit
def _biases(slope, position, key, rounded, SLOPES: tl.constexpr):
    """What slopes [ROWS] add to the scores of keys [TILE], broadcast to [ROWS, TILE].

    SLOPES: 0: nothing; 1: -slope · (position - key); 2: rounded · slope · key, whose product is
    bfloat16.
    """
    if SLOPES == 0:
        biases = slope[:, None]
    elif SLOPES == 2:
        product = slope[:, None] * key[None, :].to(tl.float32).to(tl.bfloat16).to(tl.float32)
        biases = product.to(tl.bfloat16).to(tl.float32) * rounded
    else:
        biases = slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    return biases


@triton.jit
def _add_tile(
    x, top, total, acc, k, v, sees, scale, cap, biases,
    MASKED: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr, PRODUCT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add keys k [BLOCK_D, TILE] and values v [TILE, BLOCK_D] to the online softmax of rows x.

    The state is `top` (maxima), `total` (sums of weights) and `acc` (weighted sums of values).
    """
    scores = tl.dot(x, k.to(PRODUCT), input_precision=PRECISION) * scale
    if CAP:
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    if SLOPES:
        scores += biases
    scores = scores * _LOG2E
    if MASKED:
        scores = tl.where(sees, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    # A row that has seen no key has the maximum -inf; with 0 instead the differences are not NaN.
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    p = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(p, 1)
    acc = tl.dot(p.to(PRODUCT), v.to(PRODUCT), acc * fade[:, None], input_precision=PRECISION)
    return highest, total, acc


@triton.jit
def _add_keys(
    x, top, total, acc, keys, values, table, position, begin, end, last, scale, cap, slope,
    rounded, window, head_offset,
    CELL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SLOPES: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end`, in whole tiles, to the online softmax of rows x.

    x is [ROWS, BLOCK_D]. Without MASKED every row sees every one of these keys.
    """
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    for first in range(begin, end, TILE):
        key = first + tl.arange(0, TILE)
        there = key < last
        if MASKED:
            cell = _cells(table, key, there, head_offset, PAGE, CELL)
        else:
            page = tl.load(table + key // PAGE).to(tl.int64)
            cell = (page * PAGE + key % PAGE) * CELL + head_offset
        k_at = keys + cell[None, :] + d[:, None]
        v_at = values + cell[:, None] + d[None, :]
        sees = there[None, :]
        if MASKED:
            k = tl.load(k_at, mask=there[None, :] & inside[:, None], other=0.0)
            v = tl.load(v_at, mask=there[:, None] & inside[None, :], other=0.0)
            sees = (key[None, :] <= position[:, None]) & there[None, :]
            if WINDOW:
                sees &= key[None, :] > position[:, None] - window
        elif D == BLOCK_D:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=inside[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[None, :], other=0.0)
        biases = _biases(slope, position, key, rounded, SLOPES)
        top, total, acc = _add_tile(
            x, top, total, acc, k, v, sees, scale, cap, biases,
            MASKED, CAP, SLOPES, PRODUCT, PRECISION,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def _merge(top, total, acc, other_top, other_total, other_acc):
    """Merge two partial results of the same rows."""
    highest = tl.maximum(top, other_top)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    a = tl.exp2(top - safe)
    b = tl.exp2(other_top - safe)
    return highest, total * a + other_total * b, acc * a[:, None] + other_acc * b[:, None]


@triton.jit
def _hand_over(
    top, total, acc, partial, stats, counter, base, split, num_splits, num_tokens, token,
    query_head, real, mask, H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store the partial result of a split.

    The program that stores the last one of a tile gets all of them, merged in the order of the
    splits, and True.
    """
    d = tl.arange(0, BLOCK_D)
    at = (base + split * num_tokens + token).to(tl.int64) * H + query_head
    tl.store(partial + at[:, None] * D + d[None, :], acc, mask=mask)
    tl.store(stats + at * 2, top, mask=real)
    tl.store(stats + at * 2 + 1, total, mask=real)
    tl.debug_barrier()  # all threads must have stored before the counter is increased
    is_last = tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1
    if is_last:
        tl.store(counter, 0)  # for the next launch
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for first in range(0, num_splits, AHEAD):
            # Several splits at a time, so that their loads overlap.
            for ahead in tl.static_range(AHEAD):
                # A vector, since the interpreter cannot combine a mask with a scalar condition.
                there = tl.zeros((ROWS,), tl.int32) + (first + ahead) < num_splits
                at = (base + (first + ahead) * num_tokens + token).to(tl.int64) * H + query_head
                of_row = real & there
                part_top = tl.load(
                    stats + at * 2, mask=of_row, other=float("-inf"), cache_modifier=".cg"
                )
                part_total = tl.load(
                    stats + at * 2 + 1, mask=of_row, other=0.0, cache_modifier=".cg"
                )
                part_acc = tl.load(
                    partial + at[:, None] * D + d[None, :],
                    mask=mask & there[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                top, total, acc = _merge(top, total, acc, part_top, part_total, part_acc)
    return top, total, acc, is_last


@triton.jit
def _turned(at, cos, sin, norm, mask, i, eps, D: tl.constexpr, NORMS: tl.constexpr):
    """The heads at the pointers `at` [R, 1], normalised and rotated, float32: [R, BLOCK_D]."""
    half: tl.constexpr = D // 2
    is_first = i < half
    partner = tl.where(is_first, i + half, i - half)
    x = tl.load(at + i[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    ok = i < D
    if NORMS:
        scale = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        x = x * scale * tl.load(norm + i, mask=ok, other=0.0).to(tl.float32)[None, :]
        y = y * scale * tl.load(norm + partner, mask=ok, other=0.0).to(tl.float32)[None, :]
    angle = tl.where(is_first, i, i - half)
    c = tl.load(cos + angle, mask=ok, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=ok, other=0.0)[None, :]
    return x * c + tl.where(is_first, -1.0, 1.0)[None, :] * y * s


@triton.jit(do_not_specialize=["window"])
def decode(
    q, k, v, keys, values, tables, items, num_items, partial, stats, arrived, out,
    cos, sin, q_norm, k_norm, slopes,
    scale, cap, rounded, window, eps,
    q_stride, k_stride, v_stride, out_stride, table_stride, cos_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr, NORMS: tl.constexpr,
    AHEAD: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A layer's rotation, cache write and attention, in a step with one token per sequence.

    q [T, H, D], k and v [T, G, D] are the outputs of the projection. Every program normalises and
    rotates the queries that it needs. The program whose split has the new key stores the new key
    and value. Data that do not depend on the preceding kernel (items, pages and, with AHEAD, the
    first tile of keys and values) are loaded before the program waits for that kernel.
    """
    REP: tl.constexpr = H // G
    m = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    real = m < REP
    mask = real[:, None] & inside[None, :]
    if PDL:
        gdc_launch_dependents()
    for index in range(tl.program_id(0), tl.load(num_items) * G, tl.num_programs(0)):
        head = index % G
        item = items + (index // G) * 10
        row = tl.load(item).to(tl.int64)
        own_position = tl.load(item + 2)
        table = tables + tl.load(item + 3).to(tl.int64) * table_stride
        begin = tl.load(item + 4)
        end = tl.load(item + 5)
        num_splits = tl.load(item + 7)
        own_page = tl.load(table + own_position // PAGE).to(tl.int64)
        # The cell of the new key is not read: it still holds data of an earlier sequence.
        last = tl.minimum(end, own_position)
        rest = begin
        if AHEAD:
            rest = begin + TILE
            key = begin + tl.arange(0, TILE)
            there = key < last
            cell = _cells(table, key, there, head * D, PAGE, G * D)
            k_mask = there[None, :] & inside[:, None]
            v_mask = there[:, None] & inside[None, :]
            first_k = tl.load(keys + cell[None, :] + d[:, None], mask=k_mask, other=0.0)
            first_v = tl.load(values + cell[:, None] + d[None, :], mask=v_mask, other=0.0)
        if PDL:
            gdc_wait()
        query_head = head * REP + m
        slope = tl.zeros((ROWS,), tl.float32)
        if SLOPES:
            slope = tl.load(slopes + query_head, mask=real, other=0.0)
        x = _turned(
            (q + row * q_stride + query_head * D)[:, None],
            cos + row * cos_stride, sin + row * cos_stride, q_norm, mask, d, eps, D, NORMS,
        ).to(PRODUCT)  # fmt: skip
        # Few programs need the new key. All load it here, because its load overlaps the queries'.
        new_key = _turned(
            (k + row * k_stride + head * D + tl.arange(0, 1))[:, None],
            cos + row * cos_stride, sin + row * cos_stride, k_norm, inside[None, :], d, eps,
            D, NORMS,
        )  # fmt: skip
        new_value = tl.load(v + row * v_stride + head * D + d, mask=inside, other=0.0)[None, :]
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        position = tl.zeros((ROWS,), tl.int32) + own_position
        top, total, acc = _add_keys(
            x, top, total, acc, keys, values, table, position, rest, last, last,
            scale, cap, slope, rounded, window, head * D,
            G * D, D, BLOCK_D, PAGE, TILE, True, WINDOW, CAP, SLOPES, PRODUCT, PRECISION,
        )  # fmt: skip
        if AHEAD:
            sees = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW:
                sees &= key[None, :] > position[:, None] - window
            top, total, acc = _add_tile(
                x, top, total, acc, first_k, first_v, sees, scale, cap,
                _biases(slope, position, key, rounded, SLOPES),
                True, CAP, SLOPES, PRODUCT, PRECISION,
            )  # fmt: skip
        if end > own_position:
            own_cell = (own_page * PAGE + own_position % PAGE) * (G * D) + head * D
            kind = keys.dtype.element_ty
            tl.store(keys + own_cell + d[None, :], new_key.to(kind), mask=inside[None, :])
            tl.store(values + own_cell + d[None, :], new_value.to(kind), mask=inside[None, :])
            # The key is rounded as in its cell, so this step uses the same number as later steps.
            score = tl.sum(x.to(tl.float32) * new_key.to(kind).to(tl.float32), 1) * scale
            if CAP:
                score = cap * (2 * tl.sigmoid(2 * score / cap) - 1)
            if SLOPES == 2:
                product = slope * own_position.to(tl.float32).to(tl.bfloat16).to(tl.float32)
                score += product.to(tl.bfloat16).to(tl.float32) * rounded
            top, total, acc = _merge(
                top, total, acc, score * _LOG2E, tl.full((ROWS,), 1.0, tl.float32),
                tl.zeros((ROWS, BLOCK_D), tl.float32) + new_value.to(tl.float32),
            )  # fmt: skip
        writes = num_splits == 1
        if num_splits > 1:
            top, total, acc, writes = _hand_over(
                top, total, acc, partial, stats, arrived + tl.load(item + 9) * G + head,
                tl.load(item + 8), tl.load(item + 6), num_splits, 1,
                tl.zeros((ROWS,), tl.int32), query_head, real, mask, H, D, ROWS, BLOCK_D,
                8 if AHEAD else 2,
            )  # fmt: skip
        if writes:
            result = acc / tl.where(real, total, 1.0)[:, None]
            tl.store(
                out + row * out_stride + query_head[:, None] * D + d[None, :],
                result.to(out.dtype.element_ty),
                mask=mask,
            )


@triton.jit(do_not_specialize=["window"])
def attend(
    q, keys, values, tables, items, num_items, partial, stats, arrived, out,
    slopes, scale, cap, rounded, window, q_stride, out_stride, table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, SLOPES: tl.constexpr, PARTS: tl.constexpr,
    ORDERED: tl.constexpr,
    PRODUCT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of q [T, H, D], with rows `q_stride` apart, over cached keys: out [T, H, D].

    PARTS: items may be splits of a tile. ORDERED: a tile's keys are computed in splits of SPLIT
    keys and merged in order. The bits are the same whether one program does so or several.
    """
    REP: tl.constexpr = H // G
    m = tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    count = tl.load(num_items) * G
    if PDL:
        gdc_launch_dependents()
        # The kernel after this one waits for this one alone. So this one must not end before the
        # kernel before it, even if there is nothing to do.
        if count == 0:
            gdc_wait()
    for index in range(tl.program_id(0), count, tl.num_programs(0)):
        head = index % G
        item = items + (index // G) * 10
        row = tl.load(item)
        num_tokens = tl.load(item + 1)
        first_position = tl.load(item + 2)
        table = tables + tl.load(item + 3).to(tl.int64) * table_stride
        begin = tl.load(item + 4)
        end = tl.load(item + 5)
        if PDL:
            gdc_wait()
        token = m // REP
        real = token < num_tokens
        query_head = head * REP + m % REP
        slope = tl.zeros((ROWS,), tl.float32)
        if SLOPES:
            slope = tl.load(slopes + query_head, mask=real, other=0.0)
        where = (row + token).to(tl.int64)
        mask = real[:, None] & inside[None, :]
        x = tl.load(
            q + where[:, None] * q_stride + query_head[:, None] * D + d[None, :],
            mask=mask,
            other=0.0,
        ).to(PRODUCT)
        position = first_position + token
        last = end
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
        if ORDERED:
            for start in range(begin // SPLIT * SPLIT, end, SPLIT):
                part_top = tl.full((ROWS,), float("-inf"), tl.float32)
                part_total = tl.zeros((ROWS,), tl.float32)
                part_acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
                part_top, part_total, part_acc = _add_keys(
                    x, part_top, part_total, part_acc, keys, values, table, position,
                    tl.maximum(start, begin // TILE * TILE), tl.minimum(start + SPLIT, end), last,
                    scale, cap, slope, rounded, window, head * D,
                    G * D, D, BLOCK_D, PAGE, TILE, True, WINDOW, CAP, SLOPES, PRODUCT, PRECISION,
                )  # fmt: skip
                top, total, acc = _merge(top, total, acc, part_top, part_total, part_acc)
        else:
            # Every row of the tile sees every key before `whole`.
            whole = tl.minimum(end, first_position + 1) // TILE * TILE
            if WINDOW:
                whole = begin
            whole = tl.maximum(whole, begin)
            top, total, acc = _add_keys(
                x, top, total, acc, keys, values, table, position, begin, whole, last,
                scale, cap, slope, rounded, window, head * D,
                G * D, D, BLOCK_D, PAGE, TILE, False, WINDOW, CAP, SLOPES, PRODUCT, PRECISION,
            )  # fmt: skip
            top, total, acc = _add_keys(
                x, top, total, acc, keys, values, table, position, whole, end, last,
                scale, cap, slope, rounded, window, head * D,
                G * D, D, BLOCK_D, PAGE, TILE, True, WINDOW, CAP, SLOPES, PRODUCT, PRECISION,
            )  # fmt: skip
        writes = num_tokens > 0
        if PARTS:
            num_splits = tl.load(item + 7)
            if num_splits > 1:
                top, total, acc, writes = _hand_over(
                    top, total, acc, partial, stats, arrived + tl.load(item + 9) * G + head,
                    tl.load(item + 8), tl.load(item + 6), num_splits, num_tokens, token,
                    query_head, real, mask, H, D, ROWS, BLOCK_D, 2,
                )  # fmt: skip
        if writes:
            result = acc / tl.where(real, total, 1.0)[:, None]
            tl.store(
                out + where[:, None] * out_stride + query_head[:, None] * D + d[None, :],
                result.to(out.dtype.element_ty),
                mask=mask,
            )
