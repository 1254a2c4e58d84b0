"""`Graphs`: captured CUDA graphs by step size, and the sizes to which steps are padded."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable

import torch

log = logging.getLogger(__name__)

Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Function that records work and returns its replay, which does it again on the same memory."""

ROWS = (1, 2, 4, 8, 16, 24, *range(32, 257, 16))
"""Sizes, in rows, of steps in which every sequence has one token."""
MIXED_TOKENS = (16, 32, 64, 128)
"""Sizes of other steps, in tokens, below `TOKEN_STEP`."""
TOKEN_STEP = 256
"""Larger sizes of other steps are the multiples of this number of tokens."""
MIXED_ROWS = (8, 64)
"""Numbers of sampled rows of other steps, below the maximum."""


def row_sizes(max_sequences: int) -> tuple[int, ...]:
    """The sizes, in rows, to which steps are padded in which every sequence has one token."""
    return (*(rows for rows in ROWS if rows < max_sequences), max_sequences)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """The sizes, in tokens, to which other steps are padded."""
    largest = -(-max_tokens // TOKEN_STEP) * TOKEN_STEP
    return tuple(sorted({*MIXED_TOKENS, *range(TOKEN_STEP, largest + 1, TOKEN_STEP)}))


def step_sizes(max_tokens: int, max_sequences: int) -> list[int]:
    """The numbers of rows that matrix products can have, in steps up to this size."""
    return sorted({*row_sizes(max_sequences), *token_sizes(max_tokens)})


def padded(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the sorted `sizes` that is at least `count`; None if there is none."""
    index = bisect_left(sizes, count)
    return sizes[index] if index < len(sizes) else None


class Graphs:
    """Captured work by key.

    A step has hundreds of kernel launches, and launching them one by one takes longer than
    computing them. A graph holds the launches with their memory addresses. The numbers of a step
    are in buffers at fixed addresses, so a graph can be replayed for every step of the same size.
    Steps are padded to a few sizes.
    """

    def __init__(self, capture: Capture) -> None:
        """`capture`: records work for replay, such as `CudaCapture`."""
        self._capture = capture
        self._replays: dict[Hashable, Work] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Hashable, compute: Work) -> None:
        """Do the work of this key. The first call runs `compute` and captures it for later calls.

        `compute` must do the same work on the same memory in every call with this key. If it
        cannot be captured, for want of memory for example, every call runs it.
        """
        replay = self._replays.get(key)
        if replay is not None:
            replay()
            return
        compute()  # compiles kernels and initialises libraries, which a capture cannot
        try:
            self._replays[key] = self._capture(compute)
        except RuntimeError as error:
            # The work is done. If the device has failed, waiting for the step says so.
            log.warning("steps of size %s stay slow, since they cannot be captured: %s", key, error)
            self._replays[key] = compute


class CudaCapture:
    """A `Capture` for CUDA. All graphs share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        """`device`: on which the work is done."""
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Work) -> Work:
        """Record the launches of `compute`, after waiting for all work on the device."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        return graph.replay
