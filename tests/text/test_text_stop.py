"""Tests of stop strings: the result is a function of the text, and no part of a match leaks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infer.text.stop import StopMatcher
from tests.support.text_checkpoints import quick


def one_shot(text: str, stop: list[str], include_stop: bool) -> tuple[str, bool]:
    """The rule in its simplest form: the first completed match, and the longest of several."""
    for end in range(1, len(text) + 1):
        done = [string for string in stop if text[:end].endswith(string)]
        if done:
            longest = max(map(len, done))
            return text[: end if include_stop else end - longest], True
    return text, False


def run(pieces: list[str], stop: list[str], include_stop: bool) -> tuple[str, bool]:
    matcher = StopMatcher(stop, include_stop)
    shown, reached = "", False
    for piece in pieces:
        new, reached = matcher.push(piece)
        shown += new
        if reached:
            assert matcher.push("more") == ("", True)
            break
    return shown + matcher.finish(), reached


def splits(text: str) -> list[list[str]]:
    """All ways to divide a text into pieces."""
    ways = []
    for cuts in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        pieces, start = [], 0
        for index, cut in enumerate(cuts, start=1):
            if cut:
                pieces.append(text[start:index])
                start = index
        ways.append([*pieces, text[start:]])
    return ways


CASES = [
    ("hello END tail", ["END"], "hello "),
    ("aaab", ["aab"], "a"),
    ("xabcd", ["abcd", "bc"], "xa"),  # bc is completed first
    ("xabc", ["abc", "bc", "c"], "x"),  # the same character completes all, so the longest counts
    ("abab", ["abab", "ab"], ""),  # a prefix of the other is completed first
    ("stop", ["stop"], ""),
    ("sto", ["stop"], "sto"),
    ("ananas!", ["anas", "nano"], "an"),
    ("aXbXYc", ["XYZ", "XY"], "aXb"),
    ("日本語", ["本"], "日"),
]


@pytest.mark.parametrize(("text", "stop", "shown"), CASES)
def test_known_cases_at_every_split(text: str, stop: list[str], shown: str) -> None:
    assert one_shot(text, stop, False)[0] == shown
    for pieces in splits(text[:12]) if len(text) > 12 else splits(text):
        expected = one_shot("".join(pieces), stop, False)
        assert run(pieces, stop, False) == expected
        assert run(pieces, stop, True) == one_shot("".join(pieces), stop, True)


texts = st.text(alphabet="ab", max_size=30)
stops = st.lists(st.text(alphabet="ab", min_size=2, max_size=6), max_size=4)


@quick
@given(st.lists(texts, max_size=8), stops, st.booleans())
def test_result_does_not_depend_on_the_split(
    pieces: list[str], stop: list[str], include: bool
) -> None:
    text = "".join(pieces)
    assert run(pieces, stop, include) == one_shot(text, stop, include)
    assert run(list(text), stop, include) == one_shot(text, stop, include)


@quick
@given(texts, stops)
def test_holds_back_what_may_become_a_stop_string_and_nothing_more(
    text: str, stop: list[str]
) -> None:
    matcher = StopMatcher(stop)
    shown = ""
    for end, char in enumerate(text, start=1):
        new, reached = matcher.push(char)
        shown += new
        if reached:
            return
        seen = text[:end]
        open_ends = [
            size
            for string in stop
            for size in range(1, len(string))
            if seen.endswith(string[:size])
        ]
        assert len(seen) - len(shown) == max(open_ends, default=0)


def test_without_stop_strings_all_text_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", False)
    assert matcher.finish() == ""


def test_included_stop_string_needs_no_holding_back() -> None:
    matcher = StopMatcher(["END"], include_stop=True)
    assert matcher.push("an E") == ("an E", False)
    assert matcher.push("ND and more") == ("ND", True)
    assert matcher.finish() == ""
