"""Parameters of tests, some of which run with `-m slow` or `-m timing` only."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


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


def over(
    names: str | tuple[str, ...], values: Iterable[Any] | Callable[[], Iterable[Any]]
) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, for values that take milliseconds each: one test tries them
    all, as pytest takes longer for a test than such a value does. Those that fail are named below
    the first one's error. The values share the fixtures of the test, and none of them is `slow`.
    A function that makes them is called by the test."""
    taken = (names,) if isinstance(names, str) else names

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def walked(**fixtures: Any) -> None:
            tried = list(values if isinstance(values, Iterable) else values())
            assert not any(isinstance(each, type(pytest.param())) for each in tried), "no marks"
            failed: list[tuple[str, BaseException]] = []
            skipped: list[BaseException] = []
            for value in tried:
                case = dict(zip(taken, (value,) if isinstance(names, str) else value, strict=True))
                try:
                    test(**fixtures, **case)
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:
                    failed.append((repr(case), error))
            if failed:
                which = "\n  ".join(case[:300] for case, _ in failed[:50])
                failed[0][1].add_note(f"{len(failed)} of {len(tried)} values fail:\n  {which}")
                raise failed[0][1]
            if len(skipped) == len(tried):
                raise skipped[0]

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in taken]
        walked.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return walked

    return decorate


def timed(limit_s: float) -> pytest.MarkDecorator:
    """The parameter `most_s` of a test, with which it compares a time: no limit by default, and
    `limit_s` with `-m timing`. What else the test asserts holds in both."""
    limits = [
        pytest.param(math.inf, id="untimed"),
        pytest.param(limit_s, id="timed", marks=pytest.mark.timing),
    ]
    return pytest.mark.parametrize("most_s", limits)
