"""No test of the default suite asserts that something is fast: that depends on the machine.

Such an assertion compares a clock with the parameter of `cases.timed`, or its test is of another
lane. A loop that waits for something may have an end, which is no statement about its speed. The
times of event loops do not count: many of them are virtual.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "perf_counter_ns"}
CLOCKS |= {"monotonic_ns", "process_time_ns", "thread_time_ns"}
LANES = {"slow", "timing", "gpu", "cluster", "clients", "browser", "peer"}
BOUND = "most_s"
"""Name of the parameter that `cases.timed` gives."""


def of_another_lane(node: ast.AST) -> bool:
    """Whether a decorator, or `pytestmark`, puts tests into a lane that is not run by default."""
    marks = {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)}
    return bool(marks & LANES) and "param" not in marks


def asserted_times(tree: ast.Module) -> Iterator[int]:
    """The lines in which tests of the default suite compare a clock with a number."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and of_another_lane(statement.value):
            names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
            if "pytestmark" in names:
                return
    spans = set(_spans_of_time(tree))
    todo: list[tuple[ast.AST, bool]] = [(tree, False)]
    while todo:
        node, waits = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
            map(of_another_lane, node.decorator_list)
        ):
            continue
        if isinstance(node, ast.Assert) and not waits and _bounds_a_time(node.test, spans):
            yield node.lineno
        waits = waits or isinstance(node, ast.While)
        todo += [(child, waits) for child in ast.iter_child_nodes(node)]


def _spans_of_time(tree: ast.Module) -> Iterator[str]:
    """The names of differences between a clock and something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and _reads(part, set())
            for part in ast.walk(node.value)
        ):
            for target in node.targets:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))


def _bounds_a_time(test: ast.expr, spans: set[str]) -> bool:
    """Whether a time is to be less than something but the bound of `cases.timed`."""
    for compare in ast.walk(test):
        if not isinstance(compare, ast.Compare):
            continue
        sides = [compare.left, *compare.comparators]
        for left, operation, right in zip(sides, compare.ops, sides[1:], strict=False):
            small, large = left, right
            if isinstance(operation, ast.Gt | ast.GtE):
                small, large = right, left
            elif not isinstance(operation, ast.Lt | ast.LtE):
                continue
            names = {name.id for name in ast.walk(large) if isinstance(name, ast.Name)}
            if _reads(small, spans) and BOUND not in names:
                return True
    return False


def _reads(node: ast.AST, spans: set[str]) -> bool:
    """Whether an expression reads a clock or one of the spans."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and part.id in spans:
            return True
        if (
            isinstance(part, ast.Call)
            and isinstance(part.func, ast.Attribute)
            and part.func.attr in CLOCKS
        ):
            return True
    return False


def test_the_default_suite_asserts_no_times() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path in sorted(TESTS.rglob("test_*.py"))
        if any(clock in (source := path.read_text("utf-8")) for clock in CLOCKS)
        for line in asserted_times(ast.parse(source))
    ]
    assert not found, "compare it with the parameter of `cases.timed`, or count work instead"


BEGINS = "import time, pytest\n"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def test():\n    t = time.monotonic()\n    assert time.monotonic() - t < 1", [4]),
        ("async def test():\n    assert 1 > time.perf_counter() and True", [3]),
        ("@pytest.mark.slow\ndef test():\n    assert time.monotonic() < 1", []),
        ("pytestmark = pytest.mark.cluster\ndef test():\n    assert time.monotonic() < 1", []),
        ("@timed(3)\ndef test(most_s):\n    assert time.monotonic() < most_s", []),
        ("@timed(3)\ndef test(most_s):\n    assert time.monotonic() < 3", [4]),
        ("def test():\n    while True:\n        assert time.monotonic() < 9", []),
        (
            "P = [pytest.param(1, marks=pytest.mark.slow)]\n@pytest.mark.parametrize('a', P)\n"
            "def test(a):\n    assert time.monotonic() < a",
            [5],
        ),
        ("def test():\n    t = time.monotonic() - 1\n    assert 0 < t\n    assert t < 5", [5]),
        ("def test():\n    assert time.monotonic() > 0.04 < x", []),
        ("def test():\n    assert loop.time() < 5", []),
    ],
)
def test_an_asserted_time_is_found(source: str, lines: list[int]) -> None:
    assert list(asserted_times(ast.parse(BEGINS + source))) == lines
