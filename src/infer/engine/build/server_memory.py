"""`ServerMemory`: what a server may take of main memory, and what its processes need of it

A server is several processes: the API process, engines, workers for untrusted text and a standby.
They share the machine or the limit of a container, so one plan counts them all, beside models and
caches. The sizes are measured ones; what grows with the vocabulary (tokenizers, compiled grammars)
is counted by its tokens. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from infer.control_groups import ROOT, memory_limit, text_of_file
from infer.main_memory import available_bytes, proc_bytes

_MIB = 1 << 20
STANDBY_ABOVE = 2 << 30
"""Bytes of available main memory from which on `replicas.standby` has one."""
NUM_FRONTS = "num_fronts"
"""Name of the number of processes that answer HTTP, where it is not 1, among the settings that an
engine process gets."""
ENGINE_NAME, FRONT_NAME = "infer-engine", "infer-front"
"""Names by which the system knows an engine process, and one of several that answer HTTP."""
KEPT_BYTES, KEPT_SHARE = 300 * _MIB, 0.1
"""What stays free for other processes in a container: bytes, and a fraction of its limit."""


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """What processes of one kind hold in main memory, without a model's weights and cache."""

    name: str
    num_bytes: int


def needs_of_server(
    vocab_size: int, *, has_standby: bool = True, num_fronts: int = 1
) -> tuple[ProcessNeed, ...]:
    """What the processes of a server with one model hold beside the engine's. `num_fronts`: those
    that answer HTTP, each with workers of its own; several are beside the one that started them."""
    api = 64 * _MIB + 2300 * vocab_size
    workers = 4 * 14 * _MIB + 2 * 1600 * vocab_size  # two compile templates, two grammars
    num_apis = num_fronts if num_fronts == 1 else num_fronts + 1
    needs = [ProcessNeed("API", num_apis * api), ProcessNeed("workers", num_fronts * workers)]
    if has_standby:
        needs.append(ProcessNeed("standby", 160 * _MIB))
    return tuple(needs)


def need_of_engine(vocab_size: int) -> ProcessNeed:
    """What an engine process holds beside the model and its cache: Python, torch, grammars."""
    return ProcessNeed("engine", 160 * _MIB + 2000 * vocab_size)


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of one engine of a server; sizes in bytes."""

    free: int
    """Main memory that is free for the engine and its part of the server's other processes, what
    they hold already included."""
    processes: tuple[ProcessNeed, ...] = ()
    """The engine's part of what the processes hold beside the model."""
    kept: int = 0
    """What stays free for other processes in a container, the server's own ones included; 0 outside
    of containers."""
    promised: int = 0
    """What other engines of this machine may still take, which is not in `free`."""

    @property
    def process_bytes(self) -> int:
        """The sum over the processes."""
        return sum(need.num_bytes for need in self.processes)

    @property
    def kept_beside(self) -> int:
        """The part of `kept` that the server's processes leave."""
        others = sum(need.num_bytes for need in self.processes if need.name != "engine")
        return max(0, self.kept - others)

    def divided(self, count: int) -> ServerMemory:
        """The part of one of `count` equal engines of a server."""
        shared = (
            need if need.name == "engine" else replace(need, num_bytes=need.num_bytes // count)
            for need in self.processes
        )
        return ServerMemory(self.free // count, tuple(shared), self.kept // count, self.promised)


def memory_of_server(
    vocab_size: int,
    *,
    free: int | None = None,
    pids: Sequence[int] = (),
    num_fronts: int = 1,
    root: Path = ROOT,
) -> ServerMemory:
    """The memory of a server with one engine, on this machine.

    `free`: bytes to plan with instead of what the machine has, outside of any container. `pids`:
    processes of the server that there are; what they hold is free for it. `num_fronts`: see
    `needs_of_server`."""
    limit = None
    if free is None:
        free = available_bytes(root) + sum(held_bytes(pid, root) for pid in pids)
        limit = memory_limit(root)
    has_standby = free >= STANDBY_ABOVE
    others = needs_of_server(vocab_size, has_standby=has_standby, num_fronts=num_fronts)
    needs = (need_of_engine(vocab_size), *others)
    return ServerMemory(free, needs, 0 if limit is None else kept_bytes(limit))


def kept_bytes(limit: int) -> int:
    """What a default cache leaves to others in a container with this limit, in bytes."""
    return KEPT_BYTES + int(KEPT_SHARE * limit)


def processes_beside(parent: int, root: Path = ROOT) -> list[int]:
    """The API process `parent` of a server, its workers and its standby, as far as they run."""
    pids = [parent]
    for file in (root / f"proc/{parent}/task").glob("*/children"):
        for word in text_of_file(file).split():
            if text_of_file(root / f"proc/{word}/comm") != ENGINE_NAME:
                pids.append(int(word))
    return pids


def held_bytes(pid: int, root: Path = ROOT) -> int:
    """Bytes of main memory that a process holds and that no file backs; 0 where that is unknown."""
    return proc_bytes(root / f"proc/{pid}/status", "RssAnon:") or 0
