"""Triton kernels of rotary embedding: with norms and cache write for a step, or for [B, H, S, D].

`turn_and_write` prepares a layer's queries, keys and values for attention: it normalises the heads,
rotates them, and stores keys and values in the cache. Queries are changed in place. `apply_rope` is
the rotation alone, for tensors in the layout of other libraries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.kernels.cuda.launch import launch


@triton.jit
def turn_and_write(
    q, k, v, keys, values, slots, cos, sin, q_norm, k_norm,
    q_stride, k_stride, v_stride, cos_stride, eps,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    TURN: tl.constexpr, NORMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate q in place and k, and store k and v in the cell `slots[t]`.

    One program computes HEADS of the H + 2 G heads of one token. A negative slot is padding, for
    which nothing is written. `cos`, `sin`: [T, D/2] float32.
    """
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    half: tl.constexpr = D // 2
    inside = (i < half)[None, :]
    is_q = head < H
    is_k = (head >= H) & (head < H + G)
    is_v = (head >= H + G) & (head < H + 2 * G)
    at_q = (q + t * q_stride + head * D)[:, None] + i[None, :]
    at_k = (k + t * k_stride + (head - H) * D)[:, None] + i[None, :]
    at_v = (v + t * v_stride + (head - H - G) * D)[:, None] + i[None, :]
    of_q = is_q[:, None] & inside
    of_k = is_k[:, None] & inside
    of_v = is_v[:, None] & inside
    # The three masks exclude each other, so the sum of the three loads is the one load that counts.
    x = tl.load(at_q, mask=of_q, other=0.0).to(tl.float32)
    x += tl.load(at_k, mask=of_k, other=0.0).to(tl.float32)
    x += tl.load(at_v, mask=of_v, other=0.0).to(tl.float32)
    y = tl.load(at_q + half, mask=of_q, other=0.0).to(tl.float32)
    y += tl.load(at_k + half, mask=of_k, other=0.0).to(tl.float32)
    y += tl.load(at_v + half, mask=of_v, other=0.0).to(tl.float32)
    turns = (is_q | is_k)[:, None]
    if NORMS:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)
        ok = i < half
        first = tl.where(
            is_q[:, None],
            tl.load(q_norm + i, mask=ok, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm + i, mask=ok, other=0.0).to(tl.float32)[None, :],
        )
        second = tl.where(
            is_q[:, None],
            tl.load(q_norm + half + i, mask=ok, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm + half + i, mask=ok, other=0.0).to(tl.float32)[None, :],
        )
        x = tl.where(turns, x * scale[:, None] * first, x)
        y = tl.where(turns, y * scale[:, None] * second, y)
    if TURN:
        ok = i < half
        c = tl.load(cos + t * cos_stride + i, mask=ok, other=0.0)[None, :]
        s = tl.load(sin + t * cos_stride + i, mask=ok, other=0.0)[None, :]
        turned_x = x * c - y * s
        turned_y = y * c + x * s
        x = tl.where(turns, turned_x, x)
        y = tl.where(turns, turned_y, y)
    cell = slot * (G * D)
    to_k = (keys + cell + (head - H) * D)[:, None] + i[None, :]
    to_v = (values + cell + (head - H - G) * D)[:, None] + i[None, :]
    kind = keys.dtype.element_ty
    if TURN or NORMS:
        tl.store(at_q, x.to(q.dtype.element_ty), mask=of_q)
        tl.store(at_q + half, y.to(q.dtype.element_ty), mask=of_q)
    tl.store(to_k, x.to(kind), mask=of_k)
    tl.store(to_k + half, y.to(kind), mask=of_k)
    tl.store(to_v, x.to(kind), mask=of_v)
    tl.store(to_v + half, y.to(kind), mask=of_v)


@triton.jit
def _rope(
    q, k, q_out, k_out, cos, sin,
    sqb, sqh, sqs, skb, skh, sks, oqb, oqh, oqs, okb, okh, oks, scb, scs, ssb, sss,
    seq_len, H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate all H + G heads of one position of one batch row, HEADS at a time."""
    s = tl.program_id(0) % seq_len
    b = (tl.program_id(0) // seq_len).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < HALF
    c = tl.load(cos + b * scb + s * scs + i, mask=ok, other=0.0).to(tl.float32)[None, :]
    n = tl.load(sin + b * ssb + s * sss + i, mask=ok, other=0.0).to(tl.float32)[None, :]
    for first in range(0, H, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (head < H)[:, None] & ok[None, :]
        at = q + b * sqb + s * sqs + head[:, None] * sqh + i[None, :]
        to = q_out + b * oqb + s * oqs + head[:, None] * oqh + i[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (x * c - y * n).to(q_out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, (y * c + x * n).to(q_out.dtype.element_ty), mask=mask)
    for first in range(0, G, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (head < G)[:, None] & ok[None, :]
        at = k + b * skb + s * sks + head[:, None] * skh + i[None, :]
        to = k_out + b * okb + s * oks + head[:, None] * okh + i[None, :]
        x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (x * c - y * n).to(k_out.dtype.element_ty), mask=mask)
        tl.store(to + HALF, (y * c + x * n).to(k_out.dtype.element_ty), mask=mask)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate q [B, H, S, D] and k [B, G, S, D] in Llama's convention.

    Element i of a head's first half and element i of its second half are rotated as a pair. `cos`,
    `sin`: [S, D] or [S, D/2], the same for all rows of the batch, or [B, S, D] or [B, S, D/2]; of D
    columns the first D/2 are read. The last dimension of each tensor must be contiguous. Returns
    new tensors in the dtypes and memory order of q and k. `ValueError` if shapes do not fit each
    other.
    """
    _check(q, k, cos, sin)
    batch, heads, length, size = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    (scb, scs), (ssb, sss) = (
        (0 if table.ndim == 2 else table.stride(0), table.stride(-2)) for table in (cos, sin)
    )
    if q.numel():
        groups = k.shape[1]
        launch(_rope, (batch * length,))(
            q, k, q_out, k_out, cos, sin,
            *q.stride()[:3], *k.stride()[:3], *q_out.stride()[:3], *k_out.stride()[:3],
            scb, scs, ssb, sss, length,
            H=heads, G=groups, HALF=size // 2, BLOCK=triton.next_power_of_2(size // 2),
            HEADS=min(8, triton.next_power_of_2(max(heads, groups))), num_warps=4,
        )  # fmt: skip
    return q_out, k_out


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(f"q and k must be [B, heads, S, D]; got {shapes}")
    batch, _, length, size = q.shape
    if (k.shape[0], *k.shape[2:]) != (batch, length, size) or size % 2:
        raise ValueError(f"q and k must agree in B, S and an even D; got {shapes}")
    wanted = [(*lead, length, width) for lead in ((), (batch,)) for width in (size, size // 2)]
    if cos.shape != sin.shape or tuple(cos.shape) not in wanted:
        raise ValueError(
            f"cos and sin must both be [S, D], [S, D/2], [B, S, D] or [B, S, D/2]; got {shapes}"
        )
    if any(x.stride(-1) != 1 for x in (q, k, cos, sin)):
        raise ValueError("the last dimension of q, k, cos and sin must be contiguous")
