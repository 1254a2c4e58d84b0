"""`infer keys`: make, list and revoke API keys of a server; a running server notices at once."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from infer.cli.configuration import refuse_secrets, variable_of
from infer.cli.options import ListedOptions, with_options
from infer.cli.plain import plain
from infer.readable_text import readable
from infer.server.tenancy.keys import KeyLimits, Keys

app = typer.Typer(
    help="Make, list and revoke API keys.", no_args_is_help=True, add_completion=False
)

File = Annotated[Path, typer.Option(help="The file that infer serve --api-keys is given.")]
Name = Annotated[str, typer.Argument(help="Owner of the key, for lists, logs and metrics.")]
DEFAULT = Path("keys.json")


def _create(name: Name, file: File = DEFAULT, *, limits: dict[str, Any]) -> None:
    """Make a key and print it. The key itself is not stored and cannot be shown again."""
    print(Keys(file, must_exist=False).create(readable(name), KeyLimits(**limits)))


app.command("create", cls=ListedOptions)(with_options(KeyLimits, "limits", "Limits")(_create))


@app.command("list")
def list_keys(file: File = DEFAULT) -> None:
    """List the keys and their limits."""
    table = Table("name", "id", "created", "limits", box=None, padding=(0, 2, 0, 0))
    for key in Keys(file).all():
        created = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        given = {n: v for n, v in dataclasses.asdict(key.limits).items() if v not in (None, False)}
        limits = ", ".join(name if v is True else f"{name}={v}" for name, v in given.items())
        table.add_row(*map(plain, (key.name, key.id, created, limits)))
    Console(highlight=False, markup=False).print(table)


@app.command()
def revoke(name: Name, file: File = DEFAULT) -> None:
    """Remove a key. It is refused from now on, and its running requests are ended."""
    Keys(file).revoke(readable(name))


@app.command()
def purge(
    context: typer.Context,
    file: File = DEFAULT,
    sessions: Annotated[
        str | None,
        typer.Option(
            help="Database URL of the sessions, as infer serve is given it; one with a password as"
            " INFER_SESSIONS.",
            envvar=variable_of("sessions"),
        ),
    ] = None,
) -> None:
    """Delete the sessions of keys that are no longer in the file; nobody can reach them."""
    from infer.server.sessions.routes import default_url
    from infer.server.sessions.store import SessionStore

    source = context.get_parameter_source("sessions")
    if source is not None and source.name == "COMMANDLINE":
        refuse_secrets({"sessions": sessions})
    keys = Keys(file).all()
    store = SessionStore(sessions or default_url())
    try:
        print(f"{store.purge([key.id for key in keys])} sessions deleted")
    finally:
        store.close()
