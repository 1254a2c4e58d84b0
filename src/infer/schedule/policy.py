"""The scheduler policies: the order in which running sequences are offered the step's tokens

A policy only orders. Before it is applied, the scheduler gives a token to each sequence that has
had none for `MAX_IDLE_STEPS` steps, so no policy can starve a sequence. Used by the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

from infer.config import own_function
from infer.schedule.sequence import Sequence

MAX_IDLE_STEPS = 4
"""Maximum number of steps in a row in which a policy may give a running sequence no token."""

Policy = Callable[[Seq[Sequence]], list[Sequence]]
"""Running sequences in order of rank → the order in which they are offered tokens."""


def fcfs(seated: Seq[Sequence]) -> list[Sequence]:
    """Older sequences first, so running streams advance before a newcomer's prompt."""
    return list(seated)


def prefill_first(seated: Seq[Sequence]) -> list[Sequence]:
    """Prompts before streams: the shortest time to first token, at the cost of running streams."""
    return sorted(seated, key=lambda sequence: sequence.num_remaining == 1)


def decode_round_robin(seated: Seq[Sequence]) -> list[Sequence]:
    """Streams before prompts; streams take turns if the step has fewer tokens than streams."""
    decoding = [sequence for sequence in seated if sequence.num_remaining == 1]
    prompts = [sequence for sequence in seated if sequence.num_remaining != 1]
    return sorted(decoding, key=attrgetter("last_turn")) + prompts


POLICIES: Mapping[str, Policy] = {
    "fcfs": fcfs,
    "prefill_first": prefill_first,
    "decode_round_robin": decode_round_robin,
}
"""The policies by name; the names are those in `config.SCHEDULER_POLICIES`."""


def find_policy(name: str) -> Policy:
    """The policy called `name`, or the function `module:function`; raises `ConfigError` if there is
    none."""
    return POLICIES[name] if name in POLICIES else own_function("scheduler_policy", name)
