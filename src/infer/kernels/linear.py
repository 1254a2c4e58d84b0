"""`Linear`: y = gate(W norm(x) + b) + residual, the weight in the layout the machine reads fastest.

Made by `make_linear`, used by the models; the original weight may be freed after. The weight is
held in the dtype of the activations or in int8: one scale for each output, one for each row of
activations, found when the row is computed, and an exact integer sum between them. In int4 a
weight is n · multiple · scale, n from -8 to 7, with a whole multiple from 1 to 16 for each 64
inputs: n · multiple is an int8 number, and everything else is as in int8.

A row's result is the same bit for bit in any number of rows from one up: by construction in
`NativeLinear` (bfloat16, int8 and int4 on CPUs with AMX, or AVX-512 with BF16 and VNNI: linear.cpp)
and in `Int8Linear`, by observation in `PackedLinear` (oneDNN; not in bfloat16 with AMX, where it
cuts a sum differently for different numbers of rows), not at all in `PlainLinear` (`F.linear`).
`kernels.invariance` looks whether it holds for a model on this machine.
"""

from __future__ import annotations

import functools
import os
import platform
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels import cuda, loader

BITS = {"int8": 8, "int4": 4}
"""of a weight, by the name of a quantization"""
GROUP_INPUTS = 64
MOST_MULTIPLE = 16
"""int4"""

VARIABLE = "INFER_LINEAR"
"""`amx`, `avx512` or `onednn`, to compare them; unset: the first that runs here."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm with a weight [in]; one in float32 is also applied in float32."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Over the last dimension; `residual`, of the shape of x, is added to the result."""
        if x.is_cuda and x.ndim == 2 and cuda.obstacle(x.device) is None:
            from infer.kernels.cuda.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, residual)
        if self.weight.dtype == x.dtype:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        else:
            y = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """What a layer computes around its product."""

    norm: Norm | None = None
    gate: str | None = None
    """`silu` or `gelu_tanh`: of two halves of columns, act(first) · second"""
    float_out: bool = False
    """the result in float32"""


PRODUCT_ONLY = Fusion()


class Linear(Protocol):
    """A linear layer: [T, in] → [T, out]."""

    in_features: int
    out_features: int
    num_weights: int
    dtype: torch.dtype
    """of the activations"""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply it; `residual` [T, out] is added to the result."""


class _Composed:
    """A layer of torch's own operations around `product`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        rows, self.in_features = weight.shape
        self.out_features = rows // 2 if fusion.gate else rows
        self.num_weights = weight.numel()
        self.dtype = weight.dtype
        self.bias = bias
        self.fusion = fusion

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        raise NotImplementedError

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        fusion = self.fusion
        y = self.product(x if fusion.norm is None else fusion.norm(x))
        if fusion.gate:
            first, second = y.chunk(2, dim=-1)
            silu = fusion.gate == "silu"
            y = (F.silu(first) if silu else F.gelu(first, approximate="tanh")) * second
        if fusion.float_out:
            y = y.float()
        return y if residual is None else residual + y


class PlainLinear(_Composed):
    """`F.linear`, for devices and dtypes without a packed form."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        super().__init__(weight, bias, fusion)
        self.weight = weight

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)


class CudaLinear(_Composed):
    """A layer on a CUDA device: one kernel for a few rows; norm, cuBLAS and gate for more.

    The residual is the product's starting value, so the sum costs no pass of its own; its memory
    becomes the result's.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> None:
        """`invariant`: no kernel of its own for a few rows."""
        super().__init__(weight, bias, fusion)
        self.weight = weight.contiguous()
        self.invariant = invariant
        self._transposed = self.weight.T

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        from infer.kernels.cuda.linear import few_rows, is_few

        fusion, norm = self.fusion, self.fusion.norm
        is_one = x.shape[0] == 1
        if norm is not None and (self.invariant or not is_one):
            x = norm(x)
        if not self.invariant and is_few(x.shape[0], self.weight):
            return few_rows(
                x,
                self.weight,
                bias=self.bias,
                norm=(norm.weight, norm.eps) if norm is not None and is_one else None,
                gate=fusion.gate,
                residual=residual,
                dtype=torch.float32 if fusion.float_out else x.dtype,
            )
        if fusion.gate:
            from infer.kernels.cuda.norm import gate

            y = gate(self.product(x), fusion.gate)
            return y if residual is None else residual + y
        if fusion.float_out and x.dtype != torch.float32 and self.bias is None:
            # Logits that are rounded to 16 bits have ties.
            y = torch.mm(x, self._transposed, out_dtype=torch.float32)
            return y if residual is None else residual + y
        if residual is not None and self.bias is None and not fusion.float_out:
            return residual.addmm_(x, self._transposed)
        y = self.product(x)
        y = y.float() if fusion.float_out else y
        return y if residual is None else residual + y

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear(_Composed):
    """A weight in oneDNN's blocked layout: one packed copy serves every number of rows.

    The product of a row is the same for any number of rows from two up; one row is therefore
    computed as two (free, since one row is bound by memory). The module's docstring says where
    that does not hold.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        super().__init__(weight, bias, fusion)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        if x.shape[0] == 1:
            return self._apply(x.expand(2, -1).contiguous())[:1]
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


class Int8Linear(_Composed):
    """A weight in int8 in oneDNN's layout, where `NativeLinear` cannot be used; one in int4 too,
    which saves nothing here.

    Activations are shifted to unsigned numbers: with signed ones oneDNN takes a path that is
    thousands of times slower. Where oneDNN's sums of two products overflow 16 bits (a CPU without
    VNNI), a row is computed as two: u = 2 · (u >> 1) + (u & 1), whose products all fit.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        bits: int = 8,
    ) -> None:
        super().__init__(weight, bias, fusion)
        whole, scales = _quantized(weight) if bits == 8 else _quantized4(weight)
        self._scales = scales.squeeze(1)
        self._weight = torch.ops.onednn.qlinear_prepack(whole.to(torch.int8), None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._halves = not onednn_is_exact()

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        whole, scales = _quantized(x)
        unsigned = whole.add_(128).to(torch.uint8)
        if self._halves:
            both = torch.cat([unsigned >> 1, (unsigned & 1) + 64])
            high, low = self._whole_product(both, 64).chunk(2)
            y = high.mul_(2).add_(low)
        else:
            y = self._whole_product(unsigned, 128)
        y *= scales
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def _whole_product(self, x: Tensor, zero: int) -> Tensor:
        return _onednn_int8(x, zero, self._weight, self._scales, self._zeros)


def _onednn_int8(x: Tensor, zero: int, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(x - zero) Wᵀ · scales in float32; x [T, in] in uint8, the weight prepacked."""
    arguments = (weight, scales, zeros, None, 1.0, 0, torch.float32)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(x, 1.0, zero, *arguments, "none", [], "")
    return y


@functools.cache
def onednn_is_exact() -> bool:
    """Whether oneDNN's products of uint8 and int8 are exact on this CPU: without VNNI it adds
    pairs of them in 16 bits, which saturate. Looked at once, in the largest products there are."""
    for rows, width, height in ((1, 64, 16), (2, 100, 34), (40, 256, 96)):
        weight = torch.full((height, width), 127, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        zeros = torch.zeros(height, dtype=torch.int64)
        x = torch.full((rows, width), 255, dtype=torch.uint8)
        y = _onednn_int8(x, 0, packed, torch.ones(height), zeros)
        if (y != 255 * 127 * width).any():
            return False
    return True


def quantization_obstacle() -> str | None:
    """Why no layer can be held in int8 or int4 on this CPU; None if it can be."""
    if native_obstacle() is None or _has_onednn("onednn", "qlinear_pointwise"):
        return None
    return f"torch has no oneDNN, and the package's own kernels do not run: {native_obstacle()}"


def bfloat16_obstacle() -> str | None:
    """Why products in bfloat16 are slower on this CPU than in float32; None if they are not."""
    if native_obstacle() is None:
        return None
    if not onednn_has_bfloat16():
        return "this CPU has no arithmetic for bfloat16 that oneDNN could use"
    if platform.machine().lower() in ("x86_64", "amd64") and not (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    ):
        return "this CPU has neither AVX-512 with BF16 nor AMX"
    return None


@functools.cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN multiplies in bfloat16 here: the CPU's flags say so (x86: AVX-NE-CONVERT, or
    AVX-512 with BW, VL and DQ), and a product is made to see it, since `ONEDNN_MAX_CPU_ISA` and a
    virtual machine may leave less than the flags promise."""
    if not (_has_onednn("mkldnn", "_linear_pointwise") and cpu_has_bfloat16()):
        return False
    ones = torch.ones((2, 2), dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(ones, None)
        torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def cpu_has_bfloat16() -> bool:
    """Torch's condition for oneDNN's products in bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _has_onednn(namespace: str, operation: str) -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(getattr(torch.ops, namespace), operation)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """([R, n] whole numbers, [R, 1] scales) of rows: the largest magnitude becomes 127."""
    wide = rows.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    usable = most.isfinite() & (most > 0)
    # A row that is not finite stays so: its numbers are lost, its scale makes NaN of them.
    scales = torch.where(most.isfinite(), most / 127, torch.nan)
    inverse = torch.where(usable, torch.full_like(most, 127.0) / most, 0.0)
    return (wide * inverse).nan_to_num_(0.0).round_(), scales


def _quantized4(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_quantized`: n · multiple, the multiple of each 64 that errs least."""
    count, width = rows.shape
    wide = F.pad(rows.float(), (0, -width % GROUP_INPUTS)).view(count, -1, GROUP_INPUTS)
    most = wide.abs().amax(dim=(1, 2), keepdim=True)
    scales = torch.where(most.isfinite(), most / (7.5 * MOST_MULTIPLE), torch.nan)
    units = torch.where(scales > 0, wide / scales, 0.0).nan_to_num_(0.0)
    largest = (units.abs().amax(dim=2, keepdim=True) / 7.5 - 1e-5).ceil_().clamp_(1, MOST_MULTIPLE)
    best, least = torch.zeros_like(wide), torch.full_like(largest, torch.inf)
    for fewer in range(4):
        multiple = (largest - fewer).clamp_(min=1)
        whole = (units / multiple).round_().clamp_(-8, 7).mul_(multiple)
        error = (whole - units).square_().sum(dim=2, keepdim=True)
        best = torch.where(error < least, whole, best)
        least = torch.minimum(error, least)
    return best.flatten(1)[:, :width], scales.squeeze(1)


class NativeLinear:
    """The layer of linear.cpp; the weight is packed from its parts without being joined first."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        bits: int = 16,
    ) -> None:
        """`weights` [out_i, in], bfloat16, one below the other, to be held in `bits` (16, 8, 4);
        `RuntimeError` if it cannot run."""
        if reason := native_obstacle():
            raise RuntimeError(reason)
        library = loader.loaded()
        rows, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        gate = 0 if fusion.gate is None else 1 + ("silu", "gelu_tanh").index(fusion.gate)
        self.in_features, self.out_features = width, rows // 2 if gate else rows
        self.num_weights = rows * width
        self.dtype = torch.bfloat16
        self.out_dtype = torch.float32 if fusion.float_out else torch.bfloat16
        num_bytes = library.infer_linear_packed_bytes(rows, width, bits, gate)
        self.packed = loader.page_aligned(num_bytes)
        bias = None if bias is None else bias.float().contiguous()
        norm = None if fusion.norm is None else fusion.norm.weight.float().contiguous()
        assert norm is None or norm.shape == (width,)
        self.handle = library.infer_linear_new(
            *(self.packed.data_ptr(), rows, width, bits, gate, fusion.float_out),
            os.environ.get(VARIABLE) != "avx512" and library.infer_linear_runs_here(True),
            *(None if numbers is None else numbers.data_ptr() for numbers in (bias, norm)),
            *(0.0 if fusion.norm is None else fusion.norm.eps, loader.parallel()),
        )
        weakref.finalize(self, library.infer_linear_free, self.handle)
        column = 0
        for part in weights:
            assert (part.dtype, part.shape[1]) == (torch.bfloat16, width)
            source = part if part.stride(1) == 1 else part.contiguous()
            library.infer_linear_pack(
                *(self.handle, source.data_ptr(), len(source), source.stride(0), column),
                torch.get_num_threads(),
            )
            column += len(source)
        self._apply = library.infer_linear

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        assert (x.dtype, x.shape[1]) == (torch.bfloat16, self.in_features)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], self.out_features), dtype=self.out_dtype)
        added = None
        if residual is not None:
            assert (residual.dtype, residual.shape) == (torch.bfloat16, out.shape)
            residual = residual.contiguous()
            added = residual.data_ptr()
        self._apply(
            *(self.handle, x.data_ptr(), x.stride(0), added, out.data_ptr(), x.shape[0]),
            torch.get_num_threads(),
        )
        return out


def native_obstacle() -> str | None:
    """Why `NativeLinear` cannot be used here; None if it can; `ValueError` if `INFER_LINEAR` asks
    for what is not there."""
    wanted = os.environ.get(VARIABLE) or ""
    if wanted not in ("", "amx", "avx512", "onednn"):
        raise ValueError(f"{VARIABLE}={wanted!r}: use amx, avx512 or onednn")
    reason = loader.available()
    if reason is None and not loader.loaded().infer_linear_runs_here(wanted == "amx"):
        needed = "AMX" if wanted == "amx" else "AVX-512 with BF16 and VNNI"
        isa = loader.chosen_instruction_set()
        reason = f"linear layers need {needed}; the kernels use {isa} here"
    if reason and wanted in ("amx", "avx512"):
        raise ValueError(f"{VARIABLE}={wanted} is not possible: {reason}")
    return f"{VARIABLE}={wanted}" if wanted == "onednn" else reason


def of_head(quantization: str | None) -> str | None:
    """How the layer that makes logits is held: its errors go straight into the probabilities."""
    return "int8" if quantization == "int4" else quantization


def weight_bytes(quantization: str | None, dtype: torch.dtype) -> float:
    """Of one weight in memory on this machine; int4 has a byte more for each 64 of them."""
    if quantization == "int4" and native_obstacle() is None:
        return 0.5 + 1 / GROUP_INPUTS
    return 1.0 if quantization else dtype.itemsize


def held_bytes(layers: Iterable[Linear], head: Linear, quantization: str | None) -> int:
    """Of all weights of a model's layers in memory on this machine; `head` is among them."""
    ways = {False: quantization, True: of_head(quantization)}
    return int(
        sum(each.num_weights * weight_bytes(ways[each is head], each.dtype) for each in layers)
    )


def can_pack(weight: Tensor) -> bool:
    """Whether this torch build, device and dtype have oneDNN's packed form."""
    if weight.device.type != "cpu" or not _has_onednn("mkldnn", "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return onednn_has_bfloat16()
    return weight.dtype == torch.float32


def make_linear(
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | None = None,
    fusion: Fusion = PRODUCT_ONLY,
    *,
    quantization: str | None = None,
    batch_invariant: bool = False,
) -> Linear:
    """The fastest `Linear` for a weight [out, in], or for several, one below the other; the weight
    is held in `quantization`, or as it is. `batch_invariant`: on a GPU, only by what computes a
    row alike in any number of rows."""
    bits = 16 if quantization is None else BITS[quantization]
    parts = [weight] if isinstance(weight, Tensor) else list(weight)
    if parts[0].is_cpu and parts[0].dtype == torch.bfloat16 and native_obstacle() is None:
        return NativeLinear(parts, bias, fusion, bits=bits)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    if quantization and whole.device.type == "cpu":
        return Int8Linear(whole, bias, fusion, bits=bits)
    if whole.is_cuda and cuda.obstacle(whole.device) is None:
        return CudaLinear(whole, bias, fusion, invariant=batch_invariant)
    kind = PackedLinear if can_pack(whole) else PlainLinear
    return kind(whole, bias, fusion)
