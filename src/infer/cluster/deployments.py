"""The deployments of Ray Serve: `Engine` and `Front`

An `Engine` replica starts an `EngineActor` in its placement group, which has the engine's process
and one streaming call for each front. A `Front` replica has the server over a fleet of engines,
which it finds by asking all replicas once a second. Ray carries the steps to each front; those that
follow one another within `ITEM_S` share an item.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from infer.cluster.cluster_settings import (
    OPEN_REQUESTS,
    AllSettings,
    engine_settings,
    open_requests,
    resources_of,
    why_too_many,
)
from infer.cluster.front_identity import new_front_name, seed_of_front
from infer.cluster.front_relay import RelayedPeers
from infer.cluster.ordered_stream import CommandOrder, link_items
from infer.cluster.ray_version import check_version, warn_without_haproxy
from infer.cluster.scaling import engines_wanted
from infer.cluster.shared_fronts import SharedFronts
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
from infer.replicas.standby import Standby
from infer.server.app import create_app
from infer.server.fronts import SeveralFronts
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.ui.page import Page
from infer.text.checkpoint_text import TextFiles
from infer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FACTORY = "infer.engine.build.assemble:prepare_process"
BACKPRESSURE = 256
"""items of a link that may wait at a front before its engine keeps them in its own queue"""
HEALTH_S = 2.0
"""seconds between two checks of an engine by Ray"""
HEALTH_TIMEOUT_S = 10.0
"""seconds that a check may take; after three that fail Ray replaces the engine"""
MAX_RESTARTS = 10
"""times that Ray starts the actor of an engine again before the whole replica is replaced"""
DESCRIBE_S = 1.0
"""seconds that an engine's actor has to say who it is; it may be frozen, or being started again"""
ASKED_S = 0.1
"""seconds that Ray waits, before an engine drains, for calls that ask it who it is"""
MOVE_S = 0.5
"""seconds that fronts have to move what is left at the end of a drain"""
DISCOVERY_S = 1.0
"""seconds between two rounds in which a front asks for engines"""
DISCOVERY_TIMEOUT_S = 2.5
"""seconds that a round may take"""
CLOCK_TIMEOUT_S = 5.0
"""seconds that an engine's actor has to tell its time"""
NO_USAGE_STATISTICS = ("RAY_USAGE_STATS_ENABLED", "0")
"""Ray else reports to its makers how it is used"""
FRONT_VARIABLES = {"RAY_timeout_ms_task_wait_for_death_info": "0"}
"""environment of fronts: Ray else waits for a second before it says that an actor has died"""

_decode_files = msgspec.msgpack.Decoder(TextFiles).decode


class EngineActor:
    """An engine's process, and its ends of the links; an actor of Ray."""

    def __init__(self, plain: dict[str, Any], name: str) -> None:
        """`plain`: see `AllSettings.to_plain`. The engine is loaded meanwhile; see `ready`."""
        self._settings = AllSettings.from_plain(plain)
        self._name = name
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
        """None until the engine is loaded"""
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

    async def describe(self) -> bytes:
        """A `Description`, in msgpack."""
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
            async for item in link_items(host, front):
                yield item
        finally:
            self._order.forget(front, number)

    async def command(self, front: str, link: int, number: int, item: bytes) -> None:
        """The commands of a front; calls may come in another order than they were made."""
        for each in self._order.arrived(front, link, number, item):
            if self._host is not None:
                self._host.command(front, each)

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

    def __init__(self, plain: dict[str, Any]) -> None:
        cluster = AllSettings.from_plain(plain).cluster
        self._drain_timeout_s = cluster.drain_timeout_s
        name = serve.get_replica_context().replica_id.unique_id
        actor = ray.remote(EngineActor)
        self._actor = actor.options(
            num_cpus=cluster.cpus,
            num_gpus=cluster.gpus,
            max_concurrency=1000,
            max_restarts=MAX_RESTARTS,
        ).remote(plain, name)
        ray.get(self._actor.ready.remote())

    async def describe(self) -> tuple[bytes, Any] | None:
        """What a front needs: a `Description` in msgpack, and the actor. None if that does not
        answer."""
        try:
            return await asyncio.wait_for(self._actor.describe.remote(), DESCRIBE_S), self._actor
        except (RayError, TimeoutError):
            return None

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
        """number of the link, and of its commands so far; see `CommandOrder`"""

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
        found = []
        with _errors():
            for _ in range(3):
                before_s = time.monotonic()
                theirs_s = ray.get(self._actor.clock.remote(), timeout=CLOCK_TIMEOUT_S)
                took_s = time.monotonic() - before_s
                found.append((took_s, before_s + took_s / 2 - theirs_s))
        took_s, offset_s = min(found)
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


@serve.ingress()
class Front:
    """A deployment of Ray Serve: HTTP, text, keys, and a fleet of the engines."""

    def __init__(self, plain: dict[str, Any], engines: Any) -> None:
        self._settings = AllSettings.from_plain(plain)
        _check_token(self._settings)  # `serve run` builds the application before Ray is started
        cluster = self._settings.cluster
        if message := why_too_many(cluster, _machines(), cluster.range[0]):
            log.warning("replicas: %s", message)  # perhaps a machine has just died
        self._engines = engines
        self._name = new_front_name()
        self._finding: asyncio.Task[None] | None = None
        self._answering: asyncio.Task[None] | None = None
        self._fleet: Fleet | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray: the server, once there is an engine."""
        while not (found := await self._describe()):
            await asyncio.sleep(0.5)
        settings, (description, actor) = self._settings, found[0]
        files = _decode_files(await actor.text.remote())
        tokenizer = await asyncio.to_thread(Tokenizer, files)
        self._fleet = Fleet(
            [self._replica(*each) for each in found],
            router=make_router(settings.server.routing),
            link_timeout_s=settings.server.link_timeout_s,
            moved_streams=settings.server.moved_streams,
        )
        limits = fleet_limits([description.limits] * settings.cluster.range[1])
        seed = seed_of_front(settings.engine.seed, self._name)
        input_processor = InputProcessor(tokenizer, limits, seed, files.sampling)
        engine = AsyncLLM(self._fleet, input_processor, description.model_name)
        engine.warm_workers()
        self._finding = asyncio.create_task(self._find())
        page = Page() if settings.server.ui else None
        return self._app(engine, page)

    def _app(self, engine: AsyncLLM, page: Page | None) -> Any:
        cluster, server = self._settings.cluster, self._settings.server
        if cluster.fronts == 1:
            return create_app(engine, server, page=page)
        shared = SharedFronts(serve.get_replica_context().app_name, cluster.fronts)
        limits = FrontLimits(self._name, cluster.fronts, shared.sync)
        peers = RelayedPeers(self._name, shared)
        fronts = SeveralFronts(self._name, limits, peers)
        app = create_app(engine, server, page=page, fronts=fronts)
        self._answering = asyncio.create_task(peers.serve(app.state.views.own))
        return app

    def _replica(self, description: Description, actor: Any) -> Replica:
        name, link = description.name, RayLink(actor, self._name)
        return Replica(name, description.limits, LinkTransport(link, name))

    async def _describe(self) -> list[tuple[Description, Any]]:
        """The engines that can be reached."""
        response = self._engines.broadcast("describe")
        try:
            # `results_async` has no result at all where one replica is frozen.
            results = await asyncio.to_thread(
                response.results, timeout_s=DISCOVERY_TIMEOUT_S, return_exceptions=True
            )
        except (RayServeException, RayError, TimeoutError) as error:
            log.debug("no engine can be asked: %s", error)  # such as before the first one is ready
            return []
        return [
            (decode_description(each[0]), each[1])
            for each in results
            if each is not None and not isinstance(each, BaseException)
        ]

    async def _find(self) -> None:
        """Let new engines join, and those that have gone leave."""
        fleet = self._fleet
        assert fleet is not None
        while True:
            await asyncio.sleep(DISCOVERY_S)
            found = await self._describe()
            replicas = fleet.replicas
            for description, actor in found:
                if description.name not in replicas and not description.is_draining:
                    fleet.join(self._replica(description, actor))
            for name, replica in replicas.items():
                # Requests may wait for the successor of the last one.
                has_gone = isinstance(replica, Replica) and replica.has_gone
                if has_gone and len(fleet.replicas) > 1:
                    await asyncio.to_thread(fleet.leave, name)


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
            EngineLoad(**{name: each[i] for name, each in values.items() if i < len(each)})
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
    settings = AllSettings.of(arguments)
    os.environ.setdefault(*NO_USAGE_STATISTICS)  # of a Ray that `serve run` starts after this
    warn_without_haproxy(os.environ)
    if ray.is_initialized():
        _check_token(settings)
        machines, (low, high) = _machines(), settings.cluster.range
        if message := why_too_many(settings.cluster, machines, low):
            raise ConfigError("replicas", message)
        if message := why_too_many(settings.cluster, machines, high):
            log.warning("replicas: %s, until it has more machines", message)
    cluster, plain = settings.cluster, settings.to_plain()
    low, high = cluster.range
    bundle = resources_of(cluster)
    how: dict[str, Any] = {"num_replicas": low}
    if low < high:
        policy = AutoscalingPolicy(
            policy_function=f"{__name__}:{Autoscaler.__name__}",
            policy_kwargs={"target_wait_s": cluster.target_wait_s},
        )
        how = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=low,
                max_replicas=high,
                upscale_delay_s=cluster.scale_delay_s,
                downscale_delay_s=cluster.shrink_delay_s,
                look_back_period_s=_look_back_s(cluster.scale_delay_s),
                policy=policy,
            )
        }
    engines = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[bundle],
        max_ongoing_requests=OPEN_REQUESTS,  # items do not pass through it
        graceful_shutdown_timeout_s=cluster.drain_timeout_s + 10,
        graceful_shutdown_wait_loop_s=ASKED_S,
        health_check_period_s=HEALTH_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        **how,
    )
    fronts = serve.deployment(
        Front,
        name="Front",
        num_replicas=cluster.fronts,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": FRONT_VARIABLES}},
        max_ongoing_requests=open_requests(settings.server),
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s + 5,
    )
    return fronts.bind(plain, engines.bind(plain))


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


def _machines() -> list[dict[str, float]]:
    """Resources of each machine of the Ray cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _has_token() -> bool:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())
