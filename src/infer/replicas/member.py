"""`Member`: one engine of a fleet, wherever it runs, that may die and come back

A member has lives. A life begins when its engine takes requests and has none; it ends when the
engine dies, or when the fleet abandons it. Lives are numbered from 1 and each number is used once.
A member keeps no journal: requests that it had are the fleet's business.

What the fleet may rely on:

- **Order.** For each life the listener hears `ready`, then any number of `reported`, then at most
  one `lost`. The next life begins after that. Everything about a life carries its number; the fleet
  ignores what comes with another number than that of the life that it knows, so a member need not
  be exact about frames that are late. `ready(n)` promises that the engine has no request of a life
  before n and that no output of such a request will come with the number n.
- **Threads.** `ready` of the first life may be called within `start`. Everything else is called by
  threads of the member, one call at a time. A member holds no lock of its own while it calls the
  listener, because the listener calls `add` and `abort` in turn.
- **Commands.** `add`, `abort`, `follow_pages` and `abandon` may be called by any thread, do not
  wait, and raise nothing. They reach the engine in the order in which they were called. A command
  for a life that has ended is ignored: the fleet hears of its end, or has caused it.
- **Outputs.** Outputs of one request come in order and none is left out within a life. A refusal of
  the engine comes as an output with an error.
- **Silence.** `link_silence_s` grows while nothing arrives from the machine or process. An engine
  that computes a long step is not silent, because its heartbeat has a thread of its own. A silent
  member is not lost: the fleet decides that, and calls `abandon` where others can go on.
- **The end.** After `stop` returns, the listener is not called any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from infer.types import FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents


@dataclass(frozen=True, slots=True)
class Loss:
    """How a life of a member has ended."""

    reason: str
    """what has happened, for the log, such as "the engine process has died (SIGSEGV)" """
    from_outside: bool
    """whether the engine may have been ended by something else than its requests: by a signal from
    outside, or with its machine"""
    alone: str | None = None
    """id of the request that the engine computed alone, if any"""


class MemberListener(Protocol):
    """Hears what a member reports; the module's docstring says in which order."""

    def ready(self, member: Member, life: int) -> int:
        """A life begins: the engine takes requests and has none. Returns the number of requests
        that the member has been given in this call."""

    def reported(
        self,
        member: Member,
        life: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        """A step has ended. Times in `step_events` are on the clock of this process."""

    def lost(self, member: Member, life: int, loss: Loss) -> bool:
        """A life has ended. Returns whether a request was to blame and has been given up; otherwise
        the member counts the end as a failure of the engine."""

    def draining(self, member: Member, timeout_s: float) -> None:
        """The member will end: it gets nothing new, and what it has not finished after `timeout_s`
        seconds moves to others. Its life goes on until it is lost or stopped."""

    def failing(self, member: Member, reason: str) -> None:
        """The engine has not started again several times in a row, as `reason` says for the log.
        The member goes on trying; until its next life `is_alive` is false."""

    def gone(self, member: Member) -> None:
        """The member will have no further life, and nobody has stopped it. The present life, if
        there is one, is lost with it."""


class Member(Protocol):
    """See the module's docstring."""

    @property
    def name(self) -> str:
        """Name among the members of the fleet; it stays over all lives."""

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engine; equal in all lives."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the engine of this life; valid from `ready` on."""

    @property
    def is_alive(self) -> bool:
        """Whether requests may wait for this member: it works, or its next life is being begun."""

    @property
    def is_ready(self) -> bool:
        """Whether it is in a life and has reported lately."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported a step for so long that it counts as hanging."""

    @property
    def silence_s(self) -> float:
        """Seconds since its last report of a step; 0 between two lives. An idle engine reports
        every `HEARTBEAT_S`."""

    @property
    def link_silence_s(self) -> float:
        """Seconds since anything has arrived from it; 0 between two lives."""

    @property
    def alone(self) -> str | None:
        """Id of the request that it computes alone now, because an engine has died with it."""

    def start(self, listener: MemberListener) -> None:
        """Begin to report; once."""

    def add(self, request: Request, life: int) -> None:
        """Send a request to the engine of a life."""

    def abort(self, request_id: str, life: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Have the engine of a life end a request; unknown ids are ignored."""

    def follow_pages(self, life: int) -> None:
        """Have the engine of a life report which pages its prefix index holds, from the beginning:
        see `FollowPages`."""

    def abandon(self, life: int) -> None:
        """End a life, which is not reported as lost: the fleet has moved its requests. The member
        drops them as soon as its engine answers and begins another life then."""

    def stop(self) -> None:
        """End the engine after its current step, and all threads; unfinished requests are dropped.
        A second call does nothing."""

    def stats(self) -> EngineStats:
        """Gauges of the engine of this life, and counters summed over all lives."""
