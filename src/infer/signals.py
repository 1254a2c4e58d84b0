"""Signals: those that ask a server to end, and what its other processes do with them

A terminal sends Ctrl+C (INT) and its own end (HUP) to all processes that were started in it, those
that a server has started included. The server lets its requests finish first, and needs these
processes until then; it ends them itself. They end with it in any case.
"""

from __future__ import annotations

import signal

ENDING = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""signals that ask a server to end, once its requests have finished"""
_OF_USERS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))


def leave_signals_to_parent() -> None:
    """Ignore the signals that are meant for the process that has started this one."""
    for number in (*ENDING, *_OF_USERS):
        signal.signal(number, signal.SIG_IGN)
