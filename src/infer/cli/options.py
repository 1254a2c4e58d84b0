"""Command-line options made from a dataclass of settings, as `EngineConfig`: one per field.

Names, help and choices come from the dataclass, so a new setting is an option at once and no
default is written twice; values are checked by the dataclass itself. An option that is not given
is not in the result.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from infer.config import EngineConfig, Setting, settings_of

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

Model = Annotated[
    str | None,
    typer.Argument(
        help="Folder of a checkpoint, GGUF file or hub id; default: the model that ships."
    ),
]


def with_options(
    config: Any, parameter: str, panel: str, *, leave_out: tuple[str, ...] = ()
) -> Decorator:
    """For a typer command: in the place of its parameter of this name there is an option per
    field; the command gets those that were given, as a `dict[str, Any]`."""
    settings = [each for each in settings_of(config) if each.name not in leave_out]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            options = {each.name: arguments.pop(each.name) for each in settings}
            given = {name: value for name, value in options.items() if value is not None}
            command(**arguments, **{parameter: given})

        # What typer looks at.
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        del parameters[parameter]
        for each in settings:
            kind, option = inspect.Parameter.KEYWORD_ONLY, _typer_option(each, panel)
            parameters[each.name] = inspect.Parameter(
                each.name, kind, default=None, annotation=option
            )
        called.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        called.__annotations__ = {name: kept.annotation for name, kept in parameters.items()}
        return called

    return decorate


with_engine_options = functools.partial(with_options, EngineConfig, "settings", "Engine")


def _typer_option(setting: Setting, panel: str) -> Any:
    help = setting.help
    if setting.names:
        help = f"{help} One of {', '.join(setting.names)}."
    if setting.default is not None:
        help = f"{help} (default: {setting.default})"
    option = typer.Option(
        help=help,
        metavar=setting.name.rpartition("_")[2].upper() if setting.kind is not bool else None,
        rich_help_panel=panel,
        show_default=False,
    )
    return Annotated[setting.kind | None, option]
