"""What callers share: each resource has a row with the limit of a key that covers it.

The resources are found in the source, by the calls that make pools, semaphores and bounded queues,
so a new one without a row fails.
"""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.server.http.error_responses import HttpError
from infer.server.sessions.database_threads import NUM_THREADS, DatabaseThreads
from infer.types.server_limits import SERVER_LIMITS, ServerLimits

SOURCE = Path(__file__).parents[2] / "src" / "infer"
ROOMS = ("server", "text")
MAKERS = {
    *("Semaphore", "BoundedSemaphore", "ThreadPoolExecutor", "ProcessPoolExecutor"),
    *("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "Condition", "Thread", "Process"),
    *("FairThreads", "FairQueue", "UntrustedWorkers", "DatabaseThreads", "Offload", "BodyBudget"),
    *("create_subprocess_exec", "Popen"),
}
COVERED = {
    "server/comparisons.py:create_subprocess_exec": "none: one at a time for all, none may wait",
    "server/multi_model.py:Offload": "ServerLimits.max_long_bodies_of_key",
    "server/multi_model.py:SimpleQueue": "not of a key: loads, one for each model",
    "server/multi_model.py:Thread": "not of a key: loads, one for each model",
    "server/observe/logs.py:Condition": "not of a key: lines that do not fit are dropped",
    "text/chat_template.py:UntrustedWorkers": "FairQueue; waiting jobs: KeyLimits.max_concurrent",
    "text/grammars/compiler.py:ThreadPoolExecutor": "not of a key: a worker's or engine's thread",
    "text/untrusted/grammar_checker.py:UntrustedWorkers": "FairQueue; KeyLimits.max_concurrent",
    "text/untrusted/pattern_trial.py:UntrustedWorkers": "not of a key: patterns of a checkpoint",
    "text/untrusted/process.py:Popen": "FairQueue: of a place of UntrustedWorkers",
    "text/untrusted/worker.py:Thread": "not of a key: the thread of a worker process",
    "text/untrusted/workers.py:FairQueue": "FairQueue: an owner never has all places",
    "text/untrusted/workers.py:ThreadPoolExecutor": "FairQueue",
    "server/app.py:Offload": "ServerLimits.max_long_bodies_of_key",
    "server/fronts.py:Semaphore": "fronts.MAX_QUESTIONS_OF_KEY",
    "server/http/fair_threads.py:FairQueue": "FairQueue: an owner never has all places",
    "server/http/fair_threads.py:ThreadPoolExecutor": "FairQueue",
    "server/offload.py:BodyBudget": "not of a key: bytes of bodies, before the key's work begins",
    "server/offload.py:FairThreads": "ServerLimits.max_long_bodies_of_key",
    "server/sessions/database_threads.py:FairThreads": "ServerLimits.max_database_calls_of_key",
    "server/sessions/routes.py:DatabaseThreads": "ServerLimits.max_database_calls_of_key",
}


def made() -> Iterator[str]:
    """`file:maker` of each call that makes a shared resource."""
    for room in ROOMS:
        for file in sorted((SOURCE / room).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    called = node.func
                    while isinstance(called, ast.Subscript):
                        called = called.value
                    name = getattr(called, "attr", getattr(called, "id", ""))
                    if name in MAKERS:
                        yield f"{file.relative_to(SOURCE).as_posix()}:{name}"


def test_each_shared_resource_has_a_row() -> None:
    assert set(made()) == set(COVERED)


def test_a_key_that_floods_the_database_leaves_places_and_turns_to_others() -> None:
    """The threads are taken by the flooder but one; others start within one call of its."""
    limits = ServerLimits()
    started: list[str] = []
    free = threading.Event()

    def work(owner: str) -> str:
        started.append(owner)
        if owner == "a":
            assert free.wait(60)
        return owner

    async def use() -> None:
        threads = DatabaseThreads(limits)
        try:
            flood = [asyncio.ensure_future(threads.call("a", work, "a")) for _ in range(200)]
            await asyncio.sleep(0)
            others = [threads.call(key, work, key) for key in ("b", "c") for _ in range(8)]
            async with asyncio.timeout(60):
                assert await asyncio.gather(*others) == ["b"] * 8 + ["c"] * 8
            assert started.count("a") < NUM_THREADS
            free.set()
            answers = await asyncio.gather(*flood, return_exceptions=True)
            refused = [each for each in answers if isinstance(each, HttpError)]
            assert len(answers) - len(refused) == SERVER_LIMITS.max_database_calls_of_key
            assert {each.status for each in refused} == {429}
            kept = (threads.call("a", work, "a", is_begun=True) for _ in range(20))
            assert await asyncio.gather(*kept) == ["a"] * 20  # complete answers are not lost
        finally:
            free.set()
            threads.close()

    asyncio.run(use())


@pytest.mark.parametrize("name", ["long_bodies", "database_calls"])
def test_the_limit_of_a_key_is_less_than_that_of_all(name: str) -> None:
    limits = SERVER_LIMITS
    assert getattr(limits, f"max_{name}_of_key") < getattr(limits, f"max_{name}")
