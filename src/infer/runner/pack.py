"""`Packer`: converts a plan to tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from infer.attention.layout import BatchLayout
from infer.schedule.page_allocator import PageTable
from infer.schedule.sequence import PENDING, Plan, Sequence

Rows = Mapping[int, int]
"""Row of each sequence among the sampled rows of a step, by `id(sequence)`."""
NO_ROWS: Rows = MappingProxyType({})
"""The rows of a step in which nothing is sampled."""
_NONE = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class PackedStep:
    """The tensors of one step."""

    tokens: Tensor
    """Token ids, [T] int64; those that are not known yet are 0 until `fill`."""
    positions: Tensor
    """Positions of the tokens in their sequences, [T] int64."""
    layout: BatchLayout
    """Layout of the step for attention."""
    sampled_rows: list[int]
    """Rows, among the T tokens, from whose hidden states a token is sampled; [R]."""
    sampled: list[Sequence]
    """Sequences of the sampled rows, [R]; with the proposed tokens that go before a row."""
    drawn_at: np.ndarray
    """Position in its sequence of each token that is sampled, [R] int64."""
    unknown: np.ndarray
    """Rows, among the T tokens, whose token is not known yet; int64."""
    unknown_from: np.ndarray
    """Row of each of them among the sampled rows of the step before; int64."""

    def fill(self, sampled: np.ndarray) -> None:
        """Write the unknown tokens. `sampled` [R] int64: the step before's; below 0: none."""
        if len(self.unknown):
            # What follows a token that is none is dropped, but is computed.
            self.tokens.numpy()[self.unknown] = np.maximum(sampled, 0)[self.unknown_from]

    def rows(self) -> Rows:
        """The row of each sequence among the sampled ones; without proposed tokens."""
        return {id(sequence): row for row, sequence in enumerate(self.sampled)}


class Packer:
    """Converts plans to tensors.

    The chunks of a step, whatever their lengths, follow one another on one token axis without
    padding. The model runner packs once per step. Only this module reads `Sequence`s to make the
    model's inputs on a CPU. Page tables stay in memory between steps, and a row is rewritten only
    when its pages have changed; cells are looked up in them for all tokens together. So the result
    depends on the plan alone, and the cost of packing does not grow with the context.

    A token that is not known yet is the result of a row of the step before. The step says which one
    (`PackedStep.fill`), and the packer of the step after it is told the rows.
    """

    def __init__(self, page_size: int, device: torch.device) -> None:
        """`page_size`: number of cells of a page; `device`: of the tensors."""
        self._page_size = page_size
        self._device = device
        self._tables = torch.zeros((0, 0), dtype=torch.int64)
        self._rows = self._tables.numpy()
        """The same memory as `_tables`."""
        self._written: list[tuple[PageTable | None, int]] = []
        """Page table in each row of `_tables`, and its version when it was written."""

    def pack(self, plan: Plan, before: Rows = NO_ROWS) -> PackedStep:
        """The tensors of a plan. The next call reuses their memory.

        `before`: rows of the step that samples the tokens which are not known yet."""
        tokens: list[int] = []
        counts, starts = [], []
        sampled_rows: list[int] = []
        sampled: list[Sequence] = []
        for chunk in plan:
            sequence, start, num = chunk.sequence, chunk.start, chunk.num_tokens
            ids, end = sequence.tokens, start + num
            if num == 1:
                tokens.append(ids[start])
            else:
                tokens += ids[start:end]
            if chunk.proposed:
                tokens += chunk.proposed
                num += len(chunk.proposed)
                sampled_rows += range(len(tokens) - 1 - len(chunk.proposed), len(tokens))
                sampled += chunk.samplers()
            elif end == len(ids):
                sampled_rows.append(len(tokens) - 1)
                sampled.append(sequence)
            counts.append(num)
            starts.append(start)
        tables = self._page_tables([chunk.sequence.table for chunk in plan])
        numbers = np.empty((3, len(tokens)), np.int64)
        numbers[0] = tokens
        firsts = np.array(starts, np.int64)
        if len(tokens) == len(plan):
            owners, positions = np.arange(len(plan)), firsts
            query_starts = list(range(len(plan) + 1))
        else:
            lengths = np.array(counts, np.int64)
            ends = np.cumsum(lengths)
            owners = np.repeat(np.arange(len(plan)), lengths)
            positions = np.arange(len(tokens)) + np.repeat(firsts - ends + lengths, lengths)
            query_starts = [0, *ends.tolist()]
        pages, offsets = np.divmod(positions, self._page_size)
        numbers[1] = positions
        numbers[2] = self._rows[owners, pages] * self._page_size + offsets
        unknown, unknown_from = self._unknown(tokens, numbers[0], sampled_rows, sampled, before)
        tokens_, positions_, slots = torch.from_numpy(numbers).to(self._device).unbind()
        return PackedStep(
            tokens=tokens_,
            positions=positions_,
            layout=BatchLayout(
                query_start_loc=query_starts,
                seq_lens=[start + num for start, num in zip(starts, counts, strict=True)],
                slot_mapping=slots,
                page_tables=tables,
            ),
            sampled_rows=sampled_rows,
            sampled=sampled,
            drawn_at=positions[sampled_rows] + 1,
            unknown=unknown,
            unknown_from=unknown_from,
        )

    @staticmethod
    def _unknown(
        tokens: list[int],
        numbers: np.ndarray,
        sampled_rows: list[int],
        sampled: list[Sequence],
        before: Rows,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows of tokens that are not known yet, which become 0 in `numbers`, and where they
        come from. Such a token is the last one of its sequence, so one is sampled behind it."""
        if not before or PENDING not in tokens:
            return _NONE, _NONE
        unknown = [
            (row, s) for row, s in zip(sampled_rows, sampled, strict=True) if tokens[row] < 0
        ]
        rows = np.array([row for row, _ in unknown], np.int64)
        numbers[rows] = 0
        return rows, np.array([before[id(sequence)] for _, sequence in unknown], np.int64)

    def _page_tables(self, tables: list[PageTable]) -> Tensor:
        height, width = len(tables), max(len(table.pages) for table in tables)
        if height > self._tables.shape[0] or width > self._tables.shape[1]:
            most = max(height, self._tables.shape[0]), max(width, self._tables.shape[1])
            # Room for half as much again, so that the tables rarely grow.
            self._tables = torch.zeros((most[0] * 3 // 2, most[1] * 3 // 2), dtype=torch.int64)
            self._rows = self._tables.numpy()
            self._written = [(None, 0)] * len(self._rows)
        rows, written = self._rows, self._written
        for i, table in enumerate(tables):
            owner, version = written[i]
            if owner is not table or version != table.version:
                pages = table.pages
                rows[i, : len(pages)] = pages
                rows[i, len(pages) :] = 0
                written[i] = (table, table.version)
        return self._tables[:height, :width].to(self._device)
