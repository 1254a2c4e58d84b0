"""`launch`: an engine in a process of its own, behind the asyncio façade, without torch here

`infer serve` is built on it. The engine process reads the checkpoint and sends its text side here
before it loads the weights. Any number of engines can be launched, each with its own settings.
`engine.build.assemble` builds an engine in this process.
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
from infer.engine.process.standby import Standby
from infer.engine.process.supervisor import HANG_S, LOAD_TIMEOUT_S, EngineProcess
from infer.errors import LoadError
from infer.text.tokenizer import Tokenizer

_FACTORY = "infer.engine.build.assemble:prepare_process"


class Loads:
    """The engines that are being loaded, so that the end of the program can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[EngineProcess] = set()
        self._ended = False

    @contextlib.contextmanager
    def running(self, process: EngineProcess) -> Iterator[None]:
        """Hold a process in the set while it is loaded. Raises `LoadError` after `end`."""
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
        """End all loads with a `LoadError`, and refuse further ones."""
        with self._lock:
            self._ended = True
            running = list(self._running)
        for process in running:
            process.stop()


@contextlib.contextmanager
def standing_by(is_wanted: bool = True) -> Iterator[Standby | None]:
    """A standby for the engines that `launch` starts within the block, which must end before it;
    None where none is wanted."""
    standby = Standby(_FACTORY) if is_wanted else None
    try:
        yield standby
    finally:
        if standby is not None:
            standby.stop()


def launch(
    config: EngineConfig,
    *,
    hang_s: float = HANG_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    loads: Loads | None = None,
    standby: Standby | None = None,
) -> AsyncLLM:
    """Start a process for `config` and wait until it is ready; the façade is not started yet.

    Raises `LoadError` or `ConfigError`. `hang_s`: seconds without a report after which the process
    is replaced. `load_timeout_s`: seconds after which an engine that is not ready is ended.
    `loads`: lets another thread end the load. `standby`: gives the next process, if there is one.
    """
    engine = launch_factory(
        _FACTORY,
        dataclasses.asdict(config),
        seed=config.seed or 0,
        hang_s=hang_s,
        load_timeout_s=load_timeout_s,
        loads=loads,
        standby=standby,
    )
    engine.expect_grammars()
    return engine


def launch_factory(
    factory: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    loads: Loads | None = None,
    standby: Standby | None = None,
    **limits_s: float,
) -> AsyncLLM:
    """`launch` for any `module:function` that makes a `Blueprint` of `settings`; `limits_s` are
    those of `EngineProcess`."""
    process = EngineProcess(factory, settings, standby=standby, **limits_s)
    texts: list[tuple[str, Tokenizer]] = []

    def read(text: Text) -> None:
        texts.append((text.model_name, tokenizer := Tokenizer(text.files)))
        log_tool_use(tokenizer)

    with (loads or Loads()).running(process):
        limits = process.launch(read)
    (name, tokenizer), *_ = texts
    return AsyncLLM(process, InputProcessor(tokenizer, limits, seed), name)
