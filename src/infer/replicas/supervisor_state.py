"""`SupervisorState`: what the supervisor of an engine process is doing, and what may come next."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import assert_never


class SupervisorState(Enum):
    """Where a supervisor is between its first process and its end."""

    NEW = "new"
    """No process has been started."""
    LOADING = "loading"
    """The first process loads its model."""
    LOADED = "loaded"
    """The first process takes commands; nobody reads its reports yet."""
    SERVING = "serving"
    """A process takes commands and its reports are read."""
    RESTARTING = "restarting"
    """No process takes commands; requests wait for the next one."""
    REFUSING = "refusing"
    """No process takes commands after many failures in a row; it is tried again, but requests are
    refused."""
    STOPPING = "stopping"
    """It was told to end; no other process is started."""
    STOPPED = "stopped"
    """No process is left."""
    DEAD = "dead"
    """The supervisor itself has failed."""

    @property
    def has_worker(self) -> bool:
        """Whether there is a process that takes commands."""
        match self:
            case SupervisorState.LOADED | SupervisorState.SERVING:
                return True
            case SupervisorState.NEW | SupervisorState.LOADING | SupervisorState.RESTARTING:
                return False
            case SupervisorState.REFUSING | SupervisorState.STOPPING:
                return False
            case SupervisorState.STOPPED | SupervisorState.DEAD:
                return False
            case _:
                assert_never(self)

    @property
    def is_ending(self) -> bool:
        """Whether no process will be started any more."""
        match self:
            case SupervisorState.STOPPING | SupervisorState.STOPPED | SupervisorState.DEAD:
                return True
            case SupervisorState.NEW | SupervisorState.LOADING | SupervisorState.LOADED:
                return False
            case SupervisorState.SERVING | SupervisorState.RESTARTING | SupervisorState.REFUSING:
                return False
            case _:
                assert_never(self)


_S = SupervisorState
_ENDS = frozenset({_S.STOPPING, _S.DEAD})
TRANSITIONS: Mapping[SupervisorState, frozenset[SupervisorState]] = MappingProxyType(
    {
        _S.NEW: _ENDS | {_S.LOADING},
        _S.LOADING: _ENDS | {_S.LOADED, _S.STOPPED},
        _S.LOADED: _ENDS | {_S.SERVING},
        _S.SERVING: _ENDS | {_S.RESTARTING},
        _S.RESTARTING: _ENDS | {_S.SERVING, _S.REFUSING},
        _S.REFUSING: _ENDS | {_S.SERVING},
        _S.STOPPING: frozenset({_S.STOPPED, _S.DEAD}),
        _S.STOPPED: frozenset(),
        _S.DEAD: frozenset(),
    }
)


class Lifecycle:
    """The state of one supervisor; any thread may read it, change it and wait for its end."""

    def __init__(self) -> None:
        self._state = SupervisorState.NEW
        self._changed = threading.Condition()

    @property
    def state(self) -> SupervisorState:
        """The state of now."""
        return self._state

    def move(self, to: SupervisorState) -> bool:
        """Go to another state. False, and nothing has changed, if it is ending: being told to stop
        wins over whatever happens at the same time. `RuntimeError` for a move that does not exist.
        """
        with self._changed:
            if to not in TRANSITIONS[self._state]:
                if self._state.is_ending:
                    return False
                raise RuntimeError(f"a supervisor that is {self._state.value} cannot be {to.value}")
            self._state = to
            self._changed.notify_all()
            return True

    def stop(self) -> SupervisorState:
        """Go to `STOPPING`, unless it is ending already; returns the state before."""
        with self._changed:
            before = self._state
            self.move(SupervisorState.STOPPING)
            return before

    def wait_for_stop(self, timeout_s: float) -> bool:
        """Whether it is ending; waits for that so long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._state.is_ending, timeout_s)
