"""Choices for a CUDA device (dtype, seats, kernels), with a simulated device."""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sysconfig
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from infer.config import EngineConfig
from infer.engine.build import assemble, hardware, planner
from infer.engine.build.memory_plan import CUDA_TOKENS_BESIDE_STREAMS
from infer.engine.build.runner_factory import RunnerFactory
from infer.errors import ConfigError
from infer.kernels import cuda
from infer.kernels.invariance import invariant_sizes
from infer.kernels.linear.fusion import Fusion
from infer.kernels.linear.plain_linear import PlainLinear
from infer.models.model_config import ModelConfig
from tests.support.hash_engine import make_hash_core

GPU, CPU = torch.device("cuda"), torch.device("cpu")
DEVICES = {"auto": "cuda", "cpu": "cpu", "cuda": "cuda", "cuda:0": "cuda:0", "cuda:1": "cuda:1"}


def has_capability(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def model_of(dtype: str) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=9, hidden_size=8, intermediate_size=8,
        num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_seq_len=64, norm_eps=1e-5,
        tie_embeddings=True, dtype=dtype,
    )  # fmt: skip


def test_an_old_gpu_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig()
    has_capability(monkeypatch, 7, 5)
    with caplog.at_level(logging.WARNING):
        assert hardware.choose_dtype(config, model_of("bfloat16"), GPU) == torch.float16
    assert "no bfloat16" in caplog.text
    has_capability(monkeypatch, 8, 0)
    assert hardware.choose_dtype(config, model_of("bfloat16"), GPU) == torch.bfloat16
    assert hardware.choose_dtype(config, model_of("float16"), GPU) == torch.float16
    asked = EngineConfig(dtype="float32")
    assert hardware.choose_dtype(asked, model_of("bfloat16"), GPU) == torch.float32


def test_layers_in_int8_need_the_kernels_and_int4_needs_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "obstacle", lambda device: None)
    model = model_of("bfloat16")
    for config in (EngineConfig(dtype="int8"), EngineConfig(quantization="int8")):
        assert hardware.choose_dtype(config, model, GPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="use int8, or device='cpu'"):
        hardware.choose_dtype(EngineConfig(dtype="int4"), model, GPU)
    monkeypatch.setattr(cuda, "obstacle", lambda device: "there is no Triton")
    with pytest.raises(ConfigError, match="'int8' is not possible here: there is no Triton"):
        hardware.choose_dtype(EngineConfig(dtype="int8"), model, GPU)


def test_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = {name: hardware.choose_device(EngineConfig(device=name)) for name in DEVICES}
    assert chosen == {name: torch.device(DEVICES[name]) for name in DEVICES}
    with pytest.raises(ConfigError, match="'cuda:2' was asked for, but torch finds 2 CUDA devices"):
        hardware.choose_device(EngineConfig(device="cuda:2"))


def test_kernels_are_launched_on_the_device_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    def entering(device: torch.device) -> nullcontext[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "device", entering)
    with cuda.current(torch.device("cuda:1")), cuda.current(CPU):
        assert entered == [torch.device("cuda:1")]


def test_defaults_of_a_gpu() -> None:
    assert (hardware.default_seats(GPU), hardware.default_seats(CPU)) == (256, 32)
    assert CUDA_TOKENS_BESIDE_STREAMS == 2048


def test_the_log_counts_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 123)
    assert hardware.used_bytes(GPU) == 123
    assert hardware.used_bytes(CPU) != 123


def test_what_keeps_the_kernels_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    has_capability(monkeypatch, 9, 0)
    assert "not cpu" in str(cuda.obstacle(CPU))
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert cuda.obstacle(GPU) is None
    # Triton before 3.8 compiles its launcher in C.
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C compiler" in str(cuda.obstacle(GPU))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/nowhere")
    assert "Python.h" in str(cuda.obstacle(GPU))
    has_capability(monkeypatch, 7, 5)
    assert "7.5; the kernels need 8.0" in str(cuda.obstacle(GPU))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in str(cuda.obstacle(GPU))


def test_the_next_engine_gets_as_many_pages() -> None:
    core = make_hash_core(num_pages=77, max_seq_len=48)
    assert assemble.pinned_settings(core, GPU) == {"kv_cache_pages": 76, "max_seq_len": 48}
    assert assemble.pinned_settings(core, CPU) == {}


@pytest.mark.parametrize("seats", [1, 3, 48, 100, 256])
@pytest.mark.parametrize("max_seq_len", [1, 24, 512])
def test_rehearsed_steps_are_steps_that_there_may_be(seats: int, max_seq_len: int) -> None:
    config = EngineConfig(device="cpu", max_num_batched_tokens=4096, max_seq_len=max_seq_len)
    unused: Any = None
    factory = RunnerFactory(config, planner.plan_for(config), unused, unused, CPU, seats)
    for num_sequences, num_tokens in (*factory.rehearsals, factory.full_step):
        assert 1 <= num_sequences <= seats
        assert 1 <= num_tokens <= max_seq_len
        assert num_sequences * num_tokens <= factory.max_tokens


class Wavering(PlainLinear):
    """A layer whose rows differ in batches of some sizes, or only at one end of them."""

    wrong: dict[int, Any] = {}  # noqa: RUF012
    wrong_sums: set[int] = set()  # noqa: RUF012
    """Sizes in which only a sum with a residual differs."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.stack([self.weight @ row for row in x])
        if len(x) in self.wrong or (residual is not None and len(x) in self.wrong_sums):
            y[self.wrong.get(len(x), 0)] += 1e-6
        return y if residual is None else residual + y


def test_sizes_at_which_rows_differ_are_left_out() -> None:
    layers = [Wavering(torch.randn(5, 8)), Wavering(torch.randn(6, 8))]
    layers[0].wrong = {4: 0}
    layers[1].wrong = {16: -1}
    assert invariant_sizes(layers, [1, 2, 4, 8, 16, 32], CPU) == [1, 2, 8, 32]
    layers[0].wrong = layers[1].wrong = {}
    assert invariant_sizes(layers, [32, 2, 4], CPU) == [2, 4, 32]
    layers[0].wrong_sums = {2, 4}
    assert invariant_sizes(layers, [1, 2, 4, 8], CPU) == [1, 8]
    layers[0].fusion = Fusion(float_out=True)  # an output head has no residual
    assert invariant_sizes(layers, [1, 2, 4, 8], CPU) == [1, 2, 4, 8]


def test_free_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 200)
    assert hardware.free_bytes(GPU) == 700
    assert emptied, "what torch keeps for later counts as used"
    assert hardware.free_bytes(GPU, 0.5) == 300
    assert hardware.free_bytes(GPU, 1.0) == 700
    assert hardware.free_bytes(GPU, 0.1) == 0
