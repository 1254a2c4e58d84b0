"""`Router`: which replica of a fleet gets a request; `LeastRouter`: the one with the least to do

`ReplicaLoad` is what the fleet knows about a replica: its limits, and what it has of the fleet's
requests. It follows the events of the replica's steps, so it is late by a step at most.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from infer.requests.state import RequestStates
from infer.types import Request, StepOutput
from infer.types.engine_limits import EngineLimits
from infer.types.step_events import StepEvents


class ReplicaLoad:
    """What one generation of a replica has to do."""

    def __init__(self, name: str, limits: EngineLimits) -> None:
        self.name = name
        """Name of the replica."""
        self.limits = limits
        """Limits of its engine."""
        self.states = RequestStates()
        """Of its requests; tokens are those of the prompt and the known output."""

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt and known output tokens of its requests without a seat."""
        return self.states.num_tokens("waiting", "preempted")

    @property
    def num_waiting(self) -> int:
        """Requests without a seat, or without pages for it."""
        return self.states.count("waiting", "preempted")

    @property
    def num_running(self) -> int:
        """Requests with a seat."""
        return self.states.count("running")

    @property
    def num_unfinished(self) -> int:
        """Requests with or without a seat."""
        return self.states.count("waiting", "preempted", "running")

    @property
    def has_seat(self) -> bool:
        """Whether its engine has more seats than requests."""
        return self.num_unfinished < self.limits.num_seats

    def has_room(self, num_tokens: int, *, is_resumed: bool = False) -> bool:
        """Whether its engine takes a request of so many tokens without refusing it as full.
        `is_resumed`: an engine has died with it; its tokens do not count then."""
        if self.num_unfinished >= self.limits.max_unfinished:
            return False
        limit = self.limits.max_waiting_tokens
        if limit is None or is_resumed or self.num_waiting_tokens + num_tokens <= limit:
            return True
        if self.limits.batching_mode == "static" and self.num_running:
            return False  # nobody joins a batch that runs
        return self.has_seat

    def add(self, request: Request) -> None:
        """Count a request that is sent to the replica."""
        self.states.add(request.request_id, num_tokens_of(request))

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended or moved; unknown ids are ignored."""
        self.states.remove(request_id)

    def stepped(self, step_events: StepEvents) -> None:
        """Follow the requests that got a seat or lost it."""
        self.states.follow(step_events)

    def num_left(self, request_id: str, expected: int) -> int:
        """Tokens of a request that are not computed; `expected`: until it has had a seat."""
        state = self.states.get(request_id)
        if state is None or state.admitted_s is None:
            return expected
        return max(0, state.num_tokens - state.num_computed)

    def seated_s(self, request_id: str) -> float | None:
        """When a request first got its seat; None if it has had none."""
        state = self.states.get(request_id)
        return None if state is None else state.admitted_s


def num_tokens_of(request: Request) -> int:
    """Tokens that an engine computes before the next token of a request."""
    return len(request.prompt_token_ids) + len(request.output_token_ids)


class Router(ABC):
    """Chooses replicas. The fleet calls it with its lock held, one call at a time: a call may not
    wait, and not call the fleet. A router that keeps nothing has `choose` only."""

    @abstractmethod
    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """One of the replicas for a request. There is at least one, and each is ready and has room.
        The request may have output tokens, if another replica began it."""

    def reported(  # noqa: B027
        self, replica: ReplicaLoad, outputs: Sequence[StepOutput], step_events: StepEvents | None
    ) -> None:
        """A replica has ended a step; called after its load has followed it, and before those that
        have ended leave the load."""

    def dropped(self, replica: ReplicaLoad, request_id: str) -> None:  # noqa: B027
        """A request has left a replica without an output, because its caller has."""

    def should_follow(self, replica: ReplicaLoad) -> bool:
        """Whether the replica is to report the pages of its prefix index from the beginning
        (`FollowPages`). The fleet asks after `ReplicaContract.ready` and after each `reported`, and
        does as it is told: the answer is true once for each time."""
        return False

    def forget(self, replica: ReplicaLoad) -> None:  # noqa: B027
        """A generation of a replica has ended, and its cache with it."""


class LeastRouter(Router):
    """Chooses the replica with the fewest tokens that wait, then the one with the fewest requests;
    one with a free seat before those without."""

    def choose(self, request: Request, replicas: Sequence[ReplicaLoad]) -> ReplicaLoad:
        """See `Router`."""

        def load(replica: ReplicaLoad) -> tuple[bool, int, int]:
            return not replica.has_seat, replica.num_waiting_tokens, replica.num_unfinished

        return min(replicas, key=load)
