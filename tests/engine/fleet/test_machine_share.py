"""How several engines divide a machine, and what is said when they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import infer.engine.build.machine_share as machine_share
from infer import EngineConfig
from infer.cli.main import app
from infer.engine.build import assemble
from infer.engine.build.assemble import prepare_process
from infer.engine.build.machine_share import SETTING, MachineShare, shares_of
from infer.engine.build.planner import most_replicas, plan_for
from infer.engine.build.processors import Core, Processors, read_processors
from infer.engine.build.server_memory import needs_of_server
from infer.errors import ConfigError
from infer.server.settings import ServerSettings

GIB = 1 << 30


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_every_core_belongs_to_one_engine_and_neighbours_stay_together(count: int) -> None:
    cores = tuple(Core((i, i + 8), node=i % 2) for i in range(8))
    shares = [MachineShare(i, count, GIB) for i in range(count)]
    found = [share.cores(Processors(cores)) for share in shares]
    assert sorted(core.cpus for each in found for core in each) == [core.cpus for core in cores]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    threads = [share.num_threads(Processors(cores)) for share in shares]
    assert sum(threads) == 8
    if count == 2:
        assert [{core.node for core in each} for each in found] == [{0}, {1}]
    limited = [share.num_threads(Processors(cores, quota=4.0)) for share in shares]
    assert sum(limited) == max(4, count)
    assert MachineShare(0, 4, GIB).cores(Processors((), 6)) == ()


def test_one_engine_has_no_share_and_more_than_there_are_cores_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    four = Processors(tuple(Core((i,)) for i in range(4)))
    monkeypatch.setattr(machine_share, "read_processors", lambda: four)
    monkeypatch.setattr(machine_share, "available_bytes", lambda: 9 * GIB)
    assert shares_of(1, "cpu") == [{}]
    shares = shares_of(3, "auto")
    assert [each[SETTING]["index"] for each in shares] == [0, 1, 2]
    assert all(MachineShare(**each[SETTING]).main_memory == 3 * GIB for each in shares)
    with pytest.raises(ConfigError, match=r"replicas: 5 do not fit.*there are 4 here; at most 4"):
        shares_of(5, "cpu")
    with pytest.raises(ConfigError, match="replicas: of 'cuda:1' there is one"):
        shares_of(2, "cuda:1")


def test_settings_are_checked() -> None:
    for bad in ({"replicas": 0}, {"link_timeout_s": 0.5}, {"moved_streams": "some"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ServerSettings(**bad)


CONFIG = EngineConfig(device="cpu", dtype="float32", max_seq_len=512, kv_cache_pages=40)


def test_a_plan_says_how_many_engines_fit() -> None:
    one = plan_for(CONFIG, free=GIB).total_bytes
    two = 2 * plan_for(CONFIG, free=GIB, replicas=2).total_bytes
    assert one < two < 2 * one  # they share the API process and the workers
    cores = read_processors().num_threads(numa="all")
    assert most_replicas(CONFIG, free=one - 1) == 0
    assert most_replicas(CONFIG, free=one) == 1
    assert most_replicas(CONFIG, free=two) == min(2, cores)
    assert most_replicas(CONFIG, free=1000 * one) == cores
    assert plan_for(CONFIG, free=two, replicas=2).fits
    assert not plan_for(CONFIG, free=two - 2, replicas=2).fits


def test_a_plan_has_what_each_front_takes() -> None:
    """Several are beside the process that has started them; each has workers of its own."""
    sizes = [plan_for(CONFIG, free=GIB, fronts=fronts).total_bytes for fronts in (1, 2, 3)]
    needs = {need.name: need.num_bytes for need in needs_of_server(2048)}
    assert sizes[2] - sizes[1] == needs["API"] + needs["workers"]
    assert sizes[1] - sizes[0] == 2 * needs["API"] + needs["workers"]
    assert most_replicas(CONFIG, free=sizes[1], fronts=2) == 1
    assert most_replicas(CONFIG, free=sizes[1], fronts=3) == 0


def test_an_engine_that_does_not_fit_says_how_many_would(monkeypatch: pytest.MonkeyPatch) -> None:
    # The parent is no server here, and what it has started beside this is not its.
    monkeypatch.setattr(assemble, "processes_beside", lambda parent: [])
    three = 3 * plan_for(CONFIG, free=8 * GIB, replicas=3).total_bytes
    need = plan_for(CONFIG, free=8 * GIB, replicas=4).total_bytes
    fields = {**dataclasses.asdict(CONFIG), "num_threads": 1}

    def build(count: int, main_memory: int) -> Any:
        share = dataclasses.asdict(MachineShare(0, count, main_memory))
        return prepare_process({**fields, SETTING: share})

    build(4, need)
    with pytest.raises(ConfigError, match=r"replicas: 4 do not fit into the .* at most 3 would"):
        build(4, three // 4)
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes|kv_cache_pages"):
        build(4, need // 8)


def test_the_plan_of_replicas_in_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--device", "cpu", "--free-gib", "65536", "--replicas"]
    with pytest.raises(SystemExit) as ended:
        app([*arguments, "64", "--json"], prog_name="infer")
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    cores = read_processors().num_threads(numa="all")
    assert (found["replicas"], found["replicas_that_fit"], found["fits"]) == (64, cores, False)
    with pytest.raises(SystemExit):
        app([*arguments, "64"], prog_name="infer")
    assert f"--replicas {cores} does" in capsys.readouterr().out


CHILD = """
import os, sys, torch
from infer.engine.build.assemble import prepare_process
from infer.engine.build.machine_share import SETTING
share = {"index": int(sys.argv[1]), "count": 2, "main_memory": 2 << 30}
prepare_process({"device": "cpu", "max_seq_len": 256, SETTING: share})
print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux")
@pytest.mark.slow
def test_two_engines_stay_on_cores_of_their_own() -> None:
    processors = read_processors()
    if len(processors.chosen("all")) < 2:
        pytest.skip("one core")
    source = str(Path(machine_share.__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": source}
    env.pop("OMP_NUM_THREADS", None)
    found = []
    for index in (0, 1):
        command = [sys.executable, "-c", CHILD, str(index)]
        found.append(
            subprocess.run(
                command, env=env, capture_output=True, text=True, check=True, encoding="utf-8"
            )
        )
    (one, first), (two, second) = (each.stdout.rsplit(" ", 1) for each in found)
    assert not set(json.loads(one)) & set(json.loads(two))
    assert int(first) + int(second) <= processors.num_threads(numa="all")
