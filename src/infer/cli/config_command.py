"""`infer config`: the settings with which a server would start, and the schema of their file"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from infer.cli.configuration import Configuration, as_json, schema
from infer.cli.options import ListedOptions, Model
from infer.cli.plain import visible
from infer.cli.serving import ConfigFile, Models, flags_of, server_options

app = typer.Typer(
    help="Show the settings of a server, and where each is from.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(cls=ListedOptions)
@server_options
def show(
    model: Model = None,
    models: Models = None,
    config: ConfigFile = None,
    as_json_text: Annotated[bool, typer.Option("--json", help="As JSON on stdout.")] = False,
    *,
    address: dict[str, Any],
    server: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Check the settings of infer serve, and say where each is from: a flag, a variable, a file."""
    configuration = Configuration.read(flags_of(model, models, address, server, settings), config)
    rows = configuration.rows()
    if as_json_text:
        print(as_json(rows))
        return
    lines = [("setting", "value", "from")]
    for row in rows:
        value = row["value"]
        text = value if isinstance(value, str) else json.dumps(value)
        lines.append((row["name"], "-" if value is None else visible(text), visible(row["from"])))
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for name, text, origin in lines:  # as long as they are: nothing is cut
        print(f"{name:{widths[0]}}  {text:{widths[1]}}  {origin}")


@app.command("schema")
def show_schema() -> None:
    """Print the JSON schema of the file of --config."""
    print(json.dumps(schema(), indent=1))
