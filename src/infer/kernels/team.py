"""The threads of the CPU kernels: how many they are, and whether they have their cores

As many as torch's. OpenMP's threads, which torch has, look for work for milliseconds after each of
torch's operations, on the cores that a kernel needs next, and such an operation waits for all of
them, however long another process keeps one from its core. So torch has one thread in a step that
only kernels compute (`ForKernels`), and they have its threads. In a step in which torch computes
products they share OpenMP's (`WithTorch`).
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from infer.kernels import loader

log = logging.getLogger(__name__)

WINDOW_S = 2.0
"""Seconds of which `CoresTaken` tells the mean."""
MANY = 0.25
"""Share of the threads' time without a core about which there is a line in the log."""
SILENCE_S = 600.0
"""Seconds in which there is one such line at most."""
_MAX_NODES = 8  # MOST_NODES of csrc/parts.h


def num_threads() -> int:
    """How many threads the kernels that this thread calls may use."""
    if isinstance(library := loader.library(), str):
        return torch.get_num_threads()
    return library.infer_threads() or torch.get_num_threads()


@functools.cache
def parallel() -> int | None:
    """The address of `GOMP_parallel` in torch's OpenMP runtime.

    None if it is not found, as on macOS.
    """
    try:
        # A symbol is looked up in the library's dependencies too, so the runtime's file name does
        # not matter.
        name = "libtorch_cpu.dylib" if sys.platform == "darwin" else "libtorch_cpu.so"
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


class WithTorch:
    """A context in which the kernels that this thread calls use torch's threads, if they are found.

    For steps in which torch computes products: its threads look for work between them, on the cores
    that a team of the kernels would need.
    """

    def __enter__(self) -> None:
        """Begin."""
        loader.loaded().infer_use_openmp(parallel())

    def __exit__(self, *error: object) -> None:
        """End."""
        loader.loaded().infer_use_openmp(None)


class ForKernels:
    """A context in which torch has one thread, and the kernels that this thread calls have those
    that torch had before."""

    def __enter__(self) -> None:
        """Begin."""
        self._count = torch.get_num_threads()
        if self._count > 1:
            loader.loaded().infer_set_threads(self._count)
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        """End."""
        if self._count > 1:
            loader.loaded().infer_set_threads(0)
            torch.set_num_threads(self._count)


def pin_threads(
    cpus: Sequence[Sequence[int]], num_fast: int, nodes: Sequence[int] | None = None
) -> None:
    """Keep the threads of kernels that begin from now on on processors.

    `cpus`: those of each thread; the first one is the caller, which stays where it is; empty: all
    threads are where the system puts them. Threads from `num_fast` on take part in calls with many
    rows only, beyond the number that the caller may use. `nodes`: the NUMA node of each thread; the
    weights of layers that are made from now on are divided among them. None: it does not matter."""
    if isinstance(library := loader.library(), str):
        return
    numbers = array("i", [number for numbers_of_thread in cpus for number in numbers_of_thread])
    ends = array("i", accumulate(map(len, cpus)))
    of_nodes = array("i", nodes or ())
    library.infer_pin_threads(
        *(numbers.buffer_info()[0], ends.buffer_info()[0]),
        *(of_nodes.buffer_info()[0] if nodes else None, len(cpus), num_fast),
    )


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Key/value heads whose cache lies together."""

    first: int
    end: int
    node: int | None
    """Number of their NUMA node; None: any."""


def head_slices(num_heads: int) -> list[HeadSlice]:
    """How the heads of caches are divided among the NUMA nodes of the kernels' threads."""
    ends, nodes = array("i", [0] * _MAX_NODES), array("i", [0] * _MAX_NODES)
    count = loader.loaded().infer_attention_heads(
        num_heads, ends.buffer_info()[0], nodes.buffer_info()[0]
    )
    return [
        HeadSlice(ends[i - 1] if i else 0, ends[i], nodes[i] if count > 1 else None)
        for i in range(count)
        if ends[i] > (ends[i - 1] if i else 0)
    ]


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Have the whole pages of memory that was not written yet come from a NUMA node, if it has some
    left. A container may forbid it; they then come from the node of the thread that writes."""
    loader.loaded().infer_prefer_node(address, num_bytes, node)


def read_company() -> tuple[int, int, int]:
    """How the kernels' threads have fared in this process: (nanoseconds that they had a core,
    nanoseconds that they were kept from one, threads of the last call that was measured)."""
    if isinstance(library := loader.library(), str):
        return 0, 0, 0
    numbers = array("q", [0, 0])
    threads: int = library.infer_company(numbers.buffer_info()[0])
    return numbers[0], numbers[1], threads


class CoresTaken:
    """How many of the kernels' cores other processes have had lately; a line in the log when they
    begin to need many."""

    def __init__(
        self,
        read: Callable[[], tuple[int, int, int]] = read_company,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read`: see `read_company`. `clock`: seconds."""
        self._read, self._clock = read, clock
        self._before, self._since_s = read()[:2], clock()
        self._said_s = float("-inf")
        self._taken = 0.0

    def __call__(self) -> float:
        """Threads that had no core, on average over the last seconds in which kernels ran; 0 where
        none ran."""
        now_s = self._clock()
        if now_s < self._since_s + WINDOW_S:
            return self._taken
        had, lost, threads = self._read()
        new_had, new_lost = had - self._before[0], lost - self._before[1]
        share = new_lost / (new_had + new_lost) if new_lost else 0.0
        self._before, self._since_s, self._taken = (had, lost), now_s, share * threads
        if share > MANY and now_s > self._said_s + SILENCE_S:
            self._said_s = now_s
            log.warning(
                "other processes need the cores: the kernels' threads (%d now) had none for %.0f %%"
                " of their time; steps take longer, and fewer threads are used where that helps",
                threads,
                100 * share,
            )
        return self._taken
