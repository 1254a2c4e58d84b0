"""`python -m infer.server --model …`: what `infer serve` does, for process managers.

Errors of the start are one sentence on stderr and exit code 2; everything else is `options` and
`serve`.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from infer.config import EngineConfig
from infer.errors import LoadError
from infer.server import serve
from infer.server.failures import WRITE_STALL_S
from infer.server.options import UnknownParams, with_engine_options


@with_engine_options()
def command(
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
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API."""
    config = EngineConfig.from_kwargs(**settings)
    serve.serve_config(
        config,
        host,
        port,
        drain_timeout_s=drain_timeout_s,
        write_stall_s=write_stall_s,
        unknown_params=unknown_params,
        in_thread=engine_thread,
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
