"""`BlockWeight`: rows of a weight in the blocks of a GGUF file, or of quantised safetensors

Linear layers hold such weights in the file's own codes and scales (csrc/blocks.h), so nothing is
rounded a second time, and multiply them in integers. Panels of 32 outputs have one type each. The
sources of a fused layer may therefore have several types if each begins with a new panel.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from infer.kernels import loader

if TYPE_CHECKING:
    import torch

NUMBERS = {
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14},
    **{"IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39},
}
"""Number in GGUF files of each type of blocks that linear layers can hold, by its name."""
ZEROED = {"U4_32": 256, "U4_64": 257, "U4_128": 258, "U8_128": 259}
"""Number of each type of blocks that no GGUF file has: whole numbers of 4 or 8 bits, of which
each 32, 64 or 128 inputs share a scale and the number that means zero."""
CODES = {**NUMBERS, **ZEROED}
"""Number in the library of each type of blocks."""
FOUR_BITS = ("Q4_0", "MXFP4", "U4_32", "U4_64", "U4_128")
"""Types with codes of 4 bits in which quantised safetensors are held."""
_FITTED = {"Q4_K": (256, 144), "Q4_1": (32, 20)}
"""Number of inputs and of bytes of a block, of the types that `fitted` makes."""
_FLOATS = 0
"""Number of float32 in GGUF files; `convert` takes 32 numbers for a block."""
PANEL = 32
"""Number of outputs in a panel; with a gate there are 16 of each half."""
IN_BYTES = ("Q4_0", "Q5_0", "IQ4_NL", "Q8_0")
"""Types whose numbers Q8_0 holds without rounding."""
_WIDER = {
    frozenset(("Q4_K", "Q5_K")): "Q5_K",
    frozenset(("Q4_1", "Q5_1")): "Q5_1",
    **{
        frozenset(kinds): "Q5_0" if set(kinds) == {"Q4_0", "Q5_0"} else "Q8_0"
        for count in (2, 3, 4)
        for kinds in combinations(IN_BYTES, count)
    },
}
"""Types of which one can hold the numbers of the other without rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """A weight [out, in] in blocks of one type, which begin anew with each row."""

    kind: str
    """Name of the type, one of `CODES`."""
    shape: tuple[int, int]
    """Number of outputs and inputs."""
    rows: np.ndarray | None
    """Bytes of the rows, [out, bytes of a row]; None: the weight is only planned."""
    stored: str = ""
    """Name of the type in the file; "": it is the same."""

    @property
    def num_weights(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]

    def content(self) -> torch.Tensor:
        """The bytes of the rows as a tensor, for a digest of a model's weights."""
        import torch  # a plan of memory does without

        assert self.rows is not None
        return torch.from_numpy(self.rows[:: max(1, len(self.rows) // 64)].copy())


def fitted_kind(width: int) -> str:
    """The type of the blocks that `fitted` makes of rows with `width` inputs.

    Blocks of Q4_K take 4.5 bits for a weight and hold 256 inputs; those of Q4_1 5 bits and 32.
    """
    return "Q4_1" if width % _FITTED["Q4_K"][0] else "Q4_K"


def fitted_bytes(width: int) -> float:
    """The size of a weight in such blocks, in bytes."""
    inputs, num_bytes = _FITTED[fitted_kind(width)]
    return num_bytes / inputs


def fitted(weight: torch.Tensor) -> BlockWeight:
    """A weight [out, in], bfloat16, in blocks of 4 bits.

    Each 32 inputs have a scale and a minimum with the least squared error of many
    (csrc/block_fit.h). A block with a number that is not finite is not finite.
    """
    import torch

    from infer.kernels.team import num_threads

    assert weight.dtype == torch.bfloat16
    count, width = weight.shape
    inputs, num_bytes = _FITTED[kind := fitted_kind(width)]
    source = weight if weight.stride(1) == 1 else weight.contiguous()
    rows = np.empty((count, -(-width // inputs) * num_bytes), dtype=np.uint8)
    loader.loaded().infer_fit_blocks(
        *(NUMBERS[kind], source.data_ptr(), source.stride(0), count, width, rows.ctypes.data),
        num_threads(),
    )
    return BlockWeight(kind, (count, width), rows)


def panel_kinds(weights: Sequence[BlockWeight], *, gated: bool) -> list[str] | None:
    """The type of each panel of a layer with these weights as its outputs, in their order.

    None if a panel would have outputs of two types that no type can hold.
    """
    kinds = {weight.kind for weight in weights}
    starts = np.cumsum([0, *(weight.shape[0] for weight in weights)])
    if len(kinds) == 1 or frozenset(kinds) in _WIDER:
        kind = weights[0].kind if len(kinds) == 1 else _WIDER[frozenset(kinds)]
        num_outputs = int(starts[-1])
        return [kind] * (
            -(-(num_outputs // 2) // (PANEL // 2)) if gated else -(-num_outputs // PANEL)
        )
    if gated or any(start % PANEL for start in starts[:-1]):
        return None
    return [weight.kind for weight in weights for _ in range(-(-weight.shape[0] // PANEL))]


def packed_bytes(kinds: Sequence[str], width: int) -> int:
    """The size in bytes of panels of these types with `width` inputs."""
    library = loader.loaded()
    sizes = {kind: library.infer_blocks_panel_bytes(CODES[kind], width) for kind in set(kinds)}
    return sum(sizes[kind] for kind in kinds)


def convert(blocks: np.ndarray, kind: str | None, out: np.ndarray) -> None:
    """Write blocks [n, bytes] of a type of `CODES` as blocks of Q8_0 to `out` [n, bytes].

    Or as float32, if `out` is of that. `kind` None: the numbers [n, 32], float32. One pass over
    memory. Both arrays are contiguous.
    """
    from infer.kernels.team import num_threads

    assert blocks.flags.c_contiguous
    assert out.flags.c_contiguous
    number = _FLOATS if kind is None else CODES[kind]
    wanted = _FLOATS if out.dtype == np.float32 else NUMBERS["Q8_0"]
    is_known = loader.loaded().infer_blocks_convert(
        *(blocks.ctypes.data, number, out.ctypes.data, wanted, len(blocks)), num_threads()
    )
    assert is_known, kind


def numbers_of(kinds: Sequence[str]) -> array[int]:
    """The types of panels as the library reads them."""
    return array("i", [CODES[kind] for kind in kinds])
