"""`Configuration`: the settings of a server from flags, variables and a file, and their origins"""

from __future__ import annotations

import json
import logging
import os
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from infer.config import EngineConfig, Setting, settings_of, unknown_setting
from infer.errors import ConfigError
from infer.files import MAX_CONFIG_BYTES, read_text
from infer.private_files import warn_if_shared
from infer.server.served_models import MODEL_NAME, Presets, configs_of
from infer.server.settings import ListenAddress, ServerSettings

log = logging.getLogger("infer.server")

PREFIX = "INFER_"
MODEL = "model"
"""The setting that may be several: a list of `[NAME=]PATH`."""
MODELS = "models"
"""The table of a file with a path for each name."""
PATH, ALIASES = "path", "aliases"
"""What a model's table in it may have beside settings of its engine."""
NOT_OF_ONE = frozenset({MODEL, "served_model_name"})
"""Settings of an engine that its name and path stand for there."""
KINDS: tuple[Any, ...] = (ListenAddress, ServerSettings, EngineConfig)
FILE_VARIABLE = f"{PREFIX}CONFIG"
OTHER_VARIABLES = (
    *(FILE_VARIABLE, "INFER_API_KEY", "INFER_ISA", "INFER_LINEAR", "INFER_WRAP_CORE"),
    "INFER_REQUIRE_KERNELS",
)
"""Variables that are no settings of a server."""
_LINK = re.compile(r"\w+://\d")
"""What Kubernetes puts into `INFER_PORT` where a service has the name `infer`."""
_KEY = re.compile(r"""\s*(?:"([^"]+)"|'([^']+)'|([A-Za-z0-9_-]+))\s*=""")
_TABLE = re.compile(r"\s*\[+\s*([A-Za-z0-9_-]+)")


class Given(NamedTuple):
    """A value that somebody has chosen."""

    value: Any
    origin: str
    """A flag, a variable, or a file with its line."""
    is_flag: bool = False


def settings_by_name() -> dict[str, Setting]:
    """All settings of a server, in the order of `KINDS`."""
    return {setting.name: setting for kind in KINDS for setting in settings_of(kind)}


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return f"--{name.replace('_', '-')}"


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"{PREFIX}{name.upper()}"


@dataclass(frozen=True)
class Configuration:
    """A flag wins over an `INFER_…` variable, that over the file of `--config` (TOML), that over
    the default. The names are those of the settings classes, so a new setting has a flag, a
    variable and a key at once. A file that holds a secret should be its owner's alone; a secret in
    a flag is refused, because everybody on the machine can read the command lines of processes."""

    given: Mapping[str, Given]
    """What was chosen, by the setting's name."""
    address: ListenAddress
    server: ServerSettings
    configs: EngineConfig | dict[str, EngineConfig]
    presets: Presets
    """What the file says of models by their names."""

    @classmethod
    def read(
        cls, flags: Mapping[str, Any], file: Path | None, variables: Mapping[str, str] = os.environ
    ) -> Configuration:
        """From the flags that were given, the variables, and the file if there is one. Raises
        `ConfigError` for what is unknown, impossible or contradicts itself."""
        over = {**_of_variables(variables), **_of_flags(flags)}
        given = {**_of_file(file), **over}
        address, server = _made(ListenAddress, given), _made(ServerSettings, given)
        _check_together(given, address, server)
        names = [setting.name for setting in settings_of(EngineConfig) if setting.name != MODEL]
        engine = {name: given[name].value for name in names if name in given}
        models = given[MODEL].value if MODEL in given else []
        presets = _presets(given, engine, set(over), server)
        try:
            has_folder = server.models_dir is not None
            configs = configs_of(models, engine, presets.of_models, has_folder=has_folder)
        except ConfigError as error:
            raise _with_origin(error, given) from None
        _check_aliases(presets, configs, given)
        return cls(given, address, server, configs, presets)

    def rows(self) -> list[dict[str, Any]]:
        """Each setting: its name, its value without secrets, and where that is from."""
        rows = []
        for name, setting in settings_by_name().items():
            given = self.given.get(name, Given(setting.default, "default"))
            value = given.value
            if name == MODEL and value and len(value) == 1:
                (value,) = value
            rows.append({"name": name, "value": setting.shown(value), "from": given.origin})
        return rows


def _is_secret(setting: Setting, value: Any) -> bool:
    return bool(setting.secret) and setting.shown(value) != value


def refuse_secrets(flags: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a flag with a secret."""
    known = settings_by_name()
    for name, value in flags.items():
        if _is_secret(known[name], value):
            message = f"everybody on this machine can read a password in {flag_of(name)}: give it"
            raise ConfigError(name, f"{message} as {variable_of(name)} or in the file of --config")


def _of_flags(flags: Mapping[str, Any]) -> dict[str, Given]:
    refuse_secrets(flags)
    return {name: Given(value, flag_of(name), True) for name, value in flags.items()}


def _of_variables(variables: Mapping[str, str]) -> dict[str, Given]:
    given = {}
    known = {variable_of(name): setting for name, setting in settings_by_name().items()}
    for variable, text in variables.items():
        if not variable.startswith(PREFIX) or not text or variable in OTHER_VARIABLES:
            continue
        setting = known.get(variable)
        if setting is None:
            if near := get_close_matches(variable, known, n=1, cutoff=0.85):
                log.warning("%s is no setting; was %s meant?", variable, near[0])
        elif setting.kind is int and _LINK.match(text):
            log.warning("%s=%s is not a port, but a link of Kubernetes: left out", variable, text)
        else:
            value = _models_of(text) if setting.name == MODEL else _read(setting, text, variable)
            given[setting.name] = Given(value, variable)
    return given


def _read(setting: Setting, text: str, origin: str) -> Any:
    try:
        return setting.from_text(text)
    except ConfigError as error:
        raise ConfigError(setting.name, f"{_message(error)} ({origin})") from None


def _models_of(text: str) -> list[str]:
    """One model, or several as JSON: a list of `NAME=PATH`."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text, type=list[str])
    except msgspec.MsgspecError as error:
        message = f"must be a path or a JSON list of NAME=PATH, not {text!r:.80}: {error}"
        raise ConfigError(MODEL, message) from None


def _of_file(file: Path | None) -> dict[str, Given]:
    if file is None:
        return {}
    try:
        text = read_text(file.expanduser(), MAX_CONFIG_BYTES)
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError("config", f"{str(file)!r} cannot be read: {reason}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError("config", f"{str(file)!r} is no TOML: {error}") from None
    known, lines = settings_by_name(), _lines_of(text)
    given: dict[str, Given] = {}
    for name, value in content.items():
        origin = f"{file}:{lines[name]}" if name in lines else str(file)
        if name == MODELS and MODEL in given:
            raise ConfigError(MODEL, f"is given twice in {file}: as {MODEL} and as {MODELS}")
        if name in (MODEL, MODELS):
            given[MODEL] = Given(_models_in_file(name, value, origin), origin)
            if name == MODELS:
                tables = {key: table for key, table in value.items() if isinstance(table, dict)}
                given[MODELS] = Given(tables, origin)
        elif name not in known:
            problem = _message(unknown_setting(name, [*known, MODELS]))
            raise ConfigError(name, f"{problem} ({origin})")
        else:
            given[name] = Given(_natural(known[name], value), origin)
    if any(
        name in known and _is_secret(known[name], setting.value) for name, setting in given.items()
    ):
        warn_if_shared(file.expanduser())
    return given


def _models_in_file(name: str, value: Any, origin: str) -> list[str]:
    if name == MODELS and isinstance(value, dict) and all(map(_is_model, value.values())):
        for key in value:
            if not re.fullmatch(MODEL_NAME, key):
                raise ConfigError(
                    name, f"{key!r} is no name, which has letters, digits, ._- only ({origin})"
                )
        paths = {
            key: model[PATH] if isinstance(model, dict) else model
            for key, model in value.items()
            if not isinstance(model, dict) or PATH in model
        }
        return [f"{key}={path}" for key, path in paths.items()]
    texts = value if isinstance(value, list) else [value]
    if name == MODELS or not texts or not all(map(_is_text, texts)):
        form = (
            "a table of names, with a path or a table for each"
            if name == MODELS
            else "a path, or a list of NAME=PATH"
        )
        raise ConfigError(name, f"must be {form}, not {value!r:.80} ({origin})")
    return texts


def _is_model(value: object) -> bool:
    if not isinstance(value, dict):
        return _is_text(value)
    aliases = value.get(ALIASES, [])
    is_list = isinstance(aliases, list) and all(map(_is_text, aliases))
    return is_list and _is_text(value.get(PATH, "-"))


def _presets(
    given: Mapping[str, Given],
    settings: Mapping[str, Any],
    over: Collection[str],
    server: ServerSettings,
) -> Presets:
    """What a file says of models by their names; `over`: what flags and variables say, which win.
    Raises `ConfigError`."""
    if MODELS not in given:
        return Presets(settings)
    tables, origin, _ = given[MODELS]
    known = {setting.name: setting for setting in settings_of(EngineConfig)}
    own_settings: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    for model, table in tables.items():
        if PATH not in table and server.models_dir is None:
            message = f"{model!r} has no path, and there is no models_dir it could be in"
            raise ConfigError(MODELS, f"{message} ({origin})")
        own_settings[model] = {}
        for name, value in table.items():
            if name in (PATH, ALIASES):
                continue
            if name not in known or name in NOT_OF_ONE:
                names = [*sorted(known.keys() - NOT_OF_ONE), PATH, ALIASES]
                problem = _message(unknown_setting(name, names))
                raise ConfigError(MODELS, f"{model}.{name}: {problem} ({origin})")
            if name not in over:
                own_settings[model][name] = _natural(known[name], value)
        for alias in table.get(ALIASES, ()):
            if aliases.setdefault(alias, model) != model:
                message = f"{alias!r} is an alias of two models, {aliases[alias]} and {model}"
                raise ConfigError(MODELS, f"{message} ({origin})")
    presets = Presets(settings, own_settings, aliases)
    for model in own_settings:
        try:
            presets.config_of(model, "-")
        except ConfigError as error:
            raise ConfigError(MODELS, f"{model}.{error} ({origin})") from None
    return presets


def _check_aliases(
    presets: Presets,
    configs: EngineConfig | Mapping[str, EngineConfig],
    given: Mapping[str, Given],
) -> None:
    for alias in presets.aliases:
        problem = ""
        if not isinstance(configs, EngineConfig) and (
            alias in configs or alias in presets.of_models
        ):
            problem = "is the name of a model, too"
        elif not re.fullmatch(MODEL_NAME, alias):
            problem = "is no name, which has letters, digits, ._- only"
        if problem:
            raise ConfigError(
                MODELS, f"the alias {alias!r:.100} {problem} ({given[MODELS].origin})"
            )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _natural(setting: Setting, value: Any) -> Any:
    """A value of TOML as the setting has it: whole numbers are numbers, and a name may be one."""
    if type(value) is int and setting.kind is float:
        return float(value)
    if type(value) is int and str(value) in setting.names:
        return str(value)
    if setting.is_repeatable and isinstance(value, list) and all(map(_is_text, value)):
        return ",".join(value)
    return value


def _lines_of(text: str) -> dict[str, int]:
    """The number of the line where each key of the top level is, as far as it can be told."""
    lines: dict[str, int] = {}
    is_top = True
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(line):
            is_top = False
            lines.setdefault(match[1], number)
        elif is_top and (match := _KEY.match(line)):
            lines.setdefault(next(filter(None, match.groups())), number)
    return lines


def _made(kind: Any, given: Mapping[str, Given]) -> Any:
    names = (setting.name for setting in settings_of(kind))
    try:
        return kind(**{name: given[name].value for name in names if name in given})
    except ConfigError as error:
        raise _with_origin(error, given) from None


def _with_origin(error: ConfigError, given: Mapping[str, Given]) -> ConfigError:
    """The error, with the place of the setting that it names; a flag has its name already."""
    value = given.get(error.field)
    if value is None or value.is_flag:
        return error
    return ConfigError(error.field, f"{_message(error)} ({value.origin})")


def _message(error: ConfigError) -> str:
    return str(error).removeprefix(f"{error.field}: ")


def _check_together(
    given: Mapping[str, Given], address: ListenAddress, server: ServerSettings
) -> None:
    """Raises `ConfigError` for settings of different places that exclude each other."""
    for name in ("host", "port"):
        if server.uds is not None and name in given:
            message = f"a socket at a path ({given['uds'].origin}) has no {name}"
            raise ConfigError("uds", f"{message} ({given[name].origin}); leave one of them out")
    if server.metrics_port and server.metrics_port == address.port and server.uds is None:
        raise ConfigError("metrics_port", f"{address.port} is the port of the server; take another")


def schema() -> dict[str, Any]:
    """The JSON schema of the file of `--config`, as the mapping that TOML is."""
    properties: dict[str, Any] = {}
    for name, setting in settings_by_name().items():
        properties[name] = _schema_of(setting)
    text = {"type": "string", "minLength": 1}
    several = {"type": "array", "items": text, "minItems": 1}
    properties[MODEL] = {"description": properties[MODEL]["description"], "anyOf": [text, several]}
    of_engine = [known.name for known in settings_of(EngineConfig) if known.name not in NOT_OF_ONE]
    properties_of_model = {PATH: text, ALIASES: {"type": "array", "items": text}}
    table = {
        "type": "object",
        "properties": properties_of_model | {name: properties[name] for name in of_engine},
        "additionalProperties": False,
    }
    properties[MODELS] = {
        "description": "Several models: for each name a path or hub id, or a table with that,"
        " aliases and settings of its engine.",
        "type": "object",
        "propertyNames": {"pattern": f"^{MODEL_NAME}$"},
        "additionalProperties": {"anyOf": [text, table]},
        "minProperties": 1,
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "infer serve --config",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "not": {"required": [MODEL, MODELS]},
    }


def _schema_of(setting: Setting) -> dict[str, Any]:
    kinds = msgspec.json.schema(setting.annotation)
    one_of = [kind for kind in kinds.pop("anyOf", [kinds]) if kind.get("type") != "null"]
    if setting.takes_mapping:
        one_of.append({"type": "object"})
    if setting.is_repeatable:
        one_of.append({"type": "array", "items": {"type": "string", "minLength": 1}})
    if numbers := [int(name) for name in setting.names if name.isdecimal()]:
        one_of.append({"enum": numbers})
    schema = dict(one_of[0]) if len(one_of) == 1 else {"anyOf": one_of}
    schema["description"] = setting.help
    if setting.default is not None:
        schema["default"] = setting.default
    return schema


def read_again(
    flags: Mapping[str, Any], file: Path | None, before: ServerSettings
) -> tuple[ServerSettings, list[str]]:
    """The settings as variables and file have them now, of which a running server takes those that
    are live, and the names of the others that have changed. Raises `ConfigError`."""
    now = Configuration.read(flags, file).server
    live = {setting.name for setting in settings_of(ServerSettings) if setting.is_live}
    kept = {field.name: getattr(before, field.name) for field in fields(before)}
    changed = {name for name, value in kept.items() if getattr(now, name) != value}
    taken = {name: getattr(now, name) for name in changed & live}
    return ServerSettings(**{**kept, **taken}), sorted(changed - live)


def as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of `Configuration.rows` for programs."""
    return json.dumps(rows, indent=1)
