"""`Packer`: converts a plan to tensors.

The chunks of a step, whatever their lengths, follow one another on one token axis without padding.
The model runner packs once per step. Only this module reads `Sequence`s to make the model's inputs
on a CPU. Numbers are collected in lists and copied together. Page tables stay in memory between
steps, and a row is rewritten only when its pages have changed. So the result depends on the plan
alone, and the cost of packing does not grow with the context.
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
    """Token ids, [T] int64."""
    positions: Tensor
    """Positions of the tokens in their sequences, [T] int64."""
    layout: BatchLayout
    """Layout of the step for attention."""
    sampled_rows: list[int]
    """Rows, among the T tokens, from whose hidden states a token is sampled; [R]."""
    sampled: list[Sequence]
    """Sequences of the sampled rows, [R]; with the proposed tokens that go before a row."""


class Packer:
    """Converts plans to tensors. See the module's docstring."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        """`page_size`: number of cells of a page; `device`: of the tensors."""
        self._page_size = page_size
        self._device = device
        self._tables = torch.zeros((0, 0), dtype=torch.int64)
        self._written: list[list[int]] = []
        """Page numbers in each row of `_tables`."""

    def pack(self, plan: Plan) -> PackedStep:
        """The tensors of a plan. The next call reuses their memory."""
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
            if chunk.proposed:
                tokens += [*sequence.tokens[start:], *chunk.proposed]
                num, end = chunk.num_rows, start + chunk.num_rows
                positions += range(start, end)
                slots += [
                    pages[p // page_size] * page_size + p % page_size for p in range(start, end)
                ]
            elif num == 1:
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
            if chunk.proposed:
                sampled_rows += range(len(tokens) - 1 - len(chunk.proposed), len(tokens))
                sampled += chunk.samplers()
            elif chunk.samples:
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
            # Room for half as much again, so that the tables rarely grow.
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
