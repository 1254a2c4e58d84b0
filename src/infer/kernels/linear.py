"""`Linear`: y = gate(W norm(x) + b) + residual, with the weight in the machine's fastest layout.

`make_linear` makes the layers of all models. The original weight may be freed afterwards. A weight
is held in the dtype of the activations, in int8 or in int4. In int8 each output has one scale, and
each row of activations has one scale that is computed with the row; the sum of products is an exact
integer. Weights and activations are rotated before (`rotated`, and csrc/linear.h on why). A weight
may also be given in the blocks of a GGUF file (`kernels.blocks`), which are kept. int4 makes such
blocks of 4 bits of the weight itself (`kernels.blocks.fitted`).

Whether a row's result is the same, bit for bit, for every number of rows depends on the class. It
is by construction in `NativeLinear` (bfloat16, int8 and blocks in C++: csrc/linear.h), in
`Int8Linear` and in `CudaInt8Linear`. It was observed to be in most of `PackedLinear` (oneDNN). It
is not in `PlainLinear` (`F.linear`). `kernels.invariance` checks it for a model on this machine.
"""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels import cuda, loader
from infer.kernels.arena import WEIGHTS
from infer.kernels.blocks import (
    CODES,
    BlockWeight,
    fitted,
    numbers_of,
    packed_bytes,
    panel_kinds,
)
from infer.kernels.int8_weight import Int8Weight
from infer.kernels.loader import NativeCall
from infer.kernels.native import instruction_set, native_obstacle
from infer.kernels.team import num_threads

ROTATED_INPUTS = 64
"""Number of inputs that are rotated together in int8."""

_ROWS_AT_A_TIME = 4096
"""Number of a weight's rows that are quantized together on a GPU: as float32 they take memory."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last dimension.

    With a weight in float32 it is computed in float32.
    """

    weight: Tensor
    """Weight, [in]."""
    eps: float
    """Number that is added to the mean of squares."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[…, in] → […, in]; `residual`, of the shape of x, is added to the result."""
        if x.is_cuda and x.ndim == 2 and cuda.obstacle(x.device) is None:
            from infer.kernels.cuda.norm import rms_norm

            return rms_norm(x, self.weight, self.eps, residual)
        if self.weight.dtype == x.dtype:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        else:
            y = F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation (Ba et al. 2016, arXiv:1607.06450) over the last dimension, of size n.

    With a weight in float32, or one for each head, it is computed in float32.
    """

    size: int
    """Size of the last dimension, n."""
    eps: float
    """Number that is added to the variance."""
    weight: Tensor | None = None
    """Weight, [n], or [heads, n] with one for each head."""
    bias: Tensor | None = None
    """Bias, [n]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[…, n] → […, n]; `residual`, of the shape of x, is added to the result."""
        shape, weight, bias = (self.size,), self.weight, self.bias
        if weight is not None and weight.ndim > 1:
            y = (F.layer_norm(x.float(), shape, eps=self.eps) * weight.float()).to(x.dtype)
        elif weight is None or weight.dtype == x.dtype:
            y = F.layer_norm(x, shape, weight, bias, self.eps)
        else:
            bias = None if bias is None else bias.float()
            y = F.layer_norm(x.float(), shape, weight, bias, self.eps).to(x.dtype)
        return y if residual is None else residual + y


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Operations that a linear layer computes together with its product."""

    norm: Norm | None = None
    """Norm of the input."""
    gate: str | None = None
    """Activation of the gate, silu or gelu_tanh: act(first half of the outputs) · second half."""
    float_out: bool = False
    """Whether the result is float32 instead of the dtype of the activations."""


PRODUCT_ONLY = Fusion()
"""No operation besides the product."""


class Linear(Protocol):
    """A linear layer: [T, in] → [T, out]."""

    in_features: int
    """Number of inputs."""
    out_features: int
    """Number of outputs, after the gate."""
    num_weights: int
    """Number of elements of the weight."""
    dtype: torch.dtype
    """Dtype of the activations."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Apply the layer: [T, in] → [T, out]; `residual` [T, out] is added to the result."""


class _Composed:
    """A layer that computes norm, gate and residual by torch's operations around `product`."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        rows, self.in_features = weight.shape
        self.out_features = rows // 2 if fusion.gate else rows
        self.num_weights = weight.numel()
        self.dtype = weight.dtype
        self.bias = bias
        self.fusion = fusion

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        raise NotImplementedError

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return self.product(x).float()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        fusion = self.fusion
        x = x if fusion.norm is None else fusion.norm(x)
        y = self.float_product(x) if fusion.float_out and not fusion.gate else self.product(x)
        if fusion.gate:
            first, second = y.chunk(2, dim=-1)
            silu = fusion.gate == "silu"
            y = (F.silu(first) if silu else F.gelu(first, approximate="tanh")) * second
        if fusion.float_out:
            y = y.float()
        return y if residual is None else residual + y


class PlainLinear(_Composed):
    """A layer by `F.linear`, for devices and dtypes without a packed form."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        self.weight = weight

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return _float_product(x, self.weight.T, self.bias)


def _float_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · `weight` [in, out] + b in float32. On a CUDA device it is not rounded to 16 bits first,
    since logits in 16 bits would have ties."""
    if not x.is_cuda or x.dtype == torch.float32:
        return F.linear(x, weight.T, bias).float()
    y = torch.mm(x, weight, out_dtype=torch.float32)
    return y if bias is None else y + bias


class CudaLinear(_Composed):
    """A layer on a CUDA device: one Triton kernel for few rows; norm, cuBLAS and gate for more.

    The product is accumulated onto the residual where possible, so the sum takes no extra pass. The
    residual's memory then holds the result.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> None:
        """`invariant`: the kernel for few rows is not used, so its rounding cannot differ."""
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
        if residual is not None and self.bias is None and not fusion.float_out:
            return residual.addmm_(x, self._transposed)
        product = self.float_product if fusion.float_out else self.product
        y = product(x)
        return y if residual is None else residual + y

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        return F.linear(x, self.weight, self.bias)

    def float_product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b in float32."""
        return _float_product(x, self._transposed, self.bias)


class CudaInt8Linear(_Composed):
    """A layer on a CUDA device with its weight in int8; its products are exact integers.

    A row has the same bits for every number of rows; see `kernels.cuda.int8`.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        self.weight = torch.empty_like(weight, dtype=torch.int8)
        self.scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
        for first in range(0, len(weight), _ROWS_AT_A_TIME):
            some = slice(first, first + _ROWS_AT_A_TIME)
            whole, scales = _quantized(weight[some])
            self.weight[some], self.scales[some] = whole, scales.squeeze(1)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        from infer.kernels.cuda.int8 import linear, to_int8

        fusion, norm = self.fusion, self.fusion.norm
        whole, row_scales = to_int8(x, None if norm is None else (norm.weight, norm.eps))
        return linear(
            *(whole, row_scales, self.weight, self.scales),
            bias=self.bias,
            gate=fusion.gate,
            residual=residual,
            dtype=torch.float32 if fusion.float_out else x.dtype,
        )


class PackedLinear(_Composed):
    """A layer with its weight in oneDNN's blocked layout, which serves every number of rows.

    The product of a row is the same for any number of rows from two up, except in bfloat16 with
    AMX, where oneDNN divides a sum differently for different numbers of rows. One row is therefore
    computed as two. That costs no time, since reading the weight takes longer.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
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
    """A layer with its weight in int8 in oneDNN's layout, where `NativeLinear` cannot be used.

    Activations are shifted to unsigned numbers, because oneDNN is thousands of times slower with
    signed ones. On a CPU without VNNI oneDNN's sums of two products may overflow 16 bits. There a
    row is computed as two rows, u = 2 · (u >> 1) + (u & 1), whose products all fit.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = PRODUCT_ONLY
    ) -> None:
        """`weight`: [out, in], or [2 out, in] with a gate; `bias`: [out] or [2 out]."""
        super().__init__(weight, bias, fusion)
        whole, scales = _quantized(rotated(weight))
        self._scales = scales.squeeze(1)
        self._weight = torch.ops.onednn.qlinear_prepack(whole.to(torch.int8), None)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        self._halves = not onednn_is_exact()

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ + b."""
        whole, scales = _quantized(rotated(x))
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
    """(x - zero) Wᵀ · scales, float32; x: [T, in] uint8; `weight`: prepacked; `scales`: [out]."""
    arguments = (weight, scales, zeros, None, 1.0, 0, torch.float32)
    y: Tensor = torch.ops.onednn.qlinear_pointwise(x, 1.0, zero, *arguments, "none", [], "")
    return y


@functools.cache
def onednn_is_exact() -> bool:
    """Whether oneDNN's products of uint8 and int8 are exact on this CPU.

    Without VNNI oneDNN adds pairs of products in 16 bits, with saturation. The largest possible
    products are computed once to find out.
    """
    for rows, width, height in ((1, 64, 16), (2, 100, 34), (40, 256, 96)):
        weight = torch.full((height, width), 127, dtype=torch.int8)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        zeros = torch.zeros(height, dtype=torch.int64)
        x = torch.full((rows, width), 255, dtype=torch.uint8)
        y = _onednn_int8(x, 0, packed, torch.ones(height), zeros)
        if (y != 255 * 127 * width).any():
            return False
    return True


@functools.cache
def onednn_has_bfloat16() -> bool:
    """Whether oneDNN can multiply in bfloat16 on this CPU.

    The CPU's flags must say so (x86: AVX-NE-CONVERT, or AVX-512 with BW, VL and DQ), and a test
    product must succeed: `ONEDNN_MAX_CPU_ISA` or a virtual machine may restrict oneDNN further.
    """
    if not (has_onednn("mkldnn", "_linear_pointwise") and cpu_has_bfloat16()):
        return False
    ones = torch.ones((2, 2), dtype=torch.bfloat16)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(ones, None)
        torch.ops.mkldnn._linear_pointwise(ones, packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True


def cpu_has_bfloat16() -> bool:
    """Whether the CPU's flags meet torch's condition for bfloat16 products by oneDNN."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_onednn(namespace: str, operation: str) -> bool:
    """Whether torch has an operation of oneDNN."""
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hasattr(getattr(torch.ops, namespace), operation)


def rotated(rows: Tensor) -> Tensor:
    """Rows [R, n] as the kernels rotate them, [R, n filled up to a multiple of 64], float32.

    Each 64 numbers are multiplied by the orthogonal matrix H / 8, where H is the 64 × 64 matrix of
    Hadamard in Sylvester's order. A product of two rotated rows is that of the rows.
    """
    count = len(rows)
    wide = F.pad(rows.float(), (0, -rows.shape[1] % ROTATED_INPUTS))
    for distance in (1, 2, 4, 8, 16, 32):
        first, second = wide.view(count, -1, 2, distance).unbind(2)
        wide = torch.stack([first + second, first - second], 2).view(count, -1)
    return wide.div_(ROTATED_INPUTS**0.5)


def _quantized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, n] in int8: ([R, n] integers, [R, 1] scales).

    A row's largest magnitude becomes 127. The integers are held as float32.
    """
    wide = rows.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    usable = most.isfinite() & (most > 0)
    # A row that is not finite gets the scale NaN, so its results are NaN.
    scales = torch.where(most.isfinite(), most / 127, torch.nan)
    inverse = torch.where(usable, torch.full_like(most, 127.0) / most, 0.0)
    return (wide * inverse).nan_to_num_(0.0).round_(), scales


class NativeLinear:
    """A layer by the C++ kernels (csrc/linear.h).

    Weights of fused layers are packed one by one, without a concatenated copy.
    """

    def __init__(
        self,
        weights: Sequence[Tensor | BlockWeight | Int8Weight],
        bias: Tensor | None = None,
        fusion: Fusion = PRODUCT_ONLY,
        *,
        bits: int = 16,
        rotated: bool = True,
        packed: Tensor | None = None,
    ) -> None:
        """`weights`: [out_i, in], all in bfloat16, or all in blocks or int8; outputs are
        concatenated.

        `bits`: a weight in bfloat16 is held in 16 or 8 bits. `rotated`: whether 8 bits are those
        of rotated rows; not for weights that were calibrated for one scale a row. `packed`: the
        memory of another layer with the same weights, whose rows are then not read.
        `RuntimeError` with the reason if the kernel cannot run, `ValueError` if a panel would hold
        blocks of two types.
        """
        if reason := native_obstacle():
            raise RuntimeError(reason)
        library = loader.loaded()
        rows, width = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        gate = 0 if fusion.gate is None else 1 + ("silu", "gelu_tanh").index(fusion.gate)
        self.in_features, self.out_features = width, rows // 2 if gate else rows
        self.num_weights = rows * width
        self.dtype = torch.bfloat16
        self.out_dtype = torch.float32 if fusion.float_out else torch.bfloat16
        blocks = [weight for weight in weights if isinstance(weight, BlockWeight)]
        if isinstance(weights[0], Int8Weight):
            bits, rotated = 8, False
        kinds = panel_kinds(blocks, gated=gate > 0) if blocks else []
        if kinds is None:
            raise ValueError(
                f"one panel cannot hold {', '.join(block_weight.kind for block_weight in blocks)}"
            )
        num_bytes = (
            packed_bytes(kinds, width)
            if kinds
            else library.infer_linear_packed_bytes(rows, width, bits, gate)
        )
        self.packed = WEIGHTS.take(num_bytes) if packed is None else packed
        bias = None if bias is None else bias.float().contiguous()
        norm = None if fusion.norm is None else fusion.norm.weight.float().contiguous()
        assert norm is None or norm.shape == (width,)
        self.isa = instruction_set()
        types = numbers_of(kinds)
        self.handle = library.infer_linear_new(
            *(self.isa.encode(), self.packed.data_ptr(), rows, width, 8 if kinds else bits, gate),
            *(fusion.float_out, rotated and bits < 16 and not kinds),
            *(None if numbers is None else numbers.data_ptr() for numbers in (bias, norm)),
            *(0.0 if fusion.norm is None else fusion.norm.eps,),
            types.buffer_info()[0] if kinds else None,
        )
        weakref.finalize(self, library.infer_linear_free, self.handle)
        column = 0
        for part in weights if packed is None else ():
            self._pack(part, column)
            column += part.shape[0]
        self._apply = library.infer_linear

    def _pack(self, part: Tensor | BlockWeight | Int8Weight, column: int) -> None:
        """Write one of the weights as the outputs from `column` on."""
        library, threads = loader.loaded(), num_threads()
        if isinstance(part, BlockWeight):
            rows = part.rows
            assert rows is not None
            assert rows.strides[1] == 1
            address, stride = rows.ctypes.data, rows.strides[0]
            library.infer_linear_pack_blocks(
                self.handle, address, CODES[part.kind], len(rows), stride, column, threads
            )
            if (
                not rows.flags.owndata
                and not rows.flags.writeable
                and hasattr(mmap, "MADV_DONTNEED")
            ):
                # Pages of the file, which would count as this process's memory. They can be read
                # again at any time.
                loader.advise_range(address, len(rows) * stride, mmap.MADV_DONTNEED)
            return
        if isinstance(part, Int8Weight):
            assert part.rows is not None
            assert part.scales is not None
            codes, scales = part.rows.contiguous(), part.scales.contiguous()
            assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
            library.infer_linear_pack_int8(
                *(self.handle, codes.data_ptr(), scales.data_ptr(), *codes.shape, column), threads
            )
            return
        assert (part.dtype, part.shape[1]) == (torch.bfloat16, self.in_features)
        source = part if part.stride(1) == 1 else part.contiguous()
        library.infer_linear_pack(
            *(self.handle, source.data_ptr(), len(source), source.stride(0), column), threads
        )

    def columns(self, outputs: Tensor) -> Tensor:
        """The weights [n, in], bfloat16, of n outputs, without a gate and not of int8."""
        columns = torch.empty((len(outputs), self.in_features), dtype=torch.bfloat16)
        self.columns_call(columns, outputs.contiguous())()
        return columns

    def columns_call(self, columns: Tensor, outputs: Tensor) -> NativeCall:
        """The call of `columns`, for outputs that lie together, which writes to `columns`."""
        return NativeCall(
            loader.loaded().infer_linear_columns,
            *(self.handle, outputs.data_ptr(), len(outputs), columns.data_ptr(), num_threads()),
            kept=(self, outputs, columns),
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[T, in] → [T, out]."""
        out = torch.empty((x.shape[0], self.out_features), dtype=self.out_dtype)
        return self.into(out, x, residual)

    def into(self, out: Tensor, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`out` [T, out], into which the result is written."""
        self.call(out, x, residual)()
        return out

    def call(self, out: Tensor, x: Tensor, residual: Tensor | None = None) -> NativeCall:
        """The call that writes the result of x [T, in] into `out` [T, out]. x is what its memory is
        when the call is made, where its features lie together."""
        assert (x.dtype, x.shape[1]) == (torch.bfloat16, self.in_features)
        assert (out.dtype, out.shape) == (self.out_dtype, (x.shape[0], self.out_features))
        if x.stride(1) != 1:
            x = x.contiguous()
        added = None
        if residual is not None:
            assert (residual.dtype, residual.shape) == (torch.bfloat16, out.shape)
            residual = residual.contiguous()
            added = residual.data_ptr()
        return NativeCall(
            self._apply,
            *(self.handle, x.data_ptr(), x.stride(0), added, out.data_ptr(), x.shape[0]),
            num_threads(),
            kept=(self, x, residual, out),
        )


class PackedEmbedding:
    """An embedding [V, E] as linear layers hold weights; decoders look tokens up as in a tensor.

    It is in blocks, or in bfloat16 where the output head is tied to it, which uses the same memory.
    """

    __slots__ = ("_layer", "_weight", "dtype")

    def __init__(self, weight: BlockWeight | Tensor) -> None:
        self.dtype = torch.bfloat16
        self._layer = NativeLinear([weight])
        # Not the file's memory, which may go now.
        self._weight = (
            replace(weight, rows=None)
            if isinstance(weight, BlockWeight)
            else torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        )

    @property
    def packed(self) -> Tensor:
        """The memory in the order of panels."""
        return self._layer.packed

    def tied_head(self, fusion: Fusion) -> Linear:
        """An output head with this weight."""
        return NativeLinear([self._weight], None, fusion, packed=self.packed)

    def index_select(self, dim: int, tokens: Tensor) -> Tensor:
        """The rows [T, E] of tokens [T]; `dim` is 0."""
        assert dim == 0
        return self._layer.columns(tokens)

    def call(self, rows: Tensor, tokens: Tensor) -> NativeCall:
        """The call that writes the rows of tokens [T] to `rows` [T, E]."""
        return self._layer.columns_call(rows, tokens)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed layout exists for this weight's device and dtype, in this torch."""
    if weight.device.type != "cpu" or not has_onednn("mkldnn", "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return onednn_has_bfloat16()
    return weight.dtype == torch.float32


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of tensors along their first dimension, also of those without memory.

    On the meta device torch computes `torch.cat` in Python, and the first such operation imports
    its compiler: 1.5 s of every start, and 130 MB.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.device.type == "meta":
        return first.new_empty((sum(len(part) for part in parts), *first.shape[1:]))
    return torch.cat(list(parts))


def add_one(weight: Tensor) -> Tensor:
    """1 + weight, in float32. In place, which torch computes in C++ on the meta device; see
    `joined`."""
    return weight.to(torch.float32, copy=True).add_(1.0)


def _numbers(weight: BlockWeight) -> Tensor:
    """The numbers [out, in] of a weight in blocks, bfloat16."""
    return NativeLinear([weight]).columns(torch.arange(weight.shape[0]))


def make_linear(
    weight: Tensor | BlockWeight | Sequence[Tensor] | Sequence[BlockWeight | Int8Weight],
    bias: Tensor | None = None,
    fusion: Fusion = PRODUCT_ONLY,
    *,
    quantization: str | None = None,
    batch_invariant: bool = False,
) -> Linear:
    """The fastest `Linear` for a weight [out, in], or for several with concatenated outputs.

    `quantization`: int8 or int4; None: the weight keeps its dtype. `batch_invariant`: on a GPU only
    kernels are used that can compute a row the same way for every number of rows.
    """
    several: Sequence[Tensor | BlockWeight | Int8Weight]
    several = [weight] if isinstance(weight, (Tensor, BlockWeight)) else weight
    kept = [part for part in several if not isinstance(part, Tensor)]
    parts = [part for part in several if isinstance(part, Tensor)]
    if kept:
        return NativeLinear(kept, bias, fusion)
    is_narrow = parts[0].dtype == torch.bfloat16
    if quantization == "int4" and parts[0].is_cpu:
        parts_in_blocks = [fitted(part.bfloat16()) for part in parts]
        if is_narrow:
            return NativeLinear(parts_in_blocks, bias, fusion)
        parts = [_numbers(part).to(parts[0].dtype) for part in parts_in_blocks]
    elif parts[0].is_cpu and is_narrow and native_obstacle() is None:
        return NativeLinear(parts, bias, fusion, bits=8 if quantization else 16)
    whole = joined(parts)
    if quantization == "int8" and whole.device.type == "cpu":
        return Int8Linear(whole, bias, fusion)
    if quantization == "int8" and whole.is_cuda:
        return CudaInt8Linear(whole, bias, fusion)
    if whole.is_cuda and cuda.obstacle(whole.device) is None:
        return CudaLinear(whole, bias, fusion, invariant=batch_invariant)
    kind = PackedLinear if can_pack(whole) else PlainLinear
    return kind(whole, bias, fusion)
