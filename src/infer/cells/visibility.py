"""`Visibility`: which cells each token of a batch sees, as page tables for attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from infer.attention.layout import BatchLayout
from infer.cells.batch import CheckedBatch
from infer.cells.cell_table import CellTable, Int64, Placed


@dataclass(frozen=True, slots=True, eq=False)
class PartLayout:
    """The tokens of one part of a batch, in the order in which they are computed."""

    order: Int64
    """Index in the batch of each token, [T]."""
    layout: BatchLayout
    """Layout for layers without a window, and for all layers if `by_window` is empty."""
    by_window: dict[int, BatchLayout]
    """Layout for the layers of each window, with one token in each of its sequences."""
    is_gapless: bool = True
    """Whether the positions of every run's cells are consecutive, none twice."""


@dataclass(frozen=True, slots=True, eq=False)
class _Runs:
    """The runs of a part: B ranges of its tokens in computed order."""

    order: Int64
    starts: list[int]
    """First token of each run, then T; [B+1]."""
    lengths: list[int]
    """Number of cells that the last token of each run sees, [B]."""
    tables: Int64
    """Page numbers in the order of positions, [B, P]."""
    is_gapless: bool
    """Whether the positions of every run's cells are consecutive, none twice."""


class Visibility:
    """A token sees a cell when a sequence holds both and the cell's position is not after the
    token's. So tokens with the same set of sequences have the same cells in view, up to their own
    position. They are grouped by their sets once per decode, and a group's cells in the order of
    their positions are one page table with pages of one cell. A run is a range of a group's tokens
    whose cells follow one another in it: for attention it is a sequence whose last tokens are
    computed. Attention's causal order then is the order of positions, because a token's own cell is
    the last one that it sees.

    Attention counts a sliding window in cells of the table, which is right where the positions of a
    run have no gap and none is there twice. For other runs (`by_window`) each token has a table of
    its own with exactly the cells in its window, and attention without a window reads it.
    """

    def __init__(self, cells: CellTable, batch: CheckedBatch, placed: Placed) -> None:
        """`placed`: the cells that the batch has got in the table."""
        self._cells, self._batch, self._placed = cells, batch, placed
        self._is_single = all(len(ids) == 1 for ids in batch.seq_ids)
        groups = {ids: i for i, ids in enumerate(dict.fromkeys(batch.seq_ids))}
        self._sets = list(groups)
        self._group = np.fromiter((groups[ids] for ids in batch.seq_ids), np.int64)
        self._index = placed.index.copy()
        """Place of each token's own cell in its group's table, [T]."""
        self._tables = [None if len(ids) == 1 else cells.seen_by(ids) for ids in self._sets]
        for group, table in enumerate(self._tables):
            if table is not None:
                place_of = np.zeros(cells.num_cells + 1, np.int64)
                place_of[table] = np.arange(len(table))
                members = np.flatnonzero(self._group == group)
                self._index[members] = place_of[placed.cells[members] + 1]

    def part(self, first: int, end: int, windows: Sequence[int]) -> PartLayout:
        """The layout of the tokens `first` to `end` of the batch.

        `windows`: the distinct windows of the model's layers, in positions.
        """
        runs = self._runs(first, end)
        slots = torch.from_numpy(self._placed.cells[runs.order] + 1)
        tables = torch.from_numpy(runs.tables)
        layout = BatchLayout(runs.starts, runs.lengths, slots, tables)
        if runs.is_gapless:
            return PartLayout(runs.order, layout, {})
        by_window = {window: self._exact(runs, window, layout) for window in windows}
        return PartLayout(runs.order, layout, by_window, is_gapless=False)

    def _runs(self, first: int, end: int) -> _Runs:
        group, index = self._group[first:end], self._index[first:end]
        order = np.argsort(group, kind="stable")
        group, index = group[order], index[order]
        goes_on = (np.diff(group) == 0) & (np.diff(index) == 1)
        begins = np.concatenate(([0], np.flatnonzero(~goes_on) + 1))
        starts = [*begins.tolist(), end - first]
        lengths = (index[np.array(starts[1:]) - 1] + 1).tolist()
        groups = group[begins]
        if self._is_single:
            seqs = np.array([self._sets[set_index][0] for set_index in groups.tolist()])
            is_gapless = all(map(self._cells.is_gapless, seqs.tolist()))
            tables = self._cells.rows(seqs, max(lengths))
        else:
            tables = np.zeros((len(groups), max(lengths)), np.int64)
            is_gapless = True
            for row, (set_index, length) in enumerate(zip(groups.tolist(), lengths, strict=True)):
                tables[row, :length] = self._table(set_index)[:length]
                is_gapless &= bool((np.diff(self._cells.pos[tables[row, :length] - 1]) == 1).all())
        return _Runs(order + first, starts, lengths, tables, is_gapless)

    def _table(self, group: int) -> Int64:
        table = self._tables[group]
        return self._cells.row(self._sets[group][0]) if table is None else table

    def _exact(self, runs: _Runs, window: int, layout: BatchLayout) -> BatchLayout:
        """A table for each token: the cells that it sees in a window, its own one last."""
        seen: list[Int64] = []
        for row, (start, end) in enumerate(zip(runs.starts, runs.starts[1:], strict=False)):
            table = runs.tables[row, : runs.lengths[row]]
            pos = self._cells.pos[table - 1]
            for index in range(len(table) - (end - start), len(table)):
                low = np.searchsorted(pos, pos[index] - window, side="right")
                seen.append(table[low : index + 1])
        tables = np.zeros((len(seen), max(map(len, seen))), np.int64)
        for row, cells in enumerate(seen):
            tables[row, : len(cells)] = cells
        return BatchLayout(
            query_start_loc=list(range(len(seen) + 1)),
            seq_lens=[len(cells) for cells in seen],
            slot_mapping=layout.slot_mapping,
            page_tables=torch.from_numpy(tables),
        )
