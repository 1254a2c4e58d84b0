"""`PageAllocator` by itself: matching, sharing, eviction, scopes, exactness."""

from __future__ import annotations

import pytest

from infer.schedule.page_allocator import PageAllocator, PageTable


def filled(allocator: PageAllocator, tokens: list[int], scope: str = "") -> PageTable:
    """A table whose sequence has computed all its tokens."""
    table = allocator.match(tokens, scope)
    assert allocator.grow(table, len(tokens))
    allocator.commit(table, tokens, len(tokens))
    return table


def test_grow_takes_what_is_needed_or_nothing() -> None:
    allocator = PageAllocator(4, 2)
    table = PageTable()
    assert allocator.grow(table, 5)
    assert len(table.pages) == 3
    assert 0 not in table.pages
    before = list(table.pages)
    assert not allocator.grow(table, 7)
    assert table.pages == before
    allocator.check([table])


def test_a_prefix_is_found_again_but_never_the_last_token() -> None:
    allocator = PageAllocator(20, 4)
    tokens = list(range(12))
    table = filled(allocator, tokens)
    pages = list(table.pages)
    allocator.release(table)
    allocator.check([])
    again = allocator.match(tokens)  # 12 tokens: the third page would leave nothing to compute
    assert again.pages == pages[:2]
    longer = allocator.match([*tokens, 99])
    assert longer.pages == pages
    other = allocator.match([*tokens[:7], 99, *tokens[8:]])
    assert other.pages == pages[:1]
    allocator.check([again, longer, other])


def test_scopes_do_not_see_each_other() -> None:
    allocator = PageAllocator(20, 2)
    tokens = [1, 2, 3, 4, 5]
    mine = filled(allocator, tokens, "mine")
    assert allocator.match(tokens, "other").pages == []
    found = allocator.match(tokens, "mine")
    assert found.pages == mine.pages[:2]
    allocator.check([mine, found])


def test_the_parent_counts_not_only_the_tokens_of_a_page() -> None:
    allocator = PageAllocator(20, 2)
    one = filled(allocator, [1, 1, 7, 7, 0])
    two = filled(allocator, [2, 2, 7, 7, 0])
    assert one.pages[1] != two.pages[1]
    allocator.check([one, two])


def test_equal_pages_computed_twice_become_one() -> None:
    allocator = PageAllocator(20, 2)
    tokens = [1, 2, 3, 4, 5]
    first, second = PageTable(), PageTable()
    for table in (first, second):
        assert allocator.grow(table, 5)
    free = allocator.num_free
    allocator.commit(first, tokens, 5)
    allocator.commit(second, tokens, 5)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert allocator.num_free == free + 2
    allocator.check([first, second])


def test_a_free_page_is_remembered_until_it_is_taken_and_oldest_goes_first() -> None:
    allocator = PageAllocator(5, 2)  # four pages
    old = filled(allocator, [1, 1, 2])
    new = filled(allocator, [3, 3, 4])
    allocator.release(old)
    allocator.release(new)
    assert allocator.num_free == 4
    big = PageTable()
    assert allocator.grow(big, 6)  # takes the two pages without a memory first, then the oldest
    kept = allocator.match([3, 3, 4])
    assert len(kept.pages) == 1
    assert allocator.match([1, 1, 2]).pages == []
    assert allocator.num_evictions == 1
    allocator.check([big, kept])


def test_a_child_is_evicted_before_its_parent() -> None:
    allocator = PageAllocator(4, 1)
    table = filled(allocator, [1, 2, 3])
    allocator.release(table)
    taker = PageTable()
    assert allocator.grow(taker, 1)
    found = allocator.match([1, 2, 3, 4])
    assert len(found.pages) == 2  # the tail was taken, the beginning is still there
    allocator.check([taker, found])


def test_without_prefix_caching_nothing_is_found() -> None:
    allocator = PageAllocator(20, 2, enable_prefix_caching=False)
    allocator.release(filled(allocator, [1, 2, 3, 4, 5]))
    assert allocator.match([1, 2, 3, 4, 5]).pages == []
    assert allocator.num_indexed == 0


@pytest.mark.parametrize(("num_pages", "page_size"), [(1, 4), (0, 4), (8, 0)])
def test_a_pool_that_cannot_be_is_refused(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        PageAllocator(num_pages, page_size)
