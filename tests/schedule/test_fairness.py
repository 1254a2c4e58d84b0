"""No request starves in the queue, whatever the priorities, nor in the batch, whatever the policy.

In all tests new requests never stop arriving, so only a bound lets the old ones end.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from infer.config import BATCHING_MODES, SCHEDULER_POLICIES
from infer.engine.core import EngineCore
from infer.schedule import invariants, step_planner
from infer.schedule.policy import MAX_IDLE_STEPS
from infer.schedule.sequence import ARRIVALS_PER_PRIORITY, Sequence
from infer.types import Request, SamplingParams
from tests.support.hash_engine import make_hash_core

names = (f"f{i}" for i in itertools.count())


def request(num_prompt: int, max_tokens: int, priority: int = 0) -> Request:
    name = next(names)
    prompt = random.Random(name).choices(range(90), k=num_prompt)
    sampling = SamplingParams(temperature=0)
    return Request(name, tuple(prompt), sampling, 0, max_tokens, priority=priority)


def overtakings(core: EngineCore, levels: int, max_steps: int) -> int:
    """Number of newcomers admitted before a request whose priority is `levels` lower."""
    core.add(request(3, 1))
    low = request(3, 1, priority=levels)
    core.add(low)
    newcomers = []
    for _ in range(max_steps):
        while len(core.scheduler.waiting) < 5:
            newcomers.append(request(3, 2))
            core.add(newcomers[-1])
        before = {s.request_id for s in core.scheduler.waiting}
        core.step()
        if low.request_id not in {s.request_id for s in core.scheduler.waiting}:
            return sum(newcomer.request_id not in before for newcomer in newcomers)
    raise AssertionError("starved")


FORMS = [{"batching_mode": mode} for mode in BATCHING_MODES] + [
    {"scheduler_policy": policy} for policy in SCHEDULER_POLICIES
]


@pytest.mark.parametrize("settings", FORMS)
@pytest.mark.parametrize("levels", [1, 2])
def test_the_less_urgent_are_overtaken_so_often_and_no_more(
    settings: dict[str, Any], levels: int
) -> None:
    core = make_hash_core(max_batch_size=2, **settings)
    bound = levels * ARRIVALS_PER_PRIORITY
    assert bound - 10 <= overtakings(core, levels, 4 * bound) <= bound


def test_without_ageing_they_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    by_priority = property(lambda self: (self.request.priority, self.arrival))
    monkeypatch.setattr(Sequence, "rank", by_priority)
    with pytest.raises(AssertionError, match="starved"):
        overtakings(make_hash_core(max_batch_size=2), 1, 4 * ARRIVALS_PER_PRIORITY)


def longest_pause(policy: str, budget: int, num_seats: int, **settings: Any) -> int:
    """Longest run of steps without a token for a running sequence, while prompts keep arriving."""
    core = make_hash_core(
        max_batch_size=num_seats,
        max_num_batched_tokens=budget,
        scheduler_policy=policy,
        num_pages=200,  # enough for 8 seats; a check looks at each page
        **settings,
    )
    r = random.Random(policy)
    pauses: dict[str, int] = {}
    longest = 0
    for _ in range(400):
        while len(core.scheduler.waiting) < 3:
            priority = r.randrange(2)
            core.add(request(r.choice([2, 9, 60]), r.choice([1, 1, 30]), priority=priority))
        plan = core.scheduler.schedule()
        moved = {chunk.sequence.request_id for chunk in plan}
        for sequence in core.scheduler.running:
            name = sequence.request_id
            pauses[name] = 0 if name in moved else pauses.get(name, 0) + 1
            longest = max(longest, pauses[name])
        sampled = core.runner.execute(plan)
        core.scheduler.commit(core.scheduler.advance(plan), sampled)
        core.scheduler.check()
    assert core.stats().by_name()["num_finished_length"] > 5
    return longest


BUDGETS = [(1, 2), (1, 5), (2, 6), (4, 4), (8, 8), (64, 8)]


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
@pytest.mark.parametrize(("budget", "num_seats"), BUDGETS)
def test_every_seated_sequence_moves_again_soon(policy: str, budget: int, num_seats: int) -> None:
    # If all owed tokens fit into one step, nobody waits for another.
    wait = 0 if budget >= num_seats else num_seats
    assert longest_pause(policy, budget, num_seats) <= MAX_IDLE_STEPS + wait


@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_a_bound_on_the_step_changes_nothing_about_that(policy: str) -> None:
    ticks = itertools.count()
    clock = lambda: next(ticks) * 0.05  # noqa: E731  each step takes far too long
    assert longest_pause(policy, 64, 8, max_step_ms=1.0, clock=clock) <= MAX_IDLE_STEPS


@pytest.mark.parametrize("policy", ["fcfs", "prefill_first", "decode_round_robin"])
def test_without_that_rule_a_policy_may_starve_somebody(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (step_planner, invariants):
        monkeypatch.setattr(module, "MAX_IDLE_STEPS", 10**9)
    assert longest_pause(policy, 4, 4) > MAX_IDLE_STEPS + 4
