"""`Packer`: a plan becomes tensors.

The chunks of a step are laid one after the other on one token axis, whatever their lengths: no
padding, no phase. Called once per step by the model runner; the only place where `Sequence`s are
read on the tensor side. Host-side numbers are gathered in lists and copied in one go. Page tables
stay in memory from step to step, and a row is written again when its sequence's pages are others:
what is packed is a function of the plan alone, what it costs is not one of the context.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from infer.attention.layout import BatchLayout
from infer.schedule.sequence import Plan, Sequence


@dataclass(slots=True, eq=False)
class PackedStep:
    """The tensors of one step."""

    tokens: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    layout: BatchLayout
    sampled_rows: list[int]
    """[R] rows of the T tokens whose hidden states are sampled from"""
    sampled: list[Sequence]
    """[R] the sequences they belong to"""


class Packer:
    """See the module's docstring."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._tables = torch.zeros((0, 0), dtype=torch.int64)
        self._written: list[list[int]] = []
        """the pages that are in the rows of `_tables`"""

    def pack(self, plan: Plan) -> PackedStep:
        """Lay the chunks of a plan along the token axis. The next call ends the step's tensors."""
        page_size = self._page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start_loc = [0]
        seq_lens: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[Sequence] = []
        for chunk in plan:
            sequence, start, num = chunk.sequence, chunk.start, chunk.num_tokens
            pages, end = sequence.table.pages, start + num
            if num == 1:
                tokens.append(sequence.tokens[start])
                positions.append(start)
                slots.append(pages[start // page_size] * page_size + start % page_size)
            else:
                tokens += sequence.tokens[start:end]
                positions += range(start, end)
                slots += [
                    pages[p // page_size] * page_size + p % page_size for p in range(start, end)
                ]
            query_start_loc.append(len(tokens))
            seq_lens.append(end)
            if chunk.samples:
                sampled_rows.append(len(tokens) - 1)
                sampled.append(sequence)
        numbers = torch.frombuffer(array("q", tokens + positions + slots), dtype=torch.int64)
        tokens_, positions_, slot_mapping = numbers.to(self._device).view(3, -1).unbind()
        return PackedStep(
            tokens=tokens_,
            positions=positions_,
            layout=BatchLayout(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                slot_mapping=slot_mapping,
                page_tables=self._page_tables([chunk.sequence.table.pages for chunk in plan]),
            ),
            sampled_rows=sampled_rows,
            sampled=sampled,
        )

    def _page_tables(self, tables: list[list[int]]) -> Tensor:
        height, width = len(tables), max(map(len, tables))
        if height > self._tables.shape[0] or width > self._tables.shape[1]:
            height, width = max(height, self._tables.shape[0]), max(width, self._tables.shape[1])
            # Half as much again, so that growing tokens by token is rare.
            self._tables = torch.zeros((height * 3 // 2, width * 3 // 2), dtype=torch.int64)
            self._written = [[]] * len(self._tables)
        rows = None
        for i, pages in enumerate(tables):
            if self._written[i] != pages:
                rows = self._tables.numpy() if rows is None else rows
                rows[i, : len(pages)] = pages
                rows[i, len(pages) :] = 0
                self._written[i] = pages.copy()
        return self._tables[: len(tables), : max(map(len, tables))].to(self._device)
