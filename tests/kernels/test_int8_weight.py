"""Weights that a file has in int8 with one scale an output: the numbers of our own int8 layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from infer.kernels.int8_weight import Int8Weight, int8_bytes, kept_bytes
from infer.kernels.linear.fusion import Fusion, Norm
from infer.kernels.linear.native_linear import NativeLinear
from tests.support.cases import over

SHAPES = [(1, 1), (31, 33), (40, 16), (100, 258), (513, 96), (1055, 130)]


def weight_of(k: int, n: int) -> tuple[Int8Weight, Tensor]:
    """A weight and the same numbers in bfloat16: scales are powers of two, and every row has 127,
    so that rounding the numbers to int8 gives the same codes and the same scales."""
    generator = torch.Generator().manual_seed(k * n)
    codes = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
    codes[torch.arange(n), torch.arange(n) % k] = 127
    scales = 2.0 ** -torch.arange(n).remainder(11).float()
    return Int8Weight((n, k), codes, scales), (codes.float() * scales[:, None]).bfloat16()


@pytest.mark.usefixtures("isa")
@over(("k", "n"), SHAPES)
@over("gate", [None, "silu"])
@over("num_rows", [1, 3, 40])
def test_it_is_the_int8_layer_with_these_scales(
    k: int, n: int, gate: str | None, num_rows: int
) -> None:
    if gate and n % 2:
        pytest.skip("a gate has two halves")
    whole, rounded = weight_of(k, n)
    norm = Norm(torch.linspace(0.5, 1.5, k), 1e-6)
    fusion = Fusion(norm=norm, gate=gate, float_out=True)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
    x = torch.randn((num_rows, k), generator=torch.Generator().manual_seed(num_rows)).bfloat16()
    expected = NativeLinear([rounded], bias, fusion, bits=8, rotated=False)(x)
    assert torch.equal(NativeLinear([whole], bias, fusion)(x), expected)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("sizes", [[5, 11, 40], [64, 16, 16], [1, 1, 30, 33]])
def test_parts_are_one_weight(sizes: list[int]) -> None:
    whole, _ = weight_of(70, sum(sizes))
    assert whole.rows is not None
    assert whole.scales is not None
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [whole.reordered(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    x = torch.randn((20, 70), generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(NativeLinear(parts)(x), NativeLinear([whole])(x))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("num_rows", [1, 2, 33, 70])
def test_the_smallest_number_and_any_scale_are_kept(num_rows: int) -> None:
    """Rows of whole numbers up to 127 are rounded to themselves."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-128, 128, (97, 300), generator=generator).to(torch.int8)
    codes[::3] = -128
    scales = torch.rand(97, generator=generator) * 1e-2
    x = torch.randint(-127, 128, (num_rows, 300), generator=generator).bfloat16()
    x[:, 0] = 127
    x[0] = 127
    y = NativeLinear([Int8Weight((97, 300), codes, scales)], None, Fusion(float_out=True))(x)
    exact = x.double() @ codes.double().T * scales.double()
    assert (y.double() - exact).abs().max() <= 1e-6 * exact.abs().max()


def test_a_row_is_the_same_in_any_company(isa: str) -> None:
    whole, _ = weight_of(513, 95)
    product = NativeLinear([whole])
    x = torch.randn((130, 513), generator=torch.Generator().manual_seed(2)).bfloat16()
    alone = torch.cat([product(row[None]) for row in x])
    for num_rows in (2, 3, 16, 17, 33, 64, 130):
        assert torch.equal(product(x[:num_rows]), alone[:num_rows]), (isa, num_rows)


@pytest.mark.parametrize("gated", [False, True])
def test_its_size_is_planned(gated: bool, ask_for: Callable[[str], None]) -> None:
    ask_for("portable")
    whole, _ = weight_of(70, 66)
    fusion = Fusion(gate="silu" if gated else None)
    layer = NativeLinear([whole], None, fusion)
    assert int8_bytes([whole], gated=gated) == layer.packed.nbytes + 4 * 66
    assert kept_bytes([whole], gated=gated) == int8_bytes([whole], gated=gated)
