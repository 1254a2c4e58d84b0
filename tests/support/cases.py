"""Parameters of tests, some of which run with `-m slow` or `-m timing` only."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters: those that are not in `kept` are `slow`."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def one_of(number: int, values: Iterable[Any], first: int = 0) -> list[Any]:
    """The values as parameters: all but one of so many in a row are `slow`. For a matrix of which
    each row and each column is tried by default, and each pair with `-m slow`. A tuple has the
    values of several parameters."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if i % number == first else pytest.mark.slow,
        )
        for i, value in enumerate(values)
    ]


def timed(limit_s: float) -> pytest.MarkDecorator:
    """The parameter `most_s` of a test, with which it compares a time: no limit by default, and
    `limit_s` with `-m timing`. What else the test asserts holds in both."""
    limits = [
        pytest.param(math.inf, id="untimed"),
        pytest.param(limit_s, id="timed", marks=pytest.mark.timing),
    ]
    return pytest.mark.parametrize("most_s", limits)
