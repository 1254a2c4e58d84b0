"""Where an engine's threads live, on machines described by files and on this one."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from infer.config import EngineConfig
from infer.engine.build import assemble
from infer.engine.build.machine_share import MachineShare
from infer.engine.build.memory_ledger import MemoryLedger
from infer.engine.build.placement import (
    PINNED_FROM,
    Placement,
    free_near,
    live_on,
    place,
)
from infer.engine.build.processors import Core, Processors, cpus_of, read_cores, read_processors
from infer.kernels import loader
from infer.main_memory import available_on_node
from tests.support.waits import until

NATIVE = not isinstance(loader.library(), str)


def machine(root: Path, sockets: int, nodes: int, cores: int, threads: int = 2) -> Processors:
    """A machine of sockets × nodes × cores × hyper-threads, as Linux describes it: first the first
    hyper-thread of all cores, then the second."""
    total = sockets * nodes * cores
    lists: dict[int, list[int]] = {}
    for number in range(total * threads):
        core = number % total
        folder = root / f"sys/devices/system/cpu/cpu{number}/topology"
        folder.mkdir(parents=True)
        socket = core // (nodes * cores)
        (folder / "core_id").write_text(f"{core % (nodes * cores)}\n", encoding="ascii")
        (folder / "physical_package_id").write_text(f"{socket}\n", encoding="ascii")
        lists.setdefault(core // cores, []).append(number)
    for node, cpus in lists.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, cpus)) + "\n", encoding="ascii")
        (folder / "meminfo").write_text(
            f"Node {node} MemFree: {1000 + node} kB\nNode {node} Active(file): 100 kB\n"
            f"Node {node} Inactive(file): 60 kB\nNode {node} SReclaimable: 40 kB\n",
            encoding="ascii",
        )
    return Processors(read_cores(frozenset(range(total * threads)), root))


def xeon_snc3(root: Path) -> Processors:
    """Two sockets with three sub-NUMA clusters of 20 cores."""
    return machine(root, 2, 3, 20)


def epyc_nps4(root: Path) -> Processors:
    """Two sockets with four nodes of 16 cores."""
    return machine(root, 2, 4, 16)


@pytest.mark.parametrize(("make", "of_socket"), [(xeon_snc3, 60), (epyc_nps4, 64)])
def test_a_socket_with_its_sub_nodes_by_default(
    make: Callable[[Path], Processors], of_socket: int, tmp_path: Path
) -> None:
    found = make(tmp_path)
    nodes = len(found.nodes) // 2
    assert found.sockets == (0, 1)
    assert found.num_threads() == of_socket
    assert found.num_threads(numa="one") == of_socket // nodes
    assert found.num_threads(numa="all") == 2 * of_socket
    placement = place(found, found.num_threads())
    assert placement.nodes == tuple(range(nodes))
    assert placement.is_pinned
    assert len({tuple(each) for each in placement.lists()}) == of_socket
    assert all(len(each) == 2 for each in placement.lists()), "both hyper-threads of a core"


@pytest.mark.parametrize(("make", "of_node"), [(xeon_snc3, 20), (epyc_nps4, 16)])
def test_each_thread_says_its_node(
    make: Callable[[Path], Processors], of_node: int, tmp_path: Path
) -> None:
    found = make(tmp_path)
    placement = place(found, found.num_threads())
    nodes = placement.nodes_of_threads()
    assert nodes is not None
    assert nodes == [node for node in placement.nodes for _ in range(of_node)]
    beside = place(found, found.num_threads(), taken=placement.cpus)
    assert set(beside.nodes_of_threads() or ()) == {node + len(placement.nodes) for node in nodes}
    one_less = place(found, found.num_threads(spare=1)).nodes_of_threads()
    assert one_less == nodes[:-1], "neighbours together, whatever their number"
    assert place(found, of_node).nodes_of_threads() is None, "one node"
    assert place(found, 4).nodes_of_threads() is None, "threads that move are of no node"


@pytest.mark.skipif(not NATIVE, reason="no kernels")
def test_a_process_on_several_nodes_divides_layers_and_heads_among_them(
    settled: list[frozenset[int]], tmp_path: Path
) -> None:
    from infer.kernels.team import HeadSlice, head_slices

    found = epyc_nps4(tmp_path)
    try:
        live_on(place(found, 64, taken=place(found, 64).cpus), found)
        assert head_slices(8) == [HeadSlice(2 * i, 2 * i + 2, 4 + i) for i in range(4)]
        live_on(place(found, 16), found)
        assert head_slices(8) == [HeadSlice(0, 8, None)]
    finally:
        live_on(Placement(1), found)
    assert settled[0] == cpus_of([core for core in found.cores if core.socket == 1])


def test_free_memory_is_that_of_the_nodes_that_are_used(tmp_path: Path) -> None:
    found = xeon_snc3(tmp_path)
    assert available_on_node(2, tmp_path) == 1024 * (1002 + (100 + 60 + 40) // 2)
    near = free_near(found, found.chosen(), tmp_path)
    assert near == sum(available_on_node(node, tmp_path) or 0 for node in (0, 1, 2))
    assert free_near(found, found.chosen("all"), tmp_path) is None
    assert available_on_node(9, tmp_path) is None
    (tmp_path / "sys/devices/system/node/node1/meminfo").write_text("odd", encoding="ascii")
    assert free_near(found, found.chosen(), tmp_path) is None


def test_the_next_engine_takes_the_other_socket_and_then_what_is_left(tmp_path: Path) -> None:
    found = epyc_nps4(tmp_path)
    first = place(found, 64)
    second = place(found, 64, taken=first.cpus)
    assert not first.cpus & second.cpus
    assert second.nodes == (4, 5, 6, 7)
    third = place(found, 64, taken=first.cpus | second.cpus)
    assert third == Placement(64), "they share, so the system finds the best places"
    small = place(found, 16)
    assert small.nodes == (0,), "neighbours"
    beside = place(found, 16, taken=small.cpus)
    assert len(beside.nodes) == 1
    assert not small.cpus & beside.cpus


def test_more_threads_than_a_socket_has_take_all_and_more_than_cores_none(tmp_path: Path) -> None:
    found = epyc_nps4(tmp_path)
    assert len(place(found, 100).cores) == 100
    assert place(found, 129) == Placement(129)
    assert place(Processors((), 4), 4) == Placement(4)


@pytest.mark.parametrize("count", range(1, 9))
def test_no_thread_of_two_engines_meets_another_while_there_is_room(count: int) -> None:
    cores = tuple(Core((number,)) for number in range(16))
    taken: frozenset[int] = frozenset()
    placements = []
    for _ in range(16 // PINNED_FROM):
        placements.append(place(Processors(cores), PINNED_FROM, taken=taken))
        taken |= placements[-1].cpus
    used = Counter(cpu for each in placements for cpus in each.lists() for cpu in cpus)
    assert set(used.values()) == {1}
    few = place(Processors(cores), count)
    assert len(few.cores) == (16 if count < PINNED_FROM else count), "a small one moves freely"


def test_efficiency_cores_have_threads_of_their_own() -> None:
    fast = tuple(Core((2 * number, 2 * number + 1)) for number in range(6))
    slow = tuple(Core((12 + number,), is_efficient=True) for number in range(8))
    found = Processors((*fast, *slow))
    placement = place(found, found.num_threads())
    lists = placement.lists()
    assert placement.num_threads == 6
    assert lists[:6] == [list(range(12))] * 6
    assert lists[6:] == [list(range(12, 20))] * 8
    assert Processors((*fast, *slow), quota=3.0).num_threads() == 3
    assert place(Processors((*fast, *slow), quota=3.0), 3).slow == (), "they would use the quota up"


def test_replicas_have_neighbours(tmp_path: Path) -> None:
    found = xeon_snc3(tmp_path)
    shares = [MachineShare(index, 2, 1 << 30) for index in range(2)]
    first, second = (share.cores(found) for share in shares)
    assert {core.socket for core in first} == {0}
    assert {core.socket for core in second} == {1}


def test_the_ledger_tells_where_others_live(tmp_path: Path) -> None:
    first, second = MemoryLedger(tmp_path), MemoryLedger(tmp_path)
    with first.planning():
        assert first.cpus_of_others() == frozenset()
        first.enter(100, 10, range(500))
    with second.planning():
        assert second.cpus_of_others() == frozenset(range(500))
        second.enter(100, 10, [7])
    with first.planning():
        assert first.cpus_of_others() == {7}
    second.leave()
    with first.planning():
        assert first.cpus_of_others() == frozenset()
    first.leave()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """Where this process was told to stay; it does not."""
    kept: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: kept.append(cpus), raising=False)
    return kept


def test_a_process_stays_on_its_cores(settled: list[frozenset[int]]) -> None:
    cores = (Core((0,)), Core((1,), node=1, socket=1), Core((2,), is_efficient=True))
    found = Processors(cores)
    live_on(place(found, 1), found)
    live_on(place(found, 2, "all"), found)
    live_on(place(found, 9), found)
    live_on(place(Processors(cores[:1]), 1), Processors(cores[:1]))
    assert settled == [frozenset({0}), frozenset({0, 1})]
    live_on(Placement(1), found)  # the kernels' threads are free again


def test_what_is_forbidden_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    found = Processors((Core((0,)), Core((1,), socket=1)))
    live_on(place(found, 1), found)
    assert "threads are not kept on their cores: no" in caplog.text


def test_a_number_of_threads_is_kept_on_cores_too(
    monkeypatch: pytest.MonkeyPatch, settled: list[frozenset[int]], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    cores = tuple(Core((number,), node=number // 2, socket=number // 2) for number in range(4))
    monkeypatch.setattr(assemble, "read_processors", lambda: Processors(cores))
    settings = {"num_threads": 1, "kv_cache_pages": 64, "max_seq_len": 64}
    assemble.prepare_process(dict(settings))
    assert settled == [frozenset({0, 1})]
    assert EngineConfig().numa == "auto"


@pytest.mark.skipif(not NATIVE, reason="no kernels")
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc")
def test_each_thread_of_the_kernels_is_where_it_was_put() -> None:
    """The affinity of the threads of a team, as the system tells it."""
    import torch

    from infer.kernels.linear.choose import make_linear
    from infer.kernels.team import pin_threads

    cpus = sorted(os.sched_getaffinity(0))
    before = {int(path.name) for path in Path("/proc/self/task").iterdir()}
    places = [[cpus[0]], [cpus[-1]], cpus[:1], cpus]
    pin_threads(places, 3)
    loader.loaded().infer_govern_threads(0)
    mine = sorted(sorted(set(each)) for each in places[1:])
    found: list[list[int]] = []

    def compute() -> None:
        loader.loaded().infer_set_threads(3)
        layer = make_linear(torch.randn(512, 512).bfloat16(), None)
        for rows, _ in product((1, 100), range(20)):
            layer(torch.randn(rows, 512).bfloat16())
        until(are_in_place)  # no call waits for a thread that has not begun yet

    def are_in_place() -> bool:
        new = {int(path.name) for path in Path("/proc/self/task").iterdir()} - before
        found[:] = [sorted(os.sched_getaffinity(thread)) for thread in sorted(new)]
        return sorted(found[1:]) == mine

    try:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
    finally:
        pin_threads([], 0)
        loader.loaded().infer_govern_threads(1)
    assert len(found) == 4, "the caller, two for all calls, one more for many rows"
    assert sorted(found[1:]) == mine


def test_this_machine() -> None:
    found = read_processors()
    placement = place(found, found.num_threads())
    assert placement.num_threads >= 1
    assert placement.cpus <= cpus_of(found.cores)
