"""Tests of `CellTable` against lists of sets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from infer.cells.cell_table import CellTable
from infer.errors import RequestError
from tests.support.cases import slow_but
from tests.support.dense_cells import SetCell, SetCells

MAX_LEN = 1 << 40


def rows(table: CellTable) -> list[tuple[int, tuple[int, ...], int]]:
    return sorted((r.pos, r.seq_ids, r.token) for r in table.records())


def place(table: CellTable, model: SetCells, tokens: list[int], seqs: tuple[int, ...]) -> None:
    """Put tokens behind the last cell of sequences that end at the same position."""
    start = model.next_pos(seqs[0])
    pos = list(range(start, start + len(tokens)))
    table.place(np.array(tokens), np.array(pos), [seqs] * len(tokens))
    model.cells += [SetCell(p, set(seqs), t) for p, t in zip(pos, tokens, strict=True)]


def step(rng: random.Random, table: CellTable, model: SetCells, max_seqs: int) -> None:
    seq, other = rng.randrange(max_seqs), rng.randrange(max_seqs)
    p0, p1 = rng.randrange(-1, 60), rng.randrange(-1, 90)
    match rng.randrange(12):
        case 0 | 1 | 2 | 3 | 4:
            num = rng.randrange(1, 40)
            if num > table.num_free:
                seq = max(range(max_seqs), key=lambda s: len(model.of(s, -1, -1)))
                table.remove(seq, -1, -1)
                model.seq_rm(seq, -1, -1)
            else:
                both = model.next_pos(seq) == model.next_pos(other)
                seqs = tuple(sorted({seq, other})) if both else (seq,)
                place(table, model, [rng.randrange(9) for _ in range(num)], seqs)
        case 5 | 6 | 7:
            table.copy(seq, other, p0, p1)
            model.seq_cp(seq, other, p0, p1)
        case 8 | 9:
            table.remove(seq, p0, p1)
            model.seq_rm(seq, p0, p1)
        case 10:
            delta = rng.randrange(-20, 20)
            table.add(seq, p0, p1, delta, MAX_LEN)
            model.seq_add(seq, p0, p1, delta)
        case _:
            if rng.random() < 0.05:
                table.keep(seq)
                model.seq_keep(seq)
            else:
                table.remove(-1, p0 + 50, p0 + 55)
                model.seq_rm(-1, p0 + 50, p0 + 55)


def random_program(seed: int, num_cells: int, max_seqs: int, num_ops: int, every: int) -> None:
    rng = random.Random(seed)
    table, model = CellTable(num_cells, max_seqs), SetCells()
    for i in range(num_ops):
        step(rng, table, model, max_seqs)
        assert table.num_free == num_cells - len(model.cells)
        seq = rng.randrange(max_seqs)
        assert table.pos_max(seq) == model.next_pos(seq) - 1
        if i % every == 0:
            table.check()
            assert rows(table) == model.rows()
            own = [c.pos for c in model.of(seq, -1, -1)]
            assert table.pos_min(seq) == min(own, default=-1)
            assert len(table.row(seq)) == len(own)


@pytest.mark.parametrize("num_ops", slow_but([1000], [1000, 10_000]))
def test_thousands_of_operations_on_4096_cells(num_ops: int) -> None:
    random_program(seed=1, num_cells=4096, max_seqs=24, num_ops=num_ops, every=100)


@pytest.mark.parametrize("seed", range(6))
def test_few_cells_and_a_check_after_each_operation(seed: int) -> None:
    random_program(seed, num_cells=60, max_seqs=4, num_ops=300, every=1)


def test_the_last_cell_is_used_and_the_lowest_free_one_comes_first() -> None:
    table, model = CellTable(5, 2), SetCells()
    place(table, model, [1, 2, 3, 4, 5], (0,))
    assert table.num_free == 0
    assert table.remove(0, 1, 3) == 2
    place(table, model, [6], (1,))
    assert [(r.cell, r.token) for r in table.records()] == [(0, 1), (1, 6), (3, 4), (4, 5)]


def test_a_range_is_half_open_and_minus_one_is_an_open_end() -> None:
    table, model = CellTable(10, 2), SetCells()
    place(table, model, list(range(8)), (0,))
    table.copy(0, 1, 2, 4)
    assert [r.seq_ids for r in table.records()] == [(0,)] * 2 + [(0, 1)] * 2 + [(0,)] * 4
    for empty in ((3, 3), (5, 2), (90, 99), (90, -1)):
        assert table.remove(0, *empty) == 0
    assert table.remove(0, 6, -1) == 2
    assert table.remove(0, -1, 1) == 1
    assert table.remove(0, 2, 4) == 0  # sequence 1 holds them still
    assert table.remove(1, -1, -1) == 2


def test_taking_back_leaves_no_trace() -> None:
    table, model = CellTable(20, 3), SetCells()
    place(table, model, [1, 2, 3], (0, 1))
    table.remove(0, 1, 2)
    before, status = table.records(), table.status()
    placed = table.place(np.array([7, 8]), np.array([3, 3]), [(0,), (1, 2)])
    assert table.records() != before
    table.take_back(placed)
    assert (table.records(), table.status()) == (before, status)
    table.check()


def test_a_shift_beyond_the_positions_is_refused_and_below_zero_frees() -> None:
    table, model = CellTable(20, 2), SetCells()
    place(table, model, [1, 2, 3, 4], (0, 1))
    before = table.records()
    with pytest.raises(RequestError, match=r"moves position 3 of sequence 0 to 8; .* 0 to 7"):
        table.add(0, 2, -1, 5, 8)
    assert table.records() == before
    assert table.add(0, -1, -1, -2, 8) == 2
    assert [(r.pos, r.token, r.seq_ids) for r in table.records()] == [
        (0, 3, (0, 1)),
        (1, 4, (0, 1)),
    ]


def test_the_dump_is_a_table() -> None:
    table, model = CellTable(20, 12), SetCells()
    place(table, model, [1, 22], (0, 11))
    assert table.dump(str).splitlines() == [
        "cell  pos  batch  sequences  token",
        "   0    0         0,11       1 '1'",
        "   1    1         0,11       22 '22'",
    ]
