"""Batch invariance: checking at start-up whether a row's product depends on the other rows.

The promise that an answer does not depend on other requests rests on it. `engine.build.assemble`
warns if it does not hold on this machine or with this build of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from infer.kernels.linear.cuda_linear import CudaInt8Linear, CudaLinear
from infer.kernels.linear.fusion import PRODUCT_ONLY, Linear
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.linear.onednn import Int8Linear, PackedLinear
from infer.kernels.linear.plain_linear import PlainLinear

_KINDS = (PlainLinear, PackedLinear, Int8Linear, NativeLinear, CudaLinear, CudaInt8Linear)

_ROWS = (2, 3, 17, 40, 130)
"""Numbers of rows that are compared with one row.

Libraries choose other algorithms around powers of two.
"""

_ELEMENTS = 16384
"""Number of results to compare per layer and number of rows.

Many are needed, because rounding hides most differences. Where oneDNN sums 2048 products in another
order, about one of 4,000 results in bfloat16 differs.
"""


def batch_invariance_problem(model: object) -> str | None:
    """A message if a row's product depends on the other rows; None if no difference was seen.

    One layer of each shape is checked. `model`: any object that holds `Linear`s in attributes or
    lists. The check takes about as long as generating a few tokens.
    """
    kinds = {(f.in_features, f.out_features, f.dtype): f for f in linears(model)}
    for (width, height, dtype), layer in kinds.items():
        probes = max(1, min(_ELEMENTS // height, 64))
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((probes + _ROWS[-1], width), generator=generator).to(dtype)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(probes)])
        for num_rows in _ROWS:
            places = num_rows // 3  # rotate the rows, so that few probes are not all at the front
            batches = [x[i : i + num_rows].roll(places, 0) for i in range(0, probes, num_rows)]
            among = torch.cat([layer(batch).roll(-places, 0) for batch in batches])
            if not torch.equal(among[:probes], alone):
                return (
                    f"on this machine a row of the {width} → {height} product in"
                    f" {str(dtype).removeprefix('torch.')} is not the same alone and among"
                    f" {num_rows}: an answer may depend on other requests in the batch"
                )
    return None


@torch.inference_mode()
def invariant_sizes(model: object, sizes: Iterable[int], device: torch.device) -> list[int]:
    """The numbers of rows among `sizes`, sorted, at which a row's products are the same.

    Each size is compared with the smallest one, in one layer of `model` of each shape.
    """
    kept = sorted(set(sizes))
    generator = torch.Generator(device).manual_seed(0)

    def rows(width: int, dtype: torch.dtype) -> Tensor:
        return torch.randn((kept[-1], width), generator=generator, device=device).to(dtype)

    kinds = {(f.in_features, f.out_features, f.dtype): f for f in linears(model)}
    for (width, height, dtype), layer in kinds.items():
        x = rows(width, dtype)
        # A sum with a residual may be another function of a library than the product alone.
        fusion = getattr(layer, "fusion", PRODUCT_ONLY)
        takes_residual = not (fusion.gate or fusion.float_out)
        for residual in (None, rows(height, dtype)) if takes_residual else (None,):
            first = _applied(layer, x[: kept[0]], residual, 0)
            for size in kept[1:]:
                # The same rows are compared at the front and at the end of a batch of that size.
                front = _applied(layer, x[:size], residual, 0)[: kept[0]]
                back = _applied(layer, x[:size], residual, kept[0])[-kept[0] :]
                if not (torch.equal(front, first) and torch.equal(back, first)):
                    kept = [other for other in kept if other != size]
    return kept


def _applied(layer: Linear, x: Tensor, residual: Tensor | None, shift: int) -> Tensor:
    """The layer's result for the rows of x, after the first `shift` rows have become the last."""
    if residual is None:
        return layer(x.roll(-shift, 0))
    return layer(x.roll(-shift, 0), residual[: len(x)].roll(-shift, 0))


def linears(part: object) -> Iterator[Linear]:
    """All linear layers in an object's attributes and lists, at any depth, each of them once."""
    yield from {id(layer): layer for layer in _linears(part)}.values()


def _linears(part: object) -> Iterator[Linear]:
    if isinstance(part, _KINDS):
        yield part
    elif isinstance(part, (list, tuple)):
        for member in part:
            yield from _linears(member)
    elif not isinstance(part, (Tensor, type)):
        for member in getattr(part, "__dict__", {}).values():
            yield from _linears(member)
