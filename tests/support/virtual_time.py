"""An event loop whose time passes only while nothing is to be done: minutes take milliseconds."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing, and says for how long it would have waited."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            found = super().select(0)
            assert found, "everybody waits for nothing"
            return found
        self.now_s += timeout  # no thread or socket could wake it
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For code without threads and sockets."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time, which begins at 0 s."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
