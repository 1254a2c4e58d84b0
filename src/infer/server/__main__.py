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
from infer.server.options import Host, Port, Served, with_engine_options, with_server_options
from infer.server.settings import DEFAULT_HOST, DEFAULT_PORT, ServerSettings


@with_server_options
@with_engine_options(leave_out=("model",))
def command(
    models: Served = None,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    engine_thread: Annotated[bool, typer.Option("--engine-thread", hidden=True)] = False,
    *,
    server: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Serve a model with OpenAI's API."""
    configs, chosen = configs_of(models or [], settings), ServerSettings(**server)
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
