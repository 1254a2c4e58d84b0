"""Triton kernels of linear layers in int8: rows become int8, products are exact, scales come last.

A sum of products of int8 numbers is an exact integer, so it depends neither on the order of its
terms nor on the other rows. Up to `MAX_ROWS` rows are multiplied by a kernel that also applies what
follows the product; more rows by `torch._int_mm` (cuBLAS) and a kernel for what follows. Both do
the same float32 arithmetic in the same order, without fused operations, so a row has the same bits
for every number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.kernels.cuda import has_pdl
from infer.kernels.cuda.launch import launch
from infer.kernels.cuda.linear import load_weights
from infer.kernels.cuda.norm import activation

MAX_ROWS = 16
"""Maximum number of rows for which the kernel here is used; `torch._int_mm` needs more rows."""
_LARGEST = tl.constexpr(3.4028234663852886e38)
# Added and subtracted, 1.5 · 2^23 rounds a float32 below 2^22 to the nearest integer, half to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _finite(values):
    """The values with 0 in place of NaN and infinity, and the number of these."""
    is_finite = tl.abs(values) <= _LARGEST  # false for NaN
    return tl.where(is_finite, values, 0.0), tl.sum(tl.where(is_finite, 0, 1), 0)


@triton.jit
def _to_int8(
    x, norm, out, scales, width, x_stride, eps,
    BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of x in int8, behind an RMSNorm if NORM; its largest magnitude becomes 127."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < width
    weights = tl.load(norm + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    values, num_strange = _finite(values)
    if NORM:
        values = values * (1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)) * weights
        values, more = _finite(values)
        num_strange += more
    unusable = num_strange > 0
    most = tl.max(tl.abs(values), 0)
    inverse = tl.where(unusable | (most == 0.0), 0.0, 127.0 / tl.where(most == 0.0, 1.0, most))
    whole = values * inverse + _ROUNDER - _ROUNDER
    tl.store(out + row * width + i, whole.to(tl.int8), mask=ok)
    tl.store(scales + row, tl.where(unusable, float("nan"), most / 127.0))


@triton.jit
def _after(
    y, second, row_scale, scales, bias, n, ok, N,
    GATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Outputs n of the sums `y` (and those N further, `second`): scales, bias and gate."""
    y = y.to(tl.float32) * row_scale * tl.load(scales + n, mask=ok, other=0.0)
    if BIAS:
        y += tl.load(bias + n, mask=ok, other=0.0).to(tl.float32)
    if GATE != "":
        up = second.to(tl.float32) * row_scale * tl.load(scales + N + n, mask=ok, other=0.0)
        if BIAS:
            up += tl.load(bias + N + n, mask=ok, other=0.0).to(tl.float32)
        y = activation(y, GATE) * up
    return y


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x, row_scales, weight, scales, bias, residual, out,
    rows, K, N, residual_stride, out_stride,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out [rows, N] from x [rows, K], ROWS rows by each program, as the product W xᵀ."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    r = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[None, :]
    kk = tl.arange(0, BK)
    ok = n < N
    real = r < rows
    first = n.to(tl.int64)
    y = tl.zeros((BN, ROWS), tl.int32)
    second = tl.zeros((BN, ROWS), tl.int32)
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
        values = tl.load(x + r * K + at[:, None], mask=real & (at < K)[:, None], other=0)
        y = tl.dot(w, values, y, out_dtype=tl.int32)
        if GATE != "":
            second = tl.dot(w2, values, second, out_dtype=tl.int32)
    row_scale = tl.load(row_scales + r, mask=real, other=0.0)
    n, ok = n[:, None], ok[:, None]
    result = _after(y, second, row_scale, scales, bias, n, ok, N, GATE, BIAS)
    mask = ok & real
    if RESIDUAL:
        at_residual = residual + n + r * residual_stride
        result += tl.load(at_residual, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + n + r * out_stride, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _finish(
    sums, row_scales, scales, bias, residual, out, N, sums_stride, residual_stride, out_stride,
    BLOCK: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What follows the sums of one row."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = n < N
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(sums + row * sums_stride + n, mask=ok, other=0)
    second = y
    if GATE != "":
        second = tl.load(sums + row * sums_stride + N + n, mask=ok, other=0)
    result = _after(y, second, tl.load(row_scales + row), scales, bias, n, ok, N, GATE, BIAS)
    if RESIDUAL:
        added = tl.load(residual + row * residual_stride + n, mask=ok, other=0.0)
        result += added.to(tl.float32)
    tl.store(out + row * out_stride + n, result.to(out.dtype.element_ty), mask=ok)


def to_int8(x: Tensor, norm: tuple[Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """Rows of x [T, K] in int8, and their scales [T] in float32; a row is int8 · scale.

    `norm`: weight [K] and eps of an RMSNorm in front. A row with NaN or infinity has the scale NaN.
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    weight, eps = (x, 0.0) if norm is None else norm
    block, pdl = triton.next_power_of_2(width), has_pdl(x.device)
    launch(_to_int8, (rows,))(
        x, weight, out, scales, width, x.stride(0), eps, BLOCK=block, NORM=norm is not None,
        PDL=pdl, launch_pdl=pdl, num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
    return out, scales


def linear(
    x: Tensor,
    row_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None = None,
    gate: str | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype,
) -> Tensor:
    """gate(W x + b) + residual for rows as `to_int8` returns them: [T, N] in `dtype`.

    `weight`: [N, K] int8, or [2 N, K] with a gate; `scales`: of its rows, float32; `bias`: [N] or
    [2 N]; `gate`: silu or gelu_tanh; `residual`: [T, N]. More rows than `MAX_ROWS` are multiplied
    by cuBLAS, where it can: K and the number of the weight's rows must be multiples of 8.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    height = outputs // 2 if gate else outputs
    pdl = has_pdl(x.device)
    out = torch.empty((rows, height), dtype=dtype, device=x.device)
    added = x if residual is None else residual
    flags = {
        "GATE": gate or "", "BIAS": bias is not None, "RESIDUAL": residual is not None, "PDL": pdl,
        "launch_pdl": pdl, "enable_fp_fusion": False,
    }  # fmt: skip
    behind = (scales, scales if bias is None else bias, added, out)
    if rows > MAX_ROWS and width % 8 == outputs % 8 == 0:
        sums = torch._int_mm(x, weight.T)
        block = min(1024, triton.next_power_of_2(height))
        launch(_finish, (rows, triton.cdiv(height, block)))(
            sums, row_scales, *behind, height, sums.stride(0), added.stride(0), out.stride(0),
            BLOCK=block, num_warps=4, **flags,
        )  # fmt: skip
        return out
    bn = 16 if outputs <= 8192 else 32 if outputs <= 32768 else 64
    launch(_few_rows, (triton.cdiv(height, bn), triton.cdiv(rows, MAX_ROWS)))(
        x, row_scales, weight, *behind, rows, width, height, added.stride(0), out.stride(0),
        ROWS=MAX_ROWS, BN=bn, BK=256, num_warps=4, num_stages=3, **flags,
    )  # fmt: skip
    return out
