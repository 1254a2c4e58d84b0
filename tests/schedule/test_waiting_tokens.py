"""`max_waiting_tokens`: prompt tokens that may wait, in the scheduler and in the façades."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import re
import signal
from typing import Any

import pytest

from infer import LLM
from infer.engine.client.async_llm import waiting_tokens_error
from infer.errors import OverloadedError
from infer.requests.state import RequestStates
from infer.types import Request, SamplingParams
from tests.support.doubles import launch_hash_llm, make_hash_llm, pid_of
from tests.support.hash_engine import limits_of, make_hash_core

TEN_TOKENS = SamplingParams(max_tokens=10, ignore_eos=True)


def request(name: str, num_prompt: int, max_tokens: int = 4, **fields: Any) -> Request:
    prompt = tuple(range(num_prompt))
    return Request(name, prompt, SamplingParams(temperature=0), 0, max_tokens, **fields)


def test_what_finds_a_seat_does_not_wait() -> None:
    core = make_hash_core(max_batch_size=2, max_waiting_tokens=10)
    core.add(request("a", 50))
    core.add(request("b", 60))  # two seats are free, so neither of them waits
    core.add(request("c", 6))
    with pytest.raises(OverloadedError, match="6 prompt tokens wait for a seat, and 5 more") as e:
        core.add(request("d", 5))
    assert (e.value.status, e.value.retry_after_s) == (503, 1)
    core.add(request("e", 4))
    core.step()
    with pytest.raises(OverloadedError):
        core.add(request("f", 1))
    assert core.stats().counters.num_requests_refused == 2
    core.outputs_until_complete()
    core.add(request("f", 90))
    assert core.stats().counters.num_submitted == 5


def test_without_room_to_wait_only_seats_are_given() -> None:
    core = make_hash_core(max_batch_size=1, max_waiting_tokens=0)
    core.add(request("a", 5))
    with pytest.raises(OverloadedError):
        core.add(request("b", 1))


def test_a_static_batch_that_runs_has_no_free_seat() -> None:
    core = make_hash_core(batching_mode="static", max_batch_size=4, max_waiting_tokens=10)
    core.add(request("a", 50))
    core.step(flush=True)
    core.add(request("b", 8))
    with pytest.raises(OverloadedError):
        core.add(request("c", 3))
    core.outputs_until_complete()
    core.add(request("c", 50))


def test_what_an_engine_before_had_accepted_is_taken() -> None:
    core = make_hash_core(max_batch_size=1, max_waiting_tokens=0)
    for name in "abc":
        core.add(request(name, 5, num_crashes=1))
    with pytest.raises(OverloadedError):
        core.add(request("d", 5))


@pytest.mark.parametrize("mode", ["continuous", "static", "sequential"])
def test_the_facade_counts_as_the_scheduler_does(mode: str) -> None:
    """On random requests, when it has seen the events of all steps."""
    num_refused = 0
    for seed in range(30):
        r = random.Random(seed)
        core = make_hash_core(
            batching_mode=mode, max_batch_size=r.choice([1, 2, 5]), max_waiting_tokens=30
        )
        limits, facade = limits_of(core), RequestStates()
        for i in range(60):
            made = request(f"r{i}", r.randrange(1, 20), r.randrange(1, 6))
            num_prompt = len(made.prompt_token_ids)
            expected = waiting_tokens_error(limits, facade, (num_prompt,))
            if expected is None:
                core.add(made)
                facade.add(made.request_id, num_prompt)
            else:
                num_refused += 1
                with pytest.raises(OverloadedError, match=re.escape(str(expected))):
                    core.add(made)
            while r.random() < 0.5:
                outputs = core.step(flush=True)
                facade.stepped(outputs, core.step_events)
    assert num_refused > 100


def test_several_choices_wait_together_or_not_at_all() -> None:
    limits = dataclasses.replace(limits_of(make_hash_core()), num_seats=1, max_waiting_tokens=10)
    facade = RequestStates()
    assert waiting_tokens_error(limits, facade, (5, 5, 5)) is None  # one of them has a seat
    assert isinstance(waiting_tokens_error(limits, facade, (5, 5, 5, 5)), OverloadedError)
    facade.add("a", 50)
    assert isinstance(waiting_tokens_error(limits, facade, (6, 6)), OverloadedError)
    assert waiting_tokens_error(limits, facade, (6,)) is None


def test_without_a_limit_nothing_is_counted() -> None:
    facade = RequestStates()
    facade.add("a", 50)
    assert waiting_tokens_error(limits_of(make_hash_core()), facade, (10**9,)) is None


def test_async_callers_get_the_typed_error_before_the_engine_has_the_request() -> None:
    async def main() -> None:
        llm = make_hash_llm(step_s=0.01, max_batch_size=1, max_waiting_tokens=5)
        async with llm:
            first = asyncio.create_task(llm.generate(llm.make_request([1] * 40, TEN_TOKENS)))
            await asyncio.sleep(0)
            second = asyncio.create_task(llm.generate(llm.make_request([2] * 4, TEN_TOKENS)))
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError, match="max_waiting_tokens, which is 5"):
                await llm.generate(llm.make_request([3, 4], TEN_TOKENS))
            assert llm.refusal() is None  # there is room for a prompt of one token
            third = asyncio.create_task(llm.generate(llm.make_request([3], TEN_TOKENS)))
            await asyncio.sleep(0)
            assert isinstance(llm.refusal(), OverloadedError)
            with pytest.raises(OverloadedError), llm.reserved(1):
                raise AssertionError("nothing may be reserved")
            await asyncio.gather(first, second, third)
            assert llm.refusal() is None
            stats = llm.stats()
            assert (stats["num_submitted"], stats["num_requests_refused"]) == (3, 3)

    asyncio.run(main())


def test_the_facade_follows_a_restart() -> None:
    async def main() -> None:
        settings: dict[str, Any] = {"max_batch_size": 1, "max_waiting_tokens": 5, "step_s": 0.02}
        async with launch_hash_llm(**settings) as llm:
            long = SamplingParams(max_tokens=60, ignore_eos=True)
            asked = [asyncio.create_task(llm.generate(llm.make_request([1] * 40, long)))]
            await asyncio.sleep(0)
            asked.append(asyncio.create_task(llm.generate(llm.make_request([2] * 4, TEN_TOKENS))))
            async with asyncio.timeout(30):
                while not llm.stats()["num_running"]:
                    await asyncio.sleep(0.01)
                os.kill(pid_of(llm), signal.SIGKILL)
                outputs = await asyncio.gather(*asked)
            assert [len(output.token_ids) for output in outputs] == [60, 10]
            await llm.generate(llm.make_request([1] * 40, TEN_TOKENS))

    asyncio.run(main())


def test_a_long_list_of_prompts_is_fed_as_there_is_room() -> None:
    with LLM(max_seq_len=64, max_batch_size=2, max_waiting_tokens=7) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3, 4]] * 9, params)
        assert len(outputs) == 9
        assert llm.stats()["num_requests_refused"] == 0
        long = SamplingParams(max_tokens=30, ignore_eos=True)
        streams = [llm.stream([1] * 5, long) for _ in range(3)]
        for stream in streams[:2]:
            next(stream)
        llm.core.add(llm.make_request([1] * 5, params))  # it waits
        with pytest.raises(OverloadedError):
            next(streams[2])
