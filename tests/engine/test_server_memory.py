"""What a server's processes need of a machine or a container, told by false system trees."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from infer import EngineConfig
from infer.control_groups import memory_limit
from infer.engine.build.memory_plan import MemoryPlan, make_plan
from infer.engine.build.server_memory import (
    kept_bytes,
    memory_of_server,
    processes_beside,
)
from infer.main_memory import available_bytes
from infer.models.model_config import ModelConfig
from infer.models.registry import parse_model_config

MIB, GIB = 1 << 20, 1 << 30
SMOL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def machine(root: Path, limit: int | None, *, used: int = 0, free: int = 20 * GIB) -> Path:
    """A system tree of a machine, with a container that has a limit."""
    files = {
        "proc/meminfo": f"MemTotal: {24 << 20} kB\nMemAvailable: {free // 1024} kB",
        "proc/self/cgroup": "0::/box",
        "proc/7/status": "Name: infer\nRssAnon: 102400 kB",
        "proc/7/task/7/children": "8 9",
        "proc/7/task/70/children": "10",
        "proc/8/comm": "infer-engine",
        "proc/8/status": "RssAnon: 1048576 kB",
        "proc/9/comm": "python",
        "proc/9/status": "RssAnon: 10240 kB",
        "proc/10/comm": "infer-standby",
    }
    if limit is not None:
        files |= {
            "sys/fs/cgroup/box/memory.max": str(limit),
            "sys/fs/cgroup/box/memory.current": str(used),
        }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n", encoding="utf-8")
    return root


def model() -> ModelConfig:
    return parse_model_config(SMOL, "test")


def plan_in(root: Path, **settings: Any) -> MemoryPlan:
    server = memory_of_server(SMOL["vocab_size"], root=root)
    config = EngineConfig(device="cpu", dtype="bfloat16", **settings)
    return make_plan(config, model(), "m", server=server)


@pytest.mark.parametrize("limit", [1 * GIB, 3 * GIB // 2, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB])
def test_all_processes_and_what_is_left_to_others_stay_below_the_limit(
    tmp_path: Path, limit: int
) -> None:
    plan = plan_in(machine(tmp_path, limit))
    assert plan.fits
    assert plan.total_bytes <= limit
    names = [need.name for need in plan.processes]
    assert names[:3] == ["engine", "API", "workers"]
    assert ("standby" in names) == (limit >= 2 * GIB)
    model_bytes = plan.weight_bytes + plan.activation_bytes + plan.kv_bytes
    engine = next(need.num_bytes for need in plan.processes if need.name == "engine")
    least_cache = plan.num_pages * plan.page_size == plan.max_seq_len
    assert least_cache or model_bytes + engine <= limit - kept_bytes(limit)
    assert kept_bytes(limit) == 300 * MIB + limit // 10


def test_without_a_container_nothing_is_left_but_the_processes_count(tmp_path: Path) -> None:
    plan = plan_in(machine(tmp_path, None, free=1 * GIB))
    assert plan.kept_bytes == 0
    assert plan.process_bytes > 300 * MIB
    assert plan.total_bytes <= GIB
    shown = dict(plan.rows())
    assert "API" in shown["processes"]
    assert "left free" not in shown
    assert plan.as_dict()["server"]["processes"][1]["name"] == "API"
    json.dumps(plan.as_dict())


def test_a_small_container_is_no_reason_to_refuse(tmp_path: Path) -> None:
    wide = plan_in(machine(tmp_path, 2 * GIB - 1), max_seq_len=256)
    limit = wide.total_bytes - wide.kv_bytes + 28 * MIB
    assert limit < kept_bytes(limit) + wide.weight_bytes + 300 * MIB
    plan = plan_in(machine(tmp_path, limit), max_seq_len=256)
    assert plan.fits
    assert plan.num_cached_tokens >= 256
    assert plan.total_bytes <= limit


def test_a_size_that_was_given_counts_the_processes_too(tmp_path: Path) -> None:
    plan = plan_in(machine(tmp_path, GIB), kv_cache_memory_bytes=900 * MIB, max_seq_len=512)
    assert not plan.fits
    assert "kv_cache_memory_bytes" in plan.advice


def test_what_the_servers_processes_hold_is_free_for_it(tmp_path: Path) -> None:
    root = machine(tmp_path, GIB, used=230 * MIB)
    pids = processes_beside(7, root)
    assert sorted(pids) == [7, 9, 10]  # an engine beside this one keeps what it has
    assert memory_of_server(100, pids=pids, root=root).free == (1024 - 230 + 100 + 10) * MIB
    assert memory_of_server(100, root=root).free == (1024 - 230) * MIB


@pytest.mark.parametrize("high", ["max", "0", "536870912", "", "a", "-5"])
def test_the_limit_that_slows_a_group_down_is_a_limit(tmp_path: Path, high: str) -> None:
    root = machine(tmp_path, GIB, used=100 * MIB)
    (root / "sys/fs/cgroup/box/memory.high").write_text(high, encoding="utf-8")
    limit = int(high) if high.isdigit() else GIB
    assert memory_limit(root) == limit
    assert available_bytes(root) == max(0, limit - 100 * MIB)


def test_replicas_share_what_is_not_the_engines(tmp_path: Path) -> None:
    whole = memory_of_server(1000, root=machine(tmp_path, 8 * GIB))
    part = whole.divided(4)
    assert part.free == whole.free // 4
    sizes = {need.name: need.num_bytes for need in part.processes}
    for need in whole.processes:
        divisor = 1 if need.name == "engine" else 4
        assert sizes[need.name] == need.num_bytes // divisor
    assert part.kept == whole.kept // 4


def test_each_front_counts_and_what_has_started_them(tmp_path: Path) -> None:
    root = machine(tmp_path, 8 * GIB)

    def needs(num_fronts: int) -> dict[str, int]:
        found = memory_of_server(1000, num_fronts=num_fronts, root=root).processes
        return {need.name: need.num_bytes for need in found}

    alone, three = needs(1), needs(3)
    assert (three["API"], three["workers"]) == (4 * alone["API"], 3 * alone["workers"])
    assert (three["engine"], three["standby"]) == (alone["engine"], alone["standby"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux")
def test_the_sizes_of_real_processes_can_be_read() -> None:
    assert processes_beside(os.getpid())[0] == os.getpid()
    assert memory_of_server(1).free > 0
    held = memory_of_server(1, pids=[os.getpid()]).free - memory_of_server(1).free
    assert held <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 + 512 * MIB
