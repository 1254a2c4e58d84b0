"""`waiting_tokens_error`: whether further prompts may wait for a seat, as the façade knows it

The scheduler refuses a request whose prompt would exceed `max_waiting_tokens`. The façade refuses
it before it costs the engine anything. It counts the requests that it has sent and that have
no seat yet. Those for whom seats are free do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from infer.errors import OverloadedError, too_many_tokens
from infer.requests.state import RequestStates
from infer.types.engine_limits import EngineLimits


def waiting_tokens_error(
    limits: EngineLimits, states: RequestStates, prompt_lengths: Sequence[int]
) -> OverloadedError | None:
    """The error for further requests with prompts of these lengths in tokens; None if they may
    wait. `states`: of the requests that the engine has."""
    if limits.max_waiting_tokens is None:
        return None
    waiting, num_seated = states.waiting(), states.count("running", "preempted")
    free = limits.num_seats - num_seated
    if limits.batching_mode == "static" and num_seated:
        free = 0  # nobody joins a batch that runs
    added = sum(prompt_lengths[max(0, free - len(waiting)) :])
    if not added:
        return None
    num_tokens = states.num_tokens("waiting") - sum(islice(waiting.values(), max(0, free)))
    if num_tokens + added <= limits.max_waiting_tokens:
        return None
    return too_many_tokens(num_tokens, added, limits.max_waiting_tokens)
