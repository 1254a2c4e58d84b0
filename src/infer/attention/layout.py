"""`BatchLayout`: the ragged geometry of one step; `AttentionBackend`: who works from it.

Made by `runner.pack`, read by the backends. Shape letters, used everywhere: T tokens in the step,
B sequences, R rows sampled, H query heads, G key/value heads, D head size, E hidden size,
V vocabulary, P pages per table. There is no phase here: a decode is a query of one token, a
prefill one of many, and a step holds any mixture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from infer.kernels.rotary import Turn


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
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, turn: Turn | None = None
    ) -> Tensor:
        """Write this step's k, v [T, G, D] to their cells, then attend: q [T, H, D] → [T, H, D].

        `turn`: of q and k, before anything else.
        """
