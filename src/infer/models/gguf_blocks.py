"""Conversion of the tensor types of GGUF files: to float32, and to those that linear layers hold.

The types of `kernels.blocks` are held as they are. IQ4_NL becomes Q8_0 and Q3_K becomes Q6_K,
which hold the same numbers. The numbers of every other quantised type are rounded to Q8_0: in
each 32 numbers to whole multiples of a 127th of the largest one, which is far less than what their
own type has lost. The library converts the usual types (csrc/convert.cpp). The `gguf` package,
imported when it is needed, decodes the rarer ones, in parts that stay in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from infer.kernels.blocks import CONVERTED, NUMBERS, convert
from infer.models.gguf_reader import KINDS, TensorKind

_EXACTLY = {"Q3_K": "Q6_K"}
"""Types whose numbers another type than Q8_0 holds exactly."""
HELD_AS = "Q8_0"
"""Name of the type in which the numbers of types without kernels are held."""
_PART_NUMBERS = 1 << 18
"""Number of weights that are converted at a time."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NOT_QUANTISED = (*_FLOATS, "F64", "I8", "I16", "I32", "I64")
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The whole number of each code of IQ4_NL."""


def held_kind(kind: TensorKind, width: int) -> str | None:
    """The name of the type in which a tensor with rows of `width` numbers is held.

    None if the tensor is not quantised or cannot be read.
    """
    if kind.name in _NOT_QUANTISED or width % kind.block:
        return None
    if kind.name in NUMBERS:
        return kind.name
    if kind.name in _EXACTLY:
        return _EXACTLY[kind.name]
    return HELD_AS if width % KINDS[HELD_AS].block == 0 else None


def as_held(rows: np.ndarray, kind: TensorKind, wanted: str) -> np.ndarray:
    """Rows [n, bytes of a row] of a type as rows of the type `wanted`.

    Rows of that type are returned as they are, without a copy. `NotImplementedError` if the type
    cannot be read.
    """
    if kind.name == wanted:
        return rows
    target = KINDS[wanted]
    blocks = rows.reshape(-1, kind.block_bytes)
    num_found = len(blocks) * kind.block // target.block
    found = np.empty((num_found, target.block_bytes), dtype=np.uint8)
    if kind.name in CONVERTED:
        convert(blocks, kind.name, found, wanted)
        return found.reshape(len(rows), -1)
    for first, part in _parts(blocks, kind):
        decoded = _decoded(part, kind).numpy().reshape(-1, target.block)
        start = first * kind.block // target.block
        convert(decoded, "F32", found[start : start + len(decoded)], wanted)
    return found.reshape(len(rows), -1)


def numbers(rows: np.ndarray, kind: TensorKind) -> Tensor:
    """The numbers [n, width], float32, of rows [n, bytes of a row].

    `NotImplementedError` if the type cannot be read.
    """
    if (dtype := _FLOATS.get(kind.name)) is not None:
        return torch.from_numpy(rows.copy()).view(dtype).float()
    blocks = rows.reshape(-1, kind.block_bytes)
    found = torch.empty((len(blocks), kind.block))
    for first, part in _parts(blocks, kind):
        found[first : first + len(part)] = _decoded(part, kind)
    return found.view(len(rows), -1)


def readable_types() -> list[str]:
    """The names of the tensor types that can be converted to float32."""
    found = []
    for kind in KINDS.values():
        try:
            with np.errstate(all="ignore"):
                numbers(np.zeros((1, kind.block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def _parts(blocks: np.ndarray, kind: TensorKind) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of blocks [n, bytes], each with the number of its first block.

    The first number of a part begins a block of every type.
    """
    step = _PART_NUMBERS // kind.block
    for first in range(0, len(blocks), step):
        yield first, blocks[first : first + step]


def _decoded(blocks: np.ndarray, kind: TensorKind) -> Tensor:
    """The numbers [n, numbers of a block], float32, of blocks [n, bytes]."""
    if (decode := _DECODERS.get(kind.name)) is not None:
        return decode(torch.from_numpy(blocks.copy()))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind.name not in GGMLQuantizationType.__members__:
        raise NotImplementedError(kind.name)
    # The package converts few rows at a time, and so many blocks only as one row.
    row = np.ascontiguousarray(blocks).reshape(1, -1)
    return torch.from_numpy(
        np.require(dequantize(row, GGMLQuantizationType[kind.name]), requirements="W")
    ).view(len(blocks), kind.block)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].clone().view(torch.float16).float()


def _nibbles(blocks: Tensor) -> Tensor:
    """Codes [n, 32] of bytes [n, 16]: first all lower halves, then all upper ones."""
    return torch.cat((blocks & 15, blocks >> 4), dim=1)


def _fifth_bits(blocks: Tensor) -> Tensor:
    """[n, 32]: bit j of 4 bytes times 16."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (blocks[:, :, None] >> shifts & 1).view(len(blocks), 32) << 4


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.float() * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0_codes(blocks: Tensor) -> Tensor:
    return (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).view(torch.int8) - 16


def _iq4_nl_codes(blocks: Tensor) -> Tensor:
    return torch.tensor(_IQ4, dtype=torch.int8)[_nibbles(blocks[:, 2:]).int()]


def _q8_0_codes(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8)


def _q4_0_codes(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).view(torch.int8) - 8


def _scaled(codes: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The decoder of a type with a float16 factor before whole numbers."""
    return lambda blocks: codes(blocks).float() * _halves(blocks, 0)


_DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _scaled(_q4_0_codes),
    "Q4_1": _q4_1,
    "Q5_0": _scaled(_q5_0_codes),
    "Q5_1": _q5_1,
    "Q8_0": _scaled(_q8_0_codes),
    "IQ4_NL": _scaled(_iq4_nl_codes),
}
"""Type → function of blocks [n, bytes] to their numbers; others are decoded by `gguf`."""
