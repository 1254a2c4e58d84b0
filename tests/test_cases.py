"""Tests of `tests.support.cases.over`: a test that walks over many values."""

from __future__ import annotations

import inspect

import pytest

from tests.support.cases import over


def test_each_value_is_tried_and_those_that_fail_are_named() -> None:
    seen = []

    @over(("a", "b"), lambda: [(1, 1), (1, 2), (2, 2), (3, 4)])
    def check(fixture: int, a: int, b: int) -> None:
        seen.append((fixture, a, b))
        assert a == b

    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as caught:
        check(fixture=7)
    assert seen == [(7, 1, 1), (7, 1, 2), (7, 2, 2), (7, 3, 4)]
    (note,) = caught.value.__notes__
    assert note.splitlines() == ["2 of 4 values fail:", "  {'a': 1, 'b': 2}", "  {'a': 3, 'b': 4}"]


def test_a_test_is_skipped_if_all_its_values_are() -> None:
    tried = []

    @over("a", [1, 2])
    def check(a: int, least: int) -> None:
        tried.append(a)
        if a < least:
            pytest.skip("too small")

    check(least=2)
    with pytest.raises(pytest.skip.Exception, match="too small"):
        check(least=3)
    assert tried == [1, 2, 1, 2]


def test_a_mark_is_not_lost() -> None:
    @over("a", [1, pytest.param(2, marks=pytest.mark.slow)])
    def check(a: int) -> None:
        pass

    with pytest.raises(AssertionError, match="no marks"):
        check()
