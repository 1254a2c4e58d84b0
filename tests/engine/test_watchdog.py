"""The watchdog: a process that stops reporting is replaced; an idle or slow one never is."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from infer import SamplingParams
from infer.engine.client.async_llm import AsyncLLM
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, pid_of
from tests.support.hash_engine import solo

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
HANG_S = 1.8


def run(body: Callable[[AsyncLLM], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with launch_hash_llm(**{"hang_s": HANG_S, **settings}) as llm:
            return await body(llm)

    return asyncio.run(main())


async def all_exact(llm: AsyncLLM, count: int) -> None:
    requests = [llm.make_request([i + 20, 7], GREEDY) for i in range(count)]
    for each, output in zip(
        requests, await asyncio.gather(*map(llm.generate, requests)), strict=True
    ):
        assert list(output.token_ids) == solo(each, VOCAB_SIZE)


def test_a_stopped_process_is_replaced_and_its_streams_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(llm: AsyncLLM) -> None:
        running = asyncio.create_task(all_exact(llm, 10))
        await asyncio.sleep(0.1)
        os.kill(pid_of(llm), signal.SIGSTOP)
        await asyncio.sleep(0.8)
        assert not llm.is_ready
        assert llm.is_alive
        await running
        assert llm.stats()["num_restarts"] == 1

    run(body, step_s=0.01, soft_limit_s=0.5)
    assert "it is killed" in caplog.text
    assert caplog.text.count("the stacks of its threads go to") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("token", "hang_s"),
    [
        (14, HANG_S),
        pytest.param(16, HANG_S, id="in native code"),
        pytest.param(17, 6.0, id="in native code that keeps the lock"),
    ],
)
def test_the_stacks_of_a_hanging_step_are_shown(
    caplog: pytest.LogCaptureFixture, token: int, hang_s: float
) -> None:
    async def body(llm: AsyncLLM) -> None:
        with pytest.raises(Exception, match="died more than once"):
            await llm.generate(llm.make_request([token], GREEDY))

    run(body, factory="tests.support.faulty:pill", soft_limit_s=0.5, hang_s=hang_s)
    assert "faulty.py" not in caplog.text, "a terminal is not filled with stacks"
    [file, *_] = re.findall(r"go to (\S+)", caplog.text)
    assert "faulty.py" in Path(file).read_text(encoding="utf-8")
    Path(file).unlink()


def test_an_idle_engine_that_says_nothing_shows_no_stacks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As while another model is loaded on few cores."""

    async def body(llm: AsyncLLM) -> None:
        await asyncio.sleep(0.2)
        os.kill(pid_of(llm), signal.SIGSTOP)
        await asyncio.sleep(1.2)
        os.kill(pid_of(llm), signal.SIGCONT)
        await all_exact(llm, 1)

    run(body, soft_limit_s=0.5, hang_s=60)
    assert "stacks" not in caplog.text


@pytest.mark.slow
def test_no_false_alarm() -> None:
    """Idle for longer than the limit, then slow steps, then idle again."""

    async def body(llm: AsyncLLM) -> None:
        await asyncio.sleep(1.2 * HANG_S)
        await all_exact(llm, 8)
        await asyncio.sleep(1.2 * HANG_S)
        assert llm.is_ready
        assert llm.stats()["num_restarts"] == 0

    run(body, step_s=0.08, max_batch_size=8)


def test_asking_for_stacks_ends_no_engine() -> None:
    """Whoever signals the whole group asks the engine too, at any moment of its work."""

    async def body(llm: AsyncLLM) -> None:
        pid = pid_of(llm)
        running = asyncio.create_task(all_exact(llm, 8))
        for _ in range(400):
            os.kill(pid, signal.SIGUSR1)
            await asyncio.sleep(0.001)
        await running
        assert pid_of(llm) == pid
        assert llm.stats()["num_restarts"] == 0

    run(body, factory="tests.support.faulty:changing", step_s=0.01, hang_s=60)
