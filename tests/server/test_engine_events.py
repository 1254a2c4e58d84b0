"""The stream of an engine's steps: exactly its steps, private between keys, bounded for viewers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.requests.state import FoldedStep, RequestStates
from infer.server import viewers as viewers_module
from infer.server.http.error_responses import HttpError
from infer.server.route_table import EVENTS_PATH
from infer.server.viewers import EngineViewers
from infer.types import StepOutput
from infer.types.step_events import (
    Admitted,
    BatchEvent,
    ComputedChunk,
    Preempted,
    Queued,
    RequestEvent,
    StepEvents,
)
from tests.support.doubles import held_runner, launch_hash_llm, make_hash_llm, pid_of, thread_of
from tests.support.engine_watcher import Watcher, entries_of, watching
from tests.support.serving import COMPLETIONS, App, Reply, completion_body, serving, with_app
from tests.support.tenants import make
from tests.support.waits import until_async

LONG = "a long long way to go " * 6


class Spy:
    """Keeps what an engine delivers."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.told: list[tuple[list[StepOutput], StepEvents | None]] = []
        states = engine._states
        self._stepped = states.stepped
        states.stepped = self.stepped  # type: ignore[method-assign,assignment]

    def stepped(self, outputs: list[StepOutput], step: StepEvents | None) -> FoldedStep:
        self.told.append((outputs, step))
        return self._stepped(outputs, step)

    @property
    def steps(self) -> list[StepEvents]:
        return [step for _, step in self.told if step is not None and step.num_sequences]


def all_finished(watcher: Watcher, number: int) -> bool:
    return len(watcher.events_of("finished")) == number


def steps_of(frames: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Number, start, duration, sequences, prompt tokens and pages of each step of some frames."""
    steps = []
    for frame in frames:
        number, at_ms = frame.get("number", 0), frame["at"]
        for row in entries_of(frame, "steps"):
            count, pause, duration, *rest = row.values()
            number += count
            at_ms += pause
            steps.append((number, round(at_ms, 1), duration, *rest))
            at_ms += duration
    return steps


def told(event: RequestEvent, step: StepEvents, number_of: dict[str, int]) -> dict[str, Any]:
    """An event of a step as a frame has it, without its time."""
    base: dict[str, Any] = {"request": number_of[event.request_id]}
    match event:
        case Queued():
            behind = [number_of[name] for name in event.behind]
            more = {"waiting_before": event.num_before, "running": event.num_running}
            return {"event": "queued", **base, **more, "behind": behind}
        case Admitted():
            more = {"cached_tokens": event.num_cached, "of_tokens": event.num_tokens}
            return {"event": "admitted", **base, **more}
        case ComputedChunk():
            step_ms = round(1000 * (step.ended_s - step.started_s), 2)
            more = {"from_token": event.start, "tokens": event.num_tokens}
            return {"event": "chunk", **base, **more, "duration": step_ms}
        case Preempted():
            needed_by = [number_of[name] for name in (event.needed_by,) if name]
            more = {"lost_tokens": event.num_lost}
            return {"event": "preempted", **base, **more, "needed_by": needed_by}
    raise AssertionError(f"an event that the load does not have: {event}")


def test_exactly_the_steps() -> None:
    """A load with every kind of event: the frames have its steps and events, each exactly once."""

    async def use(app: App) -> None:
        spy = Spy(app.engine)
        async with watching(app) as watcher:
            assert watcher.events[0][0] == "hello"
            hello = watcher.events[0][1]
            assert (hello["model"], hello["seats"], hello["mode"]) == (
                *("hash-model", 4),
                "continuous",
            )
            bodies = [
                completion_body(
                    prompt=LONG[: 20 + 7 * i], max_tokens=24 + i, ignore_eos=True, seed=i
                )
                for i in range(12)
            ]
            replies = await asyncio.gather(*(app.post(COMPLETIONS, body) for body in bodies))
            await until_async(partial(all_finished, watcher, len(bodies)))
            names = {reply.json()["id"] for reply in replies}
            numbers = {e["name"]: e["request"] for e in watcher.events_of("queued")}
            assert numbers.keys() == names
            assert set(numbers.values()) == set(range(1, 13))
            check_steps(watcher, spy)
            check_events(watcher, spy, {f"{n}": m for n, m in numbers.items()})

    # Slow steps: a frame that holds more than 256 of them would merge neighbours.
    with_app(make_hash_llm(num_pages=40, max_batch_size=4, step_s=0.002), use)


def check_steps(watcher: Watcher, spy: Spy) -> None:
    found = steps_of(watcher.frames)
    assert len(found) == len(spy.steps) > 20
    offset_ms = found[0][1] - 1000 * spy.steps[0].started_s
    for row, step in zip(found, spy.steps, strict=True):
        chunks = [e.num_tokens for e in step.events if isinstance(e, ComputedChunk)]
        assert row[0] == step.number
        assert row[1] == pytest.approx(1000 * step.started_s + offset_ms, abs=1.0)
        assert row[2] == round(1000 * (step.ended_s - step.started_s), 2)
        assert row[3:5] == (step.num_sequences, sum(chunks))
        assert row[5:] == (step.num_free_pages, step.num_indexed_pages)
    assert {row[4] > 0 for row in found} == {True, False}


def check_events(watcher: Watcher, spy: Spy, numbers: dict[str, int]) -> None:
    happened = [(event, step) for _, step in spy.told if step for event in step.events]
    ids = {event.request_id for event, _ in happened if not isinstance(event, BatchEvent)}
    number_of = {name: number for name in ids for own, number in numbers.items() if own in name}
    expected: list[dict[str, Any]] = []
    tokens: dict[int, int] = {}
    for outputs, step in spy.told:
        for event in step.events if step is not None else ():
            assert step is not None
            assert not isinstance(event, BatchEvent), "the mode is not static"
            expected.append(told(event, step, number_of))
        for output in outputs:
            number = number_of[output.request_id]
            tokens[number] = tokens.get(number, 0) + 1
            if tokens[number] == 1:
                cached = {"cached_tokens": output.num_cached}
                expected.append({"event": "first_token", "request": number, **cached})
            if output.finish_reason is not None:
                end = {"outcome": "length", "output_tokens": tokens[number]}
                expected.append({"event": "finished", "request": number, **end})
    beside = {"after", "since_received"}
    beside |= {"name", "choice", "prompt_tokens", "max_tokens", "received"}
    found = [{n: v for n, v in e.items() if n not in beside} for e in watcher.all("events")]
    assert found == expected
    assert {e["event"] for e in found} == {
        *("queued", "admitted", "chunk", "first_token", "preempted", "finished"),
    }
    counted: dict[int, int] = {}
    for number, count in watcher.all("tokens"):
        counted[int(number)] = counted.get(int(number), 0) + count
    assert counted == tokens
    gaps = sum(sum(frame.get("gaps", [])) for frame in watcher.frames)
    assert gaps == sum(tokens.values()) - len(tokens)


def test_requests_that_were_there_before() -> None:
    runner, arrived, opened = held_runner()

    async def use(app: App) -> None:
        body = completion_body(prompt=LONG, max_tokens=5, ignore_eos=True)
        asking = [asyncio.ensure_future(app.post(COMPLETIONS, body)) for _ in range(2)]
        assert await asyncio.to_thread(arrived.wait, 10)
        async with watching(app) as watcher:
            [one, two] = entries_of(watcher.frames[0], "requests")
            assert [one["request"], two["request"]] == [1, 2]
            assert one["state"] == "waiting"  # the engine has not reported a step yet
            assert one["max_tokens"] == 5
            opened.set()
            names = {(await each).json()["id"] for each in asking}
            assert {one["name"], two["name"]} == names
            await until_async(partial(all_finished, watcher, 2))
        async with watching(app) as watcher:
            assert watcher.frames[0]["requests"] == {}
            assert watcher.frames[0]["gauges"]["running"] == 0

    with_app(make_hash_llm(max_batch_size=1, runner=runner), use)


def test_a_key_never_sees_the_name_of_anothers_request(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, two, admin = make(file, "one"), make(file, "two"), make(file, "admin", admin=True)

    async def use(app: App) -> None:
        async with (
            watching(app, **one) as of_one,
            watching(app, **two) as of_two,
            watching(app, **admin) as of_all,
        ):
            body = completion_body(prompt=LONG, max_tokens=8, ignore_eos=True)
            mine = (await app.post(COMPLETIONS, body, headers=one)).json()["id"]
            theirs = (await app.post(COMPLETIONS, body, headers=two)).json()["id"]
            for watcher in (of_one, of_two, of_all):
                await until_async(partial(all_finished, watcher, 2))
        names = {
            who: [e["name"] for e in watcher.events_of("queued")]
            for who, watcher in (("one", of_one), ("two", of_two), ("all", of_all))
        }
        assert names == {"one": [mine, None], "two": [None, theirs], "all": [mine, theirs]}
        assert theirs.rpartition("-")[2] not in json.dumps(of_one.events)
        assert mine.rpartition("-")[2] not in json.dumps(of_two.events)
        assert steps_of(of_one.frames) == steps_of(of_all.frames)  # the work itself is no secret

    with_app(make_hash_llm(), use, api_keys=str(file))


def test_the_ninth_viewer_and_the_fifth_of_a_key(tmp_path: Path) -> None:
    async def use(app: App) -> None:
        leaves = [asyncio.Event() for _ in range(viewers_module.MAX_VIEWERS)]
        tasks = [asyncio.ensure_future(app.send("GET", EVENTS_PATH, leave=it)) for it in leaves]
        await asyncio.sleep(0.02)
        refused = await app.get(EVENTS_PATH)
        assert refused.status == 503
        assert refused.error()["code"] == "too_many_viewers"
        assert "close one of them" in refused.error()["message"]
        assert int(refused.headers["retry-after"]) > 0
        leaves[0].set()
        await tasks[0]
        async with watching(app) as watcher:
            assert watcher.frames
        for leave in leaves:
            leave.set()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}

    with_app(make_hash_llm(), use)
    file = tmp_path / "keys.json"
    one, two = make(file, "one"), make(file, "two")

    async def use_keys(app: App) -> None:
        leave = asyncio.Event()
        tasks = [
            asyncio.ensure_future(app.send("GET", EVENTS_PATH, headers=one, leave=leave))
            for _ in range(viewers_module.MAX_VIEWERS_A_KEY)
        ]
        await asyncio.sleep(0.02)
        refused = await app.get(EVENTS_PATH, **one)
        assert (refused.status, refused.error()["code"]) == (429, "rate_limit_exceeded")
        async with watching(app, **two) as watcher:
            assert watcher.frames
        leave.set()
        await asyncio.gather(*tasks)

    with_app(make_hash_llm(), use_keys, api_keys=str(file))


class Crowd:
    """Viewers that come and stay until the test ends them."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._leaving = asyncio.Event()
        self._tasks: list[asyncio.Task[Reply]] = []

    async def join(self, **headers: str) -> asyncio.Task[Reply]:
        sending = self._app.send("GET", EVENTS_PATH, headers=headers, leave=self._leaving)
        self._tasks.append(asyncio.ensure_future(sending))
        await asyncio.sleep(0.02)
        return self._tasks[-1]

    async def leave(self) -> None:
        self._leaving.set()
        await asyncio.gather(*self._tasks)


def ended_of(task: asyncio.Task[Reply]) -> str | None:
    """Why a viewer's stream has ended; None: it goes on."""
    if not task.done():
        return None
    reply = task.result()
    found = re.findall(r'event: end\ndata: {"reason":"([a-z_]+)"}', reply.body.decode())
    return found[0] if found else str(reply.error()["code"])


def test_two_keys_cannot_take_all_places(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    one, two, *others = [make(file, f"key-{i}") for i in range(10)]

    async def use(app: App) -> None:
        crowd = Crowd(app)
        ones = [await crowd.join(**one) for _ in range(viewers_module.MAX_VIEWERS_A_KEY)]
        twos = [await crowd.join(**two) for _ in range(viewers_module.MAX_VIEWERS_A_KEY)]
        firsts = [await crowd.join(**key) for key in others[:6]]
        # Of the key with most the oldest gives way, until each has one.
        assert [ended_of(task) for task in firsts] == [None] * 6
        gave_way = ["replaced", "replaced", "replaced", None]
        assert [ended_of(task) for task in (*ones, *twos)] == gave_way * 2
        assert ended_of(await crowd.join(**others[6])) == "too_many_viewers"
        assert ended_of(await crowd.join(**one)) == "too_many_viewers"
        await crowd.leave()

    with_app(make_hash_llm(), use, api_keys=str(file))


def test_without_keys_no_address_can_take_all_places() -> None:
    """One that was replaced and comes back finds no place, so the two do not take turns."""
    engine = make_hash_llm()

    async def use(app: App) -> None:
        viewers = EngineViewers(engine, app.app.state.traces)
        many = [viewers.join(None, "", "192.0.2.1") for _ in range(viewers_module.MAX_VIEWERS)]
        with pytest.raises(HttpError, match="close one of them"):
            viewers.join(None, "", "192.0.2.1")
        for number in range(1, 5):
            viewers.join(None, "", "192.0.2.2")
            assert viewers.num_viewers == viewers_module.MAX_VIEWERS
            data = await many[number - 1].take()
            assert data is not None
            assert data.endswith(b'event: end\ndata: {"reason":"replaced"}\n\n')
        for address in ("192.0.2.1", "192.0.2.2"):
            with pytest.raises(HttpError, match="close one of them"):
                viewers.join(None, "", address)
        for viewer in many[:4]:
            viewers.leave(viewer)  # whose stream has ended
        assert viewers.num_viewers == viewers_module.MAX_VIEWERS

    with_app(engine, use)


def test_nothing_is_collected_while_nobody_watches() -> None:
    async def use(app: App) -> None:
        traces = app.app.state.traces
        async with watching(app) as watcher:
            assert len(traces._watchers) == 1
            assert (await app.post(COMPLETIONS, completion_body())).status == 200
        assert traces._watchers == []
        num_frames, num_tasks = len(watcher.frames), len(asyncio.all_tasks())
        assert num_tasks == 1
        await app.post(COMPLETIONS, completion_body())
        assert len(watcher.frames) == num_frames

    with_app(make_hash_llm(), use)


def test_a_slow_viewer_gets_fewer_frames_and_then_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(viewers_module, "MAX_PENDING_BYTES", 4000)

    async def use(app: App) -> None:
        gate, watcher = asyncio.Event(), Watcher()
        gate.set()

        async def receive() -> dict[str, Any]:
            await watcher.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await gate.wait()
                watcher.read(message["body"])

        scope: dict[str, Any] = {
            **{"type": "http", "http_version": "1.1", "method": "GET", "path": EVENTS_PATH},
            **{"query_string": b"", "headers": [], "client": None, "root_path": ""},
        }
        task = asyncio.ensure_future(app.app(scope, receive, send))
        async with watching(app) as quick:
            await until_async(lambda: bool(watcher.frames))
            gate.clear()
            body = completion_body(prompt=LONG, max_tokens=350, ignore_eos=True)
            assert (await app.post(COMPLETIONS, body)).status == 200
            await until_async(lambda: bool(quick.events_of("finished")))
            assert "left_out" not in str(quick.frames)
            num_read = len(watcher.frames)
            gate.set()
            await until_async(lambda: any("left_out" in it for it in watcher.frames[num_read:]))
            last = watcher.frames[-1]
            assert last["requests"] == {}
            assert last["gauges"]["running"] == 0
            steps = sum(row["count"] for row in watcher.all("steps")) + last["left_out"]["steps"]
            assert steps == sum(row["count"] for row in quick.all("steps"))
            events = len(watcher.all("events")) + last["left_out"]["events"]
            assert events == len(quick.all("events"))
            assert last["left_out"]["frames"] > 0
        watcher.leave.set()
        await task

    with_app(make_hash_llm(step_s=0.003), use)


def test_a_viewer_may_ask_for_fewer_pieces() -> None:
    """The same frames, several at once."""

    async def use(app: App) -> None:
        pieces: list[float] = []
        rare, loop = Watcher(), asyncio.get_running_loop()

        def read(data: bytes) -> None:
            pieces.append(loop.time())
            rare.read(data)

        path = EVENTS_PATH + "?every_ms=250"
        sending = app.send("GET", path, leave=rare.leave, on_write=read)
        task = asyncio.ensure_future(sending)
        async with watching(app) as quick:
            await until_async(lambda: bool(rare.frames))
            body = completion_body(prompt=LONG, max_tokens=350, ignore_eos=True)
            assert (await app.post(COMPLETIONS, body)).status == 200
            for each in (quick, rare):
                await until_async(partial(all_finished, each, 1))
            assert [later - at for at, later in pairwise(pieces) if later - at < 0.24] == []
            assert len(rare.frames) > len(pieces) > 2
            assert "left_out" not in str(rare.frames[1:])
            assert steps_of(rare.frames)[0][0] == 1
            assert [row[0] for row in steps_of(rare.frames)] == [
                row[0] for row in steps_of(quick.frames)
            ]
        rare.leave.set()
        await task

    with_app(make_hash_llm(step_s=0.003), use)


def test_an_end_does_not_wait_for_the_next_piece() -> None:
    engine = make_hash_llm()

    async def use(app: App) -> None:
        viewers = EngineViewers(engine, app.app.state.traces)
        viewer = viewers.join(None, "", every_s=3600)
        assert await viewer.take()
        taking = asyncio.ensure_future(viewer.take())
        await asyncio.sleep(0.1)
        assert not taking.done()
        assert viewer.has_read_all is False, "a frame waits for him"
        viewer.end("replaced")
        assert b"replaced" in (await taking or b"")
        assert await viewer.take() is None
        viewers.leave(viewer)

    with_app(engine, use)


@pytest.mark.parametrize("given", ["1001", "-1", "1e2", "", "٣", "9" * 5000])
def test_a_wrong_pause_between_pieces_is_named(given: str) -> None:
    async def use(app: App) -> None:
        refused = await app.get(f"{EVENTS_PATH}?every_ms={quote(given)}")
        assert refused.status == 400
        assert refused.error()["param"] == "every_ms"
        assert "from 0 to 1000" in refused.error()["message"]

    with_app(make_hash_llm(), use)


def test_an_engine_that_dies_is_an_event() -> None:
    async def use() -> None:
        async with serving(launch_hash_llm(step_s=0.01)) as app, watching(app) as watcher:
            body = completion_body(max_tokens=100, ignore_eos=True)
            asking = asyncio.ensure_future(app.post(COMPLETIONS, body))
            await until_async(lambda: len(watcher.all("steps")) > 5)
            os.kill(pid_of(app.engine), signal.SIGKILL)
            reply = await asking
            assert reply.status == 200
            trace = (await app.get(f"/v1/requests/{reply.json()['id']}")).json()
            assert trace["restarts"] == 1
            await until_async(lambda: bool(watcher.events_of("finished")))
            [at] = [i for i, frame in enumerate(watcher.frames) if frame.get("restarted")]
            events = [event for frame in watcher.frames[at:] for event in frame.get("events", [])]
            kinds = [event["event"] for event in events]
            assert kinds[:3] == ["resumed", "admitted", "chunk"]
            assert kinds[-1] == "finished"
            assert {event["request"] for event in events} == {1}
            assert steps_of(watcher.frames[at:])[0][0] < 3
            assert watcher.frames[-1].get("gauges", {"restarts": 1})["restarts"] == 1

    asyncio.run(use())


def test_a_server_that_shuts_down_ends_its_streams() -> None:
    async def use(app: App) -> None:
        async with watching(app) as watcher:
            app.engine.drain()
            await until_async(lambda: watcher.events[-1][0] == "end")
            assert watcher.events[-1][1] == {"reason": "shutting_down"}
            refused = await app.get(EVENTS_PATH)
            assert refused.status == 503

    with_app(make_hash_llm(), use)


def test_a_revoked_key_ends_its_streams(tmp_path: Path) -> None:
    from infer.server.tenancy.keys import Keys

    file = tmp_path / "keys.json"
    key = make(file, "one")

    async def use(app: App) -> None:
        async with watching(app, **key) as watcher:
            Keys(file).revoke("one")
            await until_async(lambda: watcher.events[-1][0] == "end")
            assert watcher.events[-1][1] == {"reason": "key_revoked"}

    with_app(make_hash_llm(), use, api_keys=str(file))


def test_a_client_that_leaves_ends_its_request() -> None:
    async def use(app: App) -> None:
        async with watching(app) as watcher:
            leave = asyncio.Event()
            body = json.dumps(completion_body(max_tokens=400, ignore_eos=True, stream=True))
            headers = {"content-type": "application/json", "content-length": str(len(body))}
            asking = asyncio.ensure_future(
                app.send("POST", COMPLETIONS, body.encode(), headers, leave=leave)
            )
            await until_async(lambda: bool(watcher.all("tokens")))
            leave.set()
            await asking
            await until_async(lambda: bool(watcher.events_of("finished")))
            [end] = watcher.events_of("finished")
            assert end["outcome"] == "disconnected"

    with_app(make_hash_llm(step_s=0.002), use)


def test_the_traffic_is_bounded() -> None:
    """10,000 steps a second, each with an event: less than 64 KiB in any second, and nothing is
    lost without being counted."""
    runner, arrived, opened = held_runner()
    marks: list[tuple[float, int]] = []

    async def feed(app: App, watcher: Watcher) -> int:
        traces, states, number = app.app.state.traces, RequestStates(), 0
        [name] = traces._choices
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while number < 16_000:
            for _ in range(number, round(10_000 * (loop.time() - began_s))):
                number += 1
                chunk = ComputedChunk(name, 12345, 128)
                step = StepEvents(number, 1.0, 1.1, 32, (chunk,), 4096, 128)
                traces.stepped(states.stepped([], step))
            marks.append((loop.time(), watcher.num_bytes))
            await asyncio.sleep(0.002)
        return number

    async def use(app: App) -> None:
        async with watching(app) as watcher:
            asking = asyncio.ensure_future(app.post(COMPLETIONS, completion_body(max_tokens=1)))
            assert await asyncio.to_thread(arrived.wait, 10)
            number = await feed(app, watcher)
            for at_s, num_bytes in marks:
                within = [other for later_s, other in marks if at_s <= later_s <= at_s + 1]
                assert within[-1] - num_bytes < 64 * 1024
            assert watcher.num_bytes > 5_000, "of more than 500,000 that all events would take"

            def all_told() -> bool:
                return sum(row["count"] for row in watcher.all("steps")) == number

            await until_async(all_told)
            left_out = sum(f.get("left_out", {"events": 0})["events"] for f in watcher.frames)
            assert left_out + len(watcher.events_of("chunk")) >= number
            opened.set()
            assert (await asking).status == 200
            assert any(len(entries_of(frame, "requests")) == 1 for frame in watcher.frames)
            await until_async(lambda: watcher.frames[-1].get("gauges", {}).get("open") == 0)

    with_app(make_hash_llm(runner=runner), use)


def test_static_batches() -> None:
    async def use(app: App) -> None:
        async with watching(app) as watcher:
            body = completion_body(prompt=LONG, max_tokens=6, ignore_eos=True)
            await asyncio.gather(*(app.post(COMPLETIONS, body) for _ in range(4)))
            await until_async(lambda: len(watcher.all("batches")) == 4)
            kinds = [batch["event"] for batch in watcher.all("batches")]
            assert kinds == ["formed", "ended", "formed", "ended"]
            ids = [batch["batch_id"] for batch in watcher.all("batches")]
            assert ids == [ids[0], ids[0], ids[2], ids[2]]
            formed, ended = watcher.all("batches")[:2]
            assert formed["requests"] == 2
            prompt = watcher.events_of("queued")[0]["prompt_tokens"]
            assert formed["prompt_tokens"] == formed["padded_tokens"] == 2 * prompt
            assert ended["tokens"] == formed["prompt_tokens"] + 2 * 6

    with_app(make_hash_llm(batching_mode="static", max_batch_size=2), use)


def test_head_has_no_stream() -> None:
    async def use(app: App) -> None:
        reply = await app.send("HEAD", EVENTS_PATH)
        assert (reply.status, reply.body) == (200, b"")
        assert reply.headers["content-type"].startswith("text/event-stream")

    with_app(make_hash_llm(), use)


def test_an_engine_in_a_thread_has_pages_in_its_steps() -> None:
    async def use(app: App) -> None:
        core = thread_of(app.engine).core
        async with watching(app) as watcher:
            assert (await app.post(COMPLETIONS, completion_body(prompt=LONG))).status == 200
            await until_async(lambda: bool(watcher.all("steps")))
            assert watcher.all("steps")[0]["free_pages"] < core.scheduler.allocator.num_usable
            await until_async(lambda: watcher.all("steps")[-1]["cached_pages"] > 0)

    with_app(make_hash_llm(), use)
