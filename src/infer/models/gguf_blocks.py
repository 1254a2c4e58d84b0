"""Conversion of the tensor types of GGUF files: to float32, and to those that linear layers hold.

The types of `kernels.blocks` are held as they are. The numbers of every other quantised type are
rounded to Q8_0: in each 32 numbers to whole multiples of a 127th of the largest one, which is far
less than what their own type has lost. The library converts its own types (csrc/convert.cpp). The
`gguf` package, imported when it is needed, decodes the rarer ones, in parts that stay in the
processor's caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from infer.kernels.blocks import NUMBERS, convert
from infer.kernels.loader import available
from infer.models.gguf_reader import KINDS, TensorKind

if TYPE_CHECKING:
    from torch import Tensor

HELD_AS = "Q8_0"
"""Name of the type in which the numbers of types without kernels are held."""
_PART_NUMBERS = 1 << 18
"""Number of weights that are converted at a time."""
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that are not quantised, each with torch's name."""
_NOT_QUANTISED = (*_FLOATS, "F64", "I8", "I16", "I32", "I64")


def held_kind(kind: TensorKind, width: int) -> str | None:
    """The name of the type in which a tensor with rows of `width` numbers is held.

    None if the tensor is not quantised or cannot be read.
    """
    if kind.name in _NOT_QUANTISED or width % kind.block:
        return None
    if kind.name in NUMBERS:
        return kind.name
    return HELD_AS if width % KINDS[HELD_AS].block == 0 else None


def as_held(rows: np.ndarray, kind: TensorKind, wanted: str) -> np.ndarray:
    """Rows [n, bytes of a row] of a type as rows of the type `wanted`, which is its own or Q8_0.

    Rows of that type are returned as they are, without a copy. `NotImplementedError` if the type
    cannot be read.
    """
    if kind.name == wanted:
        return rows
    assert wanted == HELD_AS
    target = KINDS[wanted]
    blocks = rows.reshape(-1, kind.block_bytes)
    num_found = len(blocks) * kind.block // target.block
    out = np.empty((num_found, target.block_bytes), dtype=np.uint8)
    if kind.name in NUMBERS:
        convert(blocks, kind.name, out)
        return out.reshape(len(rows), -1)
    for first, part in _parts(blocks, kind):
        decoded = _decoded(part, kind).reshape(-1, target.block)
        start = first * kind.block // target.block
        convert(decoded, None, out[start : start + len(decoded)])
    return out.reshape(len(rows), -1)


def numbers(rows: np.ndarray, kind: TensorKind) -> Tensor:
    """The numbers [n, width], float32, of rows [n, bytes of a row].

    `NotImplementedError` if the type cannot be read.
    """
    import torch  # a plan of memory does without

    if (name := _FLOATS.get(kind.name)) is not None:
        return torch.from_numpy(rows.copy()).view(getattr(torch, name)).float()
    blocks = rows.reshape(-1, kind.block_bytes)
    out = torch.empty((len(blocks), kind.block))
    if kind.name in NUMBERS and available() is None:
        convert(np.ascontiguousarray(blocks), kind.name, out.numpy())
        return out.view(len(rows), -1)
    for first, part in _parts(blocks, kind):
        out[first : first + len(part)] = torch.from_numpy(_decoded(part, kind))
    return out.view(len(rows), -1)


def readable_types() -> list[str]:
    """The names of the tensor types that can be converted to float32."""
    names = []
    for kind in KINDS.values():
        try:
            with np.errstate(all="ignore"):
                numbers(np.zeros((1, kind.block_bytes), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


def _parts(blocks: np.ndarray, kind: TensorKind) -> Iterator[tuple[int, np.ndarray]]:
    """Parts of blocks [n, bytes], each with the number of its first block.

    The first number of a part begins a block of every type.
    """
    step = _PART_NUMBERS // kind.block
    for first in range(0, len(blocks), step):
        yield first, blocks[first : first + step]


def _decoded(blocks: np.ndarray, kind: TensorKind) -> np.ndarray:
    """The numbers [n, numbers of a block], float32, of blocks [n, bytes]."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind.name not in GGMLQuantizationType.__members__:
        raise NotImplementedError(kind.name)
    # The package converts few rows at a time, and so many blocks only as one row.
    row = np.ascontiguousarray(blocks).reshape(1, -1)
    floats = np.require(dequantize(row, GGMLQuantizationType[kind.name]), requirements="W")
    return floats.reshape(len(blocks), kind.block)
