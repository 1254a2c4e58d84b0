"""`Quantization`: how the linear layers of a quantised checkpoint are stored, as its config says.

`models.quantized_config` reads it from a config, `models.quantized_layouts` has the layouts that a
`Scheme` names. The module imports the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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

    def held(self, width: int | None = None) -> str | None:
        """The form in which kernels hold such weights without rounding, by its name: `INT8` or a
        type of blocks. None: they are widened. A file's values may need another one.

        `width`: number of inputs of a weight; None: a multiple of 128.
        """
        if self.layout in WIDENED or self.any_order:
            return None
        if self.int8_rows and self.strategy in ("channel", "tensor") and self.symmetric:
            return INT8
        return self.blocks(width, centred=self.symmetric)

    def blocks(self, width: int | None, *, centred: bool) -> str | None:
        """The smallest type of blocks that holds the whole numbers and their scales as they are.

        `centred`: whether the number that means zero is the middle one everywhere. Types that
        share a scale beyond 32 inputs need a `width` of whole units of 128 (csrc/blocks.h).
        """
        if self.layout.startswith("mxfp4"):
            return "MXFP4"
        has_units = width is None or width % 128 == 0
        shared = self.inputs or (128 if has_units else 32)
        if shared % 32:
            return None
        if self.bits > 4:
            is_long = self.inputs is None or not centred
            if is_long and has_units and shared % 128 == 0:
                return "U8_128"
            return "Q8_0" if centred else None
        if has_units and shared % 64 == 0:
            return "U4_64" if shared % 128 else "U4_128"
        return "Q4_0" if centred else "U4_32"

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
        schemes = (rule.scheme for rule in self.rules if rule.holds(module))
        return next(schemes, None)

    @property
    def schemes(self) -> list[Scheme]:
        """Those that occur, once each, the usual one first."""
        schemes = [rule.scheme for rule in reversed(self.rules) if rule.scheme is not None]
        return list(dict.fromkeys(schemes))

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
