"""Triton kernels of RMSNorm with an optional residual, and of the gate of an MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from infer.kernels.cuda import has_pdl
from infer.kernels.cuda.launch import launch


@triton.jit
def _rms_norm(
    x, weight, residual, out, width, x_stride, residual_stride, out_stride, eps,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    ok = i < width
    scales = tl.load(weight + i, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    values = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + eps)
    values = values * scale * scales
    if RESIDUAL:
        values += tl.load(residual + row * residual_stride + i, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + i, values.to(out.dtype.element_ty), mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm of x [T, E] with the weight [E], plus the residual [T, E] if given: [T, E].

    All arithmetic is float32; the result has the dtype of x.
    """
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block, pdl = triton.next_power_of_2(width), has_pdl(x.device)
    added = x if residual is None else residual
    launch(_rms_norm, (rows,))(
        x, weight, added, out, width, x.stride(0), added.stride(0), out.stride(0), eps,
        BLOCK=block, RESIDUAL=residual is not None, PDL=pdl, launch_pdl=pdl,
        num_warps=4 if block <= 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def activation(x, KIND: tl.constexpr):
    """SiLU or tanh-GELU of float32 numbers."""
    if KIND == "silu":
        y = x * tl.sigmoid(x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * tl.sigmoid(2 * inner)  # 0.5 (1 + tanh(z)) is sigmoid(2 z)
    return y


@triton.jit
def _gate(
    x, out, width, x_stride, out_stride,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < width
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.load(x + row * x_stride + i, mask=ok, other=0.0).to(tl.float32)
    second = tl.load(x + row * x_stride + width + i, mask=ok, other=0.0).to(tl.float32)
    y = activation(first, KIND) * second
    tl.store(out + row * out_stride + i, y.to(out.dtype.element_ty), mask=ok)


def gate(x: Tensor, kind: str) -> Tensor:
    """act(first half of the columns) · second half: [T, 2 I] → [T, I]; `kind`: silu, gelu_tanh."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block, pdl = min(2048, triton.next_power_of_2(width)), has_pdl(x.device)
    launch(_gate, (rows, triton.cdiv(width, block)))(
        x, out, width, x.stride(0), out.stride(0), BLOCK=block, KIND=kind, PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out
