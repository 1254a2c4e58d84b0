"""Thousands of random workloads, compared token by token, and proof that they find faults.

The second half breaks the allocator and the scheduler on purpose, in one way at a time, and asserts
that the same workloads fail.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infer.config import BATCHING_MODES
from infer.schedule.committer import Committer
from infer.schedule.page_allocator import PageAllocator, PageTable
from infer.schedule.seats import Seats
from infer.schedule.sequence import Sampled, Sequence
from infer.types import FinishReason
from tests.support.workloads import Seen, Workload

NUM_WORKLOADS = 160
"""Each fault below is noticed by one of the first ten."""


def test_every_request_has_the_tokens_that_it_has_alone() -> None:
    seen = Seen()
    for seed in range(NUM_WORKLOADS):
        try:
            seen.add(Workload(seed).run())
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error
    # The workloads prove something only if all of this happened often.
    assert seen.modes == set(BATCHING_MODES)
    assert seen.reasons == set(FinishReason) - {FinishReason.ERROR, FinishReason.COMPLETE}
    assert seen.num_preemptions > 800
    assert seen.num_cached > 400
    assert seen.num_chunks > 800
    assert seen.num_evictions > 80
    assert seen.num_aborted > 80
    assert seen.num_refused > 8


def run_workloads(count: int) -> None:
    for seed in range(count):
        Workload(seed).run()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes of one core
def test_a_hundred_thousand_workloads() -> None:
    for seed in range(NUM_WORKLOADS, 100_000):
        Workload(seed).run()


def match_last_token_too(
    self: PageAllocator, tokens: list[int], scope: str = "", num_public: int = 0
) -> PageTable:
    return original_match(self, [*tokens, 0], scope)


def match_any_scope(
    self: PageAllocator, tokens: list[int], scope: str = "", num_public: int = 0
) -> PageTable:
    return original_match(self, tokens, "")


def commit_before_computed(
    self: PageAllocator, table: PageTable, tokens: list[int], num_computed: int
) -> None:
    original_commit(self, table, tokens, len(table.pages) * self.page_size)


def release_but_one(self: PageAllocator, table: PageTable) -> None:
    table.pages = table.pages[1:]
    original_release(self, table)


def release_head_first(self: PageAllocator, table: PageTable) -> None:
    table.pages.reverse()
    original_release(self, table)


def grow_takes_page_in_use(self: PageAllocator, table: PageTable, num_tokens: int) -> bool:
    grown = original_grow(self, table, num_tokens)
    if grown and len(table.pages) > 2:
        table.pages[-1] = table.pages[0]
    return grown


def forget_keeps_index(self: PageAllocator, page: int) -> None:
    """A page that is handed out again stays in the index."""


def preempt_keeps_progress(self: Seats, sequence: Sequence, *needed_by: Sequence | None) -> None:
    computed = sequence.num_computed
    original_preempt(self, sequence, *needed_by)
    sequence.num_computed = computed


def finish_too_late(sequence: Sequence, result: Sampled, num_output: int) -> FinishReason | None:
    reason = original_finish_reason(sequence, result, num_output)
    return None if reason is FinishReason.LENGTH and num_output % 5 == 0 else reason


def finish_keeps_pages(self: Committer, sequence: Sequence, reason: FinishReason) -> None:
    sequence.table = PageTable()
    original_finish(self, sequence, reason)


def enter_keeps_own_page(self: PageAllocator, table: PageTable, page: int) -> None:
    """A page that is replaced by an equal one is never given back."""
    own = table.pages[table.num_indexed :]
    self._refs[own[0] if own else 0] += 1
    original_set_indexed_page(self, table, page)


def skip_one_page_more(self: Seats, sequence: Sequence) -> None:
    sequence.table.num_indexed += bool(sequence.table.num_indexed)
    original_skip(self, sequence)


def compute_again_what_was_adopted(self: Seats, sequence: Sequence) -> None:
    """The sequence does not skip the pages that it has adopted."""


original_match = PageAllocator.match
original_commit = PageAllocator.commit
original_release = PageAllocator.release
original_grow = PageAllocator.grow
original_set_indexed_page = PageAllocator._set_indexed_page
original_skip = Seats.skip_cached
original_preempt = Seats.preempt
original_finish = Committer._finish
original_finish_reason = Committer._finish_reason

MUTANTS: list[tuple[type, str, Callable[..., object]]] = [
    (PageAllocator, "match", match_last_token_too),
    (PageAllocator, "commit", commit_before_computed),
    (PageAllocator, "release", release_but_one),
    (PageAllocator, "release", release_head_first),
    (PageAllocator, "grow", grow_takes_page_in_use),
    (PageAllocator, "_forget", forget_keeps_index),
    (Seats, "preempt", preempt_keeps_progress),
    (Committer, "_finish", finish_keeps_pages),
    (PageAllocator, "_set_indexed_page", enter_keeps_own_page),
    (Seats, "skip_cached", skip_one_page_more),
    (Seats, "skip_cached", compute_again_what_was_adopted),
    (Committer, "_finish_reason", staticmethod(finish_too_late)),
]


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS)
def test_the_workloads_notice_broken_code(
    owner: type, name: str, mutant: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_workloads(100)
