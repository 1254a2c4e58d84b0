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
from infer.engine.build.server_memory import NUM_FRONTS
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor, log_defaults, log_tool_use
from infer.engine.engine_client import SOFT_LIMIT_S
from infer.errors import LoadError
from infer.replicas.contract import ReplicaContract
from infer.replicas.fleet import LINK_TIMEOUT_S, Fleet, MovedStreams, fleet_limits
from infer.replicas.messages import Text
from infer.replicas.process_transport import HANG_S, LOAD_TIMEOUT_S, ProcessTransport
from infer.replicas.replica import Replica
from infer.replicas.routing import Routing, make_router
from infer.replicas.spawned import FACTORY, EarlyProcess
from infer.replicas.standby import Standby
from infer.text.tokenizer import Tokenizer


class Loads:
    """The engines that are being loaded, so that the end of the program can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[ProcessTransport] = set()
        self._ended = False

    @contextlib.contextmanager
    def running(self, process: ProcessTransport) -> Iterator[None]:
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
    """Number of engine processes; the machine's cores and memory, or its GPUs, are divided."""
    link_timeout_s: float = LINK_TIMEOUT_S
    """See `Fleet`."""
    moved_streams: MovedStreams = "any"
    """See `Fleet`."""
    routing: Routing = "prefix"
    """See `make_router`."""

    def fleet(self, replicas: Sequence[ReplicaContract]) -> Fleet:
        """A fleet with these settings."""
        return Fleet(
            replicas,
            router=make_router(self.routing),
            link_timeout_s=self.link_timeout_s,
            moved_streams=self.moved_streams,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedEngines:
    """The engines of a model, ready and not started, with the text side of its checkpoint."""

    replicas: Sequence[Replica]
    text: Text
    tokenizer: Tokenizer

    def llm(self, fleet: FleetSettings, seed: int) -> AsyncLLM:
        """The façade over a fleet of them, not started either."""
        limits = fleet_limits([replica.limits for replica in self.replicas])
        input_processor = InputProcessor(self.tokenizer, limits, seed, self.text.files.sampling)
        return AsyncLLM(fleet.fleet(self.replicas), input_processor, self.text.model_name)


def launch(config: EngineConfig, *, fleet: FleetSettings | None = None, **how: Any) -> AsyncLLM:
    """Start the processes for `config` and wait until all are ready; the façade is not started yet.

    `how`: see `launch_engines`, also for what is raised.
    """
    fleet = fleet or FleetSettings()
    engines = launch_engines(config, num_replicas=fleet.replicas, **how)
    engine = engines.llm(fleet, config.seed or 0)
    engine.warm_workers()
    return engine


def launch_engines(
    config: EngineConfig,
    *,
    num_replicas: int = 1,
    num_fronts: int = 1,
    hang_s: float = HANG_S,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    loads: Loads | None = None,
    standby: Standby | None = None,
    early: EarlyProcess | None = None,
) -> LaunchedEngines:
    """Start the processes for `config` and wait until all are ready.

    Raises `LoadError` or `ConfigError`. `num_fronts`: processes that answer HTTP beside them, whose
    memory counts. `hang_s`: seconds without a report after which a process is replaced.
    `load_timeout_s`: seconds after which an engine that is not ready is ended. `loads`: lets
    another thread end the load. `standby`: gives the next process, if there is one; all replicas
    share it, because they rarely die at the same time and the others serve meanwhile. `early`:
    gives the process of the first engine, which has been started before.
    """
    fronts = {NUM_FRONTS: num_fronts} if num_fronts > 1 else {}
    return start_engines(
        FACTORY,
        {**dataclasses.asdict(config), **fronts},
        num_replicas=num_replicas,
        hang_s=hang_s,
        load_timeout_s=load_timeout_s,
        loads=loads,
        standby=standby,
        early=early,
        shares=shares_of(num_replicas, config.device),
    )


def start_engines(
    factory: str,
    settings: Mapping[str, Any],
    *,
    num_replicas: int = 1,
    loads: Loads | None = None,
    standby: Standby | None = None,
    early: EarlyProcess | None = None,
    shares: Sequence[Mapping[str, Any]] | None = None,
    **how: Any,
) -> LaunchedEngines:
    """`launch_engines` for any `module:function` that makes a `Blueprint` of `settings`; `shares`:
    further settings of each engine, `how`: further arguments of `ProcessTransport`."""
    names = ["engine"]
    if num_replicas > 1:
        names = [f"replica-{number + 1}" for number in range(num_replicas)]
    processes = []
    for name, share in zip(names, shares or [{}] * num_replicas, strict=True):
        mine = {**how, "standby": standby, "spawned": early.take() if early else None}
        if num_replicas > 1:
            mine["log_fields"] = {"replica": name}
        processes.append(ProcessTransport(factory, {**settings, **share}, **mine))
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
            readies = [process.wait(read) for process in processes]
        except BaseException:
            for process in processes:
                process.stop()
            raise
    (text, tokenizer), *_ = texts
    soft_limit_s = how.get("soft_limit_s", SOFT_LIMIT_S)
    replicas = [
        Replica(name, ready.limits, process, ready=ready, soft_limit_s=soft_limit_s)
        for name, ready, process in zip(names, readies, processes, strict=True)
    ]
    return LaunchedEngines(replicas=replicas, text=text, tokenizer=tokenizer)
