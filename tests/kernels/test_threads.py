"""Tests of the library's threads."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer import LLM, SamplingParams
from infer.kernels import loader
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.native import native_obstacle
from infer.kernels.team import (
    CoresTaken,
    ForKernels,
    WithTorch,
    num_threads,
    parallel,
    read_company,
)
from tests.support.server_process import ENV

pytestmark = [
    pytest.mark.skipif(loader.available() is not None, reason=str(loader.available())),
    pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc"),
]
TASKS = Path("/proc/self/task")
NUM_THREADS = 4
FORKS = """
import os, sys, torch
from tests.kernels import test_threads as here

torch.set_num_threads(here.NUM_THREADS)
layer, x = here.layer(), here.rows(40)

def computed() -> bytes:
    return layer(x).view(torch.uint8).numpy().tobytes()  # torch's own threads do not survive a fork

expected = computed()
if (child := os.fork()) == 0:
    os._exit(0 if computed() == expected else 3)
assert computed() == expected
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    """As many as are asked for, whatever the number of processors."""
    loader.loaded().infer_govern_threads(0)
    torch.set_num_threads(NUM_THREADS)
    yield
    loader.loaded().infer_govern_threads(1)


def layer() -> NativeLinear:
    generator = torch.Generator().manual_seed(0)
    return NativeLinear([torch.randn((1000, 512), generator=generator).div_(20).bfloat16()])


def rows(count: int) -> Tensor:
    return torch.randn((count, 512), generator=torch.Generator().manual_seed(count)).bfloat16()


def tasks() -> set[str]:
    """The ids of this process's threads; those of earlier tests may end at any time."""
    return {each.name for each in TASKS.iterdir()}


def test_the_same_bits_with_any_number_of_threads() -> None:
    product = layer()
    for count in (1, 7, 40, 300):
        x = rows(count)
        torch.set_num_threads(1)
        alone = product(x)
        for threads in (2, 3, 4, 2, 100, 7, 1, 4):
            torch.set_num_threads(threads)
            assert torch.equal(product(x), alone), (count, threads)


def test_members_that_sleep_wake_up() -> None:
    product, x = layer(), rows(40)
    expected = product(x)
    for pause_s in (0.0, 0.0001, 0.0002, 0.0003, 0.001, 0.01) * 20:
        time.sleep(pause_s)
        assert torch.equal(product(x), expected)


def test_callers_at_the_same_time_have_teams_that_end_with_them() -> None:
    product, x = layer(), rows(40)
    expected = product(x)
    before = tasks()
    together, most = threading.Barrier(3), []

    def call_often(_: int) -> bool:
        torch.set_num_threads(NUM_THREADS)  # torch has it for each thread
        together.wait()
        results = [product(x) for _ in range(200)]
        together.wait()
        most.append(len(tasks() - before))
        together.wait()
        return all(torch.equal(result, expected) for result in results)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(call_often, range(3)))
    assert min(most) >= 3 * NUM_THREADS
    deadline_s = time.monotonic() + 10
    while tasks() - before:
        assert time.monotonic() < deadline_s, "members outlive the thread that called them"
        time.sleep(0.01)


def test_after_a_fork_both_processes_compute() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=120,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_cores_that_others_have_are_told(caplog: pytest.LogCaptureFixture) -> None:
    now_s, fared = [100.0], [(5, 5, 2)]
    taken = CoresTaken(lambda: fared[0], lambda: now_s[0])

    def later(had: int, lost: int, threads: int = 2) -> float:
        now_s[0] += 3
        fared[0] = (fared[0][0] + had, fared[0][1] + lost, threads)
        return taken()

    assert taken() == 0
    assert later(98, 2) == pytest.approx(0.04)
    assert not caplog.records
    assert later(50, 50) == pytest.approx(1.0)
    assert later(60, 40, threads=1) == pytest.approx(0.4)
    assert later(0, 0) == 0, "no kernel ran"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "other processes need the cores" in caplog.text
    now_s[0] += 600
    later(50, 50)
    assert len(caplog.records) == 2


def test_the_time_of_threads_is_counted() -> None:
    product, x = layer(), rows(40)
    had, lost, _ = read_company()
    for _ in range(200):
        product(x)
    after, lost_after, threads = read_company()
    assert after > had
    assert lost_after >= lost
    assert threads == NUM_THREADS


def test_torch_has_one_thread_where_only_kernels_compute() -> None:
    with ForKernels():
        assert (torch.get_num_threads(), num_threads()) == (1, NUM_THREADS)
    assert (torch.get_num_threads(), num_threads()) == (NUM_THREADS, NUM_THREADS)
    with pytest.raises(KeyError), ForKernels():
        raise KeyError
    assert (torch.get_num_threads(), num_threads()) == (NUM_THREADS, NUM_THREADS)


@pytest.mark.skipif(native_obstacle() is not None, reason=str(native_obstacle()))
def test_an_engine_computes_with_all_threads_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's own threads, which would look for work beside them, get none in a step."""
    seen: list[tuple[int, int]] = []
    settings: dict[str, Any] = {"num_threads": NUM_THREADS, "kv_cache_memory_bytes": 1 << 26}
    with LLM(max_seq_len=64, dtype="bfloat16", **settings) as llm:
        runner: Any = llm.core.runner
        computed = runner.model.logits

        def logits(*arguments: Any) -> Any:
            seen.append((torch.get_num_threads(), num_threads()))
            return computed(*arguments)

        monkeypatch.setattr(runner.model, "logits", logits)
        llm.generate(["Once"], SamplingParams(max_tokens=3), use_tqdm=False)
    assert set(seen) == {(1, NUM_THREADS)}


@pytest.mark.skipif(parallel() is None, reason="torch's OpenMP runtime is not found here")
def test_beside_torch_the_kernels_have_its_threads() -> None:
    product, x = layer(), rows(40)
    expected = product(x)
    had, lost, _ = read_company()
    with WithTorch():
        assert all(torch.equal(product(x), expected) for _ in range(100))
    assert read_company()[:2] == (had, lost), "the team has slept"
