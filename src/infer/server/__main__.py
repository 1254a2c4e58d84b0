"""`python -m infer.server --model …`: what `infer serve` does, for process managers.

Errors of the start are one sentence on stderr and exit code 2; everything else is `options` and
`serve`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from infer.errors import LoadError
from infer.server import serve
from infer.server.models import configs_of
from infer.server.options import with_engine_options, with_server_options
from infer.server.settings import ServerSettings


@with_server_options
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
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    server: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API."""
    configs, chosen = configs_of(model or [], settings), ServerSettings(**server)
    serve.serve_config(configs, chosen, host, port, in_thread=engine_thread)


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
