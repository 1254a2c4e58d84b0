"""The scheduler policies: the order in which running sequences are offered the step's tokens

A policy only orders. Before it is applied, the scheduler gives a token to each sequence that has
had none for `MAX_IDLE_STEPS` steps, so no policy can starve a sequence. What a function of the user
returns is checked: a wrong order gives way to the order of rank, so no policy can change tokens.
Used by the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from operator import attrgetter

from infer.config import own_function
from infer.errors import ConfigError
from infer.schedule.sequence import Sequence
from infer.types import Request, Sampling

log = logging.getLogger(__name__)

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
    none, or if it fails to order three sequences."""
    if name in POLICIES:
        return POLICIES[name]
    policy = _OwnPolicy(name, own_function("scheduler_policy", name))
    policy.try_out()
    return policy


class _OwnPolicy:
    """A function of the user as a policy. Where it raises, or returns anything but the sequences
    that it was given, each once, the step is planned in order of rank, and the log says so."""

    def __init__(self, name: str, function: Callable[[list[Sequence]], object]) -> None:
        """`name`: what the setting calls it."""
        self._name, self._function = name, function
        self._num_failures = 0

    def __call__(self, seated: Seq[Sequence]) -> list[Sequence]:
        try:
            return self._ordered(seated)
        except Exception as error:
            self._num_failures += 1
            if self._num_failures & (self._num_failures - 1) == 0:  # the first, second, fourth, …
                log.exception(
                    "scheduler_policy %r failed %d times, now with %s: %s; such steps are planned"
                    " in order of rank",
                    *(self._name, self._num_failures, type(error).__name__, error),
                )
            return fcfs(seated)

    def try_out(self) -> None:
        """Raise `ConfigError` if it fails for a new prompt, one in the middle, and a stream."""
        request = Request("tried at the start", (1, 2, 3, 4), Sampling(temperature=0), 0, 8)
        made_up = [Sequence.from_request(request, arrival) for arrival in range(3)]
        for sequence, num_computed in zip(made_up, (3, 2, 0), strict=True):
            sequence.num_computed = num_computed
        try:
            self._ordered(made_up)
        except Exception as error:
            raise ConfigError(
                "scheduler_policy",
                f"{self._name!r} does not order sequences; tried with three, it failed with"
                f" {type(error).__name__}: {error}",
            ) from error

    def _ordered(self, seated: Seq[Sequence]) -> list[Sequence]:
        ordered = self._function(list(seated))
        if not isinstance(ordered, list):
            raise TypeError(f"it must return a list, not {type(ordered).__name__}")
        if len(ordered) != len(seated) or {*map(id, ordered)} != {*map(id, seated)}:
            raise ValueError(
                f"it must return each of the {len(seated)} sequences that it gets once; its list of"
                f" {len(ordered)} has {len({*map(id, ordered)} & {*map(id, seated)})} of them"
            )
        return ordered
