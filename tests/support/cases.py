"""Parameters of tests, some of which run with `-m slow` only."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(kept: Container[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters: those that are not in `kept` are `slow`."""
    return [
        value if value in kept else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]
