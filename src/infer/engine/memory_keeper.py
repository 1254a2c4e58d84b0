"""`MemoryKeeper`: gives memory of the KV cache back to the system when it is not used"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from infer.schedule.page_allocator import PageAllocator, Run
from infer.schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

TEND_S = 1.0
"""Seconds between two looks at the memory."""
PERIODS = 4
"""Number of parts of `keep_s` by which the age of a free page is counted."""
RUN_BYTES = 64 << 10
"""Bytes of a run of pages, in the tensor of a layer, below which pages that are only old stay: so
huge pages are not cut into small pieces."""


class PageStorage(Protocol):
    """The memory of pages."""

    def release(self, runs: Sequence[Run]) -> None:
        """Give the memory of pages back to the system; they are zeros when they are used again."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors between which a page is divided."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The pages of a model, and their memory."""

    allocator: PageAllocator
    storage: PageStorage


class MemoryKeeper:
    """The core calls `tend` between steps. Pages that were free for `keep_s` seconds are given
    back, and what was cached in them is forgotten. About once a second the keeper asks how much
    memory there is room for. Without room the coldest free pages are given back, and if these are
    not enough, sequences are preempted until what is left fits; the first in rank always goes on.
    New pages are handed out within the room that there is. It has no torch and no clock of its own.
    """

    def __init__(
        self,
        pool: Pool,
        scheduler: Scheduler,
        room: Callable[[], int],
        *,
        keep_s: float,
        others: Sequence[Pool] = (),
        may_limit: bool = True,
    ) -> None:
        """`pool`: the scheduler's. `room`: bytes that may still be taken; negative: that many
        are to be given back. `keep_s`: 0 keeps pages for ever.
        `others`: of draft models. `may_limit`: whether the pool may get smaller than all seats
        need."""
        self._pool, self._others = pool, tuple(others)
        self._scheduler, self._room = scheduler, room
        self._keep_s, self._may_limit = keep_s, may_limit
        self._due_s = self._next_period_s = float("-inf")
        self._is_scarce = False
        self.num_given_back = 0
        """Bytes that were given back since the start."""

    def tend(self) -> None:
        """Do what is due; called between two steps, and about every second without steps."""
        now_s = self._scheduler.clock()
        if now_s < self._due_s:
            return
        self._due_s = now_s + TEND_S
        if self._keep_s and now_s >= self._next_period_s:
            self._next_period_s = now_s + self._keep_s / PERIODS
            for pool in (self._pool, *self._others):
                before = pool.allocator.begin_period() - PERIODS
                shortest = -(-RUN_BYTES * pool.storage.num_tensors // pool.storage.page_bytes)
                self._release(pool, before=before, shortest=shortest)
        self._fit()

    def _fit(self) -> None:
        """Keep to the room that there is."""
        allocator, page_bytes = self._pool.allocator, self._pool.storage.page_bytes
        room = self._room()
        least = allocator.pages_for(self._scheduler.config.max_seq_len)
        wanted = allocator.num_touched + room // page_bytes  # rounds down, also below zero
        limit = min(allocator.num_usable, max(least, wanted))
        if room < 0:
            for pool in self._others:
                self._release(pool, at_least=-(room // pool.storage.page_bytes))
        is_scarce, self._is_scarce = self._is_scarce, room < 0
        if self._is_scarce and not is_scarce:
            log.info(
                "main memory is scarce: the KV cache gives back what is not in use, and takes at"
                " most %.2f GiB",
                limit * page_bytes / 2**30,
            )
        if self._may_limit:
            allocator.limit = limit
            self._scheduler.keep_within_limit()
        if (excess := allocator.num_touched - limit) > 0:
            self._release(self._pool, at_least=excess)

    def _release(
        self, pool: Pool, *, before: int | None = None, at_least: int = 0, shortest: int = 1
    ) -> None:
        runs = pool.allocator.take_back(before=before, at_least=at_least, shortest=shortest)
        if runs:
            pool.storage.release(runs)
            self.num_given_back += sum(count for _, count in runs) * pool.storage.page_bytes
