"""`ReplicaContract`: what a fleet may rely on, of each of its engines that may die and come back"""

from __future__ import annotations

from typing import Protocol

from infer.replicas.messages import Loss
from infer.types import FinishReason, Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import EngineStats
from infer.types.fingerprint import Fingerprint
from infer.types.step_events import StepEvents


class ReplicaListener(Protocol):
    """Hears what a replica reports, in the order that `ReplicaContract` promises."""

    def ready(self, replica: ReplicaContract, generation: int) -> int:
        """A generation begins: the engine takes requests and has none. Returns the number of
        requests that the replica has been given in this call."""

    def reported(
        self,
        replica: ReplicaContract,
        generation: int,
        outputs: list[StepOutput],
        step_events: StepEvents | None,
    ) -> None:
        """A step has ended, or commands have been applied without one. Times in `step_events` are
        on the clock of this process."""

    def lost(self, replica: ReplicaContract, generation: int, loss: Loss) -> bool:
        """A generation has ended. Returns whether a request was to blame and has been given up;
        otherwise the replica counts the end as a failure of the engine."""

    def draining(self, replica: ReplicaContract, timeout_s: float) -> None:
        """The replica will end: it gets nothing new, and what it has not finished after `timeout_s`
        seconds moves to others. Its generation goes on until it is lost or stopped."""

    def computes_isolated(self, replica: ReplicaContract) -> None:
        """`isolated` names another request, or none: the replica may vanish with it."""

    def failing(self, replica: ReplicaContract, reason: str) -> None:
        """The engine has not started again several times in a row, as `reason` says for the log.
        The replica goes on trying; until its next generation `is_alive` is false."""

    def gone(self, replica: ReplicaContract) -> None:
        """The replica will have no further generation, and nobody has stopped it. The present
        generation, if there is one, is lost with it."""


class ReplicaContract(Protocol):
    """A replica has generations. One begins when the engine takes requests and has none; it ends
    when the engine dies, or when the fleet abandons it. Numbers of generations grow, and each is
    used once. A replica keeps no journal: requests that it had are the fleet's business. There is
    one implementation (`replicas.replica`), and one for tests that drive it step by step.

    - **Order.** For each generation the listener hears `ready`, then any number of `reported`, then
      at most one `lost`. The next one begins after that. Everything about a generation carries its
      number; the fleet ignores what comes with another number than that of the generation that it
      knows, so a replica need not be exact about frames that are late. `ready(n)` promises that the
      engine has no request of a generation before n and that no output of such a request will come
      with the number n.
    - **Threads.** `ready` of the first generation may be called within `start`. Everything else is
      called by threads of the replica, one call at a time. A replica holds no lock of its own while
      it calls the listener, because the listener calls `add` and `abort` in turn.
    - **Commands.** `add`, `abort`, `follow_pages` and `abandon` may be called by any thread, do not
      wait, and raise nothing. They reach the engine in the order in which they were called. A
      command for a generation that has ended is ignored: the fleet hears of its end, or has caused
      it.
    - **Outputs.** Outputs of one request come in order and none is left out within a generation. A
      refusal of the engine comes as an output with an error.
    - **Silence.** `link_silence_s` grows while nothing arrives from the machine or process. An
      engine that computes a long step is not silent, because its heartbeat has a thread of its own.
      A silent replica is not lost: the fleet decides that, and calls `abandon` where others can go
      on.
    - **The end.** After `stop` returns, the listener is not called any more.
    """

    @property
    def name(self) -> str:
        """Name among the replicas of the fleet; it stays over all generations."""

    @property
    def limits(self) -> EngineLimits:
        """Limits of the engine; equal in all generations."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the engine of this generation; valid from `ready` on."""

    @property
    def is_alive(self) -> bool:
        """Whether requests may wait for this replica: it works, or its next generation is being
        begun."""

    @property
    def is_ready(self) -> bool:
        """Whether it is in a generation and has reported lately."""

    @property
    def is_silent(self) -> bool:
        """Whether it has not reported a step for so long that it counts as hanging."""

    @property
    def silence_s(self) -> float:
        """Seconds since its last report of a step; 0 between two generations. An idle engine
        reports every `HEARTBEAT_S`."""

    @property
    def link_silence_s(self) -> float:
        """Seconds since anything has arrived from it; 0 between two generations."""

    @property
    def isolated(self) -> str | None:
        """Id of the request that it computes alone now, because an engine has died with it."""

    @property
    def num_sent(self) -> int:
        """Commands that were sent to the engine of this generation."""

    @property
    def num_applied(self) -> int:
        """How many of them it had applied when it made what is reported now; outputs of a request
        that one of them ended do not come any more. 0 at the end of a link, whose host waits for
        them itself before it begins a generation."""

    def start(self, listener: ReplicaListener) -> None:
        """Begin to report; once."""

    def add(self, request: Request, generation: int) -> None:
        """Send a request to the engine of a generation."""

    def abort(
        self, request_id: str, generation: int, reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """Have the engine of a generation end a request; unknown ids are ignored."""

    def follow_pages(self, generation: int) -> None:
        """Have the engine of a generation report which pages its prefix index holds, from the
        beginning: see `FollowPages`."""

    def abandon(self, generation: int) -> None:
        """End a generation, which is not reported as lost: the fleet has moved its requests. The
        replica drops them as soon as its engine answers and begins another generation then."""

    def stop(self) -> None:
        """End the engine after its current step, and all threads; unfinished requests are dropped.
        A second call does nothing."""

    def stats(self) -> EngineStats:
        """Gauges of the engine of this generation, and counters summed over all generations."""
