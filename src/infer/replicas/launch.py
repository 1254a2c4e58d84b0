"""`launch`: engines in processes of their own, behind the asyncio façade, without torch here

`infer serve` is built on it. A model has one engine process, or several equal ones that form a
`Fleet`; they load at the same time. An engine process reads the checkpoint and sends its text side
here before it loads the weights. Any number of engines can be launched, each with its own settings.
`engine.build.assemble` builds an engine in this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from infer.config import EngineConfig
from infer.engine.build.machine_share import shares_of
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor, log_defaults, log_tool_use
from infer.errors import LoadError
from infer.replicas.fleet import LINK_TIMEOUT_S, Fleet, MovedStreams, fleet_limits
from infer.replicas.member import Member
from infer.replicas.messages import Text
from infer.replicas.routing import Routing, make_router
from infer.replicas.spawned import FACTORY, EarlyProcess
from infer.replicas.standby import Standby
from infer.replicas.supervisor import HANG_S, LOAD_TIMEOUT_S, EngineProcess
from infer.text.tokenizer import Tokenizer


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
    standby = Standby(FACTORY) if is_wanted else None
    try:
        yield standby
    finally:
        if standby is not None:
            standby.stop()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many engines serve a model, and how they stand in for each other."""

    replicas: int = 1
    """number of engine processes; the machine's cores and memory, or its GPUs, are divided"""
    link_timeout_s: float = LINK_TIMEOUT_S
    """see `Fleet`"""
    moved_streams: MovedStreams = "any"
    """see `Fleet`"""
    routing: Routing = "prefix"
    """see `make_router`"""

    def fleet(self, members: Sequence[Member]) -> Fleet:
        """A fleet with these settings."""
        return Fleet(
            members,
            router=make_router(self.routing),
            link_timeout_s=self.link_timeout_s,
            moved_streams=self.moved_streams,
        )


def launch(
    config: EngineConfig,
    *,
    hang_s: float = HANG_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    loads: Loads | None = None,
    standby: Standby | None = None,
    early: EarlyProcess | None = None,
    fleet: FleetSettings | None = None,
) -> AsyncLLM:
    """Start the processes for `config` and wait until all are ready; the façade is not started yet.

    Raises `LoadError` or `ConfigError`. `hang_s`: seconds without a report after which a process
    is replaced. `load_timeout_s`: seconds after which an engine that is not ready is ended.
    `loads`: lets another thread end the load. `standby`: gives the next process, if there is one;
    all members share it, because they rarely die at the same time and the others serve meanwhile.
    `early`: gives the process of the first engine, which has been started before.
    """
    fleet = fleet or FleetSettings()
    engine = launch_factory(
        FACTORY,
        dataclasses.asdict(config),
        seed=config.seed or 0,
        hang_s=hang_s,
        load_timeout_s=load_timeout_s,
        loads=loads,
        standby=standby,
        early=early,
        fleet=fleet,
        shares=shares_of(fleet.replicas, config.device),
    )
    engine.warm_workers()
    return engine


def launch_factory(
    factory: str,
    settings: Mapping[str, Any],
    *,
    seed: int = 0,
    loads: Loads | None = None,
    standby: Standby | None = None,
    early: EarlyProcess | None = None,
    fleet: FleetSettings | None = None,
    shares: Sequence[Mapping[str, Any]] | None = None,
    **how: Any,
) -> AsyncLLM:
    """`launch` for any `module:function` that makes a `Blueprint` of `settings`; `shares`: further
    settings of each engine, `how`: further arguments of `EngineProcess`."""
    fleet = fleet or FleetSettings()
    processes = []
    for number, share in enumerate(shares or [{}] * fleet.replicas, 1):
        mine = dict(how)
        if fleet.replicas > 1:
            name = f"replica-{number}"
            mine |= {"name": name, "log_fields": {"replica": name}}
        mine |= {"standby": standby, "spawned": early.take() if early else None}
        processes.append(EngineProcess(factory, {**settings, **share}, **mine))
    texts: list[tuple[Text, Tokenizer]] = []

    def read(text: Text) -> None:
        if not texts:
            texts.append((text, tokenizer := Tokenizer(text.files)))
            log_tool_use(tokenizer)
            log_defaults(text.model_name, text.files.sampling)

    loads = loads or Loads()
    with contextlib.ExitStack() as loading:
        for process in processes:
            loading.enter_context(loads.running(process))
        try:
            for process in processes:
                process.begin()
            limits = fleet_limits([process.wait(read) for process in processes])
        except BaseException:
            for process in processes:
                process.stop()
            raise
    (text, tokenizer), *_ = texts
    input_processor = InputProcessor(tokenizer, limits, seed, text.files.sampling)
    return AsyncLLM(fleet.fleet(processes), input_processor, text.model_name)
