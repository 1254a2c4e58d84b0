"""Links between fronts and engines: whatever ends, every request has the tokens it has alone."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import pytest

from infer.cluster.ordered_stream import MISSING_S, CommandOrder
from infer.engine.commands import Add, Command, Reset, Stop
from infer.replicas.fleet import Fleet
from infer.replicas.host import MAX_QUEUED_BYTES, ReplicaHost
from infer.replicas.messages import (
    Commands,
    Draining,
    FrameBuffer,
    IsolatedStep,
    Outward,
    PromptScores,
    Ready,
    Report,
    ScoreCollector,
    decode_outward,
    frame_of,
)
from infer.replicas.routing import PrefixRouter
from infer.replicas.socket_link import link_items
from infer.types import Request, SamplingParams, StepOutput, TokenLogprobs
from infer.types.step_events import StepEvents
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.fleet_replicas import Caller, HashReplica
from tests.support.hash_engine import solo
from tests.support.linked_engines import LinkedEngine, Wire, over, remote
from tests.support.virtual_time import run_in_virtual_time
from tests.support.waits import until


def request(name: str, dice: random.Random, max_tokens: int = 60) -> Request:
    prompt = tuple(dice.randrange(50) for _ in range(dice.randrange(1, 60)))
    sampling = SamplingParams(temperature=dice.choice([0.0, 1.0]))
    return Request(name, prompt, sampling, dice.randrange(100), max_tokens)


def told(generation: int, *commands: Command) -> bytes:
    """What a front sends to have commands obeyed."""
    return frame_of(Commands(generation, commands))


def heard(frames: bytes | None) -> list[Outward]:
    """What a front has got."""
    assert frames is not None
    return [decode_outward(frame) for frame in FrameBuffer(frames).frames()]


class World:
    """Two fronts over three engines."""

    def __init__(self, num_engines: int = 3, num_fronts: int = 2) -> None:
        self.engines = [LinkedEngine(f"engine-{i}") for i in range(num_engines)]
        self.callers = [Caller() for _ in range(num_fronts)]
        self.fleets = []
        for i, caller in enumerate(self.callers):
            replicas = [remote(engine, f"front-{i}") for engine in self.engines]
            fleet = Fleet(replicas, router=PrefixRouter(), link_timeout_s=0.4, watch_s=0.05)
            fleet.start(caller.deliver, caller.died)
            self.fleets.append(fleet)
        until(lambda: all(fleet.is_ready for fleet in self.fleets))
        self.sent: list[tuple[int, Request]] = []

    def send(self, front: int, wanted: Request) -> None:
        self.sent.append((front, wanted))
        self.fleets[front].add(wanted)

    def finish(self) -> None:
        """Each request ends, with the tokens that it has alone."""
        until(lambda: all(r.request_id in self.callers[f].ends for f, r in self.sent))
        for front, wanted in self.sent:
            caller = self.callers[front]
            assert caller.ends[wanted.request_id].error is None
            assert caller.tokens[wanted.request_id] == solo(wanted, VOCAB_SIZE)
        assert all(
            engine.host.num_unfinished == 0 for engine in self.engines if not engine.has_gone
        )

    def stop(self) -> None:
        for fleet in self.fleets:
            fleet.stop()
        for engine in self.engines:
            engine.stop()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.stop()


@pytest.mark.parametrize(
    "fault", ["none", "process", "machine", "frozen", "stopped", "slow", "drain"]
)
def test_no_token_is_lost_or_changed(world: World, fault: str) -> None:
    dice = random.Random(fault)
    for number in range(24):
        world.send(number % 2, request(f"r{number}", dice))
    victim = next(each for each in world.engines if each.host.num_unfinished)
    until(lambda: any(caller.tokens for caller in world.callers))
    match fault:
        case "process":
            victim.die()
        case "machine":
            victim.has_gone = True
        case "frozen":
            victim.is_frozen = True
        case "stopped":  # the engine's process, not its machine
            with victim.lock:
                victim.engine.cut()
        case "slow":
            victim.host.detach("front-0")  # what a full queue does
        case "drain":
            with victim.lock:
                victim.host.drain(0.0)
    for number in range(24, 36):
        world.send(number % 2, request(f"r{number}", dice))
    if fault == "frozen":
        until(lambda: len([1 for _, r in world.sent if r.request_id in world.callers[0].ends]))
        victim.is_frozen = False
    if fault == "stopped":
        until(lambda: all(r.request_id in world.callers[f].ends for f, r in world.sent))
        replicas = [fleet.replicas[victim.engine.name] for fleet in world.fleets]
        assert not any(replica.is_ready for replica in replicas)
        with victim.lock:
            victim.engine.heal()
        until(lambda: all(replica.is_ready for replica in replicas))
        for number in range(36, 48):
            world.send(number % 2, request(f"r{number}", dice))
    world.finish()


def test_fronts_get_their_own_outputs_and_all_steps(world: World) -> None:
    dice = random.Random(1)
    for number in range(8):
        world.send(number % 2, request(f"r{number}", dice))
    world.finish()
    for front, caller in enumerate(world.callers):
        assert set(caller.ends) == {r.request_id for f, r in world.sent if f == front}


def test_a_front_that_has_gone_leaves_nothing_behind() -> None:
    world = World(num_engines=1)
    dice = random.Random(2)
    world.send(0, request("gone", dice, max_tokens=400))
    until(lambda: world.callers[0].tokens["gone"])
    world.fleets[0].stop()
    (engine,) = world.engines
    engine.host.detach("front-0")
    world.sent.clear()
    world.send(1, request("stays", dice))
    world.finish()
    world.stop()


def host_with_link() -> tuple[HashReplica, ReplicaHost]:
    replica = HashReplica("engine")
    host = ReplicaHost(replica)
    replica.start(host)
    return replica, host


def test_a_link_that_is_not_read_is_dropped_and_the_engine_goes_on() -> None:
    replica, host = host_with_link()
    slow = host.attach("slow", lambda: None)
    host.command("slow", told(1, Add(request("r", random.Random(3), 400))))
    big = StepEvents(1, 0.0, 0.0, 1, replica="x" * (MAX_QUEUED_BYTES // 20))
    for _ in range(25):
        host.reported(replica, 1, [], big)
    assert slow.is_closed
    assert host.num_unfinished == 0
    for _ in range(5):
        replica.step()
    assert replica.core is not None
    assert not replica.core.has_work


def test_fronts_know_at_once_what_is_computed_alone() -> None:
    replica, host = host_with_link()
    links = [host.attach(name, lambda: None) for name in ("a", "b")]
    for link in links:
        link.take()
    replica.isolated = "suspect"
    host.computes_isolated(replica)
    for link in links:
        assert heard(link.take()) == [IsolatedStep("suspect")]


def test_a_front_knows_the_silence_of_an_engine_whose_machine_lives(world: World) -> None:
    machine, replica = world.engines[0], world.fleets[0].replicas["engine-0"]
    with machine.lock:
        machine.engine.cut()
    until(lambda: replica.link_silence_s > 50)  # the engine says 99
    with machine.lock:
        machine.engine.heal()
    until(lambda: replica.link_silence_s < 50)


def test_commands_of_an_earlier_generation_are_ignored() -> None:
    replica, host = host_with_link()
    link = host.attach("front", lambda: None)
    dice = random.Random(4)
    host.command("front", told(1, Add(request("a", dice)), Reset()))
    host.command("front", told(1, Add(request("b", dice))))
    assert host.num_unfinished == 0
    replica.step()
    host.heartbeat()
    host.command("front", told(2, Add(request("c", dice))))
    assert host.num_unfinished == 1
    ready = [event.generation for event in heard(link.take()) if isinstance(event, Ready)]
    assert ready == [1, 2]
    assert link.take() is None


@pytest.mark.parametrize("end", ["reset", "reconnect"])
def test_outputs_under_way_do_not_count_for_the_same_request_sent_again(end: str) -> None:
    replica, host = host_with_link()
    link = host.attach("front", lambda: None)
    wanted = request("r", random.Random(5))
    host.command("front", told(1, Add(wanted)))
    replica.is_cut = True  # what it computes is on its way from now on
    replica.step()
    replica.step()
    if end == "reset":
        host.command("front", told(1, Reset()))
    else:
        link = host.attach("front", lambda: None)
    host.command("front", told(2, Add(wanted)))
    link.take()
    replica.heal()
    for _ in range(200):
        replica.step()
        host.heartbeat()
        events = heard(link.take())
        outputs = [it for event in events if isinstance(event, Report) for it in event.outputs]
        assert not outputs
        if any(isinstance(event, Ready) and event.generation == 2 for event in events):
            break
    host.command("front", told(2, Add(wanted)))
    for _ in range(200):
        replica.step()
    tokens = [
        output.token_id
        for event in heard(link.take())
        if isinstance(event, Report)
        for output in event.outputs
    ]
    assert tokens == solo(wanted, VOCAB_SIZE)


def test_commands_for_an_earlier_link_are_ignored() -> None:
    _, host = host_with_link()
    host.attach("front", lambda: None)
    host.attach("front", lambda: None)
    dice = random.Random(4)
    host.command("front", told(1, Add(request("late", dice))))
    assert host.num_unfinished == 0
    host.command("front", told(2, Add(request("now", dice))))
    assert host.num_unfinished == 1


def test_a_front_cannot_stop_an_engine_that_serves_others() -> None:
    replica, host = host_with_link()
    for name in ("front", "other"):
        host.attach(name, lambda: None)
    host.command("front", told(1, Stop()))
    host.command("other", told(2, Add(request("r", random.Random(9)))))
    assert host.num_unfinished == 1
    assert replica.is_alive


def test_the_bytes_of_a_link_may_be_cut_anywhere() -> None:
    engine = LinkedEngine("engine")

    class Cutting(Wire):
        def connect(self) -> Iterator[bytes]:
            for item in super().connect():
                yield from (item[i : i + 7] for i in range(0, len(item), 7))

    caller, fleet = Caller(), Fleet([over(Cutting(engine, "front"))])
    fleet.start(caller.deliver, caller.died)
    wanted = request("r", random.Random(11))
    fleet.add(wanted)
    until(lambda: "r" in caller.ends)
    assert caller.tokens["r"] == solo(wanted, VOCAB_SIZE)
    fleet.stop()
    engine.stop()


def test_commands_are_obeyed_in_the_order_in_which_they_were_sent() -> None:
    dice, order = random.Random(8), CommandOrder()
    order.arrived("front", 1, 3, b"of a link that has ended")
    numbers = list(range(50))
    dice.shuffle(numbers)
    obeyed: list[bytes] = []
    for number in numbers:
        obeyed += order.arrived("front", 2, number, b"%d" % number)
        assert order.arrived("front", 1, number, b"late") == []
    assert obeyed == [b"%d" % number for number in range(50)]
    assert order.arrived("other", 1, 0, b"x") == [b"x"]


def test_a_command_that_never_comes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    order = CommandOrder()
    assert order.arrived("front", 1, 0, b"") == [b""]
    now_s += 2 * MISSING_S  # nothing is missing
    assert order.incomplete() == []
    assert order.arrived("front", 1, 1, b"") == [b""]
    assert order.arrived("front", 1, 3, b"") == []
    assert order.incomplete() == []
    now_s += 1.01 * MISSING_S
    assert order.incomplete() == ["front"]
    assert order.incomplete() == []


def test_an_engine_that_drains_takes_no_front() -> None:
    _, host = host_with_link()
    host.drain(3.0)
    events = heard(host.attach("late", lambda: None).take())
    assert Draining(3.0) in events
    assert not any(isinstance(event, Ready) for event in events)


def test_each_front_hears_what_is_done_for_the_others() -> None:
    replica, host = host_with_link()
    links = [host.attach(name, lambda: None) for name in ("a", "b")]
    host.command("b", told(2, Add(request("r", random.Random(5)))))
    for _ in range(3):
        replica.step()
    loads = []
    for link in links:
        reports = [event for event in heard(link.take()) if isinstance(event, Report)]
        assert reports[-1].step_events is not None
        loads.append(reports[-1].step_events.foreign_load)
    assert loads[0] is not None
    assert loads[1] is not None
    assert (loads[0].num_running, loads[1].num_running) == (1, 0)


def test_items_hold_all_that_has_happened_since_the_last() -> None:
    async def go() -> list[int]:
        replica, host = host_with_link()
        items = link_items(host, "front")
        sizes = [len(heard(await anext(items)))]
        host.command("front", told(1, Add(request("r", random.Random(6)))))
        for _ in range(4):
            replica.step()
        sizes.append(len(heard(await anext(items))))
        host.detach("front")
        with pytest.raises(StopAsyncIteration):
            await anext(items)
        return sizes

    assert asyncio.run(go()) == [2, 4]


def test_steps_within_the_interval_share_an_item() -> None:
    async def go() -> tuple[list[float], list[int]]:
        replica, host = host_with_link()
        items = link_items(host, "front", every_s=1.0)
        await anext(items)
        host.command("front", told(1, Add(request("r", random.Random(6)))))
        loop = asyncio.get_running_loop()
        came_s, sizes = [loop.time()], []
        for num_steps in (3, 1):
            replica.step()
            following: asyncio.Future[bytes] = asyncio.ensure_future(anext(items))
            await asyncio.sleep(0.05)
            assert not following.done()
            for _ in range(num_steps):
                replica.step()
            sizes.append(len(heard(await following)))
            came_s.append(loop.time())
        await asyncio.sleep(1.1)  # nothing waits where steps take longer
        replica.step()
        came_s.append(loop.time())
        await anext(items)
        came_s.append(loop.time())
        return came_s, sizes

    came_s, sizes = run_in_virtual_time(go())
    assert sizes == [4, 2]
    assert came_s == pytest.approx([0, 1, 2, 3.1, 3.1])


def test_times_are_those_of_this_machine() -> None:
    engine = LinkedEngine("engine")

    class Shifted(Wire):
        def offset_s(self) -> float:
            return 1000.0

    times: list[float] = []

    class Listening(Caller):
        def deliver(self, outputs, step_events) -> None:  # type: ignore[no-untyped-def]
            super().deliver(outputs, step_events)
            if step_events is not None:
                times.append(step_events.started_s)

    began_s, caller = time.monotonic(), Listening()
    fleet = Fleet([over(Shifted(engine, "front"))])
    fleet.start(caller.deliver, caller.died)
    wanted = request("r", random.Random(7))
    fleet.add(wanted)
    until(lambda: "r" in caller.ends)
    assert caller.tokens["r"] == solo(wanted, VOCAB_SIZE)
    assert all(started_s > began_s + 999 for started_s in times)
    fleet.stop()
    engine.stop()


def test_log_probabilities_of_prompts_cross_a_link() -> None:
    replica, host = host_with_link()
    link = host.attach("front", lambda: None)
    wanted = Request("r", (1, 2, 3), SamplingParams(prompt_logprobs=1), 0, 2)
    host.command("front", told(1, Add(wanted)))
    for _ in range(4):
        replica.step()
    collector, outputs = ScoreCollector(), list[StepOutput]()
    for event in heard(link.take()):
        if isinstance(event, PromptScores):
            collector.add(event)
        elif isinstance(event, Report):
            outputs += collector.complete(event.outputs)
    scores = outputs[0].prompt_logprobs
    assert scores is not None
    assert list(scores)[-2:] == [TokenLogprobs(-0.5, ((0, -0.5),))] * 2
