"""`BatchLayout`: the ragged geometry of one step; `AttentionBackend`: who works from it.

Made by `runner.pack`, read by the backends. Shape letters, used everywhere: T tokens in the step,
B sequences, R rows sampled, H query heads, G key/value heads, D head size, E hidden size,
V vocabulary, P pages per table. There is no phase here: a decode is a query of one token, a
prefill one of many, and a step holds any mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from infer.kernels.rotary import QKRotation


@dataclass(slots=True, eq=False)
class BatchLayout:
    """Where each row's queries, keys and cells are. Host numbers are lists, for planning."""

    query_start_loc: list[int]
    """[B+1] where in the step's T tokens the queries of a sequence begin"""
    seq_lens: list[int]
    """[B] tokens in the cache after this step's were written"""
    slot_mapping: Tensor
    """[T] int64: the cell (page · page_size + offset) that each token's key and value go to"""
    page_tables: Tensor
    """[B, P] int64, filled up with page 0, which is scrap"""


class AttentionBackend(Protocol):
    """Causal attention of this step's queries over each sequence's pages."""

    def plan(self, layout: BatchLayout) -> None:
        """Prepare for a step; once per step, so nothing is built per layer."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: QKRotation | None = None
    ) -> Tensor:
        """Write this step's k, v [T, G, D] to their cells, then attend: q [T, H, D] → [T, H, D].

        `turn`: of q and k, before anything else.
        """


@dataclass(slots=True, eq=False)
class Items:
    """The work of a step for layers of one window, as numbers: [N, fields] int32 each."""

    short: np.ndarray
    """tiles of few queries, or splits of them"""
    long: np.ndarray
    """tiles of many queries"""


class DeviceBackend(AttentionBackend, Protocol):
    """A backend that works from numbers in memory at fixed addresses, as a captured graph does."""

    @property
    def windows(self) -> Sequence[int]:
        """The windows of the layers, each once; 0 = all positions."""

    @property
    def num_fields(self) -> int:
        """Numbers of an item."""

    @property
    def decodes(self) -> bool:
        """Whether a step of single tokens takes one launch a layer."""

    def capacity(self, num_tokens: int, num_sequences: int) -> tuple[int, int]:
        """Short and long items of a window, at most, in a step of so many tokens."""

    def items(
        self,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        table_rows: np.ndarray,
    ) -> list[Items]:
        """The items of a step for each of `windows`; sequence i has row `table_rows[i]` of the
        page tables."""

    def use(
        self,
        slots: Tensor,
        tables: Tensor,
        lists: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        *,
        decode: bool,
    ) -> None:
        """Work from tensors that are on the device: slots [T] (below 0: padding), page tables
        [·, P] int32, and for each window short items, their number, long items, their number. No
        long items at all: an empty tensor. `decode`: each sequence has one token."""
