"""Command-line options made from `EngineConfig`: one per field.

Names, help and choices come from the dataclass, so a new setting is an option at once and no
default is written twice; values are checked by the dataclass itself. An option that is not given
is not in the result. Used by the `infer` command and by `python -m infer.server`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from infer.config import EngineConfig


def with_engine_options(
    *, leave_out: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """For a typer command: in the place of its parameter `settings` there is an option per field;
    the command gets those that were given, as `settings: dict[str, Any]`."""
    fields = {
        spec.name: spec for spec in dataclasses.fields(EngineConfig) if spec.name not in leave_out
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**arguments: Any) -> None:
            options = {name: arguments.pop(name) for name in fields}
            settings = {name: value for name, value in options.items() if value is not None}
            command(**arguments, settings=settings)

        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "settings"
        ]
        added = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_typer_option(spec)
            )
            for name, spec in fields.items()
        ]
        # What typer looks at.
        called.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in [*own, *added]}
        return called

    return decorate


def _typer_option(spec: dataclasses.Field[Any]) -> Any:
    kind = next(
        kind for kind in (bool, int, float, str) if str(spec.type).startswith(kind.__name__)
    )
    help, choices = str(spec.metadata["help"]), spec.metadata.get("one_of")
    if choices:
        help = f"{help} One of {', '.join(choices)}."
    if spec.default is not None:
        help = f"{help} (default: {spec.default})"
    option = typer.Option(
        help=help,
        metavar=spec.name.rpartition("_")[2].upper() if kind is not bool else None,
        rich_help_panel="Engine",
        show_default=False,
    )
    return Annotated[kind | None, option]
