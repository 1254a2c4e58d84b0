"""The keeper of the cache's memory, with a clock and a room that the test decides about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from infer.config import SchedulerConfig
from infer.engine.core import EngineCore
from infer.engine.memory_keeper import PERIODS, MemoryKeeper, Pool
from infer.memory_pressure import MARGIN_BYTES, PRESSED_BYTES, MemoryRoom, margin
from infer.schedule.page_allocator import PageAllocator, Run
from infer.schedule.scheduler import Scheduler
from infer.types import Request, SamplingParams
from tests.support.hash_engine import HashRunner, solo

PAGE, VOCAB, LENGTH = 4, 97, 80
GIB = 1 << 30


class Cells:
    """The memory of a `HashRunner`: what is given back is gone."""

    page_bytes, num_tensors = 1 << 20, 2

    def __init__(self, runner: HashRunner) -> None:
        self.runner = runner
        self.num_calls = 0

    def release(self, runs: Sequence[Run]) -> None:
        self.num_calls += 1
        for first, count in runs:
            for page in range(first, first + count):
                self.runner.cells[page] = [None] * PAGE


class World:
    """An engine whose memory is what the test says."""

    def __init__(self, *, keep_s: float = 40.0, pages: int = 400, seats: int = 8) -> None:
        self.now_s, self.free = 0.0, 100 * GIB
        self.allocator = PageAllocator(pages + 1, PAGE, low_water=0)
        config = SchedulerConfig(
            max_batch_size=seats, max_num_batched_tokens=64, max_seq_len=LENGTH
        )
        scheduler = Scheduler(config, self.allocator, lambda: self.now_s)
        runner = HashRunner(pages + 1, PAGE, VOCAB)
        self.cells = Cells(runner)
        self.keeper = MemoryKeeper(
            Pool(self.allocator, self.cells), scheduler, lambda: self.free, keep_s=keep_s
        )
        self.core = EngineCore(scheduler, runner, keeper=self.keeper)
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}

    def add(self, number: int, prompt: int = 40, tokens: int = 30) -> None:
        request = Request(
            f"r{number}", tuple((number + i) % VOCAB for i in range(prompt)),
            SamplingParams(temperature=0), 0, tokens,
        )  # fmt: skip
        self.wanted[request.request_id] = solo(request, VOCAB)
        self.got[request.request_id] = []
        self.core.add(request)

    def step(self) -> None:
        self.now_s += 1.0
        for output in self.core.step():
            assert output.token_id is not None
            self.got[output.request_id].append(output.token_id)
        self.core.scheduler.check()

    def finish(self) -> None:
        while self.core.has_work:
            self.step()
        assert self.got == self.wanted


def test_memory_that_nobody_uses_is_given_back_in_time() -> None:
    world = World(keep_s=40.0)
    world.add(1)
    world.finish()
    assert world.allocator.num_touched > 0
    ended_s = world.now_s
    while world.allocator.num_touched:
        world.now_s += 1.0
        world.core.idle_events()
        assert world.now_s < ended_s + 200
    assert 40.0 <= world.now_s - ended_s <= 40.0 * (1 + 2 / PERIODS)
    assert world.keeper.num_given_back > 0
    world.add(2)
    world.finish()


def test_without_a_time_nothing_is_given_back() -> None:
    world = World(keep_s=0.0)
    world.add(1)
    world.finish()
    for _ in range(1000):
        world.now_s += 1000.0
        world.core.idle_events()
    assert world.allocator.num_touched > 0
    assert world.cells.num_calls == 0


def test_when_memory_gets_scarce_requests_go_on_with_less_of_it_and_none_is_lost() -> None:
    world = World()
    for number in range(8):
        world.add(number)
    for _ in range(12):
        world.step()
    assert len(world.core.scheduler.running) == 8
    touched = world.allocator.num_touched
    assert touched >= 100
    world.free = -70 * world.cells.page_bytes  # a browser has come
    world.step()
    world.free = 0
    least = world.allocator.pages_for(LENGTH)
    most = touched - 70
    assert most >= least
    assert world.allocator.num_touched <= most
    for _ in range(30):
        world.step()
        assert world.allocator.num_touched <= most
    assert world.core.scheduler.stats.num_preemptions > 0
    world.finish()


@pytest.mark.parametrize("free", [-1, -GIB, -(1 << 50)])
def test_one_sequence_always_goes_on(free: int) -> None:
    world = World()
    for number in range(8):
        world.add(number)
    world.step()
    world.free = free
    world.finish()
    assert world.allocator.num_touched <= world.allocator.pages_for(LENGTH)


def test_memory_comes_and_goes_and_every_token_is_right() -> None:
    world = World()
    for number in range(60):
        world.add(number % 97, prompt=5 + number % 41, tokens=3 + number % 30)
        world.free = (number % 7 - 3) * 20 * world.cells.page_bytes
        for _ in range(number % 4):
            world.step()
    world.finish()
    world.free = 100 * GIB
    world.now_s += 2
    world.core.idle_events()
    assert world.allocator.limit == world.allocator.num_usable


# What the system says, told by false files.


class Machine:
    def __init__(self, root: Path) -> None:
        self.root, self.now_s = root, 0.0
        self.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {10 << 20} kB\n")
        self.write("proc/self/cgroup", "0::/box")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def limit(self, limit: int | str, used: int, high: int | str = "max") -> None:
        self.write("sys/fs/cgroup/box/memory.max", str(limit))
        self.write("sys/fs/cgroup/box/memory.high", str(high))
        self.write("sys/fs/cgroup/box/memory.current", str(used))

    def room(self) -> MemoryRoom:
        return MemoryRoom(self.root, lambda: self.now_s)


def test_the_room_is_what_the_machine_leaves(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    room = machine.room()
    assert room() == 10 * GIB - margin(16 * GIB)
    machine.write("proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: 1024 kB\n")
    assert room() == (1 << 20) - margin(16 * GIB) < 0
    assert margin(0) == MARGIN_BYTES
    assert margin(1 << 50) == GIB


def test_a_group_that_shrinks_while_it_serves_leaves_less_than_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.limit(2 * GIB, GIB)
    room = machine.room()
    assert room() == GIB - margin(2 * GIB)
    machine.limit(GIB // 2, GIB)
    assert room() == -GIB // 2 - margin(GIB // 2)
    machine.limit(2 * GIB, GIB, high=GIB)
    assert room() == -margin(GIB)
    machine.limit("max", GIB)
    assert room() == 10 * GIB - margin(16 * GIB)


@pytest.mark.parametrize("file", ["proc/pressure/memory", "sys/fs/cgroup/box/memory.pressure"])
def test_who_waits_for_memory_is_heard(tmp_path: Path, file: str) -> None:
    machine = Machine(tmp_path)
    machine.limit(8 * GIB, GIB)
    psi = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=9999999\n"
    machine.write(file, psi.format(5_000_000))
    room = machine.room()
    machine.now_s += 1.0
    assert room() > 0  # what was before the start does not count
    machine.write(file, psi.format(5_090_000))
    machine.now_s += 1.0
    assert room() > 0
    machine.write(file, psi.format(5_290_000))
    machine.now_s += 1.0
    assert room() == -PRESSED_BYTES
    machine.now_s += 1.0
    assert room() > 0


@pytest.mark.parametrize("event", ["high", "max"])
def test_a_limit_that_was_reached_is_heard(tmp_path: Path, event: str) -> None:
    machine = Machine(tmp_path)
    machine.limit(8 * GIB, GIB)
    machine.write("sys/fs/cgroup/box/memory.events", f"low 3\n{event} 5\noom 0")
    room = machine.room()
    assert room() > 0
    machine.write("sys/fs/cgroup/box/memory.events", f"low 9\n{event} 6\noom 0")
    assert room() == -PRESSED_BYTES
    assert room() > 0


@pytest.mark.parametrize("text", ["", "some", "some total=x", "\0", "some total=-3\n\n", "a=b c d"])
@pytest.mark.parametrize(
    "file",
    [
        *("proc/pressure/memory", "proc/meminfo", "proc/self/cgroup"),
        *("sys/fs/cgroup/box/memory.events", "sys/fs/cgroup/box/memory.pressure"),
        *("sys/fs/cgroup/box/memory.max", "sys/fs/cgroup/box/memory.stat"),
    ],
)
def test_files_that_say_nothing_are_no_pressure(tmp_path: Path, file: str, text: str) -> None:
    machine = Machine(tmp_path)
    machine.limit(8 * GIB, GIB)
    machine.write(file, text)
    room = machine.room()
    machine.now_s += 1.0
    assert room() > 0
    assert MemoryRoom(tmp_path / "nothing")() > 0
