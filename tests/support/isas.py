"""The instruction sets that the tests of kernels run with, and what depends on there being any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import pytest

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


def in_turns(
    values: Iterable[tuple[Any, ...]], every: int = 2, slow: Iterable[tuple[Any, ...]] = ()
) -> list[Any]:
    """Values of parameters, each with a set behind them: by default with every second one (or
    `every`) of those that `each` runs by default, in turns, so that each value and each set is
    tried. The others are `slow`, and so are all values of `slow`."""
    usual = [name for name in loader.instruction_sets() if name in BY_DEFAULT]
    every = min(every, len(usual))
    tried = list(values)
    found = []
    for i, value in enumerate([*tried, *(value for value in slow if value not in tried)]):
        for name in loader.instruction_sets():
            is_usual = i < len(tried) and name in usual and (i + usual.index(name)) % every == 0
            marks = () if is_usual else pytest.mark.slow
            shown = "-".join(map(str, (*value, name)))
            found.append(pytest.param(*value, name, marks=marks, id=shown))
    return found
