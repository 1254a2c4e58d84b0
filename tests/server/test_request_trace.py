"""The trace of a request: its events in order, the causes of slow gaps, and bounds on its size."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from typing import Any

import pytest
from rich.console import Console

from infer.cli.explain import write
from infer.schedule.sequence import Plan
from infer.server.observe.request_trace import NUM_GAPS
from infer.types.server_limits import ServerLimits
from tests.support.doubles import held_runner, launch_hash_llm, make_hash_llm
from tests.support.hash_engine import HashRunner
from tests.support.serving import (
    CHAT,
    COMPLETIONS,
    App,
    all_open,
    chat_body,
    completion_body,
    serving,
    with_app,
)

BEGAN_S = int(time.time())

LONG = "a long long way to go " * 12


async def trace_of(app: App, name: str) -> dict[str, Any]:
    return dict((await app.get(f"/v1/requests/{name}")).json())


def kinds(trace: dict[str, Any]) -> list[str]:
    return [event["event"] for event in trace["events"]]


def test_one_after_the_other() -> None:
    runner, arrived, opened = held_runner()

    async def use(app: App) -> None:
        asked = [asyncio.ensure_future(app.post(CHAT, chat_body(max_tokens=30, ignore_eos=True)))]
        for number in (1, 2):
            await all_open(app, number)
            assert await asyncio.to_thread(arrived.wait, 30)
            body = completion_body(prompt=LONG)
            asked.append(asyncio.ensure_future(app.post(COMPLETIONS, body)))
        await all_open(app, 3)
        opened.set()
        replies = [reply.json() for reply in await asyncio.gather(*asked)]
        names = [reply["id"] for reply in replies]
        trace = await trace_of(app, names[2])
        events = trace["events"]
        chunks = [event for event in events if event["event"] == "chunk"]
        assert kinds(trace) == [
            *("received", "queued", "admitted"),
            *["chunk"] * len(chunks),
            *("first_token", "finished"),
        ]
        times = [event["at_ms"] for event in events]
        assert times == sorted(times)
        assert times[0] == 0
        assert trace["total_ms"] == times[-1]
        assert (events[1]["waiting_before"], events[1]["running"]) == (1, 1)
        assert events[1]["behind"] == [names[1]]
        hit = replies[2]["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hit > 100
        assert (
            events[2]["cached_tokens"] == hit == trace["cached_tokens"] == chunks[0]["from_token"]
        )
        assert events[2]["of_tokens"] == trace["prompt_tokens"]
        assert hit + sum(chunk["tokens"] for chunk in chunks) == trace["prompt_tokens"]
        assert len((await trace_of(app, names[1]))["events"]) > len(events)  # it had no cache hit
        assert trace["completion_tokens"] == replies[2]["usage"]["completion_tokens"]
        assert trace["state"] == "finished"
        listed = (await app.get("/v1/requests")).json()["data"]
        assert {entry["id"] for entry in listed} == set(names)

    with_app(make_hash_llm(max_batch_size=1, runner=runner), use)


def test_what_a_request_waits_for_is_named_once() -> None:
    runner, arrived, opened = held_runner()

    async def use(app: App) -> None:
        names = []
        for number, n in ((1, 1), (4, 3), (5, 1)):
            body = completion_body(n=n, stream=True)
            names.append(asyncio.ensure_future(app.post(COMPLETIONS, body)))
            await all_open(app, number)
            assert await asyncio.to_thread(arrived.wait, 30)
        opened.set()
        _, before, last = [reply.events()[0]["id"] for reply in await asyncio.gather(*names)]
        event = (await trace_of(app, last))["events"][1]
        assert (event["waiting_before"], event["behind"]) == (3, [before])

    with_app(make_hash_llm(max_batch_size=1, runner=runner), use)


class SlowPrompts(HashRunner):
    def execute(self, plan: Plan) -> Any:
        self.step_s = 0.15 if any(chunk.num_tokens > 100 for chunk in plan) else 0.002
        return super().execute(plan)


def test_a_slow_gap_names_the_prompt_that_took_the_time() -> None:
    async def use(app: App) -> None:
        asking = asyncio.ensure_future(
            app.post(COMPLETIONS, completion_body(max_tokens=100, ignore_eos=True))
        )
        await asyncio.sleep(0.01)
        culprit = (await app.post(COMPLETIONS, completion_body(prompt=LONG))).json()["id"]
        trace = await trace_of(app, (await asking).json()["id"])
        # On a busy machine another of the five gaps may be the longest.
        [worst] = [
            gap for gap in trace["slowest_gaps"] if culprit in gap["slowest_step"]["prompts_of"]
        ]
        assert worst["gap_ms"] > 150
        assert worst["steps"] == 1
        assert worst["slowest_step"]["prompts_of"] == [culprit]
        assert worst["slowest_step"]["prompt_tokens"] > 200
        assert worst["slowest_step"]["sequences"] == 2
        assert worst["slowest_step"]["step_ms"] > 150
        gaps = [gap["gap_ms"] for gap in trace["slowest_gaps"]]
        assert gaps == sorted(gaps, reverse=True)
        assert len(gaps) == NUM_GAPS

    engine = make_hash_llm(runner=SlowPrompts, max_num_batched_tokens=1000, max_seq_len=1000)
    with_app(engine, use)


class SlowNowAndThen(HashRunner):
    """Is slow in the first steps in which a long sequence is alone, as the other one waits."""

    num_alone = 0

    def execute(self, plan: Plan) -> Any:
        is_alone = len(plan) == 1 and len(plan[0].sequence.tokens) >= 40
        self.num_alone += is_alone
        self.step_s = 0.2 if is_alone and self.num_alone <= 2 else 0.0
        return super().execute(plan)


def test_preemptions_are_shown_and_choices_distinguished() -> None:
    async def use(app: App) -> None:
        body = completion_body(max_tokens=40, ignore_eos=True, n=2, stream=True)
        name = (await app.post(COMPLETIONS, body)).events()[0]["id"]
        trace = await trace_of(app, name)
        lost = [event for event in trace["events"] if event["event"] == "preempted"]
        assert lost
        assert lost[0]["lost_tokens"] > 0
        assert lost[0]["needed_by"] == ["another choice of it"]
        assert lost[0]["choice"] == 1
        assert kinds(trace).count("admitted") == 2 + len(lost)
        again = [event for event in trace["events"] if event["event"] == "chunk"][-1]
        assert again["from_token"] + again["tokens"] > trace["prompt_tokens"]
        # On a busy machine another of the five gaps may be the longest.
        waits = [gap for gap in trace["slowest_gaps"] if gap["steps"] > 2]
        assert max(gap["slowest_step"]["step_ms"] for gap in waits) > 30
        assert kinds(trace).count("first_token") == 2

    with_app(make_hash_llm(num_pages=16, runner=SlowNowAndThen), use)


def test_everything_is_bounded() -> None:
    async def use(app: App) -> None:
        names: list[str] = []
        for _ in range(5):
            body = completion_body(prompt=LONG, max_tokens=20, ignore_eos=True, seed=len(names))
            names.append((await app.post(COMPLETIONS, body)).json()["id"])
        listed = (await app.get("/v1/requests")).json()["data"]
        assert [entry["id"] for entry in listed] == names[:1:-1]
        assert (await app.get(f"/v1/requests/{names[0]}")).status == 404
        trace = await trace_of(app, names[-1])
        assert len(trace["events"]) == 10
        assert kinds(trace)[-1] == "finished"
        assert trace["events_left_out"] > 0

    engine = make_hash_llm(max_num_batched_tokens=8, enable_prefix_caching=False)
    with_app(engine, use, limits=ServerLimits(max_traces_of_owner=3, max_trace_events=10))


def test_a_process_reports_the_same() -> None:
    """Events cross the process boundary, and times of both sides are on one clock."""

    async def use() -> None:
        async with serving(launch_hash_llm()) as app:
            reply = await app.post(COMPLETIONS, completion_body(prompt=LONG))
            trace = await trace_of(app, reply.json()["id"])
            assert kinds(trace)[:4] == ["received", "queued", "admitted", "chunk"]
            assert kinds(trace)[-2:] == ["first_token", "finished"]
            times = [event["at_ms"] for event in trace["events"]]
            assert times == sorted(times)
            assert 0 < trace["admitted_ms"] < trace["first_token_ms"] < trace["total_ms"] < 30_000

    asyncio.run(use())


def test_a_static_batch_is_in_the_traces_of_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "infer.access")

    async def use(app: App) -> None:
        bodies = [
            completion_body(prompt="x" * size, max_tokens=5, ignore_eos=True) for size in (5, 30, 9)
        ]
        replies = await asyncio.gather(*(app.post(COMPLETIONS, body) for body in bodies))
        await app.idle()
        first, second, third = [await trace_of(app, reply.json()["id"]) for reply in replies]
        [batch], [alone] = first["batches"], third["batches"]
        prompts = [trace["prompt_tokens"] for trace in (first, second)]
        assert second["batches"][0] == {
            **batch,
            "created": pytest.approx(batch["created"], abs=0.01),
            "created_ms": second["batches"][0]["created_ms"],
        }
        assert (batch["requests"], alone["requests"]) == (2, 1)
        assert batch["prompt_tokens"] == sum(prompts)
        assert batch["prompt_padding_tokens"] == max(prompts) - min(prompts) == 25
        assert batch["tokens"] == sum(prompts) + 10
        assert batch["padding_tokens"] == 25
        assert batch["wait_ms"] > 0
        assert BEGAN_S <= batch["created"] <= time.time()
        admitted = next(event for event in first["events"] if event["event"] == "admitted")
        assert admitted["batch_id"] == batch["batch_id"] != alone["batch_id"]
        assert batch["created_ms"] == pytest.approx(admitted["at_ms"], abs=20)
        assert first["batch_ids"] == [batch["batch_id"]]
        listed = {entry["id"]: entry for entry in (await app.get("/v1/requests")).json()["data"]}
        assert listed[third["id"]]["batch_ids"] == [alone["batch_id"]]

        def fields_of(message: str) -> list[dict[str, Any]]:
            records = [record for record in caplog.records if record.getMessage() == message]
            return [vars(record)["fields"] for record in records]

        lines = [fields for fields in fields_of("request") if "outcome" in fields]
        assert {ids for line in lines for ids in line["batch_ids"]} == {
            batch["batch_id"],
            alone["batch_id"],
        }
        logged = fields_of("batch")
        assert [line["batch_id"] for line in logged] == [batch["batch_id"], alone["batch_id"]]
        assert {line["model"] for line in logged} == {"hash-model"}
        assert logged[0]["requests"] == 2
        page = Console(file=io.StringIO(), width=200)
        write(first, page)
        assert isinstance(page.file, io.StringIO)
        assert f"{batch['batch_id']}: 2 requests" in page.file.getvalue()

    with_app(make_hash_llm(batching_mode="static", max_batch_size=2), use)


def test_the_other_modes_have_no_batch_in_a_trace() -> None:
    async def use(app: App) -> None:
        reply = await app.post(COMPLETIONS, completion_body())
        trace = await trace_of(app, reply.json()["id"])
        assert not [name for name in trace if "batch" in name]
        assert not [name for event in trace["events"] for name in event if "batch" in name]

    with_app(make_hash_llm(), use)
