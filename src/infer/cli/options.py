"""Command-line options made from a dataclass of settings, as `EngineConfig`: one per field.

Names, help and choices come from the dataclass, so a new setting is an option at once and no
default is written twice; values are checked by the dataclass itself. An option that is not given
is not in the result. Used by the `infer` command and by `python -m infer.server`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from infer.config import EngineConfig
from infer.server.settings import ServerSettings

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

# Where a server listens, and what it serves; for every command that starts one.
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0 = any free one.")]
Served = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        help="Folder, GGUF file or hub id; several behind one address: NAME=PATH, again and again.",
        metavar="[NAME=]PATH",
    ),
]


def with_options(
    config: type[Any], parameter: str, panel: str, *, leave_out: tuple[str, ...] = ()
) -> Decorator:
    """For a typer command: in the place of its parameter of this name there is an option per
    field; the command gets those that were given, as a `dict[str, Any]`."""
    fields = [spec for spec in dataclasses.fields(config) if spec.name not in leave_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            options = {spec.name: arguments.pop(spec.name) for spec in fields}
            settings = {name: value for name, value in options.items() if value is not None}
            command(**arguments, **{parameter: settings})

        # What typer looks at.
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters[parameter]
        for spec in fields:
            kind, option = inspect.Parameter.KEYWORD_ONLY, _typer_option(spec, panel)
            parameters[spec.name] = inspect.Parameter(
                spec.name, kind, default=None, annotation=option
            )
        called.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        called.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        return called

    return decorate


with_engine_options = functools.partial(with_options, EngineConfig, "settings", "Engine")
with_server_options = with_options(ServerSettings, "server", "Server")


def _typer_option(spec: dataclasses.Field[Any], panel: str) -> Any:
    kinds = (bool, int, float, str)
    kind = next(kind for kind in kinds if str(spec.type).startswith(kind.__name__))
    help, choices = str(spec.metadata["help"]), spec.metadata.get("one_of")
    if choices:
        help = f"{help} One of {', '.join(choices)}."
    if spec.default is not None:
        help = f"{help} (default: {spec.default})"
    option = typer.Option(
        help=help,
        metavar=spec.name.rpartition("_")[2].upper() if kind is not bool else None,
        rich_help_panel=panel,
        show_default=False,
    )
    return Annotated[kind | None, option]
