"""`Quantization`: how the linear layers of a quantised checkpoint are stored, as its config says.

`models.quantized_config` reads it from a config, `models.quantized_layouts` has the layouts that a
`Scheme` names. The module imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = (("Q4_0", -8, 7), ("Q5_0", -16, 15), ("Q8_0", -128, 127))
"""Types of blocks with a scale for each 32 inputs, and the whole numbers that each can hold; the
smallest first."""
INT8 = "int8"
"""Name of the form of weights in int8 with one scale an output, whose layer rounds its input to
int8, too."""
_MOST_REPEATS = 3
_MOST_CHARS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How the weight of a linear layer is stored."""

    layout: str
    """Name of the layout of its tensors, one of `quantized_layouts.LAYOUTS`."""
    bits: int
    """Number of bits of a stored number."""
    strategy: str = "group"
    """What has a scale of its own: "group" (inputs of an output), "channel" (an output), "block" (a
    rectangle) or "tensor"."""
    group: int | None = None
    """Number of inputs in a group."""
    block: tuple[int, int] | None = None
    """Number of outputs and inputs in a block."""
    symmetric: bool = True
    """Whether the number that means zero is the same everywhere."""
    zero_offset: int = 0
    """What is added to a stored zero point."""
    any_order: bool = False
    """Whether the inputs of a group need not be neighbours."""
    int8_rows: bool = False
    """Whether activations are rounded to int8 with one scale a row."""

    @property
    def span(self) -> tuple[int, int]:
        """Least and largest whole number that a weight is before it is scaled."""
        if self.layout.startswith("mxfp4"):
            return -12, 12
        if self.symmetric:
            return -(1 << self.bits - 1), (1 << self.bits - 1) - 1
        most = (1 << self.bits) - 1
        return -most - self.zero_offset, most

    @property
    def held(self) -> str | None:
        """The form in which kernels hold such weights without rounding, by its name: `INT8` or a
        type of blocks. None: they are widened. A file's values may need more room."""
        if self.layout in WIDENED or self.any_order:
            return None
        if self.int8_rows and self.strategy in ("channel", "tensor") and self.symmetric:
            return INT8
        return held_in(self.span, self.inputs)

    @property
    def inputs(self) -> int | None:
        """Number of inputs with one scale; None: all of an output."""
        if self.strategy == "block" and self.block is not None:
            return self.block[1]
        return self.group if self.strategy == "group" else None

    def __str__(self) -> str:
        shared = f" in groups of {self.group}" if self.strategy == "group" and self.group else ""
        shared = " in blocks of {} × {}".format(*self.block) if self.block else shared
        plain = self.layout in ("packed", "gptq", "awq")
        return f"{f'{self.bits} bits' if plain else self.layout}{shared}"


WIDENED = ("fp8", "nvfp4", "nf4", "int8 of bitsandbytes")
"""Layouts whose numbers no kernel holds."""


def held_in(span: tuple[int, int], group: int | None) -> str | None:
    """The type of blocks that holds whole numbers of `span` with a scale for each `group` inputs
    (None: one for each output); None if there is none."""
    if group is not None and group % 32:
        return None
    return next((name for name, low, high in BLOCKS if low <= span[0] and span[1] <= high), None)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which layers have a scheme."""

    pattern: str
    """What a layer's name must be: "re:" and a regular expression for its beginning, "part:" and a
    part of it, "" (any), or a name whose last part may be all that is given."""
    scheme: Scheme | None
    """None: the layers are left alone."""

    def holds(self, module: str) -> bool:
        """Whether the rule is for a layer, by its name in the file without `.weight`."""
        kind, _, rest = self.pattern.partition(":")
        if kind == "re":
            return re.match(rest, module) is not None
        if kind == "part":
            return rest in module
        return not self.pattern or f".{module}".endswith(f".{self.pattern}")


@dataclass(frozen=True, slots=True)
class Quantization:
    """What a config says about the weights of linear layers."""

    method: str
    """The config's `quant_method`."""
    rules: Sequence[Rule]
    """The first one that is for a layer decides; a layer without one is left alone."""

    def scheme(self, module: str) -> Scheme | None:
        """How a layer's weight is stored; None: in floating point."""
        found = (rule.scheme for rule in self.rules if rule.holds(module))
        return next(found, None)

    @property
    def schemes(self) -> list[Scheme]:
        """Those that occur, once each, the usual one first."""
        found = [rule.scheme for rule in reversed(self.rules) if rule.scheme is not None]
        return list(dict.fromkeys(found))

    def __str__(self) -> str:
        kinds = ", ".join(map(str, self.schemes))
        return self.method if kinds == self.method else f"{self.method}, {kinds}"


def pattern_problem(pattern: str) -> str | None:
    """Why a regular expression of a config is not used; None if it is. Those that could take
    unlimited time are not: repeated groups, and more than three repeats."""
    if len(pattern) > _MOST_CHARS:
        return f"has {len(pattern):,} characters; at most {_MOST_CHARS:,} are read"
    plain = re.sub(r"\\.", "", pattern)
    if (
        re.search(r"\)\s*[*+{]", plain)
        or len(re.findall(r"[*+]|\{\d*,\d*\}", plain)) > _MOST_REPEATS
    ):
        return "repeats a group, or has more than three repeats"
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is no regular expression ({error})"
    return None
