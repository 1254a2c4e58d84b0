"""Tests of `INFER_ISA`: all kernels obey it, and all instruction sets give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infer.attention.cpu import NativeBackend
from infer.attention.layout import BatchLayout
from infer.kernels import loader, native
from infer.kernels.linear.fusion import Norm
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.native import native_obstacle
from infer.kernels.rotary import HeadNorms, QKRotation
from infer.runner.sampler import sample
from infer.schedule.sequence import Sequence
from infer.types import Request, SamplingParams
from tests.support import isas

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))
ISAS = loader.instruction_sets()
NUM_TOKENS, HEADS, DIM, PAGE = 40, 3, 64, 16


@pytest.mark.parametrize("isa", loader.INSTRUCTION_SETS)
def test_tests_of_kernels_run_with_a_set_that_is_here(isa: str) -> None:
    """What is missing here is seen as skipped, once for all tests of kernels."""
    if isa not in ISAS:
        pytest.skip(f"no {isa} here")
    assert isas.each([isa])


@pytest.fixture(autouse=True)
def limit_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(native.VARIABLE, raising=False)
    yield
    monkeypatch.undo()
    loader.chosen_instruction_set()


def use(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, isa)
    assert loader.chosen_instruction_set() == isa


def drawn() -> list[int]:
    """Tokens drawn from 64 rows, each with its own parameters."""
    logits = 3 * torch.randn((64, 5000), generator=torch.Generator().manual_seed(1))
    sequences = []
    for row in range(64):
        narrow: dict[str, Any] = {"top_p": 0.3 + row / 100, "min_p": 0.01} if row % 2 else {}
        params = SamplingParams(temperature=0.5 + row / 64, **narrow)
        sequences.append(Sequence.from_request(Request("r", (1, row), params, row, 10), row))
    return [sampled.token_id for sampled in sample(logits, sequences)]


def turned_keys() -> torch.Tensor:
    """Normalised and rotated keys, as the kernel writes them into the cache."""
    made = torch.Generator().manual_seed(2)
    q, k, v = torch.randn((3, NUM_TOKENS, HEADS, DIM), generator=made).bfloat16()
    angles = 100 * torch.rand((NUM_TOKENS, DIM // 2), generator=made)
    norm = Norm(1 + torch.rand(DIM, generator=made), 1e-6)
    rotation = QKRotation(angles.cos(), angles.sin(), HeadNorms(norm, norm))
    num_pages = -(-NUM_TOKENS // PAGE)
    # On some CPUs pages of 16 are interleaved in strips. Pages of 8 are in order on all CPUs.
    shape = (2 * num_pages + 1, PAGE // 2, HEADS, DIM)
    keys, values = torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16()
    backend = NativeBackend([keys], [values], num_heads=HEADS, scale=1.0)
    table = torch.arange(1, 2 * num_pages + 1)[None]
    slots = torch.arange(NUM_TOKENS) + PAGE // 2
    backend.plan(BatchLayout([0, NUM_TOKENS], [NUM_TOKENS], slots, table))
    backend(0, q, k, v, rotation)
    return keys.clone()


def test_a_draw_is_the_same_token_with_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for isa in ISAS:
        use(isa, monkeypatch)
        found[isa] = drawn()
    assert len(set(found[ISAS[0]])) > 32
    assert all(tokens == found[ISAS[0]] for tokens in found.values()), found


def test_a_key_is_turned_to_the_same_bits_with_every_instruction_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {}
    for isa in ISAS:
        use(isa, monkeypatch)
        found[isa] = turned_keys()
    assert found[ISAS[0]].float().abs().sum() > 0
    for isa, keys in found.items():
        assert torch.equal(keys, found[ISAS[0]]), isa


@pytest.mark.parametrize("isa", ISAS)
def test_linear_layers_keep_to_it(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(isa, monkeypatch)
    assert native_obstacle() is None
    layer = NativeLinear([torch.ones((2, 8)).bfloat16()], None)
    assert layer.isa == isa
    assert torch.equal(layer(torch.ones((1, 8)).bfloat16()), torch.full((1, 2), 8).bfloat16())


def test_an_instruction_set_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, "avx1024")
    with pytest.raises(ValueError, match=r"INFER_ISA='avx1024' does not run here; use .*portable"):
        loader.chosen_instruction_set()
