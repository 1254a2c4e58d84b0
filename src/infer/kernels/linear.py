"""`Linear`: y = x Wᵀ + b with the weight in the layout that the machine reads fastest.

Made by `make_linear`, used by the models; the original weight may be freed after. A row's result is
the same bit for bit in any number of rows from one up: by construction in `NativeLinear` (bfloat16
on CPUs with AMX: linear.cpp), by observation in `PackedLinear` (oneDNN; not in bfloat16 with AMX,
where it cuts a sum differently for different numbers of rows), not at all in `PlainLinear`
(`F.linear`). `batch_invariance_problem` looks whether it holds for a model on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from infer.kernels import native

VARIABLE = "INFER_LINEAR"
"""`native` or `onednn`, to compare them; unset: the best that runs here."""


class Linear(Protocol):
    """A linear layer: [T, in] → [T, out]."""

    in_features: int
    out_features: int
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it."""


class PlainLinear:
    """`F.linear`, for devices and dtypes without a packed form."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """A weight in oneDNN's blocked layout: one packed copy serves every number of rows.

    The product of a row is the same for any number of rows from two up; one row is therefore
    computed as two (free, since one row is bound by memory). The module's docstring says where
    that does not hold.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        if x.shape[0] == 1:
            twice = x.expand(2, -1).contiguous()
            return self._apply(twice)[:1]
        return self._apply(x)

    def _apply(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self.bias, "none", [], "")
        return out


class NativeLinear:
    """The product of linear.cpp; the weight is packed from its parts without being joined first."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights` [out_i, in], bfloat16, one below the other; `RuntimeError` if it cannot run."""
        library = native.library()
        if reason := native_obstacle():
            raise RuntimeError(reason)
        assert not isinstance(library, str)
        self.out_features = sum(weight.shape[0] for weight in weights)
        self.in_features = weights[0].shape[1]
        self.dtype = torch.bfloat16
        num_bytes = library.infer_linear_packed_bytes(self.out_features, self.in_features)
        self._weight = torch.empty(num_bytes, dtype=torch.uint8)
        self._bias = None if bias is None else bias.contiguous()
        column = 0
        for part in weights:
            assert (part.dtype, part.shape[1]) == (torch.bfloat16, self.in_features)
            rows = part if part.stride(1) == 1 else part.contiguous()
            library.infer_linear_pack(
                *(rows.data_ptr(), *rows.shape, rows.stride(0), self._weight.data_ptr(), column),
                *(self.out_features, native.parallel(), torch.get_num_threads()),
            )
            column += len(rows)
        self._product = library.infer_linear
        self._parallel = native.parallel()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] → [T, out]."""
        assert (x.dtype, x.shape[1]) == (torch.bfloat16, self.in_features)
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = x.shape[0]
        out = torch.empty((num_rows, self.out_features), dtype=torch.bfloat16)
        self._product(
            x.data_ptr(),
            self._weight.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            *(num_rows, self.out_features, self.in_features, x.stride(0)),
            self._parallel,
            torch.get_num_threads(),
        )
        return out


def native_obstacle() -> str | None:
    """Why `NativeLinear` cannot be used here; None if it can."""
    library = native.library()
    if isinstance(library, str):
        return library
    return None if library.infer_linear_runs_here() else "this CPU has no AMX for bfloat16"


def can_pack(weight: Tensor) -> bool:
    """Whether this torch build, device and dtype have oneDNN's packed form."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def make_linear(weight: Tensor | Sequence[Tensor], bias: Tensor | None = None) -> Linear:
    """The fastest `Linear` for a weight [out, in], or for several, one below the other."""
    parts = [weight] if isinstance(weight, Tensor) else list(weight)
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in ("", "native", "onednn"):
        raise ValueError(f"{VARIABLE}={wanted!r}: use native or onednn")
    if wanted != "onednn" and parts[0].device.type == "cpu" and parts[0].dtype == torch.bfloat16:
        reason = native_obstacle()
        if reason is None:
            return NativeLinear(parts, bias)
        if wanted == "native":
            raise ValueError(f"{VARIABLE}=native is not possible: {reason}")
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return PackedLinear(whole, bias) if can_pack(whole) else PlainLinear(whole, bias)


_ROWS = (2, 3, 17, 40, 130)
"""Numbers of rows that are compared with one; a library's choices change around powers of two."""

_ELEMENTS = 16384
"""Results to compare per layer and number of rows: rounding hides most differences. oneDNN's other
order of a sum over 2048 shows in about one of 4,000 results in bfloat16."""


def batch_invariance_problem(model: object) -> str | None:
    """Whether a row's product depends on the rows beside it, in one layer of each of its shapes.

    None: no difference was seen. `model`: anything that holds `Linear`s in attributes or lists.
    Takes about as long as a few tokens.
    """
    kinds = {(f.in_features, f.out_features, f.dtype): f for f in linears(model)}
    for (width, height, dtype), layer in kinds.items():
        probes = max(1, min(_ELEMENTS // height, 64))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((probes + _ROWS[-1], width), generator=generator).to(dtype)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(probes)])
        for num_rows in _ROWS:
            places = num_rows // 3  # move on, so that few probes do not all lie in front
            batches = [x[i : i + num_rows].roll(places, 0) for i in range(0, probes, num_rows)]
            among = torch.cat([layer(batch).roll(-places, 0) for batch in batches])
            if not torch.equal(among[:probes], alone):
                return (
                    f"on this machine a row of the {width} → {height} product in"
                    f" {str(dtype).removeprefix('torch.')} is not the same alone and among"
                    f" {num_rows}: an answer may depend on the requests beside it"
                )
    return None


def linears(part: object) -> Iterator[Linear]:
    """The linear layers in an object's attributes and lists, at any depth."""
    if isinstance(part, (PlainLinear, PackedLinear, NativeLinear)):
        yield part
    elif isinstance(part, (list, tuple)):
        for member in part:
            yield from linears(member)
    elif not isinstance(part, (Tensor, type)):
        for member in getattr(part, "__dict__", {}).values():
            yield from linears(member)
