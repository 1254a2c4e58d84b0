"""`max_step_ms`: the bound on step times, with runners whose step time is a known function.

Only the runner moves the fake clock, so every figure is exact and the same on every machine.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from infer.config import SCHEDULER_POLICIES
from infer.engine.core import EngineCore
from infer.schedule.sequence import Plan, Sampled
from infer.schedule.step_budget import MIN_CHUNK
from infer.types import Request, SamplingParams
from tests.support.hash_engine import make_hash_core

GREEDY = SamplingParams(temperature=0)
BOUND_MS = 40.0
BUDGET = 512

Law = Callable[[int, int, int], float]
"""(number of streams, prompt tokens, context of the prompt in tokens) → milliseconds."""


def linear(num_streams: int, num_prompt: int, context: int) -> float:
    return 15 + 0.2 * num_streams + 0.1 * num_prompt


def knee(num_streams: int, num_prompt: int, context: int) -> float:
    """A step of few tokens takes as long as reading the weights."""
    return max(25, 0.3 * (num_streams + num_prompt))


def attention(num_streams: int, num_prompt: int, context: int) -> float:
    """Every token attends to all before it: 250 tokens fit at the start of a prompt, 40 later."""
    return 15 + 0.1 * num_prompt * (1 + (context + num_prompt / 2) / 2000)


def slow(num_streams: int, num_prompt: int, context: int) -> float:
    return 2 * BOUND_MS + 0.1 * num_prompt


class LawfulRunner:
    """A runner that moves the clock by the law's time and records every step."""

    def __init__(self, core: EngineCore, law: Law) -> None:
        self.core, self.law = core, law
        self.inner = core.runner
        self.now_s = 0.0
        self.steps: list[tuple[int, int, int, float]] = []
        """(streams, prompt tokens, context, milliseconds) of each step."""

    def execute(self, plan: Plan) -> list[Sampled]:
        prompts = [c for c in plan if c.sequence.num_remaining > 1]
        work = (
            len(plan) - len(prompts),
            sum(c.num_tokens for c in prompts),
            max((c.start for c in prompts), default=0),
        )
        step_ms = self.law(*work)
        self.steps.append((*work, step_ms))
        self.now_s += step_ms / 1000
        return list(self.inner.execute(plan))

    def mixed(self) -> list[tuple[int, int, int, float]]:
        """The steps with both prompts and streams."""
        return [step for step in self.steps if step[0] and step[1]]


def lawful_core(
    law: Law, *, max_step_ms: float | None = BOUND_MS, policy: str = "fcfs"
) -> tuple[EngineCore, LawfulRunner]:
    core = make_hash_core(
        num_pages=6000,
        page_size=16,
        max_batch_size=16,
        max_num_batched_tokens=BUDGET,
        max_seq_len=50_000,
        max_step_ms=max_step_ms,
        scheduler_policy=policy,
        clock=lambda: runner.now_s,
    )
    core.runner = runner = LawfulRunner(core, law)
    return core, runner


def add(core: EngineCore, name: str, num_prompt: int, max_tokens: int = 1) -> None:
    prompt = tuple(random.Random(name).choices(range(90), k=num_prompt))
    core.add(Request(name, prompt, GREEDY, 0, max_tokens))


def stream(core: EngineCore, count: int) -> None:
    """Add streams that run until the end of the test."""
    for i in range(count):
        add(core, f"stream {i}", 5, 20_000)
    core.step()


def run_prompt(core: EngineCore, name: str, num_prompt: int) -> int:
    """Add a prompt and step until it has its first token; returns the number of steps."""
    add(core, name, num_prompt)
    steps = 1
    while name not in {output.request_id for output in core.step()}:
        steps += 1
    return steps


def most(law: Law, num_streams: int, context: int) -> int:
    """The largest number of prompt tokens that fit within the bound."""
    return max(n for n in range(BUDGET) if law(num_streams, n, context) <= BOUND_MS)


@pytest.mark.parametrize("law", [linear, knee, attention])
@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_steps_keep_to_the_bound_and_prompts_do_not_starve(law: Law, policy: str) -> None:
    core, runner = lawful_core(law, policy=policy)
    stream(core, 4)
    run_prompt(core, "warm up", 1000)
    runner.steps.clear()
    for i, num_prompt in enumerate([1500, 20, 300, 4000, 700]):
        run_prompt(core, f"prompt {i}", num_prompt)
    # The last chunk of a prompt may be smaller than the limit.
    mixed = [step for step in runner.mixed() if step[1] >= MIN_CHUNK]
    assert max(step_ms for _, _, _, step_ms in mixed) <= 1.1 * BOUND_MS
    assert min(num_streams for num_streams, _, _, _ in runner.steps) == 4
    taken = sum(num_prompt for _, num_prompt, _, _ in runner.mixed())
    possible = sum(most(law, 4, context) for _, _, context, _ in runner.mixed())
    assert taken >= 0.6 * possible


def test_without_the_bound_a_long_prompt_stops_the_streams() -> None:
    core, runner = lawful_core(linear, max_step_ms=None)
    stream(core, 4)
    run_prompt(core, "long", 2000)
    assert max(step_ms for _, _, _, step_ms in runner.mixed()) > 1.5 * BOUND_MS


def test_it_starts_with_care_and_grows() -> None:
    core, runner = lawful_core(linear)
    stream(core, 4)
    run_prompt(core, "first", 1000)
    widths = [num_prompt for _, num_prompt, _, _ in runner.mixed()]
    assert widths[0] == MIN_CHUNK
    assert all(after <= 2 * before for before, after in itertools.pairwise(widths))
    assert max(step_ms for _, _, _, step_ms in runner.mixed()) <= BOUND_MS
    assert max(widths) > 0.7 * most(linear, 4, 0)


def test_while_nobody_streams_prompts_have_the_whole_budget() -> None:
    core, runner = lawful_core(slow)
    assert run_prompt(core, "alone", 4 * BUDGET) == 4
    assert runner.mixed() == []


def test_where_streams_alone_take_too_long_prompts_still_advance() -> None:
    core, runner = lawful_core(slow)
    stream(core, 4)
    assert run_prompt(core, "long", 20 * MIN_CHUNK) == 20
    assert {num_prompt for _, num_prompt, _, _ in runner.mixed()} == {MIN_CHUNK}


def test_it_follows_a_machine_that_becomes_slower_and_faster_again() -> None:
    core, runner = lawful_core(linear)
    stream(core, 4)
    run_prompt(core, "warm up", 3000)
    quick = runner.steps[-2][1]
    runner.law = lambda *work: 1.8 * linear(*work)
    runner.steps.clear()
    run_prompt(core, "slower", 3000)
    late = [step_ms for _, _, _, step_ms in runner.mixed()][3:]
    assert max(late) <= 1.1 * BOUND_MS
    runner.law = linear
    run_prompt(core, "faster", 3000)
    assert runner.steps[-2][1] > 0.9 * quick


def test_one_slow_step_costs_no_more_than_half() -> None:
    core, runner = lawful_core(linear)
    stream(core, 4)
    run_prompt(core, "warm up", 3000)
    quick = runner.steps[-2][1]
    add(core, "long", 3000)
    runner.law = lambda *work: 20 * linear(*work)
    core.step()
    runner.law = linear
    core.step()
    assert runner.steps[-1][1] >= quick // 2


def test_short_prompts_say_nothing_against_long_ones() -> None:
    core, runner = lawful_core(linear)
    stream(core, 4)
    run_prompt(core, "warm up", 3000)
    quick = runner.steps[-2][1]
    for i in range(5):
        run_prompt(core, f"short {i}", 20)
    add(core, "long", 3000)
    core.step()
    assert runner.steps[-1][1] >= quick


def test_a_context_that_was_never_met_is_met_with_care() -> None:
    core, runner = lawful_core(attention)
    add(core, "document", 30_000)
    core.outputs_until_complete()  # no streams, so nothing is learned; the pages stay cached
    stream(core, 4)
    run_prompt(core, "warm up", 1000)
    runner.steps.clear()
    document = tuple(random.Random("document").choices(range(90), k=30_000))
    core.add(Request("question", (*document, *range(80)), GREEDY, 0, 1))
    for _ in range(4):
        core.step()
    assert runner.mixed()[0][2] > 29_000
    assert max(step_ms for _, _, _, step_ms in runner.mixed()) <= 1.1 * BOUND_MS


def test_of_two_prompts_the_dearer_one_decides() -> None:
    core, runner = lawful_core(attention)
    stream(core, 4)
    run_prompt(core, "warm up", 9000)
    runner.steps.clear()
    add(core, "long", 9000)
    while core.scheduler.running[-1].num_computed < 8200:
        core.step()
    for i in range(8):
        add(core, f"short {i}", 60)
    while any(s.num_output == 0 for s in core.scheduler.running) or core.scheduler.waiting:
        core.step()
    assert max(step_ms for _, _, _, step_ms in runner.mixed()) <= 1.1 * BOUND_MS


def test_steps_that_streams_wait_for_are_smaller() -> None:
    core = make_hash_core(
        num_pages=200,
        page_size=16,
        max_batch_size=4,
        max_num_batched_tokens=64,
        max_tokens_beside_streams=24,
        max_seq_len=1000,
    )
    core.runner = runner = LawfulRunner(core, linear)
    add(core, "alone", 100, 500)
    for _ in range(3):
        core.step()
    assert [prompt for _, prompt, _, _ in runner.steps] == [64, 36, 0]
    run_prompt(core, "beside it", 60)
    # One of the 24 tokens is the stream's.
    assert [prompt for _, prompt, _, _ in runner.steps[3:]] == [23, 23, 14]
