"""`NativeLinear`: a layer by the C++ kernels; `PackedEmbedding`: an embedding as they hold it"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from infer.kernels import loader
from infer.kernels.arena import WEIGHTS
from infer.kernels.blocks import CODES, BlockWeight, numbers_of, packed_bytes, panel_kinds
from infer.kernels.int8_weight import Int8Weight
from infer.kernels.linear.fusion import PRODUCT_ONLY, Fusion, Linear
from infer.kernels.loader import NativeCall
from infer.kernels.native import instruction_set, native_obstacle
from infer.kernels.team import num_threads


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
