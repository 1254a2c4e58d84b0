"""`ModelsFolder`: the checkpoints in a folder, each a model by the name of its folder or file"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.errors import LoadError
from infer.models.gguf_names import gguf_models
from infer.readable_text import readable
from infer.server.served_models import MODEL_NAME, Presets

log = logging.getLogger("infer.server")

MAX_ENTRIES = 10_000
"""Entries of the folder that are looked at."""
_CONFIG = "config.json"
_NAME = re.compile(MODEL_NAME)


class ModelsFolder:
    """A model is a folder with a `config.json`, or a GGUF file (of several parts the first one),
    directly in the folder. Others change the folder while the server runs: it is only ever looked
    at, nothing of it is remembered, and what a name means is looked up again when the model is
    loaded. What lies outside of it is not served, also where a link points there. No torch; blocks,
    so call it in a thread."""

    def __init__(self, folder: Path, max_entries: int = MAX_ENTRIES) -> None:
        """`max_entries`: how many of the folder are looked at."""
        self._folder = folder.expanduser()
        self._max_entries = max_entries
        self._told: frozenset[str] = frozenset()
        """The problems that the log has named, as long as they are there."""

    def list_models(self) -> dict[str, Path]:
        """The models that are there now, by their names, in the order of these. What cannot be
        served is left out and named in the log, once. Nothing is raised: a folder that cannot be
        read has no models."""
        try:
            home = self._folder.resolve(strict=True)
            with os.scandir(home) as entries:
                names = sorted(entry.name for entry in islice(entries, self._max_entries + 1))
        except OSError as error:
            self._log_problems([f"the folder of models cannot be read: {error.strerror}"])
            return {}
        problems = []
        if len(names) > self._max_entries:
            problems.append(
                f"only {self._max_entries} entries of the folder of models are looked at"
            )
        names = [name for name in names[: self._max_entries] if not name.startswith(".")]
        wanted = [(name, name) for name in names if not name.lower().endswith(".gguf")]
        wanted += [(name, parts[0]) for name, parts in gguf_models(names).items()]
        models: dict[str, Path] = {}
        for name, entry in wanted:
            path = home / entry
            if not _is_checkpoint(path):
                continue
            if not _NAME.fullmatch(name):
                problems.append(
                    f"{readable(entry)!r:.200} is not served: a name has letters, digits and ._-"
                    " only, at most 96, and is not load or unload"
                )
            elif not _is_inside(path, home):
                problems.append(f"{entry!r} is not served: it is a link out of the folder")
            elif name in models:
                problems.append(f"{entry!r} is not served: a folder has the same name")
            else:
                models[name] = path
        self._log_problems(problems)
        return dict(sorted(models.items()))

    def path_of(self, name: str) -> Path:
        """Where a model is now. Raises `LoadError` where it is there no longer."""
        path = self.list_models().get(name)
        if path is None:
            raise LoadError(f"{name!r} is no longer in the folder of models")
        return path

    def _log_problems(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._told:
                log.warning("%s", problem)
        self._told = frozenset(problems)


def launches_in(
    folder: ModelsFolder, launch: Callable[[EngineConfig], AsyncLLM], presets: Presets
) -> dict[str, Callable[[], AsyncLLM]]:
    """What loads the models that are in a folder now, by their names, from where they are then."""

    def load(name: str) -> AsyncLLM:
        return launch(presets.config_of(name, str(folder.path_of(name))))

    return {name: partial(load, name) for name in folder.list_models()}


def _is_checkpoint(path: Path) -> bool:
    """Whether it is a GGUF file or a folder with a config; false for what cannot be looked at."""
    try:
        is_gguf = path.suffix.lower() == ".gguf"
        return path.is_file() if is_gguf else (path / _CONFIG).is_file()
    except (OSError, ValueError):
        return False


def _is_inside(path: Path, home: Path) -> bool:
    """Whether a checkpoint is in the folder, and so is each file of it."""
    try:
        inside = [path, *islice(path.iterdir(), MAX_ENTRIES)] if path.is_dir() else [path]
        return all(file.resolve().is_relative_to(home) for file in inside)
    except (OSError, RuntimeError):  # it has just gone, or its links go round
        return False
