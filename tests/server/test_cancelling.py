"""A request that is cancelled, left or timed out gives its pages back within one step.

The test controls the engine's steps. It ends the request while a step is computed, waits until the
engine has got the abort, and lets that step finish. In the next step the request must be gone.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.schedule.sequence import Plan, Sequence, Status
from tests.support.cases import slow_but
from tests.support.doubles import core_of, make_hash_llm
from tests.support.hash_engine import HashRunner
from tests.support.serving import COMPLETIONS, App, Reply, completion_body, with_app

WORDS = "once upon a time there was a fox"


class StepGate:
    """Holds the steps of a runner until the test lets one begin."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self.open = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)

    def runner(self) -> type[HashRunner]:
        gate = self

        class Gated(HashRunner):
            def execute(self, plan: Plan) -> Any:
                gate.arrived.release()
                assert gate.open.acquire(timeout=20)
                gate.steps.append([chunk.sequence.request_id for chunk in plan])
                return super().execute(plan)

        return Gated

    async def step(self) -> None:
        """Finish the waiting step, and wait until the next one begins."""
        self.open.release()
        assert await asyncio.to_thread(self.arrived.acquire, timeout=10)


def sequences(engine: AsyncLLM) -> dict[str, Sequence]:
    return dict(core_of(engine).scheduler.by_id)


def waits_for_commands(engine: AsyncLLM) -> bool:
    """Whether the engine still has to hear of a request that has come or gone."""
    return set(engine.snapshot()) != set(sequences(engine))


async def told(engine: AsyncLLM) -> None:
    async with asyncio.timeout(10):
        while not waits_for_commands(engine):
            await asyncio.sleep(0.002)


FORMS: dict[str, tuple[dict[str, Any], Callable[[Sequence], bool]]] = {
    "queued": ({"max_batch_size": 1}, lambda s: s.status is Status.WAITING),
    "mid-prefill": (
        {"max_num_batched_tokens": 8},
        lambda s: 0 < s.num_computed < s.num_prompt,
    ),
    "decoding": ({}, lambda s: s.num_output >= 3),
    "preempted": ({"num_pages": 26}, lambda s: s.status is Status.PREEMPTED),
}
ENDS = {"cancel": (499, "request_cancelled"), "delete": (499, "request_cancelled")}
ENDS |= {"timeout": (504, "deadline_exceeded"), "leave": (0, "")}


@pytest.mark.parametrize("stream", slow_but([True], [False, True]))
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("state", FORMS)
def test_pages_are_free_within_one_step(state: str, end: str, stream: bool) -> None:
    settings, reached = FORMS[state]
    gate = StepGate()
    engine = make_hash_llm(runner=gate.runner(), max_waiting_requests=9, **settings)

    async def use(app: App) -> None:
        body = completion_body(max_tokens=60, ignore_eos=True, stream=stream)
        neighbour = asyncio.ensure_future(app.post(COMPLETIONS, {**body, "max_tokens": 38}))
        assert await asyncio.to_thread(gate.arrived.acquire, timeout=10)
        await gate.step()
        leave = asyncio.Event()
        limit = {"timeout": 0.5} if end == "timeout" else {}
        asking = asyncio.ensure_future(
            app.post(COMPLETIONS, {**body, "prompt": WORDS, **limit}, leave=leave)
        )
        await told(engine)
        (name,) = set(engine.snapshot()) - set(sequences(engine))
        await gate.step()
        while not reached(sequences(engine)[name]):
            await gate.step()
        assert not waits_for_commands(engine)
        num_before = len(gate.steps)
        answer_id = name.removesuffix("-0")
        if end == "leave":
            leave.set()
        elif end != "timeout":
            method, tail = ("POST", "/cancel") if end == "cancel" else ("DELETE", "")
            reply = await app.send(method, f"/v1/requests/{answer_id}{tail}")
            assert reply.json()["cancelled"] is True
        await told(engine)
        await gate.step()
        assert name not in sequences(engine)
        core_of(engine).scheduler.check()
        ended = await asyncio.wait_for(asking, 10)
        while sequences(engine):
            gate.open.release()
            await asyncio.sleep(0.001)
        assert (await neighbour).status == 200
        assert all(name not in step for step in gate.steps[num_before + 1 :])
        check_end(ended, *ENDS[end])
        trace = (await app.get(f"/v1/requests/{answer_id}")).json()
        assert trace["outcome"] == (ENDS[end][1] or "disconnected")
        again = await app.send("DELETE", f"/v1/requests/{answer_id}")
        assert (again.status, again.json()["cancelled"]) == (200, False)

    with_app(engine, use)


def check_end(reply: Reply, status: int, code: str) -> None:
    if not code:
        assert b"[DONE]" not in reply.body
        return
    if reply.status == 200:  # the stream had begun
        assert b"[DONE]" not in reply.body
        error = json.loads(reply.writes[-1].decode().removeprefix("data: "))["error"]
    else:
        assert reply.status == status
        error = reply.error()
    assert error["code"] == code


def test_only_whole_ids_are_found() -> None:
    async def use(app: App) -> None:
        reply = await app.post(COMPLETIONS, completion_body(), headers={"x-request-id": "mine"})
        name = reply.json()["id"]
        assert reply.headers["x-request-id"] == "mine"
        assert (await app.get(f"/v1/requests/{name}")).json()["client_request_id"] == "mine"
        bare = name.removeprefix("cmpl-")
        assert (await app.get(f"/v1/requests/{bare}")).status == 200
        for wrong in ("min", name[:-1], f"chatcmpl-{bare}", f"x{bare}", f"{name}-0", "-", "cmpl-"):
            for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
                reply = await app.send(method, f"/v1/requests/{wrong}{tail}")
                assert (reply.status, reply.error()["code"]) == (404, "request_not_found"), wrong

    with_app(make_hash_llm(), use)
