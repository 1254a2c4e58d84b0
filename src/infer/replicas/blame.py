"""Which requests are suspects after an engine process has died, and which one is given up.

A request that takes engines with it must not go on for ever, and the others must. So after a crash
each request that the dead engine had is a suspect: it begins in a step of its own, until it has
sampled a token. A request that is computed alone when the engine dies again is to blame and is
given up; where the engine was killed from outside, once may be chance. So a request takes two
engines with it at most, and three where they seem to be killed from outside. The engine
core asks `Request.is_suspect`, the fleet's journal keeps a `CrashHistory` of each request.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from infer.types import ErrorRecord

MAX_ISOLATED_CRASHES = 1
"""Crashes in a row, of an engine that computed one request alone, for which it is to blame."""
MAX_FROM_OUTSIDE = 2
"""The same where somebody else on the machine killed the engine."""
GIVEN_UP = ErrorRecord(
    "the engine died more than once while computing this request; it is given up"
)


def was_from_outside(exit_code: int, *, killed_by_us: bool) -> bool:
    """Whether somebody else has ended an engine process, as the system does without memory.

    `exit_code`: minus the number of the signal, if one ended it.
    """
    return exit_code == -signal.SIGKILL and not killed_by_us


@dataclass(slots=True)
class CrashHistory:
    """The crashes that one request has been in."""

    num_crashes: int = 0
    num_isolated: int = 0
    """Crashes in a row while it was computed alone and had sampled nothing since the one before."""

    def record_crash(self, *, isolated: bool) -> None:
        """The engine has died with it; `isolated`: while it computed nothing else."""
        self.num_crashes += 1
        self.num_isolated += isolated

    def record_token(self) -> None:
        """It has sampled a token: the crashes until now were not its fault."""
        self.num_isolated = 0

    def is_to_blame(self, *, from_outside: bool) -> bool:
        """Whether it is given up after the latest crash."""
        return self.num_isolated >= (MAX_FROM_OUTSIDE if from_outside else MAX_ISOLATED_CRASHES)
