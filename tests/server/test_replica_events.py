"""What the server says of several engines: its stream of steps, numbers, metrics and traces."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from typing import Any

from rich.console import Console

from infer.cli.engine_state import EngineState
from infer.cli.explain import write
from infer.engine.client.step_frames import MAX_STEPS, FrameBuilder, FrameWriter, StepRow
from infer.replicas.launch import FleetSettings
from infer.requests.state import FoldedStep
from infer.server.http.context import RequestContext
from infer.server.observe.request_trace import MAX_REPLICAS, RequestTrace
from infer.types.step_events import StepEvents
from tests.support.doubles import launch_hash_llm, process_id, replicas_of
from tests.support.engine_watcher import Watcher, entries_of, watching
from tests.support.serving import COMPLETIONS, App, completion_body, serving
from tests.support.waits import until_async

NAMES = ["replica-1", "replica-2"]


def test_steps_of_two_engines_are_never_one_row() -> None:
    builder = FrameBuilder(lambda name: None)
    numbers = dict.fromkeys(NAMES, 0)
    for index in range(5 * MAX_STEPS):
        name = NAMES[index % 3 > 0]  # one of them is twice as fast
        numbers[name] += 1
        number = numbers[name]
        step = StepEvents(number, index, index + 1.5, 1, (), number, 7, replica=name)
        builder.stepped(FoldedStep(step, step.ended_s))
    [frame] = builder.take()
    assert len(frame.rows) <= MAX_STEPS
    assert frame.num_steps == 5 * MAX_STEPS
    for name in NAMES:
        rows = [row for row in frame.rows if row.replica == name]
        assert sum(row.num_steps for row in rows) == rows[-1].number == numbers[name]
        # The number is that of the last step of the row, and the pages are those after it.
        so_far = list(itertools.accumulate(row.num_steps for row in rows))
        assert so_far == [row.number for row in rows] == [row.num_free_pages for row in rows]
    steps = FrameWriter(0.0, lambda facts: True).fields(frame, 0.0)["steps"]
    told = list(zip(steps["replica"], steps["number"], strict=True))
    assert told == [(row.replica, row.number) for row in frame.rows]


def test_rows_of_one_engine_are_merged_as_neighbours() -> None:
    builder = FrameBuilder(lambda name: None)
    for number in range(1, MAX_STEPS + 2):
        step = StepEvents(number, number, number + 1, 2, (), 9, 3)
        builder.stepped(FoldedStep(step, step.ended_s))
    [frame] = builder.take()
    assert frame.rows[0] == StepRow(2, 1, 3, 4, 0, 9, 3, "", 2)
    assert frame.rows[-1] == StepRow(1, MAX_STEPS + 1, MAX_STEPS + 2, 2, 0, 9, 3, "", MAX_STEPS + 1)
    steps = FrameWriter(0.0, lambda facts: True).fields(frame, 0.0)["steps"]
    assert not {"replica", "number"} & steps.keys(), "one engine has no name in its rows"


def rows_of(frames: list[dict[str, Any]]) -> dict[str, list[tuple[float, float, int, int]]]:
    """Start, end, steps and number of the rows of each replica."""
    found: dict[str, list[tuple[float, float, int, int]]] = {}
    for frame in frames:
        at_ms = frame["at"]
        for row in entries_of(frame, "steps"):
            began_ms = at_ms + row["pause"]
            at_ms = began_ms + row["duration"]
            told = (began_ms, at_ms, row["count"], row["number"])
            found.setdefault(row["replica"], []).append(told)
    return found


def gauges_of(watcher: Watcher) -> list[dict[str, Any]]:
    return [frame["gauges"]["replicas"] for frame in watcher.frames if "gauges" in frame]


async def end_one(app: App, watcher: Watcher) -> list[str]:
    """Run eight requests and kill an engine under them; returns their ids."""
    body = completion_body(max_tokens=120, ignore_eos=True)
    asking = [asyncio.ensure_future(app.post(COMPLETIONS, {**body, "seed": i})) for i in range(8)]
    await until_async(lambda: all(len(rows_of(watcher.frames).get(n, "")) > 9 for n in NAMES))
    async with watching(app) as late:
        replicas = late.frames[0]["requests"]["replica"]
        assert len(replicas) == 8
        assert set(replicas) == set(NAMES)
    pid = process_id(replicas_of(app.engine)[0])
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    replies = await asyncio.gather(*asking)
    assert {reply.status for reply in replies} == {200}
    await until_async(
        lambda: (
            gauges_of(watcher)[-1]["replica-1"]["ready"]
            and gauges_of(watcher)[-1]["replica-1"]["restarts"] == 1
        )
    )
    assert (await app.post(COMPLETIONS, body)).status == 200
    return [str(reply.json()["id"]) for reply in replies]


def check_rows(watcher: Watcher) -> None:
    assert not any("restarted" in frame for frame in watcher.frames)
    assert rows_of(watcher.frames).keys() == set(NAMES)
    for name, rows in rows_of(watcher.frames).items():
        for (_, ended_ms, _, number), (began_ms, _, count, next_number) in itertools.pairwise(rows):
            assert began_ms >= ended_ms - 0.1, "the steps of one engine do not overlap"
            if name == "replica-2" or next_number > number:
                assert next_number == number + count


def check_events(watcher: Watcher) -> None:
    events = watcher.all("events")
    where: dict[int, str] = {}
    for event in events:
        kind, number, replica = event["event"], event["request"], event.get("replica")
        if kind in ("queued", "resumed", "admitted"):
            assert replica in NAMES, event
        if kind == "resumed":
            assert (where[number], replica) == ("replica-1", "replica-2")
        if kind == "admitted":
            where[number] = replica
    assert len(watcher.events_of("resumed")) == 4


def check_gauges(watcher: Watcher) -> None:
    told = gauges_of(watcher)
    assert all(list(each) == NAMES for each in told)
    ready = [each["replica-1"]["ready"] for each in told]
    assert [is_ready for is_ready, _ in itertools.groupby(ready)] == [True, False, True]
    assert all(each["replica-2"]["ready"] for each in told)
    last = next(frame["gauges"] for frame in reversed(watcher.frames) if "gauges" in frame)
    for name in ("waiting", "running", "pages", "free_pages", "cached_pages", "restarts"):
        assert last[name] == sum(each[name] for each in last["replicas"].values())
    assert last["pages"] == 2 * 399


def check_state(watcher: Watcher) -> None:
    """What `infer top` makes of it."""
    state, most = EngineState(), 0
    for kind, fields in watcher.events:
        state.take(kind, fields)
        seats = [(each.state.replica, each.seat) for each in state.requests.values()]
        taken = [seat for seat in seats if seat[1] is not None]
        assert len(set(taken)) == len(taken)
        most = max(most, len(taken))
    assert most == 8
    assert list(state.replicas) == NAMES
    assert sum(len(state.steps_of(name)) for name in NAMES) == len(state.steps) > 100
    assert not state.requests


async def check_numbers(app: App, names: list[str]) -> None:
    stats = (await app.get("/stats")).json()
    assert [each["ready"] for each in stats["replicas"].values()] == [True, True]
    metrics = (await app.get("/metrics")).body.decode()
    assert 'infer:replica_ready{model_name="hash-model",replica="replica-2"} 1.0' in metrics
    traces = [(await app.get(f"/v1/requests/{name}")).json() for name in names]
    moved = [trace for trace in traces if trace["restarts"]]
    assert len(moved) == 4
    assert all(trace["replicas"] == NAMES for trace in moved)
    assert all(t["replicas"] == ["replica-2"] for t in traces if not t["restarts"])
    console = Console(highlight=False, markup=False, width=100)
    with console.capture() as shown:
        write(moved[0], console)
    text = shown.get()
    assert "generated; at replica-1, replica-2" in text
    assert "; at replica-1" in text
    assert json.dumps(moved[0]["events"]).count("replica-2") >= 3


def test_an_engine_of_two_that_dies_and_comes_back() -> None:
    fleet = FleetSettings(replicas=2, routing="least")

    async def use() -> None:
        engine = launch_hash_llm(step_s=0.01, fleet=fleet, max_batch_size=8)
        async with serving(engine) as app, watching(app) as watcher:
            assert watcher.events[0][1]["seats"] == 16
            names = await end_one(app, watcher)
            await until_async(lambda: len(watcher.events_of("finished")) == 9)
            check_rows(watcher)
            check_events(watcher)
            check_gauges(watcher)
            check_state(watcher)
            await check_numbers(app, names)

    asyncio.run(use())


def test_a_trace_names_a_limited_number_of_engines() -> None:
    trace = RequestTrace("r", "", RequestContext(), 1, 1)
    for number in range(2 * MAX_REPLICAS):
        for _ in range(2):
            trace.ran_on(f"replica-{number}")
    assert trace.replicas == [f"replica-{number}" for number in range(MAX_REPLICAS)]
