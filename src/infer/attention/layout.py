"""`BatchLayout`: the lengths and cache cells of a step; `AttentionBackend`: the backends' protocol.

`runner.pack` makes the layout and the backends read it. All docstrings use these letters in shapes:
T tokens of the step, B sequences, R sampled rows, H query heads, G key/value heads, D head size,
E hidden size, V vocabulary size, P pages of a page table. Prefill and decode are not
distinguished: a decoding sequence has one query token, a prefilling one has many, and a step holds
any mixture of both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor

from infer.kernels.layer_stack import CallsThrough
from infer.kernels.loader import NativeCall
from infer.kernels.rotary import QKRotation


@dataclass(slots=True, eq=False)
class BatchLayout:
    """The position of each sequence's queries, keys and values in a step.

    The lists are on the host, where backends plan the step.
    """

    query_start_loc: list[int]
    """Index of each sequence's first query token among the step's T tokens, then T; [B+1]."""
    seq_lens: list[int]
    """Number of each sequence's tokens in the cache, this step's included; [B]."""
    slot_mapping: Tensor
    """Cache cell (page · page_size + offset) of each token's key and value; [T] int64."""
    page_tables: Tensor
    """Page numbers of each sequence, padded with page 0, which holds no data; [B, P] int64."""


def held_slopes(slopes: Sequence[float], rounded: float | None) -> Tensor:
    """The slopes of `Alibi` as backends use them: [H], float32."""
    held = torch.tensor(list(slopes), dtype=torch.float32)
    return held if rounded is None else held.bfloat16().float()


class AttentionBackend(Protocol):
    """Causal attention of this step's queries over each sequence's pages."""

    def plan(self, layout: BatchLayout) -> None:
        """Prepare for a step. The runner calls this once per step, before the first layer."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: QKRotation | None = None
    ) -> Tensor:
        """Store this step's k, v [T, G, D] in the cache, then attend: q [T, H, D] → [T, H, D].

        `rotation`: norms of heads and the rotation, which q and k get first.
        """


class CallingBackend(AttentionBackend, CallsThrough, Protocol):
    """A backend that computes decoding by calls of the native library, made before they are due."""

    def plan_call(self, layout: BatchLayout) -> NativeCall:
        """The call of `plan`; it lives until the layers are computed."""


def makes_calls(backend: AttentionBackend) -> TypeGuard[CallingBackend]:
    """Whether a backend is one of these."""
    return hasattr(backend, "plan_call")


@dataclass(slots=True, eq=False)
class Items:
    """The work items of a step for the layers of one window."""

    short: np.ndarray
    """Tiles of few queries, or splits of their keys; [N, fields] int32."""
    long: np.ndarray
    """Tiles of many queries; [N, fields] int32."""


class DeviceBackend(AttentionBackend, Protocol):
    """A backend that reads the step's layout from device memory at fixed addresses.

    A captured CUDA graph holds these addresses, so it can be replayed for other steps.
    """

    @property
    def windows(self) -> Sequence[int]:
        """The distinct windows of the layers, in positions; 0: all positions."""

    @property
    def num_fields(self) -> int:
        """The number of int32 fields of an item."""

    @property
    def decodes(self) -> bool:
        """Whether one launch per layer computes a step in which each sequence has one token."""

    def capacity(self, num_tokens: int, num_sequences: int) -> tuple[int, int]:
        """(maximum of short items, maximum of long items) of a window in a step of this size."""

    def items(
        self,
        query_start_loc: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        table_rows: np.ndarray,
    ) -> list[Items]:
        """The items of a step for each of `windows`.

        `query_start_loc` [B+1] and `seq_lens` [B]: as in `BatchLayout`. `table_rows` [B]: the row
        of each sequence in the page tables.
        """

    def use(
        self,
        slots: Tensor,
        tables: Tensor,
        lists: list[tuple[Tensor, Tensor, Tensor, Tensor]],
        *,
        decode: bool,
    ) -> None:
        """Set the device tensors from which the next calls work.

        `slots` [T]: cache cell of each token; negative: padding. `tables` [rows, P] int32: page
        tables. `lists`: for each window (short items, their number [1], long items, their number
        [1]); an empty tensor of long items means that there are none. `decode`: each sequence has
        one token.
        """
