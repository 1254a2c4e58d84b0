"""`ModelsMemory`: whether a further model fits into memory beside those that are loaded"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from infer.engine.build.memory_ledger import MemoryLedger, for_newcomer
from infer.main_memory import available_bytes
from infer.models.gguf_names import SPLIT_NAME

BESIDE_WEIGHTS = 512 * 1024 * 1024
"""Bytes that an engine's process takes beside its weights, about."""
_WEIGHTS = (".safetensors", ".gguf")


class ModelsMemory:
    """What a model needs is taken from the size of its files, as nothing of it has been read yet.
    It has to fit into the budget of the operator, and into what the other engines of the machine
    can do without (`engine.build.memory_ledger`). No torch; blocks, so call it in a thread."""

    def __init__(
        self,
        path_of: Callable[[str], Path],
        budget: int | None = None,
        *,
        ledger: MemoryLedger | None = None,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """`path_of`: where the checkpoint of a name is. `budget`: most bytes of the weights of all
        models that are loaded; None: no limit of this kind. `available`: bytes of main memory that
        are free."""
        self._path_of = path_of
        self._budget = budget
        self._ledger = ledger or MemoryLedger()
        self._available = available

    def fits(self, name: str, loaded: Sequence[str]) -> bool:
        """Whether a model fits beside those that are loaded. Where its size is not known, as that
        of a hub id, that is left to its engine, which plans by what there is."""
        size = self._size(name)
        if not size:
            return True
        if self._budget is not None and size + sum(map(self._size, loaded)) > self._budget:
            return False
        _, most = for_newcomer(self._available(), self._ledger.others_now())
        return size + BESIDE_WEIGHTS <= most

    def _size(self, name: str) -> int:
        try:
            return weight_bytes(self._path_of(name))
        except Exception:  # it has gone, or is no path: its engine will say so
            return 0


def weight_bytes(path: Path) -> int:
    """The bytes of the files of weights of a checkpoint; 0 where there are none. Raises
    `OSError`."""
    if path.is_dir():
        files = [file for file in path.iterdir() if file.suffix.lower() in _WEIGHTS]
    elif split := SPLIT_NAME.fullmatch(path.name):
        siblings = ((file, SPLIT_NAME.fullmatch(file.name)) for file in path.parent.iterdir())
        files = [file for file, parts in siblings if parts and parts[1] == split[1]]
    else:
        files = [path]
    return sum(file.stat().st_size for file in files if file.is_file())
