"""Tests of the queue in which owners take turns."""

from __future__ import annotations

from infer.fair_queue import FairQueue


def filled(num_places: int, items: str) -> FairQueue[str]:
    """A queue of items, which are called by the letter of their owner; "-": nobody."""
    queue: FairQueue[str] = FairQueue(num_places)
    for item in items:
        queue.put(item.strip("-"), item)
    return queue


def test_owners_take_turns() -> None:
    queue, order = filled(1, "aaabcb"), ""
    while (taken := queue.take()) is not None:
        owner, item = taken
        order += item
        assert queue.take() is None
        queue.done(owner)
    assert order == "abcaba"


def test_one_owner_never_has_all_places() -> None:
    queue = filled(3, "aaaa")
    assert [queue.take() for _ in range(3)] == [("a", "a"), ("a", "a"), None]
    assert (len(queue), queue.num_open("a")) == (2, 4)
    queue.put("b", "b")
    assert queue.take() == ("b", "b")
    queue.done("a")
    assert queue.take() == ("a", "a")


def test_where_there_are_no_keys_nobody_is_kept_waiting() -> None:
    queue = filled(2, "---")
    assert [queue.take() for _ in range(3)] == [("", "-"), ("", "-"), None]


def test_what_waits_can_be_removed() -> None:
    queue = filled(1, "ab")
    queue.take()
    assert queue.drain() == ["b"]
    queue.done("a")
    assert (len(queue), queue.take(), queue.num_open("a")) == (0, None, 0)
