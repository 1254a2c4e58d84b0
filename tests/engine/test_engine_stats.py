"""`EngineStats`: counters are summed over engines, field by field; gauges are not."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
from collections import Counter
from dataclasses import fields

import msgspec
import pytest

from infer.schedule.stats import SchedulerStats
from infer.types import FinishReason, Request, SamplingParams
from infer.types.engine_limits import EngineLimits
from infer.types.engine_stats import (
    OF_STATIC_BATCHES,
    EngineCounters,
    EngineGauges,
    EngineStats,
    RequestCounters,
)
from infer.types.stats_summary import summary_of, wait_bucket, wait_percentile
from tests.support.doubles import launch_hash_llm, make_hash_llm, pid_of, replica_of
from tests.support.hash_engine import make_hash_core

COUNTERS = tuple(field.name for field in msgspec.structs.fields(EngineCounters))
TABLES = ("num_accepted_at", "num_finished", "wait_counts")
NUMBERS = tuple(name for name in COUNTERS if name not in TABLES)
GAUGES = tuple(field.name for field in msgspec.structs.fields(EngineGauges))


def counters(factor: int) -> EngineCounters:
    """Counters with a different number in each field."""
    numbers = {name: factor * (i + 1) for i, name in enumerate(COUNTERS)}
    ends = {reason: factor * (100 + i) for i, reason in enumerate(FinishReason)}
    waits = {bucket: factor * (200 + bucket) for bucket in range(3)}
    tables = {"num_finished": ends, "num_accepted_at": waits, "wait_counts": waits}
    return EngineCounters(**{**numbers, **tables})  # type: ignore[arg-type]


def test_each_counter_is_summed() -> None:
    assert counters(1).plus(counters(10)) == counters(11)
    assert counters(1).plus(EngineCounters()) == EngineCounters().plus(counters(1)) == counters(1)


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_is_added_to_itself_alone(name: str) -> None:
    keys = {"num_finished": FinishReason.EOS, "num_accepted_at": 2, "wait_counts": 5}
    one, twice = (
        EngineCounters(**{name: {keys[name]: n} if name in keys else n})  # type: ignore[arg-type]
        for n in (3, 6)
    )
    assert one.plus(one) == twice
    assert twice.minus(one) == one


def test_whatever_the_scheduler_counts_is_reported() -> None:
    stats = SchedulerStats()
    for i, field in enumerate(fields(SchedulerStats)):
        if field.name in TABLES:
            getattr(stats, field.name).update({i: 7, i + 1: 3})
        else:
            setattr(stats, field.name, 10 + i)
    found = stats.counters(num_evictions=5)
    own = {"num_evictions": 5, "num_restarts": 0, "num_moved": 0, "num_moved_unequal": 0}
    for name in COUNTERS:
        assert getattr(found, name) == own.get(name, getattr(stats, name, None)), name
    assert {field.name for field in fields(SchedulerStats)} | own.keys() == set(COUNTERS)


def test_all_numbers_have_a_name_and_none_has_two() -> None:
    names = EngineStats(EngineGauges(), counters(1)).by_name()
    ends = [f"num_finished_{reason.value}" for reason in FinishReason]
    places = [f"num_accepted_at_{place}" for place in range(3)]
    assert list(names) == [*GAUGES, *NUMBERS, *places, *ends]
    served = make_hash_llm().stats()
    own = {field.name for field in msgspec.structs.fields(RequestCounters)}
    summary = {"mode", "kv_pages_used"}  # nothing was done yet
    numbers = {*GAUGES, *NUMBERS} - set(OF_STATIC_BATCHES)
    assert served.keys() == {*numbers, "num_open", *own, *summary}
    static = make_hash_llm(batching_mode="static").stats()
    assert static.keys() - served.keys() == {
        *OF_STATIC_BATCHES,
        "batches_formed",
        "batches_per_minute",
    }
    assert (static["batches_formed"], static["batches_per_minute"]) == (0, 0)


def test_the_gauges_of_a_core_are_those_of_now() -> None:
    core = make_hash_core(num_pages=10)
    gauges = core.stats().gauges
    assert (gauges.num_pages, gauges.num_free_pages, gauges.kv_cache_usage) == (9, 9, 0.0)
    assert (gauges.num_touched_pages, gauges.num_allowed_pages) == (0, 9)
    assert EngineGauges().kv_cache_usage == 0.0
    assert EngineGauges(num_pages=4, num_free_pages=1).kv_cache_usage == 0.75


def test_a_restart_keeps_counters_and_not_gauges() -> None:
    async def main() -> None:
        async with launch_hash_llm(num_pages=20) as llm:
            worker = replica_of(llm)
            await llm.generate(llm.make_request([1, 2, 3]))
            async with asyncio.timeout(20):
                while worker.stats().gauges.num_running:
                    await asyncio.sleep(0.01)
                before = worker.stats()
                for num_deaths in (1, 2):
                    os.kill(pid_of(llm), signal.SIGKILL)
                    while worker.stats().counters.num_restarts < num_deaths or not llm.is_ready:
                        await asyncio.sleep(0.01)
            after = worker.stats()
            assert after.gauges == EngineGauges(
                num_pages=19, num_free_pages=19, num_allowed_pages=19
            )
            assert after.counters == msgspec.structs.replace(before.counters, num_restarts=2)
            assert before.counters.num_sampled_tokens > 0

    asyncio.run(main())


# The summary, with the names that all reports share.


def limits(mode: str, *, prefix_caching: bool = True) -> EngineLimits:
    return EngineLimits(
        vocab_size=9,
        max_seq_len=9,
        num_seats=9,
        max_waiting_requests=9,
        batching_mode=mode,
        prefix_caching=prefix_caching,
    )


STATS = EngineStats(
    EngineGauges(
        num_pages=10,
        num_free_pages=7,
        kv_bytes=11 * 4096,
        num_batches_last_minute=2,
        num_touched_pages=5,
        num_allowed_pages=8,
    ),
    EngineCounters(
        num_steps=10,
        num_rows=25,
        num_batches_formed=4,
        num_batch_requests=10,
        wait_s=3.0,
        wait_counts={wait_bucket(0.1): 98, wait_bucket(1.0): 2},
        processing_s=6.0,
        num_prompt_tokens=100,
        num_cached_tokens=25,
        num_finished={
            FinishReason.EOS: 2,
            FinishReason.STOP: 1,
            FinishReason.ERROR: 1,
            FinishReason.ABORT: 5,
        },
    ),
)
OF_ALL_MODES = {
    "mean_rows_per_step": 2.5,
    "mean_wait_ms": 30.0,
    "p50_wait_ms": pytest.approx(100, rel=0.05),
    "p95_wait_ms": pytest.approx(100, rel=0.05),
    "p99_wait_ms": pytest.approx(1000, rel=0.05),
    "success_rate": 0.75,
    "mean_processing_ms": 2000.0,
    "kv_bytes": 11 * 4096,
    "kv_bytes_touched": 5 * 4096,
    "kv_bytes_allowed": 8 * 4096,
    "kv_pages_used": 3,
    "prefix_hit_rate": 0.25,
}
OF_STATIC = {"batches_formed": 4, "batches_per_minute": 2, "mean_batch_size": 2.5}


@pytest.mark.parametrize("mode", ["sequential", "static", "continuous"])
def test_what_has_no_meaning_is_absent(mode: str) -> None:
    own = OF_STATIC if mode == "static" else {}
    assert summary_of(STATS, limits(mode)) == {"mode": mode, **own, **OF_ALL_MODES}
    without = summary_of(STATS, limits(mode, prefix_caching=False))
    assert summary_of(STATS, limits(mode)).keys() - without.keys() == {"prefix_hit_rate"}
    nothing = {"mode": mode, **dict.fromkeys(list(own)[:2], 0)}
    assert summary_of(EngineStats(), limits(mode)) == nothing


@pytest.mark.parametrize("count", [1, 2, 100, 1000])
def test_percentiles_of_waits_are_within_five_percent(count: int) -> None:
    r = random.Random(count)
    waits = sorted(r.lognormvariate(-2, 2) for _ in range(count))
    counts = Counter(map(wait_bucket, waits))
    for percent in (1, 50, 95, 99, 100):
        exact = waits[math.ceil(percent * count / 100) - 1]
        assert wait_percentile(counts, percent) == pytest.approx(exact, rel=0.05, abs=1e-4)
    assert wait_percentile({0: 5}, 99) == 0.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_core_counts_waits_rows_batches_and_time() -> None:
    clock = Clock()
    core = make_hash_core(batching_mode="static", max_batch_size=2, clock=clock)
    for i, (sent_s, max_tokens) in enumerate([(0.0, 1), (1.0, 2), (None, 1)]):
        sampling = SamplingParams(temperature=0)
        clock.now_s = 2.0
        core.add(Request(f"r{i}", (1, 2, 3), sampling, 0, max_tokens), sent_s)
    core.step()  # the first two
    clock.now_s = 5.0
    core.step()  # the second one ends
    core.step(flush=True)  # the third one, in a batch of its own
    counters = core.stats().counters
    assert (counters.num_batches_formed, counters.num_batch_requests) == (2, 3)
    assert (counters.num_steps, counters.num_rows) == (3, 4)
    assert counters.wait_s == 2.0 + 1.0 + 3.0
    assert sum(counters.wait_counts.values()) == 3
    assert counters.processing_s == 0.0 + 3.0 + 0.0
    assert core.stats().gauges.num_batches_last_minute == 2
    clock.now_s = 63.5
    assert core.stats().gauges.num_batches_last_minute == 1
    clock.now_s = 66.0
    assert core.stats().gauges.num_batches_last_minute == 0
    assert core.stats().counters.num_batches_formed == 2


def test_a_request_that_another_engine_had_waits_once() -> None:
    core = make_hash_core()
    sampling = SamplingParams(temperature=0)
    core.add(Request("a", (1, 2, 3), sampling, 0, 5, output_token_ids=(4,), num_crashes=1))
    core.add(Request("b", (1, 2, 3), sampling, 0, 5, num_crashes=1))
    core.outputs_until_complete()
    assert sum(core.stats().counters.wait_counts.values()) == 1


def test_a_command_that_waits_for_a_long_step_counts_as_waiting() -> None:
    async def main() -> None:
        async with make_hash_llm(step_s=0.05) as llm:
            first = asyncio.create_task(llm.generate(llm.make_request([1, 2], TEN_TOKENS)))
            await asyncio.sleep(0.07)
            await llm.generate(llm.make_request([3, 4], TEN_TOKENS))
            await first
            counters = llm.read_stats().engine.counters
            assert counters.wait_s > 0.005
            assert llm.stats()["p99_wait_ms"] > 5

    asyncio.run(main())


TEN_TOKENS = SamplingParams(max_tokens=10, ignore_eos=True)
