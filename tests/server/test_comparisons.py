"""`POST /v1/engine/comparisons`: one at a time, in a process of its own, for administrators."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from infer.errors import DeadlineError, EngineError
from infer.server.comparisons import ComparisonBody, ComparisonEvents, Comparisons
from infer.server.http.error_responses import HttpError
from infer.server.route_table import COMPARISONS_PATH
from tests.support.doubles import held_runner, make_hash_llm
from tests.support.serving import COMPLETIONS, App, all_open, completion_body, with_app
from tests.support.tenants import make


@pytest.mark.slow
def test_the_three_modes() -> None:
    async def use(app: App) -> None:
        reply = await app.post(COMPARISONS_PATH, {"num_requests": 2, "seats": 2})
        assert reply.status == 200, reply.body
        found = reply.json()
        assert (found["workload"], found["seats"], found["num_requests"]) == ("mixed", 2, 2)
        modes = [recording["hello"]["mode"] for recording in found["recordings"]]
        assert modes == ["sequential", "static", "continuous"]
        assert all(recording["summary"]["steps"] for recording in found["recordings"])

    with_app(make_hash_llm(), use)


def test_what_is_refused(tmp_path: Path) -> None:
    runner, arrived, opened = held_runner()

    async def use(app: App) -> None:
        for body, param in (
            ({"workload": "x"}, "workload"),
            ({"seats": 0}, "seats"),
            ({"seats": 65}, "seats"),
            ({"num_requests": 129}, "num_requests"),
        ):
            refused = await app.post(COMPARISONS_PATH, body)
            assert refused.status in (400, 422)
            assert refused.error()["param"] == param
        asking = [asyncio.ensure_future(app.post(COMPLETIONS, completion_body())) for _ in range(2)]
        await all_open(app, 2)
        assert await asyncio.to_thread(arrived.wait, 10)
        refused = await app.post(COMPARISONS_PATH, {})
        assert (refused.status, refused.error()["code"]) == (503, "busy")
        assert "requests are waiting" in refused.error()["message"]
        opened.set()
        await asyncio.gather(*asking)

    with_app(make_hash_llm(max_batch_size=1, runner=runner), use)
    file = tmp_path / "keys.json"
    key = make(file, "one")

    async def use_key(app: App) -> None:
        refused = await app.post(COMPARISONS_PATH, {}, headers=key)
        assert (refused.status, refused.error()["code"]) == (403, "permission_denied")

    with_app(make_hash_llm(), use_key, api_keys=str(file))


def sleeper(pid_file: Path) -> tuple[str, ...]:
    code = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    return (sys.executable, "-c", code)


async def pid_in(file: Path) -> int:
    async with asyncio.timeout(20):
        while not file.exists() or not file.read_text(encoding="utf-8"):
            await asyncio.sleep(0.02)
    return int(file.read_text(encoding="utf-8"))


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_one_at_a_time_and_it_ends_with_its_client(tmp_path: Path) -> None:
    async def main() -> None:
        async with make_hash_llm() as engine:
            comparisons = Comparisons(engine, command=sleeper(tmp_path / "pid"))
            running = asyncio.ensure_future(comparisons.run(ComparisonBody()))
            pid = await pid_in(tmp_path / "pid")
            with pytest.raises(HttpError, match="another comparison is running") as refused:
                await comparisons.run(ComparisonBody())
            assert refused.value.status == 503
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert has_ended(pid)
            (tmp_path / "pid").unlink()
            again = Comparisons(engine, max_s=1.0, command=sleeper(tmp_path / "pid"))
            with pytest.raises(DeadlineError, match="not done after 1 s"):
                await again.run(ComparisonBody())
            assert has_ended(await pid_in(tmp_path / "pid"))

    asyncio.run(main())


@pytest.mark.slow
def test_a_folder_that_it_starts_in_is_searched_for_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have been started in the folder of a stranger's checkpoint."""
    for name in {*sys.stdlib_module_names, "infer", "msgspec", "numpy", "torch"}:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)", encoding="utf-8")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        async with make_hash_llm() as engine:
            body = ComparisonBody(seats=2, num_requests=2)
            assert json.loads(await Comparisons(engine).run(body))["seats"] == 2

    asyncio.run(main())


def test_a_process_that_fails_is_our_error() -> None:
    async def main() -> None:
        async with make_hash_llm() as engine:
            failing = (sys.executable, "-c", "import sys; sys.exit(3)")
            with pytest.raises(EngineError, match="the comparison has failed"):
                await Comparisons(engine, command=failing).run(ComparisonBody())

    asyncio.run(main())


@pytest.mark.slow
def test_the_modes_are_told_while_they_are_computed() -> None:
    """One mode after the other, with what the recordings have."""

    async def use(app: App) -> None:
        asked = {"num_requests": 3, "seats": 2, "stream": True}
        reply = await app.post(COMPARISONS_PATH, asked)
        assert reply.headers["content-type"].startswith("text/event-stream")
        told = [
            (block.split(b"\n")[0].removeprefix(b"event: "), json.loads(block.split(b"data: ")[1]))
            for block in reply.body.split(b"\n\n")
            if block
        ]
        names = [name for name, _ in told if name != b"frame"]
        assert names == [b"comparison", *[b"hello", b"summary"] * 3]
        assert told[0][1]["modes"] == ["sequential", "static", "continuous"]
        finished = [
            event
            for name, data in told
            if name == b"frame"
            for event in data.get("events", [])
            if event["event"] == "finished"
        ]
        assert len(finished) == 3 * 3

    with_app(make_hash_llm(), use)


def test_events_end_with_what_went_wrong() -> None:
    text = "event: comparison\\ndata: {}\\n\\n"  # in one write, which is one piece
    code = f"import sys; sys.stdout.write('{text}'); sys.stdout.flush(); sys.exit(3)"

    async def main() -> None:
        async with make_hash_llm() as engine:
            comparisons = Comparisons(engine, command=(sys.executable, "-c", code))
            pieces = comparisons.pieces(ComparisonBody(stream=True))
            first = await anext(pieces)
            sent: list[bytes] = []

            async def send(message: Any) -> None:
                sent.append(message.get("body", b""))

            async def receive() -> Any:
                await asyncio.Event().wait()

            await ComparisonEvents(first, pieces)({"type": "http"}, receive, send)
            assert b"".join(sent).startswith(b"event: comparison\n")
            assert b"event: error\ndata: " in b"".join(sent)
            assert b"the comparison has failed" in b"".join(sent)
            again = comparisons.pieces(ComparisonBody())  # the place is free
            assert await anext(again) == first
            await again.aclose()  # not by a loop that ends, which leaves the pipes open
            await asyncio.sleep(0.05)

    asyncio.run(main())
