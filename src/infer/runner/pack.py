"""`pack`: a plan becomes tensors.

The chunks of a step are laid one after the other on one token axis, whatever their lengths: no
padding, no phase. Called once per step by the model runner; the only place where `Sequence`s are
read on the tensor side. Host-side numbers are gathered in lists and copied in one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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


def pack(plan: Plan, page_size: int, device: torch.device) -> PackedStep:
    """Lay the chunks of a plan along the token axis."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    sampled_rows: list[int] = []
    sampled: list[Sequence] = []
    max_query_len = 0
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
            slots += [pages[p // page_size] * page_size + p % page_size for p in range(start, end)]
        query_start_loc.append(len(tokens))
        seq_lens.append(end)
        max_query_len = max(max_query_len, num)
        if chunk.samples:
            sampled_rows.append(len(tokens) - 1)
            sampled.append(sequence)
    max_seq_len = max(seq_lens)
    tables = np.zeros((len(plan), -(-max_seq_len // page_size)), dtype=np.int64)
    for i, chunk in enumerate(plan):
        num_pages = -(-seq_lens[i] // page_size)
        tables[i, :num_pages] = chunk.sequence.table.pages[:num_pages]
    numbers = torch.tensor([tokens, positions, slots], dtype=torch.int64).to(device)
    return PackedStep(
        tokens=numbers[0],
        positions=numbers[1],
        layout=BatchLayout(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            slot_mapping=numbers[2],
            page_tables=torch.from_numpy(tables).to(device),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        ),
        sampled_rows=sampled_rows,
        sampled=sampled,
    )
