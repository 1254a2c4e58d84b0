"""`engines_wanted`: how many engines a load needs, as a plain function

Ray Serve calls it through `cluster.deployments`; it knows nothing of Ray.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from infer.replicas.host import EngineLoad

SEATS_IN_USE = 0.8
"""Share of the seats that may be in use before there is to be one more engine."""


def engines_wanted(
    loads: Sequence[EngineLoad], *, low: int, high: int, target_wait_s: float
) -> int:
    """Number of engines so that waiting prompts are computed within `target_wait_s` seconds, and
    seats suffice; from `low` to `high`."""
    if not loads:
        return low
    rates = [load.prompt_tokens_per_s for load in loads if load.prompt_tokens_per_s > 0]
    waiting = sum(load.num_waiting_tokens for load in loads)
    by_tokens = 0
    if waiting and rates:
        by_tokens = math.ceil(waiting / (sum(rates) / len(rates) * target_wait_s))
    elif waiting:
        by_tokens = len(loads) + 1  # nothing has been measured, and something waits
    seats = sum(load.num_seats for load in loads) / len(loads)
    by_seats = math.ceil(sum(load.num_unfinished for load in loads) / (seats * SEATS_IN_USE))
    return min(high, max(low, by_tokens, by_seats))
