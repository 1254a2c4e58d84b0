"""The deployments of Ray Serve: `Engine` and `Front`

An `Engine` replica reserves what its engine needs, and starts an `EngineActor` on its machine,
which has the engine's process and one streaming call for each front. A `Front` replica has the
server over a fleet of engines, for each model. Their actors have names, which it looks at once a
second; an engine is asked who it is when its name is new. Ray carries the steps to each front;
those that follow one another within `ITEM_S` share an item.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infer.cluster.cluster_settings import (
    OPEN_REQUESTS,
    AllSettings,
    ClusterSettings,
    Machine,
    actor_options,
    engine_settings,
    open_requests,
    settings_of_models,
    why_too_many,
    why_too_many_together,
)
from infer.cluster.ordered_stream import ITEM_S, CommandOrder
from infer.cluster.ray_version import check_version, warn_without_haproxy
from infer.cluster.scaling import engines_wanted
from infer.cluster.shared_fronts import NAMESPACE, SharedFronts
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.engine_client import HEARTBEAT_S
from infer.errors import ConfigError
from infer.replicas.fleet import Fleet, fleet_limits
from infer.replicas.host import EngineLoad, ReplicaHost
from infer.replicas.link_transport import LinkBrokenError, LinkTransport
from infer.replicas.messages import Description, Text, decode_description, encode
from infer.replicas.process_transport import ProcessTransport
from infer.replicas.replica import Replica
from infer.replicas.routing import make_router
from infer.replicas.socket_link import link_items
from infer.replicas.standby import Standby
from infer.server.app import create_app, layers
from infer.server.front_identity import new_front_name, seed_of_front
from infer.server.front_relay import RelayedPeers
from infer.server.fronts import SeveralFronts
from infer.server.loaded_models import LoadedModels
from infer.server.multi_model import ModelRouter
from infer.server.observe.logs import log_on_stderr
from infer.server.route_table import unknown_model_statuses
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.ui.page import Page
from infer.text.checkpoint_text import TextFiles
from infer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FROM_RESERVED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
"""Variables that Ray sets by what an actor reserves."""
FACTORY = "infer.engine.build.assemble:prepare_process"
BACKPRESSURE = 256
"""Items of a link that may wait at a front before its engine keeps them in its own queue."""
HEALTH_S = 2.0
"""Seconds between two checks of an engine by Ray."""
HEALTH_TIMEOUT_S = 10.0
"""Seconds that a check may take; after three that fail Ray replaces the engine."""
MAX_RESTARTS = 10
"""Times that Ray starts the actor of an engine again before the whole replica is replaced."""
DESCRIBE_S = 1.0
"""Seconds that an engine's actor has to say who it is; it may be frozen, or being started again."""
ENDED_S = 0.1
"""Seconds after which Ray looks whether an engine's replica has calls left, of which it has none.
"""
MOVE_S = 0.5
"""Seconds that fronts have to move what is left at the end of a drain."""
DISCOVERY_S = 1.0
"""Seconds between two looks of a front at the names of engines."""
CLOCK_TIMEOUT_S = 5.0
"""Seconds that an engine's actor has to tell its time."""
NO_USAGE_STATISTICS = ("RAY_USAGE_STATS_ENABLED", "0")
"""Ray else reports to its makers how it is used."""
FRONT_VARIABLES = {"RAY_timeout_ms_task_wait_for_death_info": "0"}
"""Environment of fronts: Ray else waits for a second before it says that an actor has died."""

_decode_files = msgspec.msgpack.Decoder(TextFiles).decode


class EngineActor:
    """An engine's process, and its ends of the links; an actor of Ray."""

    def __init__(self, plain: dict[str, Any], name: str, variables: dict[str, str]) -> None:
        """`plain`: see `AllSettings.to_plain`. The engine is loaded meanwhile; see `ready`.
        `variables`: those `FROM_RESERVED` of its replica."""
        os.environ.update(variables)
        self._settings = AllSettings.from_plain(plain)
        self._name = name
        self._log = _logging(self._settings, replica=name)
        self._stop = threading.Event()
        self._loaded: Future[None] = Future()
        self._text: Text | None = None
        engine = engine_settings(self._settings.engine, self._settings.cluster)
        server = self._settings.server
        self._standby = Standby(FACTORY) if server.standby else None
        self._process = ProcessTransport(
            FACTORY,
            engine,
            standby=self._standby,
            log_fields={"replica": name},
            hang_s=server.hang_s,
            load_timeout_s=server.load_timeout_s,
        )
        self._host: ReplicaHost | None = None
        """None until the engine is loaded."""
        self._order = CommandOrder()
        # An engine's process dies with the thread that started it; this one stays.
        self._keeper = threading.Thread(target=self._keep, name="infer-keeper", daemon=True)
        self._keeper.start()

    def _keep(self) -> None:
        try:
            self._serve()
        finally:
            if self._standby is not None:
                self._standby.stop()

    def _serve(self) -> None:
        try:
            ready = self._process.launch(self._read)
            replica = Replica(self._name, ready.limits, self._process, ready=ready)
            # Ray starts this actor again where its process has died: generations go on from there.
            host = ReplicaHost(replica, first_generation=time.time_ns() // 1000)
            replica.start(host)
        except BaseException as error:
            self._loaded.set_exception(error)
            return
        self._host = host
        self._loaded.set_result(None)
        while not self._stop.wait(HEARTBEAT_S):
            host.heartbeat()
            for front in self._order.incomplete():
                log.warning("a command of %s has been lost: its link is dropped", front)
                host.detach(front)
        replica.stop()

    def _read(self, text: Text) -> None:
        self._text = text

    async def ready(self) -> None:
        """Wait until the engine is loaded; raises the `LoadError` that keeps it from starting."""
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def _serving(self) -> ReplicaHost:
        """The engine, once it is loaded; raises as `ready` does."""
        await self.ready()
        assert self._host is not None
        return self._host

    async def describe(self) -> bytes | None:
        """A `Description`, in msgpack; None until the engine is loaded."""
        if not self._loaded.done():
            return None
        host = await self._serving()
        assert self._text is not None
        replica, model_name = host.replica, self._text.model_name
        limits, fingerprint = replica.limits, replica.fingerprint
        return encode(Description(replica.name, model_name, limits, fingerprint, host.is_draining))

    async def text(self) -> bytes:
        """The text files of the checkpoint, in msgpack."""
        await self.ready()
        assert self._text is not None
        return encode(self._text.files)

    async def clock(self) -> float:
        """The clock of `StepEvents` on this machine."""
        return time.monotonic()

    async def link(self, front: str, number: int) -> AsyncIterator[bytes]:
        """The items for a front; `number`: of this link of the front."""
        host = await self._serving()
        try:
            async for item in link_items(host, front, every_s=ITEM_S):
                yield item
        finally:
            self._order.forget(front, number)

    async def command(self, front: str, link: int, number: int, item: bytes) -> None:
        """The commands of a front; calls may come in another order than they were made."""
        for command in self._order.arrived(front, link, number, item):
            if self._host is not None:
                self._host.command(front, command)

    async def check(self) -> None:
        """Raise if the engine does not serve and will not soon."""
        if not self._loaded.done():
            return
        host = await self._serving()
        if not self._stop.is_set() and not host.replica.is_alive:
            raise RuntimeError("the engine has failed several times in a row")

    async def load(self) -> dict[str, float]:
        """What the engine has to do, for the autoscaler."""
        load = (await self._serving()).load()
        return {name: float(getattr(load, name)) for name in EngineLoad.__slots__}

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when nothing runs any more, or the time is over."""
        if (host := self._host) is None:
            return
        host.drain(timeout_s)
        ends_s = time.monotonic() + timeout_s + MOVE_S
        while host.num_unfinished and time.monotonic() < ends_s:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """End the engine."""
        self._stop.set()
        await asyncio.to_thread(self._keeper.join)


class Engine:
    """A deployment of Ray Serve: one replica is one engine."""

    def __init__(self, plain: dict[str, Any], model: str) -> None:
        """`model`: its name, where there are several."""
        cluster = AllSettings.from_plain(plain).cluster
        self._drain_timeout_s = cluster.drain_timeout_s
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        actor = ray.remote(EngineActor)
        self._actor = actor.options(
            name=f"{_prefix(context.app_name, model)}{name}",
            namespace=NAMESPACE,
            num_cpus=0,  # its replica has reserved them, on the same machine
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
            max_concurrency=1000,
            max_restarts=MAX_RESTARTS,
        ).remote(plain, name, {key: os.environ[key] for key in FROM_RESERVED if key in os.environ})
        ray.get(self._actor.ready.remote())

    async def check_health(self) -> None:
        """Called by Ray; raises if the replica is to be replaced."""
        # While Ray starts the actor again, there is nothing that a new replica would do better.
        with contextlib.suppress(ActorUnavailableError):
            await self._actor.check.remote()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray."""
        stats: dict[str, float] = await self._actor.load.remote()
        return stats

    async def __del__(self) -> None:
        with contextlib.suppress(RayError):
            await self._actor.drain.remote(self._drain_timeout_s)
            await self._actor.stop.remote()
        ray.kill(self._actor)


class RayLink:
    """A `Link` over an `EngineActor`."""

    def __init__(self, actor: Any, front: str) -> None:
        self._actor, self._front = actor, front
        self._stream: Any = None
        self._lock = threading.Lock()
        self._link = self._num_sent = 0
        """Number of the link, and of its commands so far; see `CommandOrder`."""

    def connect(self) -> Iterator[bytes]:
        """See `Link`."""
        with self._lock:
            self._link, self._num_sent = self._link + 1, 0
        with _errors():
            options = {
                "num_returns": "streaming",
                "_generator_backpressure_num_objects": BACKPRESSURE,
            }
            self._stream = self._actor.link.options(**options).remote(self._front, self._link)
        return self._items()

    def _items(self) -> Iterator[bytes]:
        with _errors():
            for ref in self._stream:
                yield ray.get(ref)

    def offset_s(self) -> float:
        """See `Link`: of three round trips the shortest, if it is longer than the difference."""
        offsets = []
        with _errors():
            for _ in range(3):
                before_s = time.monotonic()
                theirs_s = ray.get(self._actor.clock.remote(), timeout=CLOCK_TIMEOUT_S)
                took_s = time.monotonic() - before_s
                offsets.append((took_s, before_s + took_s / 2 - theirs_s))
        took_s, offset_s = min(offsets)
        return offset_s if abs(offset_s) > took_s else 0.0

    def send(self, frames: bytes) -> None:
        """See `Link`."""
        with self._lock, _errors():
            number, self._num_sent = self._num_sent, self._num_sent + 1
            self._actor.command.remote(self._front, self._link, number, frames)

    def close(self) -> None:
        """See `Link`."""
        if self._stream is not None:
            with contextlib.suppress(Exception):
                ray.cancel(self._stream)


def _prefix(application: str, model: str) -> str:
    """How the names of the actors of a model's engines begin; the engine's own follows."""
    return f"infer-engine/{application}/{model}/"


def _actors(prefix: str, known: Collection[str]) -> list[Any]:
    """The actors of engines that are not known. Blocks; raises `RayError`."""
    actors = []
    for actor in ray.util.list_named_actors(all_namespaces=True):
        start, slash, name = actor["name"].rpartition("/")
        if actor["namespace"] != NAMESPACE or start + slash != prefix or name in known:
            continue
        with contextlib.suppress(ValueError):  # it has just gone
            actors.append(ray.get_actor(actor["name"], namespace=NAMESPACE))
    return actors


async def _described(actor: Any) -> Description | None:
    data: bytes | None = await actor.describe.remote()
    return None if data is None else decode_description(data)


def _logging(settings: AllSettings, **fields: str) -> contextlib.ExitStack:
    """What writes the log of this process as long as it is held. Ray has a file for it, and shows
    its lines where the application was started from."""
    server, held = settings.server, contextlib.ExitStack()
    how = log_on_stderr(server.log_format, server.log_level, fields=fields)
    held.enter_context(how)
    return held


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Ray's errors as those of a link."""
    try:
        yield
    except ActorUnavailableError as error:
        raise LinkBrokenError(_short(error), is_final=False) from error
    except ActorDiedError as error:
        raise LinkBrokenError(f"its process has gone: {_short(error)}", is_final=True) from error
    except RayError as error:
        raise LinkBrokenError(_short(error), is_final=False) from error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


class EnginesOfModel:
    """The engines of one model, as a front finds them."""

    def __init__(self, front: str, model: str, settings: AllSettings) -> None:
        """`front`: its name."""
        self._front, self._settings = front, settings
        self._prefix = _prefix(serve.get_replica_context().app_name, model)
        self._finding: asyncio.Task[None] | None = None

    async def serve(self) -> AsyncLLM:
        """The fleet of the engines, once there is one; further ones join it."""
        while not (described := await self._describe(())):
            await asyncio.sleep(0.5)
        settings, (description, actor) = self._settings, described[0]
        files = _decode_files(await actor.text.remote())
        tokenizer = await asyncio.to_thread(Tokenizer, files)
        fleet = Fleet(
            [self._replica(*description_and_actor) for description_and_actor in described],
            router=make_router(settings.server.routing),
            link_timeout_s=settings.server.link_timeout_s,
            moved_streams=settings.server.moved_streams,
        )
        limits = fleet_limits([description.limits] * settings.cluster.range[1])
        seed = seed_of_front(settings.engine.seed, self._front)
        input_processor = InputProcessor(tokenizer, limits, seed, files.sampling)
        engine = AsyncLLM(fleet, input_processor, description.model_name)
        engine.warm_workers()
        self._finding = asyncio.create_task(self._find(fleet))
        return engine

    def _replica(self, description: Description, actor: Any) -> Replica:
        name, link = description.name, RayLink(actor, self._front)
        return Replica(name, description.limits, LinkTransport(link, name))

    async def _describe(self, known: Collection[str]) -> list[tuple[Description, Any]]:
        """The engines beside the known ones that can be reached."""
        try:
            actors = await asyncio.to_thread(_actors, self._prefix, known)
        except Exception as error:  # whatever Ray raises while its head is away
            log.debug("no engine can be found: %s", error)
            return []
        if actors:
            log.debug("%d actors of engines are asked who they are", len(actors))
        asked = [asyncio.wait_for(_described(actor), DESCRIBE_S) for actor in actors]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [
            (answer, actor)
            for answer, actor in zip(answers, actors, strict=True)
            if isinstance(answer, Description)
        ]

    async def _find(self, fleet: Fleet) -> None:
        """Let new engines join, and those that have gone leave."""
        while True:
            await asyncio.sleep(DISCOVERY_S)
            replicas = fleet.replicas
            for description, actor in await self._describe(replicas.keys()):
                if not description.is_draining:
                    fleet.join(self._replica(description, actor))
            for name, replica in replicas.items():
                # Requests may wait for the successor of the last one.
                has_gone = isinstance(replica, Replica) and replica.has_gone
                if has_gone and len(fleet.replicas) > 1:
                    await asyncio.to_thread(fleet.leave, name)


@serve.ingress()
class Front:
    """A deployment of Ray Serve: HTTP, text, keys, and a fleet of the engines of each model."""

    def __init__(self, plain: dict[str, dict[str, Any]], *_: Any) -> None:
        """`plain`: the settings of each model, by its name. `_`: the engines, which Ray starts
        because they are named here."""
        models = {name: AllSettings.from_plain(of_model) for name, of_model in plain.items()}
        settings = next(iter(models.values()))
        self._cluster, self._server = settings.cluster, settings.server
        _check_token(settings)  # `serve run` builds the application before Ray is started
        for of_model in models.values():
            if message := why_too_many(of_model.cluster, _machines(), of_model.cluster.range[0]):
                log.warning("replicas: %s", message)  # perhaps a machine has just died
        self._name = new_front_name()
        self._log = _logging(settings, front=self._name)
        self._engines = {
            name: EnginesOfModel(self._name, name, of_model) for name, of_model in models.items()
        }
        self._answering: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray: the server, once there is an engine of each model."""
        served = await asyncio.gather(*[engines.serve() for engines in self._engines.values()])
        page = Page() if self._server.ui else None
        if list(self._engines) == [""]:
            return self._app(served[0], page)
        launches = {
            name: partial(_same, engine) for name, engine in zip(self._engines, served, strict=True)
        }
        return await asyncio.to_thread(self._router, launches, page)

    def _router(self, launches: Mapping[str, Callable[[], AsyncLLM]], page: Page | None) -> Any:
        """The app over several models."""
        server = self._server
        make_app = partial(create_app, settings=server, is_inner=True)
        models = ModelRouter(
            LoadedModels(launches, make_app, limits=server.limits),
            unknown_model_statuses=unknown_model_statuses(server),
            keep_alive_s=server.keep_alive_s,
            stays="the models of a cluster stay loaded; replicas says how many engines each has",
        )
        models.load_all()
        return models.make_app(layers(server, (models.seen,), page=page), server.status_when_full)

    def _app(self, engine: AsyncLLM, page: Page | None) -> Any:
        num_fronts, server = self._cluster.fronts, self._server
        if num_fronts == 1:
            return create_app(engine, server, page=page)
        shared = SharedFronts(serve.get_replica_context().app_name, num_fronts)
        limits = FrontLimits(self._name, num_fronts, shared.sync)
        peers = RelayedPeers(self._name, shared)
        fronts = SeveralFronts(self._name, limits, peers)
        app = create_app(engine, server, page=page, fronts=fronts)
        self._answering = asyncio.create_task(peers.serve(app.state.views.own))
        return app


def _same(engine: AsyncLLM) -> AsyncLLM:
    return engine


class Autoscaler:
    """The policy of the engines' autoscaler: `engines_wanted` over what the engines report. Ray
    makes it with the settings' values, which a plain function would not get."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Number of engines, and nothing to be kept for the next call."""
        metrics = context.aggregated_metrics or {}
        values = {name: list(metrics.get(name, {}).values()) for name in EngineLoad.__slots__}
        count = max(map(len, values.values()), default=0)
        loads = [
            EngineLoad(**{name: numbers[i] for name, numbers in values.items() if i < len(numbers)})
            for i in range(count)
        ]
        if not loads:
            return max(context.capacity_adjusted_min_replicas, context.target_num_replicas), {}
        wanted = engines_wanted(
            loads,
            low=context.capacity_adjusted_min_replicas,
            high=context.capacity_adjusted_max_replicas,
            target_wait_s=self._target_wait_s,
        )
        return wanted, {}


def application(arguments: dict[str, Any]) -> Any:
    """The application of Ray Serve. Raises `ConfigError`."""
    check_version(ray.__version__)
    models = settings_of_models(arguments)
    settings = next(iter(models.values()))
    os.environ.setdefault(*NO_USAGE_STATISTICS)  # of a Ray that `serve run` starts after this
    warn_without_haproxy(os.environ)
    if ray.is_initialized():
        _check_token(settings)
        _check_room([of_model.cluster for of_model in models.values()])
    fronts = serve.deployment(
        Front,
        name="Front",
        num_replicas=settings.cluster.fronts,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": FRONT_VARIABLES}},
        max_ongoing_requests=open_requests(settings.server),
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s + 5,
    )
    plain = {name: of_model.to_plain() for name, of_model in models.items()}
    return fronts.bind(plain, *[_engines(name, of_model) for name, of_model in models.items()])


def _check_room(clusters: Sequence[ClusterSettings]) -> None:
    """Refuse engines for which the machines have no room."""
    machines = _machines()
    for cluster in clusters:
        low, high = cluster.range
        if message := why_too_many(cluster, machines, low):
            raise ConfigError("replicas", message)
        if message := why_too_many(cluster, machines, high):
            log.warning("replicas: %s, until it has more machines", message)
    if message := why_too_many_together(clusters, machines):
        raise ConfigError("models", message)


def _engines(name: str, settings: AllSettings) -> Any:
    """The deployment of the engines of a model, with its arguments."""
    cluster = settings.cluster
    low, high = cluster.range
    how: dict[str, Any] = {"num_replicas": low}
    if low < high:
        policy = AutoscalingPolicy(
            policy_function=f"{__name__}:{Autoscaler.__name__}",
            policy_kwargs={"target_wait_s": cluster.target_wait_s},
        )
        scaling = AutoscalingConfig(
            min_replicas=low,
            max_replicas=high,
            upscale_delay_s=cluster.scale_delay_s,
            downscale_delay_s=cluster.shrink_delay_s,
            look_back_period_s=_look_back_s(cluster.scale_delay_s),
            policy=policy,
        )
        how = {"autoscaling_config": scaling}
    if cluster.engines_per_machine:
        how["max_replicas_per_node"] = cluster.engines_per_machine
    engines = serve.deployment(
        Engine,
        name=f"Engine-{name}" if name else "Engine",
        ray_actor_options=actor_options(cluster),  # Ray spreads what has no placement group
        max_ongoing_requests=OPEN_REQUESTS,  # items do not pass through it
        graceful_shutdown_timeout_s=cluster.drain_timeout_s + 10,
        graceful_shutdown_wait_loop_s=ENDED_S,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        **how,
    )
    return engines.bind(settings.to_plain(), name)


def _look_back_s(delay_s: float) -> float:
    """Seconds over which loads are averaged: no longer than the delay, but two of their reports."""
    every_s = float(os.environ.get("RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "10"))
    return max(delay_s, 2 * every_s)


def _check_token(settings: AllSettings) -> None:
    """Refuse a Ray cluster that anyone may use."""
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    if _is_loopback(host) or _has_token():
        return
    message = (
        f"the Ray cluster at {host} has no token, so whoever reaches it may run code there;"
        " give it one (RAY_AUTH_MODE=token), or insecure=true"
    )
    if not settings.cluster.insecure:
        raise ConfigError("insecure", message)
    log.warning("%s", message)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _machines() -> list[Machine]:
    """The machines of the Ray cluster."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [Machine(node["Resources"], node.get("Labels") or {}) for node in alive]


def _has_token() -> bool:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())
