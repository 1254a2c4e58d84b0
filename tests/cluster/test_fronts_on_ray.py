"""Several fronts on a real Ray: `pytest -m cluster` in the environment that has it.

The first test needs no model: the actor that fronts share, found, killed and made again. The second
one starts an application with two fronts and the model that ships.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.cluster.front_relay import RelayedPeers
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.tenancy.limit_messages import LimitAsk
from tests.support.tenants import make

ray = pytest.importorskip("ray", reason="pip install 'infer[cluster]'")

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(280),
    pytest.mark.filterwarnings("default"),  # Ray and what it brings have warnings of their own
]
PORT = 8124
COMPLETION = {"model": "infer-demo", "prompt": "Once", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def started() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        # Another cluster may run on this machine.
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=150 << 20,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


def kill_shared(application: str) -> None:
    """SIGKILL for the actor that the fronts of an application share."""
    ray.kill(ray.get_actor(f"infer-fronts-{application}", namespace="infer"))


async def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds until a condition is met."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < limit_s
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


def test_the_shared_actor_is_found_and_made_again(started: None) -> None:
    from infer.cluster.shared_fronts import SharedFronts

    ask = LimitAsk("key", "requests", 100, 1)

    async def main() -> None:
        shared = [SharedFronts("alone", 2) for _ in range(2)]
        names = ["front-00000001", "front-00000002"]
        both = zip(names, shared, strict=True)
        limits = [FrontLimits(name, 2, each.exchange) for name, each in both]
        peers = [RelayedPeers(*each) for each in zip(names, shared, strict=True)]
        for each in limits:
            each.start()
        serving = [asyncio.ensure_future(each.serve(lambda said: said + b"!")) for each in peers]
        await until(lambda: all(each.is_connected for each in limits), 30)
        took_s = []
        for index in range(60):
            began_s = time.monotonic()
            verdict = await limits[index % 2].take(ask)
            took_s.append(time.monotonic() - began_s)
            assert verdict.is_granted
        print(f"a decision took {1000 * sorted(took_s)[30]:.1f} ms in the middle")
        assert await peers[0].ask(b"?", 5) == {names[1]: b"?!"}

        kill_shared("alone")
        granted = [(await limits[index % 2].take(ask)).is_granted for index in range(60)]
        assert 36 <= sum(granted) <= 50  # 40 were left, and a few have come since
        pause_s = await until(lambda: all(each.is_connected for each in limits), 30)
        print(f"fronts shared limits again {pause_s:.1f} s later")
        granted = [(await limits[index % 2].take(ask)).is_granted for index in range(60)]
        assert sum(granted) <= 5 + 2 * pause_s  # the new one knows what has been used
        while await peers[1].ask(b"?", 5) != {names[0]: b"?!"}:
            await asyncio.sleep(0.1)
        for each in limits:
            await each.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(main())


def call(path: str, headers: dict[str, str], body: dict[str, Any] | None = None) -> Any:
    """The status and the JSON body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    head = {**headers, "Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, head)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def test_two_fronts_are_as_one(started: None, tmp_path: Path) -> None:
    from ray import serve

    import infer.cluster

    file = tmp_path / "keys.json"
    admin = make(file, "admin", admin=True)
    few = make(file, "few", requests_per_minute=2)
    app = infer.cluster.app({"replicas": "1", "fronts": "2", "cpus": "1", "api_keys": str(file)})
    serve.start(http_options={"port": PORT})
    serve.run(app, name="two", route_prefix="/")
    try:
        for _ in range(100):  # until each front knows of the other one
            known = {tuple(sorted(call("/stats", admin)[1]["fronts"])) for _ in range(8)}
            if len(known) == 1 and len(known.pop()) == 2:
                break
        else:
            pytest.fail("the fronts have not found each other")
        made: set[str] = set()
        while len({name[5:13] for name in made}) < 2:  # at both fronts
            status, answer = call("/v1/completions", admin, COMPLETION)
            assert status == 200
            made.add(answer["id"])
        for _ in range(6):  # at whichever front
            status, listed = call("/v1/requests", admin)
            assert listed["missing_fronts"] == []
            assert {each["id"] for each in listed["data"]} == made
            for name in made:
                assert call(f"/v1/requests/{name}", admin)[1]["outcome"] == "length"
        _, stats = call("/stats", admin)
        tags = {name.removeprefix("front-") for name in stats["fronts"]}
        assert tags == {name[5:13] for name in made}

        time.sleep(1)  # the fronts share limits by now
        statuses = [call("/v1/completions", few, COMPLETION)[0] for _ in range(5)]
        assert sorted(statuses) == [200] * 2 + [429] * 3

        [front, _] = [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if "#Front#" in each["name"]
        ]
        ray.kill(ray.get_actor(front, namespace="serve"))
        time.sleep(3)
        for _ in range(4):
            status, listed = call("/v1/requests", admin)
            assert (status, len(listed["missing_fronts"])) == (200, 1)
        statuses = [call("/v1/completions", few, COMPLETION)[0] for _ in range(4)]
        assert statuses.count(429) >= 3  # a front that has just begun may give its share, one
    finally:
        serve.shutdown()
