"""`ClusterSettings`: what `serve run infer.cluster:app KEY=VALUE ...` and its YAML may say"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from infer.config import (
    EngineConfig,
    PositiveInt,
    Setting,
    at_least,
    check_fields,
    option,
    settings_of,
    unknown_setting,
)
from infer.errors import ConfigError
from infer.server.served_models import MODEL_NAME
from infer.server.sessions import NO_SESSIONS
from infer.server.settings import ServerSettings

OF_A_FRONT = ("fronts", "insecure")
"""Settings of a cluster that all its models share."""
C = TypeVar("C")

MAX_ENGINES = 4096
"""Maximum of the engines of a cluster."""
MAX_ENGINES_PER_MACHINE = 100
"""The most that Ray Serve takes as a limit."""
_LABEL = re.compile("!?[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
_LABEL_NAME = re.compile("([a-zA-Z0-9.-]{1,200}/)?[a-zA-Z0-9]([a-zA-Z0-9_.-]{0,61}[a-zA-Z0-9])?")
OPEN_REQUESTS = 10_000
"""Requests that Ray lets a replica have, at least; our own limits are below it."""
NOT_IN_A_CLUSTER = {
    "uds": "Ray Serve decides where it listens",
    "ssl_certfile": "Ray Serve speaks plain HTTP; end TLS in front of it",
    "ssl_keyfile": "Ray Serve speaks plain HTTP; end TLS in front of it",
    **dict.fromkeys(
        ("load_on_first_use", "idle_unload_s", "when_not_loaded", "models_memory_bytes"),
        "the engines of a cluster stay; replicas says how many there are",
    ),
    "models_dir": "give models, a table of names with path and replicas",
    "drain_delay_s": "Ray Serve takes a front from its proxies before it ends it",
    "metrics_port": "the fronts answer /metrics where Ray Serve listens",
}
"""Settings of the server that have no meaning here, and why."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """The keys are those of this class, of `EngineConfig` and of `ServerSettings`, as `infer serve`
    has them, and `models`, which are several in one application. Values may be strings, as on a
    command line. The constructor raises `ConfigError`."""

    replicas: str = option(
        "1", "Engines: a number, or the fewest and the most, such as 1-3, between which Ray scales."
    )
    fronts: PositiveInt = option(1, "Processes that answer HTTP; any of them may die.")
    cpus: PositiveInt = option(1, "Cores of each engine.")
    gpus: Annotated[float, at_least(0.0)] = option(0.0, "GPUs of each engine.")
    memory_gib: Annotated[float, at_least(0.0)] = option(
        0.0,
        "GiB of main memory that Ray keeps for each engine, so that machines get no more engines"
        " than fit; 0 = Ray does not count it.",
    )
    accelerator: str | None = option(
        None, "Only machines with this kind of accelerator, as Ray names it (H100); needs gpus."
    )
    node_selector: str | None = option(
        None,
        "Engines run only on machines with these labels, as `ray start --labels` gave them:"
        " zone=a,disk=!hdd (! = any other value, or none).",
    )
    engines_per_machine: Annotated[int, Meta(ge=1, le=MAX_ENGINES_PER_MACHINE)] | None = option(
        None, "Most engines on one machine, so that its death takes no more; default: what fits."
    )
    drain_timeout_s: Annotated[float, at_least(0)] = option(
        30.0, "Seconds that requests have to finish where an engine ends; the rest moves."
    )
    target_wait_s: Annotated[float, at_least(0.01)] = option(
        2.0, "Seconds for which prompts may wait before there is to be one more engine."
    )
    scale_delay_s: Annotated[float, at_least(0)] = option(
        30.0, "Seconds for which more engines must be needed before one is started."
    )
    shrink_delay_s: Annotated[float, at_least(0)] = option(
        600.0, "Seconds for which fewer engines must be needed before one is ended."
    )
    insecure: bool = option(
        False, "Serve without keys, or on a Ray cluster without a token, where others can reach it."
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.range, self.labels
        if self.accelerator and not self.gpus:
            raise ConfigError("accelerator", "is of no use without gpus: give gpus=1")

    @property
    def labels(self) -> dict[str, str]:
        """`node_selector`: what machines must have, by the labels' names."""
        labels = {}
        for pair in self.node_selector.split(",") if self.node_selector else ():
            name, equals, value = map(str.strip, pair.partition("="))
            if not equals or not _LABEL_NAME.fullmatch(name) or not _LABEL.fullmatch(value):
                raise ConfigError(
                    "node_selector", f"{pair!r:.80} is not a label such as zone=a or disk=!hdd"
                )
            labels[name] = value
        return labels

    @property
    def range(self) -> tuple[int, int]:
        """The fewest and the most engines."""
        first, _, last = self.replicas.partition("-")
        try:
            low, high = int(first), int(last or first)
        except ValueError:
            low, high = 0, 0
        if high > MAX_ENGINES:
            raise ConfigError("replicas", f"must be at most {MAX_ENGINES}, not {self.replicas:.80}")
        if not 1 <= low <= high:
            raise ConfigError(
                "replicas",
                f"{self.replicas!r:.80} is not a number such as 2 or a range such as 1-3",
            )
        return low, high


@dataclass(frozen=True, kw_only=True)
class AllSettings:
    """The settings of a cluster, of its engines and of its fronts."""

    cluster: ClusterSettings
    engine: EngineConfig
    server: ServerSettings

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> AllSettings:
        """From keys and values; raises `ConfigError` for an unknown key or an impossible value."""
        kinds: tuple[Any, ...] = (ClusterSettings, EngineConfig, ServerSettings)
        specs = [{spec.name: spec for spec in settings_of(kind)} for kind in kinds]
        values: list[dict[str, Any]] = [{} for _ in kinds]
        for key, value in arguments.items():
            if key in NOT_IN_A_CLUSTER:
                raise ConfigError(key, f"has no meaning in a cluster: {NOT_IN_A_CLUSTER[key]}")
            # The first that knows it: some settings of the cluster replace those of the server.
            index = next((i for i, names in enumerate(specs) if key in names), None)
            if index is None:
                raise unknown_setting(key, [name for names in specs for name in names])
            values[index][key] = _value(specs[index][key], value)
        cluster, engine, server = values
        if str(cluster.get("fronts", 1)) != "1":
            # A file in the state folder of each front's machine would show each its own sessions.
            server.setdefault("sessions", NO_SESSIONS)
        settings = cls(
            cluster=ClusterSettings(**cluster),
            engine=EngineConfig(**engine),
            server=ServerSettings(**server),
        )
        settings._check()
        return settings

    def _check(self) -> None:
        sessions, fronts = self.server.sessions, self.cluster.fronts
        is_shared = sessions in (None, NO_SESSIONS) or re.match(r"postgresql(\+\w+)?://", sessions)
        if fronts > 1 and not is_shared:
            kind = str(sessions).partition(":")[0]
            raise ConfigError(
                "sessions",
                f"{fronts} fronts need one database that all of them reach, and not {kind}: give a"
                " postgresql+psycopg:// URL, sessions=off, or fronts=1",
            )
        if self.server.api_keys is None and not self.cluster.insecure:
            raise ConfigError(
                "api_keys",
                "there are none, and Ray Serve may listen on every interface; give api_keys=FILE"
                " (infer keys create), or insecure=true where only trusted machines reach it",
            )

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """The settings as plain values, which can be sent to another process."""
        parts: dict[str, Any] = vars(self)
        kinds: dict[str, Any] = {name: type(part) for name, part in parts.items()}
        return {
            name: {spec.name: getattr(part, spec.name) for spec in settings_of(kinds[name])}
            for name, part in parts.items()
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Mapping[str, Any]]) -> AllSettings:
        """The settings that `to_plain` has made."""
        return cls(
            cluster=ClusterSettings(**plain["cluster"]),
            engine=EngineConfig(**plain["engine"]),
            server=ServerSettings(**plain["server"]),
        )


def settings_of_models(arguments: Mapping[str, Any]) -> dict[str, AllSettings]:
    """The settings of each model by its name; one without a name where there is no `models`, which
    has for each name its `path`, and what it has instead of the others' settings of engines. Raises
    `ConfigError`."""
    common = {key: value for key, value in arguments.items() if key != "models"}
    everybody = AllSettings.of(common)
    if "models" not in arguments:
        return {"": everybody}
    for key in ("model", "served_model_name"):
        if key in common:
            raise ConfigError(key, "is of one model; in models each has its name and its path")
    if everybody.cluster.fronts > 1:
        message = "several models in one application have one front: for more, give each its own"
        raise ConfigError("fronts", message)
    return {
        name: _settings_of_model(name, settings, common)
        for name, settings in _table(arguments["models"]).items()
    }


def _table(models: Any) -> Mapping[str, Any]:
    """The value of `models`, which may be JSON."""
    try:
        table = json.loads(models) if isinstance(models, str) else models
    except ValueError as error:
        raise ConfigError("models", f"is no JSON: {error}") from None
    if not isinstance(table, Mapping) or not table:
        example = '{"small": {"path": "/srv/small", "replicas": "1-3"}}'
        raise ConfigError("models", f"must be a table of names, such as {example}")
    return table


def _settings_of_model(name: str, settings: Any, common: Mapping[str, Any]) -> AllSettings:
    """Raises `ConfigError`, which names the model."""
    of_engines = [*settings_of(EngineConfig), *settings_of(ClusterSettings)]
    known = {spec.name for spec in of_engines} - {"model", "served_model_name", *OF_A_FRONT}
    try:
        if not re.fullmatch(MODEL_NAME, name):
            raise ConfigError("name", "must be letters, digits and ._-")
        if not isinstance(settings, Mapping) or not settings.get("path"):
            raise ConfigError("path", "is missing")
        for key in settings:
            if key not in known and key != "path":
                raise ConfigError(key, "is no setting of one model")
        mine = {key: value for key, value in settings.items() if key != "path"}
        return AllSettings.of(
            {**common, **mine, "model": settings["path"], "served_model_name": name}
        )
    except ConfigError as error:
        raise ConfigError("models", f"{name!r:.100}: {error}") from None


def engine_settings(config: EngineConfig, cluster: ClusterSettings) -> dict[str, Any]:
    """The settings that an engine's process gets: it has its share of the machine's cores."""
    settings = dataclasses.asdict(config)
    if settings["num_threads"] is None and not cluster.gpus:
        settings["num_threads"] = cluster.cpus
    return settings


@dataclass(frozen=True)
class Machine:
    """A machine of a Ray cluster."""

    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str, wanted: str) -> bool:
        """Whether it has a label with the value that `node_selector` wants."""
        if wanted.startswith("!"):
            return self.labels.get(name) != wanted[1:]
        return self.labels.get(name) == wanted


def resources_of(cluster: ClusterSettings) -> dict[str, float]:
    """What Ray reserves for an engine, by Ray's names."""
    resources = {"CPU": float(cluster.cpus)}
    if cluster.gpus:
        resources["GPU"] = cluster.gpus
    if cluster.memory_gib:
        resources["memory"] = float(int(cluster.memory_gib * 2**30))
    if cluster.accelerator:  # Ray has one on each machine of the kind, for selection only
        resources[f"accelerator_type:{cluster.accelerator}"] = 0.001
    return resources


def actor_options(cluster: ClusterSettings) -> dict[str, Any]:
    """The same, as Ray Serve has it for an actor, and where it may run."""
    resources = resources_of(cluster)
    options: dict[str, Any] = {"num_cpus": resources.pop("CPU")}
    for name, option_name in (("GPU", "num_gpus"), ("memory", "memory")):
        if name in resources:
            options[option_name] = resources.pop(name)
    options["resources"] = resources
    if cluster.labels:
        options["label_selector"] = cluster.labels
    return options


def num_fitting(cluster: ClusterSettings, machines: Sequence[Machine]) -> int:
    """How many engines these machines have room for."""
    wanted, labels = resources_of(cluster), cluster.labels
    most = cluster.engines_per_machine or MAX_ENGINES
    return sum(
        min(most, *(int(machine.resources.get(name, 0) // n) for name, n in wanted.items()))
        for machine in machines
        if all(machine.has(*label) for label in labels.items())
    )


def why_too_many(cluster: ClusterSettings, machines: Sequence[Machine], count: int) -> str:
    """Why these machines have no room for so many engines; "" if they have it."""
    fitting = num_fitting(cluster, machines)
    if fitting >= count:
        return ""
    needs = f"cpus={cluster.cpus}" + (f", gpus={cluster.gpus:g}" if cluster.gpus else "")
    needs += f", memory_gib={cluster.memory_gib:g}" if cluster.memory_gib else ""
    for name in ("accelerator", "node_selector", "engines_per_machine"):
        value = getattr(cluster, name)
        needs += f", {name}={value}" if value else ""
    return (
        f"{count} engines with {needs} do not fit the {len(machines)} machines of this cluster;"
        f" {fitting} do"
    )


def why_too_many_together(clusters: Sequence[ClusterSettings], machines: Sequence[Machine]) -> str:
    """Why these machines cannot have the fewest engines of several models; "" where none of their
    resources is too little for all together."""
    wanted: defaultdict[str, float] = defaultdict(float)
    for cluster in clusters:
        for name, count in resources_of(cluster).items():
            wanted[name] += count * cluster.range[0]
    for name, count in wanted.items():
        total = sum(machine.resources.get(name, 0) for machine in machines)
        if count > total:
            return f"all engines together need {name}={count:g}, and this cluster has {total:g}"
    return ""


def open_requests(server: ServerSettings) -> int:
    """Requests that Ray lets a front have. Connections end at Ray's proxies, so `max_connections`
    can only be more of them: requests beyond it would wait there without an answer, and those
    beyond the limits of a front get 503."""
    return max(OPEN_REQUESTS, server.max_connections)


def _value(spec: Setting, value: Any) -> Any:
    """A value in the type of its setting; strings are read as on a command line."""
    if spec.takes_mapping and isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        return str(value) if spec.kind is str and value is not None else value
    return spec.from_text(value)
