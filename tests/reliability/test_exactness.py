"""Scorecard 2, 3, 4, 6: no event of other requests changes a request's tokens. With the hash model
and the shipped model, in this process, without a server."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.engine.core import EngineCore
from infer.types import ErrorRecord, FinishReason, Request
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.faults import Faults, FaultyCore
from tests.support.hash_engine import make_hash_core, solo
from tests.support.server_process import Findings

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


def request(name: str, prompt: tuple[int, ...], num_tokens: int) -> Request:
    return Request(name, prompt, GREEDY, seed=0, max_tokens=num_tokens)


def tokens_of(core: EngineCore, requests: list[Request]) -> dict[str, list[int | None]]:
    for each in requests:
        core.add(each)
    found: dict[str, list[int | None]] = {each.request_id: [] for each in requests}
    for output in core.outputs_until_complete():
        found[output.request_id].append(output.token_id)
    return found


# ---- 2: the same tokens in any batch


@pytest.mark.slow
def test_a_thousand_needles_in_batches_of_every_size() -> None:
    dice = random.Random(6)
    words = ["one", "day", "the", "fox", "saw", "a", "red", "ball", "near", "the", "river", "."]
    prompts = [" ".join(dice.choices(words, k=dice.randint(1, 30))) for _ in range(1000)]
    sampling = [
        SamplingParams(
            temperature=dice.choice([0, 0.8]), seed=i, max_tokens=dice.randint(4, 24), logprobs=1
        )
        for i in range(1000)
    ]
    counts = []
    with LLM(batching_mode="sequential", enable_prefix_caching=False, max_seq_len=256) as llm:
        alone = llm.generate(prompts, sampling, use_tqdm=False)
    for width, budget in ((3, 7), (17, 64), (64, 33), (64, 2048)):
        order = dice.sample(range(1000), 1000)
        with LLM(max_batch_size=width, max_num_batched_tokens=budget, max_seq_len=256) as llm:
            outs = llm.generate(
                [prompts[i] for i in order], [sampling[i] for i in order], use_tqdm=False
            )
        same = [
            (out.token_ids, out.logprobs) == (alone[i].token_ids, alone[i].logprobs)
            for i, out in zip(order, outs, strict=True)
        ]
        assert all(same), (width, budget, same.count(False))
        counts.append((width, budget))
    load = "1,000 requests alone, then in random order; shipped model, bfloat16"
    counted = {"seats and tokens a step": counts, "tokens and logprobs that differ": 0}
    Findings().note(2, "batch independence", load, **counted)


# ---- 3: preemption by force


def preempt(rounds: int) -> None:
    num_preemptions = 0
    for seed in range(rounds):
        dice = random.Random(seed)
        requests = [
            request(f"{i}", (i, dice.randrange(200), *range(dice.randrange(30))), 256)
            for i in range(32)
        ]
        # A page is four tokens: 87 of them are 1.2 times the longest request.
        core = FaultyCore(make_hash_core(num_pages=88), Faults(preempt_every=3))
        found = tokens_of(core, requests)
        assert all(found[each.request_id] == solo(each, VOCAB_SIZE) for each in requests)
        core.scheduler.check()
        assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable
        num_preemptions += core.scheduler.stats.num_preemptions
    assert num_preemptions >= 10 * rounds
    load = f"pool of 1.2 requests, each third step, 32 x 256 tokens, {rounds} rounds, hash model"
    Findings().note(3, "forced preemption", load, preemptions=num_preemptions, differ=0, leaked=0)


def test_preemption_at_every_third_step() -> None:
    preempt(1)


@pytest.mark.slow
def test_preemption_at_every_third_step_for_longer() -> None:
    preempt(100)


# ---- 4: the prefix cache


def share(count: int) -> None:
    """With the prefix cache on, off, and in a pool that is too small for the prefixes."""
    dice = random.Random(7)
    prefixes = [tuple(dice.choices(range(200), k=40)) for _ in range(50)]
    requests = [
        request(f"{i}", (*dice.choice(prefixes), i % 200, i // 200), dice.randint(1, 8))
        for i in range(count)
    ]
    stats = {}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("pool for all", {"num_pages": 4000}),
        ("pool for 5", {"num_pages": 61}),
        ("off", {"num_pages": 4000, "enable_prefix_caching": False}),
    ]
    for name, settings in kinds:
        core = make_hash_core(max_waiting_requests=count, **settings)
        found = tokens_of(core, requests)
        assert all(found[each.request_id] == solo(each, VOCAB_SIZE) for each in requests)
        core.scheduler.check()
        counts = core.scheduler.stats
        # Hits and misses add up to the prompts, apart from recomputed tokens.
        computed = counts.num_computed_tokens + counts.num_cached_tokens
        num_sampled_again = counts.num_sampled_tokens - count
        if not counts.num_preemptions:
            assert computed == counts.num_prompt_tokens + num_sampled_again
        stats[name] = (counts.num_cached_tokens, core.scheduler.allocator.num_evictions)
    assert stats["pool for all"][0] > stats["pool for 5"][0] > stats["off"][0] == 0
    assert stats["pool for 5"][1] > count
    load = f"{count} requests, 50 shared prefixes, hash model"
    counted = {f"tokens hit, pages evicted: {name}": pair for name, pair in stats.items()}
    Findings().note(4, "prefix cache on, off, evicting", load, **counted, differ=0)


def test_shared_prefixes() -> None:
    share(500)


@pytest.mark.slow
def test_ten_thousand_shared_prefixes() -> None:
    share(10_000)


# ---- 6: every interleaving of a small system


REQUESTS = [
    request("a", (1, 2, 3), 2),
    request("b", (1, 2, 4, 5), 1),
    request("c", (1, 2, 3, 6, 7), 2),
]
ALONE = {each.request_id: solo(each, VOCAB_SIZE) for each in REQUESTS}


def explore(depth: int) -> tuple[int, int]:
    """Breadth-first search over the actions: add, abort or preempt each of three requests, or step.

    All invariants are checked after each action, and from each state all requests must finish.
    """
    start = make_hash_core(num_pages=7, page_size=2, max_batch_size=2, max_num_batched_tokens=2)
    start.scheduler.clock = _no_time
    queue: deque[tuple[int, EngineCore, dict[str, list[int]]]] = deque([(0, start, {})])
    seen, num_actions = {_key(start, {})}, 0
    while queue:
        done, core, told = queue.popleft()
        if done == depth:
            continue
        for act in _actions(core, told):
            after, heard = copy.deepcopy((core, told))
            act(after, heard)
            num_actions += 1
            after.scheduler.check()
            key = _key(after, heard)
            if key not in seen:
                seen.add(key)
                queue.append((done + 1, after, heard))
                _finish(*copy.deepcopy((after, heard)))
    return len(seen), num_actions


def _no_time() -> float:
    return 0.0


def _actions(core: EngineCore, told: dict[str, list[int]]) -> list[Any]:
    actions: list[Any] = [_step] if core.has_work else []
    for each in REQUESTS:
        name = each.request_id
        if name not in told:
            actions.append(lambda c, t, each=each: (c.add(each), t.update({each.request_id: []})))
        elif name in core.scheduler.by_id:
            actions.append(lambda c, t, name=name: (c.abort(name), t.update({name: [-1]})))
            if core.scheduler.by_id[name] in core.scheduler.running:
                actions.append(lambda c, t, name=name: c.scheduler.preempt(c.scheduler.by_id[name]))
    return actions


def _step(core: EngineCore, told: dict[str, list[int]]) -> None:
    before = core.scheduler.stats.num_computed_tokens
    for output in core.step():
        assert output.token_id is not None
        told[output.request_id].append(output.token_id)
        assert told[output.request_id] == ALONE[output.request_id][: len(told[output.request_id])]
        if output.finish_reason is not None:
            assert told[output.request_id] == ALONE[output.request_id]
    assert core.scheduler.stats.num_computed_tokens > before, "a step that moves nobody"


def _finish(core: EngineCore, told: dict[str, list[int]]) -> None:
    steps = 0
    while core.has_work:
        _step(core, told)
        steps += 1
        assert steps < 60, "it does not come to an end"
    assert core.scheduler.allocator.num_free == core.scheduler.allocator.num_usable
    for name, tokens in told.items():
        assert tokens in (ALONE[name], [-1])


def _key(core: EngineCore, told: dict[str, list[int]]) -> tuple[Any, ...]:
    """The part of a state on which its future depends, with pages named by their content."""
    scheduler, allocator = core.scheduler, core.scheduler.allocator
    sequences = tuple(
        (
            s.request_id,
            s.status,
            s.num_computed,
            len(s.tokens),
            tuple(s.table.pages),
            s.table.num_indexed,
            s.arrival,
        )
        for queue in (scheduler.running, scheduler.preempted, scheduler.waiting)
        for s in queue
    )
    indexed, free = allocator.snapshot()
    index = tuple(sorted((page, key[1]) for key, page in indexed.items()))
    heard = tuple(sorted((name, tuple(tokens)) for name, tokens in told.items()))
    return (sequences, index, free, heard)


def note_exploration(depth: int) -> None:
    states, actions = explore(depth)
    load = f"3 requests, 6 pages of 2 tokens, 2 seats, all orders of up to {depth} actions"
    Findings().note(6, "every interleaving", load, states=states, actions=actions, violations=0)
    assert states > 100


def test_every_interleaving() -> None:
    note_exploration(5)


@pytest.mark.slow
def test_every_interleaving_of_more() -> None:
    note_exploration(9)


def test_the_reasons_are_the_ones_that_are_known() -> None:
    """Terminal states are absorbing: what has ended cannot be ended again."""
    core = make_hash_core()
    core.add(REQUESTS[0])
    core.outputs_until_complete()
    assert core.abort("a") is None
    assert core.scheduler.fail("a", ErrorRecord("late")) is None
    assert core.scheduler.stats.num_finished == {FinishReason.LENGTH: 1}
