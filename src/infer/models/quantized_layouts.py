"""The layouts of quantised weights in safetensors files: what tensors a layer has, and its numbers.

A layout says which tensors a layer has and which shapes they have, so that a file is checked by its
headers. It reads them as `WholeNumbers`: integers, scales and the group of each input. `floats`
makes plain numbers of these, `as_blocks` blocks and `as_int8` an int8 weight, both exactly. The
layouts without integers (FP8, NF4) are read as floats only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels.blocks import BlockWeight
from infer.kernels.int8_weight import Int8Weight
from infer.models.quantization import Scheme

_PART_NUMBERS = 1 << 22
"""Number of weights that are widened at a time."""
Read = Callable[[str], Tensor]
"""(name of a tensor of a layer behind the layer's name) → the tensor."""
Size = tuple[int, int]
"""Number of a weight's outputs and inputs."""


class Info(NamedTuple):
    """A tensor as its file's header has it."""

    dtype: str
    """As safetensors writes it, such as BF16."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of a layer."""

    dtypes: tuple[str, ...]
    """Those that it may have."""
    shapes: Callable[[Scheme, Size], tuple[tuple[int, ...], ...]]
    """Function that returns the shapes that it may have."""
    needed: Callable[[Scheme], bool] = lambda scheme: True
    """Function that returns whether a layer must have it."""
    known: Callable[[Scheme], bool] = lambda scheme: True
    """Function that returns whether a layer may have it."""


@dataclass(frozen=True, slots=True, eq=False)
class WholeNumbers:
    """A weight [out, in] as integers times scales."""

    codes: Tensor
    """The integers, [out, in] int8 or int16."""
    scales: Tensor
    """[out, groups] float32."""
    groups: Tensor | None
    """The group of each input, [in]; None: groups of neighbours of the same size."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The small tensors of a weight: what its integers mean."""

    scales: Tensor
    """[out, groups] float32."""
    zeros: Tensor | None = None
    """The integer that means zero, [out, groups] int16; None: it is 0."""
    groups: Tensor | None = None
    """The group of each input, [in]; None: groups of neighbours of the same size."""
    lowest: int = 0
    """The smallest stored integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a layer's weight lies in its tensors."""

    marker: str
    """Name of the tensor that has the numbers, behind the layer's name."""
    parts: Mapping[str, Part]
    """The tensors by their names behind the layer's name."""
    size: Callable[[Scheme, Mapping[str, Info], Read], Size]
    """Function that returns a weight's size."""
    factors: Callable[[Scheme, Size, Read], Factors]
    """Function that reads the small tensors; `ValueError` says what is wrong with one."""
    codes: Callable[[Scheme, Size, Read], Tensor] | None = None
    """Function that reads the integers [out, in], int8 or uint8; None: there are none."""
    floats: Callable[[Scheme, Size, Read], Tensor] | None = None
    """Function that reads the numbers [out, in], float32, of a layout without integers."""
    left_out: tuple[str, ...] = ()
    """Names of tensors of a layer that are not used: scales of activations, which have others."""

    @property
    def names(self) -> Iterator[str]:
        """The names of all tensors behind the layer's name, the longest first."""
        yield from sorted((*self.parts, *self.left_out), key=len, reverse=True)


def numbers_of(layout: Layout, scheme: Scheme, size: Size, read: Read) -> WholeNumbers:
    """The integers and scales of a weight."""
    assert layout.codes is not None
    factors = layout.factors(scheme, size, read)
    codes = layout.codes(scheme, size, read)
    if factors.zeros is None:
        return WholeNumbers(codes, factors.scales, factors.groups)
    wide = codes.to(torch.int16 if scheme.bits > 4 else torch.int8)
    zeros = factors.zeros.to(wide.dtype)
    if factors.groups is not None:
        wide -= zeros[:, factors.groups.long()]
    else:
        grouped = wide.view(len(wide), zeros.shape[1], -1)
        grouped -= zeros[:, :, None]
    if wide.dtype == torch.int16 and wide.numel() and wide.min() >= -128 and wide.max() <= 127:
        wide = wide.to(torch.int8)
    return WholeNumbers(wide, factors.scales, factors.groups)


def floats(layout: Layout, scheme: Scheme, size: Size, read: Read, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] of a weight: exact products, rounded once to `dtype`."""
    if layout.floats is not None:
        return layout.floats(scheme, size, read).to(dtype)
    whole = numbers_of(layout, scheme, size, read)
    out = torch.empty(size, dtype=dtype)
    step = max(1, _PART_NUMBERS // size[1])
    for first in range(0, size[0], step):
        some = slice(first, first + step)
        scales, codes = whole.scales[some], whole.codes[some].float()
        if whole.groups is not None:
            out[some] = codes * scales[:, whole.groups.long()]
        else:
            grouped = codes.view(len(codes), scales.shape[1], -1)
            out[some] = (grouped * scales[:, :, None]).view(codes.shape)
    return out


def is_float16(scales: Tensor) -> bool:
    """Whether all numbers are numbers of float16."""
    return bool((scales.half().float() == scales).all())


def as_int8(whole: WholeNumbers) -> Int8Weight:
    """The same numbers as an int8 weight; each output has one scale."""
    rows, width = whole.codes.shape
    return Int8Weight((rows, width), whole.codes, whole.scales[:, 0].contiguous())


def as_blocks(layout: Layout, scheme: Scheme, size: Size, read: Read, kind: str) -> BlockWeight:
    """The same numbers in blocks of a type that can hold them; rows are filled up with zeros."""
    if kind.startswith("U"):
        rows = _zeroed_blocks(layout, scheme, size, read, int(kind.partition("_")[2]))
        return BlockWeight(kind, size, rows.numpy())
    whole = numbers_of(layout, scheme, size, read)
    codes = _filled(whole.codes.to(torch.int8), 32)
    scales = _spread_out(whole.scales, codes.shape[1])
    if kind == "MXFP4":
        # Factors are halves of powers of two, numbers twice those of their codes.
        factors = (torch.frexp(scales)[1] + 127).to(torch.uint8)[:, :, None]
        unsigned = torch.tensor(_E2M1_CODES, dtype=torch.uint8)[(codes + _E2M1[7]).int()]
    else:
        factors = _bytes_of(scales)
        unsigned = (codes + (8 if kind == "Q4_0" else 0)).view(torch.uint8)
    parts = [factors, unsigned if kind == "Q8_0" else _nibbles(unsigned)]
    return BlockWeight(kind, size, torch.cat(parts, 2).view(size[0], -1).numpy())


def _zeroed_blocks(layout: Layout, scheme: Scheme, size: Size, read: Read, inputs: int) -> Tensor:
    """The rows of a weight in blocks of that many inputs with a zero point each (csrc/blocks.h)."""
    assert layout.codes is not None
    factors = layout.factors(scheme, size, read)
    middle = 0 if scheme.bits <= 4 else 128
    codes = layout.codes(scheme, size, read)
    lowest = -128 if codes.dtype == torch.int8 else 0
    codes = _filled((codes.view(torch.uint8) ^ 0x80) if lowest else codes, inputs)
    scales = _spread_out(factors.scales, codes.shape[1])
    zeros = torch.zeros_like(factors.scales) if factors.zeros is None else factors.zeros
    zeros = _spread_out((zeros - lowest - middle).to(torch.int8), codes.shape[1])
    numbers = codes if middle else _nibbles(codes.view(size[0], -1, 32)).view(*codes.shape[:2], -1)
    parts = [_bytes_of(scales), zeros.view(torch.uint8)[:, :, None]]
    return torch.cat([*parts, torch.zeros_like(parts[1]), numbers], 2).view(size[0], -1)


def _filled(codes: Tensor, inputs: int) -> Tensor:
    """Codes [out, in] as [out, blocks, inputs], with zeros behind the last one."""
    return F.pad(codes, (0, -codes.shape[1] % inputs)).view(len(codes), -1, inputs)


def _spread_out(shared: Tensor, count: int) -> Tensor:
    """What groups share, [out, groups], for each of `count` blocks, [out, count]."""
    return shared.repeat_interleave(-(-count // shared.shape[1]), 1)


def _bytes_of(scales: Tensor) -> Tensor:
    return scales.half().contiguous().view(torch.uint8).view(*scales.shape, 2)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes of 4 bits [out, blocks, 32], uint8, as files have them: [out, blocks, 16]."""
    return codes[:, :, :16] | codes[:, :, 16:] << 4


# What several layouts share


def _scale_shapes(scheme: Scheme, size: Size) -> tuple[tuple[int, ...], ...]:
    rows, width = size
    if scheme.strategy == "block":
        assert scheme.block is not None
        return ((-(-rows // scheme.block[0]), -(-width // scheme.block[1])),)
    if scheme.strategy == "group":
        return ((rows, width // (scheme.group or width)),)
    if scheme.strategy == "channel":
        return ((rows, 1), (rows,), (1,), ())
    return ((1,), (), (1, 1))


def _checked(scales: Tensor, name: str) -> Tensor:
    """Scales in float32; `ValueError` if one is zero or not finite."""
    wide = scales.float()
    if wide.numel() and not bool(wide.isfinite().all()):
        raise ValueError(f"{name} has scales that are not finite; scales must be numbers above 0")
    if bool((wide == 0).any()):
        raise ValueError(f"{name} has scales of zero; scales must be numbers above 0")
    return wide


def _spread(scales: Tensor, scheme: Scheme, size: Size) -> Tensor:
    """Scales of any strategy as [out, groups]."""
    if scheme.strategy == "block":
        assert scheme.block is not None
        return scales.repeat_interleave(scheme.block[0], 0)[: size[0]]
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(size[0], 1).contiguous()
    return scales.reshape(size[0], -1)


def _order(read: Read, name: str, width: int, group: int) -> Tensor | None:
    """The group of each input, [in]; None if those of a group are neighbours."""
    groups = read(name)
    count = width // group
    if bool(((groups < 0) | (groups >= count)).any()):
        raise ValueError(f"{name} names groups from {int(groups.min())} to {int(groups.max())};"
                         f" there are groups 0 to {count - 1}")  # fmt: skip
    usual = torch.arange(width) // group
    return None if torch.equal(groups.long(), usual) else groups


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The numbers [n, count], uint8, that lie in words [n, m], int32, one behind the other, the
    lowest bits first."""
    words = words.contiguous()
    if bits == 3:
        wide = torch.cat([words.long() & 0xFFFFFFFF, words.new_zeros((len(words), 1)).long()], 1)
        at = torch.arange(count) * 3
        pairs = wide[:, at // 32] | wide[:, at // 32 + 1] << 32
        return (pairs >> at % 32 & 7).to(torch.uint8)
    octets = words.view(torch.uint8)
    per_byte = 8 // bits
    out = torch.empty((*octets.shape, per_byte), dtype=torch.uint8)
    for i in range(per_byte):
        out[..., i] = octets >> i * bits & (1 << bits) - 1
    return out.view(len(octets), -1)[:, :count].contiguous()


_FLOAT = ("F16", "BF16", "F32")
_SCALES = Part(dtypes=_FLOAT, shapes=_scale_shapes)


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _shape_of(name: str) -> Callable[[Scheme, Mapping[str, Info], Read], Size]:
    def size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
        shape = infos[name].shape
        if len(shape) != 2:
            raise ValueError(f"{name} is {list(shape)}, should have two dimensions")
        return shape[0], shape[1]

    return size


def _pairs_of(name: str) -> Callable[[Scheme, Mapping[str, Info], Read], Size]:
    def size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
        rows, columns = _shape_of(name)(scheme, infos, read)
        return rows, 2 * columns

    return size


# compressed-tensors: int-quantized and pack-quantized


def _int8_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    scales = _spread(_checked(read("weight_scale"), "weight_scale"), scheme, size)
    groups = None
    if scheme.block is not None and size[1] % scheme.block[1]:
        groups = torch.arange(size[1]) // scheme.block[1]
    if not _has(read, "weight_zero_point"):
        return Factors(scales, groups=groups)
    zeros = _spread(read("weight_zero_point"), scheme, size).to(torch.int16)
    return Factors(scales, zeros if bool(zeros.any()) else None, groups, lowest=-128)


_INT8 = Layout(
    marker="weight",
    parts={
        "weight": Part(dtypes=("I8",), shapes=lambda scheme, size: (size,)),
        "weight_scale": _SCALES,
        "weight_zero_point": Part(
            dtypes=("I8",),
            shapes=_scale_shapes,
            needed=lambda scheme: not scheme.symmetric,
        ),
    },
    size=_shape_of("weight"),
    factors=_int8_factors,
    codes=lambda scheme, size, read: read("weight"),
    left_out=("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
)


def _packed_size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
    info = infos["weight_shape"]
    if info.shape != (2,) or info.dtype not in ("I64", "I32"):
        raise ValueError(f"weight_shape is {info.dtype} {list(info.shape)}, should be I64 [2]")
    rows, width = (int(side) for side in read("weight_shape").tolist())
    if rows < 1 or width < 1:
        raise ValueError(f"weight_shape is {rows} × {width}, should be the weight's size")
    return rows, width


def _packed_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    scales = _spread(_checked(read("weight_scale"), "weight_scale"), scheme, size)
    half = 1 << scheme.bits - 1
    if scheme.symmetric:
        zeros = torch.full(scales.shape, half, dtype=torch.int16)
    else:
        stored = read("weight_zero_point")
        zeros = unpacked(stored.T, scheme.bits, size[0]).T.to(torch.int16)
    groups = None
    if scheme.any_order and scheme.group:
        groups = _order(read, "weight_g_idx", size[1], scheme.group)
    return Factors(scales, zeros, groups)


_PACKED = Layout(
    marker="weight_packed",
    parts={
        "weight_packed": Part(
            dtypes=("I32",),
            shapes=lambda scheme, size: ((size[0], _words(size[1], scheme.bits)),),
        ),
        "weight_scale": _SCALES,
        "weight_shape": Part(dtypes=("I64", "I32"), shapes=lambda scheme, size: ((2,),)),
        "weight_zero_point": Part(
            dtypes=("I32",),
            shapes=lambda scheme, size: (
                (_words(size[0], scheme.bits), _scale_shapes(scheme, size)[0][1]),
            ),
            needed=lambda scheme: not scheme.symmetric,
            known=lambda scheme: not scheme.symmetric,
        ),
        "weight_g_idx": Part(
            dtypes=("I32", "I64"),
            shapes=lambda scheme, size: ((size[1],),),
            needed=lambda scheme: scheme.any_order and scheme.strategy == "group",
            known=lambda scheme: scheme.any_order,
        ),
    },
    size=_packed_size,
    factors=_packed_factors,
    codes=lambda scheme, size, read: unpacked(read("weight_packed"), scheme.bits, size[1]),
    left_out=("input_scale", "input_zero_point", "output_scale"),
)


# GPTQ and AWQ: matrices are [in, out]


def _groups_of(scheme: Scheme, width: int) -> int:
    return width // (scheme.group or width)


def _gptq_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    rows, width = size
    scales = _checked(read("scales"), "scales").T.contiguous()
    stored = unpacked(read("qzeros"), scheme.bits, rows)
    zeros = (stored.to(torch.int16) + scheme.zero_offset).T.contiguous()
    groups = None
    if _has(read, "g_idx"):
        groups = _order(read, "g_idx", width, scheme.group or width)
    return Factors(scales, zeros, groups)


def _has(read: Read, name: str) -> bool:
    try:
        read(name)
    except KeyError:
        return False
    return True


def _gptq_codes(scheme: Scheme, size: Size, read: Read) -> Tensor:
    return unpacked(read("qweight").T, scheme.bits, size[1])


def _gptq_size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
    words, rows = _shape_of("qweight")(scheme, infos, read)
    return rows, words * 32 // scheme.bits


_TURNED_SCALES = Part(
    dtypes=_FLOAT, shapes=lambda scheme, size: ((_groups_of(scheme, size[1]), size[0]),)
)
_TURNED_ZEROS = Part(
    dtypes=("I32",),
    shapes=lambda scheme, size: ((_groups_of(scheme, size[1]), _words(size[0], scheme.bits)),),
)
_GPTQ = Layout(
    marker="qweight",
    parts={
        "qweight": Part(
            dtypes=("I32",),
            shapes=lambda scheme, size: ((_words(size[1], scheme.bits), size[0]),),
        ),
        "qzeros": _TURNED_ZEROS,
        "scales": _TURNED_SCALES,
        "g_idx": Part(
            dtypes=("I32", "I64"),
            shapes=lambda scheme, size: ((size[1],),),
            needed=lambda scheme: scheme.any_order and scheme.strategy == "group",
        ),
    },
    size=_gptq_size,
    factors=_gptq_factors,
    codes=_gptq_codes,
)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of its eight outputs."""


def _awq_unpacked(words: Tensor) -> Tensor:
    """The numbers [n, 8 m] of words [n, m]."""
    in_words = unpacked(words, 4, words.shape[1] * 8).view(len(words), -1, 8)
    return in_words[:, :, list(_AWQ_PLACES)].reshape(len(words), -1)


def _awq_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    scales = _checked(read("scales"), "scales").T.contiguous()
    return Factors(scales, _awq_unpacked(read("qzeros")).T.to(torch.int16))


def _awq_size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
    width, words = _shape_of("qweight")(scheme, infos, read)
    return words * 8, width


_AWQ = Layout(
    marker="qweight",
    parts={
        "qweight": Part(
            dtypes=("I32",), shapes=lambda scheme, size: ((size[1], _words(size[0], 4)),)
        ),
        "qzeros": _TURNED_ZEROS,
        "scales": _TURNED_SCALES,
    },
    size=_awq_size,
    factors=_awq_factors,
    codes=lambda scheme, size, read: _awq_unpacked(read("qweight")).T.contiguous(),
)


# FP8, MXFP4, NVFP4

_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the number of each code."""
_E2M1_CODES = [_E2M1.index(number) if number in _E2M1 else 0 for number in range(-12, 13)]
"""The code of each whole number from -12 on, twice the code's."""
_POWERS = ("U8", "F8_E8M0")


def _powers(stored: Tensor, name: str) -> Tensor:
    """2^(s - 127) of bytes s, float32; `ValueError` if one is not a number."""
    octets = stored.view(torch.uint8)
    if bool((octets == 255).any()):
        raise ValueError(f"{name} has scales that are not numbers (byte 255)")
    return torch.pow(2.0, octets.double() - 127).float()


def _fp8_scale(read: Read) -> tuple[Tensor, str]:
    name = "weight_scale_inv" if _has(read, "weight_scale_inv") else "weight_scale"
    stored = read(name)
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _powers(stored, name), name
    return _checked(stored, name), name


def _fp8_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    return Factors(_spread(_fp8_scale(read)[0], scheme, size))


def _fp8_floats(scheme: Scheme, size: Size, read: Read) -> Tensor:
    scales = _spread(_fp8_scale(read)[0], scheme, size)
    weight = read("weight").float()
    if scheme.block is not None:
        scales = scales.repeat_interleave(scheme.block[1], 1)[:, : size[1]]
    return weight.mul_(scales)


_FP8_SCALES = (*_FLOAT, *_POWERS)
_FP8 = Layout(
    marker="weight",
    parts={
        "weight": Part(dtypes=("F8_E4M3",), shapes=lambda scheme, size: (size,)),
        **{
            name: Part(dtypes=_FP8_SCALES, shapes=_scale_shapes, needed=lambda scheme: False)
            for name in ("weight_scale_inv", "weight_scale")
        },
    },
    size=_shape_of("weight"),
    factors=_fp8_factors,
    floats=_fp8_floats,
    left_out=("input_scale", "activation_scale", "output_scale"),
)


def _e2m1(octets: Tensor) -> Tensor:
    """Twice the numbers [n, 2 m], int8, of bytes [n, m]."""
    codes = torch.stack([octets & 15, octets >> 4], 2).view(len(octets), -1)
    return torch.tensor(_E2M1, dtype=torch.int8)[codes.int()]


def _fp4(numbers: str, scales: str, inner: bool) -> Layout:
    """MXFP4 under these names. `inner`: the bytes of a block are a dimension of their own."""

    def shapes(scheme: Scheme, size: Size) -> tuple[tuple[int, ...], ...]:
        return ((size[0], size[1] // 32, 16) if inner else (size[0], size[1] // 2),)

    def size_of(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
        shape = infos[numbers].shape
        if len(shape) != (3 if inner else 2):
            raise ValueError(
                f"{numbers} is {list(shape)}, should have {3 if inner else 2} dimensions"
            )
        return shape[0], 2 * math.prod(shape[1:])

    return Layout(
        marker=numbers,
        parts={
            numbers: Part(dtypes=("U8",), shapes=shapes),
            scales: Part(dtypes=_POWERS, shapes=_scale_shapes),
        },
        size=size_of,
        factors=lambda scheme, size, read: Factors(_powers(read(scales), scales) / 2),
        codes=lambda scheme, size, read: _e2m1(read(numbers).view(size[0], -1)),
        left_out=("input_scale", "output_scale"),
    )


def _nvfp4_floats(scheme: Scheme, size: Size, read: Read) -> Tensor:
    scales = _nvfp4_factors(scheme, size, read).scales
    codes = _e2m1(read("weight_packed")).float().view(size[0], -1, 16)
    return (codes * scales[:, :, None]).view(size)


def _nvfp4_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    whole = _checked(read("weight_global_scale"), "weight_global_scale")
    scales = read("weight_scale").float()
    if not bool(scales.isfinite().all()):  # those of blocks of zeros are zero
        raise ValueError("weight_scale has scales that are not finite")
    return Factors(scales / (2 * whole))


_NVFP4 = Layout(
    marker="weight_packed",
    parts={
        "weight_packed": Part(
            dtypes=("U8",), shapes=lambda scheme, size: ((size[0], size[1] // 2),)
        ),
        "weight_scale": Part(dtypes=("F8_E4M3",), shapes=_scale_shapes),
        "weight_global_scale": Part(
            dtypes=("F32", "BF16", "F16"), shapes=lambda scheme, size: ((1,), ())
        ),
    },
    size=_pairs_of("weight_packed"),
    factors=_nvfp4_factors,
    floats=_nvfp4_floats,
    left_out=("input_global_scale", "output_scale"),
)


# bitsandbytes

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
_MAX_STATE_BYTES = 4096


def _state(read: Read) -> dict[str, Any]:
    """What a layer says about itself; `ValueError` if it cannot be read."""
    name = next((candidate for candidate in _STATES if _has(read, candidate)), None)
    if name is None:
        raise KeyError(f"{_STATES[0]} is missing")
    try:
        state: Any = json.loads(bytes(read(name).tolist()))
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is no JSON object") from None
    sizes = [state.get("blocksize")] if isinstance(state, dict) else []
    shape = state.get("shape") if isinstance(state, dict) else None
    sizes += shape if isinstance(shape, list) and len(shape) == 2 else [None]
    sizes += [state.get("nested_blocksize", 256)] if isinstance(state, dict) else []
    if any(type(number) is not int or not 1 <= number < 2**31 for number in sizes):
        raise ValueError(f"{name} must have blocksize and shape, numbers above 0")
    return dict(state)


def _nf4_size(scheme: Scheme, infos: Mapping[str, Info], read: Read) -> Size:
    for name in _STATES:
        if name in infos and math.prod(infos[name].shape) > _MAX_STATE_BYTES:
            raise ValueError(f"{name} has more than {_MAX_STATE_BYTES} bytes")
    shape = _state(read)["shape"]
    count = -(-math.prod(shape) // _state(read)["blocksize"])
    absmax = infos["weight.absmax"]
    if math.prod(absmax.shape) != count:
        raise ValueError(f"weight.absmax is {list(absmax.shape)}, should be [{count}]")
    nested = infos.get("weight.nested_absmax")
    if absmax.dtype == "U8":
        for name in ("weight.nested_absmax", "weight.nested_quant_map"):
            if name not in infos:
                raise KeyError(f"{name} is missing")
        assert nested is not None
        wanted = -(-count // _state(read).get("nested_blocksize", 256))
        if math.prod(nested.shape) != wanted:
            raise ValueError(f"weight.nested_absmax is {list(nested.shape)}, should be [{wanted}]")
    return shape[0], shape[1]


def _nf4_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    """The factor of each block of the flattened weight, [1, blocks]; it may be zero."""
    absmax = read("weight.absmax").flatten()
    if absmax.dtype == torch.uint8:
        state = _state(read)
        offset, step = state.get("nested_offset", 0.0), state.get("nested_blocksize", 256)
        if not isinstance(offset, (int, float)) or not math.isfinite(offset):
            raise ValueError(f"nested_offset is {offset!r:.80}, should be a finite number")
        nested = _checked(read("weight.nested_absmax"), "weight.nested_absmax").flatten()
        table = read("weight.nested_quant_map").float().flatten()
        absmax = table[absmax.int()] * nested.repeat_interleave(step)[: len(absmax)] + offset
    if not bool(absmax.isfinite().all()):
        raise ValueError("weight.absmax has numbers that are not finite")
    return Factors(absmax.float()[None])


def _nf4_floats(scheme: Scheme, size: Size, read: Read) -> Tensor:
    state = _state(read)
    absmax = _nf4_factors(scheme, size, read).scales[0]
    octets = read("weight").flatten()
    codes = torch.stack([octets >> 4, octets & 15], 1).flatten()[: math.prod(size)]
    weight = read("weight.quant_map").float().flatten()[codes.int()]
    return weight.mul_(absmax.repeat_interleave(state["blocksize"])[: len(weight)]).view(size)


def _halved(scheme: Scheme, size: Size) -> tuple[tuple[int, ...], ...]:
    count = -(-math.prod(size) // 2)
    return ((count, 1), (1, count), (count,))


_NF4 = Layout(
    marker="weight",
    parts={
        "weight": Part(dtypes=("U8",), shapes=_halved),
        # Their sizes follow from the layer's own description, which `size` reads.
        **{
            name: Part(dtypes=(*_FLOAT, "U8"), shapes=lambda scheme, size: (), needed=needed)
            for name, needed in (
                ("weight.absmax", lambda scheme: True),
                ("weight.nested_absmax", lambda scheme: False),
            )
        },
        "weight.quant_map": Part(dtypes=_FLOAT, shapes=lambda scheme, size: ((16,),)),
        "weight.nested_quant_map": Part(
            dtypes=_FLOAT, shapes=lambda scheme, size: ((256,),), needed=lambda scheme: False
        ),
        **{
            name: Part(dtypes=("U8",), shapes=lambda scheme, size: (), needed=lambda scheme: False)
            for name in _STATES
        },
    },
    size=_nf4_size,
    factors=_nf4_factors,
    floats=_nf4_floats,
)


def _bnb_int8_factors(scheme: Scheme, size: Size, read: Read) -> Factors:
    if _has(read, "weight_format") and bool(read("weight_format").any()):
        raise ValueError("weight_format is not 0: only rows in their own order are read")
    scales = read("SCB").float()
    if not bool(scales.isfinite().all()):  # those of rows of zeros are zero
        raise ValueError("SCB has scales that are not finite")
    return Factors(scales[:, None] / 127)


_BNB_INT8 = Layout(
    marker="weight",
    parts={
        "weight": Part(dtypes=("I8",), shapes=lambda scheme, size: (size,)),
        "SCB": Part(dtypes=("F32",), shapes=lambda scheme, size: ((size[0],),)),
        "weight_format": Part(
            dtypes=("U8",), shapes=lambda scheme, size: ((), (1,)), needed=lambda scheme: False
        ),
    },
    size=_shape_of("weight"),
    factors=_bnb_int8_factors,
    codes=lambda scheme, size, read: read("weight"),
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "int8": _INT8,
        "packed": _PACKED,
        "gptq": _GPTQ,
        "awq": _AWQ,
        "fp8": _FP8,
        "mxfp4": _fp4("weight_packed", "weight_scale", inner=False),
        "mxfp4 of transformers": _fp4("weight_blocks", "weight_scales", inner=True),
        "nvfp4": _NVFP4,
        "nf4": _NF4,
        "int8 of bitsandbytes": _BNB_INT8,
    }
)
"""The layouts by their names in `Scheme`."""
