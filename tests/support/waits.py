"""Waiting for something that happens soon, with a limit after which the test fails.

The limits are long: they are for what never happens, and no test may depend on how fast a busy
machine is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 60.0
"""For what takes a moment; starting a process may take longer."""


def until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Wait, in a thread, until a condition is true; returns what it is then."""
    ends_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends_s, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.005)
    return found


async def until_async(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Wait, in a coroutine, until a condition is true; returns what it is then."""
    ends_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends_s, f"it did not happen within {timeout_s:g} s"
        await asyncio.sleep(0.005)
    return found
