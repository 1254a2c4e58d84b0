"""Tests of int8 KV caches: small errors, the same bits in any batch, and no read of unset cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend, obstacle
from infer.attention.layout import BatchLayout
from infer.kernels import loader
from tests.support import isas
from tests.support.attention_worlds import (
    BF16,
    Shape,
    World,
    assert_invariant,
    error,
    exact,
    make_world,
    ragged,
    run,
    whole,
)
from tests.support.cases import one_of, slow_but

INT8 = torch.int8


@pytest.fixture(params=isas.each(loader.INSTRUCTION_SETS), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)


SHAPES: list[Shape] = [
    (1, 1, 64, None),
    (8, 2, 64, 100),
    (14, 2, 128, 64),
    (40, 1, 128, None),
    (4, 2, 256, None),
]


def unpacked(cache: Tensor, slots: Tensor, *, of_keys: bool) -> Tensor:
    """The numbers [n, G, D] in the cells, decoded by the layout that attention_bytes.h defines."""
    groups, width = cache.shape[2:]
    size = width - 4
    strips = cache.reshape(-1, groups, 16 * width)
    numbers, scales = strips[..., : 16 * size], strips[..., 16 * size :]
    parts = numbers.reshape(len(strips), groups, size // 4, 16, 4)
    if of_keys:  # a line holds 4 dims of 16 keys
        cells = parts.permute(0, 3, 1, 2, 4).reshape(-1, groups, size)
    else:  # 4 lines for 16 dims; a line holds 16 dims of 4 keys
        parts = numbers.reshape(len(strips), groups, size // 16, 4, 16, 4)
        cells = parts.permute(0, 3, 5, 1, 2, 4).reshape(-1, groups, size)
    scales = torch.from_numpy(scales.contiguous().numpy().view(np.float32))
    scales = scales.transpose(1, 2).reshape(-1, groups, 1)
    return (cells.double() * scales.double())[slots]


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@pytest.mark.parametrize("shape", slow_but(SHAPES[:3:2], SHAPES), ids=str)
def test_it_computes_attention(shape: Shape) -> None:
    heads, groups, size, window = shape
    world = make_world([1, 3, 64, 65, 130, 700], heads, groups, size, BF16, window=window)
    wanted = exact(world)
    theirs = error(run(world, whole(world)), wanted)
    for steps in (whole(world), ragged(world, 1)):
        ours = error(run(world, steps, held=INT8), wanted)
        # A step of int8 is 1/127 of a head's largest number, about 0.7 % of a typical number.
        assert ours[1] < 10 * theirs[1], (ours, theirs)
        assert ours[0] < 0.2, ours


@pytest.mark.parametrize("size", [64, 128, 256])
def test_cells_hold_keys_and_values(size: int) -> None:
    """Cells hold numbers to half a step of int8; keys are multiplied by a Hadamard matrix."""
    world = make_world([70], 2, 2, size, BF16)
    world.v[0][3] = 0
    caches: list[Tensor] = []
    run(world, ragged(world, 5), caches=caches, held=INT8, threads=2)
    written = [i for i, page in enumerate(caches[0]) if not (page == -1).all() and i]
    assert len(written) == 5
    wanted_keys = world.k[0].double() @ hadamard(size)
    for cache, wanted, of_keys in ((caches[0], wanted_keys, True), (caches[1], world.v[0], False)):
        found = unpacked(cache, torch.arange(len(cache) * 16), of_keys=of_keys)
        step = wanted.double().abs().amax(-1, keepdim=True) / 127
        for token in range(70):  # pages are shuffled, so the nearest cell is searched for
            gaps = (found - wanted[token]).abs().amax((1, 2)).nan_to_num(torch.inf)
            assert gaps.min() <= step[token].max() * 0.51 + 1e-6, (token, of_keys)


@pytest.mark.parametrize(
    ("shape", "lengths"),
    one_of(
        2,
        [
            ((4, 1, 64, None), [1, 31, 64, 65, 129, 200]),
            ((2, 1, 128, None), [520, 3]),
            ((7, 1, 128, 70), [540, 70, 71]),
            ((40, 1, 64, 300), [530, 2]),
            ((9, 1, 64, None), [600, 5]),
            ((2, 2, 256, 1), [66]),
        ],
    ),
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_company(shape: Shape, lengths: list[int]) -> None:
    heads, groups, size, window = shape
    world = make_world(lengths, heads, groups, size, BF16, window=window)
    page = -(-max(lengths) // 16) * 16
    assert_invariant(world, held=INT8, page_sizes=(48, 32, page))


def test_large_numbers_in_every_key_cost_little() -> None:
    """Many models have such keys. Without the Hadamard matrix the others would lose most bits."""
    world = make_world([300], 4, 2, 128, BF16)
    world.k[0][..., 5] += 60
    world.k[0][..., 77] -= 30
    world.q[0][..., [5, 77]] *= 0.05
    wanted = exact(world)
    assert error(run(world, whole(world), held=INT8), wanted)[1] < 0.05


def test_zeros_tiny_and_huge_numbers() -> None:
    world = make_world([130, 40], 4, 1, 64, BF16)
    for v, k in zip(world.v, world.k, strict=True):
        v[::2] *= 1e-38
        v[1::3] = 0
        v[5::7] *= -1e30
        k[::5] *= 40
        k[3] = 0
    assert_invariant(world, held=INT8, page_sizes=(48, 32, 144))
    assert all(rows.isfinite().all() for rows in run(world, whole(world), held=INT8))


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_nobody_before_it(part: str, value: float) -> None:
    world = make_world([40, 70], 4, 2, 64, BF16)
    healthy = run(world, whole(world), held=INT8)
    getattr(world, part)[0][17] = value
    broken = run(world, whole(world), held=INT8)
    assert not broken[0][17:].isfinite().all(dim=-1).any()
    assert torch.equal(broken[0][:17], healthy[0][:17])
    assert torch.equal(broken[1], healthy[1])


def test_a_shared_prefix_changes_no_bit() -> None:
    lengths, size, page_size = [1130, 1101, 1664, 40], 128, 16
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        [(torch.randn(n, h, size, generator=generator)).to(BF16) for n in lengths]
        for h in (8, 2, 2)
    )
    whole_world = World(q, k, v)
    for i in (1, 2):
        for part in (whole_world.k, whole_world.v):
            part[i][:1100] = part[0][:1100][: lengths[i]]
    pages_of = [-(-n // page_size) for n in lengths]
    shape = (sum(pages_of) + 1, page_size, 2, size + 4)
    keys, values = (torch.zeros(shape, dtype=INT8) for _ in "kv")
    pool = iter(range(1, sum(pages_of) + 1))
    own = [[next(pool) for _ in range(n)] for n in pages_of]
    shared = [own[0][:64] + pages[64:] if i in (1, 2) else pages for i, pages in enumerate(own)]
    backend = NativeBackend([keys], [values], num_heads=8, scale=size**-0.5)

    def attend(tables: list[list[int]], spans: list[tuple[int, int]]) -> Tensor:
        starts = [0, *np.cumsum([end - first for first, end in spans]).tolist()]
        slots = [
            table[p // page_size] * page_size + p % page_size
            for table, (first, end) in zip(tables, spans, strict=True)
            for p in range(first, end)
        ]
        width = max(map(len, tables))
        padded = torch.tensor([(table + [0] * width)[:width] for table in tables])
        ends = [end for _, end in spans]
        backend.plan(BatchLayout(starts, ends, torch.tensor(slots), padded))
        q, k, v = (
            torch.cat([x[first:end] for x, (first, end) in zip(part, spans, strict=True)])
            for part in (whole_world.q, whole_world.k, whole_world.v)
        )
        return backend(0, q, k, v)

    attend(own, [(0, n - 1) for n in lengths])
    last = [(n - 1, n) for n in lengths]
    assert torch.equal(attend(own, last), attend(shared, last))


def test_what_it_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert "not 80" in str(obstacle(80, INT8, cpu))
    assert "not 5" in str(obstacle(64, INT8, cpu, 5))
    monkeypatch.setenv(loader.ISA_VARIABLE, "avx1024")
    assert "does not run here" in str(obstacle(64, INT8, cpu))


@pytest.mark.parametrize("part", range(3), ids=["queries", "keys", "values"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_zeros_are_numbers(size: int, part: int) -> None:
    """As of a token whose embedding is zero, such as the padding's."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((40, n, size), generator=numbers).bfloat16() for n in (4, 2, 2))
    (q, k, v)[part][::3] = 0.0
    out = []
    for held in (INT8, BF16):
        width = size + 4 if held == INT8 else size
        caches = [torch.zeros(4, 16, 2, width, dtype=held) for _ in range(2)]
        backend = NativeBackend(*([cache] for cache in caches), num_heads=4, scale=size**-0.5)
        backend.plan(BatchLayout([0, 40], [40], torch.arange(16, 56), torch.arange(1, 4)[None]))
        out.append(backend(0, q, k, v).float())
    assert out[0].isfinite().all()
    assert (out[0] - out[1]).abs().max() < 0.1
