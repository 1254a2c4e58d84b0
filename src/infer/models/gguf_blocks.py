"""Conversion of the tensor types of GGUF files to those in which linear layers hold weights.

Q8_0, Q4_0, Q4_K, Q5_K and Q6_K are held as they are. Q5_0 and IQ4_NL become Q8_0 and Q3_K becomes
Q6_K, which hold the same numbers. The numbers of every other quantised type are rounded to Q8_0: in
each 32 numbers to whole multiples of a 127th of the largest one, which is far less than what their
own type has lost.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from infer.kernels.blocks import NUMBERS

_EXACTLY = {"Q3_K": "Q6_K"}
"""Types whose numbers another type than Q8_0 holds exactly."""
HELD_AS = "Q8_0"
"""Name of the type in which the numbers of types without kernels are held."""
_ROWS_BYTES = 1 << 26
"""Size of the part of a tensor that is converted through float32 at a time, in bytes."""
_NOT_QUANTISED = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")


def held_kind(kind: GGMLQuantizationType, width: int) -> str | None:
    """The name of the type in which a tensor with rows of `width` numbers is held.

    None if the tensor is not quantised or cannot be read.
    """
    if kind.name in _NOT_QUANTISED or width % GGML_QUANT_SIZES[kind][0]:
        return None
    if kind.name in NUMBERS:
        return kind.name
    if kind.name in _EXACTLY:
        return _EXACTLY[kind.name]
    return HELD_AS if width % GGML_QUANT_SIZES[GGMLQuantizationType[HELD_AS]][0] == 0 else None


def as_held(rows: np.ndarray, kind: GGMLQuantizationType, wanted: str, width: int) -> np.ndarray:
    """Rows [n, bytes of a row] of a type as rows of the type `wanted`.

    Rows of that type are returned as they are, without a copy. `NotImplementedError` if the type
    cannot be read.
    """
    if kind.name == wanted:
        return rows
    if (exactly := _CONVERSIONS.get((kind.name, wanted))) is not None:
        return exactly(rows.reshape(-1, GGML_QUANT_SIZES[kind][1])).reshape(len(rows), -1)
    target = GGMLQuantizationType[wanted]
    block, size = GGML_QUANT_SIZES[target]
    found = np.empty((len(rows), width // block * size), dtype=np.uint8)
    step = max(1, _ROWS_BYTES // (4 * width))
    for start in range(0, len(rows), step):
        part = dequantize(rows[start : start + step], kind)
        found[start : start + step] = quantize(part, target)
    return found


def _whole_numbers(blocks: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks that begin with a float16 factor as Q8_0: the factor, then 32 whole numbers."""
    unscaled = blocks.copy()
    unscaled[:, :2] = np.array([1], dtype=np.float16).view(np.uint8)
    whole = dequantize(unscaled, kind).astype(np.int8).view(np.uint8)
    return np.concatenate([blocks[:, :2], whole], axis=1)


def _q3_k_as_q6_k(blocks: np.ndarray) -> np.ndarray:
    """Both have a factor for 256 numbers and a multiple for each 16; Q3_K's are smaller."""
    count = len(blocks)
    high, low, scales = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    four = scales[:, :8].reshape(count, 1, 8) >> np.array([0, 4], np.uint8).reshape(1, 2, 1)
    two = scales[:, 8:].reshape(count, 1, 4) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    multiples = (four.reshape(count, 16) & 15) | ((two.reshape(count, 16) & 3) << 4)
    shifts = np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1)
    codes = (low.reshape(count, 2, 1, 32) >> shifts).reshape(count, 256) & 3
    bits = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    codes += ((high.reshape(count, 1, 32) >> bits).reshape(count, 256) & 1) << 2
    codes += 28  # its codes are 4 larger than the numbers, Q6_K's are 32 larger
    parts = codes.reshape(count, 2, 4, 32)
    lower, upper = parts & 15, parts >> 4
    lows = lower[:, :, :2] | lower[:, :, 2:] << 4
    highs = upper[:, :, 0] | upper[:, :, 1] << 2 | upper[:, :, 2] << 4 | upper[:, :, 3] << 6
    signed = (multiples.astype(np.int8) - 32).view(np.uint8)
    pieces = [lows.reshape(count, 128), highs.reshape(count, 64), signed, blocks[:, 108:]]
    return np.concatenate(pieces, axis=1)


_CONVERSIONS: dict[tuple[str, str], Callable[[np.ndarray], np.ndarray]] = {
    ("Q5_0", "Q8_0"): lambda blocks: _whole_numbers(blocks, GGMLQuantizationType.Q5_0),
    ("IQ4_NL", "Q8_0"): lambda blocks: _whole_numbers(blocks, GGMLQuantizationType.IQ4_NL),
    ("Q3_K", "Q6_K"): _q3_k_as_q6_k,
}
"""Conversions that keep every number: (type, new type) → function of blocks [n, bytes]."""
