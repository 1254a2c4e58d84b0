"""Caches that are divided among NUMA nodes: the same bits, and memory where it is wanted."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from infer.attention.cpu import NativeBackend
from infer.kernels import loader
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.team import HeadSlice, head_slices, pin_threads, prefer_node
from infer.models.model_config import ModelConfig
from infer.runner.kv_storage import KVStorage
from tests.support import isas
from tests.support.attention_worlds import BF16, F32, make_world, ragged, run, same_bits, whole

pytestmark = pytest.mark.skipif(loader.available() is not None, reason=str(loader.available()))

ON_LINUX = sys.platform == "linux"
THREADS = 64
NODES = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) if ON_LINUX else 1
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=64,
    num_layers=1, num_heads=8, num_kv_heads=8, head_dim=64, max_seq_len=64, norm_eps=1e-5,
    tie_embeddings=True, dtype="bfloat16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def free_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    pin_threads([], 0)
    loader.loaded().infer_govern_threads(1)
    torch.set_num_threads(before)


def live_on(nodes: list[int]) -> None:
    """Have teams that begin from now on live on nodes, anywhere on the machine's processors."""
    pin_threads([[]] * len(nodes), len(nodes), nodes)


def in_thread(compute: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What is computed with a team that begins now."""
    found: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(compute()))
    thread.start()
    thread.join()
    return found[0]


def test_heads_are_divided_like_threads() -> None:
    assert head_slices(8) == [HeadSlice(0, 8, None)]
    live_on([4] * 20 + [5] * 20 + [6] * 20)
    assert head_slices(8) == [HeadSlice(0, 2, 4), HeadSlice(2, 5, 5), HeadSlice(5, 8, 6)]
    assert head_slices(1) == [HeadSlice(0, 1, 6)]
    live_on([0, 0, 0, 1])
    assert head_slices(8) == [HeadSlice(0, 6, 0), HeadSlice(6, 8, 1)]
    live_on([2] * 8)
    assert head_slices(8) == [HeadSlice(0, 8, None)]


@pytest.mark.parametrize(
    ("nodes", "held", "isa"),
    isas.in_turns(((n, held) for n in (3, 1) for held in (F32, BF16, torch.int8)), every=4),
)
def test_the_same_bits_with_16_and_64_threads(
    isa: str, nodes: int, held: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(loader.ISA_VARIABLE, isa)
    loader.loaded().infer_govern_threads(0)
    dtype, size = F32 if held == F32 else BF16, 64
    world = make_world([1, 3, 70, 530], 14, 7, size, dtype)
    in_bytes = held if held == torch.int8 else None
    expected = run(world, whole(world), held=in_bytes)
    live_on([thread * nodes // THREADS for thread in range(THREADS)])
    make = partial(NativeBackend, by_node=True)
    for threads in (3, 16, 64):
        for steps in (whole(world), ragged(world, threads)):
            compute = partial(run, world, steps, make, threads=threads, held=in_bytes)
            found = in_thread(compute)
            assert all(same_bits(*pair) for pair in zip(found, expected, strict=True)), threads


@pytest.mark.skipif(not ON_LINUX, reason="asks Linux")
def test_pages_that_are_given_back_are_those_of_each_slice() -> None:
    live_on([0, 0, 0, 1])  # the second node does not exist here, so memory comes from the first
    made = KVStorage(CONFIG, 512, 16, dtype=BF16, device=torch.device("cpu"), by_node=True)
    assert made.preparing is not None
    made.preparing.join()
    keys = made.keys[0]
    keys.fill_(7)
    made.release([(4, 40), (100, 4)])
    rows = keys.flatten()
    first, second = rows[: 512 * 16 * 6 * 64].view(512, -1), rows[512 * 16 * 6 * 64 :].view(512, -1)
    for part in (first, second):
        assert not part[4:44].any()
        assert not part[100:104].any()
        for kept in (part[:4], part[44:100], part[104:]):
            assert (kept == 7).all()


def node_of(tensor: Tensor, first_byte: int = 0) -> int:
    """The NUMA node on which a page of memory is, as Linux says it; negative: an errno."""
    page = (tensor.data_ptr() + first_byte) // mmap.PAGESIZE * mmap.PAGESIZE
    pages, status = (ctypes.c_void_p * 1)(page), (ctypes.c_int * 1)(-999)
    move_pages = 279  # of x86-64
    assert ctypes.CDLL(None).syscall(move_pages, 0, ctypes.c_ulong(1), pages, None, status, 0) == 0
    return status[0]


needs_move_pages = pytest.mark.skipif(
    not ON_LINUX or platform.machine() != "x86_64" or not Path("/sys/devices/system/node").is_dir(),
    reason="asks Linux on x86-64",
)


@needs_move_pages
def test_memory_comes_from_the_node_that_is_preferred() -> None:
    memory = loader.page_aligned(1 << 22)
    prefer_node(memory.data_ptr(), memory.nbytes, 0)
    prefer_node(memory.data_ptr() + (2 << 20), 2 << 20, 9999)  # there is none: as before
    memory.fill_(1)
    assert node_of(memory) == 0
    assert node_of(memory, 3 << 20) in range(NODES)


@pytest.mark.slow
@needs_move_pages
@pytest.mark.skipif(NODES < 2, reason="one NUMA node here")
def test_slices_lie_on_their_nodes() -> None:
    """On a machine, real or emulated, with two nodes."""
    live_on([0, 0, 0, 0, 1, 1, 1, 1])
    weight = torch.randn(4096, 2048).bfloat16()
    layer = NativeLinear([weight])
    half = layer.packed.nbytes // 2
    where = [node_of(layer.packed, at) for at in range(0, layer.packed.nbytes, 64 << 10)]
    assert where[: half // (64 << 10) - 32] == [0] * (half // (64 << 10) - 32)
    assert where[half // (64 << 10) + 32 :] == [1] * (half // (64 << 10) - 32)
    made = KVStorage(CONFIG, 4096, 16, dtype=BF16, device=torch.device("cpu"), by_node=True)
    for tensor in made.keys:
        tensor.fill_(1)
        assert node_of(tensor, 4 << 20) == 0
        assert node_of(tensor, tensor.nbytes - (4 << 20)) == 1
