"""The next engine continues a dead one's requests with the same tokens; one that kills engines
fails."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from infer import LLM, SamplingParams
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import EngineDeadError, EngineError
from infer.replicas.blame import MAX_FROM_OUTSIDE
from infer.replicas.journal import RequestJournal
from infer.types import FinishReason, Request, RequestOutput, StepOutput
from tests.support.cases import slow_but
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.doubles import launch_hash_llm, pid_of
from tests.support.hash_engine import make_hash_core, solo
from tests.support.waits import until_async

GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPTS = ["Once upon a time", "One day, a little bird", "7 + 5 ="]
SAMPLING = [
    GREEDY,
    SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=60, logprobs=2),
    SamplingParams(
        temperature=0.7,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={5: 2.0},
        min_tokens=30,
        seed=4,
        max_tokens=60,
    ),
    SamplingParams(temperature=0, stop_token_ids=[17, 18, 19], min_tokens=20, max_tokens=60),
]


def rest_of(llm: LLM, request: Request) -> list[StepOutput]:
    llm.core.add(request)
    return llm.core.outputs_until_complete()


@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float32", "bfloat16"]))
def test_a_request_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(dtype: str) -> None:
    """In a new engine, with every kind of sampling; log-probabilities and the end are the same."""
    with LLM(dtype=dtype, max_seq_len=256) as llm:
        for i, sampling in enumerate(SAMPLING):
            request = llm.make_request(PROMPTS[i % len(PROMPTS)], sampling)
            whole = rest_of(llm, request)
            ids = tuple(output.token_id for output in whole if output.token_id is not None)
            assert len(ids) > 20
            for cut in (1, 7, len(ids) // 2, len(ids) - 1):
                resumed = dataclasses.replace(request, output_token_ids=ids[:cut], num_crashes=1)
                after = rest_of(llm, resumed)
                assert [o.token_id for o in after] == list(ids[cut:])
                assert after[-1].finish_reason is whole[-1].finish_reason
                assert [o.logprobs for o in after] == [o.logprobs for o in whole[cut:]]
                assert after[-1].num_cached <= len(request.prompt_token_ids)


# ---- the journal


def request(name: str, **changes: Any) -> Request:
    return Request(name, (1, 2, 3), GREEDY, seed=0, max_tokens=10, **changes)


def token(name: str, token_id: int, reason: FinishReason | None = None) -> StepOutput:
    return StepOutput(name, token_id, reason)


def test_the_journal_knows_what_goes_on_and_where() -> None:
    journal = RequestJournal()
    for name in "abcd":
        journal.add(request(name))
    outputs = [token("a", 5), token("x", 9), token("b", 6, FinishReason.EOS), token("c", 7)]
    assert [output.request_id for output in journal.record(outputs)] == ["a", "b", "c"]
    journal.drop("c")
    journal.drop("unknown")
    assert journal.crashed(None, from_outside=False) == []
    assert list(journal.unassigned()) == [
        request("a", output_token_ids=(5,), num_crashes=1),
        request("d", num_crashes=1),
    ]
    journal.add(request("e"))
    assert list(journal.unassigned())[-1] == request("e")


def test_who_was_alone_in_a_crash_is_not_tried_again() -> None:
    journal = RequestJournal()
    for name in "ab":
        journal.add(request(name))
    assert not journal.crashed("gone", from_outside=False)
    (end,) = journal.crashed("b", from_outside=False)
    assert (end.request_id, end.finish_reason) == ("b", FinishReason.ERROR)
    assert end.error is not None
    assert "died more than once" in end.error.message
    assert [each.request_id for each in journal.unassigned()] == ["a"]


def test_kills_from_outside_must_hit_the_same_request_again_and_again() -> None:
    journal = RequestJournal()
    journal.add(request("a"))
    for _ in range(MAX_FROM_OUTSIDE - 1):
        assert not journal.crashed("a", from_outside=True)
    journal.record([token("a", 5)])  # it got a token since, so it was not the cause
    for _ in range(MAX_FROM_OUTSIDE - 1):
        assert not journal.crashed("a", from_outside=True)
    assert len(journal.crashed("a", from_outside=True)) == 1


# ---- the core: after a crash each request begins alone


def test_suspects_begin_in_steps_of_their_own_and_then_join() -> None:
    announced: list[str | None] = []
    core = make_hash_core(max_num_batched_tokens=8, announce=announced.append)
    plans: list[set[str]] = []
    execute = core.runner.execute

    def watched(plan: Any) -> Any:
        plans.append({chunk.sequence.request_id for chunk in plan})
        return execute(plan)

    core.runner.execute = watched  # type: ignore[method-assign]
    long = dataclasses.replace(request("long", num_crashes=2), prompt_token_ids=tuple(range(20)))
    requests = [request("a", num_crashes=1), request("new"), long, request("new too")]
    for each in requests:
        core.add(each)
    outputs = core.outputs_until_complete()
    for each in requests:
        got = [o.token_id for o in outputs if o.request_id == each.request_id]
        assert got == solo(each, VOCAB_SIZE)
    assert plans[:2] == [{"a"}, {"new", "long"}] or plans[0] == {"a"}
    for name in ("a", "long"):
        mine = [plan for plan in plans if name in plan]
        alone = [plan for plan in mine if len(plan) == 1]
        assert mine[: len(alone)] == alone
        assert len(mine) > len(alone) >= 1
    assert sum(plan == {"long"} for plan in plans) > 2, "its prompt was not cut in chunks"
    assert set(announced) == {"a", "long", None}


# ---- processes


def run(body: Callable[[AsyncLLM], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with launch_hash_llm(**settings) as llm:
            return await body(llm)

    return asyncio.run(main())


def kill(llm: AsyncLLM) -> None:
    os.kill(pid_of(llm), signal.SIGKILL)


def check(requests: list[Request], outputs: list[RequestOutput]) -> None:
    for each, output in zip(requests, outputs, strict=True):
        assert list(output.token_ids) == solo(each, VOCAB_SIZE)


@pytest.mark.slow
def test_streams_go_on_over_many_deaths_and_newcomers_wait() -> None:
    async def body(llm: AsyncLLM) -> None:
        drawn = GREEDY.replace(temperature=0.7, max_tokens=200, seed=1)
        requests = [llm.make_request([i + 20, 7], drawn) for i in range(20)]
        tasks = [asyncio.create_task(llm.generate(each)) for each in requests]
        dice = random.Random(0)
        for i in range(3):
            await until_async(lambda: llm.is_ready)
            await asyncio.sleep(dice.uniform(0.05, 0.15))
            kill(llm)
            await until_async(lambda i=i: llm.stats()["num_restarts"] == i + 1)  # type: ignore[misc]
            assert not llm.is_ready
            assert llm.is_alive
            requests.append(llm.make_request([90 + i], drawn))
            tasks.append(asyncio.create_task(llm.generate(requests[-1])))
        check(requests, await asyncio.gather(*tasks))
        assert llm.stats()["num_restarts"] == 3
        stats = llm.stats()
        assert (stats["num_open"], stats["num_running"]) == (0, 0)
        assert stats["num_sampled_tokens"] >= 20 * 200  # those of dead engines included
        assert stats["num_requests_admitted"] == stats["num_requests_finished"] == 23

    run(body, step_s=0.004)


@pytest.mark.parametrize(
    ("token_id", "num_restarts", "settings"),
    [
        (13, 2, {}),
        pytest.param(14, 2, {"hang_s": 1.5}, marks=pytest.mark.slow),
        pytest.param(15, 1 + MAX_FROM_OUTSIDE, {}, marks=pytest.mark.slow),
    ],
)
def test_a_poison_pill_is_found_and_the_others_are_exact(
    caplog: pytest.LogCaptureFixture, token_id: int, num_restarts: int, settings: dict[str, Any]
) -> None:
    async def body(llm: AsyncLLM) -> None:
        requests = [llm.make_request([i + 20, 7], GREEDY) for i in range(12)]
        tasks = [asyncio.create_task(llm.generate(each)) for each in requests]
        with pytest.raises(EngineError, match="died more than once"):
            await llm.generate(llm.make_request([token_id], GREEDY))
        check(requests, await asyncio.gather(*tasks))
        assert llm.stats()["num_restarts"] == num_restarts

    run(body, factory="tests.support.faulty:pill", step_s=0.002, **settings)
    assert "is to blame and is given up" in caplog.text
    assert ("has not reported" in caplog.text) == (token_id == 14)


@pytest.mark.slow
def test_three_pills_at_once() -> None:
    async def body(llm: AsyncLLM) -> None:
        requests = [llm.make_request([i + 20, 7], GREEDY) for i in range(8)]
        pills = [llm.make_request([13, i], GREEDY) for i in range(3)]
        outputs = await asyncio.gather(
            *[llm.generate(each) for each in (*pills, *requests)], return_exceptions=True
        )
        assert all(isinstance(output, EngineError) for output in outputs[:3])
        check(requests, outputs[3:])  # type: ignore[arg-type]
        assert llm.stats()["num_restarts"] == 4

    run(body, factory="tests.support.faulty:pill", step_s=0.002)


def test_an_engine_that_does_not_start_again_and_later_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "there"
    path.touch()

    async def body(llm: AsyncLLM) -> None:
        task = asyncio.create_task(
            llm.generate(llm.make_request("abc", GREEDY.replace(max_tokens=400)))
        )
        await until_async(lambda: llm.stats()["num_running"] == 1)
        path.unlink()
        kill(llm)
        with pytest.raises(EngineDeadError, match="does not start again"):
            await task
        assert not llm.is_alive
        with pytest.raises(EngineDeadError):
            await llm.generate(llm.make_request("abc", GREEDY))
        path.touch()
        await until_async(lambda: llm.is_ready)
        again = llm.make_request("abc", GREEDY)
        check([again], [await llm.generate(again)])

    with caplog.at_level(logging.ERROR):
        settings = {"while_there": str(path), "step_s": 0.01, "max_pause_s": 0.1}
        run(body, factory="tests.support.faulty:starts", **settings)
    assert "the checkpoint has gone" in caplog.text
    assert "requests are refused" in caplog.text


def test_closing_while_the_next_one_starts(tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.touch()

    async def body(llm: AsyncLLM) -> None:
        kill(llm)
        await until_async(lambda: not llm.is_ready)
        async with asyncio.timeout(60):
            await llm.close()

    run(body, factory="tests.support.faulty:starts", while_there=str(path))
