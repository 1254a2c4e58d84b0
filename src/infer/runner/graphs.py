"""`Graphs`: the same work on the same memory is captured once and replayed afterwards.

A step has hundreds of launches, and launching them one by one takes longer than computing them. A
graph holds them with their addresses, so it can be replayed for every step of the same sizes: the
numbers of a step are in its buffers. Sizes are few: steps are padded to the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
Capture = Callable[[Callable[[], Result]], Callable[[], Result]]
"""of some work: what does it again, on the same memory, with the same result object"""

ROWS = (1, 2, 4, 8, *range(16, 257, 16))
"""rows of a step in which every sequence has one token"""
MIXED_TOKENS = (16, 32, 64, 128)
"""tokens of other steps, below the first multiple of `TOKEN_STEP`"""
TOKEN_STEP = 256
MIXED_ROWS = (8, 64)
"""rows that are sampled in other steps, below the largest number"""


def row_sizes(max_sequences: int) -> tuple[int, ...]:
    """Rows that a step of single tokens is padded to."""
    return (*(rows for rows in ROWS if rows < max_sequences), max_sequences)


def token_sizes(max_tokens: int) -> tuple[int, ...]:
    """Tokens that any other step is padded to."""
    largest = -(-max_tokens // TOKEN_STEP) * TOKEN_STEP
    return tuple(sorted({*MIXED_TOKENS, *range(TOKEN_STEP, largest + 1, TOKEN_STEP)}))


def step_sizes(max_tokens: int, max_sequences: int) -> list[int]:
    """All numbers of rows that products have in steps of at most so many tokens and sequences."""
    return sorted({*row_sizes(max_sequences), *token_sizes(max_tokens)})


def padded(count: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of the sizes that has room; None if none has."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None


class Graphs(Generic[Result]):
    """See the module's docstring."""

    def __init__(self, capture: Capture[Result]) -> None:
        self._capture = capture
        self._replays: dict[Hashable, Callable[[], Result]] = {}

    def __len__(self) -> int:
        return len(self._replays)

    def run(self, key: Hashable, compute: Callable[[], Result]) -> Result:
        """Do the work for this key: the first time as it is, then captured for later times."""
        replay = self._replays.get(key)
        if replay is not None:
            return replay()
        result = compute()  # compiles, and makes what libraries make when they are first used
        self._replays[key] = self._capture(compute)
        return result


class CudaCapture(Generic[Result]):
    """A `Capture` for CUDA. All graphs share one pool of memory: a result is good until the next
    replay of any of them."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Result]) -> Callable[[], Result]:
        """Record what `compute` launches; nothing may be in flight."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> Result:
            graph.replay()
            return result

        return replay
