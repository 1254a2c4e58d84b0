"""Buffers for a step's numbers on a device, at fixed addresses and filled by one copy.

`StepLayout` says where each column of a step lies in a buffer of 32-bit words. The offsets are the
same on the host and on the device. The device buffer keeps its address, so a CUDA graph can hold
it. The host has two pinned buffers: one is written while the other is still being copied.
Attention items, whose number varies, come last, so a step copies only the words that it uses.

`TableRows` keeps page tables on the device. A running sequence keeps its row, and only changed
pages are sent.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from infer.schedule.sequence import Sequence, Status

_ALIGNMENT = 32
"""Alignment of a column in 32-bit words: the cache line of a GPU."""


@dataclass(frozen=True, slots=True)
class Column:
    """One array in a step's buffer."""

    name: str
    """Name of the column."""
    begin: int
    """Index of the column's first 32-bit word."""
    shape: tuple[int, ...]
    """Shape of the array."""
    kind: str
    """Dtype of the array: int32, int64 or float32."""

    @property
    def num_words(self) -> int:
        """The column's size in 32-bit words."""
        return int(np.prod(self.shape)) * (2 if self.kind == "int64" else 1)

    def of_host(self, words: np.ndarray) -> np.ndarray:
        """The column as a view of a host buffer."""
        part = words[self.begin : self.begin + self.num_words]
        return part.view(self.kind).reshape(self.shape)

    def of_device(self, words: Tensor) -> Tensor:
        """The column as a view of a device buffer."""
        part = words[self.begin : self.begin + self.num_words]
        return part.view(getattr(torch, self.kind)).view(self.shape)


class StepLayout:
    """The columns of a step's buffer, for steps up to a certain size."""

    def __init__(
        self,
        num_tokens: int,
        num_rows: int,
        num_updates: int,
        items: Seq[tuple[int, int]],
        num_fields: int,
    ) -> None:
        """The arguments are the maxima of a step.

        `num_updates`: changed entries of page tables. `items`: for each attention window (short
        items, long items). `num_fields`: fields of an item.
        """
        self.num_tokens, self.num_rows, self.num_updates = num_tokens, num_rows, num_updates
        self.columns: dict[str, Column] = {}
        self.num_words = 0
        rows = (num_rows,)
        self._add("seeds", rows, "int64")
        for name in ("temperatures", "top_ps", "min_ps"):
            self._add(name, rows, "float32")
        for name in ("top_ks", "narrowed", "draw_positions", "sampled_rows"):
            self._add(name, rows, "int32")
        for name in ("tokens", "positions", "slots"):
            self._add(name, (num_tokens,), "int32")
        self._add("num_updates", (1,), "int32")
        for name in ("places", "pages"):
            self._add(name, (num_updates,), "int32")
        for window, _ in enumerate(items):
            self._add(f"num_short_{window}", (1,), "int32")
            self._add(f"num_long_{window}", (1,), "int32")
        for window, (short, long) in enumerate(items):
            self._add(f"short_{window}", (short, num_fields), "int32")
            self._add(f"long_{window}", (long, num_fields), "int32")
        self.num_windows = len(items)

    def _add(self, name: str, shape: tuple[int, ...], kind: str) -> None:
        column = Column(name, self.num_words, shape, kind)
        self.columns[name] = column
        self.num_words += -(-column.num_words // _ALIGNMENT) * _ALIGNMENT

    def host(self, words: np.ndarray) -> dict[str, np.ndarray]:
        """The columns by name, as views of a host buffer."""
        return {name: column.of_host(words) for name, column in self.columns.items()}

    def device(self, words: Tensor) -> dict[str, Tensor]:
        """The columns by name, as views of a device buffer."""
        return {name: column.of_device(words) for name, column in self.columns.items()}

    def used_words(self, items: Seq[tuple[int, int]]) -> int:
        """The number of words, from the buffer's beginning, that a step with these items uses."""
        end = self.columns["short_0"].begin
        for window, counts in enumerate(items):
            for name, count in zip((f"short_{window}", f"long_{window}"), counts, strict=True):
                if count:
                    column = self.columns[name]
                    end = column.begin + count * column.shape[1]
        return end


class StepBuffers:
    """Two host buffers in turn, one device buffer, and the buffers for a step's results."""

    def __init__(self, num_words: int, num_rows: int, device: torch.device) -> None:
        """`num_words`: of the largest `StepLayout`. `num_rows`: maximum of sampled rows."""
        pinned = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._halves = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._views = [half.numpy() for half in self._halves]
        # The tokens of the sampled rows, then their flags.
        self.results = torch.zeros(2 * num_rows, dtype=torch.int32, device=device)
        self._pinned_outputs = [
            torch.zeros(2 * num_rows, dtype=torch.int32, pin_memory=pinned) for _ in range(2)
        ]
        self._turn = 0
        self._hosts: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._devices: dict[int, dict[str, Tensor]] = {}

    def next_half(self, layout: StepLayout) -> dict[str, np.ndarray]:
        """The columns of the other host buffer, for the next step.

        That buffer was copied two steps ago. The results of that step have been waited for, so the
        copy is complete.
        """
        self._turn ^= 1
        key = (self._turn, id(layout))
        if key not in self._hosts:
            self._hosts[key] = layout.host(self._views[self._turn])
        return self._hosts[key]

    def on_device(self, layout: StepLayout) -> dict[str, Tensor]:
        """The columns of the device buffer."""
        if id(layout) not in self._devices:
            self._devices[id(layout)] = layout.device(self.words)
        return self._devices[id(layout)]

    def send(self, num_words: int) -> None:
        """Copy the first `num_words` words of the host buffer to the device, without waiting."""
        half = self._halves[self._turn]
        self.words[:num_words].copy_(half[:num_words], non_blocking=True)

    def fetch(self, num_rows: int) -> np.ndarray:
        """Copy the results of `num_rows` rows to the host, without waiting.

        The result [2, num_rows], tokens and flags, is valid once the copy is complete.
        """
        pinned_output = self._pinned_outputs[self._turn][: 2 * num_rows]
        pinned_output.copy_(self.results[: 2 * num_rows], non_blocking=True)
        return pinned_output.numpy().reshape(2, num_rows)


class TableRows:
    """Page tables on the device, [rows, P] int32, and the assignment of rows to sequences."""

    def __init__(self, num_rows: int, num_pages: int, device: torch.device) -> None:
        """`num_rows` must exceed the number of sequences in two consecutive steps.

        `num_pages`: the number of pages of the longest sequence.
        """
        self.width = -(-num_pages // 4) * 4
        self.tables = torch.zeros((num_rows, self.width), dtype=torch.int32, device=device)
        self.mirror = np.zeros((num_rows, self.width), np.int32)
        """Copy of `tables` on the host, [rows, P] int32."""
        self._owners: list[Sequence | None] = [None] * num_rows
        self._num_given = 0
        """Rows that were given to sequences since unused ones were freed."""
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows))
        self._written: list[list[int]] = [[] for _ in range(num_rows)]

    def row(self, sequence: Sequence) -> int:
        """The row of a sequence, which keeps it while it is running."""
        row = self._row_of.get(id(sequence))
        if row is None:
            self._num_given += 1
            if not self._free:
                self._free_unused_rows()
            row = self._free.pop()
            self._row_of[id(sequence)] = row
            self._owners[row] = sequence
        return row

    def begin_step(self) -> None:
        """Forget sequences that have ended, if there may be many: they may hold much memory."""
        if self._num_given > len(self._owners) // 8:
            self._free_unused_rows()

    def _free_unused_rows(self) -> None:
        """Free the rows of sequences that are not running any more."""
        self._num_given = 0
        for row, owner in enumerate(self._owners):
            if owner is not None and owner.status is not Status.RUNNING:
                del self._row_of[id(owner)]
                self._owners[row] = None
                self._free.append(row)

    def forget(self) -> None:
        """Record that the device's page tables hold none of the pages that were to be written."""
        self._written = [[] for _ in self._written]

    def changes(self, row: int, pages: list[int]) -> tuple[list[int], list[int]]:
        """(indices into the flattened tables, page numbers) to write for this row to hold `pages`.

        The changes are recorded as written, so the caller must write them.
        """
        written = self._written[row]
        if written == pages:
            return [], []
        begin, count = row * self.width, len(written)
        self._written[row] = pages.copy()
        self.mirror[row, : len(pages)] = pages
        if written == pages[:count]:
            return list(range(begin + count, begin + len(pages))), pages[count:]
        differing = [i for i, page in enumerate(pages) if i >= count or written[i] != page]
        return [begin + i for i in differing], [pages[i] for i in differing]
