"""`TritonBackend` against attention in float64, over caches in which everything else is NaN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import infer.attention.triton as backends
from infer.attention.layout import BatchLayout
from infer.attention.triton import TritonBackend
from infer.kernels.cuda.rotary import turn_and_write
from infer.kernels.linear.fusion import Norm
from infer.kernels.rotary import HeadNorms, QKRotation
from tests.support.cases import one_of
from tests.support.kernel_dtypes import INTERPRETED, KINDS, LOADED, assert_near

NAN = float("nan")


@dataclass
class Case:
    """A step: chunks (start, tokens) of sequences whose earlier cells are in the cache."""

    chunks: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    size: int = 32
    page: int = 7
    window: int | None = None
    softcap: float | None = None
    has_slopes: bool = False
    rounded: float | None = None
    rotation: str = "norms"
    """Norms, plain, only norms or none."""
    ordered: bool = False
    kind: torch.dtype = torch.float32
    seed: int = 0
    backend: dict[str, Any] = field(default_factory=dict)
    """Attributes of the backend that are set."""


class Step:
    """Tensors of a case: a cache of NaN but for the cells that its sequences have written."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.numbers = torch.Generator().manual_seed(case.seed)
        heads, groups = case.heads
        counts = [-(-(start + num) // case.page) for start, num in case.chunks]
        num_pages = sum(counts) + 3
        free = (torch.randperm(num_pages - 1, generator=self.numbers) + 1).tolist()
        # Behind the end of a table: pages of strangers.
        self.tables = torch.full((len(counts), max(counts) + 1), free.pop(), dtype=torch.int64)
        shape = (num_pages, case.page, groups, case.size)
        self.keys, self.values = (torch.full(shape, NAN, dtype=case.kind) for _ in range(2))
        self.starts, self.lengths, slots = [0], [], []
        self.positions: list[int] = []
        self.past: list[tuple[Tensor, Tensor]] = []
        for i, (start, num) in enumerate(case.chunks):
            pages = torch.tensor([free.pop() for _ in range(counts[i])])
            self.tables[i, : counts[i]] = pages
            at = torch.arange(start + num)
            cells = pages[at // case.page] * case.page + at % case.page
            old = self.random(start, groups, case.size), self.random(start, groups, case.size)
            self.keys.view(-1, groups, case.size)[cells[:start]] = old[0]
            self.values.view(-1, groups, case.size)[cells[:start]] = old[1]
            self.past.append(old)
            slots += cells[start:].tolist()
            self.positions += range(start, start + num)
            self.starts.append(self.starts[-1] + num)
            self.lengths.append(start + num)
        self.slots = torch.tensor(slots)
        self.num_tokens = self.starts[-1]
        qkv = self.random(self.num_tokens, heads + 2 * groups, case.size)
        self.qkv = qkv.flatten(1)
        angles = torch.rand(self.num_tokens, case.size // 2, generator=self.numbers) * 6
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norms = [torch.rand(case.size, generator=self.numbers) + 0.5 for _ in range(2)]
        self.scale = case.size**-0.5
        self.slopes = [2.0 ** -(1 + i) for i in range(heads)]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.numbers).to(self.case.kind)

    def rotation(self) -> QKRotation | None:
        if self.case.rotation == "none":
            return None
        norms = None
        if "norms" in self.case.rotation:
            norms = HeadNorms(*(Norm(w.to(self.device), 1e-6) for w in self.norms))
        if self.case.rotation == "only norms":
            return QKRotation(None, None, norms)
        return QKRotation(self.cos.to(self.device), self.sin.to(self.device), norms)

    def split(self, qkv: Tensor) -> list[Tensor]:
        heads, groups = self.case.heads
        parts = qkv.view(self.num_tokens, heads + 2 * groups, self.case.size)
        return list(parts.split((heads, groups, groups), 1))

    def compute(self) -> Tensor:
        """By the backend; the caches are then what it has left in them."""
        case = self.case
        self.keys, self.values = self.keys.to(self.device), self.values.to(self.device)
        backend = TritonBackend(
            [self.keys], [self.values], num_heads=case.heads[0], scale=self.scale,
            windows=[case.window], softcap=case.softcap, ordered=case.ordered,
            slopes=self.slopes if case.has_slopes else (), rounded=case.rounded,
        )  # fmt: skip
        for name, value in case.backend.items():
            assert hasattr(backend, name)
            setattr(backend, name, value)
        layout = BatchLayout(
            self.starts, self.lengths, self.slots.to(self.device), self.tables.to(self.device)
        )
        backend.plan(layout)
        self.num_splits = max(int(items[:, 7].max()) for *_, items in _items(backend))
        q, k, v = self.split(self.qkv.clone().to(self.device))  # q is turned where it is
        out = backend(0, q, k, v, self.rotation())
        assert not backend._arrived.any(), "a counter is not as the next launch needs it"
        return out

    def expected(self) -> Tensor:
        """In float64."""
        heads, groups = self.case.heads
        q, k, v = (part.double() for part in self.split(self.qkv))
        if "norms" in self.case.rotation:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w.double()
                for x, w in zip((q, k), self.norms, strict=True)
            )
        if self.case.rotation in ("norms", "plain"):
            cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
            q, k = (
                torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
                for a, b in (x.chunk(2, -1) for x in (q, k))
            )
        self.new_keys = k
        out = torch.empty(self.num_tokens, heads, self.case.size, dtype=torch.float64)
        for (old_k, old_v), first, end in zip(
            self.past, self.starts[:-1], self.starts[1:], strict=True
        ):
            all_k = torch.cat((old_k.double(), k[first:end])).repeat_interleave(heads // groups, 1)
            all_v = torch.cat((old_v.double(), v[first:end])).repeat_interleave(heads // groups, 1)
            scores = torch.einsum("qhd,khd->hqk", q[first:end], all_k) * self.scale
            if self.case.softcap is not None:
                scores = self.case.softcap * (scores / self.case.softcap).tanh()
            position = torch.arange(len(all_k))
            own = position[len(old_k) :, None]
            slopes = torch.tensor(self.slopes)[:, None, None]
            if self.case.rounded is not None:
                products = slopes.bfloat16() * position.bfloat16()
                scores = scores + products.double() * self.case.rounded
            elif self.case.has_slopes:
                scores = scores - slopes.double() * (own - position)
            sees = position <= own
            if self.case.window is not None:
                sees &= position > own - self.case.window
            weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
            out[first:end] = torch.einsum("hqk,khd->qhd", weights, all_v)
        return out


def _items(backend: TritonBackend) -> list[tuple[Any, Tensor]]:
    return [(None, t) for short, _, long, _ in backend._lists for t in (short, long) if len(t)]


def check(case: Case, device: torch.device) -> Step:
    step = Step(case, device)
    got, want = step.compute(), step.expected()
    assert_near(got, want)
    groups = case.heads[1]
    cells = step.keys.cpu().view(-1, groups, case.size)
    assert_near(cells[step.slots], step.new_keys)
    values = step.values.cpu().view(-1, groups, case.size)
    assert torch.equal(values[step.slots], step.split(step.qkv)[2])
    old = sum(start for start, _ in case.chunks)
    written = cells.isfinite().all(-1).all(-1).sum()
    assert written == old + step.num_tokens, "something is written elsewhere"
    return step


MIXED = [(9, 1), (40, 31), (5, 3), (70, 1)]
DECODE = [(9, 1), (0, 1), (141, 1), (63, 1)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_mixed_step(kind: torch.dtype, device: torch.device) -> None:
    check(Case(MIXED, kind=kind), device)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_of_single_tokens(kind: torch.dtype, device: torch.device) -> None:
    step = check(Case(DECODE, kind=kind), device)
    assert step.num_splits > 1 or not INTERPRETED


def test_a_long_context_is_split_and_merged(device: torch.device) -> None:
    for case in (Case([(299, 1)]), Case([(200, 2)], heads=(2, 1))):
        case.kind, case.backend = KINDS[0], {"num_programs": 16}
        assert check(case, device).num_splits > 2


@pytest.mark.parametrize("chunks", [MIXED, DECODE], ids=["mixed", "decode"])
def test_a_window_and_a_soft_cap(chunks: list[tuple[int, int]], device: torch.device) -> None:
    check(Case(chunks, window=11, softcap=2.0, rotation="plain", kind=KINDS[0], page=16), device)


@pytest.mark.parametrize(
    ("chunks", "rounded"),
    one_of(3, [(MIXED, 0.25), (MIXED, None), (DECODE, 0.25), (DECODE, None)]),
    ids=["mixed-rounded", "mixed-exact", "decode-rounded", "decode-exact"],
)
def test_slopes(chunks: list[tuple[int, int]], rounded: float | None, device: torch.device) -> None:
    for rotation in ("plain", "none"):
        case = Case(chunks, heads=(4, 2), rotation=rotation, kind=KINDS[0], has_slopes=True)
        case.rounded = rounded
        check(case, device)


def test_heads_of_512(device: torch.device) -> None:
    for chunks in ([(12, 1), (0, 2)], [(12, 1), (3, 1)]):
        check(Case(chunks, (4, 2), 512, 16, rotation="norms", kind=KINDS[0], softcap=4.0), device)


@pytest.mark.parametrize(
    ("heads", "size", "page", "rotation"),
    [
        ((3, 3), 80, 512, "none"),
        ((8, 1), 64, 16, "plain"),
        ((2, 2), 256, 5, "norms"),
        ((4, 2), 48, 7, "only norms"),
    ],
)
def test_heads_pages_and_turns(
    heads: tuple[int, int], size: int, page: int, rotation: str, device: torch.device
) -> None:
    for chunks in ([(12, 1), (0, 2)], [(12, 1), (3, 1)]):
        check(Case(chunks, heads, size, page, rotation=rotation, kind=KINDS[0]), device)


@pytest.mark.parametrize("chunks", [MIXED, [(600, 1), (0, 1)]], ids=["mixed", "decode"])
def test_the_ordered_mode(chunks: list[tuple[int, int]], device: torch.device) -> None:
    check(Case(chunks, ordered=True, kind=KINDS[0]), device)


def test_in_the_ordered_mode_a_row_has_the_same_bits_in_any_step(device: torch.device) -> None:
    kind = KINDS[0]
    together = Step(
        Case([(230, 40)], heads=(2, 1), ordered=True, kind=kind, rotation="plain"), device
    )
    whole = together.compute()
    for first, count in ((269, 1), (250, 20)):
        case = Case([(first, count)], heads=(2, 1), ordered=True, kind=kind, rotation="plain")
        alone = Step(case, device)
        last = first + count
        # The same sequence, whose earlier cells are those that the first step has written.
        alone.tables = together.tables
        alone.keys, alone.values = together.keys, together.values
        rows = slice(first - 230, last - 230)
        alone.slots, alone.qkv = together.slots[rows], together.qkv[rows]
        alone.cos, alone.sin = together.cos[rows], together.sin[rows]
        if device.type == "cuda":
            assert torch.equal(alone.compute(), whole[rows]), (first, count)
        else:  # numpy's products, of which the interpreter makes dots, may differ with their rows
            torch.testing.assert_close(alone.compute(), whole[rows])


def test_a_chunk_behind_whole_tiles_of_keys(device: torch.device) -> None:
    """Those that every row sees are met without masks."""
    check(Case([(130, 12)], kind=KINDS[0]), device)


def test_many_single_tokens(device: torch.device) -> None:
    """More than have programs of many threads each: no tile is read ahead."""
    chunks = [(i % 5, 1) for i in range(34)]
    check(Case(chunks, heads=(2, 1), size=16, kind=KINDS[0]), device)


@pytest.mark.parametrize("kind", LOADED, ids=str)
def test_padding_is_not_written(kind: torch.dtype, device: torch.device) -> None:
    heads, groups, size = 3, 2, 48
    qkv = torch.randn(4, heads + 2 * groups, size).to(kind).to(device)
    before = qkv.clone()
    q, k, v = qkv.split((heads, groups, groups), 1)
    caches = [torch.full((5, 3, groups, size), NAN, dtype=kind, device=device) for _ in range(2)]
    slots = torch.tensor([7, -1, 14, -1], dtype=torch.int32, device=device)
    cos = torch.full((4, size // 2), 0.6, device=device)
    sin = torch.full((4, size // 2), 0.8, device=device)
    turn_and_write[(4, 2)](
        q, k, v, *caches, slots, cos, sin, q, k,
        q.stride(0), k.stride(0), v.stride(0), cos.stride(0), 0.0,
        H=heads, G=groups, D=size, HALF=32, HEADS=4, TURN=True, NORMS=False, PDL=False,
    )  # fmt: skip
    assert torch.equal(qkv[1::2], before[1::2])
    for cache in caches:
        written = cache.view(-1, groups, size).isfinite().all(-1).all(-1).nonzero().flatten()
        assert written.tolist() == [7, 14]
    first, second = before[[0, 2], :heads].double().cpu().chunk(2, -1)
    want = torch.cat((0.6 * first - 0.8 * second, 0.6 * second + 0.8 * first), -1)
    assert_near(q[[0, 2]], want)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (16, 1)], ids=str)
def test_a_grid_of_shapes(
    kind: torch.dtype, size: int, heads: tuple[int, int], device: torch.device
) -> None:
    for window in (None, 50):
        for page in (7, 16, 512):
            chunks = [(99, 1), (0, 37), (63, 1), (64, 2)]
            check(Case(chunks, heads, size, page, window, kind=kind), device)
            check(Case([(99, 1), (63, 1)], heads, size, page, window, kind=kind), device)


@dataclass
class Planned:
    """A step of a real model's shape, for which items are made and nothing is computed."""

    heads: tuple[int, int]
    chunks: list[tuple[int, int]]
    """First position and number of tokens of each sequence."""
    ordered: bool = False


PLANS = {
    "as many heads as key heads": Planned((32, 32), [(500, 1)] * 253),
    "more such sequences": Planned((40, 40), [(300, 1)] * 256),
    "a thousand seats": Planned((16, 8), [(500, 1)] * 1009),
    "a crowd with long contexts": Planned((16, 8), [(30_000 + i, 1) for i in range(256)]),
    "one stream": Planned((16, 8), [(40_000, 1)]),
    "mixed": Planned((32, 8), [(0, 2000), *((700 * i, 1) for i in range(60)), (90, 3)]),
    "ordered, a prompt": Planned((16, 8), [(0, 4096)], ordered=True),
    "ordered, a chunk behind a long context": Planned((16, 8), [(32_000, 512)], ordered=True),
    "ordered, a crowd": Planned((16, 8), [(1600 + i, 1) for i in range(256)], ordered=True),
    "ordered, a crowd that does not fit": Planned((16, 8), [(20_000, 1)] * 256, ordered=True),
    "ordered, a prompt in company": Planned((32, 8), [(0, 3000), (5000, 1)], ordered=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_items_have_every_key_once_and_fit_into_memory(name: str) -> None:
    plan = PLANS[name]
    heads, groups = plan.heads
    cache = torch.zeros(1, 16, groups, 128)
    backend = TritonBackend([cache], [cache], num_heads=heads, scale=1.0, ordered=plan.ordered)
    # Those of an H100.
    backend.num_programs = 4 * 132
    backend.max_partial_rows = backends.PARTIAL_BYTES // (4 * heads * 130)
    starts = np.cumsum([0, *(num for _, num in plan.chunks)])
    lengths = [first + num for first, num in plan.chunks]
    [made] = backend.items(starts, lengths, np.arange(len(lengths), dtype=np.int32))
    capacity = backend.capacity(int(starts[-1]), len(lengths))
    assert len(made.short) <= capacity[0]
    assert len(made.long) <= capacity[1]
    seen: dict[int, list[tuple[int, int]]] = {}
    rows_of: dict[int, int] = {}
    for first_row, num, position, row, begin, end, split, splits, base, tile in [
        *made.short.tolist(),
        *made.long.tolist(),
    ]:
        assert plan.chunks[row][0] <= position < lengths[row]
        assert 0 <= split < splits
        seen.setdefault(first_row, []).append((begin, end))
        rows_of[first_row] = num
        if splits > 1:
            assert base + splits * num <= backend.max_partial_rows
            assert tile < backends.MAX_SHORT_TILES
            if plan.ordered:
                assert begin % backends.ORDERED_SPLIT == 0
    assert sum(rows_of.values()) == starts[-1]
    for first_row, parts in seen.items():
        sequence = int(np.searchsorted(starts, first_row, side="right")) - 1
        last = plan.chunks[sequence][0] + first_row - starts[sequence] + rows_of[first_row]
        parts.sort()
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == last
