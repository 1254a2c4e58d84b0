"""The deployments of Ray Serve: `Engine` and `Front`

An `Engine` replica starts an `EngineActor` in its placement group, which has the engine's process
and one streaming call for each front. A `Front` replica has the server over a fleet of engines,
which it finds by asking all replicas once a second. Ray carries one item for each step and front.
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
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from infer.cluster.cluster_settings import AllSettings, engine_settings
from infer.cluster.engine_host import EngineHost, link_items
from infer.cluster.front_identity import new_front_name, seed_of_front
from infer.cluster.front_relay import RelayedPeers
from infer.cluster.link_messages import BEAT_S, Description, decode_description, encode
from infer.cluster.ray_version import check_version, warn_without_haproxy
from infer.cluster.remote_member import LinkBrokenError, RemoteMember
from infer.cluster.scaling import EngineLoad, engines_wanted
from infer.cluster.shared_fronts import SharedFronts
from infer.engine.client.async_llm import AsyncLLM
from infer.engine.client.input import InputProcessor
from infer.engine.fleet.fleet import Fleet, fleet_limits
from infer.engine.fleet.routing import make_router
from infer.engine.process.messages import Text
from infer.engine.process.supervisor import EngineProcess
from infer.errors import ConfigError, LoadError
from infer.server.app import create_app
from infer.server.fronts import SeveralFronts
from infer.server.tenancy.front_limits import FrontLimits
from infer.server.ui.page import Page
from infer.text.checkpoint_text import TextFiles
from infer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FACTORY = "infer.engine.build.assemble:prepare_process"
OPEN_REQUESTS = 10_000
"""requests that Ray lets a replica have; our own limits are below it"""
BACKPRESSURE = 256
"""items of a link that may wait at a front before its engine keeps them in its own queue"""
HEALTH_S = 2.0
"""seconds between two checks of an engine by Ray"""
DISCOVERY_S = 1.0
"""seconds between two rounds in which a front asks for engines"""
ROUND_TIMEOUT_S = 5.0
"""seconds that a round may take"""

_decode_files = msgspec.msgpack.Decoder(TextFiles).decode


class EngineActor:
    """An engine's process, and its ends of the links; an actor of Ray."""

    def __init__(self, plain: dict[str, Any], name: str) -> None:
        """`plain`: see `AllSettings.to_plain`. Raises the `LoadError` that keeps it from
        starting."""
        self._settings = AllSettings.from_plain(plain)
        self._name = name
        self._stop = threading.Event()
        self._is_ready = threading.Event()
        self._error: LoadError | None = None
        self._text: Text | None = None
        engine = engine_settings(self._settings.engine, self._settings.cluster)
        server = self._settings.server
        self._process = EngineProcess(
            FACTORY,
            engine,
            name=name,
            log_fields={"replica": name},
            hang_s=server.hang_s,
            load_timeout_s=server.load_timeout_s,
        )
        self._host = EngineHost(self._process)
        # An engine's process dies with the thread that started it; this one stays.
        self._keeper = threading.Thread(target=self._keep, name="infer-keeper", daemon=True)
        self._keeper.start()
        self._is_ready.wait()
        if self._error is not None:
            raise self._error

    def _keep(self) -> None:
        try:
            self._process.launch(self._read)
            self._process.start(self._host)
        except LoadError as error:
            self._error = error
            return
        finally:
            self._is_ready.set()
        while not self._stop.wait(BEAT_S):
            self._host.beat()
        self._process.stop()

    def _read(self, text: Text) -> None:
        self._text = text

    async def describe(self) -> bytes:
        """A `Description`, in msgpack."""
        assert self._text is not None
        process, name = self._process, self._text.model_name
        limits, fingerprint = process.limits, process.fingerprint
        is_draining = self._host.is_draining
        return encode(Description(self._name, name, limits, fingerprint, is_draining))

    async def text(self) -> bytes:
        """The text files of the checkpoint, in msgpack."""
        assert self._text is not None
        return encode(self._text.files)

    async def clock(self) -> float:
        """The clock of `StepEvents` on this machine."""
        return time.monotonic()

    async def link(self, front: str) -> AsyncIterator[bytes]:
        """The items for a front."""
        async for item in link_items(self._host, front):
            yield item

    async def command(self, front: str, item: bytes) -> None:
        """The commands of a front."""
        self._host.command(front, item)

    async def check(self) -> None:
        """Raise if the engine does not serve and will not soon."""
        if not self._stop.is_set() and not self._process.is_alive:
            raise RuntimeError("the engine has failed several times in a row")

    async def load(self) -> dict[str, float]:
        """What the engine has to do, for the autoscaler."""
        load = self._host.load()
        return {name: float(getattr(load, name)) for name in EngineLoad.__slots__}

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new; return when nothing runs any more, or the time is over."""
        self._host.drain(timeout_s)
        ends_s = time.monotonic() + timeout_s
        while self._host.num_unfinished and time.monotonic() < ends_s:
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
            num_cpus=cluster.cpus, num_gpus=cluster.gpus, max_concurrency=1000
        ).remote(plain, name)
        ray.get(self._actor.describe.remote())

    async def describe(self) -> tuple[bytes, Any] | None:
        """What a front needs: a `Description` in msgpack, and the actor. None if that has gone."""
        try:
            return await self._actor.describe.remote(), self._actor
        except RayError:
            return None

    async def check_health(self) -> None:
        """Called by Ray; raises if the replica is to be replaced."""
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


class RayCarrier:
    """A `Carrier` over an `EngineActor`."""

    def __init__(self, actor: Any, front: str) -> None:
        self._actor, self._front = actor, front
        self._stream: Any = None

    def connect(self) -> Iterator[bytes]:
        """See `Carrier`."""
        with _errors():
            options = {
                "num_returns": "streaming",
                "_generator_backpressure_num_objects": BACKPRESSURE,
            }
            self._stream = self._actor.link.options(**options).remote(self._front)
        return self._items()

    def _items(self) -> Iterator[bytes]:
        with _errors():
            for ref in self._stream:
                yield ray.get(ref)

    def offset_s(self) -> float:
        """See `Carrier`: of three round trips the shortest, if it is longer than the difference."""
        found = []
        with _errors():
            for _ in range(3):
                before_s = time.monotonic()
                theirs_s = ray.get(self._actor.clock.remote(), timeout=ROUND_TIMEOUT_S)
                took_s = time.monotonic() - before_s
                found.append((took_s, before_s + took_s / 2 - theirs_s))
        took_s, offset_s = min(found)
        return offset_s if abs(offset_s) > took_s else 0.0

    def send(self, item: bytes) -> None:
        """See `Carrier`."""
        with _errors():
            self._actor.command.remote(self._front, item)

    def close(self) -> None:
        """See `Carrier`."""
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
        _check_ray(self._settings)  # `serve run` builds the application before Ray is started
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
            [self._member(*each) for each in found],
            router=make_router(settings.server.routing),
            link_timeout_s=settings.server.link_timeout_s,
            moved_streams=settings.server.moved_streams,
        )
        limits = fleet_limits([description.limits] * settings.cluster.range[1])
        seed = seed_of_front(settings.engine.seed, self._name)
        engine = AsyncLLM(
            self._fleet, InputProcessor(tokenizer, limits, seed), description.model_name
        )
        engine.expect_grammars()
        self._finding = asyncio.create_task(self._find())
        page = Page() if settings.server.ui else None
        return self._app(engine, page)

    def _app(self, engine: AsyncLLM, page: Page | None) -> Any:
        cluster, server = self._settings.cluster, self._settings.server
        if cluster.fronts == 1:
            return create_app(engine, server, page=page)
        shared = SharedFronts(serve.get_replica_context().app_name, cluster.fronts)
        limits = FrontLimits(self._name, cluster.fronts, shared.exchange)
        peers = RelayedPeers(self._name, shared)
        fronts = SeveralFronts(self._name, limits, peers)
        app = create_app(engine, server, page=page, fronts=fronts)
        self._answering = asyncio.create_task(peers.serve(app.state.desk))
        return app

    def _member(self, description: Description, actor: Any) -> RemoteMember:
        return RemoteMember(description, RayCarrier(actor, self._name))

    async def _describe(self) -> list[tuple[Description, Any]]:
        """The engines that can be reached."""
        response = self._engines.broadcast("describe")
        try:
            results = await response.results_async(
                timeout_s=ROUND_TIMEOUT_S, return_exceptions=True
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
            members = fleet.members
            for description, actor in found:
                if description.name not in members and not description.is_draining:
                    fleet.join(self._member(description, actor))
            for name, member in members.items():
                # Requests may wait for the successor of the last one.
                has_gone = isinstance(member, RemoteMember) and member.has_gone
                if has_gone and len(fleet.members) > 1:
                    await asyncio.to_thread(fleet.leave, name)


def autoscale(context: AutoscalingContext, *, target_wait_s: float) -> tuple[int, dict[str, Any]]:
    """The policy of the engines' autoscaler: `engines_wanted` over what the engines report."""
    metrics = context.aggregated_metrics or {}
    values = {name: list(metrics.get(name, {}).values()) for name in EngineLoad.__slots__}
    count = max(map(len, values.values()), default=0)
    loads = [
        EngineLoad(**{name: each[i] for name, each in values.items() if i < len(each)})
        for i in range(count)
    ]
    wanted = engines_wanted(
        loads,
        low=context.capacity_adjusted_min_replicas,
        high=context.capacity_adjusted_max_replicas,
        target_wait_s=target_wait_s,
    )
    return wanted, {}


def application(arguments: dict[str, Any]) -> Any:
    """The application of Ray Serve. Raises `ConfigError`."""
    check_version(ray.__version__)
    settings = AllSettings.of(arguments)
    warn_without_haproxy(os.environ)
    _check_ray(settings)
    cluster, plain = settings.cluster, settings.to_plain()
    low, high = cluster.range
    bundle = {"CPU": float(cluster.cpus)} | ({"GPU": cluster.gpus} if cluster.gpus else {})
    how: dict[str, Any] = {"num_replicas": low}
    if low < high:
        policy = AutoscalingPolicy(
            policy_function=f"{__name__}:autoscale",
            policy_kwargs={"target_wait_s": cluster.target_wait_s},
        )
        how = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=low,
                max_replicas=high,
                upscale_delay_s=cluster.scale_delay_s,
                downscale_delay_s=cluster.shrink_delay_s,
                policy=policy,
            )
        }
    engines = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=[bundle],
        max_ongoing_requests=OPEN_REQUESTS,
        graceful_shutdown_timeout_s=cluster.drain_timeout_s + 10,
        health_check_period_s=HEALTH_S,
        **how,
    )
    fronts = serve.deployment(
        Front,
        name="Front",
        num_replicas=cluster.fronts,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=OPEN_REQUESTS,
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s + 5,
    )
    return fronts.bind(plain, engines.bind(plain))


def _check_ray(settings: AllSettings) -> None:
    """Refuse a Ray cluster that anyone may use, and one that is too small; once it is known."""
    if not ray.is_initialized():
        return
    cluster = settings.cluster
    host = ray.get_runtime_context().gcs_address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        if not ipaddress.ip_address(host).is_loopback and not _has_token():
            message = (
                f"the Ray cluster at {host} has no token, so whoever reaches it may run code there;"
                " give it one (RAY_AUTH_MODE=token), or insecure=true"
            )
            if not cluster.insecure:
                raise ConfigError("insecure", message)
            log.warning("%s", message)
    fitting = int(ray.cluster_resources().get("CPU", 0) // cluster.cpus)
    if fitting < cluster.range[0]:
        raise ConfigError(
            "replicas",
            f"{cluster.range[0]} engines with {cluster.cpus} cores each do not fit this cluster;"
            f" {fitting} do",
        )


def _has_token() -> bool:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())
