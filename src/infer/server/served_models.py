"""`configs_of`: the models that a command line names, with their settings and names; `Presets`"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from infer.config import SHIPPED_NAME, EngineConfig
from infer.errors import ConfigError
from infer.readable_text import readable

MODEL_ACTIONS = ("load", "unload")
"""What is no name of a model, as it stands behind /v1/models/ for what is done with one."""
MODEL_NAME = rf"(?!({'|'.join(MODEL_ACTIONS)})(?![\w.-]))[A-Za-z0-9][A-Za-z0-9._-]{{0,95}}"
"""A pattern of the names that models may be given."""
_NAMED = re.compile(f"{MODEL_NAME}=.+")


@dataclass(frozen=True)
class Presets:
    """The settings of engines by the names of their models, and other names of these."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of all."""
    of_models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What a model has instead, by its name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of models by other names of theirs."""

    def config_of(self, name: str, model: str) -> EngineConfig:
        """The config of the model of a name, whose checkpoint `model` names. Raises
        `ConfigError`."""
        settings = {**self.settings, **self.of_models.get(name, {})}
        return EngineConfig.from_kwargs(**{**settings, "model": model, "served_model_name": name})


def configs_of(
    models: Sequence[str],
    settings: Mapping[str, Any],
    of_models: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    has_folder: bool = False,
) -> EngineConfig | dict[str, EngineConfig]:
    """The config of the only `--model`, or one config for each of several `NAME=PATH-OR-HUB-ID`.

    `of_models`: see `Presets`. `has_folder`: whether there are others in a folder, so that each
    needs a name. Raises `ConfigError` for names that are missing, bad or given twice.
    """
    is_one = not models or (len(models) == 1 and not _NAMED.match(models[0]))
    if is_one and not has_folder:
        return EngineConfig.from_kwargs(model=next(iter(models), None), **settings)
    configs: dict[str, EngineConfig] = {}
    # Otherwise the first one to be loaded on a GPU would leave next to nothing to the others.
    settings = {"gpu_memory_utilization": 1 / max(1, len(models)), **settings}
    presets = Presets(settings, of_models or {})
    for text in models:
        name, _, model = text.partition("=")
        if not _NAMED.fullmatch(text):
            raise ConfigError("model", f"with several, each is NAME=PATH-OR-HUB-ID; not {text!r}")
        if name in configs:
            raise ConfigError("model", f"the name {name!r} is given twice")
        if "served_model_name" in settings:
            raise ConfigError("served_model_name", "each --model NAME=… has its name already")
        configs[name] = presets.config_of(name, model)
    return configs


def names_of(configs: EngineConfig | Mapping[str, EngineConfig]) -> list[str]:
    """The names of models for everybody, before their checkpoints have been read: of a path only
    the last part, because folders are nobody's business."""
    if not isinstance(configs, EngineConfig):
        return list(configs)
    model = configs.served_model_name or configs.model or SHIPPED_NAME
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return [readable(PurePath(model).name or "the model") if is_path else model]
