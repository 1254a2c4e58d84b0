"""`infer serve --replicas 2` with the shipped model: one engine is killed under running streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from infer.engine.build.processors import read_processors
from tests.support.server_process import Heard, bodies, follow, model_server, served

pytestmark = pytest.mark.skipif(
    read_processors().num_threads(numa="all") < 2, reason="each engine needs a core"
)


def test_streams_survive_the_death_of_one_of_two_engines(tmp_path: Path) -> None:
    wanted = [{**body, "max_tokens": 250, "min_tokens": 250} for body in bodies(8, 250)]
    command = model_server(
        "--replicas", "2", "--no-standby", "--routing", "least", "--max-seq-len", "1024"
    )

    async def ask_all(heard: list[Heard]) -> list[object]:
        await asyncio.gather(
            *[follow(server.port, body, each) for body, each in zip(wanted, heard, strict=True)]
        )
        assert all(each.is_done and each.error is None for each in heard)
        return [each.answer for each in heard]

    async def ask_and_kill() -> list[object]:
        heard = [Heard() for _ in wanted]
        pid = server.engine_pids()[0]
        asking = asyncio.create_task(ask_all(heard))
        while not all(each.tokens or each.text for each in heard):
            await asyncio.sleep(0.001)
        assert not any(each.is_done for each in heard)
        os.kill(pid, signal.SIGKILL)
        return await asking

    with served(command, tmp_path / "log") as server:
        assert len(server.engine_pids()) == 2
        calm = asyncio.run(ask_all([Heard() for _ in wanted]))
        assert asyncio.run(ask_and_kill()) == calm
        deadline_s = time.monotonic() + 30
        while True:  # the streams go on before the death is counted
            stats = json.loads(server.get("/stats")[1])
            if stats["engine"]["num_restarts"] or time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
        assert stats["engine"]["num_restarts"] == 1
        assert stats["engine"]["num_moved"] > 0
        assert stats["engine"]["num_moved_unequal"] == 0, "both compute the same bits"
        assert list(stats["replicas"]) == ["replica-1", "replica-2"]
        metrics = server.get("/metrics")[1].decode()
        assert "infer:replica_engine_restarts_total{" in metrics
        assert 'replica="replica-2"' in metrics
        requests = json.loads(server.get("/v1/requests")[1])["data"]
        events = [
            event
            for each in requests
            for event in json.loads(server.get(f"/v1/requests/{each['id']}")[1])["events"]
        ]
        admitted = {event["replica"] for event in events if event["event"] == "admitted"}
        assert admitted == {"replica-1", "replica-2"}
        assert any(event["event"] == "resumed" for event in events)
        assert not any("tokens_may_differ" in event for event in events)
