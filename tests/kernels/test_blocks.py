"""Tests of linear layers that hold the blocks of GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Q
from torch import Tensor

from infer.kernels import loader
from infer.kernels.blocks import NUMBERS, ZEROED, BlockWeight, convert, fitted, packed_bytes
from infer.kernels.invariance import batch_invariance_problem
from infer.kernels.linear.choose import make_linear
from infer.kernels.linear.fusion import PRODUCT_ONLY, Fusion, Norm
from infer.kernels.linear.native_linear import NativeLinear, PackedEmbedding
from infer.models.gguf_reader import KINDS
from tests.support.cases import one_of, over
from tests.support.gguf_files import blocks

SHAPES = [  # outputs, inputs
    (1, 256),
    (33, 256),
    (70, 768),
    (96, 2048),
    (257, 1280),
]
EVERY = [*NUMBERS, *ZEROED]
OF_32_INPUTS = [*(kind for kind in NUMBERS if KINDS[kind].block == 32), "U4_32"]
OF_32 = [(5, 32), (40, 96), (33, 352)]
"""Shapes for blocks of 32 inputs only."""
CASES = [(kind, *shape) for kind in EVERY for shape in SHAPES]
CASES += [(kind, *shape) for kind in OF_32_INPUTS for shape in OF_32]
ROWS = {1: [*range(1, 41), 64, 65, 100, 257], 2: [*range(1, 41, 6), 40, 65, 257]}
"""Threads → numbers of rows: each remainder of a tile, and some of each size for two threads."""


def made(kind: str, n: int, k: int) -> tuple[BlockWeight, Tensor]:
    """A weight in blocks, and its numbers [n, k] as the `gguf` package reads them."""
    if kind in ZEROED:
        return made_with_zeros(kind, n, k)
    rows = blocks((n, k), Q[kind])
    numbers = gguf.quants.dequantize(rows, Q[kind]).reshape(n, k)
    return BlockWeight(kind, (n, k), rows), torch.from_numpy(numbers.copy())


def made_with_zeros(kind: str, n: int, k: int) -> tuple[BlockWeight, Tensor]:
    """As `made`, of a type that no GGUF file has."""
    bits, size = (int(part) for part in kind[1:].split("_"))
    made_by, shape = np.random.default_rng(n * k), (n, k // size)
    scales = made_by.normal(0, 0.02, shape).astype(np.float16)
    zeros = made_by.integers(*((0, 17) if bits == 4 else (-128, 128)), shape)
    codes = made_by.integers(0, 1 << bits, (*shape, size // 32, 32), dtype=np.uint8)
    stored = codes if bits == 8 else codes[..., :16] | codes[..., 16:] << 4
    parts = [scales[..., None].view(np.uint8), zeros.astype(np.int8).view(np.uint8)[..., None]]
    rows = np.concatenate([*parts, np.zeros_like(parts[1]), stored.reshape(*shape, -1)], axis=2)
    offsets = zeros if bits == 4 else zeros + 128
    numbers = (codes.reshape(*shape, size).astype(int) - offsets[..., None]) * scales[..., None]
    weight = BlockWeight(kind, (n, k), rows.reshape(n, -1))
    return weight, torch.from_numpy(numbers.astype(np.float32)).view(n, k)


def inputs(num: int, k: int) -> Tensor:
    return torch.randn((num, k), generator=torch.Generator().manual_seed(num)).bfloat16()


def quantized(x: Tensor) -> Tensor:
    """Rows [T, k] as the layers multiply them: each 32 numbers rounded to whole multiples."""
    padded = F.pad(x.float(), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    most = padded.abs().amax(dim=2, keepdim=True)
    # A number divided by a tensor would be rounded twice.
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, 0.0)
    return ((padded * inverse).round() * (most / 127)).view(len(x), -1)[:, : x.shape[1]]


@pytest.mark.usefixtures("isa")
@over(("kind", "n", "k"), CASES)
def test_it_multiplies_the_numbers_of_the_file(kind: str, n: int, k: int) -> None:
    weight, numbers = made(kind, n, k)
    layer = NativeLinear([weight], fusion=Fusion(float_out=True))
    for num_rows in (1, 7, 33):
        x = inputs(num_rows, k)
        exact = quantized(x).double() @ numbers.double().T
        terms = quantized(x).double().abs() @ numbers.double().abs().T
        # Rounding of float32 sums; with minima two large terms almost cancel.
        assert ((layer(x) - exact).abs() <= 2**-18 * (terms + 1)).all(), num_rows


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize(
    ("kind", "n", "k"),
    one_of(2, [(kind, n, k) for n, k in ((33, 256), (96, 2048)) for kind in EVERY]),
)
def test_a_row_is_the_same_in_any_company(kind: str, n: int, k: int) -> None:
    weight, _ = made(kind, n, k)
    layer, x = NativeLinear([weight]), inputs(300, k)
    torch.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in x])
    for threads, counts in ROWS.items():
        torch.set_num_threads(threads)
        for num_rows in counts:
            first = num_rows * 7 % (300 - num_rows)
            some = layer(x[first : first + num_rows])
            assert torch.equal(some, alone[first : first + num_rows]), (threads, num_rows)
    assert batch_invariance_problem([layer]) is None


@pytest.mark.parametrize("kind", EVERY)
def test_all_instruction_sets_give_the_same_bits(kind: str, ask_for: Callable[[str], None]) -> None:
    """Except the portable ones, which round products before they are added."""
    weight, _ = made(kind, 70, 768)
    sets = [name for name in loader.instruction_sets() if name != "portable"]
    if len(sets) < 2:
        pytest.skip("one instruction set only")
    found = []
    for name in sets:
        ask_for(name)
        layer = NativeLinear([weight], fusion=Fusion(float_out=True))
        found.append(torch.cat([layer(inputs(rows, 768)) for rows in (1, 2, 3, 5, 40)]))
    assert found[0].any()
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("isa")
@over("kind", EVERY)
@over("gate", [None, "silu", "gelu_tanh"])
def test_with_norm_gate_bias_and_residual(kind: str, gate: str | None) -> None:
    (one, first), (two, second) = made(kind, 72, 512), made(kind, 72, 512)
    made_by = torch.Generator().manual_seed(3)
    norm = Norm(1 + torch.rand(512, generator=made_by), 1e-5)
    bias = torch.randn(144, generator=made_by)
    x = inputs(19, 512)
    residual = inputs(19, 72 if gate else 144)
    got = make_linear([one, two], bias, Fusion(norm=norm, gate=gate))(x, residual)
    scale = (x.double().pow(2).mean(1, keepdim=True) + 1e-5).rsqrt()
    read = quantized(x.float() * norm.weight).double() * scale
    y = read @ torch.cat([first, second]).double().T + bias
    if gate:
        half, other = y.chunk(2, dim=1)
        y = (F.silu(half) if gate == "silu" else F.gelu(half, approximate="tanh")) * other
    torch.testing.assert_close(got.double(), y + residual, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("isa")
@over(
    ("kinds", "gated"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), False),
        (("Q8_0", "Q6_K", "Q4_0"), False),
        (("Q4_K", "Q5_K", "Q4_K"), False),
        (("Q4_K", "Q5_K"), True),
        (("Q8_0", "Q4_0"), True),
        (("Q2_K", "MXFP4", "Q3_K"), False),
        (("IQ4_XS", "IQ4_NL", "Q5_0"), False),
        (("IQ4_NL", "Q8_0"), True),
        (("Q5_0", "IQ4_NL"), True),
        (("U4_128", "Q8_0", "U4_64"), False),
    ],
)
def test_the_sources_of_a_layer_may_differ(kinds: Sequence[str], gated: bool) -> None:
    """A layer of several types has the results of one layer each."""
    sizes = (64, 32, 40) if not gated else (48, 48)
    parts = [made(kind, size, 256)[0] for kind, size in zip(kinds, sizes, strict=True)]
    x = inputs(20, 256)
    together = NativeLinear(parts, fusion=Fusion(float_out=True, gate="silu" if gated else None))
    separate = [NativeLinear([part], fusion=Fusion(float_out=True))(x) for part in parts]
    if gated:
        expected = F.silu(separate[0]) * separate[1]
        torch.testing.assert_close(together(x), expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(together(x), torch.cat(separate, dim=1))


@pytest.mark.usefixtures("isa")
def test_types_that_no_panel_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="one panel cannot hold Q4_K, Q6_K"):
        NativeLinear([made("Q4_K", 40, 256)[0], made("Q6_K", 40, 256)[0]])


@pytest.mark.usefixtures("isa")
@over(("kind", "n", "k"), CASES)
def test_an_embedding_looks_up_the_numbers_of_the_file(kind: str, n: int, k: int) -> None:
    weight, numbers = made(kind, n, k)
    embedding = PackedEmbedding(weight)
    tokens = torch.arange(n).flip(0)
    assert torch.equal(embedding.index_select(0, tokens), numbers.flip(0).bfloat16())
    head, x = embedding.tied_head(PRODUCT_ONLY), inputs(3, k)
    assert torch.equal(head(x), NativeLinear([weight])(x))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("width", [1, 33, 40, 48, 80, 112, 300])
def test_columns_of_any_width_end_where_they_end(width: int) -> None:
    """Blocks hold more numbers than a row of such a width has."""
    weight = torch.randn((40, width), generator=torch.Generator().manual_seed(width)).bfloat16()
    layer = NativeLinear([fitted(weight)])
    wanted = torch.arange(40)
    room = torch.full((41, width), 7.0, dtype=torch.bfloat16)
    loader.loaded().infer_linear_columns(
        layer.handle, wanted.data_ptr(), len(wanted), room.data_ptr(), 2
    )
    assert (room[40:] == 7.0).all()
    assert torch.equal(room[:40], layer.columns(wanted))
    apart = torch.cat([layer.columns(one) for one in wanted.split(1)])
    assert torch.equal(room[:40], apart)
    assert (apart.float() - weight.float()).norm() <= 0.12 * weight.float().norm()


@pytest.mark.usefixtures("isa")
def test_a_bad_row_harms_no_other() -> None:
    layer, x = NativeLinear([made("Q4_K", 40, 256)[0]]), inputs(40, 256)
    expected = layer(x)
    x[7, 3], x[33, 200] = torch.inf, torch.nan
    some = layer(x)
    assert not some[[7, 33]].isfinite().any()
    good = [i for i in range(40) if i not in (7, 33)]
    assert torch.equal(some[good], expected[good])
    assert layer(torch.zeros((1, 256)).bfloat16()).abs().max() == 0


@pytest.mark.parametrize("kind", EVERY)
def test_a_weight_takes_the_room_of_its_file(kind: str) -> None:
    if reason := loader.available():
        pytest.skip(reason)
    rows = made(kind, 32, 2048)[0].rows
    assert rows is not None
    in_file = rows.nbytes
    assert packed_bytes([kind], 2048) <= 1.05 * in_file


@pytest.mark.parametrize("kind", NUMBERS)
def test_any_bytes_are_read_as_the_package_reads_them(kind: str) -> None:
    """Every code with every multiple, zeros, and factors that are tiny, infinite or no number."""
    if reason := loader.available():
        pytest.skip(reason)
    size = KINDS[kind].block_bytes
    rows = np.random.default_rng(1).integers(0, 256, (4096, size), dtype=np.uint8)
    rows[:256, 0] = np.arange(256)
    rows[256] = 0
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, Q[kind])
    found = np.empty_like(expected)
    convert(rows, kind, found)
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ZEROED)
def test_blocks_with_zero_points_are_numbers(kind: str) -> None:
    if reason := loader.available():
        pytest.skip(reason)
    weight, numbers = made(kind, 64, 1024)
    assert weight.rows is not None
    found = np.empty(numbers.shape, dtype=np.float32)
    blocks_of_rows = weight.rows.reshape(-1, 4 + int(kind.partition("_")[2]) * int(kind[1]) // 8)
    convert(blocks_of_rows, kind, found)
    assert np.array_equal(found, numbers.numpy())
