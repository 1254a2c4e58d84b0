"""`EngineStats`: counters are summed over engines, field by field; gauges are not."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import fields

import msgspec
import pytest

from infer.engine.process.supervisor import EngineProcess
from infer.schedule.stats import SchedulerStats
from infer.types import FinishReason
from infer.types.engine_stats import EngineCounters, EngineGauges, EngineStats, RequestCounters
from tests.support.doubles import launch_hash_llm, make_hash_core, make_hash_llm

COUNTERS = tuple(field.name for field in msgspec.structs.fields(EngineCounters))
GAUGES = tuple(field.name for field in msgspec.structs.fields(EngineGauges))


def counters(factor: int) -> EngineCounters:
    """Counters with a different number in each field."""
    numbers = {name: factor * (i + 1) for i, name in enumerate(COUNTERS)}
    ends = {reason: factor * (100 + i) for i, reason in enumerate(FinishReason)}
    places = {place: factor * (200 + place) for place in range(3)}
    tables = {"num_finished": ends, "num_accepted_at": places}
    return EngineCounters(**{**numbers, **tables})  # type: ignore[arg-type]


def test_each_counter_is_summed() -> None:
    assert counters(1).plus(counters(10)) == counters(11)
    assert counters(1).plus(EngineCounters()) == EngineCounters().plus(counters(1)) == counters(1)


@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_is_added_to_itself_alone(name: str) -> None:
    keys = {"num_finished": FinishReason.EOS, "num_accepted_at": 2}
    one, twice = (
        EngineCounters(**{name: {keys[name]: n} if name in keys else n})  # type: ignore[arg-type]
        for n in (3, 6)
    )
    assert one.plus(one) == twice


def test_whatever_the_scheduler_counts_is_reported() -> None:
    stats = SchedulerStats()
    for i, field in enumerate(fields(SchedulerStats)):
        if field.name == "num_finished":
            stats.num_finished.update(eos=7)
        elif field.name == "num_accepted_at":
            stats.num_accepted_at.update({0: 8, 1: 3})
        else:
            setattr(stats, field.name, 10 + i)
    found = stats.counters(num_evictions=5)
    own = {"num_evictions": 5, "num_restarts": 0}
    for name in COUNTERS:
        assert getattr(found, name) == own.get(name, getattr(stats, name, None)), name
    assert {field.name for field in fields(SchedulerStats)} | own.keys() == set(COUNTERS)


def test_all_numbers_have_a_name_and_none_has_two() -> None:
    names = EngineStats(EngineGauges(), counters(1)).by_name()
    ends = [f"num_finished_{reason.value}" for reason in FinishReason]
    places = [f"num_accepted_at_{place}" for place in range(3)]
    assert list(names) == [*GAUGES, *COUNTERS[:-2], *places, *ends]
    served = make_hash_llm().stats()
    own = {field.name for field in msgspec.structs.fields(RequestCounters)}
    assert served.keys() == {*GAUGES, *COUNTERS[:-2], "num_open", *own}


def test_the_gauges_of_a_core_are_those_of_now() -> None:
    core = make_hash_core(num_pages=10)
    gauges = core.stats().gauges
    assert (gauges.num_pages, gauges.num_free_pages, gauges.kv_cache_usage) == (9, 9, 0.0)
    assert EngineGauges().kv_cache_usage == 0.0
    assert EngineGauges(num_pages=4, num_free_pages=1).kv_cache_usage == 0.75


def test_a_restart_keeps_counters_and_not_gauges() -> None:
    async def main() -> None:
        async with launch_hash_llm(num_pages=20) as llm:
            worker = llm.engine_client
            assert isinstance(worker, EngineProcess)
            await llm.generate(llm.make_request([1, 2, 3]))
            async with asyncio.timeout(20):
                while worker.stats().gauges.num_running:
                    await asyncio.sleep(0.01)
                before = worker.stats()
                for num_deaths in (1, 2):
                    assert worker.pid is not None
                    os.kill(worker.pid, signal.SIGKILL)
                    while worker.stats().counters.num_restarts < num_deaths or not llm.is_ready:
                        await asyncio.sleep(0.01)
            after = worker.stats()
            assert after.gauges == EngineGauges(num_pages=19, num_free_pages=19)
            assert after.counters == msgspec.structs.replace(before.counters, num_restarts=2)
            assert before.counters.num_sampled_tokens > 0

    asyncio.run(main())
