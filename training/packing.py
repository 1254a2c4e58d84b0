"""From documents to batches.

Owns how tokenised documents are laid into rows: whole documents only, so that a question is
never cut off from its story, and each in the shortest rows that hold it, so that hardly any
row has two stories whose names could be mixed up. Called by train.py. It does not generate
text and knows nothing about the model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import count
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from grammar import documents

ROWS = {288: 14, 416: 10, 1280: 3}
"""Rows in a batch, by their length: about as many tokens in each."""
FILLER = 200
"""Documents up to this length may fill the gaps in longer rows."""
CHUNK = 6000
DRILLS = 2000
"""Documents and extra drills generated at once; enough that rows have hardly any gaps."""

Batch = tuple[Tensor, Tensor]
"""Tokens, and the tokens that follow them, -100 where there is nothing to learn."""


def _take_longest(waiting: list[list[int]], room: int) -> list[int]:
    # The list is sorted by length; nothing fits if even the first is too long.
    at = bisect_right(waiting, room, key=len)
    return waiting.pop(at - 1) if at else []


def _fill_rows(pieces: list[list[int]], fillers: list[list[int]], length: int) -> list[list[int]]:
    """Lay all pieces into rows, the longest first, and use up fillers in what is left over."""
    waiting = sorted(pieces, key=len)
    rows: list[list[int]] = []
    while waiting:
        row: list[int] = []
        while taken := _take_longest(waiting, length - len(row)) or _take_longest(
            fillers, length - len(row)
        ):
            row += taken
        rows.append(row)
    return rows


def _as_batch(rows: list[list[int]], length: int) -> Batch:
    table = torch.full((len(rows), length + 1), -100, dtype=torch.long)
    for index, row in enumerate(rows):
        table[index, : len(row)] = torch.tensor(row)
    return table[:, :-1].clamp(min=0), table[:, 1:]


def batches(tokenizer: Tokenizer, texts: list[str], seed: str) -> list[Batch]:
    """Return the batches of some documents, in an order that depends on the seed only."""
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    pieces = [encoding.ids[: max(ROWS) + 1] for encoding in encoded]
    rng = Random(f"packing/{seed}")
    made: list[Batch] = []
    fillers = sorted((piece for piece in pieces if len(piece) <= FILLER), key=len)
    for length, size in sorted(ROWS.items(), reverse=True):
        shorter = max((other for other in ROWS if other < length), default=FILLER - 1)
        chosen = [piece for piece in pieces if shorter + 1 < len(piece) <= length + 1]
        if shorter < FILLER:
            chosen, fillers = chosen + fillers, []
        rows = _fill_rows(chosen, fillers, length + 1)
        rng.shuffle(rows)
        # A last batch that is not full would make the compiler start again: leave it out.
        made += [_as_batch(rows[at : at + size], length)
                 for at in range(0, len(rows) - size + 1, size)]  # fmt: skip
    rng.shuffle(made)
    return made


def endless_batches(tokenizer: Tokenizer) -> Iterator[Batch]:
    """Yield training batches, every document used once."""
    for chunk in count():
        texts = [*documents("train", chunk * CHUNK, CHUNK),
                 *documents("drill", chunk * DRILLS, DRILLS)]  # fmt: skip
        yield from batches(tokenizer, texts, f"train/{chunk}")
