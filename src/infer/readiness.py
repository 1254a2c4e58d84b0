"""`selector_of`: waiting until a file can be read or written, by what the operating system has"""

from __future__ import annotations

import selectors
from typing import Any

MAX_WAIT_S = 2e6
"""Longest time that `poll` takes: 2**31 milliseconds."""
READABLE, WRITABLE = selectors.EVENT_READ, selectors.EVENT_WRITE


def selector_of(file: Any, events: int) -> selectors.BaseSelector:
    """A selector for one file, a socket or anything else with a descriptor: `poll`, which takes any
    number of a descriptor and needs none of its own, or what a system without it has (some versions
    of macOS). `select(timeout_s)` gives an empty list when the time is up."""
    made = getattr(selectors, "PollSelector", selectors.DefaultSelector)()
    made.register(file, events)
    assert isinstance(made, selectors.BaseSelector)
    return made


def is_ready(file: Any, events: int, timeout_s: float) -> bool:
    """Whether a file can be read or written within `timeout_s` seconds, at most 20 days."""
    with selector_of(file, events) as selector:
        return bool(selector.select(min(timeout_s, MAX_WAIT_S)))
