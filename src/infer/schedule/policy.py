"""The scheduler policies: in which order seated sequences are offered the step's tokens.

A policy only orders. Whatever it does, the scheduler first gives a token to each sequence that
has had none for `MAX_IDLE_STEPS` steps, so no policy can starve anybody. Used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

from infer.config import own_function
from infer.schedule.sequence import Sequence

MAX_IDLE_STEPS = 4
"""steps that a policy may pass a seated sequence over for"""

Policy = Callable[[Seq[Sequence]], list[Sequence]]
"""Seated sequences in order of rank → the order in which they are offered tokens."""


def fcfs(seated: Seq[Sequence]) -> list[Sequence]:
    """Older first: running streams advance before a newcomer's prompt."""
    return list(seated)


def prefill_first(seated: Seq[Sequence]) -> list[Sequence]:
    """Prompts before streams: the shortest way to the first token, paid for by the others."""
    return sorted(seated, key=lambda sequence: sequence.num_remaining == 1)


def decode_round_robin(seated: Seq[Sequence]) -> list[Sequence]:
    """Streams before prompts, taking turns where the step has fewer tokens than streams."""
    decoding = [sequence for sequence in seated if sequence.num_remaining == 1]
    prompts = [sequence for sequence in seated if sequence.num_remaining != 1]
    return sorted(decoding, key=attrgetter("last_turn")) + prompts


POLICIES: Mapping[str, Policy] = {
    "fcfs": fcfs,
    "prefill_first": prefill_first,
    "decode_round_robin": decode_round_robin,
}
"""By the names in `config.SCHEDULER_POLICIES`."""


def find_policy(name: str) -> Policy:
    """The policy of a name, or of `module:function`; raises `ConfigError` if it cannot be found."""
    return POLICIES[name] if name in POLICIES else own_function("scheduler_policy", name)
