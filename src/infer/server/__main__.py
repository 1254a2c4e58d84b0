"""`python -m infer.server --model …`: what `infer serve` does, for process managers.

Errors of the start are one sentence on stderr and exit code 2; everything else is `options` and
`serve`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from infer.engine.process import HANG_S
from infer.errors import LoadError
from infer.server import serve
from infer.server.failures import REQUEST_TIMEOUT_S, WRITE_STALL_S
from infer.server.models import configs_of
from infer.server.options import UnknownParams, with_engine_options


@with_engine_options(leave_out=("model",))
def command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Folder, GGUF file or hub id; several: NAME=PATH, again and again.",
            metavar="[NAME=]PATH",
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = serve.DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="0 = any free one.")] = serve.DEFAULT_PORT,
    drain_timeout_s: Annotated[
        float, typer.Option(help="At SIGTERM: how long what runs may take to finish.", min=0)
    ] = serve.DRAIN_TIMEOUT_S,
    write_stall_s: Annotated[
        float, typer.Option(help="A client that takes nothing for so long is cancelled.", min=0.1)
    ] = WRITE_STALL_S,
    unknown_params: Annotated[
        UnknownParams, typer.Option(help="Fields of a body that nobody knows.")
    ] = UnknownParams.REFUSE,
    request_timeout_s: Annotated[
        float, typer.Option(help="An answer that is not complete by then is given up.", min=0.1)
    ] = REQUEST_TIMEOUT_S,
    hang_s: Annotated[
        float, typer.Option(help="A step of the engine that takes longer is a hang.", min=1)
    ] = HANG_S,
    load_on_first_use: Annotated[
        bool, typer.Option("--load-on-first-use", help="Of several models: not at the start.")
    ] = False,
    idle_unload_s: Annotated[
        float | None,
        typer.Option(help="Of several: one that nobody uses for so long is unloaded.", min=0.1),
    ] = None,
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API."""
    serve.serve_config(
        configs_of(model or [], settings),
        host,
        port,
        drain_timeout_s=drain_timeout_s,
        write_stall_s=write_stall_s,
        unknown_params=unknown_params,
        request_timeout_s=request_timeout_s,
        in_thread=engine_thread,
        hang_s=hang_s,
        load_on_first_use=load_on_first_use,
        idle_unload_s=idle_unload_s,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(arguments, standalone_mode=True)
    except LoadError as error:
        print(f"python -m infer.server: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        return int(end.code or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
