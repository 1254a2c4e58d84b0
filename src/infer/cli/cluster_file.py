"""`infer cluster`: the file for `serve deploy`, checked before a cluster sees it; needs no Ray"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from infer.cluster.cluster_settings import settings_of_models
from infer.errors import ConfigError

app = typer.Typer(help="Serve on a Ray cluster.", no_args_is_help=True, add_completion=False)

Pairs = Annotated[
    list[str] | None,
    typer.Argument(
        help="KEY=VALUE, as for `serve run infer.cluster:app`: replicas, fronts, cpus, gpus and the"
        " options of infer serve, such as model=PATH replicas=1-3 fronts=2."
    ),
]


@app.callback()
def _group() -> None:
    pass


@app.command("yaml")
def write_yaml(
    pairs: Pairs = None,
    name: Annotated[str, typer.Option(help="Name of the application.")] = "infer",
    host: Annotated[str, typer.Option(help="Address at which Ray Serve listens.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port at which Ray Serve listens.")
    ] = 8000,
) -> None:
    """Print the file for `serve deploy`."""
    arguments = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise ConfigError("KEY=VALUE", f"{pair!r} is not of this form, such as replicas=1-3")
        arguments[key] = value
    settings_of_models(arguments)
    # Strings in JSON are strings in YAML.
    lines = [
        "proxy_location: EveryNode",
        "http_options:",
        f"  host: {json.dumps(host)}",
        f"  port: {port}",
        "applications:",
        f"  - name: {json.dumps(name)}",
        "    route_prefix: /",
        "    import_path: infer.cluster:app",
        "    args:" if arguments else "    args: {}",
        *(f"      {key}: {json.dumps(value)}" for key, value in arguments.items()),
    ]
    print("\n".join(lines))
