"""`WaitingTokens`: the prompt tokens that wait for a seat, as the façade knows them

The scheduler refuses a request whose prompt would exceed `max_waiting_tokens`. The façade refuses
it before it costs the engine anything. It counts the requests that it has sent and that have
no seat yet by the events of the engine's steps. Those for whom seats are free do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from infer.errors import OverloadedError, too_many_tokens
from infer.types import Request
from infer.types.engine_limits import EngineLimits
from infer.types.step_events import Admitted, Resumed, StepEvents


class WaitingTokens:
    """See the module's docstring. Without `max_waiting_tokens` it counts nothing."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limit = limits.max_waiting_tokens
        self._num_seats = limits.num_seats
        self._is_static = limits.batching_mode == "static"
        self._waiting: dict[str, int] = {}
        """id → prompt tokens of the requests without a seat, in order of arrival"""
        self._seated: dict[str, int] = {}
        self._num_tokens = 0
        """sum over `_waiting`"""

    def add(self, request: Request) -> None:
        """Count a request that is sent to the engine."""
        if self._limit is not None:
            self._wait(request.request_id, len(request.prompt_token_ids))

    def leave(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._num_tokens -= self._waiting.pop(request_id, 0)
        self._seated.pop(request_id, None)

    def stepped(self, step_events: StepEvents) -> None:
        """Follow the requests that got a seat, and those that wait for another engine's."""
        if self._limit is None:
            return
        for event in step_events.events:
            if isinstance(event, Admitted) and event.request_id in self._waiting:
                num_tokens = self._waiting.pop(event.request_id)
                self._num_tokens -= num_tokens
                self._seated[event.request_id] = num_tokens
            elif isinstance(event, Resumed) and event.request_id in self._seated:
                self._wait(event.request_id, self._seated.pop(event.request_id))

    def _wait(self, request_id: str, num_tokens: int) -> None:
        self._waiting[request_id] = num_tokens
        self._num_tokens += num_tokens

    def error(self, prompt_lengths: Sequence[int]) -> OverloadedError | None:
        """The error for further requests with prompts of these lengths in tokens; None if they may
        wait."""
        if self._limit is None:
            return None
        free = self._num_seats - len(self._seated)
        if self._is_static and self._seated:
            free = 0  # nobody joins a batch that runs
        added = sum(prompt_lengths[max(0, free - len(self._waiting)) :])
        if not added:
            return None
        waiting = self._num_tokens - sum(islice(self._waiting.values(), max(0, free)))
        if waiting + added <= self._limit:
            return None
        return too_many_tokens(waiting, added, self._limit)
