"""`infer serve`: the command line of the server."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from infer.cli.configuration import FILE_VARIABLE, MODEL, Configuration, read_again
from infer.cli.options import ListedOptions, Model, with_engine_options, with_options
from infer.cli.serve_screen import screen_of
from infer.errors import ConfigError
from infer.replicas.spawned import EarlyProcess
from infer.server.early_listener import listening
from infer.server.observe.logs import log_on_stderr
from infer.server.served_models import names_of
from infer.server.settings import ListenAddress, ServerSettings
from infer.signals import Hangup, ended_by_signals

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Folder, GGUF file, package:NAME or hub id; for several models behind one address,"
        " repeat it as NAME=PATH.",
        metavar="[NAME=]PATH",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="File of settings (TOML). Flags win over INFER_… variables, and those over the file;"
        " see infer config.",
        envvar=FILE_VARIABLE,
        metavar="FILE",
    ),
]


def flags_of(
    model: str | None, models: list[str] | None, *groups: dict[str, Any]
) -> dict[str, Any]:
    """The settings that a command line has chosen. Raises `ConfigError`."""
    if model is not None and models:
        raise ConfigError(MODEL, "is given twice: as an argument and with --model")
    chosen = models or ([] if model is None else [model])
    flags = {name: value for group in groups for name, value in group.items()}
    return {**flags, **({MODEL: chosen} if chosen else {})}


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a typer command the options of a server: `address`, `server` and `settings`."""
    for decorate in (
        with_engine_options(leave_out=(MODEL,)),
        with_options(ServerSettings, "server", "Server"),
        with_options(ListenAddress, "address", "Server"),
    ):
        command = decorate(command)
    return command


@app.command(cls=ListedOptions)
@server_options
def serve(
    context: typer.Context,
    model: Model = None,
    models: Models = None,
    config: ConfigFile = None,
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    address: dict[str, Any],
    server: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve one model, or several, with OpenAI's API."""
    flags = flags_of(model, models, address, server, settings)
    with contextlib.ExitStack() as held:
        hangup = held.enter_context(Hangup().ignored_meanwhile())
        held.enter_context(ended_by_signals())
        configuration = Configuration.read(flags, config)
        chosen, configs = configuration.server, configuration.configs
        early: EarlyProcess | None = context.obj  # started by `cli.entry`
        if early is None and not (engine_thread or chosen.load_on_first_use):
            early = held.enter_context(EarlyProcess())
        held.enter_context(
            log_on_stderr(chosen.log_format, chosen.log_level, is_quiet=chosen.quiet)
        )
        at, names = configuration.address, names_of(configs)
        listener = held.enter_context(listening(chosen, at.host, at.port, names))
        screen = held.enter_context(screen_of(chosen.log_format, names))
        # These imports take as long as half of those of the engine process.
        from infer.server.serve import serve_config

        serve_config(
            configs,
            chosen,
            in_thread=engine_thread,
            early=early,
            listener=listener,
            read_again=functools.partial(read_again, flags, config),
            hangup=hangup,
            screen=screen,
            presets=configuration.presets,
        )
