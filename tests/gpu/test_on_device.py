"""The engine on a CUDA device: `pytest -m gpu`. Nothing here can be interpreted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infer import LLM, SamplingParams
from infer.engine.build.hardware import resident_bytes
from infer.runner.device_runner import DeviceRunner
from infer.types import Request, RequestOutput
from tests.support.device_runners import (
    SEATS,
    STEP_TOKENS,
    core_of,
    device_runner,
    make_model,
    request,
    run,
)
from tests.support.kernel_dtypes import INTERPRETED

if INTERPRETED:
    pytest.skip("needs a CUDA device", allow_module_level=True)

BF16 = torch.bfloat16
OPENING = "Once upon a time there was a small fox who lived near the river. "
PROMPTS = [
    OPENING + "The fox had a red ball and a best friend.",
    OPENING + "One day the fox found a key under a stone, and did not know what it was for.",
    "Once upon a time",
    "One day, a little bird",
    OPENING * 4,
    "{",
    "7 + 5 =",
]
NUM_TOKENS = 40


def params(i: int) -> SamplingParams:
    if i % 2:
        return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    narrowed: dict[str, Any] = {"top_p": 0.9} if i % 4 else {"top_k": 20, "min_p": 0.01}
    return SamplingParams(
        temperature=0.9, seed=i, max_tokens=NUM_TOKENS - i, ignore_eos=True, **narrowed
    )


Result = list[tuple[tuple[int, ...], Any]]


def engine(**settings: Any) -> LLM:
    values = {"device": "cuda", "max_seq_len": 512, "max_batch_size": 4, **settings}
    return LLM(**{"batch_invariant": True, **values})


def answers(llm: LLM, order: list[int] | None = None) -> Result:
    order = order or list(range(len(PROMPTS)))
    outputs = llm.generate([PROMPTS[i] for i in order], [params(i) for i in order], use_tqdm=False)
    by_prompt: dict[int, RequestOutput] = dict(zip(order, outputs, strict=True))
    return [(by_prompt[i].token_ids, by_prompt[i].logprobs) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def alone() -> Result:
    with engine(batching_mode="sequential", enable_prefix_caching=False) as llm:
        runner = llm.core.runner
        assert isinstance(runner, DeviceRunner), "the kernels are not in use"
        return answers(llm)


LATTICE: dict[str, dict[str, Any]] = {
    "continuous": {},
    "static": {"batching_mode": "static"},
    "one batch": {"max_batch_size": 8},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "page size 5": {"page_size": 5},
    "slotted": {"kv_cache_backend": "slotted"},
    "preempted": {
        "max_seq_len": 128,
        "page_size": 4,
        "kv_cache_pages": 40,
        "max_batch_size": 8,
    },
}


@pytest.mark.parametrize("name", LATTICE)
def test_batch_invariant_answers_are_bitwise_the_same(name: str, alone: Result) -> None:
    with engine(**LATTICE[name]) as llm:
        assert answers(llm) == alone
        stats = llm.stats()
        if name == "preempted":
            assert stats["num_preemptions"] > 0
        order = list(reversed(range(len(PROMPTS))))
        assert answers(llm, order) == alone, "in another order, with a warm cache"
        if name == "continuous":
            assert llm.stats()["num_cached_tokens"] > 0


def test_memory_that_runs_out_is_contained(alone: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of several requests does not fit, half of it does: nobody notices."""
    launch = DeviceRunner._launch
    failed: list[int] = []

    def small(self: DeviceRunner, plan: Any) -> Any:
        if len(plan) > 2 and len(failed) < 6:
            failed.append(len(plan))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return launch(self, plan)

    with engine() as llm:
        monkeypatch.setattr(DeviceRunner, "_launch", small)
        assert answers(llm) == alone
    assert failed


def test_a_device_that_has_failed_is_distinguished_from_one_that_is_full() -> None:
    """In a process of its own: nothing works there any more."""
    code = """
import torch
from infer.runner.device_errors import translated
try:
    torch.empty(1 << 50, device="cuda")
except RuntimeError as error:
    print(type(translated(error)).__name__)
try:
    torch.zeros(3, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
except RuntimeError as error:
    print(type(translated(error)).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8"
    )
    assert done.stdout.split() == ["MemoryError", "DeviceLostError"], done.stderr


def test_streams_go_on_after_kill_9(tmp_path: Path) -> None:
    from tests.support.killing import kill_under_load
    from tests.support.server_process import bodies, served

    arguments = [
        *("-m", "infer.server", "--port", "0", "--max-seq-len", "512"),
        *("--device", "cuda", "--batch-invariant", "--kv-cache-pages", "4096"),
    ]
    with served(arguments, tmp_path / "log") as server:
        found = asyncio.run(kill_under_load(server, bodies(16, 200), 2, (0.5, 2.0)))
    print(found)
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert text.count("has died (SIGKILL)") == 2
    assert "is to blame" not in text


def workload(count: int) -> list[Request]:
    """Requests of every kind and length, the same each time."""
    numbers = np.random.default_rng(7)
    made = []
    for i in range(count):
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.8},
            {"temperature": 0.9, "top_p": 0.8, "top_k": 20},
            {"temperature": 1.0, "logprobs": 2},
            {"presence_penalty": 0.5},
            {"prompt_logprobs": 1},
        ]
        num_prompt, num_output = (int(n) for n in numbers.integers(1, 40, 2))
        made.append(request(f"{i}", num_prompt, num_output, **kinds[i % len(kinds)]))
    return made


@pytest.mark.parametrize("ordered", [False, True], ids=["default", "ordered"])
def test_graphs_compute_what_single_launches_do(ordered: bool, device: torch.device) -> None:
    model = make_model(device, BF16)
    results = []
    for graphs in (False, True, True):
        runner = device_runner(model, device, graphs=graphs, dtype=BF16, ordered=ordered)
        outputs = run(core_of(runner), workload(24))
        results.append(
            {n: [(o.token_id, o.logprobs, o.error) for o in each] for n, each in outputs.items()}
        )
        assert (len(runner.graphs) > 0) == graphs
    assert results[0] == results[1] == results[2]


def test_a_thousand_mixed_steps_take_no_more_memory(device: torch.device) -> None:
    runner = device_runner(make_model(device, BF16), device, graphs=True, dtype=BF16)
    for count in range(1, SEATS + 1):
        runner.rehearse(count, 1)
    runner.rehearse(1, STEP_TOKENS)
    found = []
    for _ in range(3):  # the first round captures what is still missing
        core = core_of(runner)
        run(core, workload(160))
        assert core.scheduler.stats.num_steps > 500
        torch.cuda.synchronize()
        found.append(
            (torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), len(runner.graphs))
        )
        resident = resident_bytes() or 0
        if len(found) == 1:
            first = resident
    assert found[1] == found[2] == found[0]
    assert resident - first < 32 << 20, "the host's memory grows"


def test_a_launch_compiles_nothing_after_the_warm_up(device: torch.device) -> None:
    """Integers that change must not be specialised: serving would stop to compile."""
    from triton.runtime.jit import JITFunction

    with LLM(device="cuda", max_seq_len=512, max_batch_size=8) as llm:
        compiled: list[Any] = []
        real = JITFunction.run

        def noted(self: Any, *args: Any, **settings: Any) -> Any:
            caches = getattr(self, "device_caches", {})
            before = {key: len(value[0]) for key, value in caches.items()}
            made = real(self, *args, **settings)
            if before != {key: len(value[0]) for key, value in caches.items()}:
                compiled.append(self.fn.__name__)
            return made

        patch = pytest.MonkeyPatch()
        patch.setattr(JITFunction, "run", noted)
        try:
            each = [
                SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 9, 33)
            ]
            llm.generate(PROMPTS[:3], each, use_tqdm=False)
        finally:
            patch.undo()
        assert not compiled
