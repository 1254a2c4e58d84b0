"""The number of threads that an engine uses."""

import pytest
import torch

from infer.config import EngineConfig
from infer.engine.build import assemble, hardware


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return numbers


def test_a_small_model_leaves_a_core_to_its_server(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = hardware.default_threads()
    bfloat16 = {"dtype": "bfloat16"}  # in float32, the default on some CPUs, it is not small
    assemble.prepare_process(bfloat16)  # the shipped model
    assemble.prepare(EngineConfig())  # within the caller's process
    monkeypatch.setattr(assemble, "SMALL_MODEL_BYTES", 1 << 20)
    assemble.prepare_process(bfloat16)
    assert asked == [max(1, cores - 1), cores, cores]


def test_who_says_a_number_gets_it(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assemble.prepare_process({"num_threads": 3})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assemble.prepare_process({})
    assert asked == [3, 5]


def test_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert hardware.default_threads(spare=10_000) == 1
