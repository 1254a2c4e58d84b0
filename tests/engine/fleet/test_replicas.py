"""Several engine processes behind one façade: kills, stops and restarts under running streams."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from infer import SamplingParams
from infer.engine.client.async_llm import AsyncLLM
from infer.replicas.launch import FleetSettings
from infer.replicas.replica import Replica
from infer.types import Request, TokenLogprobs
from tests.support.cases import timed
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, process_id, replicas_of
from tests.support.hash_engine import fake_logprobs, solo
from tests.support.server_process import Findings
from tests.support.waits import until_async

SAMPLING = SamplingParams(temperature=0.8, max_tokens=150, ignore_eos=True, logprobs=2)


def run(body: Callable[[AsyncLLM], Awaitable[Any]], replicas: int = 2, **settings: Any) -> Any:
    fleet = FleetSettings(replicas=replicas, link_timeout_s=2.5, routing="least")

    async def main() -> Any:
        async with launch_hash_llm(fleet=fleet, **{"step_s": 0.005, **settings}) as llm:
            return await body(llm)

    return asyncio.run(main())


def send(replica: Replica, number: int) -> None:
    pid = process_id(replica)
    assert pid is not None
    os.kill(pid, number)


class Streams:
    """Requests that run, and the longest pause of each."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self._llm = llm
        self.requests = [
            llm.make_request([i + 20, 7], SAMPLING.replace(seed=i)) for i in range(count)
        ]
        self.tasks = [asyncio.create_task(self._follow(each)) for each in self.requests]

    async def _follow(self, request: Request) -> float:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        pause_s, last_s = 0.0, None
        async with self._llm.stream(request, merge=False) as pieces:
            async for piece in pieces:
                assert piece.error is None
                token_ids += piece.token_ids
                logprobs += piece.logprobs
                now_s = time.monotonic()
                pause_s = max(pause_s, 0.0 if last_s is None else now_s - last_s)
                last_s = now_s
        assert token_ids == solo(request, VOCAB_SIZE)
        assert logprobs == [fake_logprobs(request, token, VOCAB_SIZE) for token in token_ids]
        return pause_s

    async def longest_pause_s(self) -> float:
        return max(await asyncio.gather(*self.tasks))


@timed(2)
def test_a_killed_engine_loses_nothing_and_the_other_goes_on_at_once(
    caplog: pytest.LogCaptureFixture, most_s: float
) -> None:
    async def body(llm: AsyncLLM) -> None:
        streams = Streams(llm, 16)
        first, second = replicas_of(llm)
        both = (first, second)
        await until_async(lambda: all(p.stats().counters.num_sampled_tokens > 200 for p in both))
        send(first, signal.SIGKILL)
        assert await streams.longest_pause_s() < most_s
        stats = llm.stats()
        assert (stats["num_restarts"], stats["num_moved"]) == (1, 8)
        assert stats["num_moved_unequal"] == 0
        assert second.stats().counters.num_restarts == 0
        await until_async(lambda: first.is_ready)
        await Streams(llm, 4).longest_pause_s()
        assert first.stats().counters.num_sampled_tokens > 200, "it has requests again"
        assert llm.stats()["num_pages"] == 2 * 399

    with caplog.at_level(logging.INFO, "infer"):
        run(body)
    assert "replica-1: the engine process has died (SIGKILL) with 8 requests" in caplog.text


@timed(2.5 + 2)
def test_a_stopped_engine_is_left_and_takes_part_again_when_it_wakes(most_s: float) -> None:
    async def body(llm: AsyncLLM) -> None:
        streams = Streams(llm, 8)
        first, _ = replicas_of(llm)
        pid = process_id(first)
        await until_async(lambda: first.stats().counters.num_sampled_tokens > 100)
        send(first, signal.SIGSTOP)
        assert 2 < await streams.longest_pause_s() < most_s
        before = llm.stats()
        assert before["num_moved"] == 4
        send(first, signal.SIGCONT)
        await until_async(lambda: first.is_ready and first.stats().gauges.num_running == 0)
        await Streams(llm, 8).longest_pause_s()
        assert first.stats().counters.num_submitted == 4 + 4
        stats = llm.stats()
        assert (process_id(first), stats["num_restarts"], stats["num_moved"]) == (pid, 0, 4)

    run(body)


@pytest.mark.slow
def test_a_long_step_is_not_silence() -> None:
    async def body(llm: AsyncLLM) -> None:
        sampling = SAMPLING.replace(max_tokens=1)
        requests = [llm.make_request([i], sampling.replace(seed=i)) for i in range(2)]
        outputs = await asyncio.gather(*map(llm.generate, requests))
        for request, output in zip(requests, outputs, strict=True):
            assert list(output.token_ids) == solo(request, VOCAB_SIZE)
        assert (llm.stats()["num_moved"], llm.stats()["num_restarts"]) == (0, 0)

    run(body, step_s=3.5)


def test_poison_takes_two_of_three() -> None:
    async def body(llm: AsyncLLM) -> None:
        streams = Streams(llm, 9)
        with pytest.raises(Exception, match="died more than once"):
            await llm.generate(llm.make_request([13], SAMPLING))
        await streams.longest_pause_s()
        assert llm.stats()["num_restarts"] == 2

    run(body, replicas=3, factory="tests.support.faulty:pill")


@pytest.mark.slow
def test_a_hundred_rounds_of_three() -> None:
    """A hundred kills at random moments, with a stop now and then: nothing is lost or changed."""

    async def body(llm: AsyncLLM) -> None:
        dice = random.Random(25)
        pauses_s: list[float] = []
        stopped_s: list[float] = []
        for number in range(100):
            streams = Streams(llm, 100)
            await asyncio.sleep(dice.uniform(0, 1))
            victim = dice.choice(replicas_of(llm))
            await until_async(lambda victim=victim: process_id(victim) is not None)  # type: ignore[misc]
            send(victim, signal.SIGSTOP if number % 20 == 19 else signal.SIGKILL)
            pause_s = await streams.longest_pause_s()
            if number % 20 == 19:
                send(victim, signal.SIGCONT)
                stopped_s.append(pause_s)
            else:
                pauses_s.append(pause_s)
        stats = llm.stats()
        Findings().note(
            27,
            "a replica is lost",
            "3 replicas, 100 streams in each of 100 rounds, hash model",
            **{
                "requests, all with the tokens and log-probabilities that they have alone": (
                    stats["num_requests_finished"]
                ),
                "replicas killed / stopped": (len(pauses_s), len(stopped_s)),
                "pause after a kill, median / longest [s]": _median_and_longest(pauses_s),
                "pause after a stop, median / longest [s]": _median_and_longest(stopped_s),
            },
        )
        assert stats["num_requests_finished"] == stats["num_requests_admitted"] == 100 * 100
        assert stats["num_restarts"] == 95
        assert statistics.median(pauses_s) < 2
        assert max(stopped_s) < 2.5 + 2

    run(body, replicas=3, max_batch_size=40, num_pages=4000, step_s=0.002)


def _median_and_longest(times_s: list[float]) -> tuple[float, float]:
    return round(statistics.median(times_s), 2), round(max(times_s), 2)
