"""Weights that are smaller than a huge page lie in huge pages, and go when the last one does."""

from __future__ import annotations

import gc
import itertools
import mmap
import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from infer.kernels.arena import CHUNK_BYTES, Arena
from infer.kernels.linear.native_linear import NativeLinear
from infer.kernels.native import native_obstacle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's madvise and /proc")


def mapped(address: int) -> str | None:
    """What the system says of the mapping at an address; None: there is none."""
    text = Path("/proc/self/smaps").read_text(encoding="utf-8")
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text):
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if found and int(found[1], 16) <= address < int(found[2], 16):
            return part
    return None


def is_for_huge_pages(address: int) -> bool:
    flags = re.search(r"VmFlags:(.*)", mapped(address) or "")
    return flags is not None and "hg" in flags[1].split()


def needs_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")


def test_tensors_lie_one_behind_the_other() -> None:
    arena = Arena()
    taken = [arena.take(size) for size in (1, 4096, 4097, 3 << 20, 5)]
    for number, memory in enumerate(taken):
        assert not memory.any()
        assert memory.data_ptr() % mmap.PAGESIZE == 0
        memory.fill_(number + 1)
    assert all(bool((memory == number + 1).all()) for number, memory in enumerate(taken))
    between = [b.data_ptr() - a.data_ptr() - a.nbytes for a, b in itertools.pairwise(taken)]
    assert all(0 <= gap < mmap.PAGESIZE for gap in between)


def test_small_ones_are_for_huge_pages() -> None:
    needs_huge_pages()
    arena = Arena()
    taken = [arena.take(300_000) for _ in range(8)]
    assert all(is_for_huge_pages(memory.data_ptr()) for memory in taken)


@pytest.mark.skipif(native_obstacle() is not None, reason="the kernels do not run here")
def test_weights_of_a_small_layer_are_for_huge_pages() -> None:
    needs_huge_pages()
    layers = [NativeLinear([torch.randn(64, 64).bfloat16()]) for _ in range(4)]
    assert all(is_for_huge_pages(layer.packed.data_ptr()) for layer in layers)


def test_a_chunk_goes_with_its_last_tensor() -> None:
    arena = Arena()
    first, second = arena.take(4096), arena.take(4096)
    address = second.data_ptr()
    del first
    gc.collect()
    assert mapped(address) is not None
    assert not second.any()
    following = arena.take(4096)
    assert following.data_ptr() == address + 4096
    del second, following
    gc.collect()
    assert mapped(address) is None
    assert int(arena.take(4096).fill_(1).sum()) == 4096  # of another chunk


def test_full_chunks_are_followed_by_others() -> None:
    arena = Arena()
    size = CHUNK_BYTES // 5 * 2
    taken = [arena.take(size) for _ in range(5)]
    large = arena.take(CHUNK_BYTES)
    for number, memory in enumerate([*taken, large]):
        memory[0] = memory[-1] = number + 1
    ends = [(int(memory[0]), int(memory[-1])) for memory in [*taken, large]]
    assert ends == [(number, number) for number in range(1, 7)]


def test_threads_get_different_memory() -> None:
    arena = Arena()
    taken: list[torch.Tensor] = []

    def take() -> None:
        taken.extend(arena.take(5_000) for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(memory.data_ptr() for memory in taken)
    assert len(starts) == 400
    assert all(b - a >= 5_000 for a, b in itertools.pairwise(starts))
