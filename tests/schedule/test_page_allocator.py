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


def use(allocator: PageAllocator, tokens: list[int]) -> int:
    """Compute a sequence from its beginning to its end; returns how many pages were found."""
    table = allocator.match(tokens)
    found = table.num_indexed
    assert allocator.grow(table, len(tokens))
    allocator.commit(table, tokens, len(tokens))
    allocator.release(table)
    allocator.check([])
    return found


def prompt(number: int, num_pages: int) -> list[int]:
    """A prompt of whole pages of two tokens, and one token more."""
    return [number] * (2 * num_pages) + [0]


def test_one_user_at_a_time_does_not_touch_the_whole_pool() -> None:
    allocator = PageAllocator(1001, 2, low_water=20)
    for number in range(500):
        use(allocator, prompt(number, 9))
    assert allocator.num_touched == 20
    assert allocator.num_free == allocator.num_usable == 1000
    wide = PageTable()
    assert allocator.grow(wide, 2 * 300)  # who needs more gets it
    allocator.release(wide)
    assert allocator.num_touched == 300
    everything = PageAllocator(1001, 2)
    for number in range(500):
        use(everything, prompt(number, 9))
    assert everything.num_touched == 1000


def test_the_mark_rises_by_what_was_missed() -> None:
    """Users who come again find their pages, though there is less memory than they need at the
    start: each of them is missed once."""
    allocator = PageAllocator(1001, 2, low_water=20)
    rounds = [sum(use(allocator, prompt(user, 9)) for user in range(6)) for _ in range(4)]
    assert rounds[0] == 0
    assert rounds[-1] == 6 * 9
    assert allocator.num_touched <= 6 * 10 + 20
    allocator.take_back(at_least=1000)
    assert allocator.num_touched == 0
    for number in range(100, 200):  # what was learnt goes with the memory
        use(allocator, prompt(number, 9))
    assert allocator.num_touched == 20


def test_pages_that_were_not_used_for_long_are_given_back_with_all_that_follows_them() -> None:
    allocator = PageAllocator(101, 2, low_water=50)
    use(allocator, prompt(1, 5))
    use(allocator, prompt(2, 5))
    allocator.begin_period()
    use(allocator, prompt(2, 5))
    now = allocator.begin_period()
    assert allocator.take_back(before=now - 1, shortest=6) == []  # runs that are too short stay
    assert use(allocator, prompt(1, 5)) == 0  # but nothing is found in them
    assert use(allocator, prompt(2, 5)) == 5
    runs = allocator.take_back(before=allocator.begin_period())
    assert sum(count for _, count in runs) == allocator.top
    assert allocator.num_touched == allocator.num_indexed == 0
    table = PageTable()
    assert allocator.grow(table, 6)
    assert table.pages == [1, 2, 3]  # the lowest ones, so that touched memory stays together
    allocator.check([table])


def test_under_pressure_the_coldest_pages_go_first() -> None:
    allocator = PageAllocator(101, 2)
    use(allocator, prompt(1, 5))
    use(allocator, prompt(2, 5))
    runs = allocator.take_back(at_least=7)
    assert sum(count for _, count in runs) == 7
    assert use(allocator, prompt(2, 5)) == 5 - 1
    assert use(allocator, prompt(1, 5)) == 0


def test_nobody_touches_more_than_the_limit() -> None:
    allocator = PageAllocator(101, 2, low_water=50)
    use(allocator, prompt(1, 9))
    allocator.limit = 15
    assert allocator.num_available == 15
    table = PageTable()
    assert not allocator.grow(table, 2 * 16)
    assert allocator.grow(table, 2 * 15)
    assert allocator.num_touched == 15
    assert allocator.num_available == 0
    allocator.limit = 5
    assert not allocator.grow(table, 2 * 16)
    allocator.release(table)
    assert allocator.num_available == 5
    allocator.check([])
