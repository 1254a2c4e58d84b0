"""`infer serve`: the command line of the server."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import typer

from infer.cli.options import ListedOptions, Model, with_engine_options, with_options
from infer.config import DEFAULT_HOST, DEFAULT_PORT
from infer.errors import ConfigError
from infer.replicas.spawned import EarlyProcess
from infer.server.early_listener import listening
from infer.server.observe.logs import log_on_stderr
from infer.server.served_models import configs_of, names_of
from infer.server.settings import ServerSettings
from infer.signals import ended_by_signals, open_standard_streams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(cls=ListedOptions)
@with_options(ServerSettings, "server", "Server")
@with_engine_options(leave_out=("model",))
def serve(
    context: typer.Context,
    model: Model = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Folder, GGUF file, package:NAME or hub id; for several models behind one address,"
            " repeat it as NAME=PATH.",
            metavar="[NAME=]PATH",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="Port to listen on; 0 = any free port.")] = DEFAULT_PORT,
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    server: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve one model, or several, with OpenAI's API."""
    if model is not None and models:
        raise ConfigError("model", "is given twice: as an argument and with --model")
    chosen = ServerSettings(**server)
    configs = configs_of(models or ([] if model is None else [model]), settings)
    open_standard_streams()
    with contextlib.ExitStack() as held:
        held.enter_context(ended_by_signals())
        early: EarlyProcess | None = context.obj  # started by `cli.entry`
        if early is None and not (engine_thread or chosen.load_on_first_use):
            early = held.enter_context(EarlyProcess())
        held.enter_context(log_on_stderr(chosen.log_format))
        listener = held.enter_context(listening(chosen, host, port, names_of(configs)))
        # These imports take as long as half of those of the engine process.
        from infer.server.serve import serve_config

        serve_config(configs, chosen, in_thread=engine_thread, early=early, listener=listener)
