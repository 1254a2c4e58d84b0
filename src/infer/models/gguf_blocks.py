"""Conversion of the tensor types of GGUF files to those in which linear layers hold weights.

Q8_0, Q4_0, Q4_K, Q5_K and Q6_K are held as they are. The numbers of every other quantised type are
rounded to Q8_0: in each 32 numbers to whole multiples of a 127th of the largest one, which is far
less than what their own type has lost.
"""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

from infer.kernels.blocks import NUMBERS

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
    return HELD_AS if width % GGML_QUANT_SIZES[GGMLQuantizationType[HELD_AS]][0] == 0 else None


def as_held(rows: np.ndarray, kind: GGMLQuantizationType, wanted: str, width: int) -> np.ndarray:
    """Rows [n, bytes of a row] of a type as rows of the type `wanted`.

    Rows of that type are returned as they are, without a copy. `NotImplementedError` if the type
    cannot be read.
    """
    if kind.name == wanted:
        return rows
    target = GGMLQuantizationType[wanted]
    block, size = GGML_QUANT_SIZES[target]
    found = np.empty((len(rows), width // block * size), dtype=np.uint8)
    step = max(1, _ROWS_BYTES // (4 * width))
    for start in range(0, len(rows), step):
        part = dequantize(rows[start : start + step], kind)
        found[start : start + step] = quantize(part, target)
    return found
