"""`FairShare`: tenants get equal numbers of tokens, none starves, and a flood delays no other."""

from __future__ import annotations

import itertools
import random

import pytest

from infer.engine.core import EngineCore
from infer.schedule.fair_share import FairShare
from infer.types import Request, SamplingParams
from infer.types.step_events import ComputedChunk
from tests.support.hash_engine import HashRunner, make_hash_core, solo

names = (f"t{i}" for i in itertools.count())


def request(tenant: str, num_prompt: int, max_tokens: int, priority: int = 0) -> Request:
    name = next(names)
    prompt = tuple(random.Random(name).choices(range(90), k=num_prompt))
    sampling = SamplingParams(temperature=0)
    return Request(
        name, prompt, sampling, 0, max_tokens,
        tenant=tenant, cache_scope=tenant, priority=priority,
    )  # fmt: skip


def steps_to_first_token(core: EngineCore, wanted: Request) -> int:
    core.add(wanted)
    for number in range(1, 500):
        outputs = core.step()
        core.scheduler.check()
        if any(output.request_id == wanted.request_id for output in outputs):
            return number
    raise AssertionError("starved")


@pytest.mark.parametrize("num_pages", [400, 60])
def test_a_flood_costs_the_other_one_step(num_pages: int) -> None:
    """One step, however many seats and tokens the flood has; a few more if pages are short."""
    core = make_hash_core(max_batch_size=4, max_num_batched_tokens=32, num_pages=num_pages)
    for _ in range(40):
        core.add(request("flood", 100, 30))
    for _ in range(9):
        core.step()
    for _ in range(5):
        small = request("small", 10, 5)
        num_steps = steps_to_first_token(core, small)
        if num_pages == 60:  # too few for two of the flood, so the tenant ahead waits for pages
            assert num_steps < 40
            continue
        assert num_steps == 1
        assert core.step_events is not None
        chunks = [event for event in core.step_events.events if isinstance(event, ComputedChunk)]
        others = [event.num_tokens for event in chunks if event.request_id != small.request_id]
        assert len(others) < len(chunks)
        assert sum(others) <= 4  # tokens owed to sequences that were passed over
        for _ in range(5):
            core.step()
    core.outputs_until_complete()
    core.scheduler.check()


def test_without_shares_it_would_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairShare, "several", False)
    with pytest.raises(AssertionError):
        test_a_flood_costs_the_other_one_step(400)


@pytest.mark.parametrize("sizes", [(100, 100), (100, 7), (300, 30)])
def test_tokens_are_shared_evenly_while_both_want_them(sizes: tuple[int, int]) -> None:
    core = make_hash_core(max_batch_size=6, max_num_batched_tokens=32)
    served = {"a": 0, "b": 0}
    waiting = {"a": 0, "b": 0}
    tenants: dict[str, str] = {}
    for step in range(600):
        for tenant, size in zip(served, sizes, strict=True):
            waiting[tenant] = sum(s.request.tenant == tenant for s in core.scheduler.waiting)
            for _ in range(8 - waiting[tenant]):
                new = request(tenant, size, 4)
                tenants[new.request_id] = tenant
                core.add(new)
        plan = core.scheduler.schedule()
        if step >= 20:
            for chunk in plan:
                served[chunk.sequence.request.tenant] += chunk.num_tokens
        sampled = core.runner.execute(plan)
        core.scheduler.commit(core.scheduler.advance(plan), sampled)
        core.scheduler.check()
        assert abs(served["a"] - served["b"]) < 2 * max(sizes) + 200
    assert min(served.values()) > 3000


def test_a_greedy_tenant_does_not_starve_and_is_not_starved() -> None:
    """A tenant with a large counter is served eventually, whatever priority others claim."""
    core = make_hash_core(max_batch_size=2, max_num_batched_tokens=16)
    for _ in range(10):
        core.add(request("debtor", 60, 3))
    for _ in range(40):
        core.step()
    late = request("debtor", 5, 2)
    core.add(late)
    for _ in range(3000):
        while sum(s.request.tenant == "urgent" for s in core.scheduler.waiting) < 4:
            core.add(request("urgent", 20, 3, priority=-1000))
        outputs = core.step()
        if any(output.request_id == late.request_id for output in outputs):
            return
    raise AssertionError("starved")


def test_who_comes_back_has_saved_nothing() -> None:
    core = make_hash_core(max_batch_size=4, max_num_batched_tokens=32)
    core.add(request("idle", 5, 1))
    core.outputs_until_complete()
    for _ in range(30):
        core.add(request("busy", 100, 10))
    for _ in range(50):
        core.step()
    fair_share = core.scheduler.fair_share.shares
    busy = fair_share["busy"].num_tokens
    core.add(request("idle", 5, 1))
    assert fair_share["idle"].num_tokens == busy - 1
    assert busy > 1000


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("mode", ["continuous", "static", "sequential"])
def test_the_answers_are_those_of_a_request_alone(seed: int, mode: str) -> None:
    r = random.Random(seed)
    core = make_hash_core(
        num_pages=r.choice([40, 60, 200]),
        max_batch_size=r.randrange(1, 6),
        max_num_batched_tokens=r.choice([5, 16, 64]),
        batching_mode=mode,
    )
    tokens: dict[str, list[int]] = {}
    requests: list[Request] = []
    for _ in range(400):
        if len(requests) < 40 and r.random() < 0.4:
            tenant = r.choice("abc")
            requests.append(request(tenant, r.randrange(1, 90), r.randrange(1, 30)))
            core.add(requests[-1])
        if requests and r.random() < 0.02:
            core.abort(requests[-1].request_id)
        for output in core.step():
            if output.token_id is not None:
                tokens.setdefault(output.request_id, []).append(output.token_id)
        core.scheduler.check()
    for output in core.outputs_until_complete():
        if output.token_id is not None:
            tokens.setdefault(output.request_id, []).append(output.token_id)
    assert isinstance(core.runner, HashRunner)
    for each in requests:
        alone = solo(each, core.runner.vocab_size)
        got = tokens.get(each.request_id, [])
        assert got == alone[: len(got)]
        assert len(got) == len(alone) or each.request_id not in core.scheduler.by_id
    fair_share = core.scheduler.fair_share
    assert not fair_share.several
    assert all(tenant_share.num_here == 0 for tenant_share in fair_share.shares.values())
