"""The instruction sets that the tests of kernels run with, and what depends on there being any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from infer.kernels import loader, native
from tests.support import cases

BY_DEFAULT = {"portable", "avx2", "avx512", "neon", *loader.instruction_sets()[:1]}
"""The best set of this machine and one for each length of vectors. The others share the vectors'
functions of one of these but for a product; they are tested with `-m slow`."""

EXACT_DTYPE: Literal["auto", "float32"] = "auto" if native.native_obstacle() is None else "float32"
"""The dtype in which a row has the same bits in any batch: the model's with the native kernels,
float32 without them."""


def each(names: Iterable[str]) -> list[Any]:
    """Parameters for those sets that this machine has; `slow` for those that are not run by
    default. The others are skipped once, by `tests/kernels/test_isa.py`, and not a thousand times.
    """
    here = [name for name in names if name in loader.instruction_sets()]
    return cases.slow_but(BY_DEFAULT, here)
