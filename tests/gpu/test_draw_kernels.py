"""`draw` against inversion in float64, and `begin`."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from infer.kernels.cuda import draw as kernels
from infer.kernels.cuda.draw import NOT_FINITE_FLAG, DrawBuffers, draw
from infer.kernels.cuda.step import begin
from infer.runner.sampler import uniform

VOCAB = 4096 + 131
NAN, INF = float("nan"), float("inf")


@dataclass
class Wish:
    """What a row asks for."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 1
    position: int = 7

    @property
    def narrowed(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def by_definition(row: Tensor, wish: Wish) -> int:
    """The token of a row, in float64: inversion in the order of ids, then among those that are
    more probable while they have top-p."""
    row = row.double()
    if wish.temperature == 0:
        return int(row.argmax())
    weights = ((row - row.max()) / wish.temperature).exp()
    before = row.sort(descending=True, stable=True).indices.argsort()  # rank; ties by id
    if wish.top_k:
        weights = weights * (before < wish.top_k)
    limit = wish.top_p * weights.sum()
    # With top-p alone the first attempt is among all, and others narrow from there.
    weights = weights * (row >= row.max() + wish.temperature * torch.tensor(wish.min_p).log())
    attempt = 0
    while True:
        sums = weights.cumsum(0)
        point = uniform(wish.seed, wish.position, attempt) * sums[-1]
        token = int(torch.searchsorted(sums, point, right=True))
        weights = weights * (before < before[token])
        if wish.top_p >= 1 or weights.sum() < limit:
            return token
        attempt += 1


def drawn(logits: Tensor, wishes: list[Wish], device: torch.device) -> tuple[list[int], list[int]]:
    """Tokens and flags; every buffer is strange before."""
    rows, vocab = logits.shape
    spaced = torch.full((rows, vocab + 3), NAN)  # a row's neighbours are never read
    spaced[:, :vocab] = logits
    buffers = DrawBuffers(rows, vocab, device)
    for name in ("places", "chosen"):
        getattr(buffers, name).fill_(2**30)
    tokens, flags = (torch.full((rows,), -9, dtype=torch.int32, device=device) for _ in range(2))

    def column(name: str, dtype: torch.dtype) -> Tensor:
        values = [getattr(wish, name) for wish in wishes]
        return torch.tensor(values).to(dtype).to(device)

    draw(
        spaced.to(device)[:, :vocab],
        buffers,
        temperatures=column("temperature", torch.float32),
        narrowed=column("narrowed", torch.int32),
        top_ks=column("top_k", torch.int32),
        top_ps=column("top_p", torch.float32),
        min_ps=column("min_p", torch.float32),
        seeds=column("seed", torch.int64),
        positions=column("position", torch.int32),
        tokens=tokens,
        flags=flags,
    )
    return tokens.tolist(), flags.tolist()


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB, spread: float = 3.0) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=numbers) * spread


def check(logits: Tensor, wishes: list[Wish], device: torch.device) -> None:
    tokens, flags = drawn(logits, wishes, device)
    assert not any(flags)
    assert tokens == [by_definition(*each) for each in zip(logits, wishes, strict=True)]


def test_a_draw_from_all(device: torch.device) -> None:
    wishes = [
        Wish(temperature, seed=2**62 + 977 * i, position=i * 31)
        for i, temperature in enumerate([0, 0.3, 0.8, 1, 1.7, 1e-3, 0] * 3)
    ]
    check(logits_of(len(wishes)), wishes, device)
    check(logits_of(len(wishes), vocab=37), wishes, device)


def test_narrowed_draws(device: torch.device) -> None:
    wishes = [
        Wish(top_k=1),
        Wish(top_k=20, seed=5),
        Wish(top_p=0.9, seed=3),
        Wish(top_p=0.1, seed=4),
        Wish(min_p=0.05),
        Wish(top_p=5e-324, seed=6),  # 0 in float32
        Wish(min_p=5e-324, seed=7),
        Wish(1.5, top_k=50, top_p=0.7, min_p=0.02, seed=-8),
        Wish(1.5, top_p=0.6, min_p=0.01, seed=9),
        Wish(),
        Wish(0, top_k=5),
        Wish(2.0, top_k=VOCAB, top_p=0.5),
    ]
    check(logits_of(len(wishes), seed=1), wishes, device)


@pytest.mark.slow
def test_many_narrowed_draws(device: torch.device) -> None:
    for seed in range(20):
        wishes = [
            Wish(
                0.2 + 0.3 * (i % 7),
                top_k=(0, 3, 50, 700)[i % 4],
                top_p=(1.0, 0.9, 0.4)[i % 3],
                min_p=(0.0, 0.02)[i % 2],
                seed=seed * 1000 + i,
            )
            for i in range(28)
        ]
        check(logits_of(len(wishes), seed, spread=1 + seed % 4), wishes, device)


def test_greedy_takes_the_lowest_of_equal_ids(device: torch.device) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [4100, 4099, 4222]] = 5
    logits[1, [900, 4099]] = 5
    assert drawn(logits, [Wish(0)] * 3, device)[0] == [4099, 900, 0]


def test_equal_logits_are_kept_from_the_lowest_id(device: torch.device) -> None:
    logits = torch.full((7, VOCAB), -30.0)
    logits[:, [4100, 4101, 7, 3000]] = 2.0
    wishes = [Wish(1.0, top_k=3, seed=i) for i in range(7)]
    tokens, _ = drawn(logits, wishes, device)
    assert set(tokens) == {7, 3000, 4100}


def test_what_is_forbidden_is_never_drawn(device: torch.device) -> None:
    logits = torch.full((6, VOCAB), -INF)
    logits[:, 4098] = 1.0
    logits[:3, 11] = 1.0
    wishes = [Wish(), Wish(top_k=9), Wish(top_p=0.99), Wish(0), Wish(min_p=0.5), Wish(top_p=0.2)]
    tokens, flags = drawn(logits, wishes, device)
    assert not any(flags)
    assert set(tokens[:3]) <= {11, 4098}
    assert set(tokens[3:]) == {4098}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("wish", [Wish(), Wish(0), Wish(top_k=4, top_p=0.5)], ids=str)
def test_rows_that_are_not_finite_are_flagged(wish: Wish, device: torch.device) -> None:
    logits = logits_of(6)
    logits[0, 4200] = NAN
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3] = NAN
    logits[4, 3:900] = -INF
    tokens, flags = drawn(logits, [wish] * 6, device)
    assert flags == [NOT_FINITE_FLAG] * 4 + [0, 0]
    assert tokens[:4] == [0] * 4, "the step ahead looks these up in the embedding"


def test_a_row_does_not_see_its_company(device: torch.device) -> None:
    logits = logits_of(4, seed=4)
    wishes = [Wish(seed=1), Wish(top_p=0.8, seed=2), Wish(top_k=9, seed=3), Wish(0)]
    together, _ = drawn(logits, wishes, device)
    for i in range(4):
        assert drawn(logits[i : i + 1], wishes[i : i + 1], device)[0] == [together[i]]


@pytest.mark.slow
def test_hundreds_of_seeds_follow_the_distribution(device: torch.device) -> None:
    rows = 300
    logits = torch.full((1, 40), -INF)
    logits[0, :3] = torch.tensor([0.5, 0.3, 0.2]).log()
    wishes = [Wish(1.0, seed=i, position=i) for i in range(rows)]
    tokens, _ = drawn(logits.repeat(rows, 1), wishes, device)
    counts = [tokens.count(i) / rows for i in range(3)]
    assert counts == pytest.approx([0.5, 0.3, 0.2], abs=0.08)


def test_the_blocks_of_the_scan_are_whole_groups() -> None:
    assert kernels.GROUP.value * kernels.SCAN_GROUPS.value == kernels.SCAN_BLOCK


def test_begin(device: torch.device) -> None:
    """Pending tokens come from the step before; the page tables take what has changed."""

    def whole(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens = whole(*range(300))
    tokens[[2, 299]] = whole(-1, -3)
    sampled = whole(71, 72, 73, -5)
    ids = torch.full((303,), -8, dtype=torch.int32, device=device)
    tables = torch.zeros(5, 4, dtype=torch.int32, device=device)
    updates = (whole(3, 19, 4, 0), whole(33, 34, 35, 99), whole(3))
    begin(tokens, sampled, ids[:300], tables, updates)
    want = [*range(300), -8, -8, -8]
    want[2], want[299] = 71, 73
    assert ids.tolist() == want
    wanted = [0] * 20
    wanted[3], wanted[19], wanted[4] = 33, 34, 35
    assert tables.flatten().tolist() == wanted
