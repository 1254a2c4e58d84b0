"""Several fronts on a real Ray: `pytest -m cluster` in the environment that has it.

The first test needs no model: the actor that fronts share, found, killed and made again. The others
start an application with the model that ships, with two fronts and with four.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infer.server.front_relay import RelayedPeers
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.tenancy.limit_messages import LimitAsk
from tests.support.json_client import call
from tests.support.postgresql import postgresql
from tests.support.server_process import Findings
from tests.support.serving import CHAT
from tests.support.tenants import make
from tests.support.waits import until_async

ray = pytest.importorskip("ray", reason="pip install -e '.[cluster]'")

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


def test_the_shared_actor_is_found_and_made_again(started: None) -> None:
    from infer.cluster.shared_fronts import SharedFronts

    ask = LimitAsk("key", "requests", 100, 1)

    async def main() -> None:
        shared = [SharedFronts("alone", 2) for _ in range(2)]
        names = ["front-00000001", "front-00000002"]
        both = zip(names, shared, strict=True)
        limits = [FrontLimits(name, 2, each.sync) for name, each in both]
        peers = [RelayedPeers(*each) for each in zip(names, shared, strict=True)]
        for each in limits:
            each.start()
        serving = [asyncio.ensure_future(each.serve(lambda said: said + b"!")) for each in peers]
        await until_async(lambda: all(each.is_connected for each in limits))
        took_s = []
        for index in range(60):
            began_s = time.monotonic()
            verdict = await limits[index % 2].acquire(ask)
            took_s.append(time.monotonic() - began_s)
            assert verdict.is_granted
        print(f"a decision took {1000 * sorted(took_s)[30]:.1f} ms in the middle")
        assert await peers[0].ask(b"?", 5) == {names[1]: b"?!"}

        kill_shared("alone")
        granted = [(await limits[index % 2].acquire(ask)).is_granted for index in range(60)]
        assert 36 <= sum(granted) <= 50  # 40 were left, and a few have come since
        began_s = time.monotonic()
        await until_async(lambda: all(each.is_connected for each in limits), 30)
        pause_s = time.monotonic() - began_s
        print(f"fronts shared limits again {pause_s:.1f} s later")
        granted = [(await limits[index % 2].acquire(ask)).is_granted for index in range(60)]
        assert sum(granted) <= 5 + 2 * pause_s  # the new one knows what has been used
        while await peers[1].ask(b"?", 5) != {names[0]: b"?!"}:
            await asyncio.sleep(0.1)
        for each in limits:
            await each.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    asyncio.run(main())


@contextlib.contextmanager
def served(
    name: str, num_fronts: int, file: Path, admin: dict[str, str], **settings: str
) -> Iterator[None]:
    """An application with one engine, once its fronts have found each other."""
    from ray import serve

    import infer.cluster

    arguments = {"replicas": "1", "fronts": str(num_fronts), "cpus": "1", "api_keys": str(file)}
    serve.start(http_options={"port": PORT})
    serve.run(infer.cluster.app({**arguments, **settings}), name=name, route_prefix="/")
    try:
        for _ in range(100):  # until each front knows of the others
            known = {
                tuple(sorted(call(PORT, "/stats", headers=admin)[1]["fronts"])) for _ in range(12)
            }
            if len(known) == 1 and len(known.pop()) == num_fronts:
                break
        else:
            pytest.fail("the fronts have not found each other")
        yield
    finally:
        serve.shutdown()


def test_two_fronts_are_as_one(started: None, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    admin = make(file, "admin", admin=True)
    few = make(file, "few", requests_per_minute=2)
    with served("two", 2, file, admin):
        made: set[str] = set()
        while len({name[5:13] for name in made}) < 2:  # at both fronts
            status, answer = call(PORT, "/v1/completions", COMPLETION, headers=admin)
            assert status == 200
            made.add(answer["id"])
        for _ in range(6):  # at whichever front
            status, listed = call(PORT, "/v1/requests", headers=admin)
            assert listed["missing_fronts"] == []
            assert {each["id"] for each in listed["data"]} == made
            for name in made:
                assert call(PORT, f"/v1/requests/{name}", headers=admin)[1]["outcome"] == "length"
        _, stats = call(PORT, "/stats", headers=admin)
        tags = {name.removeprefix("front-") for name in stats["fronts"]}
        assert tags == {name[5:13] for name in made}

        time.sleep(1)  # the fronts share limits by now
        statuses = [call(PORT, "/v1/completions", COMPLETION, headers=few)[0] for _ in range(5)]
        assert sorted(statuses) == [200] * 2 + [429] * 3

        [front, _] = [
            each["name"]
            for each in ray.util.list_named_actors(all_namespaces=True)
            if "#Front#" in each["name"]
        ]
        ray.kill(ray.get_actor(front, namespace="serve"))
        time.sleep(3)
        for _ in range(4):
            status, listed = call(PORT, "/v1/requests", headers=admin)
            assert (status, len(listed["missing_fronts"])) == (200, 1)
        statuses = [call(PORT, "/v1/completions", COMPLETION, headers=few)[0] for _ in range(4)]
        assert statuses.count(429) >= 3  # a front that has just begun may give its share, one


class Client:
    """Threads that send one request after another with a key, as long as they are let in often
    enough: after a refusal they wait for 0.1 s."""

    def __init__(self, key: dict[str, str], body: dict[str, Any], num_threads: int) -> None:
        self._key, self._body = key, body
        self._has_ended = threading.Event()
        self.began_s = time.monotonic()
        self.taken: list[tuple[float, int]] = []
        """When each granted request had its answer, and its tokens."""
        self.fronts: set[str] = set()
        """The fronts that have let it in."""
        self.num_refused = 0
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        for each in self._threads:
            each.start()

    def _run(self) -> None:
        while not self._has_ended.is_set():
            status, answer = call(PORT, "/v1/completions", self._body, headers=self._key)
            if status == 200:
                self.taken.append((time.monotonic(), answer["usage"]["total_tokens"]))
                self.fronts.add(answer["id"][5:13])
            else:
                assert status == 429, answer
                self.num_refused += 1
                time.sleep(0.1)

    def end(self) -> None:
        """Stop; what runs is finished."""
        self._has_ended.set()
        for each in self._threads:
            each.join()

    def share(self, per_minute: int, index: int, until_s: float) -> float:
        """What was let in until a moment, in relation to what the key's limit allows: a minute's
        at once, and the rate from then on. `index`: 0 counts requests, 1 tokens."""
        had = [1 if index == 0 else tokens for when_s, tokens in self.taken if when_s <= until_s]
        return sum(had) / (per_minute * (1 + (until_s - self.began_s) / 60))


REQUESTS, TOKENS = 600, 60_000
"""A minute."""
LIMITED_S = 75.0
"""Seconds for which two clients want more than their limits."""


@pytest.mark.timeout(900)
def test_four_fronts_have_one_limit_and_one_memory(started: None, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    admin = make(file, "admin", admin=True)
    limits = {"requests_per_minute": REQUESTS, "tokens_per_minute": TOKENS}
    keys = {name: make(file, name, **limits) for name in ("short", "long", "short 2", "long 2")}
    short = {**COMPLETION, "max_tokens": 1}
    long = {**short, "prompt": "Once upon a time " * 100}
    with (
        postgresql() as database,
        served("four", 4, file, admin, sessions=database % "postgres", max_seq_len="1024"),
    ):
        session = call(PORT, "/v1/sessions", {}, headers=admin)[1]["id"]
        turn = {
            **{"model": "infer-demo", "session_id": session, "max_tokens": 40, "temperature": 0},
            "messages": [{"role": "user", "content": "Tell me of the fox."}],
        }
        answers: set[int] = set()
        num_turns = 0
        for _ in range(12):  # two turns at once, at whichever fronts
            with ThreadPoolExecutor(2) as two:
                got = list(two.map(lambda _: call(PORT, CHAT, turn, headers=admin)[0], range(2)))
            num_turns += got.count(200)
            answers.update(got)
        assert answers == {200, 409}
        kept = call(PORT, f"/v1/sessions/{session}", headers=admin)[1]["messages"]
        assert len(kept) == 2 * num_turns

        found = {}
        for suffix, is_killed in (("", False), (" 2", True)):
            clients = [
                Client(keys["short" + suffix], short, 6),
                Client(keys["long" + suffix], long, 4),
            ]
            time.sleep(LIMITED_S / 2)
            if is_killed:
                kill_shared("four")
            time.sleep(LIMITED_S / 2)
            until_s = time.monotonic()
            for each in clients:
                each.end()
            assert all(len(each.fronts) == 4 and each.num_refused > 50 for each in clients)
            found[is_killed] = (
                clients[0].share(REQUESTS, 0, until_s),
                clients[1].share(TOKENS, 1, until_s),
            )
    shares = {name: [round(each, 3) for each in found[name]] for name in found}
    Findings().note(
        "C3",
        "a key's limits over four fronts on Ray",
        f"{REQUESTS} requests and {TOKENS:,} tokens a minute; short requests and long ones for"
        f" {LIMITED_S:.0f} s, PostgreSQL for sessions",
        **{
            "let in, of what the limit allows (requests, tokens)": shares[False],
            "the same with the shared actor killed": shares[True],
            "turns of a session at once": "one 200, the other 409",
        },
        at_most={
            "from the limit [%]": (
                round(100 * max(abs(each - 1) for each in found[False]), 1),
                2.0,
            ),
            "let in with the actor killed": (max(shares[True]), 1.25),
        },
    )
    print(shares)
    assert all(0.98 <= each <= 1.02 for each in found[False])
    assert max(found[True]) <= 1.25
