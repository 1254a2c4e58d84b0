"""`Placement`: the cores on which the threads of an engine live"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from infer.control_groups import ROOT
from infer.engine.build.processors import Core, Numa, Processors, cpus_of, is_taken
from infer.kernels.team import pin_threads
from infer.main_memory import available_on_node

log = logging.getLogger(__name__)

PINNED_FROM = 8
"""Number of threads from which each of them has a core."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Threads of a large engine have a core each. Linux moves threads that wait for each other
    often; with many of them one is always where it should not be, and all wait for it. A small
    engine's threads are kept on a set of cores only: on a desktop others need some of them now and
    then, and the system then finds the best place for each. Where more threads are wanted than
    there are cores, none is kept.

    `live_on` changes settings of this process, everything else is a function.
    """

    num_threads: int
    """Threads that compute a step."""
    cores: tuple[Core, ...] = ()
    """Cores that they use; (): wherever the system puts them."""
    slow: tuple[Core, ...] = ()
    """Efficiency cores whose threads take part in prompts."""

    @property
    def is_pinned(self) -> bool:
        """Whether each thread has a core."""
        return bool(self.cores) and self.num_threads >= PINNED_FROM

    @property
    def cpus(self) -> frozenset[int]:
        """Numbers of the processors that the engine uses."""
        return cpus_of((*self.cores, *self.slow))

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes of its cores."""
        return tuple(sorted({core.node for core in self.cores}))

    def lists(self) -> list[list[int]]:
        """The processors of each thread; none if all may be anywhere on the process's own."""
        fast = self.cores[: self.num_threads]
        if self.is_pinned:
            return [sorted(core.cpus) for core in (*fast, *self.slow)]
        if not self.slow:
            return []
        quick, slow = sorted(cpus_of(self.cores)), sorted(cpus_of(self.slow))
        return [quick] * self.num_threads + [slow] * len(self.slow)

    def nodes_of_threads(self) -> list[int] | None:
        """The NUMA node of each thread, where each has a core and the cores are on several nodes.

        Each node then holds the slice of every layer's outputs that its threads compute."""
        if not self.is_pinned or len(self.nodes) < 2:
            return None
        return [core.node for core in (*self.cores[: self.num_threads], *self.slow)]


def place(
    processors: Processors,
    num_threads: int,
    numa: Numa = "auto",
    taken: Collection[int] = (),
) -> Placement:
    """Where an engine of `num_threads` threads lives.

    `taken`: processors on which other engines of the machine live. Their cores are used only if
    there are too few others."""
    cores = processors.chosen(numa, taken)
    if len(cores) < num_threads:
        cores = processors.chosen("all")
    if not cores or len(cores) < num_threads:
        return Placement(num_threads)
    # Those that nobody has taken first, and neighbours together: by node.
    counts = Counter(core.node for core in cores)

    def rank(core: Core) -> tuple[bool, int, int, tuple[int, ...]]:
        return is_taken(core, taken), -counts[core.node], core.node, core.cpus

    mine = tuple(sorted(cores, key=rank)[:num_threads])
    if any(is_taken(core, taken) for core in mine):
        # Shared with another engine: the system finds the best place for each thread.
        return Placement(num_threads)
    slow = processors.slow_beside(mine) if processors.quota is None else ()
    return Placement(num_threads, mine if num_threads >= PINNED_FROM else cores, slow)


def free_near(processors: Processors, cores: Collection[Core], root: Path = ROOT) -> int | None:
    """Bytes of main memory that are available on the NUMA nodes of `cores`; None if these are all
    nodes, or the system does not say."""
    nodes = {core.node for core in cores}
    if nodes == set(processors.nodes):
        return None
    free_bytes = [available_on_node(node, root) for node in nodes]
    return sum(free or 0 for free in free_bytes) if None not in free_bytes else None


def live_on(placement: Placement, processors: Processors) -> None:
    """Keep this thread, those that it starts and those of the kernels on the cores of a placement.

    It does nothing where that is all of them, or where threads cannot be kept on cores. Memory is
    then of the same NUMA nodes, because Linux takes it from the node of the thread that writes it
    first."""
    pin_threads(placement.lists(), placement.num_threads, placement.nodes_of_threads())
    cpus = cpus_of(placement.cores)
    if not cpus or cpus == cpus_of(processors.cores) or not hasattr(os, "sched_setaffinity"):
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # forbidden in some containers
        log.warning("threads are not kept on their cores: %s", error)
        return
    log.info(
        "threads stay on %d of %d cores (NUMA node %s)%s",
        len(placement.cores),
        len(processors.cores),
        ", ".join(map(str, placement.nodes)),
        f", and on {len(placement.slow)} efficiency cores for prompts" if placement.slow else "",
    )
