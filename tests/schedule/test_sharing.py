"""Common prefixes of prompts that run at the same time are computed once."""

from __future__ import annotations

import random

import pytest

from infer.config import SCHEDULER_POLICIES
from infer.engine.core import EngineCore
from infer.types import FinishReason, Request, SamplingParams
from tests.support.hash_engine import make_hash_core, solo

PREFIX = tuple(random.Random(0).randrange(90) for _ in range(1024))
GREEDY = SamplingParams(temperature=0)


def sharing(
    name: str, num_prefix: int = 1024, num_tail: int = 40, max_tokens: int = 4, scope: str = ""
) -> Request:
    tail = random.Random(name)
    prompt = PREFIX[:num_prefix] + tuple(tail.randrange(90) for _ in range(num_tail))
    return Request(name, prompt, GREEDY, 0, max_tokens, cache_scope=scope)


def core_for(num_seats: int = 16, **settings: object) -> EngineCore:
    values: dict[str, object] = {
        "num_pages": 1200, "page_size": 16, "max_seq_len": 2048, "max_num_batched_tokens": 512
    }  # fmt: skip
    return make_hash_core(max_batch_size=num_seats, **{**values, **settings})  # type: ignore[arg-type]


def finish(core: EngineCore, requests: list[Request]) -> int:
    """Run to the end and compare every output with a solo run; returns the number of steps."""
    tokens: dict[str, list[int | None]] = {r.request_id: [] for r in requests}
    steps = 0
    while core.has_work:
        for output in core.step(flush=True):
            tokens[output.request_id].append(output.token_id)
        core.scheduler.check()
        steps += 1
    for r in requests:
        assert tokens[r.request_id] == solo(r, core.runner.vocab_size)  # type: ignore[attr-defined]
    assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable
    return steps


MODES = [
    *({"scheduler_policy": policy} for policy in SCHEDULER_POLICIES),
    {"batching_mode": "static"},
    {"batching_mode": "sequential"},
    {"num_seats": 5},
    {"num_pages": 200},  # enough for two prompts without sharing
    {"max_num_batched_tokens": 50},
    {"max_num_batched_tokens": 5000},
]


@pytest.mark.parametrize("settings", MODES)
def test_a_common_prefix_is_computed_once(settings: dict[str, object]) -> None:
    core = core_for(**settings)  # type: ignore[arg-type]
    requests = [sharing(f"r{i}") for i in range(16)]
    for r in requests:
        core.add(r)
    finish(core, requests)
    stats = core.stats().by_name()
    decoded = 16 * 3  # the first token comes with the prompt
    wasted = stats["num_preemptions"] * (1024 + 40)
    assert 0 <= stats["num_computed_tokens"] - (1024 + 16 * 40 + decoded) <= wasted
    assert stats["num_cached_tokens"] == 15 * 1024


@pytest.mark.parametrize("leave", ["abort", "preempt"])
@pytest.mark.parametrize("budget", [512, 50])
def test_when_the_one_who_computes_leaves_another_goes_on_where_it_was(
    leave: str, budget: int
) -> None:
    core = core_for(max_num_batched_tokens=budget)
    requests = [sharing(f"r{i}") for i in range(6)]
    for r in requests:
        core.add(r)
    core.step()
    first = core.scheduler.running[0]
    assert [s.num_computed for s in core.scheduler.running] == [budget, 0, 0, 0, 0, 0]
    if leave == "abort":
        ended = core.abort(first.request_id)
        assert ended is not None
        assert ended.finish_reason is FinishReason.ABORT
        requests = requests[1:]
    else:
        core.scheduler.preempt(first)
    finish(core, requests)
    lost = budget % 16  # tokens of the page that was not full
    assert core.stats().counters.num_computed_tokens == 1024 + lost + len(requests) * (40 + 3)
    if leave == "preempt":  # what it finds again was its own, so it does not count as cached
        assert core.stats().counters.num_cached_tokens == 5 * 1024


def test_it_also_may_end_by_itself() -> None:
    core = core_for()
    requests = [sharing("short", num_tail=0, max_tokens=1), *(sharing(f"r{i}") for i in range(4))]
    for r in requests:
        core.add(r)
    finish(core, requests)
    assert core.stats().counters.num_computed_tokens == 1024 + 4 * (40 + 3)


def test_others_do_not_wait() -> None:
    core = core_for(max_num_batched_tokens=1200)
    for i in range(3):
        core.add(sharing(f"r{i}"))
    core.add(sharing("other tenant", num_prefix=64, scope="other"))
    core.add(sharing("other prompt", num_prefix=0))
    plan = core.scheduler.schedule()
    shape = {c.sequence.request_id: c.num_tokens for c in plan}
    assert shape == {"r0": 1064, "other tenant": 104, "other prompt": 32}  # the budget is spent


def test_without_the_cache_everybody_computes_everything() -> None:
    core = core_for(enable_prefix_caching=False)
    requests = [sharing(f"r{i}") for i in range(4)]
    for r in requests:
        core.add(r)
    finish(core, requests)
    assert core.stats().counters.num_computed_tokens == 4 * (1064 + 3)


FEW_AND_MORE = [range(20), pytest.param(range(20, 60), marks=pytest.mark.slow)]


def branching(r: random.Random, name: str, scope: str) -> Request:
    """A prompt from a small tree of prompts, so that any two share a prefix of some length."""
    prompt = [token for _ in range(r.randrange(1, 7)) for token in [r.randrange(2)] * 5]
    prompt = prompt[: r.randrange(1, len(prompt) + 1)]
    return Request(name, tuple(prompt), GREEDY, 0, r.randrange(1, 4), cache_scope=scope)


@pytest.mark.parametrize("seeds", FEW_AND_MORE)
@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_any_page_of_any_prompt_is_computed_once(policy: str, seeds: range) -> None:
    for seed in seeds:
        r = random.Random(seed)
        page_size = r.choice([1, 2, 4])
        core = core_for(
            r.choice([2, 8, 20]),
            page_size=page_size,
            num_pages=1 + 700 // page_size,  # room for all; a check looks at each page
            max_num_batched_tokens=r.choice([1, 3, 7, 500]),
            scheduler_policy=policy,
        )
        requests = [branching(r, f"r{i}", r.choice(["", "tenant"])) for i in range(20)]
        for request in requests:
            core.add(request)
        finish(core, requests)
        pages, rest = set(), 0
        for request in requests:
            prompt = request.prompt_token_ids
            ends = range(page_size, len(prompt), page_size)
            pages |= {(request.cache_scope, prompt[:end]) for end in ends}
            rest += len(prompt) - len(ends) * page_size
        decoded = core.stats().counters.num_sampled_tokens - len(requests)
        assert core.stats().counters.num_computed_tokens <= len(pages) * page_size + rest + decoded


def test_leaving_and_preemption_at_any_time_change_no_token() -> None:
    for seed in range(150):
        r = random.Random(seed)
        core = core_for(
            r.choice([2, 5]),
            page_size=r.choice([1, 2, 4]),
            num_pages=r.choice([40, 80]),
            max_num_batched_tokens=r.choice([1, 3, 7, 500]),
            scheduler_policy=r.choice(SCHEDULER_POLICIES),
        )
        requests = [branching(r, f"r{i}", "") for i in range(12)]
        left = set()
        for request in requests:
            core.add(request)
        tokens: dict[str, list[int | None]] = {request.request_id: [] for request in requests}
        while core.has_work:
            for output in core.step():
                tokens[output.request_id].append(output.token_id)
            core.scheduler.check()
            if core.scheduler.running and r.random() < 0.2:
                first = core.scheduler.running[0]
                if r.random() < 0.5:
                    core.abort(first.request_id)
                    left.add(first.request_id)
                else:
                    core.scheduler.preempt(first)
                core.scheduler.check()
        for request in requests:
            got = tokens[request.request_id]
            wanted = solo(request, core.runner.vocab_size)  # type: ignore[attr-defined]
            assert got == wanted[: len(got)]
            assert request.request_id in left or len(got) == len(wanted)
