"""Triton kernels of linear layers for few rows: gate(W norm(x) + b) + residual in one launch.

For few rows the time is that of reading the weight. So a program reads BN rows of the weight over
the whole width and computes everything else meanwhile: the norm's sum of squares, the gate and the
residual. One row is multiplied by ordinary arithmetic, several rows by the matrix units. With more
rows than `MAX_ROWS` cuBLAS is faster (`kernels.linear.cuda_linear` chooses).

With PDL (programmatic dependent launch) a program starts while the preceding kernel is still
running. It loads its first part of the weight, which no kernel writes, and then waits for its
input.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.kernels.cuda import has_pdl, interpreting
from infer.kernels.cuda.launch import launch
from infer.kernels.cuda.norm import activation

MAX_ROWS = 32
"""Maximum number of rows of x."""
MAX_BYTES = 16 << 20
"""Maximum size in bytes of a weight for which several rows are faster than with cuBLAS (H100)."""
LEAST_WIDTH = 256
"""Minimum number of inputs, K, for several rows."""
_BLOCK_ROWS = 64
"""Number of the weight's rows of a program, for several rows."""
_SPLITS = 4
"""Number of programs that share the columns of a small weight."""


@triton.jit
def load_weights(weight, first, at, K, ok):
    """Rows `first` of a weight [·, K] at the columns `at`."""
    mask = ok[:, None] & (at < K)[None, :]
    return tl.load(weight + first[:, None] * K + at[None, :], mask=mask, other=0.0)


@triton.jit
def _finish(
    y, second, n, ok, bias, residual, out, N,
    GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add bias, apply the gate, add the residual, and store the outputs n of one row."""
    if BIAS:
        y += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
        if GATE != "":
            second += tl.load(bias + N + n, mask=ok, other=0.0).to(tl.float32)
    if GATE != "":
        y = activation(y, GATE) * second
    if RESIDUAL:
        y += tl.load(residual + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _one_row(
    x, weight, bias, norm, residual, out, K, N, eps,
    BN: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out [N] from one row x [K]; with GATE the weight has 2 N rows."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    ok = n < N
    first = n.to(tl.int64)
    acc = tl.zeros((BN, BK), tl.float32)
    other = tl.zeros((BN, BK), tl.float32)
    square = tl.zeros((BK,), tl.float32)
    w = load_weights(weight, first, kk, K, ok)
    w2 = w
    if GATE != "":
        w2 = load_weights(weight, first + N, kk, K, ok)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for k in range(0, K, BK):
        at = k + kk
        if k > 0:
            w = load_weights(weight, first, at, K, ok)
            if GATE != "":
                w2 = load_weights(weight, first + N, at, K, ok)
        values = tl.load(x + at, mask=at < K, other=0.0).to(tl.float32)
        if NORM:
            square += values * values
            values = values * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * values[None, :]
        if GATE != "":
            other += w2.to(tl.float32) * values[None, :]
    y = tl.sum(acc, 1)
    second = tl.sum(other, 1)
    if NORM:
        scale = 1.0 / tl.sqrt(tl.sum(square, 0) / K + eps)
        y = y * scale
        second = second * scale
    _finish(y, second, n, ok, bias, residual, out, N, GATE, BIAS, RESIDUAL)


@triton.jit
def _prefetch(pointers, SIZE: tl.constexpr):
    """Start loading SIZE bytes from each pointer into the second-level cache."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + SIZE + "; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, weight, bias, norm, residual, out, partial, arrived,
    rows, K, N, x_stride, residual_stride, out_stride, eps,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, PRODUCT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, N] from x [rows, K], rows ≤ ROWS, as the product W xᵀ.

    A program multiplies BN rows and SPAN columns of the weight, BK columns at a time. If SPLITS > 1
    programs share the columns, the last one to end adds the sums of all in order.
    """
    block = tl.program_id(0)
    split = tl.program_id(1)
    n = block * BN + tl.arange(0, BN)
    kk = tl.arange(0, BK)
    r = tl.arange(0, ROWS)
    ok = n < N
    first = n.to(tl.int64)
    real = r < rows
    begin = split * SPAN
    if PREFETCH != "":
        _prefetch(weight + tl.where(ok, first, 0) * K + begin, PREFETCH)
        if GATE != "":
            _prefetch(weight + tl.where(ok, first + N, 0) * K + begin, PREFETCH)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    acc = tl.zeros((BN, ROWS), tl.float32)
    other = tl.zeros((BN, ROWS), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    for k in range(begin, tl.minimum(begin + SPAN, K), BK):
        at = k + kk
        w = load_weights(weight, first, at, K, ok)
        inside = (at < K)[:, None] & real[None, :]
        values = tl.load(x + at[:, None] + r[None, :] * x_stride, mask=inside, other=0.0)
        if NORM:
            wide = values.to(tl.float32)
            square += tl.sum(wide * wide, 0)
            values = wide * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)[:, None]
        values = values.to(PRODUCT)
        acc = tl.dot(w.to(PRODUCT), values, acc, input_precision=PRECISION)
        if GATE != "":
            w2 = load_weights(weight, first + N, at, K, ok)
            other = tl.dot(w2.to(PRODUCT), values, other, input_precision=PRECISION)
    mask = ok[:, None] & real[None, :]
    writes = block >= 0
    if SPLITS > 1:
        HALVES: tl.constexpr = 2 if GATE != "" else 1
        # The layout of `partial` is [block, split, 1 or 2 sums and the squares, BN, ROWS].
        size: tl.constexpr = BN * ROWS
        base = partial + (block * SPLITS) * ((HALVES + 1) * size)
        cell = tl.arange(0, BN)[:, None] * ROWS + r[None, :]
        mine = base + split * ((HALVES + 1) * size)
        tl.store(mine + cell, acc)
        if GATE != "":
            tl.store(mine + size + cell, other)
        if NORM:
            tl.store(mine + HALVES * size + r, square)
        tl.debug_barrier()  # all threads must have stored before the counter is increased
        before = tl.atomic_add(arrived + block, 1, sem="acq_rel")
        writes = before == SPLITS - 1
        if writes:
            tl.store(arrived + block, 0)  # for the next launch
            acc = tl.zeros((BN, ROWS), tl.float32)
            other = tl.zeros((BN, ROWS), tl.float32)
            square = tl.zeros((ROWS,), tl.float32)
            for s in tl.static_range(SPLITS):
                theirs = base + s * ((HALVES + 1) * size)
                acc += tl.load(theirs + cell, cache_modifier=".cg")
                if GATE != "":
                    other += tl.load(theirs + size + cell, cache_modifier=".cg")
                if NORM:
                    square += tl.load(theirs + HALVES * size + r, cache_modifier=".cg")
    if writes:
        if NORM:
            scale = (1.0 / tl.sqrt(square / K + eps))[None, :]
            acc = acc * scale
            other = other * scale
        if BIAS:
            acc += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)[:, None]
            if GATE != "":
                other += tl.load(bias + N + n, mask=ok, other=0.0).to(tl.float32)[:, None]
        if GATE != "":
            acc = activation(acc, GATE) * other
        if RESIDUAL:
            at_residual = residual + n[:, None] + r[None, :] * residual_stride
            acc += tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
        to = out + n[:, None] + r[None, :] * out_stride
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


def is_few(rows: int, weight: Tensor) -> bool:
    """Whether `few_rows` is faster than cuBLAS for this number of rows."""
    return rows == 1 or (rows <= MAX_ROWS and weight.nbytes <= MAX_BYTES)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """The maximum shared memory of a program, in bytes."""
    capability = (9, 0)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
    if capability[0] in (9, 10):
        return 227 << 10
    return (163 if capability in ((8, 0), (8, 7)) else 99) << 10


@functools.cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """(partial sums, counters of blocks), which all layers share since they run one by one."""
    blocks = MAX_BYTES // (2 * LEAST_WIDTH * _BLOCK_ROWS)
    sums = blocks * _SPLITS * 2 * _BLOCK_ROWS * MAX_ROWS
    return (
        torch.empty(sums, dtype=torch.float32, device=device),
        torch.zeros(blocks, dtype=torch.int32, device=device),
    )


def few_rows(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype,
    config: tuple[int, ...] | None = None,
    scratch: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """gate(W norm(x) + b) + residual for x [T, K], T ≤ `MAX_ROWS`: [T, N] in `dtype`.

    `weight`: [N, K], or [2 N, K] with a gate. `bias`: [N] or [2 N]. `norm`: weight [K] and eps of
    an RMSNorm in front. `gate`: silu or gelu_tanh. `residual`: [T, N]. `config` and `scratch`
    replace the launch parameters and the memory for partial sums, for measurements and tests.
    """
    rows, width = x.shape
    height = weight.shape[0] // 2 if gate else weight.shape[0]
    pdl = has_pdl(x.device)
    out = torch.empty((rows, height), dtype=dtype, device=x.device)
    norm_weight, eps = (x, 0.0) if norm is None else norm
    added = x if residual is None else residual
    arguments = (x, weight, x if bias is None else bias, norm_weight, added, out)
    flags = {
        "NORM": norm is not None, "GATE": gate or "", "BIAS": bias is not None,
        "RESIDUAL": residual is not None, "PDL": pdl,
    }  # fmt: skip
    if rows == 1:
        bn, bk, warps, stages = config or one_row_config(width, height, bool(gate))
        launch(_one_row, (triton.cdiv(height, bn),))(
            *arguments, width, height, eps, BN=bn, BK=bk, **flags,
            num_warps=warps, num_stages=stages, launch_pdl=pdl,
        )  # fmt: skip
        return out
    bn, bk, splits, warps, stages, pre = config or few_rows_config(width, height, bool(gate))
    blocks = triton.cdiv(height, bn)
    span = triton.cdiv(triton.cdiv(width, bk), splits) * bk
    splits, span = triton.cdiv(width, span), min(span, width)
    # Devices with PDL also have this prefetch. It needs a multiple of 16 bytes inside the weight.
    fetched = span * weight.itemsize
    partial, arrived = scratch or _scratch(x.device)
    kinds = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    product = tl.float32 if interpreting() else kinds[weight.dtype]
    columns = max(8, triton.next_power_of_2(rows))
    stage = bk * (bn * (2 if gate else 1) + columns) * weight.itemsize
    launch(_few_rows, (blocks, splits))(
        *arguments, partial, arrived, rows, width, height,
        x.stride(0), added.stride(0), out.stride(0), eps,
        ROWS=columns, BN=bn, BK=bk, SPAN=span, SPLITS=splits, **flags,
        PREFETCH=str(fetched) if pre and pdl and fetched % 16 == width % span == 0 else "",
        PRODUCT=product, PRECISION="ieee",
        num_warps=warps, num_stages=max(1, min(stages, _shared_bytes(x.device) // stage)),
        launch_pdl=pdl,
    )  # fmt: skip
    return out


def one_row_config(width: int, height: int, gated: bool) -> tuple[int, int, int, int]:
    """(BN, BK, warps, stages) for one row."""
    if height > 16384:
        return 8, 512, 4, 1
    if gated or width <= 1024:
        return 4, 512, 4, 1
    return 2, 1024, 4, 1


def few_rows_config(width: int, height: int, gated: bool) -> tuple[int, int, int, int, int, bool]:
    """(BN, BK, splits, warps, stages, whether to prefetch) for several rows."""
    splits = 1 if height >= 48 * _BLOCK_ROWS or width < 4 * 512 else _SPLITS
    return _BLOCK_ROWS, 128, splits, 4, 4, True
