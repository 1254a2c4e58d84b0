"""`MachineShare`: the part of this machine that one of several engines gets"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from infer.config import MAX_REPLICAS
from infer.engine.build.processors import Core, Processors, may_have_gpu, read_processors
from infer.errors import ConfigError
from infer.main_memory import available_bytes

SETTING = "machine_share"
"""Name of the share among the settings that an engine process gets."""


@dataclass(frozen=True, slots=True)
class MachineShare:
    """The engines of a server (`infer serve --replicas`) divide main memory and cores evenly. The
    cores of all NUMA nodes are used, and an engine gets neighbours, so that one of several on a
    machine with several nodes stays in one of them. Each GPU belongs to one engine. No torch."""

    index: int
    """Number of the engine, from 0."""
    count: int
    """Number of engines."""
    main_memory: int
    """Bytes of main memory for this engine, weights and cache together."""

    @property
    def main_memory_of_all(self) -> int:
        """Bytes of main memory for all engines."""
        return self.main_memory * self.count

    def cores(self, processors: Processors) -> tuple[Core, ...]:
        """The cores of this engine; () where the system does not say which there are."""
        cores = sorted(processors.chosen("all"), key=lambda core: (core.socket, core.node))
        return tuple(_slice(cores, self.index, self.count))

    def num_threads(self, processors: Processors) -> int:
        """The number of threads of this engine; at least 1."""
        return len(_slice(range(_num_threads(processors)), self.index, self.count)) or 1


def _slice(items: Any, index: int, count: int) -> Any:
    return items[len(items) * index // count : len(items) * (index + 1) // count]


def _num_threads(processors: Processors) -> int:
    return processors.num_threads(numa="all")


def shares_of(count: int, device: str) -> list[Mapping[str, Any]]:
    """What each of `count` engines gets, as settings; nothing for a single one.

    Raises `ConfigError` if there are more engines than cores, or than `MAX_REPLICAS`. `device`: of
    `EngineConfig`; on a GPU the engine itself finds out whether there are enough of them."""
    if count == 1:
        return [{}]
    if count > MAX_REPLICAS:
        raise ConfigError("replicas", f"must be at most {MAX_REPLICAS}, not {count}")
    num_cores = _num_threads(read_processors())
    is_on_cpu = device == "cpu" or (device == "auto" and not may_have_gpu())
    if is_on_cpu and count > num_cores:
        raise ConfigError(
            "replicas",
            f"{count} do not fit: an engine needs a core, and there are {num_cores} here; at most"
            f" {num_cores} fit",
        )
    if device.startswith("cuda:"):
        raise ConfigError(
            "replicas", f"of {device!r} there is one; give device='cuda', and each gets its own GPU"
        )
    share_bytes = available_bytes() // count
    return [{SETTING: asdict(MachineShare(index, count, share_bytes))} for index in range(count)]
