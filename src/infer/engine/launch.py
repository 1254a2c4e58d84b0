"""`launch`: an engine in a process of its own, behind the asyncio façade, without torch here.

What `infer serve` stands on. The process reads the checkpoint; the text side of it comes over here
while the weights are being loaded there. Any number of engines can be launched, each with its own
settings. For an engine in this process see `engine.assemble`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from infer.config import EngineConfig
from infer.engine.async_llm import AsyncLLM
from infer.engine.intake import Intake, log_tool_use
from infer.engine.messages import Text
from infer.engine.process import HANG_S, EngineProcess
from infer.text.tokenizer import Tokenizer

_FACTORY = "infer.engine.assemble:prepare_process"


def launch(config: EngineConfig, *, hang_s: float = HANG_S) -> AsyncLLM:
    """Start a process for `config` and wait until it is ready; the façade is not started yet.

    Raises `LoadError` / `ConfigError` if that cannot be. `hang_s`: a step that takes longer is
    taken for a hang, and the process is replaced.
    """
    return launch_factory(
        _FACTORY, dataclasses.asdict(config), seed=config.seed or 0, hang_s=hang_s
    )


def launch_factory(
    factory: str, settings: Mapping[str, Any], *, seed: int = 0, hang_s: float = HANG_S
) -> AsyncLLM:
    """`launch` for any `module:function` that makes a `Blueprint` of `settings`."""
    process = EngineProcess(factory, settings, hang_s=hang_s)
    texts: list[tuple[str, Tokenizer]] = []

    def read(text: Text) -> None:
        texts.append((text.model_name, tokenizer := Tokenizer(text.files)))
        log_tool_use(tokenizer)

    limits = process.launch(read)
    (name, tokenizer), *_ = texts
    return AsyncLLM(process, Intake(tokenizer, limits, seed), name)
