"""The sources of the kernels, for tests that compile them by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).parents[2] / "src/infer/csrc"


def kernel_sources(sets: Sequence[str]) -> list[Path]:
    """All files that a library with some instruction sets is made of."""
    names = ["dispatch", "portable", *sets, *(f"{name}_blocks" for name in sets)]
    of_sets = [CSRC / f"isa/{name}.cpp" for name in names]
    return [*sorted(CSRC.glob("*.cpp")), *(path for path in of_sets if path.is_file())]
