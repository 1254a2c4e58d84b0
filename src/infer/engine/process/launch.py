"""`launch`: an engine in a process of its own, behind the asyncio façade, without torch here.

What `infer serve` stands on. The process reads the checkpoint; the text side of it comes over here
while the weights are being loaded there. Any number of engines can be launched, each with its own
settings. For an engine in this process see `engine.build.assemble`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from infer.config import EngineConfig
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor, log_tool_use
from infer.engine.process.messages import Text
from infer.engine.process.supervisor import HANG_S, LOAD_TIMEOUT_S, EngineProcess
from infer.errors import LoadError
from infer.text.tokenizer import Tokenizer

_FACTORY = "infer.engine.build.assemble:prepare_process"


class Loads:
    """The engines that are being loaded, for whoever ends the program meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[EngineProcess] = set()
        self._ended = False

    @contextlib.contextmanager
    def running(self, process: EngineProcess) -> Iterator[None]:
        """While it is being loaded; `LoadError` if there are to be no more loads."""
        with self._lock:
            if self._ended:
                raise LoadError("the server is shutting down")
            self._running.add(process)
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(process)

    def end(self) -> None:
        """End those that run, with a `LoadError`; from now on there are no more."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            process.stop()


def launch(
    config: EngineConfig,
    *,
    hang_s: float = HANG_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    loads: Loads | None = None,
) -> AsyncLLM:
    """Start a process for `config` and wait until it is ready; the façade is not started yet.

    Raises `LoadError` / `ConfigError` if that cannot be. `hang_s`: a step that takes longer is
    taken for a hang, and the process is replaced. `load_timeout_s`: an engine that is not ready
    by then is ended. `loads`: by which another thread can end it earlier.
    """
    engine = launch_factory(
        _FACTORY,
        dataclasses.asdict(config),
        seed=config.seed or 0,
        hang_s=hang_s,
        load_timeout_s=load_timeout_s,
        loads=loads,
    )
    engine.expect_grammars()
    return engine


def launch_factory(
    factory: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    hang_s: float = HANG_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    loads: Loads | None = None,
) -> AsyncLLM:
    """`launch` for any `module:function` that makes a `Blueprint` of `settings`."""
    process = EngineProcess(factory, settings, hang_s=hang_s, load_timeout_s=load_timeout_s)
    texts: list[tuple[str, Tokenizer]] = []

    def read(text: Text) -> None:
        texts.append((text.model_name, tokenizer := Tokenizer(text.files)))
        log_tool_use(tokenizer)

    with (loads or Loads()).running(process):
        limits = process.launch(read)
    (name, tokenizer), *_ = texts
    return AsyncLLM(process, InputProcessor(tokenizer, limits, seed), name)
