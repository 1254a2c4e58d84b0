"""Tests of the compiled attention kernel: correct, and with the same bits in any batch.

It is compared with SDPA and with a float64 reference. A `World` holds queries, keys and values of a
few sequences. `run` passes them to a backend with given steps, pages and threads and returns the
rows of all tokens. Caches start as NaN, so reading a cell that must not be read is seen in the
result. Every instruction set that this machine can run is tested.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend, obstacle
from infer.attention.layout import BatchLayout
from infer.attention.sdpa import SDPABackend
from infer.kernels import loader
from infer.kernels.rotary import QKRotation
from tests.support import isas
from tests.support.attention_worlds import (
    BF16,
    F32,
    PLAIN,
    Scores,
    Shape,
    World,
    assert_invariant,
    error,
    exact,
    in_order,
    make_world,
    ragged,
    run,
    same_bits,
    whole,
)

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))

ISAS = loader.instruction_sets()


@pytest.fixture(params=isas.each(ISAS))
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(loader.ISA_VARIABLE, request.param)
    assert loader.chosen_instruction_set() == request.param
    return request.param


SHAPES: list[Shape] = [
    (1, 1, 16, None), (4, 2, 24, 5), (8, 2, 64, None), (8, 1, 64, 100), (7, 1, 80, None),
    (14, 2, 128, 64), (2, 2, 256, None), (3, 3, 8, 1), (40, 1, 40, None), (6, 3, 72, 33),
]  # fmt: skip


@dataclass
class Reference:
    """The results with which each instruction set is compared; they are computed once."""

    world: World
    wanted: list[Tensor]
    theirs: list[tuple[float, float]]
    """SDPA's errors: in one step, and in ragged steps."""


@pytest.fixture(scope="module")
def reference() -> Callable[..., Reference]:
    @functools.cache
    def make(
        shape: Shape,
        dtype: torch.dtype,
        lengths: tuple[int, ...] = (1, 3, 64, 65, 130, 530),
        scores: Scores = PLAIN,
    ) -> Reference:
        heads, groups, size, window = shape
        world = make_world(list(lengths), heads, groups, size, dtype, window=window, scores=scores)
        wanted = exact(world)
        ways = (whole(world), ragged(world, 1))
        theirs = [error(run(world, steps, SDPABackend), wanted) for steps in ways]
        return Reference(world, wanted, theirs)

    return make


@pytest.mark.parametrize(
    ("shape", "dtype", "isa"),
    isas.in_turns((shape, dtype) for dtype in (F32, BF16) for shape in SHAPES),
    indirect=["isa"],
)
def test_it_computes_attention(
    isa: str,
    shape: Shape,
    dtype: torch.dtype,
    reference: Callable[..., Reference],
) -> None:
    found = reference(shape, dtype)
    world, wanted = found.world, found.wanted
    for steps, theirs in zip((whole(world), ragged(world, 1)), found.theirs, strict=True):
        ours = error(run(world, steps), wanted)
        if dtype == F32:
            assert ours[0] < 1e-5, (ours, theirs)
        else:
            # The largest of many rounding errors is random; their mean is not.
            assert ours[1] <= theirs[1] * 1.02, (ours, theirs)
            assert ours[0] <= theirs[0] * 1.5, (ours, theirs)


@pytest.mark.parametrize("seed", range(8))
def test_random_mixtures_agree_with_sdpa(isa: str, seed: int) -> None:
    rng = random.Random(seed)
    groups, rep = rng.choice([1, 2, 3]), rng.choice([1, 2, 4, 7, 8])
    lengths = [rng.choice([1, 2, 17, 63, 64, 65, 200, 513]) for _ in range(rng.randint(1, 6))]
    size, window = rng.choice([16, 24, 64, 80, 128, 256]), rng.choice([None, 1, 16, 200])
    world = make_world(lengths, groups * rep, groups, size, F32, seed, window)
    page_size, threads = rng.choice([1, 3, 16, max(lengths)]), rng.choice([1, 2, 5])
    steps = ragged(world, seed)
    theirs = run(world, steps, SDPABackend, page_size=page_size)
    ours = run(world, steps, page_size=page_size, threads=threads)
    assert error(ours, [x.double() for x in theirs])[0] < 1e-5


INVARIANCE = [
    ((4, 1, 64, None), [1, 31, 64, 65, 129, 200]),
    ((8, 2, 16, None), [600, 5]),
    ((7, 1, 24, 70), [540, 70, 71]),
    ((2, 1, 128, None), [520, 3]),
    ((2, 2, 256, 1), [66]),
    ((40, 1, 32, 300), [530, 2]),
]


@pytest.mark.parametrize(
    ("shape", "lengths", "dtype", "isa"),
    isas.in_turns((*case, dtype) for dtype in (F32, BF16) for case in INVARIANCE),
    indirect=["isa"],
)
@pytest.mark.parametrize(
    "thorough", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "each token"]
)
def test_a_row_has_the_same_bits_in_any_company(
    isa: str, shape: Shape, lengths: list[int], dtype: torch.dtype, thorough: bool
) -> None:
    heads, groups, size, window = shape
    world = make_world(lengths, heads, groups, size, dtype, window=window)
    assert_invariant(world, thorough=thorough)


SLOPES = (0.5, 0.25, 0.0625, 0.7, 0.001, 0.3, 1.0, 0.125)
SINKS = (0.0, -3.0, 4.0, 60.0, -60.0, 1.5, 2.0, -1e30)
SHAPED = [
    ((8, 2, 64, None), Scores(softcap=3.0)),
    ((8, 8, 32, 70), Scores(softcap=3.0)),
    ((8, 8, 64, None), Scores(slopes=SLOPES)),
    ((8, 1, 24, None), Scores(slopes=SLOPES)),
    ((8, 2, 80, 100), Scores(softcap=20.0, slopes=SLOPES)),
    ((8, 8, 16, None), Scores(slopes=SLOPES, rounded=0.25)),
    ((8, 2, 64, None), Scores(sinks=SINKS)),
    ((8, 1, 24, 70), Scores(softcap=3.0, sinks=SINKS)),
    ((4, 2, 512, None), PLAIN),
    ((8, 1, 320, 33), Scores(softcap=3.0)),
    ((16, 1, 512, None), PLAIN),
]
"""What happens to scores, and the largest heads."""


@pytest.mark.parametrize(
    ("number", "dtype", "isa"),
    isas.in_turns(((i, kind) for kind in (F32, BF16) for i in range(len(SHAPED))), every=4),
    indirect=["isa"],
)
def test_scores_have_caps_and_slopes_and_heads_are_large(
    isa: str, number: int, dtype: torch.dtype, reference: Callable[..., Reference]
) -> None:
    shape, scores = SHAPED[number]
    size = shape[2]
    lengths = (1, 65, 130) if size > 256 or isa == "portable" else (1, 64, 530)
    found = reference(shape, dtype, lengths, scores)
    world, wanted = found.world, found.wanted
    for steps, theirs in zip((whole(world), ragged(world, 1)), found.theirs, strict=True):
        ours = error(run(world, steps), wanted)
        if dtype == F32:
            assert max(ours[0], theirs[0]) < 2e-5, (ours, theirs)
        else:
            assert theirs[1] < 0.02, theirs  # in float32 within: the rounding of the result alone
            assert ours[1] < 0.02, (ours, theirs)
    assert_invariant(world)


def test_a_nan_stays_one_under_a_cap(isa: str) -> None:
    for dtype in (F32, BF16):
        scores = Scores(softcap=3.0, slopes=SLOPES[:4])
        world = make_world([40], 4, 2, 64, dtype, scores=scores)
        world.k[0][7] = torch.nan
        assert run(world, whole(world))[0][8].isnan().any()


def test_tiny_numbers_do_not_break_invariance(isa: str) -> None:
    """Denormal sums and zeros of either sign, which the units of a CPU round differently."""
    for dtype in (F32, BF16):
        world = make_world([130, 40], 4, 1, 32, dtype)
        for v in world.v:
            v[::2] *= 1e-38
            v[1::3] = 0
            v[5::7] *= -1
        for k in world.k:
            k[::5] *= 40  # attention becomes sharp, so sums are scaled by tiny factors
        assert_invariant(world)


class OwnDecodePath:
    """A backend with a common mistake: decodes take another code path than prefills."""

    def __init__(self, *args: object, **options: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(loader.ISA_VARIABLE, ISAS[0])
            self.prefill = NativeBackend(*args, **options)  # type: ignore[arg-type]
            patch.setenv(loader.ISA_VARIABLE, ISAS[-1])
            self.decode = NativeBackend(*args, **options)  # type: ignore[arg-type]

    def plan(self, layout: BatchLayout) -> None:
        self.used = (
            self.decode if layout.query_start_loc[-1] == len(layout.seq_lens) else self.prefill
        )
        self.used.plan(layout)

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        return self.used(layer, q, k, v, rotation)


@pytest.mark.skipif(len(ISAS) < 2, reason="one code path only")
def test_the_invariance_check_can_fail() -> None:
    for dtype in (F32, BF16):
        world = make_world([1, 31, 129], 4, 1, 64, dtype)
        with pytest.raises(AssertionError, match="decode: sequence"):
            assert_invariant(world, OwnDecodePath)


def test_cells_behind_the_end_and_the_scrap_page_stay_as_they_are(isa: str) -> None:
    for dtype in (F32, BF16):
        world = make_world([5, 33, 64], 4, 2, 64, dtype)
        caches: list[Tensor] = []
        out = run(world, ragged(world, 3), caches=caches, threads=2)
        assert all(rows.isfinite().all() for rows in out)
        for cache in in_order(*caches):
            assert not cache[0].any()
            written = (~cache[1:].isnan()).all(dim=-1).all(dim=-1).sum().item()
            assert written == sum(world.lengths)
            assert cache[1:].isnan().any()


def test_a_nan_in_one_sequence_stays_there(isa: str) -> None:
    world = make_world([40, 70], 4, 2, 64, BF16)
    healthy = run(world, whole(world))
    world.v[0][7] = torch.nan
    broken = run(world, whole(world))
    assert broken[0].isnan().any()
    assert torch.equal(broken[1], healthy[1])


LAYER_WINDOWS = [None, 9, None, 530]


@functools.cache
def layer_worlds() -> list[World]:
    """One for each layer, with its window."""
    return [make_world([600, 20], 4, 2, 32, F32, i, w) for i, w in enumerate(LAYER_WINDOWS)]


@functools.cache
def exact_of_layers() -> list[list[Tensor]]:
    return [exact(world) for world in layer_worlds()]


def test_layers_have_their_own_caches_and_windows(isa: str) -> None:
    """A plan is made once for all layers and threads; each layer has its own window and cache."""
    windows, worlds = LAYER_WINDOWS, layer_worlds()
    keys, values = ([torch.full((41, 16, 2, 32), torch.nan) for _ in windows] for _ in range(2))
    backend = NativeBackend(keys, values, num_heads=4, scale=worlds[0].scale, windows=windows)
    tables = (torch.randperm(40) + 1)[:40]
    tables = torch.stack([tables[:38], torch.cat([tables[38:], tables.new_zeros(36)])])
    results = exact_of_layers()
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        for steps in ([(0, 598), (0, 19)], [(598, 599), (19, 20)], [(599, 600)]):
            # a prefill, two decodes together, one decode alone: these are divided differently
            positions = [torch.arange(*span) for span in steps]
            slots = [tables[i, p // 16] * 16 + p % 16 for i, p in enumerate(positions)]
            starts = [0, *torch.tensor([len(p) for p in positions]).cumsum(0).tolist()]
            ends = [end for _, end in steps]
            backend.plan(BatchLayout(starts, ends, torch.cat(slots), tables[: len(steps)]))
            for layer, (world, result) in enumerate(zip(worlds, results, strict=True)):
                parts = zip(*((world.q[i][p], world.k[i][p], world.v[i][p])
                              for i, p in enumerate(positions)), strict=True)  # fmt: skip
                q, k, v = (torch.cat(part) for part in parts)
                out = backend(layer, q, k, v)
                wanted = torch.cat([result[i][p] for i, p in enumerate(positions)])
                assert error([out], [wanted])[0] < 1e-5
    finally:
        torch.set_num_threads(before)


def test_what_the_kernel_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert obstacle(64, BF16, cpu) is None
    assert "head sizes" in str(obstacle(20, BF16, cpu))
    assert "head sizes" in str(obstacle(520, BF16, cpu))
    assert "float16" in str(obstacle(64, torch.float16, cpu))
    assert "not cuda" in str(obstacle(64, BF16, torch.device("cuda")))
    monkeypatch.setenv(loader.ISA_VARIABLE, "avx1024")
    assert "portable" in str(obstacle(64, BF16, cpu))
    cache = [torch.zeros(2, 16, 2, 64)]
    with pytest.raises(ValueError, match="avx1024"):
        NativeBackend(cache, cache, num_heads=4, scale=1.0)


@pytest.mark.parametrize(
    ("dtype", "page_size", "shape", "isa"),
    isas.in_turns(
        (dtype, page_size, shape)
        for dtype in (F32, BF16)
        for page_size in (16, 7)
        for shape in ((8, 2, 64), (7, 1, 24), (40, 1, 32), (3, 3, 16))
    ),
    indirect=["isa"],
)
def test_a_shared_prefix_is_read_once_and_changes_no_bit(
    isa: str, dtype: torch.dtype, page_size: int, shape: tuple[int, int, int]
) -> None:
    """Decodes whose page tables have a common prefix, compared with separate tables."""
    heads, groups, size = shape
    # Five sequences share a long prefix, two more share 512 keys, one shares none, and two share
    # all of their keys.
    lengths = [1130, 1101, 1664, 1536, 1200, 700, 513, 40, 1024, 1024]
    origins = [0] * 5 + [0] * 2 + [7] + [8] * 2
    common = [1100] * 5 + [512 + page_size] * 2 + [0] + [1024] * 2
    generator = torch.Generator().manual_seed(1)
    pages_of = [-(-n // page_size) for n in lengths]
    shape_of_cache = (sum(pages_of) + 1, page_size, groups, size)
    keys, values = (
        (torch.randn(shape_of_cache, generator=generator) * 1.5).to(dtype) for _ in range(2)
    )
    pool = iter(range(1, sum(pages_of) + 1))
    own = [[next(pool) for _ in range(n)] for n in pages_of]
    shared = [list(pages) for pages in own]
    for i, (origin, num) in enumerate(zip(origins, common, strict=True)):
        for page in range(min(num, lengths[i] - 1) // page_size):
            shared[i][page] = own[origin][page]
            for cache in (keys, values):
                cache[own[i][page]] = cache[own[origin][page]]
    q = torch.randn(len(lengths), heads, size, generator=generator).to(dtype)
    k, v = (torch.randn(len(lengths), groups, size, generator=generator).to(dtype) for _ in "kv")
    slots = [
        table[(n - 1) // page_size] * page_size + (n - 1) % page_size
        for table, n in zip(shared, lengths, strict=True)
    ]
    results, items = [], []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        for tables in (own, shared):
            torch.set_num_threads(threads)
            width = max(pages_of)
            backend = NativeBackend([keys], [values], num_heads=heads, scale=size**-0.5)
            padded = torch.tensor([(table + [0] * width)[:width] for table in tables])
            starts = list(range(len(lengths) + 1))
            arguments = starts, lengths, torch.tensor(slots), padded
            backend.plan(BatchLayout(*arguments))
            items.append(backend.num_items)
            for _ in range(2):  # a plan serves all layers
                results.append(backend(0, q, k, v))
    torch.set_num_threads(before)
    assert all(same_bits(result, results[0]) for result in results)
    assert items[1] != items[0]  # one thread: an item per sequence and one per prefix
