"""The process that becomes the next engine: taken, replaced, killed, stopped, absent, hanging."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from infer import SamplingParams
from infer.engine.build.server_memory import STANDBY_ABOVE
from infer.engine.client.async_llm import AsyncLLM
from infer.replicas.child import STANDBY_NAME
from infer.replicas.standby import ENDS_BELOW, Standby
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, pid_of, process_id, replica_of
from tests.support.hash_engine import solo
from tests.support.server_process import cpu_s, engines_below
from tests.support.waits import until, until_async

ROOT = Path(__file__).parents[2]
FACTORY = "tests.support.hash_engine:hash_blueprint"
IMPORTS_S = 120.0
"""A standby imports at a low priority."""
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture
def standby() -> Iterator[Standby]:
    made = Standby(FACTORY, watch_s=0.02, retry_s=0.1)
    yield made
    made.stop()
    assert not engines_below(os.getpid()), "a process is left"


def read(path: Path | str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def is_prepared(pid: int | None) -> bool:
    return pid is not None and read(f"/proc/{pid}/comm").strip() == STANDBY_NAME


async def prepared(standby: Standby) -> int:
    """The id of the standby once it has imported everything."""
    await until_async(lambda: is_prepared(standby.pid), IMPORTS_S)
    assert standby.pid is not None
    return standby.pid


async def survives(llm: AsyncLLM, disturb: Callable[[], object]) -> None:
    """Eight streams, disturbed after some tokens, have the tokens that each has alone."""
    requests = [llm.make_request([i + 1, 7], GREEDY.replace(seed=i)) for i in range(8)]
    tasks = [asyncio.create_task(llm.generate(request)) for request in requests]
    before = llm.stats()["num_sampled_tokens"]
    await until_async(lambda: llm.stats()["num_sampled_tokens"] > before + 40, IMPORTS_S)
    disturb()
    for request, output in zip(requests, await asyncio.gather(*tasks), strict=True):
        assert list(output.token_ids) == solo(request, VOCAB_SIZE)


def run(
    standby: Standby, body: Callable[[AsyncLLM], Awaitable[None]], answer_s: float = 5.0
) -> None:
    async def main() -> None:
        async with launch_hash_llm(standby=standby, standby_answer_s=answer_s, step_s=0.002) as llm:
            await body(llm)

    asyncio.run(main())


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_the_standby_becomes_the_next_engine_and_is_replaced(standby: Standby) -> None:
    async def body(llm: AsyncLLM) -> None:
        for _ in range(2):
            pid = await prepared(standby)
            await survives(llm, lambda: kill(pid_of(llm)))
            assert pid_of(llm) == pid
            assert read(f"/proc/{pid}/comm").strip() == "infer-engine"
            assert read(f"/proc/{pid}/oom_score_adj").strip() == "500"
        assert llm.stats()["num_restarts"] == 2
        pid = await prepared(standby)
        await until_async(lambda: read(f"/proc/{pid}/oom_score_adj").strip() == "1000", IMPORTS_S)
        before_s = cpu_s(pid)
        await asyncio.sleep(0.2)
        assert cpu_s(pid) < before_s + 0.015, "it is idle"

    run(standby, body)


def test_its_death_is_not_noticed(standby: Standby) -> None:
    async def body(llm: AsyncLLM) -> None:
        pid, engine = await prepared(standby), pid_of(llm)
        await survives(llm, lambda: kill(pid))
        assert await prepared(standby) != pid
        assert (pid_of(llm), llm.stats()["num_restarts"]) == (engine, 0)

    run(standby, body)


def test_both_are_killed_at_once(standby: Standby) -> None:
    async def body(llm: AsyncLLM) -> None:
        pid = await prepared(standby)
        await survives(llm, lambda: kill(pid, pid_of(llm)))
        assert pid_of(llm) != pid
        assert llm.stats()["num_restarts"] == 1

    run(standby, body)


def test_one_that_is_stopped_goes_on(standby: Standby) -> None:
    async def body(llm: AsyncLLM) -> None:
        pid = await prepared(standby)
        os.kill(pid, signal.SIGSTOP)
        await survives(llm, lambda: kill(pid_of(llm)))
        assert pid_of(llm) == pid

    run(standby, body)


def test_one_that_does_not_answer_is_passed_over() -> None:
    hanging = Standby("tests.support.hanging_standby:x")

    async def body(llm: AsyncLLM) -> None:
        pid = await prepared(hanging)
        await survives(llm, lambda: kill(pid_of(llm)))
        assert pid_of(llm) != pid
        assert not read(f"/proc/{pid}/cmdline")

    run(hanging, body, answer_s=0.3)
    hanging.stop()
    assert not engines_below(os.getpid())


def test_one_that_still_imports_is_not_waited_for() -> None:
    importing = Standby("tests.support.endless_import:x")

    async def body(llm: AsyncLLM) -> None:
        await until_async(lambda: importing.pid is not None, IMPORTS_S)
        pid = importing.pid
        await survives(llm, lambda: kill(pid_of(llm)))
        assert pid_of(llm) != pid
        assert importing.pid == pid, "it goes on"

    run(importing, body, answer_s=3600.0)
    importing.stop()
    assert not engines_below(os.getpid())


def test_a_module_that_cannot_be_imported_changes_nothing() -> None:
    broken = Standby("tests.support.no_such_module:x")

    async def body(llm: AsyncLLM) -> None:
        pid = await prepared(broken)
        await survives(llm, lambda: kill(pid_of(llm)))
        assert pid_of(llm) == pid

    run(broken, body)
    broken.stop()
    assert not engines_below(os.getpid())


def test_memory_decides_whether_there_is_one() -> None:
    available = [STANDBY_ABOVE - 1]
    standby = Standby(FACTORY, available=lambda: available[0], watch_s=0.02, retry_s=0.0)

    async def body(llm: AsyncLLM) -> None:
        await asyncio.sleep(0.1)
        assert standby.pid is None
        available[0] = STANDBY_ABOVE
        pid = await prepared(standby)
        available[0] = ENDS_BELOW
        await asyncio.sleep(0.1)
        assert standby.pid == pid
        available[0] = ENDS_BELOW - 1
        await until_async(
            lambda: standby.pid is None and not read(f"/proc/{pid}/cmdline"), IMPORTS_S
        )
        await survives(llm, lambda: kill(pid_of(llm)))

    run(standby, body)
    standby.stop()
    assert not engines_below(os.getpid())


def test_none_before_the_first_engine_is_ready(standby: Standby) -> None:
    assert standby.pid is None
    llm = launch_hash_llm(standby=standby)
    assert standby.pid is None
    llm.engine_client.stop()


def test_several_engines_share_one_and_outlive_each_other(standby: Standby) -> None:
    async def main() -> None:
        async with launch_hash_llm(standby=standby, step_s=0.002) as other:
            llm = launch_hash_llm(standby=standby, step_s=0.002)
            await llm.start()
            pid = await prepared(standby)
            kill(pid_of(other))
            await until_async(lambda: process_id(replica_of(other)) == pid, IMPORTS_S)
            await llm.close()
            await survives(other, lambda: None)
            assert pid_of(other) == pid
            assert other.stats()["num_restarts"] == 1

    asyncio.run(main())


PARENT = textwrap.dedent(
    """
    import asyncio, time
    from infer.replicas.standby import Standby
    from tests.support.doubles import launch_hash_llm
    standby = Standby("tests.support.hash_engine:hash_blueprint")
    llm = launch_hash_llm(standby=standby)
    async def main():
        await llm.start()
        while standby.pid is None:
            time.sleep(0.01)
        print(standby.pid, flush=True)
        time.sleep(60)
    asyncio.run(main())
    """
)


def test_it_dies_with_its_parent() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    arguments = [sys.executable, "-c", PARENT]
    with subprocess.Popen(
        arguments, env=env, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        until(lambda: is_prepared(pid), IMPORTS_S)
        process.kill()
    ends_s = time.monotonic() + 5
    while read(f"/proc/{pid}/cmdline"):
        assert time.monotonic() < ends_s, "an orphan"
        time.sleep(0.01)
