"""The cluster on a real Ray: `pytest -m cluster` in the environment that has it.

Ray runs on this machine with a head and three nodes of one core each, and the model that ships.
Whatever dies or stops, streams go on with the same text, tokens and log-probabilities.
`INFER_CLUSTER_ROUNDS` is the number of times that each kind of death is tried (1), and
`INFER_CLUSTER_STREAMS` the number of streams under which they happen (21). With
`RAY_SERVE_ENABLE_HA_PROXY=1` clients reach the front through HAProxy, else through Ray's own proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_client import call
from tests.support.ray_cluster import ACTOR, ENGINE, GCS, REPLICA, STANDBY, RayCluster, ray_cluster
from tests.support.server_process import Findings
from tests.support.stream_client import StreamHeard, stream

pytest.importorskip("ray", reason="pip install -e '.[cluster]'")

NUM_ROUNDS = int(os.environ.get("INFER_CLUSTER_ROUNDS", "1"))
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2400 + 600 * NUM_ROUNDS),
    pytest.mark.filterwarnings("default"),  # Ray and what it brings have warnings of their own
]
PORT = 8123
LINK_TIMEOUT_S = 5.0
NUM_STREAMS = int(os.environ.get("INFER_CLUSTER_STREAMS", "21"))
WITHOUT_GCS_S = 60.0
"""Seconds after the death of its GCS at which Ray ends its other processes."""
GCS_LOST_S = 2 * WITHOUT_GCS_S
"""Seconds for which requests are sent at most after the GCS was killed."""
PROXY = "HAProxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "Ray's own proxy"
POISON = 1_000_003
"""Requests with this seed end the engine by a segmentation fault with their third token."""
ARGUMENTS = {
    **{"replicas": "3", "insecure": "true", "routing": "least", "max_seq_len": "1024"},
    **{"max_batch_size": "64", "link_timeout_s": str(LINK_TIMEOUT_S)},
}
ENVIRONMENT = {
    "INFER_WRAP_CORE": "tests.support.faults:wrapped",
    "INFER_FAULT_SLOW_STEP_MS": "8",  # streams that last a few seconds, and time for the others
    "INFER_FAULT_SEEDS": f"{POISON}:crash",
}


HISTORY = [
    {"role": "user", "content": "Tell me of the fox."},
    {"role": "assistant", "content": "The fox lived by the river."},
]
"""The messages of a session before its turn."""
WEATHER = {
    "type": "object",
    "properties": {"place": {"type": "string", "minLength": 700, "maxLength": 800}},
    "required": ["place"],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]


def bodies(count: int = NUM_STREAMS, max_tokens: int = 350) -> list[dict[str, Any]]:
    """Greedy, sampled, with log-probabilities, two choices, a grammar, a call of a tool, a turn of
    a session (`session_id` is not yet that of one)."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 0.9, "n": 2},
        {"temperature": 0.8, "guided_regex": "[a-z ,.]{900}", "ignore_eos": False},
        {"temperature": 0.8, "tools": TOOLS, "tool_choice": "required", "ignore_eos": False},
        {"temperature": 0.8, "session_id": "new"},
    ]
    common = {"model": "infer-demo", "max_tokens": max_tokens, "ignore_eos": True}
    result = []
    for i in range(count):
        kind, text = kinds[i % len(kinds)], f"Once upon a time {i} foxes"
        chats = "tools" in kind or "session_id" in kind
        asked = {"messages": [{"role": "user", "content": text}]} if chats else {"prompt": text}
        result.append({**common, **asked, "seed": i + 1, **kind})
    return result


async def hear(body: dict[str, Any], heard: StreamHeard) -> StreamHeard:
    """A stream; one with a session is a turn of a new one, which is deleted afterwards."""
    if "session_id" not in body:
        return await stream(PORT, body, heard)
    _, session = await asyncio.to_thread(call, PORT, "/v1/sessions", {"messages": HISTORY})
    path = f"/v1/sessions/{session['id']}"
    await stream(PORT, {**body, "session_id": session["id"]}, heard)
    _, kept = await asyncio.to_thread(call, PORT, path)
    heard.session = kept["messages"]
    await asyncio.to_thread(call, PORT, path, method="DELETE")
    return heard


class Crowd:
    """Streams that run at the same time, and what they have to say."""

    def __init__(self, wanted: list[dict[str, Any]]) -> None:
        self.heard = [StreamHeard() for _ in wanted]
        self._tasks = [
            asyncio.create_task(hear(body, heard))
            for body, heard in zip(wanted, self.heard, strict=True)
        ]
        # A call of a tool is one event, after that of the role.
        self._num_begun = [1 if "tools" in body else 2 for body in wanted]

    async def until_all_have_begun(self) -> None:
        """Wait until every stream has said something."""
        async with asyncio.timeout(60):
            while any(
                len(heard.times_s) < count
                for heard, count in zip(self.heard, self._num_begun, strict=True)
            ):
                await asyncio.sleep(0.01)

    async def answers(self) -> list[tuple[Any, ...]]:
        """The answers, when all have ended."""
        async with asyncio.timeout(180):
            await asyncio.gather(*self._tasks)
        return [heard.answer for heard in self.heard]

    def longest_pause_s(self, since_s: float) -> float:
        """The longest pause, after a moment, of a stream that says what it has at once."""
        pairs = zip(self.heard, self._num_begun, strict=True)
        return max(heard.pause_s(since_s) for heard, count in pairs if count > 1)


async def submitted() -> dict[str, int]:
    """Number of requests that each engine has had; none are named while there is only one."""
    _, stats = await asyncio.to_thread(call, PORT, "/stats")
    return {name: each["num_submitted"] for name, each in stats.get("replicas", {}).items()}


async def num_restarts() -> int:
    """How often engines' processes were started again."""
    _, stats = await asyncio.to_thread(call, PORT, "/stats")
    count: int = stats["engine"]["num_restarts"]
    return count


async def until_all_serve(count: int, timeout_s: float = 120) -> None:
    """Wait until so many engines take requests."""
    brief = {**bodies(1)[0], "max_tokens": 4}
    async with asyncio.timeout(timeout_s):
        while True:
            before = await submitted()
            await Crowd([brief] * 3 * count).answers()
            await asyncio.sleep(1.3)  # engines say once a second what they have had
            after = await submitted()
            if sum(n > before.get(name, n) for name, n in after.items()) == count:
                return


async def until_all_have_standbys(cluster: RayCluster) -> None:
    """Wait until each engine has a process that can take its place at once."""
    async with asyncio.timeout(120):
        while len(cluster.pids(STANDBY)) < len(cluster.pids(ENGINE)):
            await asyncio.sleep(0.2)


async def serves_since(began_s: float) -> float:
    """Seconds since `began_s` until a brief request gets no answer; `GCS_LOST_S` at most."""
    brief = {**bodies(1)[0], "max_tokens": 4}
    while (now_s := time.monotonic() - began_s) < GCS_LOST_S:
        try:
            async with asyncio.timeout(10):
                heard = await stream(PORT, brief, StreamHeard())
        except (OSError, TimeoutError):
            return now_s
        if not heard.is_done:
            return now_s
        await asyncio.sleep(0.5)
    return now_s


def kill_one_of(find: Callable[[RayCluster], list[int]], number: int = signal.SIGKILL) -> Any:
    """What sends a signal to one of the processes that `find` finds; returns its id."""

    def act(cluster: RayCluster, dice: random.Random) -> int:
        pid = dice.choice(find(cluster))
        os.kill(pid, number)
        return pid

    return act


def kill_all_engines(cluster: RayCluster, dice: random.Random) -> int:
    """End the processes of all engines."""
    for pid in cluster.pids(ENGINE):
        os.kill(pid, signal.SIGKILL)
    return 0


GCS_KILLED = "Ray's GCS is killed"
ALL_KILLED = "all engines' processes are killed"
DEATHS = {
    ALL_KILLED: kill_all_engines,
    "an engine's process is killed": kill_one_of(lambda c: c.pids(ENGINE)),
    "an engine's actor is killed": kill_one_of(lambda c: c.pids(ACTOR)),
    "a Serve replica is killed": kill_one_of(lambda c: c.pids(REPLICA)),
    "a node's raylet is killed": kill_one_of(lambda c: c.nodes_of_engines()),
    "an engine's process is stopped": kill_one_of(lambda c: c.pids(ENGINE), signal.SIGSTOP),
    "an engine's actor is stopped": kill_one_of(lambda c: c.pids(ACTOR), signal.SIGSTOP),
    "a Serve replica is stopped": kill_one_of(lambda c: c.pids(REPLICA), signal.SIGSTOP),
    GCS_KILLED: kill_one_of(lambda c: c.pids(GCS)),
}


class Rounds:
    """Deaths under running streams, and what they have cost."""

    def __init__(self, max_tokens: int = 350) -> None:
        self._dice = random.Random(25)
        self._wanted = bodies(max_tokens=max_tokens)
        self._calm: list[tuple[Any, ...]] = []
        self.num_streams = 0
        self.num_wrong = 0
        self.num_early = 0
        """Streams that had ended before the death."""
        self.calm_pause_s = 0.0
        """The longest pause of a stream without a death."""
        self.pauses_s: dict[str, list[float]] = {}
        self.back_s: dict[str, list[float]] = {}
        """Seconds until the streams had ended and all engines served again."""
        self.taken_by_poison: list[int] = []
        """Engines that a request took with it."""
        self.without_gcs_s: list[float] = []
        """Seconds for which requests were answered after the GCS was killed."""

    async def begin(self) -> None:
        """Hear the streams undisturbed, before the first death."""
        await until_all_serve(3)
        crowd = Crowd(self._wanted)
        self._calm = await crowd.answers()
        assert all(answer[:3] == (200, None, True) for answer in self._calm), self._calm
        for body, heard in zip(self._wanted, crowd.heard, strict=True):
            assert bool(heard.choices[0].calls) == ("tools" in body), heard
            told = [message["content"] for message in (heard.session or [])[2:]]
            asked = [each["content"] for each in body["messages"]] if "session_id" in body else []
            assert told == [*asked, *[heard.choices[0].text] * len(asked)], heard
        self.calm_pause_s = crowd.longest_pause_s(0.0)

    async def run(self, cluster: RayCluster, kind: str) -> None:
        """A death of a kind under streams."""
        if kind == ALL_KILLED:
            await until_all_have_standbys(cluster)
        crowd = Crowd(self._wanted)
        await crowd.until_all_have_begun()
        await asyncio.sleep(self._dice.uniform(0, 1.0))
        pid = DEATHS[kind](cluster, self._dice)
        killed_s = time.monotonic()
        answers = await crowd.answers()
        self.num_early += sum(heard.times_s[-1] < killed_s for heard in crowd.heard)
        wrong = [
            (body, heard)
            for body, heard, calm in zip(self._wanted, answers, self._calm, strict=True)
            if heard != calm
        ]
        print(f"{kind}: pause {crowd.longest_pause_s(killed_s):.2f} s, {len(wrong)} wrong")
        for body, heard in wrong[:2]:
            print(body, heard)
        self.num_streams += len(answers)
        self.num_wrong += len(wrong)
        self.pauses_s.setdefault(kind, []).append(crowd.longest_pause_s(killed_s))
        if kind == GCS_KILLED:
            if not self.without_gcs_s:
                self.without_gcs_s.append(await serves_since(killed_s))
            return
        if "stopped" in kind:
            os.kill(pid, signal.SIGCONT)
        if "raylet" in kind:
            await asyncio.to_thread(cluster.add_node)
        await until_all_serve(3)
        took_s = time.monotonic() - killed_s
        print(f"{kind}: three engines again after {took_s:.1f} s")
        self.back_s.setdefault(kind, []).append(took_s)

    async def poison(self) -> None:
        """A request that ends the engines that compute it, beside others."""
        before = await num_restarts()
        crowd = Crowd(self._wanted)
        heard = await stream(PORT, {**self._wanted[0], "seed": POISON}, StreamHeard())
        answers = await crowd.answers()
        await asyncio.sleep(1.3)  # engines say once a second how often they were started again
        assert heard.error is not None
        assert "died more than once" in heard.error["message"]
        self.taken_by_poison.append(await num_restarts() - before)
        print(f"a poisonous request took {self.taken_by_poison[-1]} engines with it")
        self.num_streams += len(answers)
        self.num_wrong += sum(a != b for a, b in zip(answers, self._calm, strict=True))
        await until_all_serve(3)

    def note(self, what: str) -> None:
        """Write what was counted to the scorecard, then hold the bounds."""
        kinds = [kind for kind in DEATHS if kind in self.pauses_s]
        bounds = {
            kind: 2.0 + (LINK_TIMEOUT_S if "stopped" in kind else 0.0)
            for kind in kinds
            if kind != ALL_KILLED  # without an engine, streams wait for one
        }
        beside: dict[str, Any] = {}
        at_most = {
            f"pause when {kind} [s]": (round(max(self.pauses_s[kind]), 2), bound)
            for kind, bound in bounds.items()
        }
        if self.taken_by_poison:
            taken = self.taken_by_poison
            beside["engines that a poisonous request took with it"] = taken
            at_most["engines that a poisonous request took"] = (max(taken), 2)
        if self.without_gcs_s:
            beside[
                f"seconds for which requests were answered without a GCS, at most {GCS_LOST_S:.0f}"
            ] = [round(each) for each in self.without_gcs_s]
        Findings().note(
            "C2",
            what,
            f"Ray, a head and three nodes, 3 engines, {NUM_STREAMS} streams in each round, shipped"
            " model: greedy, sampled, log-probabilities, n = 2, grammar, call of a tool, session;"
            f" through {PROXY}",
            streams=self.num_streams,
            **{
                "lost, refused or different": self.num_wrong,
                "ended before the death": self.num_early,
                "longest pause of a stream undisturbed [s]": round(self.calm_pause_s, 2),
                **{
                    f"{kind}: rounds, pause of the median / worst round [s]": (
                        len(self.pauses_s[kind]),
                        round(statistics.median(self.pauses_s[kind]), 2),
                        round(max(self.pauses_s[kind]), 2),
                    )
                    for kind in kinds
                },
                **beside,
                **{
                    f"{kind}: until three engines serve again, worst [s]": round(max(each), 1)
                    for kind, each in self.back_s.items()
                },
            },
            at_most=at_most,
        )
        assert self.num_wrong == 0
        assert self.num_early <= self.num_streams / 100
        assert max(self.taken_by_poison, default=0) <= 2


def started(log: Path) -> contextlib.AbstractContextManager[RayCluster]:
    """A cluster with three engines."""
    environment = {**ENVIRONMENT, "XDG_STATE_HOME": str(log.parent)}  # for sessions
    return ray_cluster(log, ARGUMENTS, port=PORT, environment=environment)


def check_refusals(cluster: RayCluster) -> None:
    """What this cluster, which has three cores, no token and another address than 127.0.0.1, does
    not take."""
    for arguments, message in (
        ({"replicas": "4", "insecure": "true"}, "4 engines with cpus=1 do not fit"),
        ({"cpus": "2", "insecure": "true"}, "; 0 do"),
        ({"api_keys": "/keys.json"}, "has no token"),
    ):
        assert message in cluster.ask(f"refused {json.dumps(arguments)}")


def test_nothing_is_lost_whatever_dies(tmp_path: Path) -> None:
    rounds = Rounds()

    async def body(cluster: RayCluster) -> None:
        await rounds.begin()
        for _ in range(NUM_ROUNDS):
            await rounds.poison()
            for kind in DEATHS:
                if kind != GCS_KILLED:
                    await rounds.run(cluster, kind)

    with started(tmp_path / "log") as cluster:
        check_refusals(cluster)
        asyncio.run(body(cluster))
    rounds.note("deaths in a cluster")


def test_streams_outlive_the_gcs(tmp_path: Path) -> None:
    rounds = Rounds(max_tokens=150)  # they end within `WITHOUT_GCS_S`

    async def body(cluster: RayCluster) -> None:
        await (until_all_serve(3) if rounds.num_streams else rounds.begin())
        await rounds.run(cluster, GCS_KILLED)

    for number in range(NUM_ROUNDS):  # each with a cluster of its own
        with started(tmp_path / f"log {number}") as cluster:
            asyncio.run(body(cluster))
    rounds.note("the death of a cluster's GCS")


SCALING = {
    **{**ARGUMENTS, "replicas": "1-3", "max_batch_size": "4"},
    **{"scale_delay_s": "2", "shrink_delay_s": "2", "drain_timeout_s": "2"},
}
SCALE_UP_S, DRAIN_S = 30.0, 5.0


class Load:
    """Clients that repeat their streams, and what did not come as it does undisturbed."""

    def __init__(self, wanted: list[dict[str, Any]], calm: list[tuple[Any, ...]]) -> None:
        self._wanted, self._calm = wanted, calm
        self._tasks: list[asyncio.Task[None]] = []
        self._num_clients = 0
        self.num_streams = 0
        self.num_wrong = 0

    def set(self, num_clients: int) -> None:
        """Have so many clients; those that are too many finish their streams."""
        for number in range(self._num_clients, num_clients):
            self._tasks.append(asyncio.create_task(self._repeat(number)))
        self._num_clients = num_clients

    async def _repeat(self, number: int) -> None:
        which = number % len(self._wanted)
        while number < self._num_clients:
            heard = await stream(PORT, self._wanted[which], StreamHeard())
            self.num_streams += 1
            if heard.answer != self._calm[which]:
                self.num_wrong += 1
                print("wrong:", heard.answer)

    async def end(self) -> None:
        """Wait for the streams that run."""
        self.set(0)
        await asyncio.gather(*self._tasks)


async def until_three_have_served(began_s: float) -> float:
    """Seconds since `began_s` until each of three engines has had requests."""
    while True:
        if sum(count > 0 for count in (await submitted()).values()) == 3:
            return time.monotonic() - began_s
        assert time.monotonic() < began_s + 120, "there are no three engines"
        await asyncio.sleep(0.3)


async def until_one_is_left(cluster: RayCluster) -> tuple[float, float]:
    """Seconds until one engine is left, and for how long others ended at most."""
    began_s = ending_s = time.monotonic()
    longest_s = 0.0
    while True:
        states = await asyncio.to_thread(cluster.ask, "states")
        now_s = time.monotonic()
        if states.get("STOPPING"):
            longest_s = max(longest_s, now_s - ending_s)
        else:
            ending_s = now_s
        if states == {"RUNNING": 1}:
            return now_s - began_s, longest_s
        assert now_s < began_s + 120, states
        await asyncio.sleep(0.2)


def test_engines_follow_the_load(tmp_path: Path) -> None:
    wanted = [each for i, each in enumerate(bodies(5, 200)) if i in (0, 2, 4)]

    async def body(cluster: RayCluster) -> tuple[Load, float, float, float]:
        calm = await Crowd(wanted).answers()
        assert all(answer[:3] == (200, None, True) for answer in calm)
        load, began_s = Load(wanted, calm), time.monotonic()
        load.set(18)
        up_s = await until_three_have_served(began_s)
        load.set(3)  # they run while the others drain
        down_s, drain_s = await until_one_is_left(cluster)
        await load.end()
        return load, up_s, down_s, drain_s

    environment = {
        **ENVIRONMENT,
        "INFER_FAULT_SLOW_STEP_MS": "30",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
        "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
    }
    log = tmp_path / "log"
    with ray_cluster(log, SCALING, port=PORT, cores=[3], environment=environment) as cluster:
        load, up_s, down_s, drain_s = asyncio.run(body(cluster))
    Findings().note(
        "C2",
        "scaling",
        "1 to 3 engines of 4 seats; 3, 18, then 3 clients; delays, intervals and drains 2 s",
        streams=load.num_streams,
        **{
            "lost, refused or different": load.num_wrong,
            "until all three served [s]": round(up_s, 1),
            "back to one [s]": round(down_s, 1),
            "an engine's end, longest [s]": round(drain_s, 1),
        },
        at_most={
            "three serve [s]": (round(up_s, 1), SCALE_UP_S),
            "an engine's end [s]": (round(drain_s, 1), DRAIN_S),
        },
    )
    print(load.num_streams, load.num_wrong, up_s, down_s, drain_s)
    assert load.num_wrong == 0
